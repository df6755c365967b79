#include "omni_grpc/client.hpp"

#include <utility>

#include "connection.hpp"
#include "digest.hpp"
#include "names.hpp"
#include "stream_impl.hpp"

namespace omni {
namespace {

using internal::Connection;
using internal::Deadline;
using Inputs = std::vector<v1::MediaInput*>;
using Generation = v1::GenerationService::Stub;

// The most bytes of media that are sent inside a request. If there are more, all of them are uploaded first.
constexpr std::size_t kInlineBytes = 4 << 20;
constexpr std::uint32_t kPage = 100;

Inputs MediaOf(v1::GenerateImageRequest&) { return {}; }

Inputs MediaOf(v1::EditImageRequest& request) {
  Inputs found{request.mutable_images()->pointer_begin(), request.mutable_images()->pointer_end()};
  if (request.has_mask()) found.push_back(request.mutable_mask());
  return found;
}

Inputs MediaOf(v1::GenerateVideoRequest& request) {
  Inputs found{request.mutable_reference_images()->pointer_begin(), request.mutable_reference_images()->pointer_end()};
  if (request.has_first_frame()) found.push_back(request.mutable_first_frame());
  if (request.has_last_frame()) found.push_back(request.mutable_last_frame());
  if (request.has_source_video()) found.push_back(request.mutable_source_video());
  if (request.has_control_video()) found.push_back(request.mutable_control_video());
  if (request.has_mask_video()) found.push_back(request.mutable_mask_video());
  if (request.has_audio()) found.push_back(request.mutable_audio());
  return found;
}

Inputs MediaOf(v1::GenerateAudioRequest& request) {
  if (request.has_reference()) return {request.mutable_reference()};
  return {};
}

// Fills in the idempotency key, and uploads media that are too large to be sent inside the request.
template <class Message>
void Complete(const Connection& connection, Message& request, const Deadline& deadline) {
  if (request.options().request_id().empty()) request.mutable_options()->set_request_id(internal::Uuid4());
  const Inputs inputs = MediaOf(request);
  std::size_t bytes = 0;
  for (const v1::MediaInput* input : inputs) bytes += input->data().size();
  if (bytes <= kInlineBytes) return;
  for (v1::MediaInput* input : inputs) {
    if (input->has_data()) input->set_asset_id(connection.Upload(*input, deadline).asset_id());
  }
}

template <class Message, class Response>
Stream Begin(const std::shared_ptr<Connection>& connection,
             std::unique_ptr<grpc::ClientReader<Response>> (Generation::*rpc)(grpc::ClientContext*, const Message&),
             Message request, std::optional<Seconds> timeout) {
  const Deadline deadline(timeout);
  Complete(*connection, request, deadline);
  auto open = [connection = connection.get(), rpc, request = std::move(request)](const Deadline& until) {
    return std::make_unique<internal::CallSource<Response>>(*connection, connection->generation(), rpc, request, until);
  };
  internal::WatchState watch(connection->options().reconnect, v1::ARTIFACT_DELIVERY_INLINE_CHUNKS);
  auto impl =
      std::make_unique<internal::StreamImpl>(connection, std::move(open), std::move(watch), deadline, /*owner=*/true);
  impl->Open();
  return Stream(std::move(impl));
}

Result Follow(Stream stream, const Progress& progress) {
  for (const v1::JobEvent& event : stream) progress(event);
  return stream.Result();
}

}  // namespace

Client::Client(const std::string& address, ClientOptions options)
    : connection_(std::make_shared<Connection>(address, std::move(options))) {}

Result Client::GenerateImage(const ImageRequest& request, const Progress& progress) {
  return Follow(StreamImage(request), progress);
}
Result Client::EditImage(const EditRequest& request, const Progress& progress) {
  return Follow(StreamEdit(request), progress);
}
Result Client::GenerateVideo(const VideoRequest& request, const Progress& progress) {
  return Follow(StreamVideo(request), progress);
}
Result Client::GenerateAudio(const AudioRequest& request, const Progress& progress) {
  return Follow(StreamAudio(request), progress);
}

Stream Client::StreamImage(const ImageRequest& request) { return Start(ToProto(request), request.timeout); }
Stream Client::StreamEdit(const EditRequest& request) { return Start(ToProto(request), request.timeout); }
Stream Client::StreamVideo(const VideoRequest& request) { return Start(ToProto(request), request.timeout); }
Stream Client::StreamAudio(const AudioRequest& request) { return Start(ToProto(request), request.timeout); }

Stream Client::Start(v1::GenerateImageRequest request, std::optional<Seconds> timeout) {
  return Begin(connection_, &Generation::GenerateImage, std::move(request), timeout);
}
Stream Client::Start(v1::EditImageRequest request, std::optional<Seconds> timeout) {
  return Begin(connection_, &Generation::EditImage, std::move(request), timeout);
}
Stream Client::Start(v1::GenerateVideoRequest request, std::optional<Seconds> timeout) {
  return Begin(connection_, &Generation::GenerateVideo, std::move(request), timeout);
}
Stream Client::Start(v1::GenerateAudioRequest request, std::optional<Seconds> timeout) {
  return Begin(connection_, &Generation::GenerateAudio, std::move(request), timeout);
}

v1::Job Client::CreateJob(const ImageRequest& request) {
  v1::CreateJobRequest job;
  *job.mutable_generate_image() = ToProto(request);
  return CreateJob(std::move(job), request.timeout);
}
v1::Job Client::CreateJob(const EditRequest& request) {
  v1::CreateJobRequest job;
  *job.mutable_edit_image() = ToProto(request);
  return CreateJob(std::move(job), request.timeout);
}
v1::Job Client::CreateJob(const VideoRequest& request) {
  v1::CreateJobRequest job;
  *job.mutable_generate_video() = ToProto(request);
  return CreateJob(std::move(job), request.timeout);
}
v1::Job Client::CreateJob(const AudioRequest& request) {
  v1::CreateJobRequest job;
  *job.mutable_generate_audio() = ToProto(request);
  return CreateJob(std::move(job), request.timeout);
}

v1::Job Client::CreateJob(v1::CreateJobRequest request, std::optional<Seconds> timeout) {
  const Deadline deadline(timeout);
  if (request.has_generate_image()) Complete(*connection_, *request.mutable_generate_image(), deadline);
  if (request.has_edit_image()) Complete(*connection_, *request.mutable_edit_image(), deadline);
  if (request.has_generate_video()) Complete(*connection_, *request.mutable_generate_video(), deadline);
  if (request.has_generate_audio()) Complete(*connection_, *request.mutable_generate_audio(), deadline);
  return connection_->Unary(connection_->jobs(), &v1::JobService::Stub::CreateJob, request, deadline.Remaining()).job();
}

v1::Job Client::GetJob(const std::string& job_id, std::optional<Seconds> timeout) {
  v1::GetJobRequest request;
  request.set_job_id(job_id);
  return connection_->Unary(connection_->jobs(), &v1::JobService::Stub::GetJob, request, timeout).job();
}

std::vector<v1::Job> Client::ListJobs(const JobFilter& filter, std::optional<Seconds> timeout) {
  v1::ListJobsRequest request;
  std::vector<FieldViolation> faults;
  for (const std::string& state : filter.states) {
    const auto number = internal::NumberOf(v1::JobState_descriptor(), "states", state, faults);
    if (number) request.add_states(static_cast<v1::JobState>(*number));
  }
  if (!faults.empty()) throw InvalidFields(std::move(faults));
  request.mutable_label_selector()->insert(filter.labels.begin(), filter.labels.end());
  request.set_model(filter.model);
  request.set_tenant(filter.tenant);
  const Deadline deadline(timeout);
  std::vector<v1::Job> jobs;
  while (jobs.size() < filter.limit) {
    request.set_page_size(static_cast<std::uint32_t>(std::min<std::size_t>(kPage, filter.limit - jobs.size())));
    const auto page =
        connection_->Unary(connection_->jobs(), &v1::JobService::Stub::ListJobs, request, deadline.Remaining());
    jobs.insert(jobs.end(), page.jobs().begin(), page.jobs().end());
    if (page.next_page_token().empty()) break;
    request.set_page_token(page.next_page_token());
  }
  return jobs;
}

v1::Job Client::CancelJob(const std::string& job_id, const std::string& reason, std::optional<Seconds> timeout) {
  return connection_->CancelJob(job_id, reason, timeout);
}

Stream Client::WatchJob(const std::string& job_id, std::uint64_t after_seq, std::optional<Seconds> timeout) {
  internal::WatchState watch(connection_->options().reconnect, v1::ARTIFACT_DELIVERY_REFERENCE, job_id, after_seq);
  auto open = [connection = connection_.get(), request = watch.Request()](const Deadline& deadline) {
    return connection->Watch(request, deadline);
  };
  return Stream(std::make_unique<internal::StreamImpl>(connection_, std::move(open), std::move(watch),
                                                       Deadline(timeout), /*owner=*/false));
}

v1::UploadAssetResponse Client::Upload(const Media& media, std::optional<Seconds> timeout) {
  return connection_->Upload(media.proto(), Deadline(timeout));
}

Downloaded Client::Download(const std::string& artifact_id, std::optional<Seconds> timeout) {
  const internal::PartialArtifact found = connection_->Download(artifact_id, Deadline(timeout));
  return {found.artifact(), found.Data()};
}

std::vector<v1::Model> Client::ListModels(std::optional<Seconds> timeout) {
  const auto reply = connection_->Unary(connection_->models(), &v1::ModelService::Stub::ListModels,
                                        v1::ListModelsRequest(), timeout);
  return {reply.models().begin(), reply.models().end()};
}

}  // namespace omni
