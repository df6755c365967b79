#include "omni_grpc/request.hpp"

#include <cmath>
#include <fstream>
#include <iterator>

#include "digest.hpp"
#include "names.hpp"

namespace omni {
namespace {

using Faults = std::vector<FieldViolation>;

void Put(Seconds value, google::protobuf::Duration* duration) {
  const double whole = std::trunc(value.count());
  duration->set_seconds(static_cast<std::int64_t>(whole));
  duration->set_nanos(static_cast<std::int32_t>(std::lround((value.count() - whole) * 1e9)));
  if (std::abs(duration->nanos()) == 1'000'000'000) {  // rounded up to a whole second
    duration->set_seconds(duration->seconds() + (duration->nanos() > 0 ? 1 : -1));
    duration->set_nanos(0);
  }
}

// Values travel as they are; what is unset stays unset.
template <class Value, class Message, class Argument>
void Set(const std::optional<Value>& value, Message* message, void (Message::*set)(Argument)) {
  if (value) (message->*set)(*value);
}

template <class Enum, class Message>
void SetName(const std::optional<std::string>& name, const char* field, Message* message, void (Message::*set)(Enum),
             Faults& faults) {
  if (!name) return;
  const auto number = internal::NumberOf(google::protobuf::GetEnumDescriptor<Enum>(), field, *name, faults);
  if (number) (message->*set)(static_cast<Enum>(*number));
}

void PutSampling(const Request& from, v1::SamplingParams* to, Faults& faults) {
  using S = v1::SamplingParams;
  Set(from.steps, to, &S::set_steps);
  Set(from.shift, to, &S::set_shift);
  Set(from.seed, to, &S::set_seed);
  Set(from.num_outputs, to, &S::set_num_outputs);
  if (from.scheduler) to->set_scheduler(*from.scheduler);
  if (from.preset) to->set_preset(*from.preset);
  for (const double level : from.sigmas) to->add_sigmas(level);
  for (const std::uint64_t seed : from.seeds) to->add_seeds(seed);
  for (const auto& [name, scale] : from.loras) {
    v1::LoraRef* lora = to->add_loras();
    lora->set_lora_id(name);
    lora->set_scale(scale);
  }
  using G = v1::Guidance;
  G guidance;
  Set(from.guidance_scale, &guidance, &G::set_scale);
  Set(from.true_cfg_scale, &guidance, &G::set_true_cfg_scale);
  Set(from.guidance_scale_low_noise, &guidance, &G::set_scale_low_noise);
  Set(from.guidance_rescale, &guidance, &G::set_rescale);
  SetName(from.guidance_norm, "sampling.guidance.norm", &guidance, &G::set_norm, faults);
  Set(from.guidance_interval_start, &guidance, &G::set_interval_start);
  Set(from.guidance_interval_end, &guidance, &G::set_interval_end);
  Set(from.boundary_ratio, &guidance, &G::set_boundary_ratio);
  if (guidance.ByteSizeLong() > 0) *to->mutable_guidance() = std::move(guidance);
}

void PutOptions(const Request& from, v1::JobOptions* to, Faults& faults) {
  to->set_request_id(from.request_id ? *from.request_id : internal::Uuid4());
  if (from.client_job_id) to->set_client_job_id(*from.client_job_id);
  to->mutable_labels()->insert(from.labels.begin(), from.labels.end());
  Set(from.priority, to, &v1::JobOptions::set_priority);
  if (from.queue_timeout) Put(*from.queue_timeout, to->mutable_queue_timeout());
  if (from.run_timeout) Put(*from.run_timeout, to->mutable_run_timeout());
  if (from.retention) Put(*from.retention, to->mutable_retention());
  SetName(from.on_server_restart, "options.on_server_restart", to, &v1::JobOptions::set_on_server_restart, faults);
  if (from.embed_parameters) to->set_embed_parameters(true);
  if (from.preview_every_steps) {
    to->mutable_preview()->set_method(v1::PREVIEW_METHOD_LATENT_RGB);
    to->mutable_preview()->set_every_steps(*from.preview_every_steps);
  }
  if (from.preview_max_edge_px) to->mutable_preview()->set_max_edge_px(*from.preview_max_edge_px);
}

template <class Message>
void PutCommon(const Request& from, Message* to, Faults& faults) {
  to->set_model(from.model);
  to->set_prompt(from.prompt);
  if (from.negative_prompt) to->set_negative_prompt(*from.negative_prompt);
  PutSampling(from, to->mutable_sampling(), faults);
  SetName(from.output_format, "output_format", to, &Message::set_output_format, faults);
  PutOptions(from, to->mutable_options(), faults);
}

template <class From, class Message>
void PutSize(const From& from, Message* to) {
  Set(from.width, to, &Message::set_width);
  Set(from.height, to, &Message::set_height);
}

template <class Message>
void PutMedia(const std::optional<Media>& from, Message* to, v1::MediaInput* (Message::*input)()) {
  if (from) *(to->*input)() = from->proto();
}

void Check(Faults faults) {
  if (!faults.empty()) throw InvalidFields(std::move(faults));
}

}  // namespace

Media Media::File(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string data{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) throw InvalidField("media", "file " + path + " cannot be read");
  return Bytes(std::move(data));
}

Media Media::Bytes(std::string data, std::string mime_type) {
  Media media;
  media.input_.set_data(std::move(data));
  media.input_.set_mime_type(std::move(mime_type));
  return media;
}

Media Media::Asset(std::string asset_id) {
  Media media;
  media.input_.set_asset_id(std::move(asset_id));
  return media;
}

Media Media::Uri(std::string uri) {
  Media media;
  media.input_.set_uri(std::move(uri));
  return media;
}

v1::GenerateImageRequest ToProto(const ImageRequest& request) {
  v1::GenerateImageRequest message;
  Faults faults;
  PutCommon(request, &message, faults);
  PutSize(request, &message);
  Check(std::move(faults));
  return message;
}

v1::EditImageRequest ToProto(const EditRequest& request) {
  using M = v1::EditImageRequest;
  M message;
  Faults faults;
  PutCommon(request, &message, faults);
  PutSize(request, &message);
  for (const Media& image : request.images) *message.add_images() = image.proto();
  PutMedia(request.mask, &message, &M::mutable_mask);
  Set(request.strength, &message, &M::set_strength);
  Set(request.layers, &message, &M::set_layers);
  SetName(request.task, "task", &message, &M::set_task, faults);
  Check(std::move(faults));
  return message;
}

v1::GenerateVideoRequest ToProto(const VideoRequest& request) {
  using M = v1::GenerateVideoRequest;
  M message;
  Faults faults;
  PutCommon(request, &message, faults);
  PutSize(request, &message);
  for (const Media& image : request.reference_images) *message.add_reference_images() = image.proto();
  PutMedia(request.first_frame, &message, &M::mutable_first_frame);
  PutMedia(request.last_frame, &message, &M::mutable_last_frame);
  PutMedia(request.source_video, &message, &M::mutable_source_video);
  PutMedia(request.control_video, &message, &M::mutable_control_video);
  PutMedia(request.mask_video, &message, &M::mutable_mask_video);
  PutMedia(request.audio, &message, &M::mutable_audio);
  Set(request.strength, &message, &M::set_strength);
  if (request.num_frames && request.duration) faults.push_back({"num_frames", "is set beside duration; set one of them"});
  Set(request.num_frames, &message, &M::set_num_frames);
  if (request.duration) Put(*request.duration, message.mutable_duration());
  Set(request.fps, &message, &M::set_fps);
  Set(request.output_fps, &message, &M::set_output_fps);
  Set(request.with_audio, &message, &M::set_with_audio);
  SetName(request.task, "task", &message, &M::set_task, faults);
  Check(std::move(faults));
  return message;
}

v1::GenerateAudioRequest ToProto(const AudioRequest& request) {
  using M = v1::GenerateAudioRequest;
  M message;
  Faults faults;
  PutCommon(request, &message, faults);
  message.set_text(request.text);
  PutMedia(request.reference, &message, &M::mutable_reference);
  Set(request.strength, &message, &M::set_strength);
  if (request.start) Put(*request.start, message.mutable_start());
  if (request.end) Put(*request.end, message.mutable_end());
  if (request.duration) Put(*request.duration, message.mutable_duration());
  Set(request.sample_rate_hz, &message, &M::set_sample_rate_hz);
  Check(std::move(faults));
  return message;
}

}  // namespace omni
