// A client of an omni_grpc server.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <omni_grpc/v1/artifact.pb.h>
#include <omni_grpc/v1/job.pb.h>
#include <omni_grpc/v1/model.pb.h>

#include "omni_grpc/error.hpp"
#include "omni_grpc/policy.hpp"
#include "omni_grpc/request.hpp"
#include "omni_grpc/result.hpp"
#include "omni_grpc/stream.hpp"

namespace omni {

namespace internal {
class Connection;
}

struct ClientOptions {
  std::string ca;    // PEM file with the authorities of the server's certificate; turns TLS on
  std::string cert;  // mTLS: PEM file with the client's certificate, and
  std::string key;   // with its private key
  bool tls = false;  // TLS with the authorities that gRPC trusts by itself, where ca names no others
  std::string token;
  std::function<std::string()> token_source;  // asked at every call, in place of `token`
  bool insecure = false;                      // send the token without TLS to another machine, too
  Reconnect reconnect;
  Retry retry;
  // Told of a job that leaving the scope of its Stream could not cancel. Unset: a line on standard error.
  std::function<void(const Error&)> on_cancel_failed;
};

// Which jobs. What is not set: all.
struct JobFilter {
  std::vector<std::string> states;  // "RUNNING", in any case
  std::map<std::string, std::string> labels;
  std::string model;
  std::string tenant;
  std::size_t limit = 50;
};

// What Download returns.
using Downloaded = Output;

// Threads may share a client. The connection is opened at the first call. Every method throws omni::Error. A `timeout`
// is how long the caller waits for the whole method; unset, unary calls get 30 s for each attempt, the others no limit.
class Client {
 public:
  // HOST:PORT, [IPV6]:PORT or unix:PATH. Throws Error (INVALID_ARGUMENT), by field, for what cannot be used; a token
  // that would go to another machine without TLS is refused with the reason TOKEN_NEEDS_TLS.
  explicit Client(const std::string& address = "localhost:50051", ClientOptions options = {});

  // Make something and wait for it. If the timeout passes or a callback throws, the job is cancelled on the server.
  Result GenerateImage(const ImageRequest& request, const Progress& progress = {});
  Result EditImage(const EditRequest& request, const Progress& progress = {});
  Result GenerateVideo(const VideoRequest& request, const Progress& progress = {});
  Result GenerateAudio(const AudioRequest& request, const Progress& progress = {});

  // The same, event by event. Return with the first event, or throw the refusal.
  Stream StreamImage(const ImageRequest& request);
  Stream StreamEdit(const EditRequest& request);
  Stream StreamVideo(const VideoRequest& request);
  Stream StreamAudio(const AudioRequest& request);
  // From a message of the API, for fields that the structs do not have; gets a request_id where it has none.
  Stream Start(v1::GenerateImageRequest request, std::optional<Seconds> timeout = {});
  Stream Start(v1::EditImageRequest request, std::optional<Seconds> timeout = {});
  Stream Start(v1::GenerateVideoRequest request, std::optional<Seconds> timeout = {});
  Stream Start(v1::GenerateAudioRequest request, std::optional<Seconds> timeout = {});

  // Queue a job that outlives this client.
  v1::Job CreateJob(const ImageRequest& request);
  v1::Job CreateJob(const EditRequest& request);
  v1::Job CreateJob(const VideoRequest& request);
  v1::Job CreateJob(const AudioRequest& request);
  v1::Job CreateJob(v1::CreateJobRequest request, std::optional<Seconds> timeout = {});
  v1::Job GetJob(const std::string& job_id, std::optional<Seconds> timeout = {});
  // The newest jobs that fit, newest first.
  std::vector<v1::Job> ListJobs(const JobFilter& filter = {}, std::optional<Seconds> timeout = {});
  // A job that has ended is returned unchanged.
  v1::Job CancelJob(const std::string& job_id, const std::string& reason = "", std::optional<Seconds> timeout = {});
  // The events of a job with a seq greater than `after_seq`: those so far, then those to come, to its end.
  Stream WatchJob(const std::string& job_id, std::uint64_t after_seq = 0, std::optional<Seconds> timeout = {});

  // Stores media for use in several requests. A request uploads its own large media by itself.
  v1::UploadAssetResponse Upload(const Media& media, std::optional<Seconds> timeout = {});
  // An artifact, checked against its SHA-256. Goes on where it broke off.
  Downloaded Download(const std::string& artifact_id, std::optional<Seconds> timeout = {});

  std::vector<v1::Model> ListModels(std::optional<Seconds> timeout = {});

 private:
  std::shared_ptr<internal::Connection> connection_;
};

}  // namespace omni
