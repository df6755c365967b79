// The cache family on CUDA: one block for each chunk of a row, which leaves two partial sums; then one block for each
// row, which adds them. Both orders depend on the row's length alone.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/asked.cuh"
#include "../common/cache.h"
#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/rows.cuh"

namespace {

using omni::CompareStore;
using omni::Dtype;
using omni::kPack;
using omni::kWarp;

constexpr int kThreads = 256;
constexpr int kSumThreads = 512;
constexpr int kPacks = static_cast<int>(omni::kChunk / (kThreads * kPack));  // of a thread, all in flight at once
static_assert(kPacks * kThreads * kPack == omni::kChunk, "a chunk is what a block moves");

__device__ __forceinline__ int row_of(const CompareStore& call, int64_t chunk) {
  int low = 0, high = call.rows;  // first_chunk[low] <= chunk < first_chunk[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (call.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Eight elements, of which `count` are there. What is missing is 0, in the one as in the other: it adds nothing.
template <class X>
__device__ __forceinline__ void load(const X* where, int64_t count, float (&value)[kPack]) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) value[j] = j < count ? omni::to_float(where[j]) : 0.f;
}

template <class X, bool kVector>
__global__ void __launch_bounds__(kThreads) compare_chunks(const __grid_constant__ CompareStore call) {
  __shared__ float2 scratch[kThreads / kWarp];
  const int64_t chunk = blockIdx.x;
  const int row = row_of(call, chunk);
  const int64_t start = (chunk - call.first_chunk[row]) * omni::kChunk;
  const int64_t left = min(call.elements[row] - start, omni::kChunk);
  const X* now = static_cast<const X*>(call.now[row]) + start;
  X* before = static_cast<X*>(call.before[row]) + start;
  const bool known = call.known[row];

  // All loads before the first use. What is now, the model reads next; what was before is read once.
  const int whole = kVector ? static_cast<int>(left / kPack) : 0;
  omni::RawRow<X, kPacks> raw_now, raw_before;
  raw_now.template load<omni::Reused>(now, 0, 0, whole);
  raw_before.load(before, 0, 0, known ? whole : 0);
  float moved = 0.f, norm = 0.f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int pack = i * kThreads + threadIdx.x;
    const int64_t at = static_cast<int64_t>(pack) * kPack;
    float a[kPack], b[kPack];
    if (pack < whole) {
      raw_now.unpack(i, a);
      raw_before.unpack(i, b);
      raw_now.store_pack(i, before + at);
    } else {
      load(now + at, left - at, a);
      load(before + at, known ? left - at : 0, b);
#pragma unroll
      for (int j = 0; j < kPack; ++j)
        if (j < left - at) omni::store(before + at + j, a[j]);
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      moved += fabsf(a[j] - b[j]);
      norm += fabsf(b[j]);
    }
  }
  moved = omni::warp_sum(moved);
  norm = omni::warp_sum(norm);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = make_float2(moved, norm);
  __syncthreads();
  if (threadIdx.x == 0) {
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (const float2& of_warp : scratch) sums = make_float2(sums.x + of_warp.x, sums.y + of_warp.y);
    reinterpret_cast<float2*>(call.partials)[chunk] = sums;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ double block_sum(double value, double* scratch) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  double total = 0.;
  for (int warp = 0; warp < kSumThreads / kWarp; ++warp) total += scratch[warp];
  return total;
}

__global__ void __launch_bounds__(kSumThreads) add_partials(const __grid_constant__ CompareStore call) {
  __shared__ double scratch[2][kSumThreads / kWarp];
  const int row = blockIdx.x;
  const auto* partials = reinterpret_cast<const float2*>(call.partials);
  const bool counts = call.known[row] && call.before[row] != nullptr;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // it was launched while the last chunks were under way
#endif
  const int64_t end = counts ? call.first_chunk[row + 1] : call.first_chunk[row];
  double moved = 0., norm = 0.;
#pragma unroll 4
  for (int64_t chunk = call.first_chunk[row] + threadIdx.x; chunk < end; chunk += kSumThreads) {
    const float2 partial = partials[chunk];
    moved += partial.x;
    norm += partial.y;
  }
  moved = block_sum(moved, scratch[0]);
  norm = block_sum(norm, scratch[1]);
  if (threadIdx.x == 0) {
    call.sums[2 * row] = static_cast<float>(moved);
    call.sums[2 * row + 1] = static_cast<float>(norm);
  }
}

using Kernel = void (*)(CompareStore);

// Launches the sums such that their blocks are there when the chunks end, where the device can.
cudaError_t launch_sums(const CompareStore& call, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(call.rows));
  config.blockDim = dim3(kSumThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = omni::current_device().major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, add_partials, call);
}

}  // namespace

const char* omni_compare_store_cuda(const CompareStore* call, void* stream) {
  const int64_t chunks = call->first_chunk[call->rows];
  if (chunks > INT32_MAX) return "more elements than a grid has blocks";
  bool vector = true;
  for (int row = 0; row < call->rows; ++row)
    vector = vector && omni::aligned(call->now[row], 0, 1) && omni::aligned(call->before[row], 0, 1);
  constexpr Kernel kernels[2][2] = {{compare_chunks<float, false>, compare_chunks<float, true>},
                                    {compare_chunks<__nv_bfloat16, false>, compare_chunks<__nv_bfloat16, true>}};
  const auto queue = static_cast<cudaStream_t>(stream);
  if (chunks > 0)
    kernels[static_cast<int>(call->dtype)][vector]<<<static_cast<unsigned>(chunks), kThreads, 0, queue>>>(*call);
  cudaError_t error = launch_sums(*call, queue);
  if (const cudaError_t earlier = cudaGetLastError(); error == cudaSuccess) error = earlier;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
