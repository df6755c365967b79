package io.github.omnigrpc;

import io.grpc.Status;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Objects;
import java.util.function.Supplier;

/** Makes an {@link OmniClient}: see {@link OmniClient#builder}. */
public final class ClientBuilder {
    private static final int FULL_RETRIES = 5;

    private final String address;
    private Path ca;
    private Path cert;
    private Path key;
    private boolean tls;
    private boolean insecure;
    private Supplier<String> token;
    private Reconnect reconnect = Reconnect.defaults();
    private int fullRetries = FULL_RETRIES;

    ClientBuilder(String address) {
        this.address = Objects.requireNonNull(address);
    }

    /** TLS, with the authorities in a PEM file. */
    public ClientBuilder ca(Path file) {
        ca = Objects.requireNonNull(file);
        return tls();
    }

    /** TLS, with the authorities that Java trusts where {@link #ca} names no others. */
    public ClientBuilder tls() {
        tls = true;
        return this;
    }

    /** mTLS: the client's own certificate and its private key (PKCS 8, without a passphrase), both PEM. */
    public ClientBuilder certificate(Path certificate, Path privateKey) {
        cert = Objects.requireNonNull(certificate);
        key = Objects.requireNonNull(privateKey);
        return tls();
    }

    /** A bearer token, sent with every call. */
    public ClientBuilder token(String text) {
        String checked = Channels.checkToken(text);
        return token(() -> checked);
    }

    /** What is asked for the token at every call, so that it may change while the client lives. */
    public ClientBuilder token(Supplier<String> source) {
        token = Objects.requireNonNull(source);
        return this;
    }

    /** A file with the token, read at every call. */
    public ClientBuilder tokenFile(Path file) {
        return token(() -> {
            try {
                return Files.readString(file, StandardCharsets.US_ASCII);
            } catch (IOException error) {
                throw OmniException.invalid("token", file + " cannot be read: " + error);
            }
        });
    }

    /** Sends the token without TLS, to another machine too. */
    public ClientBuilder insecure() {
        insecure = true;
        return this;
    }

    /** How lost streams are resumed. */
    public ClientBuilder reconnect(Reconnect policy) {
        reconnect = Objects.requireNonNull(policy);
        return this;
    }

    /** How often a server that is full is asked again after the time that it says; 5 by default, 0: never. */
    public ClientBuilder retriesWhenFull(int times) {
        fullRetries = times;
        return this;
    }

    /**
     * The client. It connects at its first call.
     *
     * @throws OmniException INVALID_ARGUMENT, by field, for an address or files that cannot be used, and with the
     *     reason TOKEN_NEEDS_TLS for a token that would go to another machine in plain text
     */
    public OmniClient build() {
        Address checked = Address.of(address);
        if (tls && checked.isUnix()) {
            throw OmniException.invalid("tls", "is for networks: a Unix socket is never encrypted");
        }
        if (token != null && !tls && !insecure && !checked.isLocal()) {
            String rule = "would go to " + address + " unencrypted: use ca(file) or tls(), or insecure()";
            throw OmniException.of(Status.Code.INVALID_ARGUMENT, "TOKEN_NEEDS_TLS", "token " + rule)
                    .violation("token", rule)
                    .build();
        }
        return new OmniClient(
                new Connection(address, Channels.open(checked, ca, cert, key, tls, token), reconnect, fullRetries));
    }
}
