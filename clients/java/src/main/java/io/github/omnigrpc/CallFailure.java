package io.github.omnigrpc;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import javax.net.ssl.SSLException;

/** How a call ended: with a failure that the server sent, or one of the connection or of this client's deadline. */
final class CallFailure {
    private static final Metadata.Key<byte[]> DETAILS =
            Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

    /** Of a stream that ended without an error before its job did. */
    static final CallFailure ENDED_EARLY =
            new CallFailure(
                    OmniException.of(Status.Code.UNAVAILABLE, "STREAM_ENDED", "the stream ended before the job did")
                            .build(),
                    false);

    private final OmniException error;
    private final boolean fromServer;

    private CallFailure(OmniException error, boolean fromServer) {
        this.error = error;
        this.fromServer = fromServer;
    }

    static CallFailure of(StatusRuntimeException failed, String address) {
        Metadata trailers = failed.getTrailers();
        byte[] details = trailers == null ? null : trailers.get(DETAILS);
        if (details != null) {
            try {
                return new CallFailure(
                        decode(com.google.rpc.Status.parseFrom(details)).cause(failed).build(), true);
            } catch (InvalidProtocolBufferException broken) {
                failed.addSuppressed(broken);
            }
        }
        Status status = failed.getStatus();
        String said = status.getDescription() == null ? status.getCode().name() : status.getDescription();
        OmniException.Builder error = OmniException.of(status.getCode(), "", said).cause(failed);
        if (status.getCode() == Status.Code.UNAVAILABLE) {
            String why = status.getCause() == null ? "" : " (" + status.getCause().getMessage() + ")";
            error.reason("SERVER_UNREACHABLE").message("cannot reach the server at " + address + ": " + said + why);
        } else if (status.getCode() == Status.Code.DEADLINE_EXCEEDED) {
            error.reason("CALL_DEADLINE")
                    .message("the server at " + address + " did not answer before the deadline of the call");
        }
        return new CallFailure(error.build(), false);
    }

    /** What a status says. Details of kinds that are not known here are passed over. */
    static OmniException.Builder decode(com.google.rpc.Status status) {
        Status.Code code = Status.fromCodeValue(status.getCode()).getCode();
        OmniException.Builder error = OmniException.of(code, "", status.getMessage());
        for (Any detail : status.getDetailsList()) {
            try {
                decodeDetail(detail, error);
            } catch (InvalidProtocolBufferException broken) {
                error.cause(broken); // the rest of the status still says what failed
            }
        }
        return error;
    }

    private static void decodeDetail(Any detail, OmniException.Builder error) throws InvalidProtocolBufferException {
        if (detail.is(ErrorInfo.class)) {
            ErrorInfo info = detail.unpack(ErrorInfo.class);
            error.reason(info.getReason()).metadata(info.getMetadataMap());
        } else if (detail.is(BadRequest.class)) {
            detail.unpack(BadRequest.class)
                    .getFieldViolationsList()
                    .forEach(one -> error.violation(one.getField(), one.getDescription()));
        } else if (detail.is(RetryInfo.class)) {
            com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
            error.retryAfter(Duration.ofSeconds(delay.getSeconds(), delay.getNanos()));
        }
    }

    OmniException error() {
        return error;
    }

    Status.Code code() {
        return error.code();
    }

    /** True if the connection was lost, so that the job may still run. */
    boolean lost() {
        if (code() == Status.Code.UNAVAILABLE) {
            return true;
        }
        // a reset stream; what a server calls INTERNAL has details
        return !fromServer && code() == Status.Code.INTERNAL;
    }

    /** True if the deadline that this client set has passed. */
    boolean timedOut() {
        return !fromServer && code() == Status.Code.DEADLINE_EXCEEDED;
    }

    /** True if the peer's certificate is refused: trying again changes nothing. */
    boolean distrusted() {
        Throwable cause = error;
        while (cause != null) {
            if (cause instanceof SSLException) {
                return true;
            }
            cause = cause.getCause();
        }
        return false;
    }
}
