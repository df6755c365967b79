// 8-bit attention on Hopper, empty for other architectures: int8 scores, e4m3 weights and values, softmax in float32.
//
// A block has 64 queries of one head for each of its warpgroups but the first, of which one thread copies tiles of keys
// and values to shared memory, ahead of the others, which compute. Online softmax as in FlashAttention-3
// (https://arxiv.org/abs/2407.08608), its weights times 2^8 so that e4m3 holds small ones; what the keys of a tile add
// is made in registers of its own and then added in float32, since Hopper's 8-bit products add up with few bits.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/asked.cuh"
#include "../common/attention_q.h"
#include "../common/device.cuh"
#include "attention_softmax.cuh"
#include "packed_rows.cuh"
#include "wgmma8.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // the kernel is empty there, and what it calls is left over
#endif

namespace {

using omni::AttentionPlan;
using omni::AttentionQ;
using omni::kHeadSize;
using omni::kTileKeys;
using omni::kTileQueries;
using omni::Lines;

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kStages = 4;
constexpr uint32_t kQueryBytes = kTileQueries * kHeadSize;
constexpr uint32_t kTileBytes = kTileKeys * kHeadSize;
constexpr int kFirstTurn = 1;  // named barrier; 0 is that of the block
constexpr int kBarrier = 8;    // bytes

template <int kGroups>
struct Room {
  static constexpr uint32_t kKeys = kGroups * kQueryBytes;
  static constexpr uint32_t kValues = kKeys + kStages * kTileBytes;
  static constexpr uint32_t kQueriesFull = kValues + kStages * kTileBytes;  // a barrier, as are the next, for each stage
  static constexpr uint32_t kQueriesFree = kQueriesFull + kBarrier;
  static constexpr uint32_t kKeysFull = kQueriesFree + kBarrier;
  static constexpr uint32_t kKeysFree = kKeysFull + kStages * kBarrier;
  static constexpr uint32_t kValuesFull = kKeysFree + kStages * kBarrier;
  static constexpr uint32_t kValuesFree = kValuesFull + kStages * kBarrier;
  static constexpr uint32_t kPins = kValuesFree + kStages * kBarrier;  // a float of each warp, which nobody reads
  static constexpr uint32_t kEnd = kPins + (kGroups + 1) * 4 * 4;
  static constexpr uint32_t kAlign = 1024;
  static constexpr uint32_t kAll = kEnd + kAlign;
};

template <int kGroups>
__host__ __device__ __forceinline__ int tiles_of(const omni::PackedRows& rows) {
  return static_cast<int>(rows.queries / (kGroups * kTileQueries) + rows.rows);
}

// What a block does next: 64 queries for each group, of one head and row.
struct Work {
  int head;
  int first;       // query of the row
  int queries;     // of the row
  int keys;        // of the row
  int tiles;       // of its keys
  int64_t token;   // of the batch, the row's first query
  int64_t q_tile;  // of all heads, the first
  int64_t k_tile;  // of all heads, the row's first

  __device__ __forceinline__ bool there() const { return first < queries; }
  __device__ __forceinline__ int tile_at(int turn) const { return turn == 0 ? tiles - 1 : turn - 1; }  // ragged first
  __device__ __forceinline__ int ragged() const { return keys - (tiles - 1) * kTileKeys; }
};

// Neighbours have the same keys, of which the L2 cache then holds one copy.
template <int kGroups>
__device__ __forceinline__ Work work_at(const AttentionQ& call, int number) {
  const auto& rows = call.rows;
  const int each = tiles_of<kGroups>(rows), kv_group = static_cast<int>(rows.heads / rows.kv_heads);
  const int head = number / each;
  const omni::Tile tile = omni::find_tile(rows.cu_q, static_cast<int>(rows.rows), kGroups * kTileQueries,
                                          number - head * each);
  Work work;
  work.head = head;
  work.first = tile.first;
  work.queries = tile.length;
  work.keys = rows.cu_k[tile.row + 1] - rows.cu_k[tile.row];
  work.tiles = (work.keys + kTileKeys - 1) / kTileKeys;
  work.token = rows.cu_q[tile.row];
  work.q_tile = head * call.in.q_tiles + omni::first_tile(rows.cu_q, tile.row, kTileQueries) + tile.number * kGroups;
  work.k_tile = head / kv_group * call.in.k_tiles + omni::first_tile(rows.cu_k, tile.row, kTileKeys);
  return work;
}

struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The thread that copies. What it has to wait for is freed by the others in the order in which it fills it.
template <int kGroups>
__device__ void copy_tiles(const AttentionQ& call, int numbers, uint32_t room) {
  using R = Room<kGroups>;
  Ring ring;
  uint32_t parity = 0;
  for (int number = blockIdx.x; number < numbers; number += gridDim.x) {
    const Work work = work_at<kGroups>(call, number);
    if (!work.there() || work.keys == 0) continue;
    const int left = (work.queries - work.first + kTileQueries - 1) / kTileQueries;
    const uint32_t bytes = min(left, kGroups) * kQueryBytes;
    omni::barrier_wait(room + R::kQueriesFree, parity ^ 1);
    omni::barrier_expect(room + R::kQueriesFull, bytes);
    omni::bulk_load(room, call.in.q + work.q_tile * kQueryBytes, bytes, room + R::kQueriesFull);
    parity ^= 1;
    for (int turn = 0; turn < work.tiles; ++turn) {
      const int64_t from = (work.k_tile + work.tile_at(turn)) * kTileBytes;
      const uint32_t stage = ring.stage * kTileBytes, barrier = room + ring.stage * kBarrier;
      omni::barrier_wait(barrier + R::kKeysFree, ring.parity ^ 1);
      omni::barrier_expect(barrier + R::kKeysFull, kTileBytes);
      omni::bulk_load(room + R::kKeys + stage, call.in.k + from, kTileBytes, barrier + R::kKeysFull);
      omni::barrier_wait(barrier + R::kValuesFree, ring.parity ^ 1);
      omni::barrier_expect(barrier + R::kValuesFull, kTileBytes);
      omni::bulk_load(room + R::kValues + stage, call.in.v + from, kTileBytes, barrier + R::kValuesFull);
      ring.advance();
    }
  }
}

// --- a warpgroup -----------------------------------------------------------------------------------------------------

template <int kGroups, AttentionPlan kPlan>
struct Consumer {
  static constexpr bool kApart = kPlan == AttentionPlan::kApart;
  static constexpr bool kTurns = kPlan == AttentionPlan::kTurns;
  using R = Room<kGroups>;
  uint32_t room;
  uint64_t queries;  // its descriptor
  const float* k_scale;
  const float* v_scale;
  bool speaks;  // one thread of each warp
  int group;

  __device__ __forceinline__ void wait_keys(const Ring& ring) const {
    omni::barrier_wait(room + R::kKeysFull + ring.stage * kBarrier, ring.parity);
  }
  __device__ __forceinline__ void wait_values(const Ring& ring) const {
    omni::barrier_wait(room + R::kValuesFull + ring.stage * kBarrier, ring.parity);
  }
  __device__ __forceinline__ uint64_t keys_at(const Ring& ring) const {
    return omni::lines_at(room + R::kKeys + ring.stage * kTileBytes);
  }
  __device__ __forceinline__ uint64_t values_at(const Ring& ring) const {
    return omni::lines_at(room + R::kValues + ring.stage * kTileBytes);
  }
  __device__ __forceinline__ void free_queries() const {
    if (speaks) omni::barrier_arrive(room + R::kQueriesFree);
  }
  __device__ __forceinline__ void free_keys(const Ring& ring) const {
    if (speaks) omni::barrier_arrive(room + R::kKeysFree + ring.stage * kBarrier);
  }
  __device__ __forceinline__ void free_values(const Ring& ring) const {
    if (speaks) omni::barrier_arrive(room + R::kValuesFree + ring.stage * kBarrier);
  }

  // Keeps the weights before what follows: the compiler else moves the wait for the values ahead of them.
  __device__ __forceinline__ void pin(const Lines& lines) const {
    if (speaks) omni::shared_store(room + R::kPins + threadIdx.x / omni::kWarp * 4, lines.sum[0] + lines.sum[1]);
  }

  __device__ __forceinline__ void start(int (&score)[64], const Ring& ring) const {
    wait_keys(ring);
    omni::wgmma_fence();
    omni::start_scores(score, queries, keys_at(ring));
    omni::wgmma_commit();
  }

  // The exponent of the largest scale of values, which are powers of 2: their products add up in one unit.
  __device__ __forceinline__ int highest_of(const Work& work) const {
    int highest = 0;
    for (int tile = threadIdx.x % omni::kWarp; tile < work.tiles; tile += omni::kWarp) {
      highest = max(highest, __float_as_int(__ldg(v_scale + tile)));
    }
#pragma unroll
    for (int offset = omni::kWarp / 2; offset > 0; offset /= 2) {
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, offset));
    }
    return highest >> 23;
  }

  // What weights of a tile are times 2 to, so that its values count as if they were in that unit.
  __device__ __forceinline__ float lift_of(float of_values, int highest) const {
    if constexpr (kApart) return 0.f;
    constexpr int kLeast = -20;  // below it nothing of the tile is left
    return static_cast<float>(max((__float_as_int(of_values) >> 23) - highest, kLeast));
  }

  // The weights of a tile whose values are still to be added up. The registers of a product may not change while it
  // runs, so neighbours have different ones.
  struct Flight {
    uint32_t weight[16];
    float decay[2];
    float of_values;
  };

  // The scores of a tile while the values of the one before are added up. Returns the unit of `out`.
  __device__ __forceinline__ float run(const Work& work, Lines& lines, float (&out)[64], Ring& ring) const {
    const int highest = kApart ? 0 : highest_of(work);
    Flight odd, even;
    begin(work, lines, even, ring, highest);
    int turn = 1;
    for (; turn + 1 < work.tiles; turn += 2) {
      step(work, lines, out, even, odd, ring, turn, highest);
      step(work, lines, out, odd, even, ring, turn + 1, highest);
    }
    if (turn < work.tiles) {
      step(work, lines, out, even, odd, ring, turn, highest);
      free_queries();
      end(out, odd, ring);
    } else {
      free_queries();
      end(out, even, ring);
    }
    ring.advance();
    return kApart ? 1.f : __int_as_float(highest << 23);
  }

  __device__ __forceinline__ void begin(const Work& work, Lines& lines, Flight& made, const Ring& ring,
                                        int highest) const {
    const float of_keys = __ldg(k_scale + work.tile_at(0));
    made.of_values = __ldg(v_scale + work.tile_at(0));
    int score[64];
    wait_keys(ring);
    omni::wgmma_fence();
    omni::start_scores(score, queries, keys_at(ring));
    omni::wgmma_commit();
    omni::wgmma_wait<0>(score);
    free_keys(ring);
    omni::weigh<true>(score, made.weight, made.decay, lines, of_keys, work.ragged(), lift_of(made.of_values, highest));
  }

  __device__ __forceinline__ void step(const Work& work, Lines& lines, float (&out)[64], Flight& now, Flight& next,
                                       Ring& ring, int turn, int highest) const {
    const float of_keys = __ldg(k_scale + work.tile_at(turn));
    next.of_values = __ldg(v_scale + work.tile_at(turn));
    Ring ahead = ring;
    ahead.advance();
    int score[64];
    wait_keys(ahead);
    wait_values(ring);
    if constexpr (kTurns) omni::named_sync(kFirstTurn + group, 2 * kGroup);
    omni::wgmma_fence(now.weight);
    omni::start_scores(score, queries, keys_at(ahead));
    omni::wgmma_commit();
    if constexpr (kApart) {
      float sum[64];
      omni::start_values(sum, now.weight, values_at(ring));
      omni::wgmma_commit();
      omni::wgmma_wait<1>(score);
      free_keys(ahead);
      omni::weigh<false>(score, next.weight, next.decay, lines, of_keys, 0, 0.f);
      pin(lines);
      omni::wgmma_wait_after<0>(sum, next.weight);
      free_values(ring);
      omni::add(out, sum, now.decay, now.of_values);
    } else {
      omni::start_more_values(out, now.weight, values_at(ring));
      omni::wgmma_commit();
      omni::wgmma_wait<1>(score);
      if constexpr (kTurns) {
        // from here on the other one's products run while weights are made
        omni::named_arrive(kFirstTurn + (group ^ 1), 2 * kGroup);
        wait_keys(ahead);  // done, but nothing is moved ahead of a branch
      }
      free_keys(ahead);
      omni::weigh<false>(score, next.weight, next.decay, lines, of_keys, 0, lift_of(next.of_values, highest));
      pin(lines);
      omni::wgmma_wait_after<0>(out, next.weight);
      free_values(ring);
      omni::fade(out, next.decay);
    }
    ring = ahead;
  }

  __device__ __forceinline__ void end(float (&out)[64], Flight& now, const Ring& ring) const {
    wait_values(ring);
    omni::wgmma_fence(now.weight);
    if constexpr (kApart) {
      float sum[64];
      omni::start_values(sum, now.weight, values_at(ring));
      omni::wgmma_commit();
      omni::wgmma_wait<0>(sum);
      omni::add(out, sum, now.decay, now.of_values);
    } else {
      omni::start_more_values(out, now.weight, values_at(ring));
      omni::wgmma_commit();
      omni::wgmma_wait<0>(out);
    }
    free_values(ring);
  }
};

// Of queries without keys.
__device__ __forceinline__ void store_zeros(const AttentionQ& call, const Work& work, int first) {
  const int queries = min(kTileQueries, work.queries - first), chunks = kHeadSize / omni::kPack;
  for (int i = threadIdx.x % kGroup; i < queries * chunks; i += kGroup) {
    const int64_t token = work.token + first + i / chunks;
    auto* to = static_cast<__nv_bfloat16*>(call.out) + (token * call.rows.heads + work.head) * kHeadSize;
    reinterpret_cast<uint4*>(to)[i % chunks] = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void store_lines(const AttentionQ& call, const Work& work, int group, int line,
                                            const Lines& lines, const float (&out)[64], float unit) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = lines.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = unit / sum;
    const int query = work.first + group * kTileQueries + line + 8 * r;
    if (query >= work.queries) continue;
    auto* to = static_cast<__nv_bfloat16*>(call.out) +
               ((work.token + query) * call.rows.heads + work.head) * kHeadSize + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float low = out[4 * j + 2 * r] * inverse, high = out[4 * j + 2 * r + 1] * inverse;
      *reinterpret_cast<uint32_t*>(to + 8 * j) = omni::bfloat16_pair(low, high);
    }
  }
}

template <int kGroups, AttentionPlan kPlan>
__device__ __forceinline__ void consume(const AttentionQ& call, int numbers, uint32_t room, int group) {
  const int thread = threadIdx.x % kGroup, line = thread / 32 * 16 + thread % 32 / 4;
  constexpr bool kTurns = kPlan == AttentionPlan::kTurns;
  static_assert(!kTurns || kGroups == 2);
  Ring ring;
  uint32_t parity = 0;
  if (kTurns && group == 1) omni::named_arrive(kFirstTurn, 2 * kGroup);  // the other one is the first
  for (int number = blockIdx.x; number < numbers; number += gridDim.x) {
    const Work work = work_at<kGroups>(call, number);
    if (!work.there()) continue;
    const int first = work.first + group * kTileQueries;
    if (work.keys == 0) {
      store_zeros(call, work, first);
      continue;
    }
    Lines lines;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool there = first + line + 8 * r < work.queries;
      const int64_t at = (work.q_tile + group) * kTileQueries + line + 8 * r;
      lines.factor[r] = there ? call.in.q_scale[at] * call.scale * 1.44269504f : 0.f;
      lines.most[r] = -INFINITY;
      lines.sum[r] = 0.f;
    }
    const Consumer<kGroups, kPlan> consumer{room, omni::lines_at(room + group * kQueryBytes), call.in.k_scale + work.k_tile,
                                     call.in.v_scale + work.k_tile, thread % 32 == 0, group};
    float out[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.f;
    omni::barrier_wait(room + Room<kGroups>::kQueriesFull, parity);
    parity ^= 1;
    const float unit = consumer.run(work, lines, out, ring);
    store_lines(call, work_at<kGroups>(call, number), group, line, lines, out, unit);  // found again: registers are short
  }
  // takes the last turn, which the second one has given
  if (kTurns && group == 0) omni::named_sync(kFirstTurn, 2 * kGroup);
}

template <int kGroups, AttentionPlan kPlan>
__global__ void __launch_bounds__((kGroups + 1) * kGroup, 1)
    attend(const __grid_constant__ AttentionQ call, int numbers) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using R = Room<kGroups>;
  extern __shared__ uint8_t shared[];
  const uint32_t room = (omni::shared_address(shared) + R::kAlign - 1) / R::kAlign * R::kAlign;
  if (threadIdx.x == 0) {
    omni::barrier_init(room + R::kQueriesFull, 1);
    omni::barrier_init(room + R::kQueriesFree, kGroups * 4);
    for (int stage = 0; stage < kStages; ++stage) {
      omni::barrier_init(room + R::kKeysFull + stage * kBarrier, 1);
      omni::barrier_init(room + R::kValuesFull + stage * kBarrier, 1);
      omni::barrier_init(room + R::kKeysFree + stage * kBarrier, kGroups * 4);
      omni::barrier_init(room + R::kValuesFree + stage * kBarrier, kGroups * 4);
    }
    omni::barrier_init_fence();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0) - 1;
  if (group < 0) {
    omni::fewer_registers<kGroups == 2 ? 24 : 32>();
    if (threadIdx.x == 0) copy_tiles<kGroups>(call, numbers, room);
  } else {
    omni::more_registers<kGroups == 2 ? 240 : 160>();
    consume<kGroups, kPlan>(call, numbers, room, group);
  }
#endif
}

template <int kGroups, AttentionPlan kPlan>
const char* launch(const AttentionQ& call, int processors, cudaStream_t stream) {
  constexpr uint32_t kBytes = Room<kGroups>::kAll;
  const int64_t numbers = tiles_of<kGroups>(call.rows) * call.rows.heads;
  if (numbers > INT32_MAX) return "more than 2^31 pieces of work";
  const int64_t blocks = call.persistent && processors < numbers ? processors : numbers;
  constexpr unsigned kThreads = (kGroups + 1) * kGroup;
  if (omni::resident_blocks(reinterpret_cast<const void*>(attend<kGroups, kPlan>), kThreads, kBytes) == 0) {
    return omni::no_block();
  }
  attend<kGroups, kPlan><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(call, static_cast<int>(numbers));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

extern "C" const char* omni_attention_q_cuda(const AttentionQ* call, void* stream) {
  const omni::Device device = omni::current_device();
  if (device.major != 9 || device.minor != 0) return "8-bit attention needs compute capability 9.0 (H100, H200)";
  if (call->rows.queries == 0) return nullptr;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (call->plan) {
    case AttentionPlan::kTogether:
      return launch<2, AttentionPlan::kTogether>(*call, device.processors, on);
    case AttentionPlan::kTurns:
      return launch<2, AttentionPlan::kTurns>(*call, device.processors, on);
    case AttentionPlan::kApart:
      return launch<2, AttentionPlan::kApart>(*call, device.processors, on);
  }
  return "unknown plan";
}
