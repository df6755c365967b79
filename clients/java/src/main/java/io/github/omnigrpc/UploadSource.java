package io.github.omnigrpc;

import com.google.protobuf.ByteString;
import io.github.omnigrpc.v1.UploadHeader;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.net.URLConnection;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;

/** The bytes of an upload, which can be read more than once, and what the server is told about them beforehand. */
final class UploadSource {
    static final int CHUNK_BYTES = 256 * 1024;
    private static final String UNKNOWN_TYPE = "application/octet-stream";

    /** Opens the bytes from their start. */
    interface Opener {
        InputStream open() throws IOException;
    }

    private final Opener opener;
    private final UploadHeader header;

    private UploadSource(Opener opener, String mimeType) {
        this.opener = opener;
        MessageDigest digest = Digests.sha256();
        long size = 0;
        try (InputStream in = opener.open()) {
            byte[] chunk;
            while ((chunk = in.readNBytes(CHUNK_BYTES)).length > 0) {
                digest.update(chunk);
                size += chunk.length;
            }
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        header = UploadHeader.newBuilder()
                .setMimeType(mimeType == null || mimeType.isEmpty() ? UNKNOWN_TYPE : mimeType)
                .setSizeBytes(size)
                .setSha256(ByteString.copyFrom(digest.digest()))
                .build();
    }

    static UploadSource of(byte[] data, String mimeType) {
        return new UploadSource(() -> new ByteArrayInputStream(data), mimeType);
    }

    /** A file. Its type is told by its name, which is all that is known of it without reading it. */
    static UploadSource of(Path path) {
        String type = URLConnection.guessContentTypeFromName(path.toString());
        return new UploadSource(() -> Files.newInputStream(path), type);
    }

    UploadHeader header() {
        return header;
    }

    InputStream open() throws IOException {
        return opener.open();
    }
}
