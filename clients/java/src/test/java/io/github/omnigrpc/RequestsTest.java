package io.github.omnigrpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.omnigrpc.v1.EditImageRequest;
import io.github.omnigrpc.v1.GenerateImageRequest;
import io.github.omnigrpc.v1.ImageFormat;
import io.github.omnigrpc.v1.Task;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import org.junit.jupiter.api.Test;

class RequestsTest {
    private static GenerateImageRequest message(ImageRequest.Builder request) {
        return (GenerateImageRequest) request.build().message();
    }

    @Test
    void whatIsNotSetIsNotSent() {
        GenerateImageRequest message = message(ImageRequest.of("a"));
        assertEquals(GenerateImageRequest.newBuilder().setPrompt("a").build(), message);
        GenerateImageRequest zero = message(ImageRequest.of("a").seed(0).negativePrompt(""));
        assertTrue(zero.getSampling().hasSeed());
        assertFalse(zero.getSampling().hasSteps());
        assertTrue(zero.hasNegativePrompt());
    }

    @Test
    void eachSendingHasItsOwnKeyUnlessOneIsGiven() {
        ImageRequest request = ImageRequest.of("a").build();
        assertNotEquals(key(request), key(request));
        assertEquals(36, key(request).length());
        assertEquals("k", key(ImageRequest.of("a").requestId("k").build()));
    }

    private static String key(ImageRequest request) {
        return ((GenerateImageRequest) request.identified()).getOptions().getRequestId();
    }

    @Test
    void namesAreInAnyCase() {
        GenerateImageRequest message = message(ImageRequest.of("a").outputFormat("raw_rgb8"));
        assertEquals(ImageFormat.IMAGE_FORMAT_RAW_RGB8, message.getOutputFormat());
        EditRequest edit = EditRequest.of("a", MediaSource.asset("x")).task("Inpaint").build();
        assertEquals(Task.TASK_INPAINT, ((EditImageRequest) edit.message()).getTask());
    }

    @Test
    void wrongValuesAreRefusedAllAtOnce() {
        for (String name : new String[] {"GIFF", "unspecified", ""}) {
            ImageRequest.Builder request = ImageRequest.of("a").outputFormat(name).steps(-1);
            OmniException error = assertThrows(OmniException.class, request::build);
            assertEquals(Status.Code.INVALID_ARGUMENT, error.code());
            assertEquals("output_format", error.fieldViolations().get(0).field());
            assertTrue(error.fieldViolations().get(0).description().contains("PNG, JPEG"));
            assertEquals("sampling.steps", error.fieldViolations().get(1).field());
        }
        OmniException states = assertThrows(OmniException.class, () -> new JobFilter().states("DONE"));
        assertEquals("states", states.fieldViolations().get(0).field());
    }

    @Test
    void addressesAreChecked() {
        for (String good : new String[] {"localhost:1", "[::1]:50051", "dns:///host.example:443", "10.0.0.1:65535"}) {
            assertEquals(good, Address.of(good).toString());
        }
        for (String bad : new String[] {"host", "http://host:1", "host:70000", "host:0", "::1:50051", " host:1", ""}) {
            OmniException error = assertThrows(OmniException.class, () -> Address.of(bad), bad);
            assertEquals("address", error.fieldViolations().get(0).field());
        }
    }

    @Test
    void tokensNeedTlsToOtherMachines() {
        ClientBuilder remote = OmniClient.builder("server.example:50051").token("secret");
        OmniException error = assertThrows(OmniException.class, remote::build);
        assertEquals("TOKEN_NEEDS_TLS", error.reason());
        assertFalse(error.getMessage().contains("secret"));
        for (String local : new String[] {"localhost:1", "127.0.0.2:1", "[::1]:1", "a.localhost:1"}) {
            OmniClient.builder(local).token("secret").build().close();
        }
        remote.insecure().build().close();
        assertFalse(Address.of("localhost.example:1").isLocal());
        assertTrue(Address.of("unix:/run/server.sock").isLocal());
        assertThrows(OmniException.class, () -> OmniClient.builder("localhost:1").token("two words"));
    }

    @Test
    void aCancelledFutureLeavesNothingBehind() {
        try (OmniClient client = OmniClient.connect("localhost:1")) {
            CompletableFuture<GenerationResult> future = client.generateAsync(ImageRequest.of("a").build());
            assertTrue(future.cancel(true));
            assertThrows(CancellationException.class, future::join);
        }
    }

    @Test
    void anInterruptedThreadStaysInterrupted() {
        ImageRequest request = ImageRequest.of("a").timeout(Duration.ofSeconds(9)).build();
        try (OmniClient client = OmniClient.connect("localhost:1")) {
            Thread.currentThread().interrupt();
            OmniException error = assertThrows(OmniException.class, () -> client.generate(request));
            assertEquals(Status.Code.CANCELLED, error.code());
        } finally {
            assertTrue(Thread.interrupted());
        }
    }
}
