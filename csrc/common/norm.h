// The norm family as plain C: what the binding and the kernels agree on. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

// One call of norm_modulate. Pointers are of the device that the launcher serves; strides count elements.
struct NormModulate {
  const void* x;         // [tokens, channels], rows x_stride apart
  const void* scale;     // [rows, channels], rows scale_stride apart
  const void* shift;     // [rows, channels], rows shift_stride apart
  const int32_t* index;  // [tokens], or null where every token takes row 0
  void* out;             // [tokens, channels], contiguous, of x_dtype
  int64_t tokens;
  int64_t channels;
  int64_t rows;
  int64_t x_stride;
  int64_t scale_stride;
  int64_t shift_stride;
  float eps;
  Dtype x_dtype;
  Dtype modulation_dtype;
};

}  // namespace omni

extern "C" {

// Computes the tokens [begin, end) on the calling thread. The caller has checked that every index is in range.
void omni_norm_modulate_cpu(const omni::NormModulate* call, int64_t begin, int64_t end);

// Launches on `stream` (a cudaStream_t). Returns null, or what is wrong in words.
const char* omni_norm_modulate_cuda(const omni::NormModulate* call, void* stream);
}
