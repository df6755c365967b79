// A row in 8 bits with its scale, for the CPU kernels that write codes.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu.h"
#include "dtype.h"

namespace omni {

// As integers magnitudes have the same order as numbers, with NaN above all: a row with a NaN has NaN for its peak.
OMNI_INLINE float peak_of(const float* __restrict__ x, int64_t channels) {
  uint32_t peak = 0;
#pragma omp simd reduction(max : peak)
  for (int64_t c = 0; c < channels; ++c) {
    const uint32_t magnitude = bits_of(x[c]) & 0x7fffffffu;
    peak = magnitude > peak ? magnitude : peak;
  }
  return from_bits(peak);
}

// Rounds to nearest, ties to even; what is no number becomes 0.
OMNI_INLINE int32_t int8_of(float value) {
  const float low = value < -127.f ? -127.f : value;
  const float clamped = low > 127.f ? 127.f : low;
  const float whole = std::nearbyint(clamped);
  return static_cast<int32_t>(whole == whole ? whole : 0.f);
}

// All bits of `one` where it holds, else of `other`: a choice that is no branch, which would keep a loop from vectors.
OMNI_INLINE uint32_t pick(bool holds, uint32_t one, uint32_t other) {
  const uint32_t mask = 0u - static_cast<uint32_t>(holds);
  return (one & mask) | (other & ~mask);
}

// float8 e4m3 (https://arxiv.org/abs/2209.05433, table 1), to nearest, ties to even; magnitudes are at most 448.
OMNI_INLINE uint32_t float8_of(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 24) & 0x80u;
  const uint32_t whole = bits & 0x7fffffffu;
  const uint32_t magnitude = pick(whole > 0x43e00000u, 0x43e00000u, whole);
  // from 2^-6 on: 3 bits behind the point, and an exponent less by 120
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // below: multiples of 2^-9, which adding 2^14 rounds to in the last bits of a float32
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 16384.f) - bits_of(16384.f);
  const uint32_t code = pick(magnitude < 0x3c800000u, subnormal, normal);
  return sign | pick(whole > 0x7f800000u, 0x7fu, code);
}

template <Code kCode>
OMNI_INLINE void code_row(const float* __restrict__ x, int64_t channels, uint8_t* __restrict__ codes, float* scale) {
  constexpr bool kInt8 = kCode == Code::kInt8;
  constexpr int64_t kBlock = 128;
  *scale = peak_of(x, channels) / (kInt8 ? 127.f : 448.f);
  const float tiny = std::numeric_limits<float>::min();
  const float divisor = *scale < tiny ? tiny : *scale;
  for (int64_t first = 0; first < channels; first += kBlock) {
    const int64_t count = channels - first < kBlock ? channels - first : kBlock;
    // as wide as the values first: a loop of one width becomes vectors of the widest kind
    uint32_t made[kBlock];
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) {
      const float value = x[first + c] / divisor;
      made[c] = kInt8 ? static_cast<uint32_t>(int8_of(value)) : float8_of(value);
    }
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) codes[first + c] = static_cast<uint8_t>(made[c]);
  }
}

}  // namespace omni
