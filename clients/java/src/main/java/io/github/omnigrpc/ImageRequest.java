package io.github.omnigrpc;

import io.github.omnigrpc.v1.GenerateImageRequest;

/** Images from a prompt. */
public final class ImageRequest extends GenerationRequest {
    private ImageRequest(Builder builder) {
        super(builder);
    }

    /** Begins a request. */
    public static Builder of(String prompt) {
        return new Builder(prompt);
    }

    /** Sets what the request says. */
    public static final class Builder extends GenerationRequest.Builder<Builder> {
        private Builder(String prompt) {
            super(GenerateImageRequest.newBuilder(), prompt);
        }

        @Override
        Builder self() {
            return this;
        }

        /** Width in pixels. */
        public Builder width(int pixels) {
            return putNatural("width", pixels);
        }

        /** Height in pixels. */
        public Builder height(int pixels) {
            return putNatural("height", pixels);
        }

        /**
         * The request.
         *
         * @throws OmniException INVALID_ARGUMENT, by field, for values that cannot be sent
         */
        public ImageRequest build() {
            return new ImageRequest(this);
        }
    }
}
