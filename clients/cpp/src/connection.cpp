#include "connection.hpp"

#include <algorithm>

#include "address.hpp"
#include "credentials.hpp"
#include "digest.hpp"
#include "download_state.hpp"

namespace omni::internal {
namespace {

constexpr std::size_t kChunkBytes = 256 * 1024;

grpc::ChannelArguments Arguments(const std::string& address) {
  grpc::ChannelArguments arguments;
  // calls are repeated here, by rules that gRPC's own policy cannot express (a window, RetryInfo)
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // a peer that vanished is noticed within 40 s
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  // by default the backoff grows to two minutes, longer than a job waits for its client to come back
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  // no proxy of the environment can reach a server of this machine
  if (IsLocal(address)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

}  // namespace

Connection::Connection(const std::string& address, ClientOptions options)
    : address_(address), options_(std::move(options)), token_(TokenSource(options_)) {
  CheckAddress(address_);
  channel_ = grpc::CreateCustomChannel(address_, Credentials(address_, options_), Arguments(address_));
  generation_ = v1::GenerationService::NewStub(channel_);
  jobs_ = v1::JobService::NewStub(channel_);
  artifacts_ = v1::ArtifactService::NewStub(channel_);
  models_ = v1::ModelService::NewStub(channel_);
}

void Connection::Prepare(grpc::ClientContext& context, const Deadline& deadline, std::optional<Seconds> most) const {
  auto left = deadline.Remaining();
  if (most) left = left ? std::min(*left, *most) : *most;
  if (left) {
    using std::chrono::system_clock;
    context.set_deadline(system_clock::now() + std::chrono::duration_cast<system_clock::duration>(*left));
  }
  if (token_) context.AddMetadata("authorization", "Bearer " + CheckedToken(token_()));
}

void Connection::Wait(const grpc::Status& status, CallRetry& retry, const Deadline& deadline) const {
  const CallFailure ended = FromCall(status, address_);
  const auto delay = retry.Delay(ended, deadline);
  if (!delay) throw Error(ended.failure);
  Pause(*delay);
}

void Connection::Pause(Seconds wait) const {
  using std::chrono::system_clock;
  const Deadline end(wait);
  channel_->WaitForConnected(system_clock::now() + std::chrono::duration_cast<system_clock::duration>(wait));
  Sleep(*end.Remaining());
}

v1::Job Connection::CancelJob(const std::string& job_id, const std::string& reason,
                              std::optional<Seconds> timeout) const {
  v1::CancelJobRequest request;
  request.set_job_id(job_id);
  request.set_reason(reason);
  return Unary(*jobs_, &v1::JobService::Stub::CancelJob, request, timeout).job();
}

std::unique_ptr<EventSource> Connection::Watch(const v1::WatchJobRequest& request, const Deadline& deadline) const {
  return std::make_unique<CallSource<v1::WatchJobResponse>>(*this, *jobs_, &v1::JobService::Stub::WatchJob, request,
                                                            deadline);
}

PartialArtifact Connection::Download(const std::string& artifact_id, const Deadline& deadline,
                                     std::optional<PartialArtifact> partial) const {
  DownloadState state(options_.reconnect, artifact_id, std::move(partial));
  CallRetry retry(options_.retry);
  while (true) {
    grpc::ClientContext context;
    Prepare(context, deadline);
    const auto reader = artifacts_->DownloadArtifact(&context, state.Request());
    v1::DownloadArtifactResponse message;
    try {
      while (reader->Read(&message)) state.Accept(message);
    } catch (const Error&) {
      context.TryCancel();
      while (reader->Read(&message)) {
      }
      // the message that did not fit says more than the status of the call that it ends
      static_cast<void>(reader->Finish());
      throw;
    }
    const grpc::Status status = reader->Finish();
    if (status.ok()) return std::move(state.Finished());
    if (state.connected()) {
      Pause(deadline.Within(state.Lost(FromCall(status, address_))));
    } else {
      Wait(status, retry, deadline);
    }
  }
}

v1::UploadAssetResponse Connection::Upload(const v1::MediaInput& media, const Deadline& deadline) const {
  if (!media.has_data()) throw InvalidField("media", "has no bytes; give those of a file");
  const std::string digest = Sha256(media.data());
  CallRetry retry(options_.retry);
  while (true) {
    v1::UploadAssetResponse reply;
    const grpc::Status status = UploadOnce(media, digest, deadline, reply);
    if (status.ok()) return reply;
    Wait(status, retry, deadline);
  }
}

grpc::Status Connection::UploadOnce(const v1::MediaInput& media, const std::string& digest, const Deadline& deadline,
                                    v1::UploadAssetResponse& reply) const {
  grpc::ClientContext context;
  Prepare(context, deadline);
  const auto writer = artifacts_->UploadAsset(&context, &reply);
  const std::string& data = media.data();
  v1::UploadAssetRequest message;
  v1::UploadHeader* header = message.mutable_header();
  header->set_mime_type(media.mime_type().empty() ? "application/octet-stream" : media.mime_type());
  header->set_size_bytes(data.size());
  header->set_sha256(digest);
  bool open = writer->Write(message);
  for (std::size_t offset = 0; open && offset < data.size(); offset += kChunkBytes) {
    message.set_data(data.data() + offset, std::min(kChunkBytes, data.size() - offset));
    open = writer->Write(message);
  }
  // a call that the server ended while there was more to send: Finish tells why
  if (open) writer->WritesDone();
  return writer->Finish();
}

}  // namespace omni::internal
