// The quant family on CUDA: a row in registers between its one read and its one write, and the next one on its way.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../common/bulk.cuh"
#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/quant.h"
#include "../common/rows.cuh"

namespace {

using omni::Activate;
using omni::Activation;
using omni::Code;
using omni::kPack;
using omni::kRowThreads;
using omni::kRowWarps;

// value / (1 + 2^power), with the fast approximations of both, each good to 2 units in the last place.
__device__ __forceinline__ float logistic(float value, float power) {
  float exponential, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(power));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + exponential));
  return value * inverse;
}

// Whether each result is of a value of x and one of up, and whether up's are behind those of x.
template <Activation kActivation>
constexpr bool kBoth = kActivation == Activation::kSiluMul;
template <Activation kActivation>
constexpr bool kBehind = kActivation == Activation::kConcatGeluTanh;

// What is computed of a value that is not kept as it is.
template <Activation kActivation>
constexpr Activation kOfValue = kBehind<kActivation> ? Activation::kGeluTanh : kActivation;

__device__ __forceinline__ int64_t row_of(const Activate& call, int64_t token) {
  return call.index == nullptr ? token : call.index[token];
}

template <Activation kActivation>
__device__ __forceinline__ float activated(float x, float up) {
  constexpr float kLog2E = 1.44269504f;
  if constexpr (kActivation == Activation::kGeluTanh) {
    // (1 + tanh(u)) / 2 is the logistic function of 2u: no difference of near equal numbers where x is negative.
    constexpr float kLinear = -2.f * kLog2E * 0.7978845608f;  // sqrt(2 / pi)
    return logistic(x, x * (kLinear + kLinear * 0.044715f * x * x));
  } else if constexpr (kActivation == Activation::kSiluMul) {
    return logistic(x, -kLog2E * x) * up;
  } else {
    return x;
  }
}

template <class X, int kPacks, Activation kActivation>
__global__ void __launch_bounds__(kRowThreads)
    activate_packed(const __grid_constant__ Activate call) {
  constexpr bool kUp = kBoth<kActivation>;
  __shared__ uint32_t scratch[2][kRowWarps];  // rows take turns: nobody writes one before everybody has read it
  const int packs = static_cast<int>(call.channels / kPack);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t next = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (next >= call.tokens) return;

  omni::RawRow<X, kPacks> raw_x;
  omni::RawRow<X, kUp ? kPacks : 1> raw_up;
  raw_x.load(call.x, row_of(call, next), call.x_stride, packs);
  if constexpr (kUp) raw_up.load(call.up, next, call.up_stride, packs);

  for (int turn = 0; next < call.tokens; turn ^= 1) {
    const int64_t token = next;
    float value[kPacks][kPack];
    float peak = 0.f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float x[kPack], up[kPack];
      raw_x.unpack(i, x);
      if constexpr (kUp) raw_up.unpack(i, up);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        value[i][j] = activated<kActivation>(x[j], kUp ? up[j] : 0.f);
        peak = omni::larger(peak, value[i][j]);
      }
    }
    next += step;
    if (next < call.tokens) {
      raw_x.load(call.x, row_of(call, next), call.x_stride, packs);
      if constexpr (kUp) raw_up.load(call.up, next, call.up_stride, packs);
    }

    const omni::RowScale scale(omni::row_max(peak, scratch[turn]), call.code);
    if (threadIdx.x == 0) call.out_scale[token] = scale.scale;
    omni::store_row_codes<kPacks>(call.out, token * call.channels, value, packs, scale, call.code);
  }
}

constexpr int kBulkWarps = 20;  // of a row at most

// The same where the device copies rows in bulk: bfloat16 rows that whole warps hold exactly.
template <int kPacks, Activation kActivation>
__global__ void __maxnreg__(kPacks == 5 ? 80 : 64)
    activate_bulk(const __grid_constant__ Activate call, uint32_t to_high) {
#ifdef OMNI_BULK
  using X = __nv_bfloat16;
  constexpr bool kUp = kBoth<kActivation>, kConcat = kBehind<kActivation>;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[2];
  __shared__ uint32_t scratch[2][kBulkWarps];
  const uint32_t bytes = static_cast<uint32_t>(call.channels) * sizeof(X);
  const uint32_t x_bytes = static_cast<uint32_t>(call.x_channels) * sizeof(X);
  const int x_packs = static_cast<int>(call.x_channels / kPack);
  omni::BulkStages stages(full, memory, kUp ? 2 * bytes : bytes);
  const auto fetch = [&](int64_t token, int stage) {
    if (threadIdx.x != 0 || token >= call.tokens) return;
    stages.expect(stage, kUp ? 2 * bytes : bytes);
    stages.load(stage, 0, static_cast<const X*>(call.x) + row_of(call, token) * call.x_stride, x_bytes);
    if constexpr (kUp || kConcat) {
      const X* up = static_cast<const X*>(call.up) + token * call.up_stride;
      stages.load(stage, x_bytes, up, kUp ? bytes : bytes - x_bytes);
    }
  };
  const int64_t step = gridDim.x;
  fetch(blockIdx.x, 0);
  fetch(blockIdx.x + step, 1);

  int turn = 0;
  for (int64_t token = blockIdx.x; token < call.tokens; token += step, turn ^= 1) {
    const auto* x_row = reinterpret_cast<const uint4*>(stages.wait());
    const auto* up_row = x_row + bytes / sizeof(uint4);
    float value[kPacks][kPack];
    float peak = 0.f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = i * blockDim.x + threadIdx.x;
      float up[kPack];
      omni::unpack_bfloat16(x_row[pack], to_high, value[i]);
      if constexpr (kUp) omni::unpack_bfloat16(up_row[pack], to_high, up);
      const bool kept = kConcat && pack < x_packs;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if (!kept) value[i][j] = activated<kOfValue<kActivation>>(value[i][j], kUp ? up[j] : 0.f);
        peak = omni::larger(peak, value[i][j]);
      }
    }
    const uint32_t most = omni::row_max(peak, scratch[turn]);
    if (blockDim.x == omni::kWarp) __syncwarp();  // else row_max has a barrier
    fetch(token + 2 * step, stages.stage());
    stages.next();
    const omni::RowScale scale(most, call.code);
    if (threadIdx.x == 0) call.out_scale[token] = scale.scale;
    omni::store_row_codes<kPacks>(call.out, token * call.channels, value, kPacks * blockDim.x, scale, call.code);
  }
#endif
}

constexpr int kFlatThreads = 256;
constexpr int kFlatPacks = 2;  // of a thread, all of them loaded before the first is used

// Without codes a row is nothing to wait for: a thread for every two packs, and as many blocks as that takes.
template <class X, Activation kActivation>
__global__ void __launch_bounds__(kFlatThreads) activate_flat(const __grid_constant__ Activate call, uint32_t packs,
                                                              uint32_t packs_of_row) {
  constexpr bool kUp = kBoth<kActivation>, kConcat = kBehind<kActivation>;
  const bool apart = kConcat || call.x_stride != call.channels || (kUp && call.up_stride != call.channels);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kFlatThreads * kFlatPacks) + threadIdx.x;
  omni::RawRow<X, 1> x[kFlatPacks], up[kUp ? kFlatPacks : 1];
  bool kept[kFlatPacks] = {};
#pragma unroll
  for (int i = 0; i < kFlatPacks; ++i) {
    const int64_t pack = first + i * kFlatThreads;
    if (pack >= packs) break;
    const X* x_row = static_cast<const X*>(call.x);
    int64_t x_at = pack * kPack, up_at = x_at;
    if (apart) {
      const uint32_t row = static_cast<uint32_t>(pack) / packs_of_row;
      const int64_t column = (static_cast<uint32_t>(pack) - row * packs_of_row) * static_cast<int64_t>(kPack);
      x_at = row * call.x_stride + column;
      up_at = row * call.up_stride + column;
      kept[i] = kConcat && column < call.x_channels;
      if (kConcat && !kept[i]) {
        x_row = static_cast<const X*>(call.up);
        x_at = up_at - call.x_channels;
      }
    }
    x[i].load_pack(x_row + x_at);
    if constexpr (kUp) up[i].load_pack(static_cast<const X*>(call.up) + up_at);
  }
#pragma unroll
  for (int i = 0; i < kFlatPacks; ++i) {
    const int64_t pack = first + i * kFlatThreads;
    if (pack >= packs) break;
    float value[kPack], factor[kPack];
    x[i].unpack(0, value);
    if constexpr (kUp) up[i].unpack(0, factor);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (!kept[i]) value[j] = activated<kOfValue<kActivation>>(value[j], kUp ? factor[j] : 0.f);
    }
    omni::store_pack(static_cast<X*>(call.out) + pack * kPack, value);
  }
}

// Any width and any alignment; reads a row twice where it needs the largest magnitude first.
template <class X, Activation kActivation>
__global__ void __launch_bounds__(kRowThreads) activate_scalar(const __grid_constant__ Activate call) {
  constexpr bool kUp = kBoth<kActivation>, kConcat = kBehind<kActivation>;
  __shared__ uint32_t scratch[2][kRowWarps];
  int turn = 0;
  for (int64_t token = blockIdx.x; token < call.tokens; token += gridDim.x, turn ^= 1) {
    const X* x = static_cast<const X*>(call.x) + row_of(call, token) * call.x_stride;
    const X* up = static_cast<const X*>(call.up) + token * call.up_stride;
    const auto result = [&](int64_t c) {
      if (kConcat && c < call.x_channels) return omni::to_float(x[c]);
      const float value = omni::to_float(kConcat ? up[c - call.x_channels] : x[c]);
      return activated<kOfValue<kActivation>>(value, kUp ? omni::to_float(up[c]) : 0.f);
    };
    if (call.code == Code::kNone) {
      X* out = static_cast<X*>(call.out) + token * call.channels;
      for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) omni::store(out + c, result(c));
      continue;
    }
    float peak = 0.f;
    for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) peak = omni::larger(peak, result(c));
    const omni::RowScale scale(omni::row_max(peak, scratch[turn]), call.code);
    if (threadIdx.x == 0) call.out_scale[token] = scale.scale;
    for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) {
      omni::store_code(call.out, token * call.channels + c, result(c), scale, call.code);
    }
  }
}

using Kernel = void (*)(Activate);

template <class X, Activation kActivation>
Kernel coded_kernel(int packs) {
  if (packs == 1) return activate_packed<X, 1, kActivation>;
  if constexpr (omni::kRowPacks<X> == 4) {
    if (packs == 3) return activate_packed<X, 3, kActivation>;
    if (packs == 4) return activate_packed<X, 4, kActivation>;
  }
  return activate_packed<X, 2, kActivation>;
}

// Of a thread, so that whole warps hold a row exactly; 0 where none do.
int packs_of(const Activate& call) {
  for (const int packs : {4, 3, 5}) {
    const int64_t of_warp = omni::kWarp * kPack * packs;
    if (call.channels % of_warp == 0 && call.channels <= kBulkWarps * of_warp) return packs;
  }
  return 0;
}

uint32_t bytes_of(const Activate& call) {
  const auto bytes = static_cast<uint32_t>(call.channels * sizeof(__nv_bfloat16));
  return call.activation == Activation::kSiluMul ? 2 * bytes : bytes;
}

template <Activation kActivation>
const char* launch_bulk(const Activate& call, int packs, cudaStream_t stream) {
  const auto kernel = packs == 3   ? activate_bulk<3, kActivation>
                      : packs == 4 ? activate_bulk<4, kActivation>
                                   : activate_bulk<5, kActivation>;
  const auto threads = static_cast<unsigned>(call.channels / (packs * kPack));
  return omni::launch_bulk(kernel, call, threads, bytes_of(call), stream);
}

template <class X, Activation kActivation>
const char* launch(const Activate& call, cudaStream_t stream) {
  constexpr bool kConcat = kBehind<kActivation>;
  const bool packed = call.channels % kPack == 0 && call.x_channels % kPack == 0 &&
                      omni::aligned(call.x, call.x_stride, sizeof(X)) &&
                      omni::aligned(call.up, call.up_stride, sizeof(X)) && omni::aligned(call.out, 0, 1);
  const int64_t packs = call.channels / kPack, all = call.tokens * packs;
  if (packed && call.code == Code::kNone && all > 0 && all <= UINT32_MAX) {
    constexpr int64_t kOfBlock = kFlatThreads * kFlatPacks;
    activate_flat<X, kActivation><<<static_cast<unsigned>((all + kOfBlock - 1) / kOfBlock), kFlatThreads, 0, stream>>>(
        call, static_cast<uint32_t>(all), static_cast<uint32_t>(packs));
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  }
  if (sizeof(X) == 2 && packed && call.code != Code::kNone && call.tokens > 0 && omni::fits_bulk(bytes_of(call))) {
    const int of_thread = packs_of(call);
    if (of_thread > 0) return launch_bulk<kActivation>(call, of_thread, stream);
  }
  if constexpr (!kConcat) {
    const omni::RowLayout layout = omni::row_layout<X>(packs, kRowWarps);
    if (packed && call.code != Code::kNone && layout.warps > 0) {
      return omni::launch_rows(coded_kernel<X, kActivation>(layout.packs), call, omni::row_block(layout), stream);
    }
  }
  return omni::launch_rows(activate_scalar<X, kActivation>, call, omni::scalar_block(call.channels), stream);
}

using Launch = const char* (*)(const Activate&, cudaStream_t);

constexpr Launch kLaunches[2][4] = {
    {launch<float, Activation::kIdentity>, launch<float, Activation::kGeluTanh>, launch<float, Activation::kSiluMul>,
     launch<float, Activation::kConcatGeluTanh>},
    {launch<__nv_bfloat16, Activation::kIdentity>, launch<__nv_bfloat16, Activation::kGeluTanh>,
     launch<__nv_bfloat16, Activation::kSiluMul>, launch<__nv_bfloat16, Activation::kConcatGeluTanh>},
};

}  // namespace

const char* omni_activate_cuda(const Activate* call, void* stream) {
  return kLaunches[static_cast<int>(call->x_dtype)][static_cast<int>(call->activation)](
      *call, static_cast<cudaStream_t>(stream));
}
