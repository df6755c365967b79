package io.github.omnigrpc;

import com.google.protobuf.ByteString;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.github.omnigrpc.v1.AdminServiceGrpc;
import io.github.omnigrpc.v1.ArtifactServiceGrpc;
import io.github.omnigrpc.v1.CancelJobRequest;
import io.github.omnigrpc.v1.DownloadArtifactResponse;
import io.github.omnigrpc.v1.GenerationServiceGrpc;
import io.github.omnigrpc.v1.Job;
import io.github.omnigrpc.v1.JobServiceGrpc;
import io.github.omnigrpc.v1.MediaInput;
import io.github.omnigrpc.v1.ModelServiceGrpc;
import io.github.omnigrpc.v1.UploadAssetResponse;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.AbstractStub;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Supplier;

/** One channel to a server, with its stubs, and the calls that need retries. */
final class Connection {
    /** Limit of one unary call. */
    static final Duration UNARY_TIMEOUT = Duration.ofSeconds(30);

    /** Most bytes of media that are sent inside a request. If there are more, all of them are uploaded first. */
    static final int INLINE_BYTES = 4 << 20;

    final String address;
    final Reconnect reconnect;
    private final ManagedChannel channel;
    private final int fullRetries;

    Connection(String address, ManagedChannel channel, Reconnect reconnect, int fullRetries) {
        this.address = address;
        this.channel = channel;
        this.reconnect = reconnect;
        this.fullRetries = fullRetries;
    }

    void close() {
        channel.shutdownNow();
    }

    GenerationServiceGrpc.GenerationServiceBlockingStub generation(Deadline deadline) {
        return limited(GenerationServiceGrpc.newBlockingStub(channel), deadline);
    }

    JobServiceGrpc.JobServiceBlockingStub jobs(Deadline deadline) {
        return limited(JobServiceGrpc.newBlockingStub(channel), deadline);
    }

    ArtifactServiceGrpc.ArtifactServiceBlockingStub artifacts(Deadline deadline) {
        return limited(ArtifactServiceGrpc.newBlockingStub(channel), deadline);
    }

    ArtifactServiceGrpc.ArtifactServiceStub uploads(Deadline deadline) {
        return limited(ArtifactServiceGrpc.newStub(channel), deadline);
    }

    ModelServiceGrpc.ModelServiceBlockingStub models(Deadline deadline) {
        return limited(ModelServiceGrpc.newBlockingStub(channel), deadline);
    }

    AdminServiceGrpc.AdminServiceBlockingStub admin(Deadline deadline) {
        return limited(AdminServiceGrpc.newBlockingStub(channel), deadline);
    }

    StartRetry startRetry(Deadline deadline) {
        return new StartRetry(fullRetries, deadline);
    }

    /** gRPC waits longer and longer before it connects again, up to two minutes; this client's delays are shorter. */
    void connectAgain() {
        channel.resetConnectBackoff();
    }

    /** The reply to one request, which is tried again as {@link StartRetry} says. */
    <T> T unary(Deadline deadline, Function<Deadline, T> rpc) {
        return retried(deadline, new Cancellation(), () -> rpc.apply(Deadline.after(deadline.within(UNARY_TIMEOUT))));
    }

    /** What a call returns before its first message is there, tried again. */
    private <T> T retried(Deadline deadline, Cancellation cancellation, Supplier<T> call) {
        StartRetry retry = startRetry(deadline);
        while (true) {
            try {
                return call.get();
            } catch (StatusRuntimeException error) {
                cancellation.sleep(retry.delay(CallFailure.of(error, address)));
                connectAgain();
            }
        }
    }

    /** Asks a job to stop, even from a thread or a context that was itself cancelled. */
    Job cancelJob(String jobId, String reason, Duration timeout) {
        CancelJobRequest request = CancelJobRequest.newBuilder().setJobId(jobId).setReason(reason).build();
        return apart(() -> unary(Deadline.after(timeout), limit -> jobs(limit).cancelJob(request)).getJob());
    }

    /** Does something outside of the caller's context and interruption; the thread's interruption is kept for later. */
    static <T> T apart(Supplier<T> work) {
        boolean interrupted = Thread.interrupted();
        Context before = Context.ROOT.attach();
        try {
            return work.get();
        } finally {
            Context.ROOT.detach(before);
            if (interrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    /** All bytes of an artifact. Goes on after those in {@code partial}, and after each loss of the connection. */
    PartialArtifact download(String artifactId, Deadline deadline, PartialArtifact partial, Cancellation cancellation) {
        DownloadState state = new DownloadState(reconnect, startRetry(deadline), artifactId, partial);
        try {
            while (true) {
                try {
                    Iterator<DownloadArtifactResponse> call =
                            cancellation.call(() -> artifacts(deadline).downloadArtifact(state.request()));
                    while (call.hasNext()) {
                        state.accept(call.next());
                    }
                    return state.finished();
                } catch (StatusRuntimeException error) {
                    cancellation.check();
                    cancellation.sleep(deadline.within(state.lost(CallFailure.of(error, address))));
                    connectAgain();
                }
            }
        } finally {
            cancellation.endCall();
        }
    }

    /** Stores a file on the server. */
    UploadAssetResponse upload(UploadSource source, Deadline deadline) {
        return retried(deadline, new Cancellation(), () -> new UploadCall(source).run(uploads(deadline)));
    }

    /** A request whose media are uploaded, if they are too large to be sent inside it. */
    Message withUploads(Message request, Deadline deadline) {
        long inline = media(request).stream().mapToLong(one -> one.getData().size()).sum();
        if (inline <= INLINE_BYTES) {
            return request;
        }
        Message.Builder changed = request.toBuilder();
        for (Map.Entry<FieldDescriptor, Object> entry : request.getAllFields().entrySet()) {
            if (!isMedia(entry.getKey())) {
                continue;
            }
            if (entry.getKey().isRepeated()) {
                List<MediaInput> stored = new ArrayList<>();
                ((List<?>) entry.getValue()).forEach(one -> stored.add(stored((MediaInput) one, deadline)));
                changed.setField(entry.getKey(), stored);
            } else {
                changed.setField(entry.getKey(), stored((MediaInput) entry.getValue(), deadline));
            }
        }
        return changed.build();
    }

    private MediaInput stored(MediaInput media, Deadline deadline) {
        if (media.getSourceCase() != MediaInput.SourceCase.DATA) {
            return media;
        }
        ByteString data = media.getData();
        UploadSource source = UploadSource.of(data.toByteArray(), media.getMimeType());
        return MediaInput.newBuilder().setAssetId(upload(source, deadline).getAssetId()).build();
    }

    private static List<MediaInput> media(Message request) {
        List<MediaInput> found = new ArrayList<>();
        request.getAllFields().forEach((field, value) -> {
            if (isMedia(field) && field.isRepeated()) {
                ((List<?>) value).forEach(one -> found.add((MediaInput) one));
            } else if (isMedia(field)) {
                found.add((MediaInput) value);
            }
        });
        return found;
    }

    private static boolean isMedia(FieldDescriptor field) {
        return field.getJavaType() == FieldDescriptor.JavaType.MESSAGE
                && field.getMessageType().equals(MediaInput.getDescriptor());
    }

    private static <S extends AbstractStub<S>> S limited(S stub, Deadline deadline) {
        return deadline.remaining()
                .map(left -> stub.withDeadlineAfter(left.toNanos(), TimeUnit.NANOSECONDS))
                .orElse(stub);
    }

    /** A failure of a call that this client's thread was waiting for. */
    static StatusRuntimeException interrupted(InterruptedException cause) {
        Thread.currentThread().interrupt();
        return Status.CANCELLED.withDescription("the thread was interrupted").withCause(cause).asRuntimeException();
    }
}
