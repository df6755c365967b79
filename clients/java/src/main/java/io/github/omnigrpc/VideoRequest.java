package io.github.omnigrpc;

import io.github.omnigrpc.v1.GenerateVideoRequest;

import java.time.Duration;

/** A video from a prompt, images, a video or a sound. */
public final class VideoRequest extends GenerationRequest {
    private VideoRequest(Builder builder) {
        super(builder);
    }

    /** Begins a request. */
    public static Builder of(String prompt) {
        return new Builder(prompt);
    }

    /** Sets what the request says. */
    public static final class Builder extends GenerationRequest.Builder<Builder> {
        private Builder(String prompt) {
            super(GenerateVideoRequest.newBuilder(), prompt);
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

        /** Image that the video starts with. */
        public Builder firstFrame(MediaSource source) {
            return put("first_frame", source);
        }

        /** Image that the video ends with. */
        public Builder lastFrame(MediaSource source) {
            return put("last_frame", source);
        }

        /** Video to start from. */
        public Builder sourceVideo(MediaSource source) {
            return put("source_video", source);
        }

        /** Adds an image of what is to appear. */
        public Builder referenceImage(MediaSource source) {
            return add("reference_images", source);
        }

        /** Video of poses, depth or edges to follow. */
        public Builder controlVideo(MediaSource source) {
            return put("control_video", source);
        }

        /** What to make anew in the source video: white is made, black is kept. */
        public Builder maskVideo(MediaSource source) {
            return put("mask_video", source);
        }

        /** Sound that drives the video. */
        public Builder audio(MediaSource source) {
            return put("audio", source);
        }

        /** Share of noise that is added to the input, from 0 to 1. */
        public Builder strength(double share) {
            return put("strength", share);
        }

        /** Number of frames. Set this or the duration. */
        public Builder numFrames(int frames) {
            return putNatural("num_frames", frames);
        }

        /** Playing time. Set this or the number of frames. */
        public Builder duration(Duration time) {
            return put("duration", time);
        }

        /** Frames per second that the model generates for. */
        public Builder fps(double rate) {
            return put("fps", rate);
        }

        /** Frames per second of the file. */
        public Builder outputFps(double rate) {
            return put("output_fps", rate);
        }

        /** Whether the sound is made as well. */
        public Builder withAudio(boolean on) {
            return put("with_audio", on);
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
        public VideoRequest build() {
            return new VideoRequest(this);
        }
    }
}
