// What the CUDA kernels of the rope family share: where a token goes, whose row it is in, and
// how it becomes codes.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"
#include "rope.h"

namespace omni {

__device__ __forceinline__ int64_t place_of(const QkvStream& stream, int64_t token) {
  return stream.place == nullptr ? token : stream.place[token];
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

}  // namespace omni
