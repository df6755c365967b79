package io.github.omnigrpc;

import com.google.protobuf.Timestamp;
import java.time.Duration;
import java.time.Instant;

/** Times as the API has them. */
final class Times {
    private Times() {}

    static com.google.protobuf.Duration toProto(Duration time) {
        return com.google.protobuf.Duration.newBuilder()
                .setSeconds(time.getSeconds())
                .setNanos(time.getNano())
                .build();
    }

    static Timestamp toProto(Instant moment) {
        return Timestamp.newBuilder().setSeconds(moment.getEpochSecond()).setNanos(moment.getNano()).build();
    }
}
