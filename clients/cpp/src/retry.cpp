#include "retry.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

namespace omni::internal {

using std::chrono::steady_clock;

Deadline::Deadline(std::optional<Seconds> timeout) {
  if (timeout) end_ = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(*timeout);
}

std::optional<Seconds> Deadline::Remaining() const {
  if (!end_) return std::nullopt;
  return std::max(Seconds(0), Seconds(*end_ - steady_clock::now()));
}

Seconds Deadline::Within(Seconds wait) const {
  const auto left = Remaining();
  return left ? std::min(wait, *left) : wait;
}

Seconds Jittered(Seconds first, Seconds longest, int attempt) {
  std::random_device device;
  std::uniform_real_distribution<double> part(0.5, 1.0);
  return std::min(longest, first * std::pow(2.0, attempt)) * part(device);
}

void Sleep(Seconds wait) { std::this_thread::sleep_for(wait); }

bool CallFailure::lost() const {
  if (failure.code == Code::Unavailable) return true;
  return failure.code == Code::Internal && !from_server && failure.reason == CodeName(Code::Internal);
}

std::optional<Seconds> CallRetry::Delay(const CallFailure& ended, const Deadline& deadline) {
  return Delay(ended, deadline, Seconds(steady_clock::now() - begun_));
}

std::optional<Seconds> CallRetry::Delay(const CallFailure& ended, const Deadline& deadline, Seconds elapsed) {
  const auto wanted = Wanted(ended, elapsed);
  const auto left = deadline.Remaining();
  // a wait that the deadline would cut short ends in DEADLINE_EXCEEDED, which says less than this failure
  if (!wanted || (left && *wanted >= *left)) return std::nullopt;
  return wanted;
}

std::optional<Seconds> CallRetry::Wanted(const CallFailure& ended, Seconds elapsed) {
  const auto told = ended.failure.retry_after;
  if (ended.failure.code == Code::ResourceExhausted && told) {
    if (exhausted_ >= policy_.exhausted) return std::nullopt;
    ++exhausted_;
    return *told;
  }
  if (!ended.lost() || policy_.attempts <= 1) return std::nullopt;
  if (lost_ + 1 >= policy_.attempts && elapsed >= policy_.window) return std::nullopt;
  const Seconds delay = Jittered(policy_.first_delay, policy_.longest_delay, std::min(lost_, 16));
  ++lost_;
  return std::max(delay, told.value_or(Seconds(0)));
}

}  // namespace omni::internal
