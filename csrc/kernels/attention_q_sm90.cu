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
  static constexpr uint32_t kKeysFull = kQueriesFull + kBarrier;
  static constexpr uint32_t kKeysFree = kKeysFull + kStages * kBarrier;
  static constexpr uint32_t kValuesFull = kKeysFree + kStages * kBarrier;
  static constexpr uint32_t kValuesFree = kValuesFull + kStages * kBarrier;
  static constexpr uint32_t kPins = kValuesFree + kStages * kBarrier;  // a float of each warp, which nobody reads
  static constexpr uint32_t kEnd = kPins + (kGroups + 1) * 4 * 4;
  static constexpr uint32_t kAlign = 1024;
  static constexpr uint32_t kAll = kEnd + kAlign;
};

// What a block is to do.
struct Work {
  int first;         // query of the row
  int queries;       // of the row
  int keys;          // of the row
  int tiles;         // of its keys
  int64_t token;     // of the batch, the row's first query
  int64_t q_tile;    // of all heads, the block's first
  int64_t k_tile;    // of all heads, the row's first

  __device__ __forceinline__ int tile_at(int turn) const { return turn == 0 ? tiles - 1 : turn - 1; }  // ragged first
};

struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <int kGroups>
__device__ void copy_tiles(const AttentionQ& call, const Work& work, uint32_t room) {
  using R = Room<kGroups>;
  const int left = (work.queries - work.first + kTileQueries - 1) / kTileQueries;
  const uint32_t bytes = min(left, kGroups) * kQueryBytes;
  omni::barrier_expect(room + R::kQueriesFull, bytes);
  omni::bulk_load(room, call.in.q + work.q_tile * kQueryBytes, bytes, room + R::kQueriesFull);
  Ring ring;
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
  __device__ __forceinline__ void plain(const Work& work, Lines& lines, float (&out)[64]) const {
    const int left = work.keys - (work.tiles - 1) * kTileKeys;
    Ring ring;
    for (int turn = 0; turn < work.tiles; ++turn) {
      const float of_keys = __ldg(k_scale + work.tile_at(turn)), of_values = __ldg(v_scale + work.tile_at(turn));
      int score[64];
      wait_keys(ring);
      omni::wgmma_fence();
      omni::start_scores(score, queries, keys_at(ring));
      omni::wgmma_commit();
      omni::wgmma_wait<0>(score);
      free_keys(ring);
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
  __device__ __forceinline__ void overlapped(const Work& work, Lines& lines, float (&out)[64], int group) const {
    Flight odd, even;  // the registers of a product may not change while it runs, so weights are made in the other ones
    Ring ring;
    begin<kTurns>(work, lines, even, ring, group);
    int turn = 1;
    for (; turn + 1 < work.tiles; turn += 2) {
      step<kTurns>(work, lines, out, even, odd, ring, turn, group);
      step<kTurns>(work, lines, out, odd, even, ring, turn + 1, group);
    }
    if (turn < work.tiles) {
      step<kTurns>(work, lines, out, even, odd, ring, turn, group);
      end(out, odd, ring);
    } else {
      end(out, even, ring);
    }
  }

  // The weights of a tile whose values are still to be added up.
  struct Flight {
    uint32_t weight[16];
    float decay[2];
    float of_values;
  };

  template <bool kTurns>
  __device__ __forceinline__ void begin(const Work& work, Lines& lines, Flight& made, const Ring& ring,
                                        int group) const {
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
    if (kTurns && group == 1 && work.tiles > 1) omni::named_arrive(kFirstTurn, 2 * kGroup);
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
    // the last turn of the second group is followed by none of the first
    if (kTurns && (group == 0 || turn + 1 < work.tiles)) omni::named_arrive(kFirstTurn + (group ^ 1), 2 * kGroup);
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

template <int kGroups, AttentionPlan kPlan>
__device__ __forceinline__ void consume(const AttentionQ& call, const Work& work, uint32_t room, int group, int head,
                                        int kv_head) {
  const int thread = threadIdx.x % kGroup, line = thread / 32 * 16 + thread % 32 / 4;
  const int first = work.first + group * kTileQueries;
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
  omni::barrier_wait(room + Room<kGroups>::kQueriesFull, 0);
  if constexpr (kPlan == AttentionPlan::kPlain) {
    consumer.plain(work, lines, out);
  } else {
    consumer.template overlapped<kPlan == AttentionPlan::kPingPong>(work, lines, out, group);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = lines.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = 1.f / sum;
    const int query = first + line + 8 * r;
    if (query >= work.queries) continue;
    auto* to = static_cast<__nv_bfloat16*>(call.out) +
               ((work.token + query) * call.rows.heads + head) * kHeadSize + thread % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float low = out[4 * j + 2 * r] * inverse, high = out[4 * j + 2 * r + 1] * inverse;
      *reinterpret_cast<uint32_t*>(to + 8 * j) = omni::bfloat16_pair(low, high);
    }
  }
}

// Of queries without keys.
template <int kGroups>
__device__ void store_zeros(const AttentionQ& call, const Work& work, int head) {
  const int queries = min(kGroups * kTileQueries, work.queries - work.first), chunks = kHeadSize / omni::kPack;
  for (int i = threadIdx.x; i < queries * chunks; i += blockDim.x) {
    const int64_t token = work.token + work.first + i / chunks;
    auto* to = static_cast<__nv_bfloat16*>(call.out) + (token * call.rows.heads + head) * kHeadSize;
    reinterpret_cast<uint4*>(to)[i % chunks] = make_uint4(0, 0, 0, 0);
  }
}

template <int kGroups, AttentionPlan kPlan>
__global__ void __launch_bounds__((kGroups + 1) * kGroup, 1) attend(const __grid_constant__ AttentionQ call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using R = Room<kGroups>;
  constexpr int kQueries = kGroups * kTileQueries;
  extern __shared__ uint8_t shared[];
  const uint32_t room = (omni::shared_address(shared) + R::kAlign - 1) / R::kAlign * R::kAlign;
  const int rows = static_cast<int>(call.rows.rows);
  const omni::Tile tile = omni::find_tile(call.rows.cu_q, rows, kQueries, blockIdx.x);
  if (!tile.there()) return;
  const int head = blockIdx.y, kv_head = head / static_cast<int>(call.rows.heads / call.rows.kv_heads);
  Work work;
  work.first = tile.first;
  work.queries = tile.length;
  work.keys = call.rows.cu_k[tile.row + 1] - call.rows.cu_k[tile.row];
  work.tiles = (work.keys + kTileKeys - 1) / kTileKeys;
  work.token = call.rows.cu_q[tile.row];
  work.q_tile = head * call.in.q_tiles + omni::first_tile(call.rows.cu_q, tile.row, kTileQueries) +
                tile.number * kGroups;
  work.k_tile = kv_head * call.in.k_tiles + omni::first_tile(call.rows.cu_k, tile.row, kTileKeys);
  if (work.keys == 0) return store_zeros<kGroups>(call, work, head);
  if (threadIdx.x == 0) {
    omni::barrier_init(room + R::kQueriesFull, 1);
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
    if (threadIdx.x == 0) copy_tiles<kGroups>(call, work, room);
  } else {
    omni::more_registers<kGroups == 2 ? 240 : 160>();
    consume<kGroups, kPlan>(call, work, room, group, head, kv_head);
  }
#endif
}

template <int kGroups, AttentionPlan kPlan>
const char* launch(const AttentionQ& call, cudaStream_t stream) {
  constexpr uint32_t kBytes = Room<kGroups>::kAll;
  const int64_t tiles = call.rows.queries / (kGroups * kTileQueries) + call.rows.rows;
  cudaError_t error =
      cudaFuncSetAttribute(attend<kGroups, kPlan>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) {
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(call.rows.heads));
    attend<kGroups, kPlan><<<grid, (kGroups + 1) * kGroup, kBytes, stream>>>(call);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

extern "C" const char* omni_attention_q_cuda(const AttentionQ* call, void* stream) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return "8-bit attention needs compute capability 9.0 (H100, H200)";
  if (call->rows.queries == 0) return nullptr;
  if (call->rows.heads > 65535) return "more than 65535 heads";
  const auto on = static_cast<cudaStream_t>(stream);
  switch (call->plan) {
    case AttentionPlan::kPlain:
      return launch<2, AttentionPlan::kPlain>(*call, on);
    case AttentionPlan::kOverlapped:
      return launch<2, AttentionPlan::kOverlapped>(*call, on);
    case AttentionPlan::kPingPong:
      return launch<2, AttentionPlan::kPingPong>(*call, on);
  }
  return "no such plan";
}
