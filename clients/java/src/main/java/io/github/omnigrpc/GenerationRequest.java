package io.github.omnigrpc;

import com.google.protobuf.Descriptors.EnumDescriptor;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.github.omnigrpc.v1.JobOptions;
import io.github.omnigrpc.v1.PreviewMethod;
import io.github.omnigrpc.v1.SamplingParams;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.UUID;
import java.util.function.Consumer;
import java.util.stream.Collectors;

/**
 * What to make: {@link ImageRequest}, {@link EditRequest}, {@link VideoRequest} or {@link AudioRequest}. Immutable;
 * what was not set is not sent, and gets the model's default. May be sent several times: each time is a new job, unless
 * {@code requestId} was given.
 */
public abstract class GenerationRequest {
    private final Message message;
    private final Duration timeout;

    GenerationRequest(Builder<?> builder) {
        message = builder.finished();
        timeout = builder.timeout;
    }

    /** The message that is sent, but for its request_id where none was given. */
    Message message() {
        return message;
    }

    /** How long the caller waits, or null. */
    Duration timeout() {
        return timeout;
    }

    /** The message with a request_id. */
    Message identified() {
        FieldDescriptor options = field(message, "options");
        JobOptions given = (JobOptions) message.getField(options);
        if (!given.getRequestId().isEmpty()) {
            return message;
        }
        JobOptions identified = given.toBuilder().setRequestId(UUID.randomUUID().toString()).build();
        return message.toBuilder().setField(options, identified).build();
    }

    private static FieldDescriptor field(Message message, String name) {
        return message.getDescriptorForType().findFieldByName(name);
    }

    /**
     * Sets what every kind of request has. Values that cannot be sent are refused by {@code build}, all at once.
     *
     * @param <B> the builder itself
     */
    public abstract static class Builder<B extends Builder<B>> {
        private final Message.Builder message;
        private final SamplingParams.Builder sampling = SamplingParams.newBuilder();
        private final JobOptions.Builder options = JobOptions.newBuilder();
        private final List<FieldViolation> faults = new ArrayList<>();
        private Duration timeout;

        Builder(Message.Builder message, String prompt) {
            this.message = message;
            put("prompt", Objects.requireNonNull(prompt));
        }

        abstract B self();

        /** The model. Not set: the only one of the server. */
        public B model(String name) {
            return put("model", name);
        }

        /** What to steer away from. "" counts: it turns classifier-free guidance on. */
        public B negativePrompt(String text) {
            return put("negative_prompt", text);
        }

        /** Denoise steps. */
        public B steps(int steps) {
            sampling.setSteps(natural("sampling.steps", steps));
            return self();
        }

        /** Seed of output 0, from 0 to 2^53 - 1; output i uses seed + i. Not set: drawn at random. */
        public B seed(long seed) {
            sampling.setSeed(natural("sampling.seed", seed));
            return self();
        }

        /** Number of outputs. */
        public B numOutputs(int outputs) {
            sampling.setNumOutputs(natural("sampling.num_outputs", outputs));
            return self();
        }

        /** One of the model's schedulers. */
        public B scheduler(String name) {
            sampling.setScheduler(name);
            return self();
        }

        /** A preset of the model: settings that belong together. */
        public B preset(String name) {
            sampling.setPreset(name);
            return self();
        }

        /** Embedded guidance of distilled models. */
        public B guidanceScale(double scale) {
            sampling.getGuidanceBuilder().setScale(scale);
            return self();
        }

        /** Classifier-free guidance; active above 1 and with a negative prompt. */
        public B trueCfgScale(double scale) {
            sampling.getGuidanceBuilder().setTrueCfgScale(scale);
            return self();
        }

        /** Adds a LoRA adapter with its scale. */
        public B lora(String loraId, double scale) {
            sampling.addLorasBuilder().setLoraId(loraId).setScale(scale);
            return self();
        }

        /** Any other setting of {@code SamplingParams}. */
        public B sampling(Consumer<SamplingParams.Builder> change) {
            change.accept(sampling);
            return self();
        }

        /** How outputs are encoded, by name: {@code png}, {@code jpeg}, {@code mp4}, {@code wav}, ... */
        public B outputFormat(String name) {
            return named("output_format", name);
        }

        /** Idempotency key: the same key with the same request is the same job. */
        public B requestId(String key) {
            options.setRequestId(key);
            return self();
        }

        /** Labels, to list jobs by. */
        public B labels(Map<String, String> labels) {
            options.putAllLabels(labels);
            return self();
        }

        /** Priority from -100 to 100; higher runs first. */
        public B priority(int priority) {
            options.setPriority(priority);
            return self();
        }

        /** How long the job may wait before it fails, whoever watches. */
        public B queueTimeout(Duration time) {
            options.setQueueTimeout(Times.toProto(time));
            return self();
        }

        /** How long the job may run before it fails, whoever watches. */
        public B runTimeout(Duration time) {
            options.setRunTimeout(Times.toProto(time));
            return self();
        }

        /** A small picture of the latents on every n-th step event, at most so many pixels wide and high. */
        public B previews(int everySteps, int maxEdgePx) {
            previews(everySteps);
            options.getPreviewBuilder().setMaxEdgePx(natural("options.preview.max_edge_px", maxEdgePx));
            return self();
        }

        /** A small picture of the latents on every n-th step event. */
        public B previews(int everySteps) {
            options.getPreviewBuilder()
                    .setMethod(PreviewMethod.PREVIEW_METHOD_LATENT_RGB)
                    .setEverySteps(natural("options.preview.every_steps", everySteps));
            return self();
        }

        /** Any other setting of {@code JobOptions}. */
        public B options(Consumer<JobOptions.Builder> change) {
            change.accept(options);
            return self();
        }

        /** How long the caller waits for everything; the job of a generation is cancelled then. Not set: no limit. */
        public B timeout(Duration time) {
            timeout = time;
            return self();
        }

        B put(String field, Object value) {
            message.setField(message.getDescriptorForType().findFieldByName(field), value);
            return self();
        }

        B put(String field, MediaSource source) {
            return put(field, source.input());
        }

        B add(String field, MediaSource source) {
            message.addRepeatedField(message.getDescriptorForType().findFieldByName(field), source.input());
            return self();
        }

        B put(String field, Duration time) {
            return put(field, (Object) Times.toProto(time));
        }

        B putNatural(String field, int value) {
            return put(field, (Object) natural(field, value));
        }

        B named(String field, String name) {
            FieldDescriptor found = message.getDescriptorForType().findFieldByName(field);
            EnumDescriptor type = found.getEnumType();
            Names.find(type, name)
                    .ifPresentOrElse(
                            value -> message.setField(found, value),
                            () -> faults.add(new FieldViolation(field, Names.rule(type, name))));
            return self();
        }

        private void putIfSaid(String field, Message value) {
            if (!value.equals(value.getDefaultInstanceForType())) {
                put(field, (Object) value);
            }
        }

        private int natural(String field, int value) {
            return (int) natural(field, (long) value);
        }

        /** The API's numbers have no sign: a negative one would arrive as a large one. */
        private long natural(String field, long value) {
            if (value < 0) {
                faults.add(new FieldViolation(field, "is " + value + ", expected 0 or more"));
            }
            return value;
        }

        private Message finished() {
            if (!faults.isEmpty()) {
                String all = faults.stream().map(one -> one.field() + " " + one.description())
                        .collect(Collectors.joining("; "));
                OmniException.Builder error = OmniException.of(Status.Code.INVALID_ARGUMENT, "", all);
                faults.forEach(one -> error.violation(one.field(), one.description()));
                throw error.build();
            }
            putIfSaid("sampling", sampling.build());
            putIfSaid("options", options.build());
            return message.build();
        }
    }
}
