// What the CPU kernels share: bfloat16 as bits, and one function compiled for several vector widths.
#pragma once

#include <cstdint>
#include <cstring>

// The widest clone that the processor runs is chosen when the library loads, so one file serves every x86-64.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OMNI_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define OMNI_CLONES
#endif

// Templates cannot be cloned: a clone inlines them, and its instruction set with them.
#define OMNI_INLINE inline __attribute__((always_inline))

namespace omni {

struct BFloat16 {
  uint16_t bits;
};

OMNI_INLINE float to_float(float value) { return value; }

OMNI_INLINE float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

OMNI_INLINE void store(float* where, float value) { *where = value; }

// Rounds to nearest, ties to even, as torch does; a NaN stays one.
OMNI_INLINE void store(BFloat16* where, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  where->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

}  // namespace omni
