// The events of one job.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>

#include <omni_grpc/v1/event.pb.h>
#include <omni_grpc/v1/job.pb.h>

#include "omni_grpc/result.hpp"

namespace omni {

namespace internal {
class StreamImpl;
}

// Called as a job goes on, in the thread that waits for it. An exception that one of them throws cancels the job and
// comes out of the method. What is not set is not called.
struct Progress {
  std::function<void(const v1::JobEvent&)> on_event;  // every event, before the typed ones
  std::function<void(const v1::Queued&)> on_queued;
  std::function<void(const v1::Started&)> on_started;
  std::function<void(const v1::StepProgress&)> on_step;
  std::function<void(const v1::StepProgress&, const v1::Preview&)> on_preview;
  std::function<void(const v1::DecodeProgress&)> on_decode;
  std::function<void(const v1::Warning&)> on_warning;
  std::function<void(const v1::Artifact&)> on_artifact;

  void operator()(const v1::JobEvent& event) const;
};

// The name of an event's kind as in the oneof of JobEvent: "step_progress".
std::string EventKind(const v1::JobEvent& event);

// The events of one job, each once and in order, even if the connection is lost in between. Chunks of outputs,
// heartbeats and kinds that this version does not know are not among them.
//
// The stream of a generation owns its job: leaving the scope before the end cancels the job on the server, and after
// `failed` or `cancelled` Next throws the matching error. The stream of a watched job does neither.
//
// One thread reads; Cancel may be called from any.
class Stream {
 public:
  explicit Stream(std::unique_ptr<internal::StreamImpl> impl);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  const std::string& job_id() const noexcept;
  // The seq of the last event that was seen, after which another watcher would go on.
  std::uint64_t after_seq() const noexcept;
  // The next event; nullopt at the end of the job.
  std::optional<v1::JobEvent> Next();
  // Asks the server to stop the job and returns at once; the `cancelled` event tells when it has stopped.
  v1::Job Cancel(const std::string& reason = "");
  // Follows the job to its end and downloads missing output bytes. Throws the error that ended the job.
  omni::Result Result();
  // Why the job has no result; nullopt if it succeeded or has not ended.
  std::optional<Error> error() const;
  // Stops following the job without cancelling it.
  void Close() noexcept;

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = v1::JobEvent;
    using difference_type = std::ptrdiff_t;
    using pointer = const v1::JobEvent*;
    using reference = const v1::JobEvent&;

    Iterator() = default;
    explicit Iterator(Stream* stream) : stream_(stream) { ++*this; }
    reference operator*() const { return *event_; }
    pointer operator->() const { return &*event_; }
    Iterator& operator++() {
      event_ = stream_->Next();
      if (!event_) stream_ = nullptr;
      return *this;
    }
    bool operator==(const Iterator& other) const { return stream_ == other.stream_; }
    bool operator!=(const Iterator& other) const { return !(*this == other); }

   private:
    Stream* stream_ = nullptr;
    std::optional<v1::JobEvent> event_;
  };
  Iterator begin() { return Iterator(this); }
  Iterator end() { return Iterator(); }

 private:
  std::unique_ptr<internal::StreamImpl> impl_;
};

}  // namespace omni
