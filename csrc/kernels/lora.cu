// The lora family on CUDA, in two launches for all adapters of a batch, on tensor cores: `shrink` multiplies the tokens of
// each run with the first factors of its parts, `expand` the results with the second ones, adds all of them to y in
// float32 and rounds once. Both read each activation once; what they compute of a token depends on its run's parts alone.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../common/asked.cuh"
#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/lora.h"
#include "lora.cuh"

namespace {

namespace wmma = nvcuda::wmma;

using omni::copy_pack;
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
using omni::LoraRun;
using BFloat16 = __nv_bfloat16;

// A tile of tokens and its run, by a number among the tiles of all runs.
struct Tile {
  int run;
  int64_t first;  // of its tokens in the run
};

__device__ __forceinline__ Tile tile_of(const LoraAdd& call, int64_t number, int tokens) {
  int run = 0;
  for (; run < call.runs - 1; ++run) {
    const int64_t tiles = (call.run[run].tokens + tokens - 1) / tokens;
    if (number < tiles) break;
    number -= tiles;
  }
  return {run, number * tokens};
}

// The values of four codes, without their scale. Both kinds of codes are exact in bfloat16.
template <class X>
__device__ __forceinline__ uint2 four_values(uint32_t codes) {
  float value[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (std::is_same_v<X, int8_t>) {
      value[j] = static_cast<float>(static_cast<int8_t>(codes >> (8 * j)));
    } else {
      X code;
      code.__x = static_cast<__nv_fp8_storage_t>(codes >> (8 * j));
      value[j] = static_cast<float>(code);
    }
  }
  return make_uint2(omni::bfloat16_pair(value[0], value[1]), omni::bfloat16_pair(value[2], value[3]));
}

// --- shrink: [tokens, in] -> [tokens, ranks] -------------------------------------------------------------------------

constexpr int kShrinkThreads = 128;
constexpr int kShrinkTokens = 32;
constexpr int kDepth = 128;            // inputs of a stage
constexpr int kStages = 4;
constexpr int kPitch = kDepth + 8;     // of rows in shared memory, so that neighbours lie in other banks
constexpr int kCodePitch = kDepth + 16;

// X: bfloat16, or the type of codes. kBlocks: blocks of ranks at a time.
template <class X, int kBlocks>
struct Shrink {
  static constexpr bool kCodes = sizeof(X) == 1;
  static constexpr int kRanks = kBlocks * kLoraBlock;
  static constexpr int kSumPitch = kRanks + 4;
  static constexpr int kRowPitch = kCodes ? kCodePitch : kPitch;

  struct Stage {
    alignas(32) X x[kShrinkTokens][kRowPitch];
    alignas(32) BFloat16 down[kRanks][kPitch];
  };
  struct Loads {
    Stage stage[kStages];
    alignas(32) BFloat16 wide[kCodes ? kShrinkTokens : 1][kPitch];  // the values of a stage's codes, without scales
  };
  union Shared {
    Loads loads;
    alignas(32) float sums[2][kShrinkTokens][kSumPitch];
  };
};

// The rows of first factors of a chunk of blocks: where each block begins, and how many of its ranks there are.
template <int kBlocks>
struct Downs {
  const BFloat16* from[kBlocks];
  int ranks[kBlocks];
  float scale[kBlocks];

  __device__ __forceinline__ Downs(const LoraAdd& call, const LoraRun& run, int first_block) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      from[b] = nullptr;
      ranks[b] = 0;
      scale[b] = 0.f;
      const int block = first_block + b;
      for (int p = run.first_part; p < run.end_part; ++p) {
        const LoraPart& part = call.part[p];
        const int at = (block - part.first_block) * kLoraBlock;
        if (part.down == nullptr || at < 0 || at >= part.rank) continue;
        from[b] = static_cast<const BFloat16*>(part.down) + static_cast<int64_t>(at) * call.in;
        ranks[b] = min(part.rank - at, kLoraBlock);
        scale[b] = part.scale;
      }
    }
  }
};

template <class X, int kBlocks>
__device__ __forceinline__ void load_stage(const LoraAdd& call, const X* x, int tokens, const Downs<kBlocks>& downs,
                                           int64_t column, bool vector_x, bool vector_down,
                                           typename Shrink<X, kBlocks>::Stage& stage) {
  constexpr int kElements = 16 / sizeof(X), kPacks = kDepth / kElements;
  for (int i = threadIdx.x; i < kShrinkTokens * kPacks; i += kShrinkThreads) {
    const int row = i / kPacks, at = i % kPacks * kElements;
    copy_row(&stage.x[row][at], x + row * call.x_stride, column + at, call.in, row < tokens, vector_x);
  }
  constexpr int kDownPacks = kDepth / kPack;
  for (int i = threadIdx.x; i < kLoraBlock * kDownPacks; i += kShrinkThreads) {
    const int row = i / kDownPacks, at = i % kDownPacks * kPack;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      copy_row(&stage.down[b * kLoraBlock + row][at], downs.from[b] + static_cast<int64_t>(row) * call.in, column + at,
               call.in, row < downs.ranks[b], vector_down);
  }
}

// Warps w and w + 2 have the same 16 tokens, and each half of a stage's inputs.
template <class X, int kBlocks>
__global__ void __launch_bounds__(kShrinkThreads, 4)
    shrink(const __grid_constant__ LoraAdd call, int chunks, bool vector_x, bool vector_down) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  using Of = Shrink<X, kBlocks>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Of::Shared*>(memory);
  const Tile tile = tile_of(call, blockIdx.x / chunks, kShrinkTokens);
  const LoraRun& run = call.run[tile.run];
  const int first_block = static_cast<int>(blockIdx.x % chunks) * kBlocks;
  if (first_block >= run.blocks || tile.first >= run.tokens) return;
  const int tokens = static_cast<int>(min(run.tokens - tile.first, static_cast<int64_t>(kShrinkTokens)));
  const int64_t token = run.first + tile.first;
  const X* x = static_cast<const X*>(call.x) + token * call.x_stride;
  const Downs<kBlocks> downs(call, run, first_block);

  const int warp = threadIdx.x / kWarp, rows = warp % 2 * 16, half = warp / 2 * (kDepth / 2);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) wmma::fill_fragment(sums[b], 0.f);

  const int stages = (call.in + kDepth - 1) / kDepth;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < stages)
      load_stage<X, kBlocks>(call, x, tokens, downs, static_cast<int64_t>(s) * kDepth, vector_x, vector_down,
                             shared.loads.stage[s]);
    __pipeline_commit();
  }
  for (int s = 0; s < stages; ++s) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // the stage is there for all, and nobody reads the one before
    if (const int next = s + kStages - 1; next < stages)
      load_stage<X, kBlocks>(call, x, tokens, downs, static_cast<int64_t>(next) * kDepth, vector_x, vector_down,
                             shared.loads.stage[next % kStages]);
    __pipeline_commit();
    const typename Of::Stage& stage = shared.loads.stage[s % kStages];
    const BFloat16* from;
    if constexpr (Of::kCodes) {
      for (int i = threadIdx.x; i < kShrinkTokens * kDepth / 4; i += kShrinkThreads) {
        const int row = i / (kDepth / 4), at = i % (kDepth / 4) * 4;
        *reinterpret_cast<uint2*>(&shared.loads.wide[row][at]) =
            four_values<X>(*reinterpret_cast<const uint32_t*>(&stage.x[row][at]));
      }
      __syncthreads();
      from = &shared.loads.wide[rows][half];
    } else {
      from = &stage.x[rows][half];
    }
#pragma unroll
    for (int k = 0; k < kDepth / 2; k += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, BFloat16, wmma::row_major> a;
      wmma::load_matrix_sync(a, from + k, kPitch);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, BFloat16, wmma::col_major> w;
        wmma::load_matrix_sync(w, &stage.down[b * kLoraBlock][half + k], kPitch);
        wmma::mma_sync(sums[b], a, w, sums[b]);
      }
    }
  }
  __pipeline_wait_prior(0);
  __syncthreads();  // the sums go where the stages were
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
    wmma::store_matrix_sync(&shared.sums[warp / 2][rows][b * kLoraBlock], sums[b], Of::kSumPitch, wmma::mem_row_major);
  __syncthreads();

  const int width = run.blocks * kLoraBlock;
  auto* inner = static_cast<BFloat16*>(call.inner) + run.inner_at + tile.first * width + first_block * kLoraBlock;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (first_block + b >= run.blocks) break;
    for (int i = threadIdx.x; i < kShrinkTokens * kLoraBlock; i += kShrinkThreads) {
      const int row = i / kLoraBlock, column = b * kLoraBlock + i % kLoraBlock;
      if (row >= tokens) continue;
      const float factor = Of::kCodes ? downs.scale[b] * call.x_scale[token + row] : downs.scale[b];
      const float sum = (shared.sums[0][row][column] + shared.sums[1][row][column]) * factor;
      inner[static_cast<int64_t>(row) * width + column] = __float2bfloat16_rn(sum);
    }
  }
#endif
}

// --- expand: y += [tokens, ranks] -> [tokens, out] -------------------------------------------------------------------

struct Expand {
  struct Loads {
    alignas(32) BFloat16 inner[kExpandTokens][kRankPitch];
    alignas(32) BFloat16 up[kColumns][kRankPitch];
  };
  union Shared {
    Loads loads;
    alignas(32) float sums[kExpandTokens][kSumPitch];
  };
};

// With the tanh approximation: x * sigmoid(2u) is 0.5 * x * (1 + tanh u).
__device__ __forceinline__ float gelu_tanh(float x) {
  const float u = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.f + __expf(-2.f * u));
}

__device__ __forceinline__ void load_up(const LoraPart& part, int64_t column, int rank, int depth, Expand::Loads& loads) {
  const bool vector = part.rank % kPack == 0 && reinterpret_cast<uintptr_t>(part.up) % 16 == 0;
  const int packs = depth / kPack;
  for (int i = threadIdx.x; i < kColumns * packs; i += kExpandThreads) {
    const int row = i / packs, at = i % packs * kPack;
    const int64_t output = column + row;
    const bool there = output >= part.row_begin && output < part.row_end;
    const BFloat16* from = static_cast<const BFloat16*>(part.up) + (there ? (output - part.row_begin) * part.rank : 0);
    copy_row(&loads.up[row][at], from, rank + at, part.rank, there, vector);
  }
}

__global__ void __launch_bounds__(kExpandThreads, 3)
    expand(const __grid_constant__ LoraAdd call, int column_tiles, int64_t tiles, bool vector) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __shared__ Expand::Shared shared;
  // the layer's last tokens were written last: they may still be in the cache
  const Tile tile = tile_of(call, tiles - 1 - blockIdx.x / column_tiles, kExpandTokens);
  const LoraRun& run = call.run[tile.run];
  const int64_t column = static_cast<int64_t>(blockIdx.x % column_tiles) * kColumns;
  bool touched = call.gelu_tanh;
  for (int p = run.first_part; p < run.end_part; ++p)
    touched = touched || (call.part[p].row_begin < column + kColumns && call.part[p].row_end > column);
  if (!touched || tile.first >= run.tokens) return;
  const int tokens = static_cast<int>(min(run.tokens - tile.first, static_cast<int64_t>(kExpandTokens)));
  BFloat16* y = static_cast<BFloat16*>(call.y) + (run.first + tile.first) * call.y_stride + column;
  const int64_t columns = min(static_cast<int64_t>(kColumns), call.out - column);

  // what is to be added to comes while the products are made
  uint4 before[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int pack = i * kExpandThreads + threadIdx.x, row = pack / kPacksOfRow, at = pack % kPacksOfRow * kPack;
    before[i] = make_uint4(0u, 0u, 0u, 0u);
    if (vector && row < tokens && at < columns)
      before[i] = __ldcg(reinterpret_cast<const uint4*>(y + row * call.y_stride + at));
  }

  const int warp = threadIdx.x / kWarp, rows = warp % 4 * 16, first = warp / 4 * (kColumns / 2);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kColumns / 32];
#pragma unroll
  for (auto& sum : sums) wmma::fill_fragment(sum, 0.f);
  const int width = run.blocks * kLoraBlock;
  const BFloat16* inner = static_cast<const BFloat16*>(call.inner) + run.inner_at + tile.first * width;
  for (int p = run.first_part; p < run.end_part; ++p) {
    const LoraPart& part = call.part[p];
    if (part.down == nullptr || part.row_begin >= column + columns || part.row_end <= column) continue;
    for (int rank = 0; rank < part.rank; rank += kRanks) {
      const int left = (part.rank - rank + kLoraBlock - 1) / kLoraBlock * kLoraBlock, depth = min(left, kRanks);
      const int packs = depth / kPack;
      const BFloat16* from = inner + part.first_block * kLoraBlock + rank;
      for (int i = threadIdx.x; i < kExpandTokens * packs; i += kExpandThreads) {
        const int row = i / packs, at = i % packs * kPack;
        copy_pack(&shared.loads.inner[row][at], from + static_cast<int64_t>(row) * width + at, row < tokens);
      }
      load_up(part, column, rank, depth, shared.loads);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      __syncthreads();
      for (int k = 0; k < depth; k += 16) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, BFloat16, wmma::row_major> a;
        wmma::load_matrix_sync(a, &shared.loads.inner[rows][k], kRankPitch);
#pragma unroll
        for (int n = 0; n < kColumns / 32; ++n) {
          wmma::fragment<wmma::matrix_b, 16, 16, 16, BFloat16, wmma::col_major> w;
          wmma::load_matrix_sync(w, &shared.loads.up[first + n * 16][k], kRankPitch);
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
    if (row >= tokens || at >= columns) continue;
    BFloat16* to = y + row * call.y_stride + at;
    const auto* old = reinterpret_cast<const BFloat16*>(&before[i]);
    float value[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const bool there = at + j < columns;
      value[j] = shared.sums[row][at + j] + (vector ? __bfloat162float(old[j]) : there ? __bfloat162float(to[j]) : 0.f);
    }
    for (int p = run.first_part; p < run.end_part; ++p) {
      const LoraPart& part = call.part[p];
      if (part.down != nullptr) continue;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const int64_t output = column + at + j;
        if (output >= part.row_begin && output < part.row_end)
          value[j] += part.scale * __bfloat162float(static_cast<const BFloat16*>(part.up)[output - part.row_begin]);
      }
    }
    if (call.gelu_tanh) {
#pragma unroll
      for (float& each : value) each = gelu_tanh(each);
    }
    if (vector) {
      omni::store_pack(to, value);
    } else {
      for (int j = 0; j < kPack && at + j < columns; ++j) omni::store(to + j, value[j]);
    }
  }
#endif
}

// --- launches --------------------------------------------------------------------------------------------------------

struct Sizes {
  int blocks = 0;  // of the run with the most
  int64_t shrink_tiles = 0;
  int64_t expand_tiles = 0;
};

Sizes sizes_of(const LoraAdd& call) {
  Sizes sizes;
  for (int i = 0; i < call.runs; ++i) {
    const LoraRun& run = call.run[i];
    sizes.blocks = run.blocks > sizes.blocks ? run.blocks : sizes.blocks;
    sizes.shrink_tiles += (run.tokens + kShrinkTokens - 1) / kShrinkTokens;
    sizes.expand_tiles += (run.tokens + kExpandTokens - 1) / kExpandTokens;
  }
  return sizes;
}

template <class X, int kBlocks>
const char* launch_shrink(const LoraAdd& call, const Sizes& sizes, cudaStream_t stream) {
  const auto kernel = &shrink<X, kBlocks>;
  constexpr size_t kShared = sizeof(typename Shrink<X, kBlocks>::Shared);
  if (omni::resident_blocks(reinterpret_cast<const void*>(kernel), kShrinkThreads, kShared) == 0)
    return omni::no_block();
  const int64_t chunks = (sizes.blocks + kBlocks - 1) / kBlocks, blocks = sizes.shrink_tiles * chunks;
  if (blocks > INT32_MAX) return "more tokens than a grid has blocks";
  const bool vector_down = omni::has_vector_downs(call);
  const bool vector_x = call.in % (16 / sizeof(X)) == 0 && omni::aligned(call.x, call.x_stride, sizeof(X));
  kernel<<<static_cast<unsigned>(blocks), kShrinkThreads, kShared, stream>>>(call, static_cast<int>(chunks), vector_x,
                                                                            vector_down);
  return nullptr;
}

template <class X>
const char* launch_shrink(const LoraAdd& call, const Sizes& sizes, cudaStream_t stream) {
  if (sizes.blocks == 1) return launch_shrink<X, 1>(call, sizes, stream);
  if (sizes.blocks == 2) return launch_shrink<X, 2>(call, sizes, stream);
  if (sizes.blocks == 3) return launch_shrink<X, 3>(call, sizes, stream);
  return launch_shrink<X, 4>(call, sizes, stream);
}

}  // namespace

const char* omni_lora_add_cuda(const LoraAdd* call, void* stream) {
  if (omni::current_device().major < 8) return "needs a GPU of compute capability 8.0";
  const auto queue = static_cast<cudaStream_t>(stream);
  const Sizes sizes = sizes_of(*call);
  const int64_t column_tiles = (call->out + kColumns - 1) / kColumns, blocks = sizes.expand_tiles * column_tiles;
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "more tokens than a grid has blocks";
  if (sizes.blocks > 0) {
    const char* problem = call->code == omni::Code::kNone      ? launch_shrink<BFloat16>(*call, sizes, queue)
                          : call->code == omni::Code::kFloat8 ? launch_shrink<__nv_fp8_e4m3>(*call, sizes, queue)
                                                              : launch_shrink<int8_t>(*call, sizes, queue);
    if (problem != nullptr) return problem;
  }
  const bool vector = call->out % kPack == 0 && omni::aligned(call->y, call->y_stride, sizeof(BFloat16));
  expand<<<static_cast<unsigned>(blocks), kExpandThreads, 0, queue>>>(*call, static_cast<int>(column_tiles),
                                                                     sizes.expand_tiles, vector);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
