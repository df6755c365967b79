// The step family on CUDA: a few threads for each token, all outputs in one launch; outputs that are rescaled have their
// standard deviations measured by a launch before it.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/step.h"

namespace {

using omni::Dtype;
using omni::GuideStep;
using omni::kStepPartials;
using omni::kStepSums;
using omni::kWarp;
using omni::GuidanceNorm;
using omni::StepState;

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 2048;  // of one output
constexpr float kFewestLength = 1e-12f;

template <int kWidth, class X>
__device__ __forceinline__ void load(const X* where, float (&value)[kWidth]) {
  if constexpr (kWidth == omni::kPack) {
    omni::load_pack<omni::Streamed>(where, value);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) value[j] = omni::to_float(where[j]);
  }
}

template <int kWidth, class X>
__device__ __forceinline__ void save(X* where, const float (&value)[kWidth]) {
  if constexpr (kWidth == omni::kPack) {
    omni::store_pack(where, value);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) omni::store(where + j, value[j]);
  }
}

__device__ __forceinline__ float guided(float cond, float uncond, float scale) {
  return uncond + scale * (cond - uncond);
}

// --- the standard deviations of outputs that are rescaled ------------------------------------------------------------

__device__ __forceinline__ double block_sum(double value, double* scratch) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  double total = 0.;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += scratch[warp];
  return total;
}

// Sums of squares in double, which loses nothing that float32 results show. What a block sums depends on the size of
// its output alone.
template <class P>
__global__ void __launch_bounds__(kThreads) measure(const __grid_constant__ GuideStep call) {
  __shared__ double scratch[kStepSums][kThreads / kWarp];
  const StepState& state = call.state[blockIdx.y];
  if (state.uncond == nullptr || state.rescale == 0.f) return;
  const P* cond = static_cast<const P*>(state.cond);
  const P* uncond = static_cast<const P*>(state.uncond);
  const int64_t elements = state.tokens * call.channels;
  double sums[kStepSums] = {};
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < elements; i += kStepPartials * kThreads) {
    const float c = omni::to_float(cond[i]), g = guided(c, omni::to_float(uncond[i]), state.scale);
    sums[0] += c;
    sums[1] += static_cast<double>(c) * c;
    sums[2] += g;
    sums[3] += static_cast<double>(g) * g;
  }
  double* partial = call.partials + (blockIdx.y * kStepPartials + blockIdx.x) * kStepSums;
#pragma unroll
  for (int i = 0; i < kStepSums; ++i) {
    const double sum = block_sum(sums[i], scratch[i]);
    if (threadIdx.x == 0) partial[i] = sum;
  }
}

// std(cond) / std(guided), which the first thread of a block finds for all of it.
__device__ __forceinline__ float rescale_factor(const GuideStep& call, const StepState& state) {
  __shared__ float factor;
  if (threadIdx.x == 0) {
    const double* partial = call.partials + blockIdx.y * kStepPartials * kStepSums;
    double sums[kStepSums] = {};
    for (int part = 0; part < kStepPartials; ++part)
      for (int i = 0; i < kStepSums; ++i) sums[i] += partial[part * kStepSums + i];
    const double count = static_cast<double>(state.tokens * call.channels);
    const double wanted = (sums[1] - sums[0] * sums[0] / count) / (count - 1.);
    const double found = (sums[3] - sums[2] * sums[2] / count) / (count - 1.);
    factor = static_cast<float>(sqrt(fmax(wanted, 0.)) / sqrt(fmax(found, 0.)));
  }
  __syncthreads();
  return factor;
}

// As torch.lerp has it.
__device__ __forceinline__ float lerp(float from, float to, float share) {
  return share < 0.5f ? from + share * (to - from) : to - (to - from) * (1.f - share);
}

// --- the step --------------------------------------------------------------------------------------------------------

// `lanes` neighbouring threads, a power of two up to a warp, have a token together.
template <class P, class L, int kWidth>
__global__ void __launch_bounds__(kThreads) guide_steps(const __grid_constant__ GuideStep call, int lanes) {
  const StepState& state = call.state[blockIdx.y];
  const int lane = threadIdx.x % lanes, tokens_of_block = kThreads / lanes;
  const int64_t channels = call.channels;
  const bool is_guided = state.uncond != nullptr, is_rescaled = is_guided && state.rescale != 0.f;
  const bool is_normed = is_guided && state.norm != GuidanceNorm::kNone;
  const float factor = is_rescaled ? rescale_factor(call, state) : 1.f;
  int nonfinite = 0;

  // one trip for all threads of the block: they shuffle
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_of_block; first < state.tokens;
       first += static_cast<int64_t>(gridDim.x) * tokens_of_block) {
    const int64_t token = first + threadIdx.x / lanes;
    const int64_t end = token < state.tokens ? channels : 0, at = token * channels;
    const P* cond = static_cast<const P*>(state.cond) + at;
    const P* uncond = static_cast<const P*>(state.uncond) + at;
    const auto predict = [&](int64_t channel, float (&c)[kWidth], float (&g)[kWidth]) {
      load<kWidth>(cond + channel, c);
      if (!is_guided) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) g[j] = c[j];
        return;
      }
      float u[kWidth];
      load<kWidth>(uncond + channel, u);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        g[j] = guided(c[j], u[j], state.scale);
        if (is_rescaled) g[j] = lerp(g[j], g[j] * factor, state.rescale);
      }
    };

    float ratio = 1.f;
    if (is_normed) {
      float wanted = 0.f, length = 0.f;
      for (int64_t channel = lane * kWidth; channel < end; channel += lanes * kWidth) {
        float c[kWidth], g[kWidth];
        predict(channel, c, g);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          wanted += c[j] * c[j];
          length += g[j] * g[j];
        }
      }
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        wanted += __shfl_xor_sync(0xffffffffu, wanted, offset);
        length += __shfl_xor_sync(0xffffffffu, length, offset);
      }
      ratio = sqrtf(wanted) / fmaxf(sqrtf(length), kFewestLength);
      if (state.norm == GuidanceNorm::kRenormClipped) ratio = fminf(ratio, 1.f);
    }

    for (int64_t channel = lane * kWidth; channel < end; channel += lanes * kWidth) {
      float c[kWidth], g[kWidth], x[kWidth];
      predict(channel, c, g);
      load<kWidth>(static_cast<const L*>(state.latents) + at + channel, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        g[j] *= ratio;
        x[j] += state.width * g[j];
        P rounded;
        omni::store(&rounded, x[j]);
        nonfinite |= !isfinite(omni::to_float(rounded));
      }
      if (is_guided) save<kWidth>(static_cast<P*>(state.guided) + at + channel, g);
      save<kWidth>(static_cast<P*>(state.next) + at + channel, x);
    }
  }
  if (__syncthreads_or(nonfinite) && threadIdx.x == 0) atomicOr(call.nonfinite + blockIdx.y, 1);
}

template <class P, class L>
void launch(const GuideStep& call, bool packed, cudaStream_t stream) {
  const int64_t width = packed ? omni::kPack : 1, packs = call.channels / width;
  int lanes = 1;
  while (lanes < kWarp && lanes < packs) lanes *= 2;
  int64_t longest = 1;
  for (int i = 0; i < call.states; ++i) longest = call.state[i].tokens > longest ? call.state[i].tokens : longest;
  const int64_t tokens_of_block = kThreads / lanes, blocks = (longest + tokens_of_block - 1) / tokens_of_block;
  const auto states = static_cast<unsigned>(call.states);
  if (call.partials != nullptr) measure<P><<<dim3(kStepPartials, states), kThreads, 0, stream>>>(call);
  const dim3 grid(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), states);
  if (packed) {
    guide_steps<P, L, omni::kPack><<<grid, kThreads, 0, stream>>>(call, lanes);
  } else {
    guide_steps<P, L, 1><<<grid, kThreads, 0, stream>>>(call, lanes);
  }
}

using Launch = void (*)(const GuideStep&, bool, cudaStream_t);

constexpr Launch kLaunches[2][2] = {
    {launch<float, float>, launch<float, __nv_bfloat16>},
    {launch<__nv_bfloat16, float>, launch<__nv_bfloat16, __nv_bfloat16>},
};

}  // namespace

const char* omni_guide_step_cuda(const GuideStep* call, void* stream) {
  bool packed = call->channels % omni::kPack == 0;
  for (int i = 0; i < call->states; ++i)
    for (const void* pointer : {call->state[i].cond, call->state[i].uncond, call->state[i].latents,
                                static_cast<const void*>(call->state[i].guided),
                                static_cast<const void*>(call->state[i].next)})
      packed = packed && omni::aligned(pointer, 0, 1);
  kLaunches[static_cast<int>(call->prediction_dtype)][static_cast<int>(call->latents_dtype)](
      *call, packed, static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
