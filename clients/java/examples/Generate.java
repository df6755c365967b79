import io.github.omnigrpc.GenerationResult;
import io.github.omnigrpc.ImageRequest;
import io.github.omnigrpc.JobListener;
import io.github.omnigrpc.OmniClient;
import io.github.omnigrpc.OmniException;
import io.github.omnigrpc.v1.StepProgress;
import java.nio.file.Path;

/** Makes an image, with its progress: {@code Generate localhost:50051 "a red circle" out.png}. */
public final class Generate {
    private Generate() {}

    public static void main(String[] args) {
        ImageRequest request = ImageRequest.of(args[1]).seed(7).build();
        JobListener progress = new JobListener() {
            @Override
            public void onStep(StepProgress step) {
                System.out.println(step.getStep() + " of " + step.getTotalSteps());
            }
        };
        try (OmniClient client = OmniClient.connect(args[0])) {
            GenerationResult result = client.generate(request, progress);
            result.outputs().get(0).save(Path.of(args[2]));
            System.out.println("saved " + args[2] + ", seed " + result.effective().getSeeds(0));
        } catch (OmniException error) {
            System.err.println(error.code() + " " + error.reason() + ": " + error.getMessage());
            System.exit(1);
        }
    }
}
