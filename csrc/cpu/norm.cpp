// The norm family on the CPU: one token after the other, a few passes over a row that stays in cache as float32.
#include "../common/norm.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/cpu.h"
#include "../common/cpu_codes.h"
#include "../common/dtype.h"

namespace {

using omni::BFloat16;
using omni::Code;
using omni::Norm;
using omni::to_float;

template <class T>
OMNI_INLINE const T* at_row(const void* base, int64_t row, int64_t stride) {
  return static_cast<const T*>(base) + row * stride;
}

template <class X>
OMNI_INLINE float sum_of_squares(const X* __restrict__ x, float mean, int64_t channels) {
  float squares = 0.f;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < channels; ++c) {
    const float centred = to_float(x[c]) - mean;
    squares += centred * centred;
  }
  return squares;
}

OMNI_INLINE float inverse_root(float squares, const Norm& call) {
  return 1.f / std::sqrt(squares / static_cast<float>(call.channels) + call.eps);
}

// h = x + gate * y, rounded as it is written to sum. Null operands are known ahead, for loops without branches.
template <bool kNormed, bool kGated, class X, class M>
OMNI_INLINE void add(const Norm& call, int64_t token, int64_t row, float* __restrict__ h) {
  const int64_t channels = call.channels;
  const X* __restrict__ x = at_row<X>(call.x, token, call.x_stride);
  const X* __restrict__ y = at_row<X>(call.y, token, call.y_stride);
  const M* __restrict__ gate = at_row<M>(call.gate, row, call.gate_stride);
  const M* __restrict__ weight = static_cast<const M*>(call.y_weight);
  X* __restrict__ sum = static_cast<X*>(call.sum) + token * channels;
  const float inverse = kNormed ? inverse_root(sum_of_squares(y, 0.f, channels), call) : 1.f;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    float added = to_float(y[c]);
    if constexpr (kNormed) added *= inverse * to_float(weight[c]);
    if constexpr (kGated) added *= to_float(gate[c]);
    h[c] = to_float(x[c]) + added;
    if constexpr (sizeof(X) == sizeof(float)) sum[c] = h[c];
  }
  if constexpr (sizeof(X) == sizeof(float)) return;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) omni::store(sum + c, h[c]);
  if (call.out == nullptr) return;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) h[c] = to_float(sum[c]);
}

template <class X, class M>
OMNI_INLINE void add(const Norm& call, int64_t token, int64_t row, float* h) {
  if (call.y_weight != nullptr && call.gate != nullptr) return add<true, true, X, M>(call, token, row, h);
  if (call.y_weight != nullptr) return add<true, false, X, M>(call, token, row, h);
  if (call.gate != nullptr) return add<false, true, X, M>(call, token, row, h);
  return add<false, false, X, M>(call, token, row, h);
}

// A row as the call wants it: in x's dtype, or in 8 bits.
template <class X>
OMNI_INLINE void write(const Norm& call, int64_t token, const float* __restrict__ h) {
  const int64_t channels = call.channels;
  uint8_t* codes = static_cast<uint8_t*>(call.out) + token * channels;
  if (call.code == Code::kInt8) return omni::code_row<Code::kInt8>(h, channels, codes, call.out_scale + token);
  if (call.code == Code::kFloat8) return omni::code_row<Code::kFloat8>(h, channels, codes, call.out_scale + token);
  X* __restrict__ out = static_cast<X*>(call.out) + token * channels;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) omni::store(out + c, h[c]);
}

template <class X, class M>
OMNI_INLINE void normalise(const Norm& call, int64_t token, int64_t row, float* __restrict__ h) {
  const int64_t channels = call.channels;
  float mean = 0.f;
  if (!call.rms) {
    float sum = 0.f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < channels; ++c) sum += h[c];
    mean = sum / static_cast<float>(channels);
  }
  // Centred, not E[x^2] - mean^2: residual streams have channels a thousand times larger than the rest.
  const float inverse = inverse_root(sum_of_squares(h, mean, channels), call);
  const M* __restrict__ scale = at_row<M>(call.scale, row, call.scale_stride);
  const M* __restrict__ shift = at_row<M>(call.shift, row, call.shift_stride);
  const float base = call.base;
  if (call.scale != nullptr && call.shift != nullptr && call.weight == nullptr && call.bias == nullptr) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      h[c] = (h[c] - mean) * inverse * (base + to_float(scale[c])) + to_float(shift[c]);
    }
    return write<X>(call, token, h);
  }
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) h[c] = (h[c] - mean) * inverse;
  if (call.weight != nullptr) {
    const M* __restrict__ weight = static_cast<const M*>(call.weight);
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) h[c] *= to_float(weight[c]);
  }
  if (call.bias != nullptr) {
    const M* __restrict__ bias = static_cast<const M*>(call.bias);
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) h[c] += to_float(bias[c]);
  }
  if (call.scale != nullptr) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) h[c] *= base + to_float(scale[c]);
  }
  if (call.shift != nullptr) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) h[c] += to_float(shift[c]);
  }
  write<X>(call, token, h);
}

template <class X, class M>
OMNI_INLINE void rows(const Norm& call, int64_t begin, int64_t end, float* h) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = call.index == nullptr ? 0 : call.index[token];
    if (call.y != nullptr) {
      add<X, M>(call, token, row, h);
    } else {
      const X* __restrict__ x = at_row<X>(call.x, token, call.x_stride);
#pragma omp simd
      for (int64_t c = 0; c < call.channels; ++c) h[c] = to_float(x[c]);
    }
    if (call.out != nullptr) normalise<X, M>(call, token, row, h);
  }
}

using Kernel = void (*)(const Norm&, int64_t, int64_t, float*);

OMNI_CLONES void f32_f32(const Norm& call, int64_t begin, int64_t end, float* h) {
  rows<float, float>(call, begin, end, h);
}
OMNI_CLONES void f32_bf16(const Norm& call, int64_t begin, int64_t end, float* h) {
  rows<float, BFloat16>(call, begin, end, h);
}
OMNI_CLONES void bf16_f32(const Norm& call, int64_t begin, int64_t end, float* h) {
  rows<BFloat16, float>(call, begin, end, h);
}
OMNI_CLONES void bf16_bf16(const Norm& call, int64_t begin, int64_t end, float* h) {
  rows<BFloat16, BFloat16>(call, begin, end, h);
}

constexpr Kernel kKernels[2][2] = {{f32_f32, f32_bf16}, {bf16_f32, bf16_bf16}};

}  // namespace

void omni_norm_cpu(const Norm* call, int64_t begin, int64_t end) {
  std::vector<float> h(static_cast<size_t>(call->channels));
  kKernels[static_cast<int>(call->x_dtype)][static_cast<int>(call->parameter_dtype)](*call, begin, end, h.data());
}
