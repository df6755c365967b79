// Copies of blocks into slots, ahead of the blocks' turns: on a stream of their own, or by a thread.
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../common/host.h"
#include "words.h"

namespace omni {

struct Streamer {
  virtual ~Streamer() = default;
  virtual const char* open() = 0;
  virtual const char* copy(int32_t slot, void* target, const void* source, int64_t bytes) = 0;
  virtual const char* wait(int32_t slot, void* stream) = 0;
  virtual const char* release(int32_t slot, void* stream) = 0;
  virtual const char* close() = 0;

  int32_t slots = 0;
};

}  // namespace omni

namespace {

using omni::Streamer;
using omni::words;

// --- the host --------------------------------------------------------------------------------------------------------

class HostStreamer final : public Streamer {
 public:
  const char* open() override {
    slot_.resize(static_cast<size_t>(slots));
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error& error) {
      return words(std::string("starting the thread that copies: ") + error.what());
    }
    return nullptr;
  }

  const char* copy(int32_t slot, void* target, const void* source, int64_t bytes) override {
    const std::lock_guard<std::mutex> lock(guard_);
    slot_[static_cast<size_t>(slot)].queued += 1;
    jobs_.push_back({slot, target, source, bytes});
    changed_.notify_all();
    return nullptr;
  }

  const char* wait(int32_t slot, void*) override {
    std::unique_lock<std::mutex> lock(guard_);
    Slot& it = slot_[static_cast<size_t>(slot)];
    changed_.wait(lock, [&] { return it.done == it.queued; });
    it.in_use = true;
    return nullptr;
  }

  const char* release(int32_t slot, void*) override {
    const std::lock_guard<std::mutex> lock(guard_);
    slot_[static_cast<size_t>(slot)].in_use = false;
    changed_.notify_all();
    return nullptr;
  }

  const char* close() override {
    {
      const std::lock_guard<std::mutex> lock(guard_);
      stop_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    return nullptr;
  }

 private:
  struct Slot {
    int64_t queued = 0;
    int64_t done = 0;
    bool in_use = false;
  };
  struct Job {
    int32_t slot;
    void* target;
    const void* source;
    int64_t bytes;
  };

  void work() {
    std::unique_lock<std::mutex> lock(guard_);
    while (true) {
      // in the order in which they came, as on a stream
      changed_.wait(lock, [this] {
        return stop_ || (!jobs_.empty() && !slot_[static_cast<size_t>(jobs_.front().slot)].in_use);
      });
      if (stop_) return;
      const Job job = jobs_.front();
      jobs_.pop_front();
      lock.unlock();
      std::memcpy(job.target, job.source, static_cast<size_t>(job.bytes));
      lock.lock();
      slot_[static_cast<size_t>(job.slot)].done += 1;
      changed_.notify_all();
    }
  }

  std::mutex guard_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::vector<Slot> slot_;
  bool stop_ = false;
  std::thread thread_;
};

// --- a CUDA device ---------------------------------------------------------------------------------------------------

#ifdef OMNI_GRPC_CUDA_ARCHS

class CudaStreamer final : public Streamer {
 public:
  explicit CudaStreamer(int device) : device_(device) {}

  const char* open() override {
    const omni::OnDevice on(device_);
    cudaError_t error = on.problem;
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    for (int32_t slot = 0; slot < slots; ++slot) {
      for (std::vector<cudaEvent_t>* events : {&ready_, &free_}) {
        cudaEvent_t event = nullptr;
        if (error == cudaSuccess) error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
        if (event != nullptr) events->push_back(event);
      }
    }
    return words("opening a stream of copies", error);
  }

  const char* copy(int32_t slot, void* target, const void* source, int64_t bytes) override {
    const omni::OnDevice on(device_);
    const auto at = static_cast<size_t>(slot);
    cudaError_t error = on.problem;
    // an event that was never recorded is no reason to wait
    if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_, free_[at], 0);
    if (error == cudaSuccess)
      error = cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_);
    if (error == cudaSuccess) error = cudaEventRecord(ready_[at], stream_);
    return words("copying a block to the device", error);
  }

  const char* wait(int32_t slot, void* stream) override {
    const omni::OnDevice on(device_);
    if (on.problem != cudaSuccess) return words("choosing the device", on.problem);
    return words("waiting for a block",
                 cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), ready_[static_cast<size_t>(slot)], 0));
  }

  const char* release(int32_t slot, void* stream) override {
    const omni::OnDevice on(device_);
    if (on.problem != cudaSuccess) return words("choosing the device", on.problem);
    return words("releasing a block",
                 cudaEventRecord(free_[static_cast<size_t>(slot)], static_cast<cudaStream_t>(stream)));
  }

  const char* close() override {
    const omni::OnDevice on(device_);
    cudaError_t error = stream_ == nullptr ? on.problem : cudaStreamSynchronize(stream_);
    for (const std::vector<cudaEvent_t>* events : {&ready_, &free_})
      for (cudaEvent_t event : *events) cudaEventDestroy(event);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    return words("closing a stream of copies", error);
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaEvent_t> ready_;
  std::vector<cudaEvent_t> free_;
};

#endif

const char* check(const Streamer* streamer, int32_t slot) {
  return slot >= 0 && slot < streamer->slots ? nullptr : words("there is no slot " + std::to_string(slot));
}

}  // namespace

const char* omni_streamer_open(int32_t device, int32_t slots, Streamer** streamer) {
  if (slots < 1) return words("a stream of copies needs a slot");
  std::unique_ptr<Streamer> made;
  if (device == omni::kHost) {
    made = std::make_unique<HostStreamer>();
  } else {
#ifdef OMNI_GRPC_CUDA_ARCHS
    made = std::make_unique<CudaStreamer>(device);
#else
    return words("this library was built without CUDA");
#endif
  }
  made->slots = slots;
  if (const char* problem = made->open()) {
    const std::string kept = problem;
    made->close();
    return words(kept);
  }
  *streamer = made.release();
  return nullptr;
}

const char* omni_streamer_copy(Streamer* streamer, int32_t slot, void* target, const void* source, int64_t bytes) {
  if (const char* problem = check(streamer, slot)) return problem;
  return streamer->copy(slot, target, source, bytes);
}

const char* omni_streamer_wait(Streamer* streamer, int32_t slot, void* stream) {
  if (const char* problem = check(streamer, slot)) return problem;
  return streamer->wait(slot, stream);
}

const char* omni_streamer_release(Streamer* streamer, int32_t slot, void* stream) {
  if (const char* problem = check(streamer, slot)) return problem;
  return streamer->release(slot, stream);
}

const char* omni_streamer_close(Streamer* streamer) {
  const std::unique_ptr<Streamer> owned(streamer);
  return owned->close();
}
