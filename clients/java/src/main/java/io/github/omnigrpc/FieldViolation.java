package io.github.omnigrpc;

import java.util.Objects;

/** A field of a request, by its name in the API, and the rule that it breaks. */
public final class FieldViolation {
    private final String field;
    private final String description;

    FieldViolation(String field, String description) {
        this.field = Objects.requireNonNull(field);
        this.description = Objects.requireNonNull(description);
    }

    /** The field, for example {@code width}. */
    public String field() {
        return field;
    }

    /** The rule, and the nearest valid value where there is one. */
    public String description() {
        return description;
    }

    @Override
    public String toString() {
        return field + ": " + description;
    }
}
