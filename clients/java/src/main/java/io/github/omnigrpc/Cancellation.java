package io.github.omnigrpc;

import io.grpc.Context;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/**
 * Ends the calls of one method from another thread. While no job is known yet, calls go on to their first message,
 * which comes at once: without it the job could not be named, and would run until the server noticed that nobody
 * watches.
 */
final class Cancellation {
    private final CountDownLatch asked = new CountDownLatch(1);
    private Context.CancellableContext current;
    private boolean abortable;

    /** Makes a call in a context of its own, which ends with {@link #endCall}. */
    <T> T call(Supplier<T> rpc) {
        endCall();
        Context.CancellableContext context = Context.current().withCancellation();
        synchronized (this) {
            current = context;
        }
        Context before = context.attach();
        try {
            return rpc.get();
        } finally {
            context.detach(before);
        }
    }

    /** Ends the call that was made last, if it has not ended. */
    void endCall() {
        Context.CancellableContext context;
        synchronized (this) {
            context = current;
            current = null;
        }
        if (context != null) {
            context.cancel(null);
        }
    }

    /** From now on a request to stop ends the call at once. */
    void abortable() {
        synchronized (this) {
            abortable = true;
        }
        if (requested()) {
            endCall();
        }
    }

    /** Asks to stop. */
    void request() {
        asked.countDown();
        boolean now;
        synchronized (this) {
            now = abortable;
        }
        if (now) {
            endCall();
        }
    }

    boolean requested() {
        return asked.getCount() == 0;
    }

    /** Waits. Throws CANCELLED if it was asked to stop, or the thread was interrupted, which stays so. */
    void sleep(Duration time) {
        check();
        try {
            if (asked.await(time.toNanos(), TimeUnit.NANOSECONDS)) {
                check();
            }
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            check();
        }
    }

    /** Throws CANCELLED if it was asked to stop, or the thread is interrupted. */
    void check() {
        if (requested() || Thread.currentThread().isInterrupted()) {
            throw OmniException.of(Status.Code.CANCELLED, "CALL_CANCELLED", "the caller cancelled the call").build();
        }
    }
}
