// The norm family where the device copies rows in bulk (common/bulk.cuh), for most calls of AdaLN blocks: rows in
// bfloat16, gated or not where there is a sum, with scale and shift or weight and bias, of the widths that models have.
// A kernel for each width: half of what a row costs is not arithmetic, and constants make it cheap.
#include "../common/bulk.cuh"
#include "../common/norm.h"
#include "../common/rows.cuh"
#include "norm.cuh"

namespace {

using omni::Code;
using omni::Form;
using omni::kPack;
using omni::kWarp;
using omni::Norm;

using X = __nv_bfloat16;

// Of a thread: what it holds of the row, of scale and of shift, and the rest.
template <class M>
constexpr int registers_of(int packs) {
  return (sizeof(M) == 4 ? 24 : 16) * packs + 32;
}

// Rows take turns with two of these: with a barrier between any two writes of one, nobody writes it before everybody
// has read it.
template <int kWarps>
struct Scratch {
  float total[kWarps];
  float squares[kWarps];
  uint32_t peak;  // of all warps, by atomics: a maximum knows no order
};

// The sum over a block, the same in every thread. Ends with everybody past a barrier.
template <int kWarps>
__device__ __forceinline__ float sum_over(float value, float (&scratch)[kWarps]) {
  value = omni::warp_sum(value);
  if constexpr (kWarps == 1) {
    __syncwarp();
    return value;
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = scratch[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += scratch[warp];
  return total;
}

[[maybe_unused]] __device__ __forceinline__ float sum_of(const float (&v)[kPack]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// A row of the modulation: a thread's packs of it, as they lie in memory.
template <class M, int kPacks, int kThreads>
struct Held {
  static constexpr int kParts = sizeof(M) * kPack / sizeof(uint4);
  uint4 part[kPacks][kParts];

  __device__ __forceinline__ void load(const void* base, int64_t row, int64_t stride) {
    const auto* from = reinterpret_cast<const uint4*>(omni::at_row<M>(base, row, stride)) + threadIdx.x * kParts;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) part[i][p] = __ldg(from + i * kThreads * kParts + p);
    }
  }

  __device__ __forceinline__ void unpack(int i, uint32_t to_high, float (&value)[kPack]) const {
    if constexpr (kParts == 1) {
      omni::unpack_bfloat16(part[i][0], to_high, value);
    } else {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        value[4 * p] = __uint_as_float(part[i][p].x);
        value[4 * p + 1] = __uint_as_float(part[i][p].y);
        value[4 * p + 2] = __uint_as_float(part[i][p].z);
        value[4 * p + 3] = __uint_as_float(part[i][p].w);
      }
    }
  }
};

// The squares are of distances from the mean, not E[x^2] - mean^2: residual streams have channels a thousand times
// larger than the rest. No product is left to the compiler to fuse, so that fused calls and separate ones give the same
// bits. A thread keeps its part of scale and shift for as long as rows take the same row of them.
template <class M, int kPacks, int kWarps, bool kAdd, Form kForm>
__global__ void __maxnreg__(registers_of<M>(kPacks)) norm_bulk(const __grid_constant__ Norm call, uint32_t to_high) {
#ifdef OMNI_BULK
  constexpr int kThreads = kWarps * kWarp, kChannels = kThreads * kPacks * kPack;
  constexpr uint32_t kBytes = kChannels * sizeof(X);
  constexpr float kShare = 1.f / kChannels;
  constexpr bool kNorms = kForm != Form::kSumOnly;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[2];
  __shared__ Scratch<kWarps> scratch[2];
  if (threadIdx.x == 0) scratch[0].peak = scratch[1].peak = 0u;
  omni::BulkStages stages(full, memory, kAdd ? 2 * kBytes : kBytes);
  const int tokens = static_cast<int>(call.tokens), step = static_cast<int>(gridDim.x);
  const auto fetch = [&](int token, int stage) {
    if (threadIdx.x != 0 || token >= tokens) return;
    stages.expect(stage, kAdd ? 2 * kBytes : kBytes);
    stages.load(stage, 0, omni::at_row<X>(call.x, token, call.x_stride), kBytes);
    if constexpr (kAdd) stages.load(stage, kBytes, omni::at_row<X>(call.y, token, call.y_stride), kBytes);
  };
  const auto row_of = [&](int token) { return call.index == nullptr || token >= tokens ? 0 : call.index[token]; };
  fetch(blockIdx.x, 0);
  fetch(blockIdx.x + step, 1);
  int next_row = row_of(blockIdx.x), held = -1;
  Held<M, kNorms ? kPacks : 1, kThreads> scale, shift;

  for (int token = blockIdx.x; token < tokens; token += step, stages.next()) {
    const int row = next_row;
    next_row = row_of(token + step);
    omni::check_row(call, row);
    if (kNorms && row != held) {
      held = row;
      scale.load(call.scale, row, call.scale_stride);
      shift.load(call.shift, row, call.shift_stride);
    }
    Scratch<kWarps>& mine = scratch[stages.stage()];
    const auto* x_row = reinterpret_cast<const uint4*>(stages.wait()) + threadIdx.x;
    const int64_t start = static_cast<int64_t>(token) * kChannels + threadIdx.x * kPack;

    float value[kPacks][kPack];
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      omni::unpack_bfloat16(x_row[i * kThreads], to_high, value[i]);
      if constexpr (kAdd) {
        float y[kPack];
        omni::unpack_bfloat16(x_row[(kPacks + i) * kThreads], to_high, y);
        if (call.gate != nullptr) {
          Held<M, 1, kThreads> gate;
          gate.load(omni::at_row<M>(call.gate, row, call.gate_stride) + i * kThreads * kPack, 0, 0);
          float a[kPack];
          gate.unpack(0, to_high, a);
#pragma unroll
          for (int j = 0; j < kPack; ++j) value[i][j] = fmaf(y[j], a[j], value[i][j]);
        } else {
#pragma unroll
          for (int j = 0; j < kPack; ++j) value[i][j] += y[j];
        }
        const uint4 rounded = omni::bfloat16_pack(value[i]);
        *reinterpret_cast<uint4*>(static_cast<X*>(call.sum) + start + i * kThreads * kPack) = rounded;
        omni::unpack_bfloat16(rounded, to_high, value[i]);
      }
      total[i % 2] += sum_of(value[i]);
    }
    if constexpr (!kNorms) {
      __syncthreads();
      fetch(token + 2 * step, stages.stage());
      continue;
    }

    const float mean = call.rms ? 0.f : __fmul_rn(sum_over<kWarps>(total[0] + total[1], mine.total), kShare);
    float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        value[i][j] -= mean;
        part[j % 4] = fmaf(value[i][j], value[i][j], part[j % 4]);
      }
    }
    const float squares = sum_over<kWarps>((part[0] + part[1]) + (part[2] + part[3]), mine.squares);
    fetch(token + 2 * step, stages.stage());
    const float inverse = rsqrtf(fmaf(squares, kShare, call.eps)), base = __fmul_rn(inverse, call.base);

    float peak[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float a[kPack], b[kPack];
      scale.unpack(i, to_high, a);
      shift.unpack(i, to_high, b);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        value[i][j] = fmaf(value[i][j], fmaf(inverse, a[j], base), b[j]);
        if constexpr (kForm == Form::kCoded) peak[j % 4] = omni::larger(peak[j % 4], value[i][j]);
      }
      if constexpr (kForm == Form::kPlain) {
        omni::store_pack(static_cast<X*>(call.out) + start + i * kThreads * kPack, value[i]);
      }
    }
    if constexpr (kForm == Form::kCoded) {
      uint32_t most = omni::warp_max(omni::larger(omni::larger(peak[0], peak[1]), omni::larger(peak[2], peak[3])));
      if constexpr (kWarps > 1) {
        // everybody is past the barrier of the squares, so done with the peak of the row before
        if (threadIdx.x == 0) scratch[stages.stage() ^ 1].peak = 0u;
        if (threadIdx.x % kWarp == 0) atomicMax(&mine.peak, most);
        __syncthreads();
        most = mine.peak;
      }
      const omni::RowScale row_scale(most, call.code);
      if (threadIdx.x == 0) call.out_scale[token] = row_scale.scale;
      omni::store_row_codes<kPacks, kThreads>(static_cast<uint8_t*>(call.out) + start, value, row_scale, call.code);
    }
  }
#endif
}

using Kernel = void (*)(Norm, uint32_t);

template <class M, int kPacks, int kWarps>
Kernel kernel_of(const Norm& call) {
  if (call.y == nullptr) {
    return call.code == Code::kNone ? norm_bulk<M, kPacks, kWarps, false, Form::kPlain>
                                    : norm_bulk<M, kPacks, kWarps, false, Form::kCoded>;
  }
  if (call.out == nullptr) return norm_bulk<M, kPacks, kWarps, true, Form::kSumOnly>;
  return call.code == Code::kNone ? norm_bulk<M, kPacks, kWarps, true, Form::kPlain>
                                  : norm_bulk<M, kPacks, kWarps, true, Form::kCoded>;
}

// As few warps as registers allow: what a warp does for a row is then for more of it.
struct Width {
  int channels, warps;
  Kernel (*kernel)(const Norm&);
};

constexpr Width kHalfWidths[] = {
    {1536, 1, kernel_of<X, 6, 1>}, {2048, 2, kernel_of<X, 4, 2>}, {2560, 2, kernel_of<X, 5, 2>},
    {3072, 2, kernel_of<X, 6, 2>}, {3840, 3, kernel_of<X, 5, 3>}, {4096, 4, kernel_of<X, 4, 4>},
    {5120, 4, kernel_of<X, 5, 4>},
};
constexpr Width kFullWidths[] = {  // of a modulation in float32, as Wan has it
    {1536, 2, kernel_of<float, 3, 2>},
    {3072, 4, kernel_of<float, 3, 4>},
    {5120, 5, kernel_of<float, 4, 5>},
};

template <int kCount>
const Width* width_of(const Width (&widths)[kCount], int64_t channels) {
  for (const Width& width : widths) {
    if (width.channels == channels) return &width;
  }
  return nullptr;
}

const Width* width_of(const Norm& call) {
  return call.parameter_dtype == omni::Dtype::kFloat32 ? width_of(kFullWidths, call.channels)
                                                       : width_of(kHalfWidths, call.channels);
}

// The norm's own weight and bias are a modulation, of a row that all tokens take and without a base.
Norm with_affine_as_modulation(Norm call) {
  if (call.weight != nullptr && call.bias != nullptr && call.scale == nullptr && call.shift == nullptr) {
    call.scale = call.weight, call.shift = call.bias;
    call.weight = call.bias = nullptr;
    call.scale_stride = call.shift_stride = 0;
    call.base = 0.f;
  }
  return call;
}

uint32_t bytes_of(const Norm& call) {
  return static_cast<uint32_t>(call.channels * sizeof(X)) * (call.y != nullptr ? 2 : 1);
}

}  // namespace

bool omni::norm_fits_bulk(const Norm& given) {
  const Norm call = with_affine_as_modulation(given);
  const bool norms = call.out == nullptr || (call.scale != nullptr && call.shift != nullptr &&
                                             call.weight == nullptr && call.bias == nullptr);
  return norms && call.y_weight == nullptr && call.x_dtype == omni::Dtype::kBFloat16 && width_of(call) != nullptr &&
         call.tokens <= kMostBulkTokens && omni::fits_bulk(bytes_of(call));
}

const char* omni::launch_norm_bulk(const Norm& given, cudaStream_t stream) {
  const Norm call = with_affine_as_modulation(given);
  const Width& width = *width_of(call);
  const auto threads = static_cast<unsigned>(width.warps * kWarp);
  return omni::launch_bulk(width.kernel(call), call, threads, bytes_of(call), stream);
}
