// A weight with the products of some factors added to it, on CUDA: one launch for all parts, which reads and writes each
// weight once.
#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstdint>

#include "../common/asked.cuh"
#include "../common/device.cuh"
#include "../common/lora.h"
#include "lora.cuh"

namespace {

namespace wmma = nvcuda::wmma;

using omni::copy_row;
using omni::kColumns;
using omni::kExpandThreads;
using omni::kExpandTokens;
using omni::kLoraBlock;
using omni::kPack;
using omni::kPacks;
using omni::kPacksOfRow;
using omni::kRankPitch;
using omni::kRanks;
using omni::kSumPitch;
using omni::kWarp;
using omni::LoraAdd;
using omni::LoraPart;
using BFloat16 = __nv_bfloat16;

constexpr int kDownPitch = kColumns + 8;

struct Merge {
  struct Loads {
    alignas(32) BFloat16 up[kExpandTokens][kRankPitch];
    alignas(32) BFloat16 down[kRanks][kDownPitch];
  };
  union Shared {
    Loads loads;
    alignas(32) float sums[kExpandTokens][kSumPitch];
  };
};

// Rows `first_row` and on of the weight, columns `column` and on: what the loads of one part and some of its ranks are.
__device__ __forceinline__ void load_factors(const LoraAdd& call, const LoraPart& part, int64_t first_row, int64_t column,
                                             int rank, int depth, bool vector_down, Merge::Loads& loads) {
  const bool vector_up = part.rank % kPack == 0 && reinterpret_cast<uintptr_t>(part.up) % 16 == 0;
  const int packs = depth / kPack;
  for (int i = threadIdx.x; i < kExpandTokens * packs; i += kExpandThreads) {
    const int row = i / packs, at = i % packs * kPack;
    const int64_t output = first_row + row;
    const bool there = output >= part.row_begin && output < part.row_end;
    const BFloat16* from = static_cast<const BFloat16*>(part.up) + (there ? (output - part.row_begin) * part.rank : 0);
    copy_row(&loads.up[row][at], from, rank + at, part.rank, there, vector_up);
  }
  for (int i = threadIdx.x; i < depth * kPacksOfRow; i += kExpandThreads) {
    const int row = i / kPacksOfRow, at = i % kPacksOfRow * kPack;
    const bool there = rank + row < part.rank;
    const BFloat16* from = static_cast<const BFloat16*>(part.down) + (there ? int64_t{rank + row} * call.in : 0);
    copy_row(&loads.down[row][at], from, column + at, call.in, there, vector_down);
  }
}

// The scale of a part goes into its second factor, which is rounded again: by less than the merged weight is.
__global__ void __launch_bounds__(kExpandThreads, 2)
    merge(const __grid_constant__ LoraAdd call, int column_tiles, bool vector, bool vector_down) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __shared__ Merge::Shared shared;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / column_tiles) * kExpandTokens;
  const int64_t column = static_cast<int64_t>(blockIdx.x % column_tiles) * kColumns;
  const int64_t count = min(static_cast<int64_t>(kExpandTokens), call.out - first_row);
  const int64_t columns = min(static_cast<int64_t>(kColumns), call.in - column);
  const BFloat16* weight = static_cast<const BFloat16*>(call.x) + first_row * call.x_stride + column;
  BFloat16* merged = static_cast<BFloat16*>(call.y) + first_row * call.y_stride + column;

  uint4 before[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int pack = i * kExpandThreads + threadIdx.x, row = pack / kPacksOfRow, at = pack % kPacksOfRow * kPack;
    before[i] = make_uint4(0u, 0u, 0u, 0u);
    if (vector && row < count && at < columns)
      before[i] = __ldcg(reinterpret_cast<const uint4*>(weight + row * call.x_stride + at));
  }

  const int warp = threadIdx.x / kWarp, rows = warp % 4 * 16, first = warp / 4 * (kColumns / 2);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kColumns / 32];
#pragma unroll
  for (auto& sum : sums) wmma::fill_fragment(sum, 0.f);
  for (int p = call.run[0].first_part; p < call.run[0].end_part; ++p) {
    const LoraPart& part = call.part[p];
    if (part.row_begin >= first_row + count || part.row_end <= first_row) continue;
    for (int rank = 0; rank < part.rank; rank += kRanks) {
      const int left = (part.rank - rank + kLoraBlock - 1) / kLoraBlock * kLoraBlock, depth = min(left, kRanks);
      load_factors(call, part, first_row, column, rank, depth, vector_down, shared.loads);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      __syncthreads();
      for (int k = 0; k < depth; k += 16) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, BFloat16, wmma::row_major> a;
        wmma::load_matrix_sync(a, &shared.loads.up[rows][k], kRankPitch);
        if (part.scale != 1.f)
          for (int j = 0; j < a.num_elements; ++j) a.x[j] = __float2bfloat16_rn(part.scale * __bfloat162float(a.x[j]));
#pragma unroll
        for (int n = 0; n < kColumns / 32; ++n) {
          wmma::fragment<wmma::matrix_b, 16, 16, 16, BFloat16, wmma::row_major> w;
          wmma::load_matrix_sync(w, &shared.loads.down[k][first + n * 16], kDownPitch);
          wmma::mma_sync(sums[n], a, w, sums[n]);
        }
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns / 32; ++n)
    wmma::store_matrix_sync(&shared.sums[rows][first + n * 16], sums[n], kSumPitch, wmma::mem_row_major);
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int pack = i * kExpandThreads + threadIdx.x, row = pack / kPacksOfRow, at = pack % kPacksOfRow * kPack;
    if (row >= count || at >= columns) continue;
    const BFloat16* from = weight + row * call.x_stride + at;
    const auto* old = reinterpret_cast<const BFloat16*>(&before[i]);
    float value[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j)
      value[j] = shared.sums[row][at + j] +
                 (vector ? __bfloat162float(old[j]) : at + j < columns ? __bfloat162float(from[j]) : 0.f);
    BFloat16* to = merged + row * call.y_stride + at;
    if (vector) {
      omni::store_pack(to, value);
    } else {
      for (int j = 0; j < kPack && at + j < columns; ++j) omni::store(to + j, value[j]);
    }
  }
#endif
}

}  // namespace

const char* omni_lora_merge_cuda(const LoraAdd* call, void* stream) {
  if (omni::current_device().major < 8) return "needs a GPU of compute capability 8.0";
  const int64_t column_tiles = (call->in + kColumns - 1) / kColumns;
  const int64_t blocks = (call->out + kExpandTokens - 1) / kExpandTokens * column_tiles;
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "more weights than a grid has blocks";
  const bool vector = call->in % kPack == 0 && omni::aligned(call->x, call->x_stride, sizeof(BFloat16)) &&
                      omni::aligned(call->y, call->y_stride, sizeof(BFloat16));
  merge<<<static_cast<unsigned>(blocks), kExpandThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      *call, static_cast<int>(column_tiles), vector, omni::has_vector_downs(*call));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
