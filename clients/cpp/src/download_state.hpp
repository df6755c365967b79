// The state of one download. Does no I/O.
#pragma once

#include <optional>
#include <string>

#include <omni_grpc/v1/artifact.pb.h>

#include "omni_grpc/policy.hpp"
#include "partial_artifact.hpp"
#include "retry.hpp"

namespace omni::internal {

// The bytes of one artifact so far. `partial` has those that were received another way before.
class DownloadState {
 public:
  DownloadState(const Reconnect& reconnect, std::string artifact_id, std::optional<PartialArtifact> partial = {});

  bool connected() const noexcept { return connected_; }
  // Asks for the bytes that are still missing.
  v1::DownloadArtifactRequest Request() const;
  // Takes the next message. Throws Error (INTERNAL) for one that does not fit the bytes so far.
  void Accept(const v1::DownloadArtifactResponse& message);
  // The artifact, once the call has ended without an error.
  PartialArtifact& Finished() { return Expect(); }
  // How long to wait before the next call, after one that failed. Throws the failure if the server refused the call or
  // too many attempts failed in a row.
  Seconds Lost(const CallFailure& ended);

 private:
  PartialArtifact& Expect();
  std::uint64_t offset() const noexcept { return partial_ ? partial_->offset() : 0; }

  Reconnect reconnect_;
  std::string artifact_id_;
  std::optional<PartialArtifact> partial_;
  bool connected_ = false;
  int attempt_ = 0;
};

}  // namespace omni::internal
