// What the CPU kernels share: bfloat16 as bits, and one function compiled for several vector widths.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// The widest vectors that there are to be, in bits. A build with fewer has the kernels of narrower processors alone, so that
// they can be tested where wider ones would be chosen (tools/cpu_clones.py).
#ifndef OMNI_CPU_BITS
#define OMNI_CPU_BITS 512
#endif

// The widest clone that the processor runs is chosen when the library loads, so one file serves every x86-64.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OMNI_TARGET(features) __attribute__((target(features)))
#define OMNI_HAS(bits, feature) (OMNI_CPU_BITS >= bits && __builtin_cpu_supports(feature))
#if OMNI_CPU_BITS == 512 && __GNUC__ >= 12
// with AVX-512's instructions for 16 bits, which halve what bfloat16 costs on top of float32
#define OMNI_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif OMNI_CPU_BITS == 512
#define OMNI_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#elif OMNI_CPU_BITS == 256
#define OMNI_CLONES OMNI_TARGET("avx2")
#else
#define OMNI_CLONES
#endif
#else
#define OMNI_TARGET(features)
#define OMNI_HAS(bits, feature) false
#define OMNI_CLONES
#endif

// Templates cannot be cloned: a clone inlines them, and its instruction set with them.
#define OMNI_INLINE inline __attribute__((always_inline))

namespace omni {

struct BFloat16 {
  uint16_t bits;
};

OMNI_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

OMNI_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// 1 for infinities and NaN, without a branch, so that loops stay vectors.
OMNI_INLINE uint32_t is_nonfinite(float value) { return (bits_of(value) & 0x7f800000u) == 0x7f800000u; }

OMNI_INLINE float to_float(float value) { return value; }

OMNI_INLINE float to_float(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

OMNI_INLINE void store(float* where, float value) { *where = value; }

// Rounds to nearest, ties to even, as torch does; a NaN stays one. All in 32 bits and without a choice, either of which
// would keep a loop from vectors.
OMNI_INLINE void store(BFloat16* where, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t is_nan = 0u - ((0x7f800000u - (bits & 0x7fffffffu)) >> 31);
  where->bits = static_cast<uint16_t>((rounded & ~is_nan) | (0x7fc0u & is_nan));
}

// Numbers in float32: where they are, or copied. Loops of one width alone become vectors of the widest kind.
template <class X>
OMNI_INLINE const float* wide(const X* __restrict__ x, int64_t count, float* __restrict__ held) {
  if constexpr (sizeof(X) == sizeof(float)) return x;
#pragma omp simd
  for (int64_t c = 0; c < count; ++c) held[c] = to_float(x[c]);
  return held;
}

// 2 to the x, of normal numbers, in a form that vectorises: 2^n * 2^f, the second by a polynomial (minimax on [-1/2, 1/2],
// relative error 2e-7). What is below 2^-126 gives that; a NaN stays one.
OMNI_INLINE float power_of_2(float x) {
  const float clamped = x < -126.f ? -126.f : (x > 126.f ? 126.f : x);
  const float whole = std::nearbyint(clamped);
  const float f = clamped - whole;
  float p = 1.535336188e-4f;
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332548e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.f;
  return p * from_bits(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
}

// With the tanh approximation: x * sigmoid(2u) is 0.5 * x * (1 + tanh u).
OMNI_INLINE float gelu_tanh(float x) {
  const float u = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.f + power_of_2(-2.885390082f * u));
}

OMNI_INLINE float silu(float x) { return x / (1.f + power_of_2(-1.442695041f * x)); }

}  // namespace omni
