import io.github.omnigrpc.ClientBuilder;
import io.github.omnigrpc.OmniClient;
import java.util.Iterator;
import java.util.List;
import java.util.Map;

/** Behaviours that are about what is refused, and tried again. */
final class Refusals {
    private Refusals() {}

    static Map<String, Object> run(String name, OmniClient client, Input input) {
        switch (name) {
            case "fields":
                return Said.of("error", Said.error(() -> client.generate(input.request().build())));
            case "names":
                String format = input.text("output_format");
                return Said.of(
                        "error", Said.error(() -> client.generate(input.request().outputFormat(format).build())));
            case "idempotent":
                return idempotent(client, input);
            case "retry":
                return Said.of("models", Said.models(client.listModels()));
            case "retry_info":
                return Said.of("job_id", client.createJob(input.request().build()).getJobId());
            default:
                return null;
        }
    }

    private static Map<String, Object> idempotent(OmniClient client, Input input) {
        String key = input.text("request_id");
        String first = client.createJob(input.request().requestId(key).build()).getJobId();
        String second = client.createJob(input.request().requestId(key).build()).getJobId();
        Object error =
                Said.error(
                        () -> client.createJob(input.request(input.text("other_prompt")).requestId(key).build()));
        return Said.of("job_ids", List.of(first, second), "error", error);
    }

    static Map<String, Object> token(Input input, ClientBuilder builder) {
        Iterator<String> tokens = input.texts("tokens").iterator();
        try (OmniClient client = builder.token(tokens::next).build()) {
            Object error = Said.error(client::listModels);
            return Said.of("error", error, "models", Said.models(client.listModels()));
        }
    }

    static Map<String, Object> tls(Input input) {
        String token = input.text("token");
        List<String> models;
        try (OmniClient client = Conformance.builder(input, "ca").token(token).build()) {
            models = Said.models(client.listModels());
        }
        Object error;
        try (OmniClient client = Conformance.builder(input, "other_ca").token(token).build()) {
            error = Said.error(client::listModels);
        }
        Object refused = Said.error(() -> OmniClient.builder("server.example:50051").token(token).build().close());
        return Said.of("models", models, "error", error, "refused", refused);
    }
}
