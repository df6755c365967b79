package io.github.omnigrpc;

import com.google.protobuf.ByteString;
import io.github.omnigrpc.v1.ArtifactServiceGrpc;
import io.github.omnigrpc.v1.UploadAssetRequest;
import io.github.omnigrpc.v1.UploadAssetResponse;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;

/** One UploadAsset call: sends no faster than the server takes, and stops as soon as it refuses. */
final class UploadCall implements ClientResponseObserver<UploadAssetRequest, UploadAssetResponse> {
    private final UploadSource source;
    private ClientCallStreamObserver<UploadAssetRequest> requests;
    private UploadAssetResponse response;
    private Throwable failure;
    private boolean ended;

    UploadCall(UploadSource source) {
        this.source = source;
    }

    /** Uploads it. Throws StatusRuntimeException as blocking stubs do. */
    UploadAssetResponse run(ArtifactServiceGrpc.ArtifactServiceStub stub) {
        stub.uploadAsset(this);
        try (InputStream in = source.open()) {
            boolean open = send(UploadAssetRequest.newBuilder().setHeader(source.header()).build());
            while (open) {
                byte[] chunk = in.readNBytes(UploadSource.CHUNK_BYTES);
                if (chunk.length == 0) {
                    requests.onCompleted();
                    break;
                }
                open = send(UploadAssetRequest.newBuilder().setData(ByteString.copyFrom(chunk)).build());
            }
            return await();
        } catch (IOException error) {
            requests.cancel("the file cannot be read", error);
            throw new UncheckedIOException(error);
        } catch (InterruptedException error) {
            requests.cancel("the thread was interrupted", error);
            throw Connection.interrupted(error);
        }
    }

    /** Sends a message once there is room for it. False if the call has ended meanwhile. */
    private synchronized boolean send(UploadAssetRequest message) throws InterruptedException {
        while (!ended && !requests.isReady()) {
            wait();
        }
        if (!ended) {
            requests.onNext(message);
        }
        return !ended;
    }

    private synchronized UploadAssetResponse await() throws InterruptedException {
        while (!ended) {
            wait();
        }
        if (failure instanceof StatusRuntimeException) {
            throw (StatusRuntimeException) failure;
        }
        if (failure != null || response == null) {
            throw Status.INTERNAL.withDescription("the upload ended without a reply").withCause(failure)
                    .asRuntimeException();
        }
        return response;
    }

    private synchronized void wake() {
        notifyAll();
    }

    @Override
    public void beforeStart(ClientCallStreamObserver<UploadAssetRequest> stream) {
        requests = stream;
        stream.setOnReadyHandler(this::wake);
    }

    @Override
    public synchronized void onNext(UploadAssetResponse message) {
        response = message;
    }

    @Override
    public synchronized void onError(Throwable error) {
        failure = error;
        ended = true;
        notifyAll();
    }

    @Override
    public synchronized void onCompleted() {
        ended = true;
        notifyAll();
    }
}
