package io.github.omnigrpc;

import io.grpc.Status;
import java.time.Duration;

/**
 * Which failures before a call's first message are tried again: a server that cannot be reached for a moment, and one
 * that is full and says for how long. That is safe for every rpc, since those that make a job carry a request_id.
 */
final class StartRetry {
    static final int UNAVAILABLE_ATTEMPTS = 4;
    private static final Duration UNAVAILABLE_TIME = Duration.ofSeconds(5);
    private static final Reconnect BACKOFF = new Reconnect(0, Duration.ofMillis(200), Duration.ofSeconds(2));

    private final int fullRetries;
    private final Deadline deadline;
    private final long begun = System.nanoTime();
    private int unreached;
    private int full;

    /**
     * The state of one call.
     *
     * @param fullRetries how often RESOURCE_EXHAUSTED with RetryInfo is waited for; 0: never
     * @param deadline the deadline of the caller
     */
    StartRetry(int fullRetries, Deadline deadline) {
        this.fullRetries = fullRetries;
        this.deadline = deadline;
    }

    /** How long to wait before the call is made again. Throws the failure if it is not to be. */
    Duration delay(CallFailure failure) {
        Duration wait = wait(failure);
        if (deadline.remaining().filter(left -> left.compareTo(wait) <= 0).isPresent()) {
            throw failure.error(); // it says more than a deadline that passes while nothing happens
        }
        return wait;
    }

    private Duration wait(CallFailure failure) {
        if (failure.code() == Status.Code.RESOURCE_EXHAUSTED
                && failure.error().retryAfter().isPresent()
                && full < fullRetries) {
            full++;
            return failure.error().retryAfter().get();
        }
        if (failure.code() == Status.Code.UNAVAILABLE && failure != CallFailure.ENDED_EARLY && !failure.distrusted()) {
            boolean early = System.nanoTime() - begun < UNAVAILABLE_TIME.toNanos();
            if (early || unreached + 1 < UNAVAILABLE_ATTEMPTS) {
                Duration backoff = BACKOFF.delay(unreached++);
                Duration asked = failure.error().retryAfter().orElse(Duration.ZERO);
                return asked.compareTo(backoff) > 0 ? asked : backoff;
            }
        }
        throw failure.error();
    }
}
