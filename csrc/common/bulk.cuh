// Rows by way of shared memory: bulk copies (cp.async.bulk, from sm_90 on) bring the row that comes next while a block
// works on this one, at the price of one instruction of one thread and of no registers. PTX ISA, sections 9.7.9.25
// (cp.async.bulk) and 9.7.13.15 (mbarrier).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "asked.cuh"
#include "device.cuh"

namespace omni {

constexpr int64_t kMostBulkTokens = 1 << 30;  // of kernels that count them in 32 bits, two launches ahead
constexpr int kBulkCapability = 9;  // the major one of devices that copy in bulk

// Around the body of a kernel that copies in bulk: it is empty, and its helpers are unused, where it is compiled for a
// device that cannot.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define OMNI_BULK 1
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Two stages in shared memory that take turns; more of them were no faster. The first thread of a block fills one,
// every thread waits for it, and once all of them are past a barrier behind their last read of it, it may be filled
// again. What is filled must be waited for.
class BulkStages {
 public:
  // Every thread calls it. full: two in shared memory; memory: 2 * bytes, aligned to 128.
  __device__ __forceinline__ BulkStages(uint64_t* full, uint8_t* memory, uint32_t bytes)
      : full_(shared_address(full)), memory_(memory), bytes_(bytes) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < 2; ++stage) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(stage)) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
  }

  // The first thread says how much comes to a stage, then loads it: pieces of a multiple of 16 bytes, aligned to 16.
  __device__ __forceinline__ void expect(int stage, uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)), "r"(bytes) : "memory");
  }

  __device__ __forceinline__ void load(int stage, uint32_t at, const void* from, uint32_t bytes) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(memory_) + stage * bytes_ + at),
        "l"(from), "r"(bytes), "r"(barrier(stage))
        : "memory");
  }

  // What came to the stage whose turn it is.
  __device__ __forceinline__ const uint8_t* wait() const {
    uint32_t there;
    do {
      asm volatile(
          "{\n.reg .pred there;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\n"
          "selp.u32 %0, 1, 0, there;\n}\n"
          : "=r"(there)
          : "r"(barrier(stage_)), "r"(parity_)
          : "memory");
    } while (there == 0);
    return memory_ + stage_ * bytes_;
  }

  // Whose turn it is.
  __device__ __forceinline__ int stage() const { return stage_; }

  __device__ __forceinline__ void next() {
    parity_ ^= static_cast<uint32_t>(stage_);
    stage_ ^= 1;
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int stage) const { return full_ + 8u * stage; }

  uint32_t full_;
  uint8_t* memory_;
  uint32_t bytes_;
  int stage_ = 0;
  uint32_t parity_ = 0u;
};

// The low half of a word comes by a multiplication whose factor, 2^16, the compiler does not know: else it would be a
// shift, of the pipe that the rest of the unpacking, maxima and conversions fill.
__device__ __forceinline__ void unpack_bfloat16(const uint4& raw, uint32_t to_high, float (&value)[kPack]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    value[2 * w] = __uint_as_float(words[w] * to_high);
    value[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
  }
}

// Launches as many blocks as the device runs at once, or fewer where there are fewer rows, with two stages of `bytes`.
template <class Call>
const char* launch_bulk(void (*kernel)(Call, uint32_t), const Call& call, unsigned threads, uint32_t bytes,
                        cudaStream_t stream) {
  const size_t shared = size_t{2} * bytes;
  const int resident = resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared);
  if (resident == 0) return no_block();
  const int64_t most = static_cast<int64_t>(current_device().processors) * resident;
  const auto blocks = static_cast<unsigned>(call.tokens < most ? call.tokens : most);
  kernel<<<blocks, threads, shared, stream>>>(call, 1u << 16);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Whether the current device copies in bulk and a block may have two stages of `bytes`.
inline bool fits_bulk(int64_t bytes) {
  const Device device = current_device();
  return device.major >= kBulkCapability && 2 * bytes + 2048 <= device.most_shared;
}

}  // namespace omni
