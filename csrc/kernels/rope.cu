// The rope family on CUDA: one block for each token, with q, k and v of all its heads.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/rope.cuh"
#include "../common/rope.h"

namespace {

using omni::check_place;
using omni::code_of;
using omni::Codes;
using omni::kLargest;
using omni::kPack;
using omni::kUnit;
using omni::kWarp;
using omni::QkNorm;
using omni::QkNormRope;
using omni::QkvStream;
using omni::stream_of;

constexpr int kMaxThreads = 384;

// Blocks of the largest size that a multiprocessor has room for: caps registers where that costs no spills.
template <class X, QkNorm kNorm, Codes kCodes>
constexpr int kBlocks =
    sizeof(X) == 2 && kNorm != QkNorm::kNone &&
            (kCodes == Codes::kNone || (kCodes == Codes::kE4m3ByRow && kNorm != QkNorm::kLayer))
        ? 2
        : 1;

// --- what both kernels do --------------------------------------------------------------------------------------------

struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Most {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// Over `lanes` neighbours, a power of two; every lane of the warp takes part.
template <class Of>
__device__ __forceinline__ float over_lanes(float value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value = Of::of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// --- packs -----------------------------------------------------------------------------------------------------------

// A thread has a unit of a head: two packs, far enough apart that neighbours read neighbouring packs, and such that in
// the pairing by halves the second pack has the partners of the first.
template <class X>
struct Raw {
  static constexpr int kWords = sizeof(X) * kPack / 16;
  uint4 words[2][kWords];

  __device__ __forceinline__ void load(const X* first, const X* second) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[0][i] = omni::Streamed::load(reinterpret_cast<const uint4*>(first) + i);
      words[1][i] = omni::Streamed::load(reinterpret_cast<const uint4*>(second) + i);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[0][i] = words[1][i] = make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void store(X* first, X* second) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      reinterpret_cast<uint4*>(first)[i] = words[0][i];
      reinterpret_cast<uint4*>(second)[i] = words[1][i];
    }
  }

  __device__ __forceinline__ void unpack(float (&value)[2][kPack]) const {
#pragma unroll
    for (int pack = 0; pack < 2; ++pack) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t raw[4] = {words[pack][i].x, words[pack][i].y, words[pack][i].z, words[pack][i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kWords == 2) {
            value[pack][4 * i + j] = __uint_as_float(raw[j]);
          } else {
            value[pack][2 * j] = __uint_as_float(raw[j] << 16);
            value[pack][2 * j + 1] = __uint_as_float(raw[j] & 0xffff0000u);
          }
        }
      }
    }
  }
};

// What a thread does is the same for every head: its channels, and the turns of its pairs.
struct Unit : omni::UnitPlace {
  float turn[2 * kPack];

  __device__ __forceinline__ Unit(const QkNormRope& call, int lane) : UnitPlace(call, lane) {}

  __device__ __forceinline__ void load_turns(const QkNormRope& call, int64_t place) {
    const float* table = call.table + place * call.pairs * 2;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (!turns[which]) continue;
      const auto* from = reinterpret_cast<const float4*>(table + turn_at[which]);
      const float4 low = __ldg(from), high = __ldg(from + 1);
      float* to = turn + which * kPack;
      to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
      to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
  }

  __device__ __forceinline__ void apply(bool half, float (&value)[2][kPack]) const {
    if (half) {
      if (!turns[0]) return;
#pragma unroll
      for (int i = 0; i < kPack; ++i) pair(value[0][i], value[1][i], i);
    } else {
#pragma unroll
      for (int pack = 0; pack < 2; ++pack) {
        if (!turns[pack]) continue;
#pragma unroll
        for (int i = 0; i < kPack / 2; ++i) pair(value[pack][2 * i], value[pack][2 * i + 1], pack * kPack / 2 + i);
      }
    }
  }

  __device__ __forceinline__ void pair(float& a, float& b, int i) const {
    const float cosine = turn[2 * i], sine = turn[2 * i + 1], first = a;
    a = first * cosine - b * sine;
    b = b * cosine + first * sine;
  }
};

__device__ __forceinline__ float sum_of(const float (&value)[2][kPack]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum += value[i / kPack][i % kPack];
  return sum;
}

__device__ __forceinline__ float squares_of(const float (&value)[2][kPack]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum += value[i / kPack][i % kPack] * value[i / kPack][i % kPack];
  return sum;
}

template <class X, Codes kCodes>
__device__ __forceinline__ void store_unit(const QkNormRope& call, int which, int heads, const Unit& unit,
                                           int64_t place, int head, int lanes, bool mine, int64_t of_row,
                                           const float (&value)[2][kPack]) {
  const int64_t row = (place * heads + head) * call.head_size;
  if constexpr (kCodes == Codes::kNone) {
    if (!mine) return;
    X* out = static_cast<X*>(call.out[which]) + row;
    omni::store_pack(out + unit.at[0], value[0]);
    omni::store_pack(out + unit.at[1], value[1]);
  } else {
    float inverse;  // and no division for each of the values
    if constexpr (kCodes == Codes::kE4m3ByRow) {
      if (!mine) return;
      const int64_t kv_head = head / (heads / static_cast<int>(call.kv_heads));
      inverse = omni::inverse_of(omni::row_scale(__ldg(call.peaks + omni::peak_at(call, which, of_row, kv_head))));
    } else {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) most = fmaxf(most, fabsf(value[i / kPack][i % kPack]));
      most = over_lanes<Most>(most, lanes);
      if (!mine) return;
      const float scale = most > 0.f ? most / kLargest<kCodes> : 1.f;
      if (threadIdx.x % lanes == 0) call.scale[which][place * heads + head] = scale;
      inverse = 1.f / scale;
    }
    uint8_t* out = static_cast<uint8_t*>(call.out[which]) + row;
#pragma unroll
    for (int pack = 0; pack < 2; ++pack) {
      *reinterpret_cast<uint2*>(out + unit.at[pack]) = omni::code_pack<kCodes>(value[pack], inverse);
    }
  }
}

// Norms, turns and stores one head of q or k. `across` is the factor of a norm across heads.
template <class X, QkNorm kNorm, Codes kCodes>
__device__ __forceinline__ void finish(const QkNormRope& call, const QkvStream& stream, int which, int heads,
                                       const Unit& unit, int64_t place, int head, int lanes, bool mine,
                                       int64_t of_row, const Raw<X>& raw, float across) {
  const float size = static_cast<float>(call.head_size);
  float value[2][kPack];
  raw.unpack(value);
  float factor = across;
  if constexpr (kNorm == QkNorm::kLayer) {
    const float mean = over_lanes<Sum>(sum_of(value), lanes) / size;
    // a lane without channels has none to centre
#pragma unroll
    for (int i = 0; i < kUnit; ++i) value[i / kPack][i % kPack] -= mine ? mean : 0.f;
  }
  if constexpr (kNorm == QkNorm::kLayer || kNorm == QkNorm::kRms) {
    factor = rsqrtf(over_lanes<Sum>(squares_of(value), lanes) / size + call.eps);
  }
  if constexpr (kNorm != QkNorm::kNone) {
    const int start = kNorm == QkNorm::kRmsAcross ? head * static_cast<int>(call.head_size) : 0;
#pragma unroll
    for (int pack = 0; pack < 2; ++pack) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) value[pack][i] *= factor;
      float affine[kPack];
      if (mine && stream.weight[which] != nullptr) {
        omni::affine_pack(stream.weight[which], call.weight_dtype, start + unit.at[pack], affine);
#pragma unroll
        for (int i = 0; i < kPack; ++i) value[pack][i] *= affine[i];
      }
      if (mine && stream.bias[which] != nullptr) {
        omni::affine_pack(stream.bias[which], call.weight_dtype, start + unit.at[pack], affine);
#pragma unroll
        for (int i = 0; i < kPack; ++i) value[pack][i] += affine[i];
      }
    }
  }
  if (mine) unit.apply(call.half, value);
  store_unit<X, kCodes>(call, which, heads, unit, place, head, lanes, mine, of_row, value);
}

// `lanes` threads have a head, of which the first head_size / kUnit have channels. A block holds as many heads as it
// has lanes for, and takes several rounds for more of them; a norm across heads has all of them in one.
template <class X, QkNorm kNorm, Codes kCodes>
__global__ void __launch_bounds__(kMaxThreads, kBlocks<X, kNorm, kCodes>)
    qk_norm_rope_packed(const __grid_constant__ QkNormRope call, int lanes) {
  __shared__ float scratch[2][kMaxThreads / kWarp];
  const QkvStream& stream = stream_of(call, blockIdx.x);
  const int64_t token = blockIdx.x - stream.begin, place = omni::place_of(stream, token);
  const int lane = threadIdx.x % lanes, step = blockDim.x / lanes;
  const int heads = static_cast<int>(call.heads), kv_heads = static_cast<int>(call.kv_heads);
  const int size = static_cast<int>(call.head_size);
  const bool has_channels = lane < size / kUnit;
  const X* q = static_cast<const X*>(stream.q) + token * stream.q_stride;
  const X* k = static_cast<const X*>(stream.k) + token * stream.k_stride;
  const X* v = static_cast<const X*>(stream.v) + token * stream.v_stride;
  Unit unit(call, lane);
  int64_t of_row = 0;

  for (int first = 0; first < heads; first += step) {
    const int head = first + threadIdx.x / lanes, at = head * size;
    const bool has_q = has_channels && head < heads, has_k = has_channels && head < kv_heads;
    Raw<X> raw_q, raw_k, raw_v;
    raw_q.clear();
    raw_k.clear();
    raw_v.clear();
    if (has_q) raw_q.load(q + at + unit.at[0], q + at + unit.at[1]);
    if (has_k) raw_k.load(k + at + unit.at[0], k + at + unit.at[1]);
    if (has_k && stream.v != nullptr) raw_v.load(v + at + unit.at[0], v + at + unit.at[1]);
    if (first == 0) {
      // only here is the place waited for, with all of that under way
      check_place(call, place);
      unit.load_turns(call, place);
      if constexpr (kCodes == Codes::kE4m3ByRow) {
        of_row = omni::row_of(call, place);
        omni::store_row_scales(call, of_row, place);
      }
    }
    if (stream.v != nullptr) {
      if constexpr (kCodes == Codes::kNone) {
        X* out = static_cast<X*>(call.out[2]) + place * kv_heads * size + at;
        if (has_k) raw_v.store(out + unit.at[0], out + unit.at[1]);
      } else {
        float value[2][kPack];
        raw_v.unpack(value);
        store_unit<X, kCodes>(call, 2, kv_heads, unit, place, head, lanes, has_k, of_row, value);
      }
    }
    float factor_q = 1.f, factor_k = 1.f;
    if constexpr (kNorm == QkNorm::kRmsAcross) {
      float value[2][kPack];
      raw_q.unpack(value);
      const float squares_q = omni::block_sum(squares_of(value), scratch[0]);
      raw_k.unpack(value);
      const float squares_k = omni::block_sum(squares_of(value), scratch[1]);
      factor_q = rsqrtf(squares_q / static_cast<float>(heads * size) + call.eps);
      factor_k = rsqrtf(squares_k / static_cast<float>(kv_heads * size) + call.eps);
    }
    finish<X, kNorm, kCodes>(call, stream, 0, heads, unit, place, head, lanes, has_q, of_row, raw_q,
                             factor_q);
    finish<X, kNorm, kCodes>(call, stream, 1, kv_heads, unit, place, head, lanes, has_k, of_row, raw_k,
                             factor_k);
  }
}

// --- any width and any alignment -------------------------------------------------------------------------------------

// A warp for each head; reads a head several times, from L2 after the first.
template <class X>
struct ScalarHead {
  const QkNormRope& call;
  const QkvStream& stream;
  const X* x;  // the head
  const float* table;
  int which;
  int64_t start;  // of the head's channels in weights and biases
  float mean;
  float factor;

  __device__ __forceinline__ float normed(int64_t c) const {
    float value = (omni::to_float(x[c]) - mean) * factor;
    if (which == 2) return value;
    if (stream.weight[which] != nullptr) value *= omni::affine_at(stream.weight[which], call.weight_dtype, start + c);
    if (stream.bias[which] != nullptr) value += omni::affine_at(stream.bias[which], call.weight_dtype, start + c);
    return value;
  }

  __device__ __forceinline__ float turned(int64_t c) const {
    if (which == 2 || c >= 2 * call.pairs) return normed(c);
    const bool second = call.half ? c >= call.pairs : c % 2 == 1;
    const int64_t pair = !call.half ? c / 2 : second ? c - call.pairs : c;
    const int64_t partner = call.half ? (second ? c - call.pairs : c + call.pairs) : (second ? c - 1 : c + 1);
    const float cosine = table[2 * pair], sine = table[2 * pair + 1];
    return second ? normed(c) * cosine + normed(partner) * sine : normed(c) * cosine - normed(partner) * sine;
  }
};

template <class X, Codes kCodes>
__global__ void __launch_bounds__(kMaxThreads) qk_norm_rope_scalar(const __grid_constant__ QkNormRope call) {
  __shared__ float scratch[2][kMaxThreads / kWarp];
  const QkvStream& stream = stream_of(call, blockIdx.x);
  const int64_t token = blockIdx.x - stream.begin, place = omni::place_of(stream, token), size = call.head_size;
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const void* const from[3] = {stream.q, stream.k, stream.v};
  const int64_t strides[3] = {stream.q_stride, stream.k_stride, stream.v_stride};
  check_place(call, place);
  int64_t of_row = 0;
  if constexpr (kCodes == Codes::kE4m3ByRow) {
    of_row = omni::row_of(call, place);
    omni::store_row_scales(call, of_row, place);
  }

#pragma unroll
  for (int which = 0; which < 3; ++which) {
    if (from[which] == nullptr) continue;
    const int64_t heads = which == 0 ? call.heads : call.kv_heads;
    const X* x = static_cast<const X*>(from[which]) + token * strides[which];
    ScalarHead<X> head{call, stream, x, call.table + place * call.pairs * 2, which, 0, 0.f, 1.f};
    if (which < 2 && call.norm == QkNorm::kRmsAcross) {
      float squares = 0.f;
      for (int64_t c = threadIdx.x; c < heads * size; c += blockDim.x) {
        squares += omni::to_float(x[c]) * omni::to_float(x[c]);
      }
      const float sum = omni::block_sum(squares, scratch[which]);
      head.factor = rsqrtf(sum / static_cast<float>(heads * size) + call.eps);
    }
    for (int64_t h = threadIdx.x / kWarp; h < heads; h += warps) {
      head.x = x + h * size;
      if (call.norm == QkNorm::kRmsAcross) head.start = h * size;
      if (which < 2 && call.norm == QkNorm::kLayer) {
        float sum = 0.f;
        for (int64_t c = lane; c < size; c += kWarp) sum += omni::to_float(head.x[c]);
        head.mean = over_lanes<Sum>(sum, kWarp) / static_cast<float>(size);
      }
      if (which < 2 && (call.norm == QkNorm::kLayer || call.norm == QkNorm::kRms)) {
        float squares = 0.f;
        for (int64_t c = lane; c < size; c += kWarp) {
          const float centred = omni::to_float(head.x[c]) - head.mean;
          squares += centred * centred;
        }
        head.factor = rsqrtf(over_lanes<Sum>(squares, kWarp) / static_cast<float>(size) + call.eps);
      }
      const int64_t row = place * heads + h;
      if constexpr (kCodes == Codes::kNone) {
        X* out = static_cast<X*>(call.out[which]) + row * size;
        for (int64_t c = lane; c < size; c += kWarp) omni::store(out + c, head.turned(c));
      } else if constexpr (kCodes == Codes::kE4m3ByRow) {
        const int64_t at = omni::peak_at(call, which, of_row, h / (heads / call.kv_heads));
        const float inverse = omni::inverse_of(omni::row_scale(call.peaks[at]));
        uint8_t* out = static_cast<uint8_t*>(call.out[which]) + row * size;
        for (int64_t c = lane; c < size; c += kWarp) {
          out[c] = static_cast<uint8_t>(code_of<kCodes>(head.turned(c) * inverse));
        }
      } else {
        float most = 0.f;
        for (int64_t c = lane; c < size; c += kWarp) most = fmaxf(most, fabsf(head.turned(c)));
        most = over_lanes<Most>(most, kWarp);
        const float scale = most > 0.f ? most / kLargest<kCodes> : 1.f;
        if (lane == 0) call.scale[which][row] = scale;
        uint8_t* out = static_cast<uint8_t*>(call.out[which]) + row * size;
        for (int64_t c = lane; c < size; c += kWarp) {
          out[c] = static_cast<uint8_t>(code_of<kCodes>(head.turned(c) / scale));
        }
      }
    }
  }
}

// --- launch ----------------------------------------------------------------------------------------------------------

bool affine_fits(const void* values) { return reinterpret_cast<uintptr_t>(values) % 16 == 0; }

bool fits_packs(const QkNormRope& call, int64_t element_size) {
  if (call.head_size % kUnit != 0 || call.head_size > kWarp * kUnit) return false;
  if (call.pairs % (call.half ? kPack : kPack / 2) != 0 || !affine_fits(call.table)) return false;
  for (int which = 0; which < 3; ++which) {
    if (reinterpret_cast<uintptr_t>(call.out[which]) % 16 != 0) return false;
  }
  for (int64_t s = 0; s < call.stream_count; ++s) {
    const QkvStream& stream = call.streams[s];
    if (!omni::aligned(stream.q, stream.q_stride, element_size) ||
        !omni::aligned(stream.k, stream.k_stride, element_size) ||
        !omni::aligned(stream.v, stream.v_stride, element_size)) {
      return false;
    }
    for (int which = 0; which < 2; ++which) {
      if (!affine_fits(stream.weight[which]) || !affine_fits(stream.bias[which])) return false;
    }
  }
  return true;
}

using Packed = void (*)(QkNormRope, int);

template <class X, Codes kCodes>
void launch(const QkNormRope& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(call.tokens);
  int lanes = 1;
  while (lanes < call.head_size / kUnit) lanes *= 2;
  const int64_t wanted = (call.heads * lanes + kWarp - 1) / kWarp * kWarp;
  const bool across = call.norm == QkNorm::kRmsAcross;
  if (!fits_packs(call, sizeof(X)) || (across && wanted > kMaxThreads)) {
    qk_norm_rope_scalar<X, kCodes><<<blocks, 256, 0, stream>>>(call);
    return;
  }
  const int64_t rounds = (wanted + kMaxThreads - 1) / kMaxThreads;
  const auto threads = static_cast<unsigned>((wanted / kWarp + rounds - 1) / rounds * kWarp);
  constexpr Packed kernels[] = {
      qk_norm_rope_packed<X, QkNorm::kNone, kCodes>, qk_norm_rope_packed<X, QkNorm::kRms, kCodes>,
      qk_norm_rope_packed<X, QkNorm::kRmsAcross, kCodes>, qk_norm_rope_packed<X, QkNorm::kLayer, kCodes>,
  };
  kernels[static_cast<int>(call.norm)]<<<blocks, threads, 0, stream>>>(call, lanes);
}

using Launch = void (*)(const QkNormRope&, cudaStream_t);

constexpr Launch kLaunches[2][4] = {
    {launch<float, Codes::kNone>, launch<float, Codes::kE4m3>, launch<float, Codes::kInt8>,
     launch<float, Codes::kE4m3ByRow>},
    {launch<__nv_bfloat16, Codes::kNone>, launch<__nv_bfloat16, Codes::kE4m3>, launch<__nv_bfloat16, Codes::kInt8>,
     launch<__nv_bfloat16, Codes::kE4m3ByRow>},
};

}  // namespace

const char* omni_qk_norm_rope_cuda(const QkNormRope* call, void* stream) {
  if (call->tokens > INT32_MAX) return "more tokens than a grid has blocks";
  if (call->heads * call->head_size > INT32_MAX) return "more channels than a block counts";
  const int64_t element_size = call->x_dtype == omni::Dtype::kFloat32 ? 4 : 2;
  if (fits_packs(*call, element_size) && omni::rope_fits_bulk(*call)) {
    return omni::launch_rope_bulk(*call, static_cast<cudaStream_t>(stream));
  }
  kLaunches[static_cast<int>(call->x_dtype)][static_cast<int>(call->codes)](*call, static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
