package io.github.omnigrpc;

import com.google.protobuf.ByteString;
import io.github.omnigrpc.v1.Artifact;
import io.github.omnigrpc.v1.ArtifactChunk;
import io.grpc.Status;
import java.io.ByteArrayOutputStream;
import java.security.MessageDigest;

/** Assembles the chunks of an artifact. Offsets are checked as chunks arrive, the SHA-256 at the end. */
final class PartialArtifact {
    private final Artifact artifact;
    private final ByteArrayOutputStream data = new ByteArrayOutputStream();

    PartialArtifact(Artifact artifact) {
        this.artifact = artifact;
    }

    Artifact artifact() {
        return artifact;
    }

    /** Bytes received so far, which is where a download goes on. */
    long offset() {
        return data.size();
    }

    boolean complete() {
        return offset() == artifact.getSizeBytes();
    }

    void add(ArtifactChunk chunk) {
        if (chunk.getOffset() != offset()) {
            throw corrupt("a chunk starts at byte " + chunk.getOffset() + ", expected " + offset());
        }
        if (offset() + chunk.getData().size() > artifact.getSizeBytes()) {
            throw corrupt("more bytes arrived than the " + artifact.getSizeBytes() + " that were announced");
        }
        data.writeBytes(chunk.getData().toByteArray());
    }

    /** Checks that a resumed download is of the same artifact as the bytes so far. */
    void checkResumed(Artifact resumed) {
        if (!resumed.getArtifactId().equals(artifact.getArtifactId())
                || !resumed.getSha256().equals(artifact.getSha256())) {
            throw corrupt("it is a different artifact than the one whose first bytes arrived");
        }
    }

    /** All bytes, checked. */
    byte[] data() {
        if (!complete()) {
            throw corrupt(offset() + " of " + artifact.getSizeBytes() + " bytes arrived");
        }
        byte[] all = data.toByteArray();
        MessageDigest digest = Digests.sha256();
        if (!ByteString.copyFrom(digest.digest(all)).equals(artifact.getSha256())) {
            throw corrupt("its SHA-256 is not the one that was announced");
        }
        return all;
    }

    private OmniException corrupt(String what) {
        String message = "artifact " + artifact.getArtifactId() + ": " + what + "; download it again";
        return OmniException.of(Status.Code.INTERNAL, "ARTIFACT_CORRUPT", message)
                .metadata("artifact_id", artifact.getArtifactId())
                .job(artifact.getJobId())
                .build();
    }
}
