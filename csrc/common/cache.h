// The cache family as plain C. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

constexpr int64_t kChunk = 8192;      // elements of a row that are summed together, wherever the row lies
constexpr int kCompareRows = 64;      // rows of one launch: they travel as kernel arguments, which end at 4 KiB
constexpr int64_t kCompareSums = 2;   // of |now - before|, of |before|

// Some rows of a compare_store. Pointers are of the device that the launcher serves. A row whose memory is null is
// given sums of 0; so is one that is not known, whose memory is written alone.
struct CompareStore {
  const void* now[kCompareRows];          // [elements of the row], contiguous
  void* before[kCompareRows];             // as many
  int64_t elements[kCompareRows];
  int64_t first_chunk[kCompareRows + 1];  // how many chunks all rows before have
  uint8_t known[kCompareRows];
  float* partials;                        // [chunks of all rows, 2]: scratch, on CUDA alone
  float* sums;                            // [rows, 2]
  int32_t rows;
  Dtype dtype;
};

}  // namespace omni

extern "C" {

// Compares one row on the calling thread.
void omni_compare_store_cpu(const omni::CompareStore* call, int32_t row);

// Launches on `stream` (a cudaStream_t). Returns null, or what is wrong in words.
const char* omni_compare_store_cuda(const omni::CompareStore* call, void* stream);
}
