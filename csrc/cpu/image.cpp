// The image family on the CPU: pieces of a few hundred pixels, which stay in cache between their colours.
#include "../common/image.h"

#include <algorithm>
#include <cstdint>

#include "../common/cpu.h"
#include "../common/dtype.h"

namespace {

using omni::BFloat16;
using omni::LatentsToBytes;
using omni::PixelsToBytes;
using omni::to_float;

constexpr int64_t kPiece = 512;

// 0..255, not rounded yet. Comparisons with what is no number are false, which makes it 0.
OMNI_INLINE float scaled(float unit) {
  const float positive = unit > 0.f ? unit : 0.f;
  return (positive < 1.f ? positive : 1.f) * 255.f;
}

// Half to even: the sum has no bits left for a fraction, and its low ones are the integer. `scaled` has to come from
// memory, or the compiler makes one multiply-add of its product and this sum, which rounds otherwise.
OMNI_INLINE uint8_t byte_of(float scaled) {
  return static_cast<uint8_t>(omni::bits_of(scaled + 8388608.f));
}

OMNI_INLINE float rounded_to(float value, const float*) { return value; }
// Without the care for what is no number that omni::store takes, since `scaled` makes 0 of whatever comes of it here.
OMNI_INLINE float rounded_to(float value, const BFloat16*) {
  const uint32_t bits = omni::bits_of(value);
  return omni::from_bits((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

OMNI_INLINE void interleave(const float (&colours)[3][kPiece], int64_t count, uint8_t* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) {
    out[3 * i] = byte_of(colours[0][i]);
    out[3 * i + 1] = byte_of(colours[1][i]);
    out[3 * i + 2] = byte_of(colours[2][i]);
  }
}

template <class X>
OMNI_INLINE int64_t pixels_to_bytes(const PixelsToBytes& call, int64_t begin, int64_t end) {
  int64_t nonfinite = 0;
  float colours[3][kPiece];
  for (int64_t at = begin; at < end;) {
    const int64_t picture = at / call.area, first = at % call.area;
    const int64_t count = std::min({kPiece, call.area - first, end - at});
    for (int colour = 0; colour < 3; ++colour) {
      const X* __restrict__ x =
          static_cast<const X*>(call.pixels) + picture * call.stride + colour * call.plane_stride + first;
      float* __restrict__ to = colours[colour];
      int32_t found = 0;
#pragma omp simd reduction(+ : found)
      for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(x[i]);
        found += omni::is_nonfinite(value);
        to[i] = rounded_to(value * 0.5f + 0.5f, x);
      }
      nonfinite += found;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] = scaled(to[i]);
    }
    interleave(colours, count, call.out + at * 3);
    at += count;
  }
  return nonfinite;
}

template <class X>
OMNI_INLINE void latents_to_bytes(const LatentsToBytes& call, int64_t begin, int64_t end) {
  float sums[3][kPiece];
  for (int64_t at = begin; at < end; at += kPiece) {
    const int64_t count = std::min(kPiece, end - at);
    for (int colour = 0; colour < 3; ++colour) std::fill(sums[colour], sums[colour] + count, call.bias[colour]);
    for (int64_t channel = 0; channel < call.channels; ++channel) {
      const X* __restrict__ x = static_cast<const X*>(call.latents) + channel * call.plane_stride + at;
      const float* factors = call.factors[channel];
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(x[i]);
        sums[0][i] += value * factors[0];
        sums[1][i] += value * factors[1];
        sums[2][i] += value * factors[2];
      }
    }
    for (auto& colour : sums) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) colour[i] = scaled(colour[i] * 0.5f + 0.5f);
    }
    interleave(sums, count, call.out + at * 3);
  }
}

OMNI_CLONES int64_t pixels_f32(const PixelsToBytes& call, int64_t begin, int64_t end) {
  return pixels_to_bytes<float>(call, begin, end);
}
OMNI_CLONES int64_t pixels_bf16(const PixelsToBytes& call, int64_t begin, int64_t end) {
  return pixels_to_bytes<BFloat16>(call, begin, end);
}
OMNI_CLONES void latents_f32(const LatentsToBytes& call, int64_t begin, int64_t end) {
  latents_to_bytes<float>(call, begin, end);
}
OMNI_CLONES void latents_bf16(const LatentsToBytes& call, int64_t begin, int64_t end) {
  latents_to_bytes<BFloat16>(call, begin, end);
}

}  // namespace

int64_t omni_pixels_to_bytes_cpu(const PixelsToBytes* call, int64_t begin, int64_t end) {
  return (call->dtype == omni::Dtype::kFloat32 ? pixels_f32 : pixels_bf16)(*call, begin, end);
}

void omni_latents_to_bytes_cpu(const LatentsToBytes* call, int64_t begin, int64_t end) {
  (call->dtype == omni::Dtype::kFloat32 ? latents_f32 : latents_bf16)(*call, begin, end);
}
