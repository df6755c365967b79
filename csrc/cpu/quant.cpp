// The quant family on the CPU: SiLU times a factor in one pass.
#include "../common/quant.h"

#include "../common/cpu.h"

namespace {

using omni::Activate;
using omni::BFloat16;
using omni::to_float;

OMNI_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

OMNI_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// x / (1 + e^-x), by way of e^-|x|, which does not overflow: 2^n * e^r with |r| <= log(2) / 2 and the Taylor polynomial
// of degree 7, within a few units in the last place. Written out, and choices made on the bits, because compilers
// vectorise neither calls of expf nor comparisons of floats, which may trap.
OMNI_INLINE float silu(float x) {
  constexpr float kRound = 12582912.f;   // 1.5 * 2^23: adding it rounds to an integer
  constexpr uint32_t kMost = 0x42ae0000;  // 87.f: e^-87 is next to the smallest normal number
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const float t = -float_of(magnitude < kMost ? magnitude : kMost);
  const float n = (t * 1.44269504f + kRound) - kRound;
  const float r = (t - n * 0.693145752f) - n * 1.42860677e-6f;  // log(2) in two parts, the first exact in products
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const float e = p * float_of(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits_of(x)) >> 31);
  const float share = float_of((negative & bits_of(e)) | (~negative & bits_of(1.f)));
  return x * (share / (1.f + e));
}

template <class X>
OMNI_INLINE void silu_mul(const Activate& call, int64_t begin, int64_t end) {
  const int64_t channels = call.channels;
  for (int64_t token = begin; token < end; ++token) {
    const X* __restrict__ x = static_cast<const X*>(call.x) + token * call.x_stride;
    const X* __restrict__ up = static_cast<const X*>(call.up) + token * call.up_stride;
    X* __restrict__ out = static_cast<X*>(call.out) + token * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) omni::store(out + c, silu(to_float(x[c])) * to_float(up[c]));
  }
}

OMNI_CLONES void f32(const Activate& call, int64_t begin, int64_t end) { silu_mul<float>(call, begin, end); }
OMNI_CLONES void bf16(const Activate& call, int64_t begin, int64_t end) { silu_mul<BFloat16>(call, begin, end); }

}  // namespace

void omni_silu_mul_cpu(const Activate* call, int64_t begin, int64_t end) {
  (call->x_dtype == omni::Dtype::kFloat32 ? f32 : bf16)(*call, begin, end);
}
