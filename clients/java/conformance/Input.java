import com.google.gson.JsonObject;
import io.github.omnigrpc.EditRequest;
import io.github.omnigrpc.ImageRequest;
import io.github.omnigrpc.MediaSource;
import java.util.ArrayList;
import java.util.List;

/** What the program is asked. */
final class Input {
    private final JsonObject fields;

    Input(JsonObject fields) {
        this.fields = fields;
    }

    boolean has(String name) {
        return fields.has(name) && !fields.get(name).isJsonNull();
    }

    String text(String name) {
        return fields.get(name).getAsString();
    }

    long number(String name) {
        return fields.get(name).getAsLong();
    }

    double seconds(String name) {
        return fields.get(name).getAsDouble();
    }

    List<String> texts(String name) {
        List<String> found = new ArrayList<>();
        fields.getAsJsonArray(name).forEach(one -> found.add(one.getAsString()));
        return found;
    }

    /** The request of the input, which leaves unset what the input does not have. */
    ImageRequest.Builder request() {
        return request(text("prompt"));
    }

    ImageRequest.Builder request(String prompt) {
        ImageRequest.Builder request = ImageRequest.of(prompt).model(text("model"));
        if (has("width")) {
            request.width((int) number("width"));
        }
        if (has("height")) {
            request.height((int) number("height"));
        }
        if (has("steps")) {
            request.steps((int) number("steps"));
        }
        return has("seed") ? request.seed(number("seed")) : request;
    }

    EditRequest edit(MediaSource image) {
        EditRequest.Builder request = EditRequest.of(text("prompt"), image).model(text("model"));
        if (has("width")) {
            request.width((int) number("width"));
        }
        if (has("height")) {
            request.height((int) number("height"));
        }
        if (has("steps")) {
            request.steps((int) number("steps"));
        }
        return (has("seed") ? request.seed(number("seed")) : request).build();
    }
}
