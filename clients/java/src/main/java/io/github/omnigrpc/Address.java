package io.github.omnigrpc;

import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** The address of a server: HOST:PORT, [IPV6]:PORT, or a target of gRPC such as unix:/path or dns:///HOST:PORT. */
final class Address {
    private static final int DEFAULT_PORT = 50051;
    private static final int MAX_PORT = 65535;
    private static final Pattern HOST_AND_PORT = Pattern.compile("(\\[[0-9a-fA-F:.]+\\]|[^\\s\\[\\]:/]+):([0-9]{1,5})");
    private static final Pattern LOOPBACK = Pattern.compile("127(\\.[0-9]{1,3}){3}|\\[::1\\]|0\\.0\\.0\\.0|\\[::\\]");

    private final String text;
    private final String host;

    private Address(String text, String host) {
        this.text = text;
        this.host = host;
    }

    /** Throws INVALID_ARGUMENT for any other text, since gRPC would dial something else. */
    static Address of(String text) {
        if (text.startsWith("unix:")) {
            return new Address(text, "");
        }
        String endpoint = text.startsWith("dns:") ? text.substring(text.lastIndexOf('/') + 1) : text;
        if (!text.startsWith("dns:") && text.contains("://")) {
            throw OmniException.invalid("address", "\"" + text + "\" is a URL; write HOST:PORT");
        }
        Matcher found = HOST_AND_PORT.matcher(endpoint);
        if (!found.matches()) {
            String example = "HOST:PORT, such as localhost:" + DEFAULT_PORT + " or [::1]:" + DEFAULT_PORT;
            throw OmniException.invalid("address", "\"" + text + "\" is not " + example);
        }
        int port = Integer.parseInt(found.group(2));
        if (port < 1 || port > MAX_PORT) {
            throw OmniException.invalid("address", "has the port " + port + "; a port is from 1 to " + MAX_PORT);
        }
        return new Address(text, found.group(1).toLowerCase(Locale.ROOT));
    }

    /** What gRPC is told. Without a scheme it would take the host for one. */
    String target() {
        String escaped = text.replace("[", "%5B").replace("]", "%5D"); // a target is a URI
        return text.startsWith("unix:") || text.startsWith("dns:") ? escaped : "dns:///" + escaped;
    }

    boolean isUnix() {
        return host.isEmpty();
    }

    /** Whether it is on this machine. */
    boolean isLocal() {
        return isUnix() || host.equals("localhost") || host.endsWith(".localhost") || LOOPBACK.matcher(host).matches();
    }

    @Override
    public String toString() {
        return text;
    }
}
