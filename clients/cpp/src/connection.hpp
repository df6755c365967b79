// One channel to a server with its stubs, and the calls that need retries.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <grpcpp/grpcpp.h>
#include <omni_grpc/v1/artifact.grpc.pb.h>
#include <omni_grpc/v1/generation.grpc.pb.h>
#include <omni_grpc/v1/job.grpc.pb.h>
#include <omni_grpc/v1/model.grpc.pb.h>

#include "failure.hpp"
#include "omni_grpc/client.hpp"
#include "partial_artifact.hpp"
#include "retry.hpp"

namespace omni::internal {

// How long one attempt of a unary call may take.
inline constexpr Seconds kUnaryTimeout{30.0};

// One server-streaming call whose messages have an event.
class EventSource {
 public:
  virtual ~EventSource() = default;
  // False at the end of the call.
  virtual bool Read(v1::JobEvent& event) = 0;
  // How the call ended, after Read was false.
  virtual grpc::Status Finish() = 0;
};

class Connection {
 public:
  Connection(const std::string& address, ClientOptions options);

  const std::string& address() const noexcept { return address_; }
  const ClientOptions& options() const noexcept { return options_; }

  // Adds the token and the deadline to a call, the earlier one where `most` is given.
  void Prepare(grpc::ClientContext& context, const Deadline& deadline, std::optional<Seconds> most = {}) const;

  // The reply to one request.
  template <class Stub, class Request, class Reply>
  Reply Unary(Stub& stub, grpc::Status (Stub::*rpc)(grpc::ClientContext*, const Request&, Reply*),
              const Request& request, std::optional<Seconds> timeout) const {
    const Deadline deadline(timeout);
    CallRetry retry(options_.retry);
    while (true) {
      grpc::ClientContext context;
      Prepare(context, deadline, timeout ? std::nullopt : std::optional(kUnaryTimeout));
      Reply reply;
      const grpc::Status status = (stub.*rpc)(&context, request, &reply);
      if (status.ok()) return reply;
      Wait(status, retry, deadline);
    }
  }

  // Waits before the next call. gRPC connects only while somebody polls, and a thread that sleeps does not.
  void Pause(Seconds wait) const;

  v1::Job CancelJob(const std::string& job_id, const std::string& reason, std::optional<Seconds> timeout) const;
  std::unique_ptr<EventSource> Watch(const v1::WatchJobRequest& request, const Deadline& deadline) const;
  // All bytes of an artifact. Goes on after those in `partial`, and after each loss of the connection.
  PartialArtifact Download(const std::string& artifact_id, const Deadline& deadline,
                           std::optional<PartialArtifact> partial = {}) const;
  v1::UploadAssetResponse Upload(const v1::MediaInput& media, const Deadline& deadline) const;

  v1::GenerationService::Stub& generation() const { return *generation_; }
  v1::JobService::Stub& jobs() const { return *jobs_; }
  v1::ModelService::Stub& models() const { return *models_; }

 private:
  // Waits for the next attempt of a call that got no message, or throws its failure.
  void Wait(const grpc::Status& status, CallRetry& retry, const Deadline& deadline) const;
  grpc::Status UploadOnce(const v1::MediaInput& media, const std::string& digest, const Deadline& deadline,
                          v1::UploadAssetResponse& reply) const;

  std::string address_;
  ClientOptions options_;
  std::function<std::string()> token_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::GenerationService::Stub> generation_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::ArtifactService::Stub> artifacts_;
  std::unique_ptr<v1::ModelService::Stub> models_;
};

// A call of a stub's method.
template <class Response>
class CallSource : public EventSource {
 public:
  template <class Stub, class Request>
  CallSource(const Connection& connection, Stub& stub,
             std::unique_ptr<grpc::ClientReader<Response>> (Stub::*rpc)(grpc::ClientContext*, const Request&),
             const Request& request, const Deadline& deadline) {
    connection.Prepare(context_, deadline);
    reader_ = (stub.*rpc)(&context_, request);
  }
  ~CallSource() override {
    if (finished_) return;
    context_.TryCancel();
    while (reader_->Read(&response_)) {
    }
    // CANCELLED, or how it ended just before: nobody waits for it any more
    static_cast<void>(reader_->Finish());
  }
  bool Read(v1::JobEvent& event) override {
    if (!reader_->Read(&response_)) return false;
    event.Swap(response_.mutable_event());
    return true;
  }
  grpc::Status Finish() override {
    finished_ = true;
    return reader_->Finish();
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<Response>> reader_;
  Response response_;
  bool finished_ = false;
};

}  // namespace omni::internal
