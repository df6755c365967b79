// What the CUDA kernels of the rope family share: where a token goes, whose row it is in, what a thread has of a head,
// and how it becomes codes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>

#include "device.cuh"
#include "dtype.h"
#include "rope.h"

namespace omni {

constexpr int kUnit = 2 * kPack;  // channels of a head that one thread has

__device__ __forceinline__ const QkvStream& stream_of(const QkNormRope& call, int64_t token) {
  int s = 0;
  while (s + 1 < call.stream_count && token >= call.streams[s + 1].begin) ++s;
  return call.streams[s];
}

__device__ __forceinline__ int64_t place_of(const QkvStream& stream, int64_t token) {
  return stream.place == nullptr ? token : stream.place[token];
}

__device__ __forceinline__ void check_place(const QkNormRope& call, int64_t place) {
  assert(place >= 0 && place < call.tokens && "place holds a row that the result lacks");
}

// The row of the result that a token is in: the last that does not begin behind it.
__device__ __forceinline__ int64_t row_of(const QkNormRope& call, int64_t place) {
  int64_t low = 0, high = call.rows - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (__ldg(call.cu + middle) <= place) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ int64_t peak_at(const QkNormRope& call, int which, int64_t row, int64_t kv_head) {
  return (which * call.rows + row) * call.kv_heads + kv_head;
}

__device__ __forceinline__ float affine_at(const void* values, omni::Dtype dtype, int64_t at) {
  return dtype == omni::Dtype::kFloat32 ? static_cast<const float*>(values)[at]
                                        : omni::to_float(static_cast<const __nv_bfloat16*>(values)[at]);
}

__device__ __forceinline__ void affine_pack(const void* values, Dtype dtype, int at, float (&out)[kPack]) {
  if (dtype == Dtype::kFloat32) {
    load_pack<Reused>(static_cast<const float*>(values) + at, out);
  } else {
    load_pack<Reused>(static_cast<const __nv_bfloat16*>(values) + at, out);
  }
}

// Where the two packs of a thread lie in its head: far enough apart that neighbours read neighbouring packs, and such
// that in the pairing by halves the second pack has the partners of the first.
struct UnitPlace {
  int at[2];      // their first channels
  bool turns[2];  // by halves the packs turn together
  int turn_at[2];  // where turns of four pairs begin in a row of the table: those of a pack, or by halves the first and
                   // the second four of both

  __device__ __forceinline__ UnitPlace(const QkNormRope& call, int lane) {
    const int size = static_cast<int>(call.head_size), pairs = static_cast<int>(call.pairs);
    if (call.half) {
      const int turning = pairs / kPack;
      const bool mine = lane < turning;
      at[0] = mine ? lane * kPack : 2 * pairs + (lane - turning) * kPack;
      at[1] = at[0] + (mine ? pairs : size / 2 - pairs);
      turns[0] = turns[1] = mine;
      turn_at[0] = 2 * at[0];
      turn_at[1] = 2 * at[0] + kPack;
    } else {
      at[0] = lane * kPack;
      at[1] = at[0] + size / 2;
      turns[0] = at[0] < 2 * pairs;
      turns[1] = at[1] < 2 * pairs;
      turn_at[0] = at[0];
      turn_at[1] = at[1];
    }
  }
};

__device__ __forceinline__ float row_scale(uint32_t peak) { return __uint_as_float(peak) / 448.f; }

__device__ __forceinline__ float inverse_of(float scale) {
  constexpr float kTiny = 1.17549435e-38f;
  return 1.f / (scale < kTiny ? kTiny : scale);  // written so that a NaN stays one
}

// The block of a row's first token says what scales the row has.
__device__ __forceinline__ void store_row_scales(const QkNormRope& call, int64_t row, int64_t place) {
  if (place != __ldg(call.cu + row)) return;
  const int all = 3 * static_cast<int>(call.kv_heads);
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const int64_t at = peak_at(call, i / call.kv_heads, row, i % call.kv_heads);
    call.row_scale[at] = row_scale(call.peaks[at]);
  }
}

template <Codes kCodes>
constexpr float kLargest = kCodes == Codes::kInt8 ? 127.f : 448.f;

template <Codes kCodes>
__device__ __forceinline__ uint32_t code_of(float value) {
  if constexpr (kCodes == Codes::kInt8) {
    return static_cast<uint32_t>(max(-127, min(127, __float2int_rn(value)))) & 0xffu;
  } else {
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  }
}

template <Codes kCodes>
__device__ __forceinline__ uint32_t code_pair(float low, float high) {
  if constexpr (kCodes == Codes::kInt8) {
    return code_of<kCodes>(low) | code_of<kCodes>(high) << 8;
  } else {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  }
}

// The codes of a pack.
template <Codes kCodes>
__device__ __forceinline__ uint2 code_pack(const float (&value)[kPack], float inverse) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPack; i += 2) {
    words[i / 4] |= code_pair<kCodes>(value[i] * inverse, value[i + 1] * inverse) << (8 * (i % 4));
  }
  return make_uint2(words[0], words[1]);
}

// kernels/rope_bulk.cu: whether it serves the call, which has packs everywhere, on the current device; and its launch.
bool rope_fits_bulk(const QkNormRope& call);
const char* launch_rope_bulk(const QkNormRope& call, cudaStream_t stream);

}  // namespace omni
