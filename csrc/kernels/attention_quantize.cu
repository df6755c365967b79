// Makes the operands of 8-bit attention: one block for each 128 tokens of a head of q, k or v.
#include <cuda_fp8.h>

#include "../common/attention_q.h"
#include "../common/device.cuh"
#include "packed_rows.cuh"

namespace {

using omni::AttentionQuantize;
using omni::kHeadSize;
using omni::kPack;
using omni::Tile;

constexpr int kTokens = omni::kTileKeys;
constexpr int kThreads = 256;
constexpr int kLanes = kHeadSize / kPack;      // threads that have a token
constexpr int kAtOnce = kThreads / kLanes;     // tokens
constexpr int kEach = kTokens / kAtOnce;       // tokens of a thread
constexpr int kLineWords = omni::kTileKeys / 4;

// NaN where either is.
__device__ __forceinline__ float most_of(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

__device__ __forceinline__ float scale_of(float amax, float largest) {
  return amax < omni::kLeastAmax ? 1.f : amax / largest;  // NaN stays NaN
}

__device__ __forceinline__ uint32_t int8_code(float value) {
  return static_cast<uint32_t>(max(-127, min(127, __float2int_rn(value)))) & 0xffu;
}

__device__ __forceinline__ void unpack(const uint4& raw, float (&value)[kPack]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[2 * i] = __uint_as_float(words[i] << 16);
    value[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Where the samples are that the centre of `keys` keys is the mean of: one in each of equal parts, and not at the same
// place in all of them, since a grid of pixels may have the same period.
__device__ __forceinline__ int sample(int number, int keys) {
  constexpr int64_t kParts = omni::kCentreSamples;
  const int64_t from = number * static_cast<int64_t>(keys) / kParts, to = (number + 1) * static_cast<int64_t>(keys) / kParts;
  return static_cast<int>(from + number * 37 % kParts * (to - from) / kParts);
}

struct Source {
  const __nv_bfloat16* first;  // channel of the row's first token, of this thread
  int64_t stride;

  __device__ __forceinline__ uint4 load(int token) const {
    return omni::Streamed::load(reinterpret_cast<const uint4*>(first + token * stride));
  }
};

__device__ __forceinline__ Source source_of(const AttentionQuantize& call, int which, int head, int begin) {
  const int64_t stride = call.token_stride[which];
  const auto* first = static_cast<const __nv_bfloat16*>(call.x[which]) + begin * stride +
                      head * call.head_stride[which] + threadIdx.x % kLanes * kPack;
  return {first, stride};
}

__device__ __forceinline__ float over_block(float amax, float* scratch) {
#pragma unroll
  for (int offset = omni::kWarp / 2; offset > 0; offset /= 2) {
    amax = most_of(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
  }
  if (threadIdx.x % omni::kWarp == 0) scratch[threadIdx.x / omni::kWarp] = amax;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / omni::kWarp; ++warp) amax = most_of(amax, scratch[warp]);
  return amax;
}

__device__ __forceinline__ uint2 int8_codes(const float (&value)[kPack], float inverse) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPack; ++i) words[i / 4] |= int8_code(value[i] * inverse) << (8 * (i % 4));
  return make_uint2(words[0], words[1]);
}

// Eight codes of a token to its line.
__device__ __forceinline__ void store_codes(int8_t* tile, int line, uint2 codes) {
  const int lane = threadIdx.x % kLanes;
  *reinterpret_cast<uint2*>(tile + line * kHeadSize + ((lane / 2) ^ (line % 8)) * 16 + lane % 2 * 8) = codes;
}

__device__ void code_queries(const AttentionQuantize& call, int head, int number) {
  constexpr int kSize = omni::kTileQueries;
  const int32_t* cu = call.rows.cu_q;
  const Tile tile = omni::find_tile(cu, static_cast<int>(call.rows.rows), kTokens, number);
  if (!tile.there()) return;
  const Source from = source_of(call, 0, head, cu[tile.row]);
  const int group = threadIdx.x / kLanes;
  uint4 raw[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int token = tile.first + group + kAtOnce * i;
    raw[i] = token < tile.length ? from.load(token) : make_uint4(0, 0, 0, 0);
  }
  const int64_t first = head * call.out.q_tiles + omni::first_tile(cu, tile.row, kSize);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float value[kPack];
    unpack(raw[i], value);
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < kPack; ++j) amax = most_of(amax, fabsf(value[j]));
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      amax = most_of(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
    }
    const int token = tile.first + group + kAtOnce * i;
    if (token / kSize * kSize >= tile.length) continue;  // that tile may be the next row's
    const float scale = scale_of(amax, 127.f);
    const int64_t at = first + token / kSize;
    store_codes(call.out.q + at * kSize * kHeadSize, token % kSize, int8_codes(value, 1.f / scale));
    if (threadIdx.x % kLanes == 0) call.out.q_scale[at * kSize + token % kSize] = scale;
  }
}

__device__ void code_keys(const AttentionQuantize& call, int head, int number) {
  __shared__ float part[kAtOnce][kHeadSize];
  __shared__ float centre[kHeadSize];
  __shared__ float scratch[kThreads / omni::kWarp];
  const int32_t* cu = call.rows.cu_k;
  const Tile tile = omni::find_tile(cu, static_cast<int>(call.rows.rows), kTokens, number);
  if (!tile.there()) return;
  const Source from = source_of(call, 1, head, cu[tile.row]);
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  constexpr int kMine = omni::kCentreSamples / kAtOnce;
  uint4 raw[kEach], sampled[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) sampled[i] = from.load(sample(group + kAtOnce * i, tile.length));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int token = tile.first + group + kAtOnce * i;
    raw[i] = token < tile.length ? from.load(token) : make_uint4(0, 0, 0, 0);
  }
  float value[kPack], mean[kPack] = {};
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    unpack(sampled[i], value);
#pragma unroll
    for (int j = 0; j < kPack; ++j) mean[j] += value[j];
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) part[group][lane * kPack + j] = mean[j];
  __syncthreads();
  if (threadIdx.x < kHeadSize) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += part[i][threadIdx.x];
    centre[threadIdx.x] = sum / omni::kCentreSamples;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kPack; ++j) mean[j] = centre[lane * kPack + j];
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    unpack(raw[i], value);
    const bool there = tile.first + group + kAtOnce * i < tile.length;
#pragma unroll
    for (int j = 0; j < kPack; ++j) amax = most_of(amax, there ? fabsf(value[j] - mean[j]) : 0.f);
  }
  const float scale = scale_of(over_block(amax, scratch), 127.f), inverse = 1.f / scale;
  const int64_t at = head * call.out.k_tiles + omni::first_tile(cu, tile.row, kTokens) + tile.number;
  int8_t* out = call.out.k + at * kTokens * kHeadSize;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    unpack(raw[i], value);
    const int line = group + kAtOnce * i;
    const bool there = tile.first + line < tile.length;
#pragma unroll
    for (int j = 0; j < kPack; ++j) value[j] = there ? value[j] - mean[j] : 0.f;
    store_codes(out, line, int8_codes(value, inverse));
  }
  if (threadIdx.x == 0) call.out.k_scale[at] = scale;
}

__device__ __forceinline__ uint32_t e4m3_codes(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Turned in shared memory: a thread has the four keys of a word, and puts the words of its channels 2 words further
// on for each pack, so that those of a warp lie in 32 banks.
__device__ void code_values(const AttentionQuantize& call, int head, int number) {
  __shared__ __align__(16) uint32_t turned[kHeadSize * kLineWords];
  __shared__ float scratch[kThreads / omni::kWarp];
  const int32_t* cu = call.rows.cu_k;
  const Tile tile = omni::find_tile(cu, static_cast<int>(call.rows.rows), kTokens, number);
  if (!tile.there()) return;
  const Source from = source_of(call, 2, head, cu[tile.row]);
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  uint4 raw[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int word = group + kAtOnce * (i / 4);
    const int token = tile.first + word / 4 * 16 + word % 4 * 2 + i % 4 / 2 * 8 + i % 2;
    raw[i] = token < tile.length ? from.load(token) : make_uint4(0, 0, 0, 0);
  }
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float value[kPack];
    unpack(raw[i], value);
#pragma unroll
    for (int j = 0; j < kPack; ++j) amax = fmaxf(amax, fabsf(value[j]));  // a NaN is a code, and its channel's alone
  }
  const float scale = scale_of(over_block(amax, scratch), 448.f), inverse = 1.f / scale;
#pragma unroll
  for (int half = 0; half < kEach / 4; ++half) {
    float value[4][kPack];
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack(raw[4 * half + i], value[i]);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      turned[(lane * kPack + j) * kLineWords + (group + kAtOnce * half + 2 * lane) % kLineWords] = e4m3_codes(
          value[0][j] * inverse, value[1][j] * inverse, value[2][j] * inverse, value[3][j] * inverse);
    }
  }
  __syncthreads();
  const int64_t at = head * call.out.k_tiles + omni::first_tile(cu, tile.row, kTokens) + tile.number;
  auto* out = reinterpret_cast<uint4*>(call.out.v + at * kTokens * kHeadSize);
  constexpr int kChunks = kLineWords / 4;
#pragma unroll
  for (int i = 0; i < kHeadSize * kChunks / kThreads; ++i) {
    const int to = threadIdx.x + kThreads * i, channel = to / kChunks;
    const int word = 4 * (to % kChunks ^ channel % 8) + channel / kPack * 2;
    const uint32_t* line = turned + channel * kLineWords;
    const uint2 low = *reinterpret_cast<const uint2*>(line + word % kLineWords);
    const uint2 high = *reinterpret_cast<const uint2*>(line + (word + 2) % kLineWords);
    out[to] = make_uint4(low.x, low.y, high.x, high.y);
  }
  if (threadIdx.x == 0) call.out.v_scale[at] = scale;
}

__global__ void __launch_bounds__(kThreads, 2) quantize(const __grid_constant__ AttentionQuantize call) {
  const int heads = static_cast<int>(call.rows.heads), kv_heads = static_cast<int>(call.rows.kv_heads);
  int head = blockIdx.x;
  if (head < heads) return code_queries(call, head, blockIdx.y);
  head -= heads;
  if (head < kv_heads) return code_keys(call, head, blockIdx.y);
  code_values(call, head - kv_heads, blockIdx.y);
}

}  // namespace

extern "C" const char* omni_attention_quantize_cuda(const AttentionQuantize* call, void* stream) {
  const auto& rows = call->rows;
  if (rows.rows == 0) return nullptr;
  const int64_t longer = rows.queries > rows.keys ? rows.queries : rows.keys;
  const int64_t tiles = longer / kTokens + rows.rows, heads = rows.heads + 2 * rows.kv_heads;
  if (tiles > 65535) return "more than 65535 tiles of 128 tokens";
  const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>(tiles));
  quantize<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*call);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
