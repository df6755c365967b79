// The dequant family as plain C: packed weights of GGUF files. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

// ggml's numbers of the types that have kernels.
enum class Packing : int32_t { kQ4_0 = 2, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };

// Elements and bytes of a block.
struct Block {
  int64_t elements;
  int64_t size;
};

constexpr Block block_of(Packing packing) {
  switch (packing) {
    case Packing::kQ4_0: return {32, 18};
    case Packing::kQ8_0: return {32, 34};
    case Packing::kQ4_K: return {256, 144};
    case Packing::kQ5_K: return {256, 176};
    case Packing::kQ6_K: return {256, 210};
  }
  return {0, 0};
}

struct Dequantize {
  const uint8_t* packed;  // [blocks, size of a block]
  void* out;              // [blocks, elements of a block]
  int64_t blocks;
  Packing packing;
  Dtype out_dtype;
};

}  // namespace omni

extern "C" {

// Unpacks the blocks [begin, end) on the calling thread.
void omni_dequantize_cpu(const omni::Dequantize* call, int64_t begin, int64_t end);

// Unpacks all of them. `packed` is a multiple of two bytes.
const char* omni_dequantize_cuda(const omni::Dequantize* call, void* stream);
}
