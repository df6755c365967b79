// The rope family where the device copies rows in bulk (common/bulk.cuh): bfloat16 heads of 128 channels. A block has a
// token at a time, with q, k, v of all its heads and the token's row of the table.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/bulk.cuh"
#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/rope.cuh"
#include "../common/rope.h"
#include "../common/rows.cuh"

namespace {

using omni::Code;
using omni::Codes;
using omni::kPack;
using omni::kUnit;
using omni::kWarp;
using omni::QkNorm;
using omni::QkNormRope;
using omni::QkvStream;

using X = __nv_bfloat16;

// What is stored: values, or codes with a scale of their own, or with one for each head of each row.
enum class Written { kValues, kTokenCodes, kRowCodes };

constexpr int kHead = 128;
constexpr int kLanes = kHead / kUnit;  // of a head
constexpr int kMostThreads = 512;
constexpr uint32_t kHeadBytes = kHead * sizeof(X);
constexpr int kRegisters = 80;  // of a thread

// Over the lanes of a head; every lane of the warp takes part.
[[maybe_unused]] __device__ __forceinline__ float head_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

[[maybe_unused]] __device__ __forceinline__ float head_max(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

[[maybe_unused]] __device__ __forceinline__ float sum_of(const float (&value)[2][kPack]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum += value[i / kPack][i % kPack];
  return sum;
}

[[maybe_unused]] __device__ __forceinline__ float squares_of(const float (&value)[2][kPack]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum = fmaf(value[i / kPack][i % kPack], value[i / kPack][i % kPack], sum);
  return sum;
}

__device__ __forceinline__ void turn(float& a, float& b, float cosine, float sine) {
  const float first = a;
  a = first * cosine - b * sine;
  b = b * cosine + first * sine;
}

[[maybe_unused]] __device__ __forceinline__ void turn(const omni::UnitPlace& unit, bool half, const float* table,
                                                      float (&value)[2][kPack]) {
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if (!unit.turns[which]) continue;
    const auto* from = reinterpret_cast<const float4*>(table + unit.turn_at[which]);
    const float4 turns[2] = {from[0], from[1]};
    if (half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * which + 2 * i;
        turn(value[0][at], value[1][at], turns[i].x, turns[i].y);
        turn(value[0][at + 1], value[1][at + 1], turns[i].z, turns[i].w);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        turn(value[which][4 * i], value[which][4 * i + 1], turns[i].x, turns[i].y);
        turn(value[which][4 * i + 2], value[which][4 * i + 3], turns[i].z, turns[i].w);
      }
    }
  }
}

[[maybe_unused]] __device__ __forceinline__ void affine(const QkNormRope& call, const QkvStream& stream, int which,
                                                        int start, const omni::UnitPlace& unit, float factor,
                                                        float (&value)[2][kPack]) {
#pragma unroll
  for (int pack = 0; pack < 2; ++pack) {
    float by[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) value[pack][i] *= factor;
    if (stream.weight[which] != nullptr) {
      omni::affine_pack(stream.weight[which], call.weight_dtype, start + unit.at[pack], by);
#pragma unroll
      for (int i = 0; i < kPack; ++i) value[pack][i] *= by[i];
    }
    if (stream.bias[which] != nullptr) {
      omni::affine_pack(stream.bias[which], call.weight_dtype, start + unit.at[pack], by);
#pragma unroll
      for (int i = 0; i < kPack; ++i) value[pack][i] += by[i];
    }
  }
}

// One head of q, k or v. `row` counts heads of the result; `inverse` is that of the scale of its row's codes. Every lane
// of the warp takes part.
template <Written kWritten>
__device__ __forceinline__ void store(const QkNormRope& call, int which, int64_t row, const omni::UnitPlace& unit,
                                      bool mine, float inverse, const float (&value)[2][kPack]) {
  if constexpr (kWritten == Written::kRowCodes) {
    if (!mine) return;
    uint8_t* out = static_cast<uint8_t*>(call.out[which]) + row * kHead;
#pragma unroll
    for (int pack = 0; pack < 2; ++pack) {
      *reinterpret_cast<uint2*>(out + unit.at[pack]) = omni::code_pack<Codes::kE4m3ByRow>(value[pack], inverse);
    }
  } else if constexpr (kWritten == Written::kValues) {
    if (!mine) return;
    X* out = static_cast<X*>(call.out[which]) + row * kHead;
    omni::store_pack(out + unit.at[0], value[0]);
    omni::store_pack(out + unit.at[1], value[1]);
  } else {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) most = fmaxf(most, fabsf(value[i / kPack][i % kPack]));
    most = head_max(most);
    if (!mine) return;
    const Code code = call.codes == Codes::kInt8 ? Code::kInt8 : Code::kFloat8;
    omni::RowScale scale(__float_as_uint(most), code);
    if (most == 0.f) scale.scale = 1.f;
    if (threadIdx.x % kLanes == 0) call.scale[which][row] = scale.scale;
#pragma unroll
    for (int pack = 0; pack < 2; ++pack) {
      omni::store_codes(call.out[which], row * kHead + unit.at[pack], value[pack], scale, code);
    }
  }
}

// Of one token in a stage: q of all heads, k, v where it moves, and the turns.
struct Layout {
  uint32_t k, v, turns, bytes;

  __host__ __device__ Layout(const QkNormRope& call, bool moves_v) {
    k = static_cast<uint32_t>(call.heads) * kHeadBytes;
    v = k + static_cast<uint32_t>(call.kv_heads) * kHeadBytes;
    turns = v + (moves_v ? v - k : 0);
    bytes = turns + static_cast<uint32_t>(call.pairs) * 2 * sizeof(float);
  }
};

// The calls of most blocks, at half the instructions: all of a head turns, by neighbours, as many heads of k as of q,
// and a norm with weights in bfloat16 alone.
bool is_plain(const QkNormRope& call) {
  bool plain = (call.norm == QkNorm::kRms || call.norm == QkNorm::kRmsAcross) && !call.half &&
               2 * call.pairs == kHead && call.heads == call.kv_heads && call.heads % (kWarp / kLanes) == 0 &&
               call.weight_dtype == omni::Dtype::kBFloat16;
  for (int64_t s = 0; s < call.stream_count; ++s) {
    const QkvStream& stream = call.streams[s];
    plain = plain && stream.weight[0] != nullptr && stream.weight[1] != nullptr && stream.bias[0] == nullptr &&
            stream.bias[1] == nullptr;
  }
  return plain;
}

// Of a token in a stage: where it goes, which row that is in, and whether it is that row's first.
struct Where {
  int64_t place;
  int32_t row;
  bool first;
};

// kMovesV: v goes into the result, too. kPlain: see is_plain.
template <QkNorm kNorm, Written kWritten, bool kMovesV, bool kPlain>
__global__ void __maxnreg__(kRegisters) rope_bulk(const __grid_constant__ QkNormRope call, uint32_t to_high) {
#ifdef OMNI_BULK
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[2];
  __shared__ Where wheres[2];
  __shared__ float2 squares[2][kMostThreads / kWarp];
  const Layout layout(call, kMovesV);
  omni::BulkStages stages(full, memory, layout.bytes);
  const int64_t step = gridDim.x;
  const auto place_at = [&](int64_t token) -> int64_t {
    if (token >= call.tokens) return 0;
    const QkvStream& stream = omni::stream_of(call, token);
    return omni::place_of(stream, token - stream.begin);
  };
  int64_t next_place = 0;  // of the first thread alone: read a token ahead, since a fetch needs it
  const auto fetch = [&](int64_t token, int stage) {
    if (threadIdx.x != 0 || token >= call.tokens) return;
    const QkvStream& stream = omni::stream_of(call, token);
    const int64_t at = token - stream.begin;
    omni::check_place(call, next_place);
    wheres[stage].place = next_place;
    if constexpr (kWritten == Written::kRowCodes) {
      const int64_t row = call.rows == 1 ? 0 : omni::row_of(call, next_place);
      wheres[stage].row = static_cast<int32_t>(row);
      wheres[stage].first = next_place == __ldg(call.cu + row);
    }
    stages.expect(stage, layout.bytes);
    stages.load(stage, 0, static_cast<const X*>(stream.q) + at * stream.q_stride, layout.k);
    stages.load(stage, layout.k, static_cast<const X*>(stream.k) + at * stream.k_stride, layout.v - layout.k);
    if constexpr (kMovesV) {
      stages.load(stage, layout.v, static_cast<const X*>(stream.v) + at * stream.v_stride, layout.v - layout.k);
    }
    if (call.pairs > 0) {
      stages.load(stage, layout.turns, call.table + next_place * call.pairs * 2, layout.bytes - layout.turns);
    }
    next_place = place_at(token + step);
  };
  if (threadIdx.x == 0) next_place = place_at(blockIdx.x);
  fetch(blockIdx.x, 0);

  const int head = threadIdx.x / kLanes;
  const bool mine[3] = {kPlain || head < call.heads, kPlain || head < call.kv_heads, kPlain || head < call.kv_heads};
  omni::UnitPlace unit(call, threadIdx.x % kLanes);
  if constexpr (kPlain) {
    for (int pack = 0; pack < 2; ++pack) {
      unit.at[pack] = unit.turn_at[pack] = threadIdx.x % kLanes * kPack + pack * (kHead / 2);
      unit.turns[pack] = true;
    }
  }
  [[maybe_unused]] int32_t row_of_inverse = -1;
  float inverse[3] = {0.f, 0.f, 0.f};
  for (int64_t token = blockIdx.x; token < call.tokens; token += step, stages.next()) {
    if constexpr (kNorm != QkNorm::kRmsAcross) {
      __syncthreads();  // everybody is done with the token before this one: its stage takes the one that comes next
      fetch(token + step, stages.stage() ^ 1);
    }
    const QkvStream& stream = omni::stream_of(call, token);
    const uint8_t* from = stages.wait();
    const int64_t place = wheres[stages.stage()].place;
    if constexpr (kWritten == Written::kRowCodes) {
      const int32_t of_row = wheres[stages.stage()].row;
      if (of_row != row_of_inverse) {
        row_of_inverse = of_row;
#pragma unroll
        for (int which = 0; which < 3; ++which) {
          const int shared_by = kPlain || which > 0 ? 1 : static_cast<int>(call.heads / call.kv_heads);
          if (!mine[which]) continue;
          const uint32_t peak = __ldg(call.peaks + omni::peak_at(call, which, of_row, head / shared_by));
          inverse[which] = omni::inverse_of(omni::row_scale(peak));
        }
      }
      if (wheres[stages.stage()].first) omni::store_row_scales(call, of_row, place);
    }
    const auto load = [&](int which, float (&value)[2][kPack]) {
      const uint32_t start = which == 0 ? 0u : which == 1 ? layout.k : layout.v;
      const auto* x = reinterpret_cast<const X*>(from + start) + head * kHead;
#pragma unroll
      for (int pack = 0; pack < 2; ++pack) {
        uint4 raw = make_uint4(0u, 0u, 0u, 0u);
        if (mine[which]) raw = *reinterpret_cast<const uint4*>(x + unit.at[pack]);
        omni::unpack_bfloat16(raw, to_high, value[pack]);
      }
    };
    float across[2] = {0.f, 0.f};
    if constexpr (kNorm == QkNorm::kRmsAcross) {
      float value[2][kPack];
      load(0, value);
      across[0] = omni::warp_sum(squares_of(value));
      load(1, value);
      across[1] = omni::warp_sum(squares_of(value));
      float2* parts = squares[stages.stage()];
      if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = make_float2(across[0], across[1]);
      __syncthreads();
      fetch(token + step, stages.stage() ^ 1);
      across[0] = across[1] = 0.f;
      for (int warp = 0; warp < blockDim.x / kWarp; ++warp) {
        across[0] += parts[warp].x;
        across[1] += parts[warp].y;
      }
      across[0] = rsqrtf(fmaf(across[0], 1.f / static_cast<float>(call.heads * kHead), call.eps));
      across[1] = rsqrtf(fmaf(across[1], 1.f / static_cast<float>(call.kv_heads * kHead), call.eps));
    }
    if constexpr (kMovesV) {
      const int64_t row = place * call.kv_heads + head;
      if constexpr (kWritten != Written::kValues) {
        float value[2][kPack];
        load(2, value);
        store<kWritten>(call, 2, row, unit, mine[2], inverse[2], value);
      } else if (mine[2]) {
        const auto* v = reinterpret_cast<const X*>(from + layout.v) + head * kHead;
        X* out = static_cast<X*>(call.out[2]) + row * kHead;
#pragma unroll
        for (const int at : unit.at) *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<const uint4*>(v + at);
      }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int64_t row = place * (kPlain || which == 0 ? call.heads : call.kv_heads) + head;
      float value[2][kPack];
      load(which, value);
      if constexpr (kNorm == QkNorm::kLayer) {
        const float mean = head_sum(sum_of(value)) * (1.f / kHead);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) value[i / kPack][i % kPack] -= mean;
      }
      if constexpr (kNorm != QkNorm::kNone) {
        float factor = across[which];
        if constexpr (kNorm != QkNorm::kRmsAcross) {
          factor = rsqrtf(fmaf(head_sum(squares_of(value)), 1.f / kHead, call.eps));
        }
        const int start = kNorm == QkNorm::kRmsAcross ? head * kHead : 0;
        if constexpr (kPlain) {
          const auto* weight = static_cast<const X*>(stream.weight[which]) + start;
#pragma unroll
          for (int pack = 0; pack < 2; ++pack) {
            float by[kPack];
            omni::unpack_bfloat16(__ldg(reinterpret_cast<const uint4*>(weight + unit.at[pack])), to_high, by);
#pragma unroll
            for (int i = 0; i < kPack; ++i) value[pack][i] *= factor * by[i];
          }
        } else if (mine[which]) {
          affine(call, stream, which, start, unit, factor, value);
        }
      }
      if (kPlain || call.pairs > 0) {
        turn(unit, !kPlain && call.half, reinterpret_cast<const float*>(from + layout.turns), value);
      }
      store<kWritten>(call, which, row, unit, mine[which], inverse[which], value);
    }
  }
#endif
}

using Kernel = void (*)(QkNormRope, uint32_t);

template <Written kWritten, bool kMovesV>
Kernel kernel_of(const QkNormRope& call) {
  constexpr Kernel kernels[] = {
      rope_bulk<QkNorm::kNone, kWritten, kMovesV, false>,
      rope_bulk<QkNorm::kRms, kWritten, kMovesV, false>,
      rope_bulk<QkNorm::kRmsAcross, kWritten, kMovesV, false>,
      rope_bulk<QkNorm::kLayer, kWritten, kMovesV, false>,
  };
  if (!is_plain(call)) return kernels[static_cast<int>(call.norm)];
  return call.norm == QkNorm::kRms ? rope_bulk<QkNorm::kRms, kWritten, kMovesV, true>
                                   : rope_bulk<QkNorm::kRmsAcross, kWritten, kMovesV, true>;
}

bool moves_v(const QkNormRope& call) { return call.streams[0].v != nullptr; }

unsigned threads_of(const QkNormRope& call) {
  return static_cast<unsigned>((call.heads * kLanes + kWarp - 1) / kWarp * kWarp);
}

}  // namespace

bool omni::rope_fits_bulk(const QkNormRope& call) {
  return call.x_dtype == omni::Dtype::kBFloat16 && call.head_size == kHead &&
         call.heads <= kMostThreads / kLanes && call.tokens > 0 && omni::fits_bulk(Layout(call, moves_v(call)).bytes);
}

const char* omni::launch_rope_bulk(const QkNormRope& call, cudaStream_t stream) {
  const Kernel kernel = call.codes == Codes::kE4m3ByRow ? kernel_of<Written::kRowCodes, true>(call)
                        : call.codes != Codes::kNone    ? kernel_of<Written::kTokenCodes, true>(call)
                        : moves_v(call)                 ? kernel_of<Written::kValues, true>(call)
                                                        : kernel_of<Written::kValues, false>(call);
  return omni::launch_bulk(kernel, call, threads_of(call), Layout(call, moves_v(call)).bytes, stream);
}
