// Deadlines, delays, and whether a call that failed before its first message is repeated. Does no I/O.
#pragma once

#include <chrono>
#include <optional>

#include "omni_grpc/error.hpp"
#include "omni_grpc/policy.hpp"

namespace omni::internal {

// The deadline of one method, shared by all the calls that it makes. Without a timeout there is none.
class Deadline {
 public:
  explicit Deadline(std::optional<Seconds> timeout);

  bool limited() const noexcept { return end_.has_value(); }
  // Time left, not below 0; nullopt without a deadline.
  std::optional<Seconds> Remaining() const;
  // `wait`, or less if the deadline comes first.
  Seconds Within(Seconds wait) const;

 private:
  std::optional<std::chrono::steady_clock::time_point> end_;
};

// min(longest, first * 2^attempt), times a random number from 0.5 to 1.
Seconds Jittered(Seconds first, Seconds longest, int attempt);

void Sleep(Seconds wait);

// How a call ended: with a failure that the server sent, or with one of the connection or this client's own deadline.
struct CallFailure {
  Failure failure;
  bool from_server = false;

  // The connection was lost, so that the job may still run. A reset stream is INTERNAL without any details.
  bool lost() const;
  bool timed_out() const { return failure.code == Code::DeadlineExceeded && !from_server; }
};

// Counts the repetitions of one call.
class CallRetry {
 public:
  explicit CallRetry(const Retry& policy) : policy_(policy), begun_(std::chrono::steady_clock::now()) {}

  // How long to wait before the next attempt; nullopt if there is none: the failure is final, the attempts are used up,
  // or the deadline would pass first.
  std::optional<Seconds> Delay(const CallFailure& ended, const Deadline& deadline);
  // The same, with the time since the first attempt given.
  std::optional<Seconds> Delay(const CallFailure& ended, const Deadline& deadline, Seconds elapsed);

 private:
  std::optional<Seconds> Wanted(const CallFailure& ended, Seconds elapsed);

  Retry policy_;
  std::chrono::steady_clock::time_point begun_;
  int lost_ = 0;
  int exhausted_ = 0;
};

}  // namespace omni::internal
