import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import io.github.omnigrpc.ClientBuilder;
import io.github.omnigrpc.OmniClient;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Map;

/** Shows the behaviours of clients/conformance/README.md: JSON in, JSON out. */
public final class Conformance {
    private Conformance() {}

    public static void main(String[] args) throws Exception {
        JsonObject input =
                JsonParser.parseReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)).getAsJsonObject();
        Map<String, Object> output = run(new Input(input));
        Gson gson = new GsonBuilder().serializeNulls().create();
        new PrintStream(System.out, true, StandardCharsets.UTF_8).println(gson.toJson(output));
    }

    private static Map<String, Object> run(Input input) throws Exception {
        String name = input.text("behaviour");
        if (name.equals("tls")) {
            return Refusals.tls(input);
        }
        ClientBuilder builder = builder(input, "ca");
        if (name.equals("token")) {
            return Refusals.token(input, builder);
        }
        if (input.has("token")) {
            builder.token(input.text("token"));
        }
        try (OmniClient client = builder.build()) {
            Map<String, Object> output = Results.run(name, client, input);
            output = output != null ? output : Streams.run(name, client, input);
            output = output != null ? output : Refusals.run(name, client, input);
            if (output == null) {
                throw new IllegalArgumentException("there is no behaviour " + name);
            }
            return output;
        }
    }

    static ClientBuilder builder(Input input, String authority) {
        ClientBuilder builder = OmniClient.builder(input.text("address"));
        return input.has(authority) ? builder.ca(Path.of(input.text(authority))) : builder;
    }
}
