package io.github.omnigrpc;

import io.github.omnigrpc.v1.Artifact;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.OptionalLong;

/** A produced file with its bytes, which are those that the server announced by their SHA-256. */
public final class Output {
    private final Artifact artifact;
    private final byte[] data;

    Output(PartialArtifact received) {
        artifact = received.artifact();
        data = received.data();
    }

    /** Its id, size and other properties. */
    public Artifact artifact() {
        return artifact;
    }

    /** A copy of the bytes. */
    public byte[] data() {
        return data.clone();
    }

    /** MIME type, for example {@code image/png}. */
    public String mimeType() {
        return artifact.getMimeType();
    }

    /** The seed it was made from; empty where none was involved. */
    public OptionalLong seed() {
        return artifact.hasSeed() ? OptionalLong.of(artifact.getSeed()) : OptionalLong.empty();
    }

    /**
     * Writes the file, whole or not at all.
     *
     * @throws UncheckedIOException if it cannot be written
     */
    public void save(Path path) {
        Path target = path.toAbsolutePath();
        try {
            Path part = Files.createTempFile(target.getParent(), ".omni-grpc-", ".part");
            try {
                Files.write(part, data);
                Files.move(part, target, StandardCopyOption.REPLACE_EXISTING);
            } finally {
                Files.deleteIfExists(part);
            }
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }
}
