// What is in a block of a GGUF file, for both sides: scales, and eight neighbouring numbers at a time.
//
// Every product is rounded before anything is added to it, as ggml's Python package does it. On the CPU that is for the
// including file to ask of its compiler, see cpu/dequant.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "dequant.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define OMNI_BLOCK __host__ __device__ __forceinline__
#else
#define OMNI_BLOCK inline __attribute__((always_inline))
#endif

namespace omni {

// The float16 at a place that is a multiple of two bytes away from the block.
OMNI_BLOCK float half_at(const uint8_t* where) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(*reinterpret_cast<const unsigned short*>(where)));
#else
  uint16_t bits;
  std::memcpy(&bits, where, sizeof bits);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t rest = bits & 0x7fffu;
  float value;
  if (rest >= 0x7c00u) {  // infinite or no number
    const uint32_t wide = 0x7f800000u | ((rest & 0x3ffu) << 13);
    std::memcpy(&value, &wide, sizeof value);
  } else if (rest >= 0x400u) {
    const uint32_t wide = (rest << 13) + ((127u - 15u) << 23);
    std::memcpy(&value, &wide, sizeof value);
  } else {
    value = static_cast<float>(rest) * (1.f / 16777216.f);  // subnormal: units of 2^-24
  }
  return sign != 0 ? -value : value;
#endif
}

// Scale and minimum of one of the eight parts of a block: 6 bits each, of the last four in two places.
struct Part {
  float scale, minimum;
};

OMNI_BLOCK Part part_of(const uint8_t* block, int part) {
  const uint8_t* scales = block + 4;
  const int at = part & 3, rest = scales[8 + at];
  const int low = scales[at], high = scales[4 + at];
  const int scale = part < 4 ? low & 63 : (rest & 15) | ((low >> 2) & 48);
  const int minimum = part < 4 ? high & 63 : (rest >> 4) | ((high >> 2) & 48);
  return {half_at(block) * static_cast<float>(scale), half_at(block + 2) * static_cast<float>(minimum)};
}

constexpr int kRun = 8;  // numbers that run_of gives

// Eight bytes, two at a time: blocks are an even number of bytes long.
OMNI_BLOCK void bytes_at(const uint8_t* where, int (&byte)[kRun]) {
  for (int i = 0; i < kRun; i += 2) {
    uint16_t pair;
#ifdef __CUDA_ARCH__
    pair = *reinterpret_cast<const uint16_t*>(where + i);
#else
    std::memcpy(&pair, where + i, sizeof pair);
#endif
    byte[i] = pair & 255;
    byte[i + 1] = pair >> 8;
  }
}

OMNI_BLOCK float less(float scale, int code, float minimum) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(scale, static_cast<float>(code)) - minimum;
#else
  return scale * static_cast<float>(code) - minimum;
#endif
}

// The numbers [8 run, 8 run + 8) of a block.
template <Packing kPacking>
OMNI_BLOCK void run_of(const uint8_t* block, int run, float (&out)[kRun]) {
  int byte[kRun];
  if constexpr (kPacking == Packing::kQ4_0) {
    bytes_at(block + 2 + kRun * (run & 1), byte);
    const float d = half_at(block);
    for (int i = 0; i < kRun; ++i) out[i] = d * static_cast<float>(((byte[i] >> (run & 2 ? 4 : 0)) & 15) - 8);
  } else if constexpr (kPacking == Packing::kQ8_0) {
    bytes_at(block + 2 + kRun * run, byte);
    const float d = half_at(block);
    for (int i = 0; i < kRun; ++i) out[i] = static_cast<float>(static_cast<int8_t>(byte[i])) * d;
  } else if constexpr (kPacking == Packing::kQ4_K || kPacking == Packing::kQ5_K) {
    constexpr bool kFive = kPacking == Packing::kQ5_K;
    const int number = run / 4, i_of_part = kRun * (run & 3);  // four runs are a part
    const Part part = part_of(block, number);
    int high[kRun] = {};
    if constexpr (kFive) bytes_at(block + 16 + i_of_part, high);
    bytes_at(block + (kFive ? 48 : 16) + 32 * (number / 2) + i_of_part, byte);
    for (int i = 0; i < kRun; ++i) {
      const int low = (byte[i] >> (4 * (number & 1))) & 15;
      out[i] = less(part.scale, low | (((high[i] >> number) & 1) << 4), part.minimum);
    }
  } else {
    const int half = run / 16, number = run / 4 & 3, i_of_part = kRun * (run & 3);
    int high[kRun];
    bytes_at(block + 64 * half + 32 * (number & 1) + i_of_part, byte);
    bytes_at(block + 128 + 32 * half + i_of_part, high);
    const uint8_t scale = block[192 + 8 * half + 2 * number + i_of_part / 16];
    const float d = half_at(block + 208) * static_cast<float>(static_cast<int8_t>(scale));
    for (int i = 0; i < kRun; ++i) {
      const int low = (byte[i] >> (4 * (number / 2))) & 15;
      out[i] = d * static_cast<float>((low | (((high[i] >> (2 * number)) & 3) << 4)) - 32);
    }
  }
}

}  // namespace omni
