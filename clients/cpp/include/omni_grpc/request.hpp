// What a generation may ask for. What is not set is not sent, and gets the model's default.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <omni_grpc/v1/generation.pb.h>

#include "omni_grpc/error.hpp"

namespace omni {

namespace v1 = ::omni_grpc::v1;

// An image, video or sound that a request brings along.
class Media {
 public:
  // Reads the file. Throws Error (INVALID_ARGUMENT, field media) if it cannot be read.
  static Media File(const std::string& path);
  // The bytes of a file. Without a MIME type the server finds it from the bytes.
  static Media Bytes(std::string data, std::string mime_type = "");
  // What Client::Upload returned, or the artifact_id of an earlier output.
  static Media Asset(std::string asset_id);
  // A data: URI, or an address that the server may fetch.
  static Media Uri(std::string uri);

  const v1::MediaInput& proto() const noexcept { return input_; }

 private:
  v1::MediaInput input_;
};

// What every generation has. Names (formats, tasks, policies) are those of the API in any case, without the prefix of
// their enum: "png", "RAW_RGB8", "IMAGE_EDIT". A name that there is not is refused by the client, by field.
struct Request {
  std::string prompt;
  std::string model;  // "": the only model of the server
  std::optional<std::string> negative_prompt;  // unset and "" differ: "" turns classifier-free guidance on
  std::optional<std::uint32_t> steps;
  std::optional<double> guidance_scale;
  std::optional<double> true_cfg_scale;
  std::optional<double> guidance_scale_low_noise;
  std::optional<double> guidance_rescale;
  std::optional<std::string> guidance_norm;
  std::optional<double> guidance_interval_start;
  std::optional<double> guidance_interval_end;
  std::optional<double> boundary_ratio;
  std::optional<double> shift;
  std::vector<double> sigmas;
  std::optional<std::uint64_t> seed;
  std::vector<std::uint64_t> seeds;
  std::optional<std::uint32_t> num_outputs;
  std::optional<std::string> scheduler;
  std::optional<std::string> preset;
  std::map<std::string, double> loras;  // lora_id -> scale
  std::optional<std::string> output_format;

  std::optional<std::string> request_id;  // unset: a new UUID4
  std::optional<std::string> client_job_id;
  std::map<std::string, std::string> labels;
  std::optional<std::int32_t> priority;
  std::optional<Seconds> queue_timeout;
  std::optional<Seconds> run_timeout;
  std::optional<Seconds> retention;
  std::optional<std::string> on_server_restart;
  std::optional<std::uint32_t> preview_every_steps;
  std::optional<std::uint32_t> preview_max_edge_px;
  bool embed_parameters = false;

  // How long the caller waits for all that a method does; not a limit of the job, which is cancelled when it passes.
  std::optional<Seconds> timeout;
};

struct ImageRequest : Request {
  std::optional<std::uint32_t> width;
  std::optional<std::uint32_t> height;
};

struct EditRequest : Request {
  std::vector<Media> images;
  std::optional<Media> mask;
  std::optional<std::uint32_t> width;
  std::optional<std::uint32_t> height;
  std::optional<double> strength;
  std::optional<std::uint32_t> layers;
  std::optional<std::string> task;
};

struct VideoRequest : Request {
  std::optional<std::uint32_t> width;
  std::optional<std::uint32_t> height;
  std::optional<Media> first_frame;
  std::optional<Media> last_frame;
  std::optional<Media> source_video;
  std::vector<Media> reference_images;
  std::optional<Media> control_video;
  std::optional<Media> mask_video;
  std::optional<Media> audio;
  std::optional<double> strength;
  std::optional<std::uint32_t> num_frames;  // or duration
  std::optional<Seconds> duration;
  std::optional<double> fps;
  std::optional<double> output_fps;
  std::optional<bool> with_audio;
  std::optional<std::string> task;
};

struct AudioRequest : Request {
  std::string text;
  std::optional<Media> reference;
  std::optional<double> strength;
  std::optional<Seconds> start;
  std::optional<Seconds> end;  // or duration
  std::optional<Seconds> duration;
  std::optional<std::uint32_t> sample_rate_hz;
};

// The messages of the API, for fields that the structs above do not have. Throw Error (INVALID_ARGUMENT) by field.
v1::GenerateImageRequest ToProto(const ImageRequest& request);
v1::EditImageRequest ToProto(const EditRequest& request);
v1::GenerateVideoRequest ToProto(const VideoRequest& request);
v1::GenerateAudioRequest ToProto(const AudioRequest& request);

}  // namespace omni
