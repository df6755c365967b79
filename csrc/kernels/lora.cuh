// What the kernels of the lora family share: copies into shared memory, and the tiles of those that add products to a
// matrix.
#pragma once

#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../common/device.cuh"
#include "../common/lora.h"

namespace omni {

// 16 bytes from global to shared memory in the background, or zeros.
__device__ __forceinline__ void copy_pack(void* to, const void* from, bool there) {
  if (there) {
    __pipeline_memcpy_async(to, from, 16);
  } else {
    *static_cast<uint4*>(to) = make_uint4(0u, 0u, 0u, 0u);
  }
}

// 16 bytes of a row of `count` elements from `column` on: in the background where the row is aligned, else one by one.
template <class X>
__device__ __forceinline__ void copy_row(X* to, const X* row, int64_t column, int64_t count, bool there, bool vector) {
  constexpr int kElements = 16 / sizeof(X);
  if (vector || !there) {
    copy_pack(to, row + column, there && column < count);
    return;
  }
  for (int j = 0; j < kElements; ++j) {
    if (column + j < count) {
      to[j] = row[column + j];
    } else {
      to[j] = X{};
    }
  }
}

constexpr int kExpandThreads = 256;
constexpr int kExpandTokens = 64;
constexpr int kColumns = 128;
constexpr int kChunk = 4;                             // blocks of ranks at a time
constexpr int kRanks = kChunk * kLoraBlock;
constexpr int kRankPitch = kRanks + 8;
constexpr int kSumPitch = kColumns + 4;
constexpr int kPacksOfRow = kColumns / kPack;
constexpr int kPacks = kExpandTokens * kPacksOfRow / kExpandThreads;  // of a thread

// Whether rows of all first factors can be copied 16 bytes at a time.
inline bool has_vector_downs(const LoraAdd& call) {
  bool vector = call.in % kPack == 0;
  for (int i = 0; i < call.run[call.runs - 1].end_part; ++i)
    vector = vector && (call.part[i].down == nullptr || aligned(call.part[i].down, 0, 1));
  return vector;
}

}  // namespace omni
