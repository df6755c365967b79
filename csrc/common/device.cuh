// What the CUDA kernels share: 16-byte loads and stores of eight elements, and sums over a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace omni {

constexpr int kWarp = 32;
constexpr int kPack = 8;  // elements that one thread moves at a time: 16 bytes of bfloat16, two times 16 of float32

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ __forceinline__ void store(float* where, float value) { *where = value; }
__device__ __forceinline__ void store(__nv_bfloat16* where, float value) { *where = __float2bfloat16_rn(value); }

// Activations pass through once, so they bypass L1 and leave it to the modulation rows, which the next block reads
// again.
struct Streamed {
  static __device__ __forceinline__ uint4 load(const uint4* where) { return __ldcg(where); }
};
struct Reused {
  static __device__ __forceinline__ uint4 load(const uint4* where) { return __ldg(where); }
};

template <class Path>
__device__ __forceinline__ void load_pack(const float* where, float (&value)[kPack]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 raw = Path::load(reinterpret_cast<const uint4*>(where) + half);
    value[4 * half + 0] = __uint_as_float(raw.x);
    value[4 * half + 1] = __uint_as_float(raw.y);
    value[4 * half + 2] = __uint_as_float(raw.z);
    value[4 * half + 3] = __uint_as_float(raw.w);
  }
}

template <class Path>
__device__ __forceinline__ void load_pack(const __nv_bfloat16* where, float (&value)[kPack]) {
  const uint4 raw = Path::load(reinterpret_cast<const uint4*>(where));
  const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[2 * i] = __uint_as_float(pairs[i] << 16);
    value[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void store_pack(float* where, const float (&value)[kPack]) {
  auto* halves = reinterpret_cast<float4*>(where);
  halves[0] = make_float4(value[0], value[1], value[2], value[3]);
  halves[1] = make_float4(value[4], value[5], value[6], value[7]);
}

__device__ __forceinline__ uint32_t bfloat16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 bfloat16_pack(const float (&value)[kPack]) {
  return make_uint4(bfloat16_pair(value[0], value[1]), bfloat16_pair(value[2], value[3]),
                    bfloat16_pair(value[4], value[5]), bfloat16_pair(value[6], value[7]));
}

__device__ __forceinline__ void store_pack(__nv_bfloat16* where, const float (&value)[kPack]) {
  *reinterpret_cast<uint4*>(where) = bfloat16_pack(value);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// The sum over a block of whole warps, the same in every thread and in every run. Each call of a kernel brings scratch
// of its own, one float for each warp: that spares the barrier before reuse.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0.f;
  for (int warp = 0; warp < warps; ++warp) total += scratch[warp];
  return total;
}

inline bool aligned(const void* pointer, int64_t stride, int64_t element_size) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * element_size % 16 == 0;
}

}  // namespace omni
