// Rows in 8 bits on the CPU: one pass for the largest magnitude of a row, one for its codes.
#include "../common/quant.h"

#include <cmath>
#include <limits>

#include "../common/cpu.h"

namespace {

using omni::BFloat16;
using omni::QuantizeRows;
using omni::to_float;

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

// As integers magnitudes have the same order as numbers, with NaN above all: a row with a NaN has NaN for its peak.
template <class X>
OMNI_INLINE float peak_of(const X* __restrict__ x, int64_t channels) {
  uint32_t peak = 0;
#pragma omp simd reduction(max : peak)
  for (int64_t c = 0; c < channels; ++c) {
    const uint32_t magnitude = bits_of(to_float(x[c])) & 0x7fffffffu;
    peak = magnitude > peak ? magnitude : peak;
  }
  return from_bits(peak);
}

// Rounds to nearest, ties to even; what is no number becomes 0.
OMNI_INLINE int8_t int8_of(float value) {
  const float low = value < -127.f ? -127.f : value;
  const float clamped = low > 127.f ? 127.f : low;
  const float whole = std::nearbyint(clamped);
  return static_cast<int8_t>(static_cast<int32_t>(whole == whole ? whole : 0.f));
}

// All bits of `one` where it holds, else of `other`: a choice that is no branch, which would keep a loop from vectors.
OMNI_INLINE uint32_t pick(bool holds, uint32_t one, uint32_t other) {
  const uint32_t mask = 0u - static_cast<uint32_t>(holds);
  return (one & mask) | (other & ~mask);
}

// float8 e4m3 (https://arxiv.org/abs/2209.05433, table 1), to nearest, ties to even; magnitudes are at most 448.
OMNI_INLINE uint8_t float8_of(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 24) & 0x80u;
  const uint32_t whole = bits & 0x7fffffffu;
  const uint32_t magnitude = pick(whole > 0x43e00000u, 0x43e00000u, whole);
  // from 2^-6 on: 3 bits behind the point, and an exponent less by 120
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // below: multiples of 2^-9, which adding 2^14 rounds to in the last bits of a float32
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 16384.f) - bits_of(16384.f);
  const uint32_t code = pick(magnitude < 0x3c800000u, subnormal, normal);
  return static_cast<uint8_t>(sign | pick(whole > 0x7f800000u, 0x7fu, code));
}

template <class X, bool kInt8>
OMNI_INLINE void rows(const QuantizeRows& call, int64_t begin, int64_t end) {
  const int64_t channels = call.channels;
  for (int64_t token = begin; token < end; ++token) {
    const X* __restrict__ x = static_cast<const X*>(call.x) + token * call.x_stride;
    const float scale = peak_of(x, channels) / (kInt8 ? 127.f : 448.f);
    call.scales[token] = scale;
    const float tiny = std::numeric_limits<float>::min();
    const float divisor = scale < tiny ? tiny : scale;
    uint8_t* __restrict__ codes = static_cast<uint8_t*>(call.codes) + token * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float value = to_float(x[c]) / divisor;
      codes[c] = kInt8 ? static_cast<uint8_t>(int8_of(value)) : float8_of(value);
    }
  }
}

using Kernel = void (*)(const QuantizeRows&, int64_t, int64_t);

OMNI_CLONES void f32_float8(const QuantizeRows& call, int64_t begin, int64_t end) {
  rows<float, false>(call, begin, end);
}
OMNI_CLONES void bf16_float8(const QuantizeRows& call, int64_t begin, int64_t end) {
  rows<BFloat16, false>(call, begin, end);
}
OMNI_CLONES void f32_int8(const QuantizeRows& call, int64_t begin, int64_t end) {
  rows<float, true>(call, begin, end);
}
OMNI_CLONES void bf16_int8(const QuantizeRows& call, int64_t begin, int64_t end) {
  rows<BFloat16, true>(call, begin, end);
}

constexpr Kernel kKernels[2][2] = {{f32_float8, bf16_float8}, {f32_int8, bf16_int8}};

}  // namespace

void omni_quantize_rows_cpu(const QuantizeRows* call, int64_t begin, int64_t end) {
  kKernels[call->code == omni::Code::kInt8][static_cast<int>(call->x_dtype)](*call, begin, end);
}
