import io.github.omnigrpc.FieldViolation;
import io.github.omnigrpc.GenerationResult;
import io.github.omnigrpc.OmniException;
import io.github.omnigrpc.Output;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.Model;
import java.math.BigInteger;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.stream.Collectors;

/** What the program says. */
final class Said {
    private Said() {}

    static Map<String, Object> of(Object... namesAndValues) {
        Map<String, Object> said = new LinkedHashMap<>();
        for (int i = 0; i < namesAndValues.length; i += 2) {
            said.put((String) namesAndValues[i], namesAndValues[i + 1]);
        }
        return said;
    }

    static List<Object> outputs(GenerationResult result) {
        return result.outputs().stream().map(Said::output).collect(Collectors.toList());
    }

    private static Map<String, Object> output(Output output) {
        Object seed = output.seed().isPresent() ? output.seed().getAsLong() : null;
        return of("mime_type", output.mimeType(), "sha256", sha256(output.data()), "seed", seed);
    }

    /** The error that an action ends with. */
    static Map<String, Object> error(Runnable action) {
        try {
            action.run();
        } catch (OmniException error) {
            Map<String, Object> fields = new LinkedHashMap<>();
            for (FieldViolation one : error.fieldViolations()) {
                fields.put(one.field(), one.description());
            }
            Double seconds = error.retryAfter().map(time -> time.toNanos() / 1e9).orElse(null);
            return of(
                    "code", error.code().name(),
                    "reason", error.reason(),
                    "fields", fields,
                    "retry_after", seconds,
                    "job_id", error.jobId());
        }
        throw new IllegalStateException("it did not fail");
    }

    static List<String> models(List<Model> models) {
        return models.stream().map(Model::getName).collect(Collectors.toList());
    }

    static String kind(JobEvent event) {
        return event.getEventCase().name().toLowerCase(Locale.ROOT);
    }

    static String sha256(byte[] data) {
        try {
            return hex(MessageDigest.getInstance("SHA-256").digest(data));
        } catch (NoSuchAlgorithmException impossible) {
            throw new IllegalStateException(impossible);
        }
    }

    static String hex(byte[] digest) {
        return String.format("%064x", new BigInteger(1, digest));
    }
}
