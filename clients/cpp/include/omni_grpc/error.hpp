// The one exception type of this client.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace omni {

using Seconds = std::chrono::duration<double>;

// The status codes of gRPC.
enum class Code {
  Ok = 0,
  Cancelled = 1,
  Unknown = 2,
  InvalidArgument = 3,
  DeadlineExceeded = 4,
  NotFound = 5,
  AlreadyExists = 6,
  PermissionDenied = 7,
  ResourceExhausted = 8,
  FailedPrecondition = 9,
  Aborted = 10,
  OutOfRange = 11,
  Unimplemented = 12,
  Internal = 13,
  Unavailable = 14,
  DataLoss = 15,
  Unauthenticated = 16,
};

// "INVALID_ARGUMENT" and so on; "UNKNOWN" for a number that is no code.
const char* CodeName(Code code) noexcept;

// A field of a request and the rule that it breaks.
struct FieldViolation {
  std::string field;
  std::string description;
};

// Why a call or a job failed.
struct Failure {
  Code code = Code::Unknown;
  std::string reason;  // ErrorInfo.reason; the name of the code where the server gave none
  std::string message;
  std::vector<FieldViolation> violations;  // BadRequest
  std::optional<Seconds> retry_after;      // RetryInfo
  std::map<std::string, std::string> metadata;
  std::string job_id;  // of the job that ended so, or that goes on without its caller; "" where there is none
};

// Thrown by every method of this client. what() is "CODE REASON: message".
class Error : public std::runtime_error {
 public:
  explicit Error(Failure failure);

  Code code() const noexcept { return failure_.code; }
  const std::string& reason() const noexcept { return failure_.reason; }
  const std::string& message() const noexcept { return failure_.message; }
  const std::vector<FieldViolation>& violations() const noexcept { return failure_.violations; }
  std::optional<Seconds> retry_after() const noexcept { return failure_.retry_after; }
  const std::map<std::string, std::string>& metadata() const noexcept { return failure_.metadata; }
  const std::string& job_id() const noexcept { return failure_.job_id; }
  const Failure& failure() const noexcept { return failure_; }

 private:
  Failure failure_;
};

// An INVALID_ARGUMENT of the client's own, for one field.
Error InvalidField(const std::string& field, const std::string& description, const std::string& reason = "");

// An INVALID_ARGUMENT of the client's own, for several fields.
Error InvalidFields(std::vector<FieldViolation> violations);

}  // namespace omni
