package io.github.omnigrpc;

import io.github.omnigrpc.v1.Artifact;
import io.github.omnigrpc.v1.DecodeProgress;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.Queued;
import io.github.omnigrpc.v1.Started;
import io.github.omnigrpc.v1.StepProgress;
import io.github.omnigrpc.v1.Warning;

/** Follows one job. Called in the thread that waits for it, in order; an exception cancels the job. */
public interface JobListener {
    /** Every event, before the method of its kind. */
    default void onEvent(JobEvent event) {}

    /** It waits, or moved in the queue. */
    default void onQueued(Queued queued) {}

    /** It left the queue. */
    default void onStarted(Started started) {}

    /** A denoise step is done. */
    default void onStep(StepProgress step) {}

    /** Latents are being turned into media. */
    default void onDecode(DecodeProgress progress) {}

    /** An output is stored. */
    default void onArtifact(Artifact artifact) {}

    /** Something was decided for the caller. */
    default void onWarning(Warning warning) {}

    /** Calls the methods of one event. */
    default void accept(JobEvent event) {
        onEvent(event);
        switch (event.getEventCase()) {
            case QUEUED:
                onQueued(event.getQueued());
                break;
            case STARTED:
                onStarted(event.getStarted());
                break;
            case STEP_PROGRESS:
                onStep(event.getStepProgress());
                break;
            case DECODE_PROGRESS:
                onDecode(event.getDecodeProgress());
                break;
            case ARTIFACT_READY:
                onArtifact(event.getArtifactReady().getArtifact());
                break;
            case WARNING:
                onWarning(event.getWarning());
                break;
            default: // kinds without a method of their own
        }
    }
}
