// Reads one job's events, over as many calls as it takes.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "connection.hpp"
#include "watch_state.hpp"

namespace omni::internal {

class StreamImpl {
 public:
  using Opener = std::function<std::unique_ptr<EventSource>(const Deadline&)>;

  // `open` makes the first call; later ones are WatchJob. An owner cancels the job when it goes.
  StreamImpl(std::shared_ptr<Connection> connection, Opener open, WatchState watch, const Deadline& deadline,
             bool owner);
  ~StreamImpl();

  // Waits for the first event. A refusal is thrown here, and afterwards job_id is known.
  void Open();
  const WatchState& watch() const noexcept { return watch_; }
  std::optional<v1::JobEvent> Next();
  v1::Job Cancel(const std::string& reason) const;
  Result Finished();
  void Close() noexcept;

 private:
  std::optional<v1::JobEvent> Follow();
  // Makes the next call, after one that ended before the job did, or throws its failure.
  void Reopen(const grpc::Status& status);
  void CancelLeft() noexcept;

  std::shared_ptr<Connection> connection_;
  Opener open_;
  WatchState watch_;
  Deadline deadline_;
  CallRetry retry_;
  bool owner_;
  bool done_ = false;
  // what a call ended with after which there is none
  std::exception_ptr broken_;
  std::unique_ptr<EventSource> source_;
  std::optional<v1::JobEvent> first_;
};

}  // namespace omni::internal
