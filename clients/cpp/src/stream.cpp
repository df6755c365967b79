#include "omni_grpc/stream.hpp"

#include <exception>
#include <iostream>
#include <utility>

#include "stream_impl.hpp"

namespace omni {
namespace internal {
namespace {

// How long leaving a scope waits for the server to accept the cancellation.
constexpr Seconds kCancelTimeout{5.0};

}  // namespace

StreamImpl::StreamImpl(std::shared_ptr<Connection> connection, Opener open, WatchState watch, const Deadline& deadline,
                       bool owner)
    : connection_(std::move(connection)),
      open_(std::move(open)),
      watch_(std::move(watch)),
      deadline_(deadline),
      retry_(connection_->options().retry),
      owner_(owner),
      source_(open_(deadline_)) {}

StreamImpl::~StreamImpl() {
  const bool left = owner_ && !done_ && !watch_.ended() && !watch_.job_id().empty();
  source_.reset();
  if (left) CancelLeft();
}

// A destructor cannot throw, whatever the token source or on_cancel_failed throw.
void StreamImpl::CancelLeft() noexcept {
  const auto tell = [this](const char* what) {
    std::cerr << "omni_grpc: job " << watch_.job_id() << " could not be cancelled: " << what << '\n';
  };
  try {
    try {
      connection_->CancelJob(watch_.job_id(), "the client left the stream", kCancelTimeout);
    } catch (const Error& error) {
      const auto& told = connection_->options().on_cancel_failed;
      told ? told(error) : tell(error.what());
    }
  } catch (const std::exception& error) {
    tell(error.what());
  } catch (...) {
    tell("not an exception of the standard library");
  }
}

void StreamImpl::Open() { first_ = Follow(); }

std::optional<v1::JobEvent> StreamImpl::Next() {
  if (first_) return std::exchange(first_, std::nullopt);
  return Follow();
}

std::optional<v1::JobEvent> StreamImpl::Follow() {
  if (done_) return std::nullopt;
  // a call that has ended must not be read again
  if (broken_) std::rethrow_exception(broken_);
  while (true) {
    v1::JobEvent event;
    while (source_->Read(event)) {
      if (watch_.Accept(event)) return event;
    }
    const grpc::Status status = source_->Finish();
    if (watch_.ended()) break;
    try {
      Reopen(status);
    } catch (...) {
      broken_ = std::current_exception();
      throw;
    }
  }
  done_ = true;
  if (owner_) {
    if (const auto error = watch_.JobError()) throw *error;
  }
  return std::nullopt;
}

void StreamImpl::Reopen(const grpc::Status& status) {
  const bool early = status.ok();
  const CallFailure ended = early ? EndedEarly() : FromCall(status, connection_->address());
  if (!watch_.connected() && !early) {
    if (const auto delay = retry_.Delay(ended, deadline_)) {
      connection_->Pause(*delay);
      source_ = open_(deadline_);
      return;
    }
  }
  connection_->Pause(deadline_.Within(watch_.Lost(ended, early)));
  source_ = connection_->Watch(watch_.Request(), deadline_);
}

v1::Job StreamImpl::Cancel(const std::string& reason) const {
  return connection_->CancelJob(watch_.job_id(), reason, std::nullopt);
}

Result StreamImpl::Finished() {
  while (Next()) {
  }
  if (const auto error = watch_.JobError()) throw *error;
  if (!watch_.ended()) {
    Failure failure;
    failure.code = Code::FailedPrecondition;
    failure.reason = "STREAM_CLOSED";
    failure.message = "the stream of job " + watch_.job_id() + " was closed before the job ended";
    failure.job_id = watch_.job_id();
    throw Error(std::move(failure));
  }
  for (PartialArtifact* missing : watch_.Missing()) {
    *missing = connection_->Download(missing->artifact().artifact_id(), deadline_, *missing);
  }
  return watch_.Finished();
}

void StreamImpl::Close() noexcept {
  done_ = true;
  first_.reset();
  source_.reset();
}

}  // namespace internal

void Progress::operator()(const v1::JobEvent& event) const {
  if (on_event) on_event(event);
  if (on_queued && event.has_queued()) on_queued(event.queued());
  if (on_started && event.has_started()) on_started(event.started());
  if (on_decode && event.has_decode_progress()) on_decode(event.decode_progress());
  if (on_warning && event.has_warning()) on_warning(event.warning());
  if (on_artifact && event.has_artifact_ready()) on_artifact(event.artifact_ready().artifact());
  if (!event.has_step_progress()) return;
  if (on_step) on_step(event.step_progress());
  if (!on_preview) return;
  for (const v1::Preview& preview : event.step_progress().previews()) on_preview(event.step_progress(), preview);
}

std::string EventKind(const v1::JobEvent& event) {
  const auto* kinds = v1::JobEvent::descriptor()->FindOneofByName("event");
  const auto* field = event.GetReflection()->GetOneofFieldDescriptor(event, kinds);
  return field == nullptr ? "" : field->name();
}

Stream::Stream(std::unique_ptr<internal::StreamImpl> impl) : impl_(std::move(impl)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

const std::string& Stream::job_id() const noexcept { return impl_->watch().job_id(); }
std::uint64_t Stream::after_seq() const noexcept { return impl_->watch().after_seq(); }
std::optional<v1::JobEvent> Stream::Next() { return impl_->Next(); }
v1::Job Stream::Cancel(const std::string& reason) { return impl_->Cancel(reason); }
Result Stream::Result() { return impl_->Finished(); }
std::optional<Error> Stream::error() const { return impl_->watch().JobError(); }
void Stream::Close() noexcept { impl_->Close(); }

}  // namespace omni
