// The norm family on CUDA: one block for each token, the row in registers between its one read and its one write.
#include <cassert>

#include "../common/device.cuh"
#include "../common/norm.h"

namespace {

using omni::Dtype;
using omni::kPack;
using omni::kWarp;
using omni::NormModulate;

constexpr int kMaxThreads = 256;
constexpr int kMaxPacks = 8;  // of a thread: a row of up to kMaxThreads * kMaxPacks * kPack = 16384 channels fits

__device__ __forceinline__ int64_t modulation_row(const NormModulate& call) {
  if (call.index == nullptr) return 0;
  const int64_t row = call.index[blockIdx.x];
  assert(row >= 0 && row < call.rows && "index holds a row that scale and shift lack");
  return row;
}

template <class X, class M, int kPacks>
__global__ void __launch_bounds__(kMaxThreads) norm_modulate_packed(const __grid_constant__ NormModulate call) {
  __shared__ float scratch[2][kMaxThreads / kWarp];
  const int64_t row = modulation_row(call);
  const int packs = static_cast<int>(call.channels / kPack);
  const float channels = static_cast<float>(call.channels);
  const X* x = static_cast<const X*>(call.x) + blockIdx.x * call.x_stride;
  const M* scale = static_cast<const M*>(call.scale) + row * call.scale_stride;
  const M* shift = static_cast<const M*>(call.shift) + row * call.shift_stride;
  X* out = static_cast<X*>(call.out) + blockIdx.x * call.channels;

  float value[kPacks][kPack];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int pack = i * blockDim.x + threadIdx.x;
    if (pack >= packs) break;
    omni::load_pack<omni::Streamed>(x + pack * kPack, value[i]);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum += value[i][j];
  }
  const float mean = omni::block_sum(sum, scratch[0]) / channels;

  // Centred, not E[x^2] - mean^2: residual streams have channels a thousand times larger than the rest.
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (i * blockDim.x + threadIdx.x >= packs) break;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      value[i][j] -= mean;
      squares += value[i][j] * value[i][j];
    }
  }
  const float inverse = rsqrtf(omni::block_sum(squares, scratch[1]) / channels + call.eps);

#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int pack = i * blockDim.x + threadIdx.x;
    if (pack >= packs) break;
    float a[kPack], b[kPack];
    omni::load_pack<omni::Reused>(scale + pack * kPack, a);
    omni::load_pack<omni::Reused>(shift + pack * kPack, b);
#pragma unroll
    for (int j = 0; j < kPack; ++j) a[j] = value[i][j] * inverse * (1.f + a[j]) + b[j];
    omni::store_pack(out + pack * kPack, a);
  }
}

// Any width and any alignment; reads the row three times, from L2 after the first.
template <class X, class M>
__global__ void __launch_bounds__(kMaxThreads) norm_modulate_scalar(const __grid_constant__ NormModulate call) {
  __shared__ float scratch[2][kMaxThreads / kWarp];
  const int64_t row = modulation_row(call);
  const float channels = static_cast<float>(call.channels);
  const X* x = static_cast<const X*>(call.x) + blockIdx.x * call.x_stride;
  const M* scale = static_cast<const M*>(call.scale) + row * call.scale_stride;
  const M* shift = static_cast<const M*>(call.shift) + row * call.shift_stride;
  X* out = static_cast<X*>(call.out) + blockIdx.x * call.channels;

  float sum = 0.f;
  for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) sum += omni::to_float(x[c]);
  const float mean = omni::block_sum(sum, scratch[0]) / channels;

  float squares = 0.f;
  for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) {
    const float centred = omni::to_float(x[c]) - mean;
    squares += centred * centred;
  }
  const float inverse = rsqrtf(omni::block_sum(squares, scratch[1]) / channels + call.eps);

  for (int64_t c = threadIdx.x; c < call.channels; c += blockDim.x) {
    const float normed = (omni::to_float(x[c]) - mean) * inverse;
    omni::store(out + c, normed * (1.f + omni::to_float(scale[c])) + omni::to_float(shift[c]));
  }
}

using Kernel = void (*)(NormModulate);

template <class X, class M>
Kernel packed_kernel(int64_t packs_per_thread) {
  constexpr Kernel kernels[kMaxPacks] = {
      norm_modulate_packed<X, M, 1>, norm_modulate_packed<X, M, 2>, norm_modulate_packed<X, M, 3>,
      norm_modulate_packed<X, M, 4>, norm_modulate_packed<X, M, 5>, norm_modulate_packed<X, M, 6>,
      norm_modulate_packed<X, M, 7>, norm_modulate_packed<X, M, 8>,
  };
  return kernels[packs_per_thread - 1];
}

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

template <class X, class M>
void launch(const NormModulate& call, cudaStream_t stream) {
  const int64_t packs = call.channels / kPack;
  const bool packed = call.channels % kPack == 0 && packs <= kMaxThreads * kMaxPacks &&
                      omni::aligned(call.x, call.x_stride, sizeof(X)) &&
                      omni::aligned(call.out, call.channels, sizeof(X)) &&
                      omni::aligned(call.scale, call.scale_stride, sizeof(M)) &&
                      omni::aligned(call.shift, call.shift_stride, sizeof(M));
  Kernel kernel = norm_modulate_scalar<X, M>;
  int64_t threads = kMaxThreads;
  if (packed) {
    // Few warps for each row keep the barriers cheap and many rows in flight; only the widest rows need more.
    const int64_t most = packs <= kMaxThreads / 2 * kMaxPacks ? kMaxThreads / 2 : kMaxThreads;
    const int64_t packs_per_thread = divide_up(packs, most);
    kernel = packed_kernel<X, M>(packs_per_thread);
    threads = divide_up(divide_up(packs, packs_per_thread), kWarp) * kWarp;
  } else if (call.channels < kMaxThreads) {
    threads = divide_up(call.channels, kWarp) * kWarp;
  }
  kernel<<<static_cast<unsigned>(call.tokens), static_cast<unsigned>(threads), 0, stream>>>(call);
}

using Launch = void (*)(const NormModulate&, cudaStream_t);

constexpr Launch kLaunches[2][2] = {
    {launch<float, float>, launch<float, __nv_bfloat16>},
    {launch<__nv_bfloat16, float>, launch<__nv_bfloat16, __nv_bfloat16>},
};

}  // namespace

const char* omni_norm_modulate_cuda(const NormModulate* call, void* stream) {
  if (call->tokens > INT32_MAX) return "more tokens than a grid has blocks";
  kLaunches[static_cast<int>(call->x_dtype)][static_cast<int>(call->modulation_dtype)](
      *call, static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
