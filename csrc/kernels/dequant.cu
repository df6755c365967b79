// The dequant family on CUDA: a thread unpacks eight neighbouring numbers and writes them at once.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../common/dequant.h"
#include "../common/dequant_blocks.h"
#include "../common/device.cuh"
#include "../common/dtype.h"

namespace {

using omni::Dequantize;
using omni::Packing;

constexpr int kThreads = 256;
static_assert(omni::kRun == omni::kPack, "what a thread unpacks is what it writes");

// A function of the host is none of a kernel, its value is.
template <Packing kPacking>
struct BlockOf {
  static constexpr int64_t kSize = omni::block_of(kPacking).size;
  static constexpr int kRuns = omni::block_of(kPacking).elements / omni::kRun;
};

template <class Out, Packing kPacking>
__global__ void __launch_bounds__(kThreads) dequantize(const __grid_constant__ Dequantize call, bool packs) {
  constexpr int64_t kSize = BlockOf<kPacking>::kSize;
  constexpr int kRuns = BlockOf<kPacking>::kRuns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads, runs = call.blocks * kRuns;
  for (int64_t run = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; run < runs; run += step) {
    float value[omni::kRun];
    omni::run_of<kPacking>(call.packed + run / kRuns * kSize, static_cast<int>(run % kRuns), value);
    Out* out = static_cast<Out*>(call.out) + run * omni::kRun;
    if (packs) {
      omni::store_pack(out, value);
    } else {
#pragma unroll
      for (int i = 0; i < omni::kRun; ++i) omni::store(out + i, value[i]);
    }
  }
}

using Kernel = void (*)(Dequantize, bool);

template <class Out>
Kernel kernel_of(Packing packing) {
  switch (packing) {
    case Packing::kQ4_0: return dequantize<Out, Packing::kQ4_0>;
    case Packing::kQ8_0: return dequantize<Out, Packing::kQ8_0>;
    case Packing::kQ4_K: return dequantize<Out, Packing::kQ4_K>;
    case Packing::kQ5_K: return dequantize<Out, Packing::kQ5_K>;
    case Packing::kQ6_K: return dequantize<Out, Packing::kQ6_K>;
  }
  return nullptr;
}

}  // namespace

const char* omni_dequantize_cuda(const Dequantize* call, void* stream) {
  const bool wide = call->out_dtype == omni::Dtype::kFloat32;
  const Kernel kernel = wide ? kernel_of<float>(call->packing) : kernel_of<__nv_bfloat16>(call->packing);
  const int64_t runs = call->blocks * omni::block_of(call->packing).elements / omni::kRun;
  const int64_t blocks = std::min<int64_t>((runs + kThreads - 1) / kThreads, INT32_MAX);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      *call, omni::aligned(call->out, 0, 1));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
