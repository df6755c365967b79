// Makes the operands of 8-bit attention, of what projections wrote or of what has been normed and turned already: one
// block for each 128 tokens of some heads of q, k or v.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cassert>
#include <cmath>
#include <cstdint>

#include "../common/asked.cuh"
#include "../common/attention_q.h"
#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/rope.h"
#include "packed_rows.cuh"

namespace {

using omni::AttentionCode;
using omni::kHeadSize;
using omni::kPack;
using omni::kWarp;
using omni::QkNorm;
using omni::QkvStream;
using omni::Tile;

constexpr int kTokens = omni::kTileKeys;
constexpr int kThreads = 512;
constexpr int kLanes = kHeadSize / kPack;   // threads that have a token
constexpr int kAtOnce = kThreads / kLanes;  // tokens
constexpr int kEach = kTokens / kAtOnce;    // tokens of a thread
constexpr int kLineWords = omni::kTileKeys / 4;
constexpr int kHeadsTurned = 4, kHeadsPlain = 2;  // of a block, which brings the turns of its tokens once

// --- numbers ---------------------------------------------------------------------------------------------------------

// NaN where either is.
__device__ __forceinline__ float most_of(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

__device__ __forceinline__ float scale_of(float amax) {
  return amax < omni::kLeastAmax ? 1.f : amax / 127.f;  // NaN stays NaN
}

// A power of 2, so that codes of tiles with unlike scales can be added up.
__device__ __forceinline__ float value_scale_of(float amax) {
  const uint32_t bits = __float_as_uint(fmaxf(amax, omni::kLeastAmax) / 448.f);
  return __uint_as_float((bits + 0x7fffffu) >> 23 << 23);
}

__device__ __forceinline__ uint32_t int8_code(float value) {
  return static_cast<uint32_t>(max(-127, min(127, __float2int_rn(value)))) & 0xffu;
}

__device__ __forceinline__ uint2 int8_codes(const float (&value)[kPack], float inverse) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPack; ++i) words[i / 4] |= int8_code(value[i] * inverse) << (8 * (i % 4));
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ uint32_t e4m3_codes(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

__device__ __forceinline__ void unpack(const uint4& raw, float (&value)[kPack]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[2 * i] = __uint_as_float(words[i] << 16);
    value[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ float sum_over_head(float sum) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

__device__ __forceinline__ float most_over_head(float most) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    most = most_of(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
  return most;
}

// `scratch` may be used again two calls later.
__device__ __forceinline__ float most_over_block(float most, float* scratch) {
  most = most_over_head(most);
  most = most_of(most, __shfl_xor_sync(0xffffffffu, most, kLanes));
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) most = most_of(most, scratch[warp]);
  return most;
}

// --- tokens ----------------------------------------------------------------------------------------------------------

// A token of the result, as a stream has it.
struct Token {
  int stream;
  int64_t at;
};

__device__ __forceinline__ Token token_at(const AttentionCode& call, int64_t place) {
  const int64_t token = call.source == nullptr ? place : call.source[place];
  int s = 0;
  while (s + 1 < call.from.stream_count && token >= call.from.streams[s + 1].begin) ++s;
  return {s, token - call.from.streams[s].begin};
}

// Its first channel.
template <int kWhich>
__device__ __forceinline__ const __nv_bfloat16* channels_of(const AttentionCode& call, const Token& token) {
  const QkvStream& stream = call.from.streams[token.stream];
  const void* x = kWhich == 0 ? stream.q : kWhich == 1 ? stream.k : stream.v;
  const int64_t stride = kWhich == 0 ? stream.q_stride : kWhich == 1 ? stream.k_stride : stream.v_stride;
  return static_cast<const __nv_bfloat16*>(x) + token.at * stride;
}

// Where the tokens of a block's tile are, in shared memory: there are few registers.
struct Sources {
  const __nv_bfloat16* x[kTokens];  // null where there is no token
  int stream[kTokens];
  float factor[kTokens];  // of a norm across heads
};

template <int kWhich>
__device__ __forceinline__ void find_sources(const AttentionCode& call, const Tile& tile, int begin, Sources& sources) {
  if (threadIdx.x < kTokens) {
    const int at = tile.first + static_cast<int>(threadIdx.x);
    const Token token = at < tile.length ? token_at(call, begin + at) : Token{0, 0};
    sources.x[threadIdx.x] = at < tile.length ? channels_of<kWhich>(call, token) : nullptr;
    sources.stream[threadIdx.x] = token.stream;
    if (kWhich < 2 && call.factor != nullptr && at < tile.length) {
      sources.factor[threadIdx.x] = call.factor[kWhich * call.from.tokens + begin + at];
    }
  }
  __syncthreads();
}

// The thread's channels of a head.
__device__ __forceinline__ uint4 load_raw(const __nv_bfloat16* from, int head) {
  if (from == nullptr) return make_uint4(0, 0, 0, 0);
  return omni::Streamed::load(reinterpret_cast<const uint4*>(from + head * kHeadSize) + threadIdx.x % kLanes);
}

// Norms and turns the thread's channels. `across`: the factor of a norm across heads. `turns`: the cosines and sines of the token, from its first channel on.
template <QkNorm kNorm, int kWhich>
__device__ __forceinline__ void finish(const AttentionCode& call, float (&value)[kPack], int stream, int head,
                                       float across, const float* turns) {
  const int channel = threadIdx.x % kLanes * kPack;
  if constexpr (kNorm != QkNorm::kNone) {
    float factor = across;
    if constexpr (kNorm == QkNorm::kRms) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares += value[i] * value[i];
      factor = rsqrtf(sum_over_head(squares) / kHeadSize + call.from.eps);
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) value[i] *= factor;
    const void* weights = call.from.streams[stream].weight[kWhich];
    if (weights != nullptr) {
      const int at = (kNorm == QkNorm::kRmsAcross ? head * kHeadSize : 0) + channel;
      float weight[kPack];
      if (call.from.weight_dtype == omni::Dtype::kFloat32) {
        omni::load_pack<omni::Reused>(static_cast<const float*>(weights) + at, weight);
      } else {
        omni::load_pack<omni::Reused>(static_cast<const __nv_bfloat16*>(weights) + at, weight);
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) value[i] *= weight[i];
    }
  }
  if (channel < 2 * call.from.pairs) {
#pragma unroll
    for (int i = 0; i < kPack; i += 2) {
      const float cosine = turns[channel + i], sine = turns[channel + i + 1], first = value[i];
      value[i] = first * cosine - value[i + 1] * sine;
      value[i + 1] = value[i + 1] * cosine + first * sine;
    }
  }
}

// --- what goes before ------------------------------------------------------------------------------------------------

__global__ void invert_places(const __grid_constant__ AttentionCode call) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= call.from.tokens) return;
  int s = 0;
  while (s + 1 < call.from.stream_count && token >= call.from.streams[s + 1].begin) ++s;
  const QkvStream& stream = call.from.streams[s];
  const int32_t place = stream.place[token - stream.begin];
  assert(place >= 0 && place < call.from.tokens && "place holds a row that the result lacks");
  call.source[place] = static_cast<int32_t>(token);
}

// Of a norm across heads: one block for each token.
__global__ void find_factors(const __grid_constant__ AttentionCode call) {
  __shared__ float scratch[2][kThreads / kWarp];
  const int64_t place = blockIdx.x;
  const Token token = token_at(call, place);
  const QkvStream& stream = call.from.streams[token.stream];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int64_t stride = which == 0 ? stream.q_stride : stream.k_stride;
    const auto* x = static_cast<const __nv_bfloat16*>(which == 0 ? stream.q : stream.k) + token.at * stride;
    const int channels = static_cast<int>(which == 0 ? call.from.heads : call.from.kv_heads) * kHeadSize;
    float squares = 0.f;
    for (int c = threadIdx.x * kPack; c < channels; c += blockDim.x * kPack) {
      float value[kPack];
      unpack(omni::Streamed::load(reinterpret_cast<const uint4*>(x + c)), value);
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares += value[i] * value[i];
    }
    squares = omni::block_sum(squares, scratch[which]);
    if (threadIdx.x == 0) {
      call.factor[which * call.from.tokens + place] = rsqrtf(squares / static_cast<float>(channels) + call.from.eps);
    }
  }
}

// Where the samples are that the centre of `keys` keys is the mean of: one in each of equal parts, and not at the same
// place in all of them, since a grid of pixels may have the same period.
__device__ __forceinline__ int sample(int number, int keys) {
  constexpr int64_t kParts = omni::kCentreSamples;
  const int64_t from = number * static_cast<int64_t>(keys) / kParts;
  const int64_t to = (number + 1) * static_cast<int64_t>(keys) / kParts;
  return static_cast<int>(from + number * 37 % kParts * (to - from) / kParts);
}

// One block for each head of keys of each row.
template <QkNorm kNorm>
__global__ void __launch_bounds__(kThreads) find_centres(const __grid_constant__ AttentionCode call) {
  __shared__ float part[kAtOnce][kHeadSize];
  const int head = blockIdx.x, row = blockIdx.y;
  const int first = call.rows.cu_k[row], keys = call.rows.cu_k[row + 1] - first;
  if (keys == 0) return;
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float sum[kPack] = {};
#pragma unroll
  for (int i = 0; i < omni::kCentreSamples / kAtOnce; ++i) {
    const int64_t place = first + sample(group + kAtOnce * i, keys);
    const Token token = token_at(call, place);
    float value[kPack];
    unpack(load_raw(channels_of<1>(call, token), head), value);
    const float across = kNorm == QkNorm::kRmsAcross ? call.factor[call.from.tokens + place] : 1.f;
    finish<kNorm, 1>(call, value, token.stream, head, across, call.from.table + place * 2 * call.from.pairs);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] += value[j];
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) part[group][lane * kPack + j] = sum[j];
  __syncthreads();
  if (threadIdx.x >= kHeadSize) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) total += part[i][threadIdx.x];
  call.centre[(row * call.rows.kv_heads + head) * kHeadSize + threadIdx.x] = total / omni::kCentreSamples;
}

// --- codes -----------------------------------------------------------------------------------------------------------

// Eight codes of a token to its line.
__device__ __forceinline__ void store_codes(int8_t* tile, int line, uint2 codes) {
  const int lane = threadIdx.x % kLanes;
  *reinterpret_cast<uint2*>(tile + line * kHeadSize + ((lane / 2) ^ (line % 8)) * 16 + lane % 2 * 8) = codes;
}

__device__ __forceinline__ void store_queries(const AttentionCode& call, const Tile& tile, int head, int token,
                                              const float (&value)[kPack]) {
  constexpr int kSize = omni::kTileQueries;
  float amax = 0.f;
#pragma unroll
  for (int j = 0; j < kPack; ++j) amax = most_of(amax, fabsf(value[j]));
  amax = most_over_head(amax);
  if (token / kSize * kSize >= tile.length) return;  // that tile may be the next row's
  const float scale = scale_of(amax);
  const int64_t at = head * call.out.q_tiles + omni::first_tile(call.rows.cu_q, tile.row, kSize) + token / kSize;
  store_codes(call.out.q + at * kSize * kHeadSize, token % kSize, int8_codes(value, 1.f / scale));
  if (threadIdx.x % kLanes == 0) call.out.q_scale[at * kSize + token % kSize] = scale;
}

__device__ __forceinline__ void store_keys(const AttentionCode& call, const Tile& tile, int head, float* scratch,
                                           const float (&value)[kEach][kPack]) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) amax = most_of(amax, fabsf(value[i][j]));
  }
  const float scale = scale_of(most_over_block(amax, scratch)), inverse = 1.f / scale;
  const int64_t at = head * call.out.k_tiles + omni::first_tile(call.rows.cu_k, tile.row, kTokens) + tile.number;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int line = threadIdx.x / kLanes + kAtOnce * i;
    store_codes(call.out.k + at * kTokens * kHeadSize, line, int8_codes(value[i], inverse));
  }
  if (threadIdx.x == 0) call.out.k_scale[at] = scale;
}

__device__ __forceinline__ void take_centre(const AttentionCode& call, const Tile& tile, int head, int there,
                                            float (&value)[kEach][kPack]) {
  float centre[kPack];
  const int64_t at = (tile.row * call.rows.kv_heads + head) * kHeadSize + threadIdx.x % kLanes * kPack;
  omni::load_pack<omni::Reused>(call.centre + at, centre);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool mine = static_cast<int>(threadIdx.x) / kLanes + kAtOnce * i < there;
#pragma unroll
    for (int j = 0; j < kPack; ++j) value[i][j] = mine ? value[i][j] - centre[j] : 0.f;
  }
}

// Queries (0) or keys (1) of some heads.
template <QkNorm kNorm, int kWhich>
__device__ __forceinline__ void code_lines(const AttentionCode& call, const Tile& tile, int begin, int first, int last,
                                           Sources& sources, float* turns) {
  __shared__ float scratch[2][kThreads / kWarp];
  const int group = threadIdx.x / kLanes, width = 2 * static_cast<int>(call.from.pairs);
  const int there = min(kTokens, tile.length - tile.first);
  if (width > 0) {
    const auto* from = reinterpret_cast<const float4*>(call.from.table + (begin + tile.first) * int64_t{width});
    for (int i = threadIdx.x; i < there * width / 4; i += kThreads) reinterpret_cast<float4*>(turns)[i] = __ldg(from + i);
  }
  find_sources<kWhich>(call, tile, begin, sources);  // after which the turns are there too
#pragma unroll 1
  for (int head = first; head < last; ++head) {
    float value[kWhich == 1 ? kEach : kNorm == QkNorm::kRmsAcross ? 1 : 2][kPack];
    constexpr int kHeld = sizeof(value) / sizeof(value[0]);  // queries do not wait for one another
#pragma unroll 1
    for (int held = 0; held < kEach; held += kHeld) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) unpack(load_raw(sources.x[group + kAtOnce * (held + i)], head), value[i]);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int line = group + kAtOnce * (held + i), near = min(line, there - 1);
        // what is not there is zeros, and stays so whatever it is turned by
        finish<kNorm, kWhich>(call, value[i], sources.stream[line], head, sources.factor[near], turns + near * width);
        if constexpr (kWhich == 0) store_queries(call, tile, head, tile.first + line, value[i]);
      }
    }
    if constexpr (kWhich == 1) {
      take_centre(call, tile, head, there, value);
      store_keys(call, tile, head, scratch[head % 2], value);
    }
  }
}

// Values are turned over in shared memory: a thread has the four keys of a word, and puts the words of its channels 2
// words further on for each pack, so that those of a warp lie in 32 banks.
__device__ __forceinline__ void code_values(const AttentionCode& call, const Tile& tile, int begin, int first, int last,
                                            Sources& sources, uint32_t* turned) {
  __shared__ float scratch[2][kThreads / kWarp];
  const int word = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  find_sources<2>(call, tile, begin, sources);
#pragma unroll 1
  for (int head = first; head < last; ++head) {
    uint4 raw[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) raw[i] = load_raw(sources.x[word / 4 * 16 + word % 4 * 2 + i / 2 * 8 + i % 2], head);
    float value[kEach][kPack], amax = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      unpack(raw[i], value[i]);
#pragma unroll
      for (int j = 0; j < kPack; ++j) amax = fmaxf(amax, fabsf(value[i][j]));  // a NaN is its channel's alone
    }
    // whoever is here has read what `turned` had before
    const float scale = value_scale_of(most_over_block(amax, scratch[head % 2])), inverse = 1.f / scale;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      turned[(lane * kPack + j) * kLineWords + (word + 2 * lane) % kLineWords] = e4m3_codes(
          value[0][j] * inverse, value[1][j] * inverse, value[2][j] * inverse, value[3][j] * inverse);
    }
    __syncthreads();
    const int64_t at = head * call.out.k_tiles + omni::first_tile(call.rows.cu_k, tile.row, kTokens) + tile.number;
    auto* out = reinterpret_cast<uint4*>(call.out.v + at * kTokens * kHeadSize);
    constexpr int kChunks = kLineWords / 4;
#pragma unroll
    for (int i = 0; i < kHeadSize * kChunks / kThreads; ++i) {
      const int to = threadIdx.x + kThreads * i, channel = to / kChunks;
      const int at_word = 4 * (to % kChunks ^ channel % 8) + channel / kPack * 2;
      const uint32_t* line = turned + channel * kLineWords;
      const uint2 low = *reinterpret_cast<const uint2*>(line + at_word % kLineWords);
      const uint2 high = *reinterpret_cast<const uint2*>(line + (at_word + 2) % kLineWords);
      out[to] = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (threadIdx.x == 0) call.out.v_scale[at] = scale;
  }
}

// Blocks go through heads first: what they read of a token lies side by side.
template <QkNorm kNorm>
__global__ void __launch_bounds__(kThreads, 2) make_codes(const __grid_constant__ AttentionCode call, int heads_each) {
  extern __shared__ __align__(16) float room[];
  __shared__ Sources sources;
  const int heads = static_cast<int>(call.rows.heads), kv_heads = static_cast<int>(call.rows.kv_heads);
  const int of_q = (heads + heads_each - 1) / heads_each, of_k = (kv_heads + heads_each - 1) / heads_each;
  const int block = blockIdx.x, which = block < of_q ? 0 : block < of_q + of_k ? 1 : 2;
  const int first = (block - (which > 0 ? of_q : 0) - (which > 1 ? of_k : 0)) * heads_each;
  const int last = min(first + heads_each, which == 0 ? heads : kv_heads);
  const int32_t* cu = which == 0 ? call.rows.cu_q : call.rows.cu_k;
  const Tile tile = omni::find_tile(cu, static_cast<int>(call.rows.rows), kTokens, blockIdx.y);
  if (!tile.there()) return;
  const int begin = cu[tile.row];
  if (which == 0) {
    code_lines<kNorm, 0>(call, tile, begin, first, last, sources, room);
  } else if (which == 1) {
    code_lines<kNorm, 1>(call, tile, begin, first, last, sources, room);
  } else {
    code_values(call, tile, begin, first, last, sources, reinterpret_cast<uint32_t*>(room));
  }
}

template <QkNorm kNorm>
void launch(const AttentionCode& call, int64_t tiles, cudaStream_t stream) {
  const auto& rows = call.rows;
  const int64_t turns = kTokens * 2 * call.from.pairs * sizeof(float), words = kHeadSize * kLineWords * 4;
  const int bytes = static_cast<int>(turns > words ? turns : words);
  const int each = call.from.pairs > 0 ? kHeadsTurned : kHeadsPlain;
  const dim3 centres(static_cast<unsigned>(rows.kv_heads), static_cast<unsigned>(rows.rows));
  find_centres<kNorm><<<centres, kThreads, 0, stream>>>(call);
  const int64_t blocks = (rows.heads + each - 1) / each + 2 * ((rows.kv_heads + each - 1) / each);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles));
  omni::resident_blocks(reinterpret_cast<const void*>(make_codes<kNorm>), kThreads, bytes);  // allows it these bytes
  make_codes<kNorm><<<grid, kThreads, bytes, stream>>>(call, each);
}

}  // namespace

extern "C" const char* omni_attention_code_cuda(const AttentionCode* call, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const auto& rows = call->rows;
  const auto& from = call->from;
  if (rows.rows == 0) return nullptr;
  const int64_t tiles = (rows.queries > rows.keys ? rows.queries : rows.keys) / kTokens + rows.rows;
  if (tiles > 65535 || rows.rows > 65535) return "more than 65535 rows, or tiles of 128 tokens";
  if (from.half || from.pairs % 4 != 0) return "pairs are not neighbours, or not a multiple of 4";
  if (call->source != nullptr && from.tokens > 0) {
    invert_places<<<static_cast<unsigned>((from.tokens + 255) / 256), 256, 0, on>>>(*call);
  }
  if (from.norm == QkNorm::kRmsAcross) {
    if (from.tokens > 0) find_factors<<<static_cast<unsigned>(from.tokens), kThreads, 0, on>>>(*call);
    launch<QkNorm::kRmsAcross>(*call, tiles, on);
  } else if (from.norm == QkNorm::kRms) {
    launch<QkNorm::kRms>(*call, tiles, on);
  } else if (from.norm == QkNorm::kNone) {
    launch<QkNorm::kNone>(*call, tiles, on);
  } else {
    return "norm must be none, rms or rms_across";
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
