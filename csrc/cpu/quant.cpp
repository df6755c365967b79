// The quant family on the CPU: SiLU times a factor in one pass.
#include "../common/quant.h"

#include "../common/cpu.h"

namespace {

using omni::Activate;
using omni::BFloat16;
using omni::to_float;

// 2^n * e^r with |r| <= log(2) / 2 and the Taylor polynomial of degree 7: within 2 units in the last place. Written out
// because compilers vectorise arithmetic, not calls of expf.
OMNI_INLINE float exponential(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x < -87.f ? -87.f : (x > 88.f ? 88.f : x);
  const float n = (x * 1.44269504f + kRound) - kRound;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // log(2) in two parts, the first exact in products
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

template <class X>
OMNI_INLINE void silu_mul(const Activate& call, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const X* __restrict__ x = static_cast<const X*>(call.x) + token * call.x_stride;
    const X* __restrict__ up = static_cast<const X*>(call.up) + token * call.up_stride;
    X* __restrict__ out = static_cast<X*>(call.out) + token * call.channels;
#pragma omp simd
    for (int64_t c = 0; c < call.channels; ++c) {
      const float value = to_float(x[c]);
      omni::store(out + c, value / (1.f + exponential(-value)) * to_float(up[c]));
    }
  }
}

OMNI_CLONES void f32(const Activate& call, int64_t begin, int64_t end) { silu_mul<float>(call, begin, end); }
OMNI_CLONES void bf16(const Activate& call, int64_t begin, int64_t end) { silu_mul<BFloat16>(call, begin, end); }

}  // namespace

void omni_silu_mul_cpu(const Activate* call, int64_t begin, int64_t end) {
  (call->x_dtype == omni::Dtype::kFloat32 ? f32 : bf16)(*call, begin, end);
}
