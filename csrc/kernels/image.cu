// The image family on CUDA: bytes are put together in shared memory, and leave it side by side.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../common/device.cuh"
#include "../common/dtype.h"
#include "../common/image.h"

namespace {

using omni::kPack;
using omni::LatentsToBytes;
using omni::PixelsToBytes;

constexpr int kThreads = 256;
constexpr int kPiece = kThreads * kPack;  // pixels of a block
constexpr int kWord = 16;                 // bytes that a thread stores at a time

// Half to even; what is no number becomes 0.
__device__ __forceinline__ uint8_t byte_of(float unit) {
  return static_cast<uint8_t>(__float2int_rn(fminf(fmaxf(unit, 0.f), 1.f) * 255.f));
}

// The unit interval in the dtype of the pixels. The product is exact, so one rounding is that of a fused multiply-add.
__device__ __forceinline__ float unit_of(float value, const float*) { return value * 0.5f + 0.5f; }
__device__ __forceinline__ float unit_of(float value, const __nv_bfloat16*) {
  return __bfloat162float(__float2bfloat16_rn(value * 0.5f + 0.5f));
}

__device__ __forceinline__ int is_nonfinite(float value) { return (__float_as_uint(value) & 0x7f800000u) == 0x7f800000u; }

// A block has a piece of one picture. Where addresses allow it, threads load packs of eight pixels of each colour.
template <class X, bool kPacked>
__global__ void __launch_bounds__(kThreads) pixels_to_bytes(const __grid_constant__ PixelsToBytes call,
                                                            int64_t pieces) {
  __shared__ __align__(kWord) uint8_t bytes[kPiece * 3];
  const int64_t picture = blockIdx.x / pieces, first = blockIdx.x % pieces * kPiece;
  const int count = static_cast<int>(min(static_cast<int64_t>(kPiece), call.area - first));
  const X* x = static_cast<const X*>(call.pixels) + picture * call.stride + first;
  uint8_t* out = call.out + (picture * call.area + first) * 3;
  int nonfinite = 0;

  if constexpr (kPacked) {
    const int pixel = threadIdx.x * kPack;
    if (pixel < count) {
      float value[3][kPack];
#pragma unroll
      for (int colour = 0; colour < 3; ++colour) {
        omni::load_pack<omni::Streamed>(x + colour * call.plane_stride + pixel, value[colour]);
      }
      uint8_t mine[kPack * 3];
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
#pragma unroll
        for (int colour = 0; colour < 3; ++colour) {
          nonfinite += is_nonfinite(value[colour][i]);
          mine[3 * i + colour] = byte_of(unit_of(value[colour][i], x));
        }
      }
#pragma unroll
      for (int word = 0; word < 3; ++word) {
        uint32_t halves[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) halves[i / 4] |= static_cast<uint32_t>(mine[8 * word + i]) << (8 * (i % 4));
        reinterpret_cast<uint2*>(bytes + pixel * 3)[word] = make_uint2(halves[0], halves[1]);
      }
    }
  } else {
    for (int pixel = threadIdx.x; pixel < count; pixel += kThreads) {
#pragma unroll
      for (int colour = 0; colour < 3; ++colour) {
        const float value = omni::to_float(x[colour * call.plane_stride + pixel]);
        nonfinite += is_nonfinite(value);
        bytes[3 * pixel + colour] = byte_of(unit_of(value, x));
      }
    }
  }
  // Of whole numbers the order does not matter, and a picture as it should be adds none.
  if (nonfinite != 0) atomicAdd(call.nonfinite, nonfinite);
  __syncthreads();

  const int whole = kPacked ? count * 3 / kWord : 0;
  for (int i = threadIdx.x; i < whole; i += kThreads) {
    reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(bytes)[i];
  }
  for (int i = whole * kWord + threadIdx.x; i < count * 3; i += kThreads) out[i] = bytes[i];
}

template <class X>
__global__ void __launch_bounds__(kThreads) latents_to_bytes(const __grid_constant__ LatentsToBytes call) {
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pixel >= call.area) return;
  const X* x = static_cast<const X*>(call.latents) + pixel;
  float sums[3] = {call.bias[0], call.bias[1], call.bias[2]};
#pragma unroll 4
  for (int channel = 0; channel < call.channels; ++channel) {
    const float value = omni::to_float(x[channel * call.plane_stride]);
#pragma unroll
    for (int colour = 0; colour < 3; ++colour) sums[colour] += value * call.factors[channel][colour];
  }
#pragma unroll
  for (int colour = 0; colour < 3; ++colour) call.out[3 * pixel + colour] = byte_of(sums[colour] * 0.5f + 0.5f);
}

template <class X>
void launch_pixels(const PixelsToBytes& call, unsigned blocks, int64_t pieces, cudaStream_t stream) {
  const bool packed = call.area % kWord == 0 && omni::aligned(call.pixels, call.stride, sizeof(X)) &&
                      omni::aligned(call.pixels, call.plane_stride, sizeof(X)) &&
                      reinterpret_cast<uintptr_t>(call.out) % kWord == 0;
  const auto kernel = packed ? pixels_to_bytes<X, true> : pixels_to_bytes<X, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(call, pieces);
}

const char* words_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

const char* omni_pixels_to_bytes_cuda(const PixelsToBytes* call, void* stream) {
  const int64_t pieces = (call->area + kPiece - 1) / kPiece;
  if (call->count * pieces > INT32_MAX) return "more pixels than a grid has blocks for";
  const auto on = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>(call->count * pieces);
  const cudaError_t error = cudaMemsetAsync(call->nonfinite, 0, sizeof(int32_t), on);
  if (error != cudaSuccess || blocks == 0) return words_of(error);
  if (call->dtype == omni::Dtype::kFloat32) {
    launch_pixels<float>(*call, blocks, pieces, on);
  } else {
    launch_pixels<__nv_bfloat16>(*call, blocks, pieces, on);
  }
  return words_of(cudaGetLastError());
}

const char* omni_latents_to_bytes_cuda(const LatentsToBytes* call, void* stream) {
  const int64_t blocks = (call->area + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return "more pixels than a grid has blocks for";
  const auto grid = static_cast<unsigned>(blocks);
  const auto kernel = call->dtype == omni::Dtype::kFloat32 ? latents_to_bytes<float> : latents_to_bytes<__nv_bfloat16>;
  const auto on = static_cast<cudaStream_t>(stream);
  kernel<<<grid, kThreads, 0, on>>>(*call);
  return words_of(cudaGetLastError());
}
