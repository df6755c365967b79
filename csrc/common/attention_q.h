// The 8-bit attention family as plain C: what the binding and the kernels agree on. No torch and no CUDA header here.
//
// Operands lie in tiles, each a run of bytes that goes to shared memory as it is: `kTileRows` lines of 128 bytes, of
// which 16 bytes number c lie at number c ^ (line % 8). Row r of a packed batch begins at tile cu[r] / size + r, where
// size is that of a tile in tokens: no tile has tokens of two rows, and none needs a sum over the rows before it.
#pragma once

#include <cstdint>

#include "rope.h"

namespace omni {

constexpr int kHeadSize = 128;
constexpr int kTileQueries = 64;
constexpr int kTileKeys = 128;
constexpr int kCentreSamples = 64;     // keys that the centre of a row's keys is the mean of
constexpr float kLeastAmax = 1e-30f;   // what is smaller counts as zero: its inverse would not be finite

// 8-bit operands. Lines of q and k are tokens, 128 channels each; lines of v are channels, 128 keys each, and of each
// 16 keys number 8 a + 2 b + c lies at 4 b + 2 a + c, the order in which the product has its other operand.
struct CodedQkv {
  int8_t* q;       // [heads, q_tiles, kTileQueries, kHeadSize]
  float* q_scale;  // [heads, q_tiles, kTileQueries]
  int8_t* k;       // [kv_heads, k_tiles, kTileKeys, kHeadSize]
  float* k_scale;  // [kv_heads, k_tiles]
  uint8_t* v;      // e4m3 [kv_heads, k_tiles, kHeadSize, kTileKeys]
  float* v_scale;  // [kv_heads, k_tiles], powers of 2
  int64_t q_tiles;
  int64_t k_tiles;
};

// What both ops are told of the rows of a packed batch.
struct PackedRows {
  const int32_t* cu_q;  // [rows + 1]
  const int32_t* cu_k;
  int64_t rows;
  int64_t queries;
  int64_t keys;
  int64_t heads;
  int64_t kv_heads;
};

// One call of attention_quantize or qk_norm_rope_quantize_tiles, from bfloat16. What `from` says is done to queries and
// keys before they are quantized: norms of heads or across them, without biases, and turns of neighbouring channels.
struct AttentionCode {
  QkNormRope from;  // but for its outputs; where q and k are of unlike lengths it has one stream
  PackedRows rows;
  CodedQkv out;
  // to work with
  int32_t* source;  // [tokens] for each row of the result the token of all streams; null where they are the same
  float* factor;    // [2, tokens] by row of the result, of a norm across heads; null where there is none
  float* centre;    // [rows, kv_heads, kHeadSize] what is taken from keys
};

// Ways to compute the same. kTogether adds up what all tiles of keys give on the tensor cores, which have few bits for
// it; kApart does that in float32, tile by tile. kTurns is kTogether with warpgroups that start their products in turns.
enum class AttentionPlan : int32_t { kTogether, kTurns, kApart };

// One call of attention_q.
struct AttentionQ {
  PackedRows rows;
  CodedQkv in;
  void* out;    // bfloat16 [queries, heads, kHeadSize]
  float scale;  // of the scores
  AttentionPlan plan;
  bool persistent;  // one block for each multiprocessor, which takes work after work
};

}  // namespace omni

extern "C" {

// Launch on `stream` (a cudaStream_t). Return null, or what is wrong in words.
const char* omni_attention_code_cuda(const omni::AttentionCode* call, void* stream);
const char* omni_attention_q_cuda(const omni::AttentionQ* call, void* stream);
}
