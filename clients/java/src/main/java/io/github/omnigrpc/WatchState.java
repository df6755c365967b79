package io.github.omnigrpc;

import io.github.omnigrpc.v1.Artifact;
import io.github.omnigrpc.v1.ArtifactChunk;
import io.github.omnigrpc.v1.ArtifactDelivery;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.WatchJobRequest;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/** The position in one job's events, and the output bytes received with them. Does no input or output. */
final class WatchState {
    private final Reconnect reconnect;
    private final ArtifactDelivery delivery;
    private final Map<String, PartialArtifact> files = new HashMap<>();
    private volatile String jobId;
    private volatile long afterSeq;
    private volatile JobEvent last;
    private boolean connected;
    private int attempt;
    private int rewind;

    /** A job's events after {@code afterSeq}. {@code jobId} may be empty: the first event sets it. */
    WatchState(Reconnect reconnect, ArtifactDelivery delivery, String jobId, long afterSeq) {
        this.reconnect = reconnect;
        this.delivery = delivery;
        this.jobId = jobId;
        this.afterSeq = afterSeq;
    }

    String jobId() {
        return jobId;
    }

    long afterSeq() {
        return afterSeq;
    }

    /** True once a message has arrived. */
    boolean connected() {
        return connected;
    }

    /** True once the event that ends the job has arrived. */
    boolean ended() {
        return last != null;
    }

    Optional<JobEvent> last() {
        return Optional.ofNullable(last);
    }

    /** Takes the next message. True if it is an event that the caller has not seen and can be told. */
    boolean accept(JobEvent event) {
        jobId = event.getJobId();
        connected = true;
        attempt = 0;
        switch (event.getEventCase()) {
            case ARTIFACT_CHUNK:
                addChunk(event.getArtifactChunk());
                return false;
            case COMPLETED:
            case FAILED:
            case CANCELLED:
                last = event;
                break;
            default:
        }
        if (event.getSeq() <= afterSeq) {
            return false; // a heartbeat, or seen before the connection was lost
        }
        afterSeq = event.getSeq();
        if (event.hasArtifactReady()) {
            partial(event.getArtifactReady().getArtifact());
        }
        return event.getEventCase() != JobEvent.EventCase.EVENT_NOT_SET; // of a newer server
    }

    /** Asks for the events after the last one that was seen. */
    WatchJobRequest request() {
        return WatchJobRequest.newBuilder()
                .setJobId(jobId)
                .setAfterSeq(afterSeq - rewind)
                .setDelivery(delivery)
                .build();
    }

    /** Whether to ask again for the last event that was seen, to learn how the job ended: no event follows it. */
    boolean rewinds(CallFailure ended) {
        if (connected || ended != CallFailure.ENDED_EARLY || afterSeq == 0 || rewind > 0) {
            return false;
        }
        rewind = 1;
        return true;
    }

    /** How long to wait before watching again, after a call that ended too early. Throws if it is pointless. */
    Duration lost(CallFailure ended) {
        if (!connected) {
            throw ended.error();
        }
        if (ended.code() == Status.Code.NOT_FOUND) {
            String message =
                    "the connection was lost, and the server no longer knows job "
                            + jobId
                            + " because it has restarted; send the request again";
            throw OmniException.of(Status.Code.UNAVAILABLE, "JOB_LOST", message)
                    .metadata(position())
                    .cause(ended.error())
                    .build();
        }
        if (!ended.lost() || attempt >= reconnect.attempts()) {
            throw finalFailure(ended);
        }
        Duration delay = reconnect.delay(attempt++);
        Duration asked = ended.error().retryAfter().orElse(Duration.ZERO);
        return asked.compareTo(delay) > 0 ? asked : delay;
    }

    /** Why the job has no result; empty if it succeeded or has not ended. */
    Optional<OmniException> error() {
        JobEvent end = last;
        if (end == null || end.hasCompleted()) {
            return Optional.empty();
        }
        if (end.hasFailed()) {
            return Optional.of(CallFailure.decode(end.getFailed().getStatus()).job(jobId).build());
        }
        String message =
                String.format(
                        "job %s was cancelled after %d steps: %s",
                        jobId, end.getCancelled().getCompletedSteps(), end.getCancelled().getReason());
        return Optional.of(OmniException.of(Status.Code.CANCELLED, "JOB_CANCELLED", message).job(jobId).build());
    }

    /** The outputs of a job that succeeded, complete or not. */
    List<PartialArtifact> outputs() {
        List<PartialArtifact> found = new ArrayList<>();
        last().ifPresent(end -> end.getCompleted().getArtifactsList().forEach(one -> found.add(partial(one))));
        return found;
    }

    private PartialArtifact partial(Artifact artifact) {
        return files.computeIfAbsent(artifact.getArtifactId(), id -> new PartialArtifact(artifact));
    }

    private void addChunk(ArtifactChunk chunk) {
        PartialArtifact file = files.get(chunk.getArtifactId());
        if (file == null) {
            String message = "bytes of artifact " + chunk.getArtifactId() + " arrived before it was announced";
            throw OmniException.of(Status.Code.INTERNAL, "PROTOCOL_ERROR", message).metadata(position()).build();
        }
        file.add(chunk);
    }

    private Map<String, String> position() {
        return Map.of("job_id", jobId, "after_seq", Long.toString(afterSeq));
    }

    private OmniException finalFailure(CallFailure ended) {
        OmniException.Builder failure = ended.error().toBuilder().metadata(position());
        if (ended.timedOut()) {
            return failure.message("the deadline of the call passed after event " + afterSeq + " of job " + jobId)
                    .build();
        }
        if (ended.lost()) {
            String message =
                    String.format(
                            "lost the stream and could not reconnect in %d attempts: %s; the job may still be running,"
                                    + " resume with watchJob(\"%s\", %d)",
                            attempt, ended.error().getMessage(), jobId, afterSeq);
            return OmniException.of(Status.Code.UNAVAILABLE, "STREAM_LOST", message)
                    .metadata(position())
                    .cause(ended.error())
                    .build();
        }
        return failure.build();
    }
}
