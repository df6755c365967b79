import io.github.omnigrpc.GenerationResult;
import io.github.omnigrpc.JobListener;
import io.github.omnigrpc.JobStream;
import io.github.omnigrpc.OmniClient;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.StepProgress;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/** Behaviours that are about a job's events and its end. */
final class Streams {
    private Streams() {}

    static Map<String, Object> run(String name, OmniClient client, Input input) throws InterruptedException {
        switch (name) {
            case "resume":
                try (JobStream stream = client.stream(input.request().build())) {
                    return follow(stream);
                }
            case "watch":
                try (JobStream stream = client.watchJob(input.text("job_id"), input.number("after_seq"))) {
                    return follow(stream);
                }
            case "cancel":
                return cancel(client, input);
            case "cancelled":
                return Said.of("error", Said.error(() -> client.generate(input.request().build())));
            case "failure":
                Duration run = duration(input.seconds("run_timeout"));
                return Said.of("error", Said.error(() -> client.generate(input.request().runTimeout(run).build())));
            case "deadline":
                Duration limit = duration(input.seconds("timeout"));
                return Said.of("error", Said.error(() -> client.generate(input.request().timeout(limit).build())));
            default:
                return null;
        }
    }

    private static Map<String, Object> follow(JobStream stream) {
        List<Long> seqs = new ArrayList<>();
        List<String> kinds = new ArrayList<>();
        while (stream.hasNext()) {
            JobEvent event = stream.next();
            seqs.add(event.getSeq());
            kinds.add(Said.kind(event));
        }
        GenerationResult result = stream.result();
        return Said.of("seqs", seqs, "kinds", kinds, "outputs", Said.outputs(result));
    }

    private static Map<String, Object> cancel(OmniClient client, Input input) throws InterruptedException {
        AtomicReference<String> job = new AtomicReference<>();
        CountDownLatch stepped = new CountDownLatch(1);
        CompletableFuture<GenerationResult> future =
                client.generateAsync(input.request().build(), new JobListener() {
                    @Override
                    public void onEvent(JobEvent event) {
                        job.set(event.getJobId());
                    }

                    @Override
                    public void onStep(StepProgress step) {
                        stepped.countDown();
                    }
                });
        if (!stepped.await(50, TimeUnit.SECONDS)) {
            throw new IllegalStateException("it made no step");
        }
        future.cancel(true);
        return Said.of("job_id", job.get());
    }

    private static Duration duration(double seconds) {
        return Duration.ofNanos(Math.round(seconds * 1e9));
    }
}
