#include "watch_state.hpp"

#include <algorithm>

#include "failure.hpp"

namespace omni::internal {

WatchState::WatchState(const Reconnect& reconnect, v1::ArtifactDelivery delivery, std::string job_id,
                       std::uint64_t after_seq)
    : reconnect_(reconnect), delivery_(delivery), job_id_(std::move(job_id)), after_seq_(after_seq) {}

bool WatchState::Accept(const v1::JobEvent& event) {
  if (job_id_ != event.job_id()) job_id_ = event.job_id();
  connected_ = true;
  attempt_ = 0;
  if (event.has_artifact_chunk()) {
    AddChunk(event.artifact_chunk());
    return false;
  }
  if (event.has_completed() || event.has_failed() || event.has_cancelled()) last_ = event;
  if (event.seq() <= after_seq_) return false;
  after_seq_ = event.seq();
  if (event.has_artifact_ready()) Partial(event.artifact_ready().artifact());
  return event.event_case() != v1::JobEvent::EVENT_NOT_SET;
}

v1::WatchJobRequest WatchState::Request() const {
  v1::WatchJobRequest request;
  request.set_job_id(job_id_);
  request.set_after_seq(after_seq_ - rewind_);
  request.set_delivery(delivery_);
  return request;
}

Seconds WatchState::Lost(const CallFailure& ended, bool early) {
  if (!connected_ && early && after_seq_ > 0 && rewind_ == 0) {
    // no event follows this one, so it is the job's last: ask for it again, to learn how the job ended
    rewind_ = 1;
    return Seconds(0);
  }
  if (!connected_) throw Error(ended.failure);
  if (ended.failure.code == Code::NotFound) {
    Failure failure;
    failure.code = Code::Unavailable;
    failure.reason = "JOB_LOST";
    failure.message = "the connection was lost, and the server no longer knows job " + job_id_ +
                      " because it has restarted; send the request again";
    throw Positioned(std::move(failure));
  }
  if (!ended.lost() || attempt_ >= reconnect_.attempts) throw Positioned(Final(ended));
  const Seconds delay = Jittered(reconnect_.first_delay, reconnect_.longest_delay, attempt_++);
  return std::max(delay, ended.failure.retry_after.value_or(Seconds(0)));
}

std::optional<Error> WatchState::JobError() const {
  if (!last_ || last_->has_completed()) return std::nullopt;
  if (last_->has_failed()) {
    Failure failure = DecodeStatus(last_->failed().status());
    failure.metadata["job_id"] = job_id_;
    failure.job_id = job_id_;
    return Error(std::move(failure));
  }
  const v1::Cancelled& stopped = last_->cancelled();
  Failure failure;
  failure.code = Code::Cancelled;
  failure.reason = "JOB_CANCELLED";
  failure.message = "job " + job_id_ + " was cancelled after " + std::to_string(stopped.completed_steps()) +
                    " steps: " + stopped.reason();
  failure.metadata["job_id"] = job_id_;
  failure.job_id = job_id_;
  return Error(std::move(failure));
}

std::vector<PartialArtifact*> WatchState::Missing() {
  std::vector<PartialArtifact*> missing;
  for (const v1::Artifact& artifact : last_->completed().artifacts()) {
    PartialArtifact& output = Partial(artifact);
    if (!output.complete()) missing.push_back(&output);
  }
  return missing;
}

Result WatchState::Finished() {
  const v1::Completed& done = last_->completed();
  Result result;
  result.job_id = job_id_;
  for (const v1::Artifact& artifact : done.artifacts()) {
    result.outputs.push_back({artifact, Partial(artifact).Data()});
  }
  result.effective = done.effective();
  result.stats = done.stats();
  result.warnings = {done.warnings().begin(), done.warnings().end()};
  return result;
}

PartialArtifact& WatchState::Partial(const v1::Artifact& artifact) {
  return files_.try_emplace(artifact.artifact_id(), artifact).first->second;
}

void WatchState::AddChunk(const v1::ArtifactChunk& chunk) {
  const auto found = files_.find(chunk.artifact_id());
  if (found == files_.end()) {
    Failure failure;
    failure.code = Code::Internal;
    failure.reason = "PROTOCOL_ERROR";
    failure.message = "bytes of artifact " + chunk.artifact_id() + " arrived before the artifact was announced";
    throw Positioned(std::move(failure));
  }
  found->second.Add(chunk);
}

Failure WatchState::Final(const CallFailure& ended) const {
  Failure failure = ended.failure;
  const std::string at = std::to_string(after_seq_);
  if (ended.timed_out()) {
    failure.message = "the deadline of the call passed after event " + at + " of job " + job_id_;
  } else if (ended.lost()) {
    failure.code = Code::Unavailable;
    failure.reason = "STREAM_LOST";
    failure.message = "lost the stream and could not reconnect in " + std::to_string(attempt_) +
                      " attempts: " + ended.failure.message + "; the job may still be running, resume with WatchJob(\"" +
                      job_id_ + "\", " + at + ")";
  }
  return failure;
}

Error WatchState::Positioned(Failure failure) const {
  failure.metadata["job_id"] = job_id_;
  failure.metadata["after_seq"] = std::to_string(after_seq_);
  failure.job_id = job_id_;
  return Error(std::move(failure));
}

}  // namespace omni::internal
