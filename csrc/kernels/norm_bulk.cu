// The norm family where the device copies rows in bulk (common/bulk.cuh), for most calls of AdaLN blocks: rows in
// bfloat16, gated or not where there is a sum, with scale and shift or weight and bias, of the widths that models have.
// A kernel for each width: half of what a row costs is not arithmetic, and constants make it cheap.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/bulk.cuh"
#include "../common/device.cuh"
#include "../common/dtype.h"
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

// Of x and y: none, x + y, x + gate * y. No branch where packs are loaded, so that all loads are under way at once.
enum class Sum { kNone, kPlain, kGated };

// Of a thread: what it holds of the row, of scale and of shift, and the rest; then as many as leave room for as many
// blocks.
template <class M>
constexpr int registers_of(int packs, int warps) {
  const int needed = (sizeof(M) == 4 ? 24 : 16) * packs + 32, threads = warps * kWarp;
  const int blocks = 65536 / (needed * threads);
  return 65536 / (blocks * threads) / 8 * 8;
}

// Rows take turns with two of these: with a barrier between any two writes of one, nobody writes it before everybody
// has read it.
template <int kWarps>
struct Scratch {
  float2 part[kWarps];  // of a warp: its mean, and the squares of the distances from it
  uint32_t peak;        // of all warps, by atomics: a maximum knows no order
};

// What turns a value into a normed one: value * inverse + offset. The offset is rounded, which moves a row by 2^-24 of
// its mean over its spread: less than bfloat16 shows, unless nearly all of the row is one number.
struct Normed {
  float inverse;  // of the standard deviation, or of the root of the mean square
  float offset;   // the mean times that, negative
};

// Joins the moments of the warps, each of `count` elements, about the mean of the first, as Chan, Golub and LeVeque
// (1979) join two: one barrier, where a mean and then squares would take two. Ends with everybody past it.
template <int kWarps>
__device__ __forceinline__ Normed joined(float centre, float squares, float count, float eps,
                                         Scratch<kWarps>& scratch) {
  const float share = 1.f / (count * kWarps);
  float mean = centre;
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    if (threadIdx.x % kWarp == 0) scratch.part[threadIdx.x / kWarp] = make_float2(centre, squares);
    __syncthreads();
    const float first = scratch.part[0].x;
    float apart = 0.f, between = 0.f;
    squares = scratch.part[0].y;
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) {
      const float2 part = scratch.part[warp];
      const float distance = part.x - first;
      apart += distance;
      between = fmaf(distance, distance, between);
      squares += part.y;
    }
    const float shift = __fmul_rn(apart, 1.f / kWarps);
    mean = first + shift;
    squares = fmaf(count, fmaf(-apart, shift, between), squares);
  }
  const float inverse = rsqrtf(fmaf(squares, share, eps));
  return {inverse, -__fmul_rn(mean, inverse)};
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
template <class M, int kPacks, int kWarps, Sum kSum, Form kForm>
__global__ void __maxnreg__(registers_of<M>(kPacks, kWarps))
    norm_bulk(const __grid_constant__ Norm call, uint32_t to_high) {
#ifdef OMNI_BULK
  constexpr int kThreads = kWarps * kWarp, kChannels = kThreads * kPacks * kPack;
  constexpr uint32_t kBytes = kChannels * sizeof(X);
  constexpr float kCount = kPacks * kPack * kWarp;  // elements of a warp
  constexpr bool kAdd = kSum != Sum::kNone, kNorms = kForm != Form::kSumOnly;
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
        if constexpr (kSum == Sum::kGated) {
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

    // The sum is outside of the choice: inside, the compiler unpacks the row there and again behind it.
    const float sum = omni::warp_sum(total[0] + total[1]);
    const float centre = call.rms ? 0.f : __fmul_rn(sum, 1.f / kCount);
    float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float distance = value[i][j] - centre;
        part[j % 4] = fmaf(distance, distance, part[j % 4]);
      }
    }
    const float squares = omni::warp_sum((part[0] + part[1]) + (part[2] + part[3]));
    const Normed normed = joined<kWarps>(centre, squares, kCount, call.eps, mine);
    fetch(token + 2 * step, stages.stage());

    float peak[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float a[kPack], b[kPack];
      scale.unpack(i, to_high, a);
      shift.unpack(i, to_high, b);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        value[i][j] = fmaf(fmaf(value[i][j], normed.inverse, normed.offset), call.base + a[j], b[j]);
        if constexpr (kForm == Form::kCoded) peak[j % 4] = omni::larger(peak[j % 4], value[i][j]);
      }
      if constexpr (kForm == Form::kPlain) {
        omni::store_pack(static_cast<X*>(call.out) + start + i * kThreads * kPack, value[i]);
      }
    }
    if constexpr (kForm == Form::kCoded) {
      uint32_t most = omni::warp_max(omni::larger(omni::larger(peak[0], peak[1]), omni::larger(peak[2], peak[3])));
      if constexpr (kWarps > 1) {
        // everybody is past the barrier of the moments, so done with the peak of the row before
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

template <class M, int kPacks, int kWarps, Sum kSum>
Kernel kernel_of_sum(const Norm& call) {
  if constexpr (kSum != Sum::kNone) {
    if (call.out == nullptr) return norm_bulk<M, kPacks, kWarps, kSum, Form::kSumOnly>;
  }
  return call.code == Code::kNone ? norm_bulk<M, kPacks, kWarps, kSum, Form::kPlain>
                                  : norm_bulk<M, kPacks, kWarps, kSum, Form::kCoded>;
}

template <class M, int kPacks, int kWarps>
Kernel kernel_of(const Norm& call) {
  if (call.y == nullptr) return kernel_of_sum<M, kPacks, kWarps, Sum::kNone>(call);
  return call.gate == nullptr ? kernel_of_sum<M, kPacks, kWarps, Sum::kPlain>(call)
                              : kernel_of_sum<M, kPacks, kWarps, Sum::kGated>(call);
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
