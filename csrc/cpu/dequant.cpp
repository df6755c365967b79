// The dequant family on the CPU: one block after the other.
//
// Every product is rounded before anything is added to it, as ggml's Python package does it: results are its own to the
// last bit, so the compiler must not fuse the two.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "../common/dequant_blocks.h"

#include <cstdint>

#include "../common/cpu.h"
#include "../common/dequant.h"
#include "../common/dtype.h"

namespace {

using omni::BFloat16;
using omni::Dequantize;
using omni::half_at;
using omni::Packing;
using omni::Part;
using omni::part_of;
using omni::store;

OMNI_INLINE void q4_0(const uint8_t* __restrict__ block, float* __restrict__ out) {
  const float d = half_at(block);
#pragma omp simd
  for (int i = 0; i < 16; ++i) {
    const int code = block[2 + i];
    out[i] = d * static_cast<float>((code & 15) - 8);
    out[16 + i] = d * static_cast<float>((code >> 4) - 8);
  }
}

OMNI_INLINE void q8_0(const uint8_t* __restrict__ block, float* __restrict__ out) {
  const float d = half_at(block);
#pragma omp simd
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * d;
}

OMNI_INLINE void q4_k(const uint8_t* __restrict__ block, float* __restrict__ out) {
  for (int group = 0; group < 4; ++group, out += 64) {
    const uint8_t* codes = block + 16 + 32 * group;
    const Part a = part_of(block, 2 * group), b = part_of(block, 2 * group + 1);
#pragma omp simd
    for (int i = 0; i < 32; ++i) {
      out[i] = a.scale * static_cast<float>(codes[i] & 15) - a.minimum;
      out[32 + i] = b.scale * static_cast<float>(codes[i] >> 4) - b.minimum;
    }
  }
}

OMNI_INLINE void q5_k(const uint8_t* __restrict__ block, float* __restrict__ out) {
  const uint8_t* high = block + 16;
  for (int group = 0; group < 4; ++group, out += 64) {
    const uint8_t* codes = block + 48 + 32 * group;
    const Part a = part_of(block, 2 * group), b = part_of(block, 2 * group + 1);
#pragma omp simd
    for (int i = 0; i < 32; ++i) {
      const int bits = high[i] >> (2 * group);
      out[i] = a.scale * static_cast<float>((codes[i] & 15) | ((bits & 1) << 4)) - a.minimum;
      out[32 + i] = b.scale * static_cast<float>((codes[i] >> 4) | ((bits & 2) << 3)) - b.minimum;
    }
  }
}

OMNI_INLINE void q6_k(const uint8_t* __restrict__ block, float* __restrict__ out) {
  const float d = half_at(block + 208);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + 64 * half;
    const uint8_t* high = block + 128 + 32 * half;
    for (int part = 0; part < 4; ++part, out += 32) {
      const uint8_t* codes = low + 32 * (part & 1);
      const uint8_t* scales = block + 192 + 8 * half + 2 * part;
      const int shift = 4 * (part >> 1);
      for (int side = 0; side < 2; ++side) {
        const float scale = d * static_cast<float>(static_cast<int8_t>(scales[side]));
#pragma omp simd
        for (int i = 16 * side; i < 16 * side + 16; ++i) {
          const int code = ((codes[i] >> shift) & 15) | (((high[i] >> (2 * part)) & 3) << 4);
          out[i] = scale * static_cast<float>(code - 32);
        }
      }
    }
  }
}

// Numbers that are rounded are written as float32 first, as many blocks as have 256: two simple loops are faster than one
// that packs, and in short ones the second would wait for what the first has just written.
template <class Out, void unpack(const uint8_t*, float*)>
OMNI_INLINE void all(const Dequantize& call, int64_t begin, int64_t end) {
  constexpr int64_t kHeld = 256;
  const omni::Block block = omni::block_of(call.packing);
  const uint8_t* packed = call.packed + begin * block.size;
  Out* out = static_cast<Out*>(call.out) + begin * block.elements;
  if constexpr (sizeof(Out) == sizeof(float)) {
    for (int64_t n = begin; n < end; ++n, packed += block.size, out += block.elements) unpack(packed, out);
  } else {
    float numbers[kHeld];
    while (begin < end) {
      int64_t count = 0;
      for (; count < kHeld && begin < end; ++begin, packed += block.size, count += block.elements) {
        unpack(packed, numbers + count);
      }
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) store(out + i, numbers[i]);
      out += count;
    }
  }
}

template <class Out>
OMNI_INLINE void dequantize(const Dequantize& call, int64_t begin, int64_t end) {
  switch (call.packing) {
    case Packing::kQ4_0: return all<Out, q4_0>(call, begin, end);
    case Packing::kQ8_0: return all<Out, q8_0>(call, begin, end);
    case Packing::kQ4_K: return all<Out, q4_k>(call, begin, end);
    case Packing::kQ5_K: return all<Out, q5_k>(call, begin, end);
    case Packing::kQ6_K: return all<Out, q6_k>(call, begin, end);
  }
}

OMNI_CLONES void dequantize_f32(const Dequantize& call, int64_t begin, int64_t end) {
  dequantize<float>(call, begin, end);
}
OMNI_CLONES void dequantize_bf16(const Dequantize& call, int64_t begin, int64_t end) {
  dequantize<BFloat16>(call, begin, end);
}

}  // namespace

void omni_dequantize_cpu(const Dequantize* call, int64_t begin, int64_t end) {
  (call->out_dtype == omni::Dtype::kFloat32 ? dequantize_f32 : dequantize_bf16)(*call, begin, end);
}
