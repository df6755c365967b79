import io.github.omnigrpc.GenerationResult;
import io.github.omnigrpc.JobListener;
import io.github.omnigrpc.MediaSource;
import io.github.omnigrpc.OmniClient;
import io.github.omnigrpc.Output;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.Preview;
import io.github.omnigrpc.v1.StepProgress;
import io.github.omnigrpc.v1.UploadAssetResponse;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;

/** Behaviours that are about what is made. */
final class Results {
    private Results() {}

    static Map<String, Object> run(String name, OmniClient client, Input input) {
        switch (name) {
            case "generate":
                return generate(client, input);
            case "progress":
                return progress(client, input);
            case "previews":
                return previews(client, input);
            case "unset":
                return unset(client, input);
            case "edit":
                return edit(client, input);
            case "upload":
                return upload(client, input);
            case "download":
                return download(client, input);
            case "corrupt":
                return Said.of("error", Said.error(() -> client.download(input.text("artifact_id"))));
            default:
                return null;
        }
    }

    private static Map<String, Object> generate(OmniClient client, Input input) {
        GenerationResult result = client.generate(input.request().build());
        return Said.of(
                "job_id", result.jobId(),
                "outputs", Said.outputs(result),
                "steps", result.effective().getSteps(),
                "width", result.effective().getWidth(),
                "warnings", result.warnings().size());
    }

    private static Map<String, Object> progress(OmniClient client, Input input) {
        List<String> kinds = new ArrayList<>();
        List<List<Integer>> steps = new ArrayList<>();
        client.generate(input.request().build(), new JobListener() {
            @Override
            public void onEvent(JobEvent event) {
                kinds.add(Said.kind(event));
            }

            @Override
            public void onStep(StepProgress step) {
                steps.add(List.of(step.getStep(), step.getTotalSteps()));
            }
        });
        return Said.of("kinds", kinds, "steps", steps);
    }

    private static Map<String, Object> previews(OmniClient client, Input input) {
        List<Object> previews = new ArrayList<>();
        client.generate(input.request().previews(1).build(), new JobListener() {
            @Override
            public void onStep(StepProgress step) {
                for (Preview preview : step.getPreviewsList()) {
                    String sha256 = Said.sha256(preview.getData().toByteArray());
                    previews.add(
                            Said.of("step", step.getStep(), "mime_type", preview.getMimeType(), "sha256", sha256));
                }
            }
        });
        return Said.of("previews", previews);
    }

    private static Map<String, Object> unset(OmniClient client, Input input) {
        Output free = client.generate(input.request().build()).outputs().get(0);
        Output zero = client.generate(input.request().seed(0).build()).outputs().get(0);
        Output again = client.generate(input.request().seed(0).build()).outputs().get(0);
        List<Long> seeds =
                List.of(free.seed().orElseThrow(), zero.seed().orElseThrow(), again.seed().orElseThrow());
        return Said.of("seeds", seeds, "same", Arrays.equals(zero.data(), again.data()));
    }

    private static Map<String, Object> edit(OmniClient client, Input input) {
        UploadAssetResponse asset = client.upload(Path.of(input.text("image")));
        GenerationResult result = client.generate(input.edit(MediaSource.asset(asset)));
        return Said.of("asset_id", asset.getAssetId(), "outputs", Said.outputs(result));
    }

    private static Map<String, Object> upload(OmniClient client, Input input) {
        UploadAssetResponse asset = client.upload(Path.of(input.text("file")));
        return Said.of(
                "asset_id", asset.getAssetId(),
                "size_bytes", asset.getSizeBytes(),
                "sha256", Said.hex(asset.getSha256().toByteArray()));
    }

    private static Map<String, Object> download(OmniClient client, Input input) {
        Output output = client.download(input.text("artifact_id"));
        byte[] data = output.data();
        return Said.of("sha256", Said.sha256(data), "size_bytes", data.length);
    }
}
