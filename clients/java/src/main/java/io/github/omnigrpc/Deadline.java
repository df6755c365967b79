package io.github.omnigrpc;

import java.time.Duration;
import java.util.Optional;

/** The deadline of one method, shared by all the calls that it makes. */
final class Deadline {
    private final Long end;

    private Deadline(Long end) {
        this.end = end;
    }

    /** A deadline after a time, or none for null. */
    static Deadline after(Duration timeout) {
        return new Deadline(timeout == null ? null : System.nanoTime() + timeout.toNanos());
    }

    /** The time left, not below 0; empty where there is no deadline. */
    Optional<Duration> remaining() {
        return end == null ? Optional.empty() : Optional.of(Duration.ofNanos(Math.max(0, end - System.nanoTime())));
    }

    /** A time, or less if the deadline comes first. */
    Duration within(Duration time) {
        return remaining().filter(left -> left.compareTo(time) < 0).orElse(time);
    }
}
