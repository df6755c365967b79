// The rope family as plain C: what the binding and the kernels agree on. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

constexpr int kMostStreams = 8;

enum class QkNorm : int32_t { kNone, kRms, kRmsAcross, kLayer };

// kE4m3, kInt8: with a scale for each head of each token. kE4m3ByRow: with one for each head of each row of tokens.
enum class Codes : int32_t { kNone, kE4m3, kInt8, kE4m3ByRow };

// One stream of a call: `tokens` tokens of q, k and v, whose heads lie side by side, rows a stride apart.
struct QkvStream {
  const void* q;
  const void* k;
  const void* v;         // null where v stays where it is
  const void* weight[2];  // of q's norm and of k's; null where there is none
  const void* bias[2];
  const int32_t* place;  // [tokens], the row of the result for each; null: the same row
  int64_t begin;         // tokens of the streams before
  int64_t tokens;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
};

// One call of qk_norm_rope. Pointers are of the device that the launcher serves; strides count elements.
struct QkNormRope {
  QkvStream streams[kMostStreams];
  const float* table;  // [tokens, pairs, 2] by row of the result
  void* out[3];        // q, k, v: contiguous, [tokens, heads or kv_heads, head_size]
  float* scale[3];     // of codes: [tokens, heads or kv_heads]
  int64_t tokens;      // of all streams
  int64_t stream_count;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_size;
  int64_t pairs;  // 0 where nothing turns
  float eps;
  QkNorm norm;
  bool half;  // pairs are (i, i + pairs), else (2i, 2i + 1)
  Codes codes;
  Dtype x_dtype;
  Dtype weight_dtype;
  // of kE4m3ByRow; kv_heads may be fewer than heads, which then share a scale
  const int32_t* cu;  // [rows + 1], offsets of the rows in the result
  uint32_t* peaks;    // [3, rows, kv_heads], zeros: bits of the largest magnitudes, of q and k as their norms bound them
  float* row_scale;   // [3, rows, kv_heads], zeros where a row has no tokens
  int64_t rows;
};

}  // namespace omni

extern "C" {

// Computes the tokens [begin, end) of all streams on the calling thread; no codes. The caller has checked every place.
void omni_qk_norm_rope_cpu(const omni::QkNormRope* call, int64_t begin, int64_t end);

// Launches on `stream` (a cudaStream_t). Returns null, or what is wrong in words.
const char* omni_qk_norm_rope_cuda(const omni::QkNormRope* call, void* stream);

// What has to run before it for codes with a scale for each row: fills `peaks`.
const char* omni_qk_row_peaks_cuda(const omni::QkNormRope* call, void* stream);
}
