// The norm family as plain C: what the binding and the kernels agree on. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

// One call of the family. With y, the first half runs: sum = x + gate * y; without it, sum stands for x below. With out,
// the second one: out = norm(sum) * weight + bias, times (base + scale), plus shift. Any operand after y may be null and
// then changes nothing. Pointers are of the device that the launcher serves; strides count elements.
struct Norm {
  const void* x;         // [tokens, channels], rows x_stride apart
  const void* y;         // [tokens, channels], rows y_stride apart, of x_dtype; with sum
  const void* gate;      // [rows, channels], rows gate_stride apart, of parameter_dtype, as is all that follows
  const void* scale;     // [rows, channels], rows scale_stride apart
  const void* shift;     // [rows, channels], rows shift_stride apart
  const void* weight;    // [channels]
  const void* bias;      // [channels]
  const void* y_weight;  // [channels]: y is RMS-normed with it before the gate
  const int32_t* index;  // [tokens], or null where every token takes row 0
  void* sum;             // [tokens, channels], contiguous, of x_dtype
  void* out;             // [tokens, channels], contiguous, of x_dtype or one byte each, as `code` says
  float* out_scale;      // [tokens], with a code
  int64_t tokens;
  int64_t channels;
  int64_t rows;
  int64_t x_stride;
  int64_t y_stride;
  int64_t gate_stride;
  int64_t scale_stride;
  int64_t shift_stride;
  float eps;
  float base;
  bool rms;  // RMSNorm, else LayerNorm
  Dtype x_dtype;
  Dtype parameter_dtype;
  Code code;
};

}  // namespace omni

extern "C" {

// Computes the tokens [begin, end) on the calling thread. The caller has checked that every index is in range.
void omni_norm_cpu(const omni::Norm* call, int64_t begin, int64_t end);

// Launches on `stream` (a cudaStream_t). Returns null, or what is wrong in words.
const char* omni_norm_cuda(const omni::Norm* call, void* stream);
}
