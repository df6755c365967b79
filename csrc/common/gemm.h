// The gemm family as plain C: what becomes of the sums of a product of int8. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

// out = act(sums * x_scale * weight_scale + bias), in float32.
struct Finish {
  const int32_t* sums;        // [tokens, channels], contiguous
  const float* x_scale;       // [tokens]
  const float* weight_scale;  // [channels]
  const void* bias;           // [channels], of bias_dtype, or null
  void* out;                  // [tokens, channels], contiguous, of out_dtype
  int64_t channels;
  bool gelu_tanh;
  Dtype bias_dtype;
  Dtype out_dtype;
};

}  // namespace omni

extern "C" {

// Computes the tokens [begin, end) on the calling thread.
void omni_finish_cpu(const omni::Finish* call, int64_t begin, int64_t end);
}
