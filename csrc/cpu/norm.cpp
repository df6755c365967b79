// The norm family on the CPU: one token after the other, three passes over a row that stays in cache.
#include "../common/norm.h"

#include <cmath>

#include "../common/cpu.h"

namespace {

using omni::BFloat16;
using omni::NormModulate;
using omni::to_float;

template <class X, class M>
OMNI_INLINE void norm_modulate(const NormModulate& call, int64_t begin, int64_t end) {
  const int64_t channels = call.channels;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t row = call.index == nullptr ? 0 : call.index[t];
    const X* __restrict__ x = static_cast<const X*>(call.x) + t * call.x_stride;
    const M* __restrict__ scale = static_cast<const M*>(call.scale) + row * call.scale_stride;
    const M* __restrict__ shift = static_cast<const M*>(call.shift) + row * call.shift_stride;
    X* __restrict__ out = static_cast<X*>(call.out) + t * channels;

    float sum = 0.f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < channels; ++c) sum += to_float(x[c]);
    const float mean = sum / static_cast<float>(channels);

    // Centred, not E[x^2] - mean^2: residual streams have channels a thousand times larger than the rest.
    float squares = 0.f;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < channels; ++c) {
      const float centred = to_float(x[c]) - mean;
      squares += centred * centred;
    }
    const float inverse = 1.f / std::sqrt(squares / static_cast<float>(channels) + call.eps);

#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float normed = (to_float(x[c]) - mean) * inverse;
      omni::store(out + c, normed * (1.f + to_float(scale[c])) + to_float(shift[c]));
    }
  }
}

using Kernel = void (*)(const NormModulate&, int64_t, int64_t);

OMNI_CLONES void f32_f32(const NormModulate& call, int64_t begin, int64_t end) {
  norm_modulate<float, float>(call, begin, end);
}
OMNI_CLONES void f32_bf16(const NormModulate& call, int64_t begin, int64_t end) {
  norm_modulate<float, BFloat16>(call, begin, end);
}
OMNI_CLONES void bf16_f32(const NormModulate& call, int64_t begin, int64_t end) {
  norm_modulate<BFloat16, float>(call, begin, end);
}
OMNI_CLONES void bf16_bf16(const NormModulate& call, int64_t begin, int64_t end) {
  norm_modulate<BFloat16, BFloat16>(call, begin, end);
}

constexpr Kernel kKernels[2][2] = {{f32_f32, f32_bf16}, {bf16_f32, bf16_bf16}};

}  // namespace

void omni_norm_modulate_cpu(const NormModulate* call, int64_t begin, int64_t end) {
  kKernels[static_cast<int>(call->x_dtype)][static_cast<int>(call->modulation_dtype)](*call, begin, end);
}
