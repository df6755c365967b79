// What the kernels of the norm family share.
#pragma once

#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>

#include "../common/device.cuh"
#include "../common/norm.h"

namespace omni {

enum class Form { kSumOnly, kPlain, kCoded };  // what follows the sum: nothing, a row in x's dtype, 8-bit codes

// Checked where it is used: a check waits for the load.
__device__ __forceinline__ int64_t unchecked_row(const Norm& call, int64_t token) {
  return call.index == nullptr ? 0 : call.index[token];
}

__device__ __forceinline__ void check_row(const Norm& call, int64_t row) {
  assert((call.index == nullptr || (row >= 0 && row < call.rows)) &&
         "index holds a row that gate, scale and shift lack");
}

template <class T>
__device__ __forceinline__ const T* at_row(const void* base, int64_t row, int64_t stride) {
  return static_cast<const T*>(base) + row * stride;
}

// Whether the operands lie where packs of them can be read.
template <class X, class M>
bool all_aligned(const Norm& call) {
  return call.channels % kPack == 0 && aligned(call.x, call.x_stride, sizeof(X)) &&
         aligned(call.y, call.y_stride, sizeof(X)) && aligned(call.gate, call.gate_stride, sizeof(M)) &&
         aligned(call.scale, call.scale_stride, sizeof(M)) && aligned(call.shift, call.shift_stride, sizeof(M)) &&
         aligned(call.weight, 0, 1) && aligned(call.bias, 0, 1) && aligned(call.y_weight, 0, 1) &&
         aligned(call.sum, 0, 1) && aligned(call.out, 0, 1);
}

// norm_bulk.cu: whether it serves the call, whose operands are aligned, on the current device; and its launch.
bool norm_fits_bulk(const Norm& call);
const char* launch_norm_bulk(const Norm& call, cudaStream_t stream);

}  // namespace omni
