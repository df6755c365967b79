// The heads family on CUDA: one pass for the largest magnitude of each row's heads, one for the codes. The second finds
// in the L2 what it left there.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/heads.h"
#include "../common/rows.cuh"

namespace {

using omni::Code;
using omni::PackedHeads;
using omni::QuantizeHeads;

constexpr int kTokens = 16;  // of a block
constexpr int kAhead = 4;    // tokens whose loads are under way together
constexpr int kThreads = 512;

// What a block has to do: the tokens [begin, end) of one row of q, k or v.
struct Part {
  PackedHeads heads;
  int64_t begin;
  int64_t end;
  int64_t peak;  // of the row's first head, in `peaks` and `scales`

  __device__ __forceinline__ Part(const QuantizeHeads& call, int64_t row)
      : heads(call.parts[blockIdx.z]),
        begin(heads.cu[row] + static_cast<int64_t>(blockIdx.x) * kTokens),
        end(heads.cu[row + 1]),
        peak((blockIdx.z * call.rows + row) * call.kv_heads) {
    if (end > begin + kTokens) end = begin + kTokens;
  }
};

// kWidth elements at a time: eight where they are aligned, else one.
template <class X, int kWidth>
struct Piece {
  float value[kWidth];

  __device__ __forceinline__ void load(const X* where) {
    if constexpr (kWidth == omni::kPack) {
      omni::load_pack<omni::Streamed>(where, value);
    } else {
      value[0] = omni::to_float(*where);
    }
  }
};

template <class X, int kWidth>
__global__ void __launch_bounds__(kThreads) find_peaks(const __grid_constant__ QuantizeHeads call) {
  __shared__ uint32_t peaks[omni::kMostKvHeads];
  for (int64_t row = blockIdx.y; row < call.rows; row += gridDim.y) {
    const Part part(call, row);
    if (part.begin >= part.end) continue;  // the same for the whole block
    for (int h = threadIdx.x; h < call.kv_heads; h += blockDim.x) peaks[h] = 0u;
    __syncthreads();
    const int size = static_cast<int>(call.head_size), all = static_cast<int>(part.heads.heads) * size;
    const int grouped = static_cast<int>(part.heads.heads / call.kv_heads) * size;
    for (int at = threadIdx.x * kWidth; at < all; at += blockDim.x * kWidth) {
      const X* x = static_cast<const X*>(part.heads.x) + part.begin * part.heads.stride + at;
      float peak = 0.f;
      for (int64_t token = part.begin; token < part.end; token += kAhead) {
        Piece<X, kWidth> piece[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          // a token beyond the end is the last one again
          const int64_t beyond = token + i < part.end ? i : part.end - 1 - token;
          piece[i].load(x + beyond * part.heads.stride);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) peak = omni::larger(peak, piece[i].value[j]);
        }
        x += kAhead * part.heads.stride;
      }
      atomicMax(peaks + at / grouped, __float_as_uint(peak) & 0x7fffffffu);
    }
    __syncthreads();
    for (int h = threadIdx.x; h < call.kv_heads; h += blockDim.x) atomicMax(call.peaks + part.peak + h, peaks[h]);
    __syncthreads();
  }
}

template <class X, int kWidth>
__global__ void __launch_bounds__(kThreads) write_codes(const __grid_constant__ QuantizeHeads call) {
  for (int64_t row = blockIdx.y; row < call.rows; row += gridDim.y) {
    const Part part(call, row);
    if (blockIdx.x == 0) {
      for (int h = threadIdx.x; h < call.kv_heads; h += blockDim.x) {
        call.scales[part.peak + h] = omni::RowScale(call.peaks[part.peak + h], Code::kFloat8).scale;
      }
    }
    if (part.begin >= part.end) continue;
    const int size = static_cast<int>(call.head_size), all = static_cast<int>(part.heads.heads) * size;
    const int grouped = static_cast<int>(part.heads.heads / call.kv_heads) * size;
    for (int at = threadIdx.x * kWidth; at < all; at += blockDim.x * kWidth) {
      const omni::RowScale scale(call.peaks[part.peak + at / grouped], Code::kFloat8);
      const X* x = static_cast<const X*>(part.heads.x) + part.begin * part.heads.stride + at;
      for (int64_t token = part.begin; token < part.end; token += kAhead) {
        Piece<X, kWidth> piece[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (token + i < part.end) piece[i].load(x + i * part.heads.stride);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (token + i >= part.end) break;
          if constexpr (kWidth == omni::kPack) {
            omni::store_codes(part.heads.codes, (token + i) * all + at, piece[i].value, scale, Code::kFloat8);
          } else {
            omni::store_code(part.heads.codes, (token + i) * all + at, piece[i].value[0], scale, Code::kFloat8);
          }
        }
        x += kAhead * part.heads.stride;
      }
    }
  }
}

template <class X, int kWidth>
const char* launch(const QuantizeHeads& call, cudaStream_t stream) {
  int64_t longest = 1, most = 0;
  for (const PackedHeads& part : call.parts) {
    longest = part.longest > longest ? part.longest : longest;
    most = part.heads > most ? part.heads : most;
  }
  const int64_t warps = (most * call.head_size / kWidth + omni::kWarp - 1) / omni::kWarp;
  const auto threads = static_cast<unsigned>((warps < kThreads / omni::kWarp ? warps : kThreads / omni::kWarp) * omni::kWarp);
  const dim3 grid(static_cast<unsigned>((longest + kTokens - 1) / kTokens),
                  static_cast<unsigned>(call.rows < 65535 ? call.rows : 65535), 3);
  const size_t bytes = static_cast<size_t>(3 * call.rows * call.kv_heads) * sizeof(uint32_t);
  cudaError_t error = cudaMemsetAsync(call.peaks, 0, bytes, stream);
  if (error == cudaSuccess) {
    find_peaks<X, kWidth><<<grid, threads, 0, stream>>>(call);
    write_codes<X, kWidth><<<grid, threads, 0, stream>>>(call);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class X>
const char* launch(const QuantizeHeads& call, cudaStream_t stream) {
  bool packed = call.head_size % omni::kPack == 0;
  for (const PackedHeads& part : call.parts) {
    packed = packed && omni::aligned(part.x, part.stride, sizeof(X)) && omni::aligned(part.codes, 0, 1);
  }
  return packed ? launch<X, omni::kPack>(call, stream) : launch<X, 1>(call, stream);
}

}  // namespace

const char* omni_quantize_heads_cuda(const QuantizeHeads* call, void* stream) {
  if (call->kv_heads > omni::kMostKvHeads) return "more key heads than a block counts";
  for (const PackedHeads& part : call->parts) {
    if (part.heads * call->head_size > INT32_MAX / 2) return "more channels than a block counts";
  }
  const auto on = static_cast<cudaStream_t>(stream);
  return call->x_dtype == omni::Dtype::kFloat32 ? launch<float>(*call, on) : launch<__nv_bfloat16>(*call, on);
}
