package io.github.omnigrpc;

import io.github.omnigrpc.v1.EditImageRequest;

/** Images from images: edit, inpaint, image to image, layers. */
public final class EditRequest extends GenerationRequest {
    private EditRequest(Builder builder) {
        super(builder);
    }

    /** Begins a request. */
    public static Builder of(String prompt, MediaSource image) {
        return new Builder(prompt).image(image);
    }

    /** Sets what the request says. */
    public static final class Builder extends GenerationRequest.Builder<Builder> {
        private Builder(String prompt) {
            super(EditImageRequest.newBuilder(), prompt);
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

        /** Adds an image, in the order in which the prompt speaks of them. */
        public Builder image(MediaSource source) {
            return add("images", source);
        }

        /** What to make anew: white is made, black is kept. */
        public Builder mask(MediaSource source) {
            return put("mask", source);
        }

        /** Share of noise that is added to the input, from 0 to 1. */
        public Builder strength(double share) {
            return put("strength", share);
        }

        /** Number of layers to take the image apart into. */
        public Builder layers(int layers) {
            return putNatural("layers", layers);
        }

        /** The task, by name: {@code inpaint}, ... Not set: found from the inputs. */
        public Builder task(String name) {
            return named("task", name);
        }

        /**
         * The request.
         *
         * @throws OmniException INVALID_ARGUMENT, by field, for values that cannot be sent
         */
        public EditRequest build() {
            return new EditRequest(this);
        }
    }
}
