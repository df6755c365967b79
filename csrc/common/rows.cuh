// What kernels share that hold a row of channels in the registers of one block, or of one warp: how a row is spread over
// threads, its load ahead of time, the largest magnitude in it, and its 8-bit codes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "asked.cuh"
#include "device.cuh"
#include "dtype.h"

namespace omni {

constexpr int kRowThreads = 512;  // at most, which leaves each 128 registers
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kRowsPerBlock = 4;  // where one warp holds a row

// Packs of a row in one thread at most: 64 bytes. Rows of up to 16384 channels fit in bfloat16, of 8192 in float32.
template <class X>
constexpr int kRowPacks = 8 / sizeof(X);

// Packs of a row in one thread where as many warps as that takes fit a block: what `python benchmarks/tune_rows.py`
// compares.
#ifndef OMNI_ROW_PACKS
#define OMNI_ROW_PACKS 4
#endif
template <class X>
constexpr int kWantedPacks = OMNI_ROW_PACKS < kRowPacks<X> ? OMNI_ROW_PACKS : kRowPacks<X>;

__device__ __forceinline__ void unpack_bfloat16(const uint4& raw, float (&value)[kPack]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    value[2 * w] = __uint_as_float(words[w] << 16);
    value[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
  }
}

// Stores eight elements and leaves in `value` what was stored, rounded: what a later kernel would read.
__device__ __forceinline__ void store_rounded(float* where, float (&value)[kPack]) { store_pack(where, value); }
__device__ __forceinline__ void store_rounded(__nv_bfloat16* where, float (&value)[kPack]) {
  const uint4 raw = bfloat16_pack(value);
  *reinterpret_cast<uint4*>(where) = raw;
  unpack_bfloat16(raw, value);
}

// Rows pass through once: whatever else is in the caches is worth more.
struct Once {
  static __device__ __forceinline__ uint4 load(const uint4* where) { return __ldcs(where); }
};

// One thread's packs of a row as they lie in memory: loaded early, converted late, so that loads in flight take half
// the registers. Thread t of n holds the packs t, t + n, ...; what is beyond the row reads as zeros.
template <class X, int kPacks>
struct RawRow {
  static constexpr int kParts = sizeof(X) * kPack / sizeof(uint4);
  uint4 part[kPacks][kParts];

  template <class Path = Once>
  __device__ __forceinline__ void load(const void* base, int64_t row, int64_t stride, int packs) {
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const X*>(base) + row * stride);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = i * blockDim.x + threadIdx.x;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        part[i][p] = pack < packs ? Path::load(from + pack * kParts + p) : make_uint4(0u, 0u, 0u, 0u);
      }
    }
  }

  // The one pack of a thread that is given its place.
  __device__ __forceinline__ void load_pack(const X* where) {
    static_assert(kPacks == 1, "a place is that of one pack");
#pragma unroll
    for (int p = 0; p < kParts; ++p) part[0][p] = __ldcs(reinterpret_cast<const uint4*>(where) + p);
  }

  __device__ __forceinline__ void store_pack(int i, X* where) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) reinterpret_cast<uint4*>(where)[p] = part[i][p];
  }

  __device__ __forceinline__ void unpack(int i, float (&value)[kPack]) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if constexpr (sizeof(X) == 4) {
        value[4 * p + 0] = __uint_as_float(part[i][p].x);
        value[4 * p + 1] = __uint_as_float(part[i][p].y);
        value[4 * p + 2] = __uint_as_float(part[i][p].z);
        value[4 * p + 3] = __uint_as_float(part[i][p].w);
      } else {
        unpack_bfloat16(part[i][p], value);
      }
    }
  }
};

// --- 8-bit codes -----------------------------------------------------------------------------------------------------

// The larger of two magnitudes, and NaN where one is NaN.
__device__ __forceinline__ float larger(float peak, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(peak), "f"(fabsf(value)));
  return most;
#else
  return peak >= fabsf(value) || peak != peak ? peak : fabsf(value);
#endif
}

// The bits of the largest magnitude of a warp. Bits order as the numbers do, with NaN above infinity.
__device__ __forceinline__ uint32_t warp_max(float peak) {
  uint32_t value = __float_as_uint(peak) & 0x7fffffffu;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  value = __reduce_max_sync(0xffffffffu, value);
#else
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
#endif
  return value;
}

// The same of a row, which is one warp or a block of whole warps; scratch as block_sum has it.
__device__ __forceinline__ uint32_t row_max(float peak, uint32_t* scratch) {
  const uint32_t value = warp_max(peak);
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  uint32_t most = 0u;
  for (int warp = 0; warp < warps; ++warp) most = max(most, scratch[warp]);
  return most;
}

// How a row becomes codes: value = code * scale, where the largest magnitude has the largest code. To one unit in the
// last place: no division.
struct RowScale {
  float scale;    // NaN or infinity where the row has one: every value then reads as NaN
  float inverse;  // finite for every finite row, also for one of zeros
  bool finite;

  __device__ __forceinline__ RowScale(uint32_t peak, Code code) {
    constexpr float kTiny = 1.17549435e-38f;
    scale = __uint_as_float(peak) * (code == Code::kInt8 ? 1.f / 127.f : 1.f / 448.f);
    const float most = scale < kTiny ? kTiny : scale;  // written so that a NaN stays one
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(most));
    finite = peak < 0x7f800000u;
  }
};

__device__ __forceinline__ uint32_t float8_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// Adding 1.5 * 2^23 rounds to an integer, ties to even, whose low bits are the last ones of the sum.
__device__ __forceinline__ uint32_t int8_bits(float value, float inverse) {
  return __float_as_uint(fmaf(value, inverse, 12582912.f));
}

__device__ __forceinline__ void store_code(void* out, int64_t at, float value, const RowScale& row, Code code) {
  const uint32_t bits = code == Code::kFloat8 ? float8_pair(value * row.inverse, 0.f)
                                              : (row.finite ? int8_bits(value, row.inverse) : 0u);
  static_cast<uint8_t*>(out)[at] = static_cast<uint8_t>(bits);
}

__device__ __forceinline__ uint32_t float8_word(const float* value, float inverse) {
  return float8_pair(value[0] * inverse, value[1] * inverse) |
         float8_pair(value[2] * inverse, value[3] * inverse) << 16;
}

__device__ __forceinline__ uint32_t int8_word(const float* value, float inverse) {
  const uint32_t low = __byte_perm(int8_bits(value[0], inverse), int8_bits(value[1], inverse), 0x0040);
  const uint32_t high = __byte_perm(int8_bits(value[2], inverse), int8_bits(value[3], inverse), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// Eight codes as one store of 8 bytes. A row that is not finite has int8 codes of zero.
template <bool kInt8>
__device__ __forceinline__ void store_codes(void* out, int64_t at, const float (&value)[kPack], const RowScale& row) {
  uint2 words = kInt8 ? make_uint2(int8_word(value, row.inverse), int8_word(value + 4, row.inverse))
                      : make_uint2(float8_word(value, row.inverse), float8_word(value + 4, row.inverse));
  if (kInt8 && !row.finite) words = make_uint2(0u, 0u);
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(out) + at) = words;
}

__device__ __forceinline__ void store_codes(void* out, int64_t at, const float (&value)[kPack], const RowScale& row,
                                            Code code) {
  if (code == Code::kInt8) {
    store_codes<true>(out, at, value, row);
  } else {
    store_codes<false>(out, at, value, row);
  }
}

// The codes of a row that whole warps hold exactly, from a thread's first pack on.
template <int kPacks, int kThreads>
__device__ __forceinline__ void store_row_codes(uint8_t* first, const float (&value)[kPacks][kPack],
                                                const RowScale& row, Code code) {
  if (code == Code::kInt8) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) store_codes<true>(first, i * kThreads * kPack, value[i], row);
  } else {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) store_codes<false>(first, i * kThreads * kPack, value[i], row);
  }
}

// The codes of a row, of which a thread has the packs threadIdx.x, threadIdx.x + blockDim.x, ...
template <int kPacks>
__device__ __forceinline__ void store_row_codes(void* out, int64_t row_at, const float (&value)[kPacks][kPack],
                                                int packs, const RowScale& row, Code code) {
  const auto store = [&](auto int8) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = i * blockDim.x + threadIdx.x;
      if (pack >= packs) break;
      store_codes<decltype(int8)::value>(out, row_at + pack * kPack, value[i], row);
    }
  };
  if (code == Code::kInt8) {
    store(std::true_type{});
  } else {
    store(std::false_type{});
  }
}

// --- launching -------------------------------------------------------------------------------------------------------

struct RowLayout {
  int warps;  // of a row; 0 where registers do not hold one
  int packs;  // of a thread
};

// As few warps as hold the row, for cheap barriers, or more of them, up to twice, where fewer threads then idle.
inline RowLayout row_layout(int64_t packs, int most_packs, int most_warps) {
  const auto divide_up = [](int64_t value, int64_t by) { return (value + by - 1) / by; };
  const int64_t fewest = divide_up(packs, static_cast<int64_t>(kWarp) * most_packs);
  if (packs == 0 || fewest > most_warps) return {0, 0};
  RowLayout best{0, 0};
  int64_t least = INT64_MAX;
  for (int64_t warps = fewest; warps <= 2 * fewest && warps <= most_warps; ++warps) {
    const int64_t each = divide_up(packs, warps * kWarp), idle = each * warps * kWarp - packs;
    if (idle < least) {
      least = idle;
      best = {static_cast<int>(warps), static_cast<int>(each)};
    }
  }
  return best;
}

template <class X>
RowLayout row_layout(int64_t packs, int most_warps) {
  RowLayout layout{0, 0};
  for (int most = kWantedPacks<X>; layout.warps == 0 && most <= kRowPacks<X>; ++most) {
    layout = row_layout(packs, most, most_warps);
  }
  return layout;
}

// Threads x of a row and y rows of a block; kernels go through the rows in steps of gridDim.x * blockDim.y.
inline dim3 row_block(const RowLayout& layout) {
  return dim3(static_cast<unsigned>(layout.warps * kWarp), layout.warps == 1 ? kRowsPerBlock : 1);
}

// The block of a kernel that takes any width and any alignment, one row at a time.
inline dim3 scalar_block(int64_t channels) {
  const int64_t warps = channels == 0 ? 1 : (channels + kWarp - 1) / kWarp;
  return dim3(static_cast<unsigned>((warps < kRowWarps / 2 ? warps : kRowWarps / 2) * kWarp));
}

// Launches as many blocks as the device runs at once, or fewer where there are fewer rows: a block loads its next row
// while it reduces the one before.
template <class Call>
const char* launch_rows(void (*kernel)(Call), const Call& call, dim3 block, cudaStream_t stream) {
  const int resident = resident_blocks(reinterpret_cast<const void*>(kernel), block.x * block.y, 0);
  if (resident == 0) return no_block();
  const int64_t needed = (call.tokens + block.y - 1) / block.y;
  const int64_t most = static_cast<int64_t>(current_device().processors) * resident;
  kernel<<<static_cast<unsigned>(needed < most ? needed : most), block, 0, stream>>>(call);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace omni
