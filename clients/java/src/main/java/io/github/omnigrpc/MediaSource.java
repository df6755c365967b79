package io.github.omnigrpc;

import com.google.protobuf.ByteString;
import io.github.omnigrpc.v1.Artifact;
import io.github.omnigrpc.v1.MediaInput;
import io.github.omnigrpc.v1.UploadAssetResponse;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;

/** An image, video or sound that a request brings along. */
public final class MediaSource {
    private final MediaInput input;

    private MediaSource(MediaInput input) {
        this.input = input;
    }

    /**
     * A file, read at once. Its type is found by the server from its bytes.
     *
     * @throws UncheckedIOException if it cannot be read
     */
    public static MediaSource file(Path path) {
        try {
            return bytes(Files.readAllBytes(path));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** The bytes of a file. */
    public static MediaSource bytes(byte[] data) {
        return new MediaSource(MediaInput.newBuilder().setData(ByteString.copyFrom(data)).build());
    }

    /** What {@link OmniClient#upload(Path)} returned. */
    public static MediaSource asset(UploadAssetResponse uploaded) {
        return asset(uploaded.getAssetId());
    }

    /** An asset by its id. */
    public static MediaSource asset(String assetId) {
        return new MediaSource(MediaInput.newBuilder().setAssetId(assetId).build());
    }

    /** An output of an earlier job. */
    public static MediaSource artifact(Artifact artifact) {
        return asset(artifact.getArtifactId());
    }

    /** A data: URL, or an https URL that the server may fetch. */
    public static MediaSource uri(String uri) {
        return new MediaSource(MediaInput.newBuilder().setUri(uri).build());
    }

    MediaInput input() {
        return input;
    }
}
