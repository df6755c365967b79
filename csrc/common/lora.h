// The lora family as plain C. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

// Of one launch: they travel as kernel arguments, which end at 4 KiB. omni_grpc/ops/lora.py has the same numbers.
constexpr int kLoraRuns = 28;
constexpr int kLoraParts = 64;
constexpr int kLoraBlock = 16;  // ranks that the tensor cores take at a time; a part's are rounded up to that

// What one adapter adds to the outputs [row_begin, row_end) of the tokens of a run: scale * up @ down, with down
// [rank, in] and up [row_end - row_begin, rank], contiguous; or scale * up, a vector, where down is null.
struct LoraPart {
  const void* down;
  const void* up;
  int32_t rank;
  int32_t first_block;  // of the run's blocks of kLoraBlock ranks
  int32_t row_begin;
  int32_t row_end;
  float scale;
};

// Adjacent tokens with the same parts: those of the call from first_part to end_part.
struct LoraRun {
  int64_t first;
  int64_t inner_at;  // of the first of its elements in `inner`
  int32_t tokens;
  int32_t blocks;
  int32_t first_part;
  int32_t end_part;
};

// One call of lora_add. Pointers are of the device that the launcher serves. y: [tokens, out]. x: [tokens, in], rows
// x_stride apart, in y's dtype, or codes with a scale for each token.
struct LoraAdd {
  LoraRun run[kLoraRuns];
  LoraPart part[kLoraParts];
  void* y;
  const void* x;
  const float* x_scale;  // null: x is in y's dtype
  void* inner;           // bfloat16, scratch, on CUDA alone: for each run [its tokens, blocks * kLoraBlock]
  int64_t y_stride;
  int64_t x_stride;
  int32_t in;
  int32_t out;
  int32_t runs;
  bool gelu_tanh;
  Dtype dtype;
  Code code;  // of x
};

}  // namespace omni

extern "C" {

// The tokens [begin, end) of one run on the calling thread.
void omni_lora_add_cpu(const omni::LoraAdd* call, int32_t run, int64_t begin, int64_t end);

// Launches on `stream` (a cudaStream_t); y is bfloat16. Returns null, or what is wrong in words.
const char* omni_lora_add_cuda(const omni::LoraAdd* call, void* stream);
}
