// The state of one job's event stream. Does no I/O.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <omni_grpc/v1/event.pb.h>
#include <omni_grpc/v1/job.pb.h>

#include "omni_grpc/policy.hpp"
#include "omni_grpc/result.hpp"
#include "partial_artifact.hpp"
#include "retry.hpp"

namespace omni::internal {

// The position in one job's event stream, and the output bytes that came with it.
class WatchState {
 public:
  // `job_id` may be empty: the first event tells it.
  WatchState(const Reconnect& reconnect, v1::ArtifactDelivery delivery, std::string job_id = "",
             std::uint64_t after_seq = 0);

  const std::string& job_id() const noexcept { return job_id_; }
  std::uint64_t after_seq() const noexcept { return after_seq_; }
  // Whether any message has come.
  bool connected() const noexcept { return connected_; }
  // Whether the event that ended the job has come.
  bool ended() const noexcept { return last_.has_value(); }

  // Takes the next message. True for an event that the caller has not seen; false for a chunk, a heartbeat, or a kind
  // that this version does not know, whose seq is noted.
  bool Accept(const v1::JobEvent& event);
  // Asks for the events after the last one that was seen.
  v1::WatchJobRequest Request() const;
  // How long to wait before watching again, after a call that ended before the job did. Throws the failure if watching
  // again is pointless, and Error (UNAVAILABLE, STREAM_LOST) if too many attempts failed in a row.
  Seconds Lost(const CallFailure& ended, bool early);
  // Why the job has no result; nullopt if it succeeded or has not ended.
  std::optional<Error> JobError() const;
  // The outputs of a job that succeeded whose bytes are incomplete.
  std::vector<PartialArtifact*> Missing();
  // The result of a job that succeeded. Throws Error (INTERNAL, ARTIFACT_CORRUPT) for damaged bytes.
  Result Finished();

 private:
  PartialArtifact& Partial(const v1::Artifact& artifact);
  void AddChunk(const v1::ArtifactChunk& chunk);
  Failure Final(const CallFailure& ended) const;
  Error Positioned(Failure failure) const;

  Reconnect reconnect_;
  v1::ArtifactDelivery delivery_;
  std::string job_id_;
  std::uint64_t after_seq_;
  std::optional<v1::JobEvent> last_;
  bool connected_ = false;
  int attempt_ = 0;
  std::uint64_t rewind_ = 0;
  std::map<std::string, PartialArtifact> files_;
};

}  // namespace omni::internal
