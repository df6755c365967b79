// The rope family on CUDA, before codes with a scale for each row: the largest magnitudes that the scales come from.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/rope.cuh"
#include "../common/rope.h"

namespace {

using omni::kPack;
using omni::kWarp;
using omni::QkNorm;
using omni::QkNormRope;
using omni::QkvStream;

constexpr int kPeakTokens = 16, kFewPeakTokens = 8;  // of a block, and of one of few
constexpr int64_t kFewBlocks = 1024;
constexpr int kPeakThreads = 512;
constexpr int kMostKvHeads = 1024;

// What a norm bounds: the root mean square of what leaves it is at most 1 but for its weights, so no channel is larger
// than sqrt(channels) times the largest weight, and a turn does not change a head's length. One block for q, one for k.
__device__ void bound_peaks(const QkNormRope& call, int which, uint32_t* peaks) {
  const int kv_heads = static_cast<int>(call.kv_heads), size = static_cast<int>(call.head_size);
  const int heads = which == 0 ? static_cast<int>(call.heads) : kv_heads;
  const bool across = call.norm == QkNorm::kRmsAcross;
  const int all = across ? heads * size : size, grouped = across ? heads / kv_heads * size : size;
  for (int h = threadIdx.x; h < kv_heads; h += blockDim.x) peaks[h] = 0u;
  __syncthreads();
  for (int s = 0; s < call.stream_count; ++s) {
    const void* weight = call.streams[s].weight[which];
    if (call.streams[s].tokens == 0) continue;
    for (int c = threadIdx.x; c < all; c += blockDim.x) {
      const float size_of = weight == nullptr ? 1.f : fabsf(omni::affine_at(weight, call.weight_dtype, c));
      atomicMax(peaks + c / grouped, __float_as_uint(size_of) & 0x7fffffffu);
    }
  }
  __syncthreads();
  const float factor = sqrtf(static_cast<float>(all));
  const int64_t entries = call.rows * kv_heads;
  for (int64_t i = threadIdx.x; i < entries; i += blockDim.x) {
    const float most = __uint_as_float(peaks[across ? i % kv_heads : 0]);
    call.peaks[which * entries + i] = __float_as_uint(factor * most);
  }
}

// The largest magnitudes of v's heads, row by row. Blocks have `each` tokens of one stream, the last two have what bounds
// q and k.
template <class X, int kWidth>
__global__ void __launch_bounds__(kPeakThreads) find_row_peaks(const __grid_constant__ QkNormRope call, int each) {
  __shared__ uint32_t peaks[kMostKvHeads];
  const int which = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) + 2;
  if (which >= 0) {
    bound_peaks(call, which, peaks);
    return;
  }
  int64_t block = blockIdx.x;
  int s = 0;
  for (; s < call.stream_count; ++s) {
    const int64_t blocks = (call.streams[s].tokens + each - 1) / each;
    if (block < blocks) break;
    block -= blocks;
  }
  if (s == call.stream_count) return;
  const QkvStream& stream = call.streams[s];
  const int64_t first = block * each;
  const int64_t last = first + each < stream.tokens ? first + each : stream.tokens;
  const int kv_heads = static_cast<int>(call.kv_heads), size = static_cast<int>(call.head_size), all = kv_heads * size;
  for (int64_t begin = first; begin < last;) {
    // the same for the whole block: the tokens from here on that are of one row; a stream has its rows in order
    const int64_t row = call.rows == 1 ? 0 : omni::row_of(call, omni::place_of(stream, begin));
    int64_t end = last;
    if (call.rows > 1 && omni::row_of(call, omni::place_of(stream, last - 1)) != row) {
      for (end = begin + 1; omni::row_of(call, omni::place_of(stream, end)) == row;) ++end;
    }
    for (int h = threadIdx.x; h < kv_heads; h += blockDim.x) peaks[h] = 0u;
    __syncthreads();
    for (int at = threadIdx.x * kWidth; at < all; at += blockDim.x * kWidth) {
      const X* v = static_cast<const X*>(stream.v) + at;
      uint32_t peak = 0u;
#pragma unroll 8
      for (int64_t token = begin; token < end; ++token) {
        float value[kWidth];
        if constexpr (kWidth == kPack) {
          omni::load_pack<omni::Streamed>(v + token * stream.v_stride, value);
        } else {
          value[0] = omni::to_float(v[token * stream.v_stride]);
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) peak = max(peak, __float_as_uint(value[j]) & 0x7fffffffu);  // a NaN is the most
      }
      atomicMax(peaks + at / size, peak);
    }
    __syncthreads();
    for (int h = threadIdx.x; h < kv_heads; h += blockDim.x) atomicMax(call.peaks + omni::peak_at(call, 2, row, h), peaks[h]);
    __syncthreads();
    begin = end;
  }
}

template <class X>
void launch_peaks(const QkNormRope& call, cudaStream_t stream) {
  const int each = call.tokens <= kFewBlocks * kFewPeakTokens ? kFewPeakTokens : kPeakTokens;
  int64_t blocks = 2;
  bool packed = call.head_size % kPack == 0;
  for (int64_t s = 0; s < call.stream_count; ++s) {
    blocks += (call.streams[s].tokens + each - 1) / each;
    packed = packed && omni::aligned(call.streams[s].v, call.streams[s].v_stride, sizeof(X));
  }
  const int64_t width = packed ? kPack : 1, warps = (call.kv_heads * call.head_size / width + kWarp - 1) / kWarp;
  const auto threads = static_cast<unsigned>(warps < kPeakThreads / kWarp ? warps * kWarp : kPeakThreads);
  const auto kernel = packed ? find_row_peaks<X, kPack> : find_row_peaks<X, 1>;
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(call, each);
}

}  // namespace

const char* omni_qk_row_peaks_cuda(const QkNormRope* call, void* stream) {
  if (call->kv_heads > kMostKvHeads) return "more key heads than a block counts";
  if (call->heads * call->head_size > INT32_MAX / 2) return "more channels than a block counts";
  const auto on = static_cast<cudaStream_t>(stream);
  if (call->x_dtype == omni::Dtype::kFloat32) {
    launch_peaks<float>(*call, on);
  } else {
    launch_peaks<__nv_bfloat16>(*call, on);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
