// The heads family as plain C: what the binding and the kernels agree on. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

constexpr int kMostKvHeads = 1024;

// q, k or v of packed rows, and where its codes go.
struct PackedHeads {
  const void* x;      // [tokens, heads, head_size], heads side by side, tokens a stride apart
  void* codes;        // the same, contiguous, one byte each
  const int32_t* cu;  // [rows + 1], the offsets of the rows
  int64_t stride;
  int64_t heads;
  int64_t longest;  // tokens of a row at most
};

// One call of quantize_heads. Pointers are of the device that the launcher serves; strides count elements.
struct QuantizeHeads {
  PackedHeads parts[3];  // q, k, v
  uint32_t* peaks;       // [3, rows, kv_heads], any content: bits of the largest magnitudes
  float* scales;         // [3, rows, kv_heads]
  int64_t rows;
  int64_t kv_heads;
  int64_t head_size;
  Dtype x_dtype;
};

}  // namespace omni

extern "C" {

// Launches on `stream` (a cudaStream_t). Returns null, or what is wrong in words.
const char* omni_quantize_heads_cuda(const omni::QuantizeHeads* call, void* stream);
}
