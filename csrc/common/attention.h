// The attention family as plain C: what the binding and the CPU kernel agree on. No torch header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

constexpr int64_t kPieceQueries = 128;  // a piece of work has at most so many, which share what they read of the keys

// softmax(scale * q k^T) v of packed rows. Elements of a head lie side by side; strides count elements.
struct Attention {
  const void* q;  // [Tq, heads, head_size]
  const void* k;  // [Tk, kv_heads, head_size]
  const void* v;
  void* out;            // as q, contiguous
  const int32_t* cu_q;  // [rows + 1]
  const int32_t* cu_k;
  int64_t q_stride[2];  // from token to token, from head to head
  int64_t k_stride[2];
  int64_t v_stride[2];
  int64_t heads;
  int64_t kv_heads;
  int64_t head_size;
  float scale;
  bool causal;
  Dtype dtype;
};

// Some queries of one head of one row.
struct AttentionPiece {
  int64_t row;
  int64_t head;
  int64_t first;  // counted in the row
  int64_t count;  // at most kPieceQueries
};

}  // namespace omni

extern "C" {

// floats of memory that a piece of such a call works in.
int64_t omni_attention_scratch(const omni::Attention* call);

// Computes one piece on the calling thread. `scratch` is aligned to 64 bytes.
void omni_attention_cpu(const omni::Attention* call, const omni::AttentionPiece* piece, float* scratch);
}
