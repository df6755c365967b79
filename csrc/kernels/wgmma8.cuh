// Hopper's 8-bit matrix products of a warpgroup, and the copies and barriers that feed them. Compiled for sm_90a alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace omni {

#define OMNI_8(c, x, i) \
  c((x)[i]), c((x)[i + 1]), c((x)[i + 2]), c((x)[i + 3]), c((x)[i + 4]), c((x)[i + 5]), c((x)[i + 6]), c((x)[i + 7])
#define OMNI_64(c, x)                                                                                                \
  OMNI_8(c, x, 0), OMNI_8(c, x, 8), OMNI_8(c, x, 16), OMNI_8(c, x, 24), OMNI_8(c, x, 32), OMNI_8(c, x, 40), \
      OMNI_8(c, x, 48), OMNI_8(c, x, 56)
#define OMNI_ACCUMULATORS                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

__device__ __forceinline__ uint32_t shared_address(const void* where) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(where));
}

// --- barriers and copies ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the barriers' first state known to the copy engine; a barrier of the block follows.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

// Waits for the end of the phase of this parity; the phase before the first one has parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef OMNI_GRPC_BOUNDED_WAITS  // for a kernel under work: wrong results instead of a GPU that hangs
  for (uint32_t tries = 0; tries < (1u << 16) && !barrier_passed(barrier, parity); ++tries) {
  }
#else
  while (!barrier_passed(barrier, parity)) {
  }
#endif
}

// Contiguous bytes to shared memory: addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void shared_store(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void named_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// --- products --------------------------------------------------------------------------------------------------------

// Describes lines of 128 bytes with the swizzle of 128 bytes, the first line at a multiple of 1024: the operand's other
// dimension runs along the line, and 8 lines are 1024 bytes (PTX ISA, "matrix descriptor").
__device__ __forceinline__ uint64_t lines_at(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
constexpr uint64_t kNextLink = 32 >> 4;  // the next 32 bytes of each line, which one instruction takes

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Where what is in registers was made by other instructions.
__device__ __forceinline__ void wgmma_fence(uint32_t (&p)[16]) {
  asm volatile("wgmma.fence.sync.aligned;" : OMNI_8("+r", p, 0), OMNI_8("+r", p, 8)::"memory");
}
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are unfinished; `made` is what one of the finished ones has made.
template <int kPending>
__device__ __forceinline__ void wgmma_wait(int (&made)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : OMNI_64("+r", made) : "n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait(float (&made)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : OMNI_64("+f", made) : "n"(kPending) : "memory");
}

// The same, no sooner than `first` has been computed: what does not depend on a wait is else moved behind it.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_after(float (&made)[64], uint32_t (&first)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %80;"
               : OMNI_64("+f", made), OMNI_8("+r", first, 0), OMNI_8("+r", first, 8)
               : "n"(kPending)
               : "memory");
}

// d [64, 128] = a b^T over 128 channels, in 32-bit integers: a 64 lines, b 128 lines. A thread has of d what
// `AttentionQ`'s kernel says.
__device__ __forceinline__ void start_scores(int (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " OMNI_ACCUMULATORS ", %64, %65, p;\n}\n"
      : OMNI_64("=r", d)
      : "l"(a), "l"(b));
#pragma unroll
  for (int link = 1; link < 4; ++link) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " OMNI_ACCUMULATORS ", %64, %65, p;\n}\n"
        : OMNI_64("+r", d)
        : "l"(a + link * kNextLink), "l"(b + link * kNextLink));
  }
}

// d [64, 128] = p b^T over 128 keys, e4m3 to float32: p in registers, four of them for each 32 keys, b 128 lines.
__device__ __forceinline__ void start_values(float (&d)[64], const uint32_t (&p)[16], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " OMNI_ACCUMULATORS
      ", {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
      : OMNI_64("=f", d)
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(b));
#pragma unroll
  for (int link = 1; link < 4; ++link) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " OMNI_ACCUMULATORS
        ", {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
        : OMNI_64("+f", d)
        : "r"(p[4 * link]), "r"(p[4 * link + 1]), "r"(p[4 * link + 2]), "r"(p[4 * link + 3]),
          "l"(b + link * kNextLink));
  }
}

// d += p b^T.
__device__ __forceinline__ void start_more_values(float (&d)[64], const uint32_t (&p)[16], uint64_t b) {
#pragma unroll
  for (int link = 0; link < 4; ++link) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " OMNI_ACCUMULATORS
        ", {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
        : OMNI_64("+f", d)
        : "r"(p[4 * link]), "r"(p[4 * link + 1]), "r"(p[4 * link + 2]), "r"(p[4 * link + 3]),
          "l"(b + link * kNextLink));
  }
}

}  // namespace omni
