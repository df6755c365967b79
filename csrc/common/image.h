// The image family as plain C: what the binding and the kernels agree on. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

constexpr int kMostLatentChannels = 256;

// One call of pixels_to_bytes. Pointers are of the device that the launcher serves; strides count elements.
struct PixelsToBytes {
  const void* pixels;  // [count, 3, area]
  uint8_t* out;        // [count, area, 3]
  int32_t* nonfinite;  // [1], how many pixels are not finite; zero at first
  int64_t count;
  int64_t area;
  int64_t stride;        // between pictures
  int64_t plane_stride;  // between colours
  Dtype dtype;
};

// One call of latents_to_bytes. The map travels with the call, so that nothing is copied to the device for it.
struct LatentsToBytes {
  const void* latents;  // [channels, area]
  uint8_t* out;         // [area, 3]
  int64_t channels;
  int64_t area;
  int64_t plane_stride;
  Dtype dtype;
  float bias[3];
  float factors[kMostLatentChannels][3];
};

}  // namespace omni

extern "C" {

// Computes the pixels [begin, end) of all pictures on the calling thread; returns how many values are not finite.
int64_t omni_pixels_to_bytes_cpu(const omni::PixelsToBytes* call, int64_t begin, int64_t end);

// Computes the pixels [begin, end) on the calling thread.
void omni_latents_to_bytes_cpu(const omni::LatentsToBytes* call, int64_t begin, int64_t end);

// Launch on `stream` (a cudaStream_t). Return null, or what is wrong in words.
const char* omni_pixels_to_bytes_cuda(const omni::PixelsToBytes* call, void* stream);
const char* omni_latents_to_bytes_cuda(const omni::LatentsToBytes* call, void* stream);
}
