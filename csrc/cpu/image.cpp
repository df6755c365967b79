// The image family on the CPU: pieces of a few hundred pixels, which stay in cache between their colours.
#include "../common/image.h"

#include <algorithm>
#include <cmath>

#include "../common/cpu.h"

namespace {

using omni::BFloat16;
using omni::LatentsToBytes;
using omni::PixelsToBytes;
using omni::to_float;

constexpr int64_t kPiece = 512;

// Half to even. Comparisons with what is no number are false, which makes it 0.
OMNI_INLINE uint8_t byte_of(float unit) {
  const float clipped = unit > 0.f ? (unit < 1.f ? unit : 1.f) : 0.f;
  return static_cast<uint8_t>(static_cast<int32_t>(std::rint(clipped * 255.f)));
}

OMNI_INLINE float rounded_to(float value, const float*) { return value; }
OMNI_INLINE float rounded_to(float value, const BFloat16*) {
  BFloat16 rounded;
  omni::store(&rounded, value);
  return to_float(rounded);
}

OMNI_INLINE int32_t is_odd(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0x7f800000u) == 0x7f800000u;
}

template <class X>
OMNI_INLINE int64_t pixels_to_bytes(const PixelsToBytes& call, int64_t begin, int64_t end) {
  int64_t odd = 0;
  uint8_t colours[3][kPiece];
  for (int64_t at = begin; at < end;) {
    const int64_t picture = at / call.area, first = at % call.area;
    const int64_t count = std::min({kPiece, call.area - first, end - at});
    for (int colour = 0; colour < 3; ++colour) {
      const X* __restrict__ x =
          static_cast<const X*>(call.pixels) + picture * call.stride + colour * call.plane_stride + first;
      uint8_t* __restrict__ to = colours[colour];
      int32_t found = 0;
#pragma omp simd reduction(+ : found)
      for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(x[i]);
        found += is_odd(value);
        to[i] = byte_of(rounded_to(value * 0.5f + 0.5f, x));
      }
      odd += found;
    }
    uint8_t* __restrict__ out = call.out + at * 3;
    for (int64_t i = 0; i < count; ++i) {
      out[3 * i] = colours[0][i];
      out[3 * i + 1] = colours[1][i];
      out[3 * i + 2] = colours[2][i];
    }
    at += count;
  }
  return odd;
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
    uint8_t* __restrict__ out = call.out + at * 3;
    for (int64_t i = 0; i < count; ++i) {
      for (int colour = 0; colour < 3; ++colour) out[3 * i + colour] = byte_of(sums[colour][i] * 0.5f + 0.5f);
    }
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
