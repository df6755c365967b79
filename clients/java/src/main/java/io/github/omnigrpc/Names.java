package io.github.omnigrpc;

import com.google.protobuf.Descriptors.EnumDescriptor;
import com.google.protobuf.Descriptors.EnumValueDescriptor;
import java.util.List;
import java.util.Locale;
import java.util.Optional;
import java.util.stream.Collectors;

/** Values of the API's enums by their names without the prefix, in any case: {@code png} is IMAGE_FORMAT_PNG. */
final class Names {
    private Names() {}

    /** The value of a name; empty for one that there is not, and for the unspecified one, which nobody means. */
    static Optional<EnumValueDescriptor> find(EnumDescriptor type, String name) {
        EnumValueDescriptor found = type.findValueByName(prefix(type) + name.toUpperCase(Locale.ROOT));
        return Optional.ofNullable(found).filter(value -> value.getNumber() != 0);
    }

    /** The rule that a wrong name breaks. */
    static String rule(EnumDescriptor type, String name) {
        return "is \"" + name + "\", expected one of " + String.join(", ", known(type));
    }

    private static List<String> known(EnumDescriptor type) {
        return type.getValues().stream()
                .filter(value -> value.getNumber() != 0)
                .map(value -> value.getName().substring(prefix(type).length()))
                .collect(Collectors.toList());
    }

    private static String prefix(EnumDescriptor type) {
        String first = type.findValueByNumber(0).getName();
        return first.substring(0, first.length() - "UNSPECIFIED".length());
    }
}
