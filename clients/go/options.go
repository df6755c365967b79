package omnigrpc

import (
	"time"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// Model names the model; it can be left out where the server has only one.
func Model(name string) Option { return Set("model", name) }

// NegativePrompt says what to steer away from. "" differs from leaving it out.
func NegativePrompt(text string) Option { return Set("negative_prompt", text) }

// Width is in pixels.
func Width(pixels uint32) Option { return Set("width", pixels) }

// Height is in pixels.
func Height(pixels uint32) Option { return Set("height", pixels) }

// Size is width and height in pixels.
func Size(width, height uint32) Option {
	return func(r *Request) { r.apply([]Option{Width(width), Height(height)}) }
}

// Steps is the number of denoise steps.
func Steps(steps uint32) Option { return Set("sampling.steps", steps) }

// Seed of the first output; 0 is a seed as any other.
func Seed(seed uint64) Option { return Set("sampling.seed", seed) }

// Seeds has one for each output.
func Seeds(seeds ...uint64) Option { return Set("sampling.seeds", seeds) }

// NumOutputs is how many are made.
func NumOutputs(outputs uint32) Option { return Set("sampling.num_outputs", outputs) }

// GuidanceScale is the embedded guidance of distilled models.
func GuidanceScale(scale float64) Option { return Set("sampling.guidance.scale", scale) }

// TrueCFGScale is classifier-free guidance over two predictions.
func TrueCFGScale(scale float64) Option { return Set("sampling.guidance.true_cfg_scale", scale) }

// OutputFormat by name: "png", "jpeg", "webp", "raw_rgb8"; "mp4", "webm", "fmp4"; "wav", "flac", "mp3", "opus".
func OutputFormat(name string) Option { return Set("output_format", name) }

// Strength is how much of the input is replaced by noise, from 0 to 1.
func Strength(share float64) Option { return Set("strength", share) }

// Duration is the playing time of video and sound.
func Duration(time time.Duration) Option { return Set("duration", time) }

// RequestID is the idempotency key; a UUID4 where it is left out.
func RequestID(id string) Option { return Set("options.request_id", id) }

// Priority from -100 to 100.
func Priority(priority int32) Option { return Set("options.priority", priority) }

// QueueTimeout fails a job that has not started by then.
func QueueTimeout(limit time.Duration) Option { return Set("options.queue_timeout", limit) }

// RunTimeout fails a job that runs for longer.
func RunTimeout(limit time.Duration) Option { return Set("options.run_timeout", limit) }

// Labels are for ListJobs.
func Labels(labels map[string]string) Option { return Set("options.labels", labels) }

// Previews asks for a small picture every so many steps, with a linear map that costs next to nothing; another method
// is Set("options.preview.method", "tiny_vae").
func Previews(everySteps uint32) Option {
	return func(r *Request) {
		r.apply([]Option{
			Set("options.preview.method", "latent_rgb"), Set("options.preview.every_steps", everySteps),
		})
	}
}

// Bytes is media that travels inside the request; upload what is larger than a few MiB.
func Bytes(data []byte) *v1.MediaInput {
	return &v1.MediaInput{Source: &v1.MediaInput_Data{Data: data}}
}

// Asset is media that was uploaded, or an output of an earlier job by its artifact_id.
func Asset(id string) *v1.MediaInput {
	return &v1.MediaInput{Source: &v1.MediaInput_AssetId{AssetId: id}}
}
