// The lora family on the CPU. Tokens are multiplied with the first factors eight at a time, so that a factor is read once
// for all of them; what is added to y is summed in float32 and rounded once. A token's sums have one order, whichever
// tokens it is computed with.
#include "../common/lora.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/cpu.h"
#include "../common/cpu_codes.h"
#include "../common/dtype.h"

namespace {

using omni::BFloat16;
using omni::Code;
using omni::kLoraBlock;
using omni::LoraAdd;
using omni::LoraPart;
using omni::LoraRun;
using omni::to_float;

constexpr int64_t kLanes = 16;
constexpr int64_t kTokens = 8;    // of a tile
constexpr int64_t kColumns = 64;  // outputs at a time

struct Scratch {
  float* x;        // [kTokens, in]
  float* inner;    // [tokens, blocks * kLoraBlock]
  float* columns;  // [kLoraBlock, kColumns]: some of a second factor, transposed
  float* sums;     // [tokens, kColumns]
};

OMNI_INLINE float float8_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal = omni::bits_of(static_cast<float>(magnitude) * 0.001953125f);
  const uint32_t bits = omni::pick(magnitude < 8u, subnormal, normal);
  return omni::from_bits(omni::pick(magnitude == 0x7fu, 0x7fc00000u, bits) | ((code & 0x80u) << 24));
}

// A token in float32, codes without their scale.
template <class X>
OMNI_INLINE void widen(const LoraAdd& call, int64_t token, float* __restrict__ held) {
  const int64_t in = call.in, at = token * call.x_stride;
  if (call.code == Code::kFloat8) {
    const uint8_t* __restrict__ x = static_cast<const uint8_t*>(call.x) + at;
#pragma omp simd
    for (int64_t c = 0; c < in; ++c) held[c] = float8_value(x[c]);
  } else if (call.code == Code::kInt8) {
    const int8_t* __restrict__ x = static_cast<const int8_t*>(call.x) + at;
#pragma omp simd
    for (int64_t c = 0; c < in; ++c) held[c] = static_cast<float>(x[c]);
  } else {
    const X* __restrict__ x = static_cast<const X*>(call.x) + at;
#pragma omp simd
    for (int64_t c = 0; c < in; ++c) held[c] = to_float(x[c]);
  }
}

// The products of a tile's tokens with one row of a first factor.
template <class X>
OMNI_INLINE void multiply(const float* __restrict__ x, const X* __restrict__ row, int64_t in, float (&sum)[kTokens]) {
  float lanes[kTokens][kLanes] = {};
  const int64_t whole = in / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    float w[kLanes];
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) w[lane] = to_float(row[i + lane]);
    for (int64_t t = 0; t < kTokens; ++t) {
#pragma omp simd
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[t][lane] += x[t * in + i + lane] * w[lane];
    }
  }
  for (int64_t t = 0; t < kTokens; ++t) {
    sum[t] = 0.f;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum[t] += lanes[t][lane];
  }
  for (int64_t i = whole; i < in; ++i) {
    const float w = to_float(row[i]);
    for (int64_t t = 0; t < kTokens; ++t) sum[t] += x[t * in + i] * w;
  }
}

template <class X>
OMNI_INLINE void shrink(const LoraAdd& call, const LoraRun& run, int64_t begin, int64_t end, const Scratch& scratch) {
  const int64_t width = static_cast<int64_t>(run.blocks) * kLoraBlock, in = call.in;
  for (int64_t first = begin; first < end; first += kTokens) {
    const int64_t count = std::min(kTokens, end - first);
    // a tile is always full, so that its last tokens are computed as the others are
    for (int64_t t = 0; t < kTokens; ++t)
      widen<X>(call, run.first + first + std::min(t, count - 1), scratch.x + t * in);
    for (int32_t p = run.first_part; p < run.end_part; ++p) {
      const LoraPart& part = call.part[p];
      if (part.down == nullptr) continue;
      for (int64_t rank = 0; rank < part.rank; ++rank) {
        float sum[kTokens];
        multiply(scratch.x, static_cast<const X*>(part.down) + rank * in, in, sum);
        for (int64_t t = 0; t < count; ++t) {
          const float factor = call.x_scale == nullptr ? part.scale : part.scale * call.x_scale[run.first + first + t];
          scratch.inner[(first - begin + t) * width + part.first_block * kLoraBlock + rank] = sum[t] * factor;
        }
      }
    }
  }
}

// Adds what a part has for the outputs [column, column + count) to the sums.
template <class X>
OMNI_INLINE void expand(const LoraPart& part, int64_t width, int64_t column, int64_t count, int64_t tokens,
                        const Scratch& scratch) {
  const int64_t low = std::max<int64_t>(column, part.row_begin), high = std::min<int64_t>(column + count, part.row_end);
  if (low >= high) return;
  const X* up = static_cast<const X*>(part.up);
  if (part.down == nullptr) {
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t n = low; n < high; ++n)
        scratch.sums[t * kColumns + n - column] += part.scale * to_float(up[n - part.row_begin]);
    return;
  }
  for (int64_t first = 0; first < part.rank; first += kLoraBlock) {
    const int64_t ranks = std::min<int64_t>(kLoraBlock, part.rank - first);
    std::fill_n(scratch.columns, kLoraBlock * kColumns, 0.f);
    for (int64_t n = low; n < high; ++n)
      for (int64_t rank = 0; rank < ranks; ++rank)
        scratch.columns[rank * kColumns + n - column] = to_float(up[(n - part.row_begin) * part.rank + first + rank]);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* inner = scratch.inner + t * width + part.first_block * kLoraBlock + first;
      float* __restrict__ sums = scratch.sums + t * kColumns;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const float* __restrict__ row = scratch.columns + rank * kColumns;
        const float factor = inner[rank];
#pragma omp simd
        for (int64_t n = 0; n < kColumns; ++n) sums[n] += factor * row[n];
      }
    }
  }
}

OMNI_INLINE bool touches(const LoraAdd& call, const LoraRun& run, int64_t column, int64_t count) {
  if (call.gelu_tanh) return true;
  for (int32_t p = run.first_part; p < run.end_part; ++p)
    if (call.part[p].row_begin < column + count && call.part[p].row_end > column) return true;
  return false;
}

template <class X>
OMNI_INLINE void add(const LoraAdd& call, int32_t number, int64_t begin, int64_t end, const Scratch& scratch) {
  const LoraRun& run = call.run[number];
  const int64_t tokens = end - begin, width = static_cast<int64_t>(run.blocks) * kLoraBlock;
  if (run.blocks > 0) shrink<X>(call, run, begin, end, scratch);
  for (int64_t column = 0; column < call.out; column += kColumns) {
    const int64_t count = std::min<int64_t>(kColumns, call.out - column);
    if (!touches(call, run, column, count)) continue;
    X* y = static_cast<X*>(call.y) + (run.first + begin) * call.y_stride + column;
    std::fill_n(scratch.sums, tokens * kColumns, 0.f);
    for (int32_t p = run.first_part; p < run.end_part; ++p)
      expand<X>(call.part[p], width, column, count, tokens, scratch);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* __restrict__ sums = scratch.sums + t * kColumns;
      X* __restrict__ to = y + t * call.y_stride;
      if (call.gelu_tanh) {
#pragma omp simd
        for (int64_t n = 0; n < count; ++n) omni::store(to + n, omni::gelu_tanh(to_float(to[n]) + sums[n]));
      } else {
#pragma omp simd
        for (int64_t n = 0; n < count; ++n) omni::store(to + n, to_float(to[n]) + sums[n]);
      }
    }
  }
}

OMNI_CLONES void add_f32(const LoraAdd& call, int32_t run, int64_t begin, int64_t end, const Scratch& scratch) {
  add<float>(call, run, begin, end, scratch);
}
OMNI_CLONES void add_bf16(const LoraAdd& call, int32_t run, int64_t begin, int64_t end, const Scratch& scratch) {
  add<BFloat16>(call, run, begin, end, scratch);
}

}  // namespace

void omni_lora_add_cpu(const LoraAdd* call, int32_t run, int64_t begin, int64_t end) {
  const auto tokens = static_cast<size_t>(end - begin);
  const size_t x = static_cast<size_t>(kTokens) * call->in;
  const size_t inner = tokens * call->run[run].blocks * kLoraBlock, columns = kLoraBlock * kColumns;
  std::vector<float> memory(x + inner + columns + tokens * kColumns);
  const Scratch scratch{memory.data(), memory.data() + x, memory.data() + x + inner,
                        memory.data() + x + inner + columns};
  (call->dtype == omni::Dtype::kFloat32 ? add_f32 : add_bf16)(*call, run, begin, end, scratch);
}
