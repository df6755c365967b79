// The rope family on the CPU: one token after the other; a head is normed into a buffer and turned on its way out.
#include "../common/rope.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../common/cpu.h"
#include "../common/dtype.h"

namespace {

using omni::BFloat16;
using omni::QkNorm;
using omni::QkNormRope;
using omni::QkvStream;
using omni::to_float;

// One stream's weights and biases as float32, converted once for a range of tokens; empty where there are none.
struct Affine {
  std::vector<float> weight[2];
  std::vector<float> bias[2];
};

std::vector<float> floats(const void* values, int64_t count, omni::Dtype dtype) {
  std::vector<float> result(values == nullptr ? 0 : count);
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = dtype == omni::Dtype::kFloat32 ? static_cast<const float*>(values)[i]
                                               : to_float(static_cast<const BFloat16*>(values)[i]);
  }
  return result;
}

Affine affine_of(const QkNormRope& call, const QkvStream& stream) {
  Affine result;
  for (int which = 0; which < 2; ++which) {
    const int64_t heads = call.norm != QkNorm::kRmsAcross ? 1 : which == 0 ? call.heads : call.kv_heads;
    result.weight[which] = floats(stream.weight[which], heads * call.head_size, call.weight_dtype);
    result.bias[which] = floats(stream.bias[which], heads * call.head_size, call.weight_dtype);
  }
  return result;
}

template <class X>
OMNI_INLINE float mean_of(const X* __restrict__ x, int64_t count) {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < count; ++c) sum += to_float(x[c]);
  return sum / static_cast<float>(count);
}

template <class X>
OMNI_INLINE float inverse_of(const X* __restrict__ x, int64_t count, float mean, float eps) {
  float squares = 0.f;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < count; ++c) {
    const float centred = to_float(x[c]) - mean;
    squares += centred * centred;
  }
  return 1.f / std::sqrt(squares / static_cast<float>(count) + eps);
}

template <class X>
OMNI_INLINE void turn(const QkNormRope& call, const float* __restrict__ table, const float* __restrict__ head,
                      X* __restrict__ out) {
  const int64_t pairs = call.pairs;
  if (call.half) {
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      const float a = head[i], b = head[i + pairs], cosine = table[2 * i], sine = table[2 * i + 1];
      omni::store(out + i, a * cosine - b * sine);
      omni::store(out + i + pairs, b * cosine + a * sine);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      const float a = head[2 * i], b = head[2 * i + 1], cosine = table[2 * i], sine = table[2 * i + 1];
      omni::store(out + 2 * i, a * cosine - b * sine);
      omni::store(out + 2 * i + 1, b * cosine + a * sine);
    }
  }
#pragma omp simd
  for (int64_t c = 2 * pairs; c < call.head_size; ++c) omni::store(out + c, head[c]);
}

// All heads of one token's queries or keys.
template <class X>
OMNI_INLINE void row(const QkNormRope& call, const X* __restrict__ x, int64_t heads, const std::vector<float>& weight,
                     const std::vector<float>& bias, const float* table, float* __restrict__ head,
                     X* __restrict__ out) {
  const int64_t size = call.head_size;
  const bool across = call.norm == QkNorm::kRmsAcross;
  float mean = 0.f, inverse = across ? inverse_of(x, heads * size, 0.f, call.eps) : 1.f;
  for (int64_t h = 0; h < heads; ++h) {
    const X* __restrict__ from = x + h * size;
    const int64_t start = across ? h * size : 0;
    if (call.norm == QkNorm::kLayer) mean = mean_of(from, size);
    if (call.norm == QkNorm::kLayer || call.norm == QkNorm::kRms) inverse = inverse_of(from, size, mean, call.eps);
    if (weight.empty()) {
#pragma omp simd
      for (int64_t c = 0; c < size; ++c) head[c] = (to_float(from[c]) - mean) * inverse;
    } else {
      const float* __restrict__ factor = weight.data() + start;
#pragma omp simd
      for (int64_t c = 0; c < size; ++c) head[c] = (to_float(from[c]) - mean) * inverse * factor[c];
    }
    if (!bias.empty()) {
      const float* __restrict__ offset = bias.data() + start;
#pragma omp simd
      for (int64_t c = 0; c < size; ++c) head[c] += offset[c];
    }
    turn(call, table, head, out + h * size);
  }
}

template <class X>
OMNI_INLINE void qk_norm_rope(const QkNormRope& call, int64_t begin, int64_t end) {
  const int64_t q_size = call.heads * call.head_size, kv_size = call.kv_heads * call.head_size;
  std::vector<float> head(call.head_size);
  for (int64_t s = 0; s < call.stream_count; ++s) {
    const QkvStream& stream = call.streams[s];
    const int64_t first = std::max(begin - stream.begin, int64_t{0});
    const int64_t last = std::min(end - stream.begin, stream.tokens);
    if (first >= last) continue;
    const Affine affine = affine_of(call, stream);
    for (int64_t t = first; t < last; ++t) {
      const int64_t to = stream.place == nullptr ? t : stream.place[t];
      const float* table = call.table + to * call.pairs * 2;
      row(call, static_cast<const X*>(stream.q) + t * stream.q_stride, call.heads, affine.weight[0], affine.bias[0],
          table, head.data(), static_cast<X*>(call.out[0]) + to * q_size);
      row(call, static_cast<const X*>(stream.k) + t * stream.k_stride, call.kv_heads, affine.weight[1], affine.bias[1],
          table, head.data(), static_cast<X*>(call.out[1]) + to * kv_size);
      if (stream.v != nullptr) {
        std::memcpy(static_cast<X*>(call.out[2]) + to * kv_size, static_cast<const X*>(stream.v) + t * stream.v_stride,
                    kv_size * sizeof(X));
      }
    }
  }
}

OMNI_CLONES void f32(const QkNormRope& call, int64_t begin, int64_t end) { qk_norm_rope<float>(call, begin, end); }
OMNI_CLONES void bf16(const QkNormRope& call, int64_t begin, int64_t end) { qk_norm_rope<BFloat16>(call, begin, end); }

}  // namespace

void omni_qk_norm_rope_cpu(const QkNormRope* call, int64_t begin, int64_t end) {
  (call->x_dtype == omni::Dtype::kFloat32 ? f32 : bf16)(*call, begin, end);
}
