#include "failure.hpp"

#include <google/rpc/error_details.pb.h>

namespace omni::internal {
namespace {

void Add(const google::rpc::ErrorInfo& info, Failure& failure) {
  if (!info.reason().empty()) failure.reason = info.reason();
  failure.metadata = {info.metadata().begin(), info.metadata().end()};
  const auto job = failure.metadata.find("job_id");
  if (job != failure.metadata.end()) failure.job_id = job->second;
}

}  // namespace

Failure DecodeStatus(const google::rpc::Status& status) {
  Failure failure;
  const bool known = status.code() >= 0 && status.code() <= static_cast<int>(Code::Unauthenticated);
  failure.code = known ? static_cast<Code>(status.code()) : Code::Unknown;
  failure.reason = CodeName(failure.code);
  failure.message = status.message();
  for (const google::protobuf::Any& detail : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&info)) {
      Add(info, failure);
    } else if (detail.UnpackTo(&bad)) {
      for (const auto& one : bad.field_violations()) failure.violations.push_back({one.field(), one.description()});
    } else if (detail.UnpackTo(&retry)) {
      const auto& delay = retry.retry_delay();
      failure.retry_after = Seconds(static_cast<double>(delay.seconds()) + delay.nanos() / 1e9);
    }
  }
  return failure;
}

CallFailure FromCall(const grpc::Status& status, const std::string& address) {
  google::rpc::Status details;
  if (!status.error_details().empty() && details.ParseFromString(status.error_details())) {
    return {DecodeStatus(details), true};
  }
  details.set_code(static_cast<int>(status.error_code()));
  details.set_message(status.error_message());
  Failure failure = DecodeStatus(details);
  if (failure.code == Code::Unavailable) {
    failure.reason = "SERVER_UNREACHABLE";
    failure.message = "cannot reach the server at " + address + ": " + failure.message;
  } else if (failure.code == Code::DeadlineExceeded) {
    failure.reason = "CALL_DEADLINE";
    failure.message = "the server at " + address + " did not answer before the deadline of the call";
  }
  return {failure, false};
}

CallFailure EndedEarly() {
  Failure failure;
  failure.code = Code::Unavailable;
  failure.reason = "STREAM_ENDED";
  failure.message = "the stream ended before the job did";
  return {failure, false};
}

}  // namespace omni::internal
