// The quant family as plain C: what the binding and the kernels agree on. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

enum class Activation : int32_t { kIdentity, kGeluTanh, kSiluMul, kConcatGeluTanh };

// One call of the family: out = activation(x), for kSiluMul silu(x) * up, for kConcatGeluTanh x and behind it gelu(up).
// Pointers are of the device that the launcher serves; strides count elements.
struct Activate {
  const void* x;         // [tokens, x_channels], rows x_stride apart; with an index [any, x_channels]
  const void* up;        // [tokens, channels or what x leaves of them], rows up_stride apart, of x_dtype; null for one x
  const int32_t* index;  // [tokens], which row of x each token is; null where they are its own. For kIdentity alone
  void* out;             // [tokens, channels], contiguous, of x_dtype or one byte each, as `code` says
  float* out_scale;      // [tokens], with a code
  int64_t tokens;
  int64_t channels;
  int64_t x_channels;    // channels, but for kConcatGeluTanh
  int64_t x_stride;
  int64_t up_stride;
  Activation activation;
  Dtype x_dtype;
  Code code;
};

}  // namespace omni

extern "C" {

// Computes the tokens [begin, end) on the calling thread.
void omni_activate_cpu(const omni::Activate* call, int64_t begin, int64_t end);

// Launches on `stream` (a cudaStream_t). Returns null, or what is wrong in words.
const char* omni_activate_cuda(const omni::Activate* call, void* stream);
}
