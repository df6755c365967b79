package io.github.omnigrpc;

import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;

/** Why a call or a job failed. The only exception that this client throws for what a server or a network does. */
public final class OmniException extends RuntimeException {
    private static final long serialVersionUID = 1L;
    private static final String JOB_ID = "job_id";

    private final Status.Code code;
    private final String reason;
    private final transient List<FieldViolation> fieldViolations;
    private final transient Map<String, String> metadata;
    private final Duration retryAfter;

    private OmniException(Builder from) {
        super(from.message, from.cause);
        code = from.code;
        reason = from.reason.isEmpty() ? from.code.name() : from.reason;
        fieldViolations = List.copyOf(from.fieldViolations);
        metadata = Collections.unmodifiableMap(new LinkedHashMap<>(from.metadata));
        retryAfter = from.retryAfter;
    }

    /** The code of gRPC, for example {@code INVALID_ARGUMENT}. */
    public Status.Code code() {
        return code;
    }

    /** The reason of ErrorInfo, for example {@code QUEUE_FULL}; the name of the code where there is none. */
    public String reason() {
        return reason;
    }

    /** The fields of the request that break a rule; empty where it is not about fields. */
    public List<FieldViolation> fieldViolations() {
        return fieldViolations == null ? List.of() : fieldViolations;
    }

    /** How long to wait before the same call may succeed; empty where the server does not say. */
    public Optional<Duration> retryAfter() {
        return Optional.ofNullable(retryAfter);
    }

    /** The metadata of ErrorInfo, and {@code job_id} and {@code after_seq} where a job is known. */
    public Map<String, String> metadata() {
        return metadata == null ? Map.of() : metadata;
    }

    /** The job that ended so, or "" where there is none. */
    public String jobId() {
        return metadata().getOrDefault(JOB_ID, "");
    }

    static Builder of(Status.Code code, String reason, String message) {
        return new Builder(code, reason, message);
    }

    /** A refusal by this client, before anything is sent. */
    static OmniException invalid(String field, String rule) {
        return of(Status.Code.INVALID_ARGUMENT, "", field + " " + rule).violation(field, rule).build();
    }

    Builder toBuilder() {
        Builder copy = new Builder(code, reason, getMessage()).cause(getCause()).retryAfter(retryAfter);
        copy.fieldViolations.addAll(fieldViolations());
        copy.metadata.putAll(metadata());
        return copy;
    }

    static final class Builder {
        private final Status.Code code;
        private String reason;
        private String message;
        private Throwable cause;
        private Duration retryAfter;
        private final List<FieldViolation> fieldViolations = new ArrayList<>();
        private final Map<String, String> metadata = new LinkedHashMap<>();

        private Builder(Status.Code code, String reason, String message) {
            this.code = Objects.requireNonNull(code);
            this.reason = reason;
            this.message = message;
        }

        Builder reason(String value) {
            reason = value;
            return this;
        }

        Builder message(String value) {
            message = value;
            return this;
        }

        Builder cause(Throwable value) {
            cause = value;
            return this;
        }

        Builder retryAfter(Duration value) {
            retryAfter = value;
            return this;
        }

        Builder violation(String field, String description) {
            fieldViolations.add(new FieldViolation(field, description));
            return this;
        }

        Builder metadata(String key, String value) {
            metadata.put(key, value);
            return this;
        }

        Builder metadata(Map<String, String> values) {
            metadata.putAll(values);
            return this;
        }

        Builder job(String jobId) {
            return jobId.isEmpty() ? this : metadata(JOB_ID, jobId);
        }

        OmniException build() {
            return new OmniException(this);
        }
    }
}
