#include "download_state.hpp"

namespace omni::internal {

DownloadState::DownloadState(const Reconnect& reconnect, std::string artifact_id,
                             std::optional<PartialArtifact> partial)
    : reconnect_(reconnect), artifact_id_(std::move(artifact_id)), partial_(std::move(partial)) {}

v1::DownloadArtifactRequest DownloadState::Request() const {
  v1::DownloadArtifactRequest request;
  request.set_artifact_id(artifact_id_);
  request.set_offset(offset());
  return request;
}

void DownloadState::Accept(const v1::DownloadArtifactResponse& message) {
  connected_ = true;
  attempt_ = 0;
  if (message.has_chunk()) {
    Expect().Add(message.chunk());
  } else if (!message.has_metadata()) {
    return;  // a kind of message that this version does not know
  } else if (partial_) {
    partial_->CheckResumed(message.metadata());
  } else {
    partial_.emplace(message.metadata());
  }
}

Seconds DownloadState::Lost(const CallFailure& ended) {
  if (!ended.lost() || attempt_ >= reconnect_.attempts) {
    Failure failure = ended.failure;
    failure.message =
        "artifact " + artifact_id_ + ", at byte " + std::to_string(offset()) + ": " + ended.failure.message;
    throw Error(std::move(failure));
  }
  return Jittered(reconnect_.first_delay, reconnect_.longest_delay, attempt_++);
}

PartialArtifact& DownloadState::Expect() {
  if (!partial_) {
    Failure failure;
    failure.code = Code::Internal;
    failure.reason = "PROTOCOL_ERROR";
    failure.message = "the download of artifact " + artifact_id_ + " did not start with its metadata";
    failure.metadata = {{"artifact_id", artifact_id_}};
    throw Error(std::move(failure));
  }
  return *partial_;
}

}  // namespace omni::internal
