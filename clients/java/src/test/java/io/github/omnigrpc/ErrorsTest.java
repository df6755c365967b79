package io.github.omnigrpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import org.junit.jupiter.api.Test;

class ErrorsTest {
    private static final Metadata.Key<byte[]> DETAILS =
            Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

    static CallFailure failure(Status status) {
        return CallFailure.of(status.asRuntimeException(), "host:1");
    }

    static CallFailure full(Duration retryAfter) {
        com.google.rpc.Status status =
                com.google.rpc.Status.newBuilder()
                        .setCode(Status.Code.RESOURCE_EXHAUSTED.value())
                        .setMessage("full")
                        .addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(Times.toProto(retryAfter)).build()))
                        .build();
        return sent(status);
    }

    private static CallFailure sent(com.google.rpc.Status status) {
        Metadata trailers = new Metadata();
        trailers.put(DETAILS, status.toByteArray());
        Status code = Status.fromCodeValue(status.getCode());
        return CallFailure.of(code.asRuntimeException(trailers), "host:1");
    }

    @Test
    void detailsAreDecoded() {
        BadRequest fields =
                BadRequest.newBuilder()
                        .addFieldViolations(
                                BadRequest.FieldViolation.newBuilder().setField("width").setDescription("is 63"))
                        .build();
        ErrorInfo info = ErrorInfo.newBuilder().setReason("BAD_SIZE").putMetadata("job_id", "j1").build();
        OmniException error =
                sent(com.google.rpc.Status.newBuilder()
                                .setCode(3)
                                .setMessage("wrong")
                                .addDetails(Any.pack(info))
                                .addDetails(Any.pack(fields))
                                .addDetails(Any.pack(Times.toProto(Duration.ofSeconds(1)))) // of no known kind
                                .build())
                        .error();
        assertEquals(Status.Code.INVALID_ARGUMENT, error.code());
        assertEquals("BAD_SIZE", error.reason());
        assertEquals("j1", error.jobId());
        assertEquals("wrong", error.getMessage());
        assertEquals("width: is 63", error.fieldViolations().get(0).toString());
        assertEquals(Optional.empty(), error.retryAfter());
    }

    @Test
    void retryAfterHasFractions() {
        Duration time = Duration.ofMillis(1250);
        assertEquals(Optional.of(time), full(time).error().retryAfter());
    }

    @Test
    void failuresOfTheConnectionHaveReasons() {
        CallFailure gone = failure(Status.UNAVAILABLE.withDescription("io exception"));
        assertEquals("SERVER_UNREACHABLE", gone.error().reason());
        assertTrue(gone.lost());
        CallFailure late = failure(Status.DEADLINE_EXCEEDED);
        assertEquals("CALL_DEADLINE", late.error().reason());
        assertTrue(late.timedOut());
        assertTrue(failure(Status.INTERNAL.withDescription("RST_STREAM")).lost());
        assertFalse(sent(com.google.rpc.Status.newBuilder().setCode(13).build()).lost());
    }

    @Test
    void aServerThatCannotBeReachedIsTriedForAWhile() {
        StartRetry retry = new StartRetry(5, Deadline.after(null));
        long first = retry.delay(failure(Status.UNAVAILABLE)).toMillis();
        assertTrue(first >= 100 && first <= 200, "" + first);
        long second = retry.delay(failure(Status.UNAVAILABLE)).toMillis();
        assertTrue(second >= 200 && second <= 400, "" + second);
    }

    @Test
    void aFullServerIsAskedAgainAsOftenAsWanted() {
        StartRetry retry = new StartRetry(2, Deadline.after(null));
        Duration wait = Duration.ofSeconds(3);
        assertEquals(wait, retry.delay(full(wait)));
        assertEquals(wait, retry.delay(full(wait)));
        OmniException error = assertThrows(OmniException.class, () -> retry.delay(full(wait)));
        assertEquals(Status.Code.RESOURCE_EXHAUSTED, error.code());
        assertThrows(OmniException.class, () -> new StartRetry(0, Deadline.after(null)).delay(full(wait)));
    }

    @Test
    void noWaitIsLongerThanTheDeadline() {
        StartRetry retry = new StartRetry(5, Deadline.after(Duration.ofSeconds(1)));
        OmniException error = assertThrows(OmniException.class, () -> retry.delay(full(Duration.ofSeconds(3))));
        assertEquals(Status.Code.RESOURCE_EXHAUSTED, error.code());
    }

    @Test
    void reconnectDelaysGrowToTheLongest() {
        for (int attempt = 0; attempt < 12; attempt++) {
            long most = Math.min(5000, 200L << attempt);
            long delay = Reconnect.defaults().delay(attempt).toMillis();
            assertTrue(delay >= most / 2 && delay <= most, attempt + ": " + delay);
        }
    }
}
