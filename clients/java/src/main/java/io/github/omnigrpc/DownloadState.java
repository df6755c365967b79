package io.github.omnigrpc;

import io.github.omnigrpc.v1.DownloadArtifactRequest;
import io.github.omnigrpc.v1.DownloadArtifactResponse;
import io.grpc.Status;
import java.time.Duration;

/** The state of one download. Does no input or output. */
final class DownloadState {
    private final Reconnect reconnect;
    private final StartRetry start;
    private final String artifactId;
    private PartialArtifact partial;
    private boolean connected;
    private int attempt;

    /** A download. {@code partial} holds the bytes that were received another way before, or is null. */
    DownloadState(Reconnect reconnect, StartRetry start, String artifactId, PartialArtifact partial) {
        this.reconnect = reconnect;
        this.start = start;
        this.artifactId = artifactId;
        this.partial = partial;
    }

    long offset() {
        return partial == null ? 0 : partial.offset();
    }

    /** Asks for the bytes that are still missing. */
    DownloadArtifactRequest request() {
        return DownloadArtifactRequest.newBuilder().setArtifactId(artifactId).setOffset(offset()).build();
    }

    void accept(DownloadArtifactResponse message) {
        connected = true;
        attempt = 0;
        switch (message.getPayloadCase()) {
            case CHUNK:
                finished().add(message.getChunk());
                break;
            case METADATA:
                if (partial == null) {
                    partial = new PartialArtifact(message.getMetadata());
                } else {
                    partial.checkResumed(message.getMetadata());
                }
                break;
            default: // of a newer server
        }
    }

    /** The artifact, once the call has ended without an error. */
    PartialArtifact finished() {
        if (partial == null) {
            String message = "the download of artifact " + artifactId + " did not start with its metadata";
            throw OmniException.of(Status.Code.INTERNAL, "PROTOCOL_ERROR", message)
                    .metadata("artifact_id", artifactId)
                    .build();
        }
        return partial;
    }

    /** How long to wait before the next call, after one that failed. Throws the failure if there is to be none. */
    Duration lost(CallFailure ended) {
        if (!connected) {
            return start.delay(ended);
        }
        if (!ended.lost() || attempt >= reconnect.attempts()) {
            String where = "artifact " + artifactId + ", at byte " + offset() + ": ";
            throw ended.error().toBuilder().message(where + ended.error().getMessage()).build();
        }
        return reconnect.delay(attempt++);
    }
}
