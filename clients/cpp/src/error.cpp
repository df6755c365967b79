#include "omni_grpc/error.hpp"

#include <iterator>
#include <utility>

namespace omni {
namespace {

constexpr const char* kNames[] = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};

std::string Text(const Failure& failure) {
  const std::string code = CodeName(failure.code);
  const bool repeats = failure.reason.empty() || failure.reason == code;
  return code + (repeats ? "" : " " + failure.reason) + ": " + failure.message;
}

}  // namespace

const char* CodeName(Code code) noexcept {
  const auto number = static_cast<std::size_t>(code);
  return number < std::size(kNames) ? kNames[number] : "UNKNOWN";
}

Error::Error(Failure failure) : std::runtime_error(Text(failure)), failure_(std::move(failure)) {}

Error InvalidField(const std::string& field, const std::string& description, const std::string& reason) {
  Error plain = InvalidFields({{field, description}});
  if (reason.empty()) return plain;
  Failure failure = plain.failure();
  failure.reason = reason;
  return Error(std::move(failure));
}

Error InvalidFields(std::vector<FieldViolation> violations) {
  Failure failure;
  failure.code = Code::InvalidArgument;
  failure.reason = CodeName(failure.code);
  for (const FieldViolation& one : violations) {
    failure.message += (failure.message.empty() ? "" : "; ") + one.field + " " + one.description;
  }
  failure.violations = std::move(violations);
  return Error(std::move(failure));
}

}  // namespace omni
