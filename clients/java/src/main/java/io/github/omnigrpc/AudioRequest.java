package io.github.omnigrpc;

import io.github.omnigrpc.v1.GenerateAudioRequest;

import java.time.Duration;

/** Sound from a prompt. */
public final class AudioRequest extends GenerationRequest {
    private AudioRequest(Builder builder) {
        super(builder);
    }

    /** Begins a request. */
    public static Builder of(String prompt) {
        return new Builder(prompt);
    }

    /** Sets what the request says. */
    public static final class Builder extends GenerationRequest.Builder<Builder> {
        private Builder(String prompt) {
            super(GenerateAudioRequest.newBuilder(), prompt);
        }

        @Override
        Builder self() {
            return this;
        }

        /** Words to be sung or spoken. */
        public Builder text(String words) {
            return put("text", words);
        }

        /** A sound to start from, or a voice to sound like. */
        public Builder reference(MediaSource source) {
            return put("reference", source);
        }

        /** Share of noise that is added to the input, from 0 to 1. */
        public Builder strength(double share) {
            return put("strength", share);
        }

        /** Where in the whole piece the clip begins. */
        public Builder start(Duration time) {
            return put("start", time);
        }

        /** Where in the whole piece the clip ends. Set this or the duration. */
        public Builder end(Duration time) {
            return put("end", time);
        }

        /** Playing time. Set this or the end. */
        public Builder duration(Duration time) {
            return put("duration", time);
        }

        /** Samples per second of the file. */
        public Builder sampleRateHz(int rate) {
            return putNatural("sample_rate_hz", rate);
        }

        /**
         * The request.
         *
         * @throws OmniException INVALID_ARGUMENT, by field, for values that cannot be sent
         */
        public AudioRequest build() {
            return new AudioRequest(this);
        }
    }
}
