package io.github.omnigrpc;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.TlsChannelCredentials;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.cert.CertificateException;
import java.security.cert.CertificateFactory;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/** Channels: how a client proves who it is, and how it knows the server. */
final class Channels {
    private static final Metadata.Key<String> AUTHORIZATION =
            Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

    private Channels() {}

    /** A channel that is connected at the first call. Throws INVALID_ARGUMENT, by field, for files that are no use. */
    static ManagedChannel open(Address address, Path ca, Path cert, Path key, boolean tls, Supplier<String> token) {
        ChannelCredentials credentials = tls ? tlsCredentials(ca, cert, key) : InsecureChannelCredentials.create();
        try {
            ManagedChannelBuilder<?> builder =
                    Grpc.newChannelBuilder(address.target(), credentials)
                            // a peer that vanished is noticed within 40 s
                            .keepAliveTime(30, TimeUnit.SECONDS)
                            .keepAliveTimeout(10, TimeUnit.SECONDS)
                            .disableServiceConfigLookUp();
            return (token == null ? builder : builder.intercept(new Authorization(token))).build();
        } catch (UnsupportedOperationException lacking) {
            String message = "this Java cannot do TLS for HTTP/2: " + lacking.getMessage();
            throw OmniException.of(Status.Code.FAILED_PRECONDITION, "TLS_NOT_AVAILABLE", message)
                    .cause(lacking)
                    .build();
        } catch (IllegalArgumentException refused) {
            String field = key == null ? "address" : "key";
            String rule = "cannot be used: " + refused.getMessage();
            throw OmniException.of(Status.Code.INVALID_ARGUMENT, "", field + " " + rule)
                    .violation(field, rule)
                    .cause(refused)
                    .build();
        }
    }

    private static ChannelCredentials tlsCredentials(Path ca, Path cert, Path key) {
        TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder();
        try {
            if (ca != null) {
                byte[] roots = read("ca", ca);
                checkCertificates("ca", ca, roots);
                tls.trustManager(new ByteArrayInputStream(roots));
            }
            if (cert != null) {
                byte[] chain = read("cert", cert);
                checkCertificates("cert", cert, chain);
                tls.keyManager(new ByteArrayInputStream(chain), new ByteArrayInputStream(read("key", key)));
            }
        } catch (IOException impossible) {
            throw new IllegalStateException(impossible); // the bytes are in memory
        }
        return tls.build();
    }

    private static void checkCertificates(String field, Path path, byte[] pem) {
        try {
            CertificateFactory factory = CertificateFactory.getInstance("X.509");
            if (!factory.generateCertificates(new ByteArrayInputStream(pem)).isEmpty()) {
                return;
            }
        } catch (CertificateException broken) {
            throw OmniException.invalid(field, path + " has no certificates in PEM: " + broken.getMessage());
        }
        throw OmniException.invalid(field, path + " has no certificates in PEM");
    }

    private static byte[] read(String field, Path path) {
        try {
            return Files.readAllBytes(path);
        } catch (IOException error) {
            throw OmniException.invalid(field, path + " cannot be read: " + error);
        }
    }

    /** A token without the white space around it. Throws INVALID_ARGUMENT, without showing it. */
    static String checkToken(String text) {
        String token = text == null ? "" : text.strip();
        if (token.isEmpty() || !token.chars().allMatch(one -> one > ' ' && one < 127)) {
            throw OmniException.invalid("token", "is empty, or has characters that no token has (spaces, line ends)");
        }
        return token;
    }

    /** Puts the token on every call. Call credentials of gRPC refuse plain channels, those to this machine too. */
    private static final class Authorization implements ClientInterceptor {
        private final Supplier<String> token;

        Authorization(Supplier<String> token) {
            this.token = token;
        }

        @Override
        public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
            String bearer = "Bearer " + checkToken(token.get());
            return new ForwardingClientCall.SimpleForwardingClientCall<>(next.newCall(method, options)) {
                @Override
                public void start(Listener<A> listener, Metadata headers) {
                    headers.put(AUTHORIZATION, bearer);
                    super.start(listener, headers);
                }
            };
        }
    }
}
