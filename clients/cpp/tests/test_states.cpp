// How streams and downloads go on after a cut; needs no server.
#include <doctest/doctest.h>

#include "digest.hpp"
#include "download_state.hpp"
#include "failure.hpp"
#include "omni_grpc/stream.hpp"
#include "watch_state.hpp"

using namespace omni;
using namespace omni::internal;

namespace {

const CallFailure kLost = FromCall(grpc::Status(grpc::StatusCode::UNAVAILABLE, "closed"), "localhost:1");

CallFailure Refused(int code) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message("refused");
  return {DecodeStatus(status), true};
}

template <class Call>
Failure FailureOf(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.failure();
  }
  FAIL("nothing was thrown");
  return {};
}

v1::JobEvent Event(std::uint64_t seq) {
  v1::JobEvent event;
  event.set_job_id("job");
  event.set_seq(seq);
  return event;
}

v1::JobEvent Step(std::uint64_t seq) {
  v1::JobEvent event = Event(seq);
  event.mutable_step_progress()->set_step(static_cast<std::uint32_t>(seq));
  return event;
}

v1::Artifact Announced(const std::string& data) {
  v1::Artifact artifact;
  artifact.set_artifact_id("a");
  artifact.set_size_bytes(data.size());
  artifact.set_sha256(Sha256(data));
  return artifact;
}

v1::JobEvent Ready(std::uint64_t seq, const std::string& data) {
  v1::JobEvent event = Event(seq);
  *event.mutable_artifact_ready()->mutable_artifact() = Announced(data);
  return event;
}

v1::JobEvent Chunk(std::uint64_t offset, const std::string& data) {
  v1::JobEvent event = Event(0);
  event.mutable_artifact_chunk()->set_artifact_id("a");
  event.mutable_artifact_chunk()->set_offset(offset);
  event.mutable_artifact_chunk()->set_data(data);
  return event;
}

v1::JobEvent Completed(std::uint64_t seq, const std::string& data) {
  v1::JobEvent event = Event(seq);
  *event.mutable_completed()->add_artifacts() = Announced(data);
  return event;
}

WatchState Owner() { return WatchState(Reconnect{}, v1::ARTIFACT_DELIVERY_INLINE_CHUNKS); }

v1::DownloadArtifactResponse Message(std::uint64_t offset, const std::string& data) {
  v1::DownloadArtifactResponse message;
  message.mutable_chunk()->set_offset(offset);
  message.mutable_chunk()->set_data(data);
  return message;
}

v1::DownloadArtifactResponse Metadata(const v1::Artifact& artifact) {
  v1::DownloadArtifactResponse message;
  *message.mutable_metadata() = artifact;
  return message;
}

}  // namespace

TEST_CASE("a stream goes on after the last event that was seen, none lost or twice") {
  WatchState state = Owner();
  CHECK(state.Accept(Step(1)));
  CHECK(state.Accept(Step(3)));
  CHECK(state.Lost(kLost, false).count() <= 0.2);
  CHECK(state.Request().job_id() == "job");
  CHECK(state.Request().after_seq() == 3);
  CHECK(state.Request().delivery() == v1::ARTIFACT_DELIVERY_INLINE_CHUNKS);
  CHECK_FALSE(state.Accept(Step(3)));
  CHECK(state.Accept(Step(4)));
}

TEST_CASE("heartbeats do not move the mark, kinds that are not known do and are passed over") {
  WatchState state = Owner();
  state.Accept(Step(2));
  v1::JobEvent heartbeat = Event(0);
  heartbeat.mutable_heartbeat();
  CHECK_FALSE(state.Accept(heartbeat));
  CHECK(state.after_seq() == 2);
  v1::JobEvent unknown = Event(3);
  unknown.GetReflection()->MutableUnknownFields(&unknown)->AddLengthDelimited(99, "");
  CHECK_FALSE(state.Accept(unknown));
  CHECK(state.after_seq() == 3);
  CHECK(EventKind(unknown).empty());
  CHECK(EventKind(Step(1)) == "step_progress");
}

TEST_CASE("eight attempts without a message are enough, and a message resets their number") {
  WatchState state = Owner();
  state.Accept(Step(1));
  for (int attempt = 0; attempt < 7; ++attempt) state.Lost(kLost, false);
  state.Accept(Step(2));
  for (int attempt = 0; attempt < 8; ++attempt) CHECK(state.Lost(kLost, false).count() <= 5.0);
  const Failure failure = FailureOf([&] { state.Lost(kLost, false); });
  CHECK(failure.code == Code::Unavailable);
  CHECK(failure.reason == "STREAM_LOST");
  CHECK(failure.job_id == "job");
  CHECK(failure.metadata.at("after_seq") == "2");
}

TEST_CASE("a failure of the call is thrown where watching again is pointless") {
  WatchState fresh = Owner();
  CHECK(FailureOf([&] { fresh.Lost(Refused(3), false); }).code == Code::InvalidArgument);
  WatchState state = Owner();
  state.Accept(Step(1));
  CHECK(FailureOf([&] { state.Lost(Refused(5), false); }).reason == "JOB_LOST");
  CHECK(FailureOf([&] { state.Lost(Refused(16), false); }).code == Code::Unauthenticated);
  const CallFailure late = FromCall(grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, ""), "localhost:1");
  const Failure failure = FailureOf([&] { state.Lost(late, false); });
  CHECK(failure.reason == "CALL_DEADLINE");
  CHECK(failure.job_id == "job");
}

TEST_CASE("a job that ended at the mark is asked for its last event again") {
  WatchState state(Reconnect{}, v1::ARTIFACT_DELIVERY_REFERENCE, "job", 7);
  CHECK(state.Lost(EndedEarly(), true).count() == 0);
  CHECK(state.Request().after_seq() == 6);
  CHECK_FALSE(state.Accept(Completed(7, "")));
  CHECK(state.ended());
}

TEST_CASE("failed and cancelled become errors with the job") {
  WatchState state = Owner();
  v1::JobEvent failed = Event(2);
  failed.mutable_failed()->mutable_status()->set_code(4);
  failed.mutable_failed()->mutable_status()->set_message("too long");
  CHECK(state.Accept(failed));
  CHECK(state.JobError()->code() == Code::DeadlineExceeded);
  CHECK(state.JobError()->job_id() == "job");
  WatchState other = Owner();
  v1::JobEvent cancelled = Event(2);
  cancelled.mutable_cancelled()->set_reason("by hand");
  CHECK(other.Accept(cancelled));
  CHECK(other.JobError()->code() == Code::Cancelled);
  CHECK(other.JobError()->reason() == "JOB_CANCELLED");
}

TEST_CASE("chunks become outputs, and what is missing is known") {
  WatchState state = Owner();
  CHECK(state.Accept(Ready(1, "abcdef")));
  CHECK_FALSE(state.Accept(Chunk(0, "abc")));
  CHECK(state.Accept(Completed(2, "abcdef")));
  REQUIRE(state.Missing().size() == 1);
  CHECK(state.Missing()[0]->offset() == 3);
  CHECK(FailureOf([&] { state.Finished(); }).reason == "ARTIFACT_CORRUPT");
  state.Accept(Chunk(3, "def"));
  CHECK(state.Missing().empty());
  CHECK(state.Finished().outputs.at(0).data == "abcdef");
  CHECK_FALSE(state.JobError());
}

TEST_CASE("chunks of an artifact that was not announced, or with a gap, are refused") {
  WatchState state = Owner();
  CHECK(FailureOf([&] { state.Accept(Chunk(0, "abc")); }).reason == "PROTOCOL_ERROR");
  state.Accept(Ready(1, "abcdef"));
  CHECK(FailureOf([&] { state.Accept(Chunk(2, "c")); }).reason == "ARTIFACT_CORRUPT");
  CHECK(FailureOf([&] { state.Accept(Chunk(0, "abcdefg")); }).reason == "ARTIFACT_CORRUPT");
}

TEST_CASE("a download goes on where it broke off") {
  DownloadState state(Reconnect{}, "a");
  CHECK_FALSE(state.connected());
  state.Accept(Metadata(Announced("abcdef")));
  state.Accept(Message(0, "abc"));
  CHECK(state.Lost(kLost).count() <= 0.2);
  CHECK(state.Request().offset() == 3);
  state.Accept(Metadata(Announced("abcdef")));
  state.Accept(Message(3, "def"));
  CHECK(state.Finished().Data() == "abcdef");
}

TEST_CASE("a download of other bytes is refused") {
  DownloadState state(Reconnect{}, "a");
  state.Accept(Metadata(Announced("abcdef")));
  CHECK(FailureOf([&] { state.Accept(Metadata(Announced("other"))); }).reason == "ARTIFACT_CORRUPT");
  state.Accept(Message(0, "abcdeX"));
  CHECK(FailureOf([&] { state.Finished().Data(); }).reason == "ARTIFACT_CORRUPT");
  DownloadState headless(Reconnect{}, "a");
  CHECK(FailureOf([&] { headless.Accept(Message(0, "abc")); }).reason == "PROTOCOL_ERROR");
}

TEST_CASE("a download gives up after eight attempts, and at once where the server refuses") {
  DownloadState state(Reconnect{}, "a");
  state.Accept(Metadata(Announced("abcdef")));
  for (int attempt = 0; attempt < 8; ++attempt) state.Lost(kLost);
  CHECK(FailureOf([&] { state.Lost(kLost); }).code == Code::Unavailable);
  DownloadState refused(Reconnect{}, "a");
  CHECK(FailureOf([&] { refused.Lost(Refused(5)); }).code == Code::NotFound);
}
