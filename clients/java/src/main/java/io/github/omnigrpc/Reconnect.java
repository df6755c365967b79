package io.github.omnigrpc;

import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.ThreadLocalRandom;

/**
 * How a lost stream is resumed. The delay before attempt n is {@code firstDelay * 2^n}, at most {@code longestDelay},
 * times a random number from 0.5 to 1, so that the clients of a server that restarts do not all come back at once.
 */
public final class Reconnect {
    private final int attempts;
    private final Duration firstDelay;
    private final Duration longestDelay;

    /**
     * A policy.
     *
     * @param attempts most attempts in a row without a single message
     * @param firstDelay delay before the first one
     * @param longestDelay most delay before any
     */
    public Reconnect(int attempts, Duration firstDelay, Duration longestDelay) {
        if (attempts < 0) {
            throw OmniException.invalid("reconnect.attempts", "is " + attempts + ", expected 0 or more");
        }
        this.attempts = attempts;
        this.firstDelay = Objects.requireNonNull(firstDelay);
        this.longestDelay = Objects.requireNonNull(longestDelay);
    }

    /** Eight attempts, from 0.2 s to 5 s. */
    public static Reconnect defaults() {
        return new Reconnect(8, Duration.ofMillis(200), Duration.ofSeconds(5));
    }

    int attempts() {
        return attempts;
    }

    /** The delay before an attempt, counted from 0. */
    Duration delay(int attempt) {
        double exact = firstDelay.toMillis() * Math.pow(2, attempt);
        double most = Math.min(exact, longestDelay.toMillis());
        return Duration.ofMillis(Math.round(most * ThreadLocalRandom.current().nextDouble(0.5, 1.0)));
    }
}
