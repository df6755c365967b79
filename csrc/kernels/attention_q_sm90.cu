// 8-bit attention on Hopper: int8 scores, e4m3 weights and values, softmax and sums in float32.
//
// A block has 64 queries of one head for each of its warpgroups but the first, of which one thread copies tiles of keys
// and values to shared memory, ahead of the others, which compute. Online softmax as in FlashAttention-3
// (https://arxiv.org/abs/2407.08608), its weights times 2^8 so that e4m3 holds small ones; what the keys of a tile add
// is made in registers of its own and then added in float32, since Hopper's 8-bit products add up with few bits.
#include <cuda_fp8.h>

#include <climits>

#include "../common/attention_q.h"
#include "../common/device.cuh"
#include "packed_rows.cuh"
#include "wgmma8.cuh"

namespace {

using omni::AttentionPlan;
using omni::AttentionQ;
using omni::kHeadSize;
using omni::kTileKeys;
using omni::kTileQueries;

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kStages = 4;
constexpr uint32_t kQueryBytes = kTileQueries * kHeadSize;
constexpr uint32_t kTileBytes = kTileKeys * kHeadSize;
constexpr int kBarrier = 8;    // bytes
constexpr float kWeight = 8;   // weights of e4m3 are times 2 to this
constexpr int kFirstTurn = 1;  // named barrier; 0 is that of the block
constexpr int kHidden = -(1 << 30);  // a score below all others

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
};

// Neighbours have the same keys, of which the L2 cache then holds one copy.
template <int kGroups>
__device__ __forceinline__ Work work_at(const AttentionQ& call, int64_t number) {
  const auto& rows = call.rows;
  const int each = tiles_of<kGroups>(rows), kv_group = static_cast<int>(rows.heads / rows.kv_heads);
  const int head = static_cast<int>(number / each);
  const omni::Tile tile = omni::find_tile(rows.cu_q, static_cast<int>(rows.rows), kGroups * kTileQueries,
                                          static_cast<int>(number - static_cast<int64_t>(head) * each));
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
__device__ void copy_tiles(const AttentionQ& call, int64_t numbers, uint32_t room) {
  using R = Room<kGroups>;
  Ring ring;
  uint32_t parity = 0;
  for (int64_t number = blockIdx.x; number < numbers; number += gridDim.x) {
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

// --- softmax ---------------------------------------------------------------------------------------------------------

// A thread has, of 64 lines and 128 columns, lines l and l + 8 with l = 16 * warp + lane / 4; element 4 j + 2 r + e is
// of line l + 8 r and column 8 j + 2 * (lane % 4) + e.
struct Lines {
  float most[2];    // of the scores so far, in the exponent of 2
  float sum[2];     // of this thread's weights
  float factor[2];  // from a score, over the scale of the keys, to the exponent of 2
};

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t e4m3_codes(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// Scores to weights, as the product with the values takes them: of 16 keys, the thread's 4 are side by side there.
// `decay` is what comes to what has been added up so far. Where kRagged, `left` keys are there.
template <bool kRagged>
__device__ __forceinline__ void weigh(int (&score)[64], uint32_t (&weight)[16], float (&decay)[2], Lines& lines,
                                      float k_scale, int left) {
  const int column = threadIdx.x % 4 * 2;
  if constexpr (kRagged) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i / 4 * 8 + column + i % 2 >= left) score[i] = kHidden;
    }
  }
  int most[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
#pragma unroll
  for (int i = 0; i < 64; ++i) most[i % 4] = max(most[i % 4], score[i]);
  float factor[2], shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int top = max(most[2 * r], most[2 * r + 1]);
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
    factor[r] = lines.factor[r] * k_scale;
    const float now = fmaxf(lines.most[r], static_cast<float>(top) * factor[r]);
    decay[r] = exp2_of(lines.most[r] - now);
    lines.most[r] = now;
    shift[r] = kWeight - now;
  }
  float sum[4] = {};
#pragma unroll
  for (int link = 0; link < 4; ++link) {
    float e[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = i / 2 % 2;
      e[i] = exp2_of(fmaf(static_cast<float>(score[16 * link + i]), factor[r], shift[r]));
      if constexpr (kRagged) {
        if (link * 32 + i / 4 * 8 + column + i % 2 >= left) e[i] = 0.f;
      }
      sum[i % 4] += e[i];
    }
    weight[4 * link] = e4m3_codes(e[0], e[1], e[4], e[5]);
    weight[4 * link + 1] = e4m3_codes(e[2], e[3], e[6], e[7]);
    weight[4 * link + 2] = e4m3_codes(e[8], e[9], e[12], e[13]);
    weight[4 * link + 3] = e4m3_codes(e[10], e[11], e[14], e[15]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) lines.sum[r] = fmaf(lines.sum[r], decay[r], sum[2 * r] + sum[2 * r + 1]);
}

__device__ __forceinline__ void add(float (&out)[64], const float (&made)[64], const float (&decay)[2], float scale) {
  if (__all_sync(0xffffffffu, decay[0] == 1.f && decay[1] == 1.f)) {
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = fmaf(made[i], scale, out[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = fmaf(made[i], scale, out[i] * decay[i / 2 % 2]);
  }
}

// --- a warpgroup -----------------------------------------------------------------------------------------------------

template <int kGroups>
struct Consumer {
  using R = Room<kGroups>;
  uint32_t room;
  uint64_t queries;  // its descriptor
  const float* k_scale;
  const float* v_scale;
  bool speaks;  // one thread of each warp

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

  // One product after the other; warpgroups overlap as it comes.
  __device__ __forceinline__ void plain(const Work& work, Lines& lines, float (&out)[64], Ring& ring) const {
    const int left = work.keys - (work.tiles - 1) * kTileKeys;
    for (int turn = 0; turn < work.tiles; ++turn) {
      const float of_keys = __ldg(k_scale + work.tile_at(turn)), of_values = __ldg(v_scale + work.tile_at(turn));
      int score[64];
      wait_keys(ring);
      omni::wgmma_fence();
      omni::start_scores(score, queries, keys_at(ring));
      omni::wgmma_commit();
      omni::wgmma_wait<0>(score);
      free_keys(ring);
      if (turn + 1 == work.tiles) free_queries();
      uint32_t weight[16];
      float decay[2], made[64];
      if (turn == 0) {
        weigh<true>(score, weight, decay, lines, of_keys, left);
      } else {
        weigh<false>(score, weight, decay, lines, of_keys, left);
      }
      wait_values(ring);
      omni::wgmma_fence(weight);
      omni::start_values(made, weight, values_at(ring));
      omni::wgmma_commit();
      omni::wgmma_wait<0>(made);
      free_values(ring);
      add(out, made, decay, of_values);
      ring.advance();
    }
  }

  // The scores of a tile while the values of the one before are added up. With kTurns, the two warpgroups start their
  // products in turns, so that one computes weights while the other's products run.
  template <bool kTurns>
  __device__ __forceinline__ void overlapped(const Work& work, Lines& lines, float (&out)[64], Ring& ring,
                                             int group) const {
    Flight odd, even;  // the registers of a product may not change while it runs, so weights are made in the other ones
    begin(work, lines, even, ring);
    int turn = 1;
    for (; turn + 1 < work.tiles; turn += 2) {
      step<kTurns>(work, lines, out, even, odd, ring, turn, group);
      step<kTurns>(work, lines, out, odd, even, ring, turn + 1, group);
    }
    if (turn < work.tiles) {
      step<kTurns>(work, lines, out, even, odd, ring, turn, group);
      free_queries();
      end(out, odd, ring);
    } else {
      free_queries();
      end(out, even, ring);
    }
    ring.advance();
  }

  // The weights of a tile whose values are still to be added up.
  struct Flight {
    uint32_t weight[16];
    float decay[2];
    float of_values;
  };

  __device__ __forceinline__ void begin(const Work& work, Lines& lines, Flight& made, const Ring& ring) const {
    const float of_keys = __ldg(k_scale + work.tile_at(0));
    made.of_values = __ldg(v_scale + work.tile_at(0));
    int score[64];
    wait_keys(ring);
    omni::wgmma_fence();
    omni::start_scores(score, queries, keys_at(ring));
    omni::wgmma_commit();
    omni::wgmma_wait<0>(score);
    free_keys(ring);
    weigh<true>(score, made.weight, made.decay, lines, of_keys, work.keys - (work.tiles - 1) * kTileKeys);
  }

  template <bool kTurns>
  __device__ __forceinline__ void step(const Work& work, Lines& lines, float (&out)[64], Flight& now, Flight& next,
                                       Ring& ring, int turn, int group) const {
    const float of_keys = __ldg(k_scale + work.tile_at(turn));
    next.of_values = __ldg(v_scale + work.tile_at(turn));
    Ring ahead = ring;
    ahead.advance();
    int score[64];
    float sum[64];
    wait_keys(ahead);
    wait_values(ring);
    if constexpr (kTurns) omni::named_sync(kFirstTurn + group, 2 * kGroup);
    omni::wgmma_fence(now.weight);
    omni::start_scores(score, queries, keys_at(ahead));
    omni::wgmma_commit();
    omni::start_values(sum, now.weight, values_at(ring));
    omni::wgmma_commit();
    if constexpr (kTurns) omni::named_arrive(kFirstTurn + (group ^ 1), 2 * kGroup);
    omni::wgmma_wait<1>(score);
    free_keys(ahead);
    weigh<false>(score, next.weight, next.decay, lines, of_keys, kTileKeys);
    pin(lines);
    omni::wgmma_wait_after<0>(sum, next.weight);
    free_values(ring);
    add(out, sum, now.decay, now.of_values);
    ring = ahead;
  }

  __device__ __forceinline__ void end(float (&out)[64], Flight& now, const Ring& ring) const {
    float sum[64];
    wait_values(ring);
    omni::wgmma_fence(now.weight);
    omni::start_values(sum, now.weight, values_at(ring));
    omni::wgmma_commit();
    omni::wgmma_wait<0>(sum);
    free_values(ring);
    add(out, sum, now.decay, now.of_values);
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

__device__ __forceinline__ void store_lines(const AttentionQ& call, const Work& work, int first, int line,
                                            const Lines& lines, const float (&out)[64]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = lines.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = 1.f / sum;
    const int query = first + line + 8 * r;
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
__device__ __forceinline__ void consume(const AttentionQ& call, int64_t numbers, uint32_t room, int group) {
  constexpr bool kTurns = kPlan == AttentionPlan::kPingPong;
  const int thread = threadIdx.x % kGroup, line = thread / 32 * 16 + thread % 32 / 4;
  Ring ring;
  uint32_t parity = 0;
  if (kTurns && group == 1) omni::named_arrive(kFirstTurn, 2 * kGroup);
  for (int64_t number = blockIdx.x; number < numbers; number += gridDim.x) {
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
    const Consumer<kGroups> consumer{room, omni::lines_at(room + group * kQueryBytes), call.in.k_scale + work.k_tile,
                                     call.in.v_scale + work.k_tile, thread % 32 == 0};
    float out[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.f;
    omni::barrier_wait(room + Room<kGroups>::kQueriesFull, parity);
    parity ^= 1;
    if constexpr (kPlan == AttentionPlan::kPlain) {
      consumer.plain(work, lines, out, ring);
    } else {
      consumer.template overlapped<kTurns>(work, lines, out, ring, group);
    }
    store_lines(call, work, first, line, lines, out);
  }
  // takes the last turn, which the second group has given
  if (kTurns && group == 0) omni::named_sync(kFirstTurn, 2 * kGroup);
}

template <int kGroups, AttentionPlan kPlan>
__global__ void __launch_bounds__((kGroups + 1) * kGroup, 1)
    attend(const __grid_constant__ AttentionQ call, int64_t numbers) {
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
  const int64_t blocks = call.persistent && processors < numbers ? processors : numbers;
  cudaError_t error =
      cudaFuncSetAttribute(attend<kGroups, kPlan>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) {
    attend<kGroups, kPlan><<<static_cast<unsigned>(blocks), (kGroups + 1) * kGroup, kBytes, stream>>>(call, numbers);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

extern "C" const char* omni_attention_q_cuda(const AttentionQ* call, void* stream) {
  int device = 0, major = 0, minor = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (major != 9 || minor != 0) return "8-bit attention needs compute capability 9.0 (H100, H200)";
  if (call->rows.queries == 0) return nullptr;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (call->plan) {
    case AttentionPlan::kPlain:
      return launch<2, AttentionPlan::kPlain>(*call, processors, on);
    case AttentionPlan::kOverlapped:
      return launch<2, AttentionPlan::kOverlapped>(*call, processors, on);
    case AttentionPlan::kPingPong:
      return launch<2, AttentionPlan::kPingPong>(*call, processors, on);
  }
  return "no such plan";
}
