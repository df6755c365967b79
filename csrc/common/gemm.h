// The gemm family as plain C: products of 8 bits on CUDA, and on the CPU what becomes of the sums of one. No torch and
// no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

// out = act(sums * x_scale * weight_scale + bias), in float32.
struct Finish {
  const int32_t* sums;        // [tokens, channels], contiguous
  const float* x_scale;       // [tokens]
  const float* weight_scale;  // [channels]
  const void* bias;           // [channels], of bias_dtype, or null
  void* out;                  // [tokens, channels], contiguous, of out_dtype
  int64_t channels;
  bool gelu_tanh;
  Dtype bias_dtype;
  Dtype out_dtype;
};

// In which order the tiles of the output are computed.
enum class GemmRaster : int32_t { kAny, kAlongTokens, kAlongChannels };

// out = act(x weight^T * x_scale * weight_scale + bias), in bfloat16. inputs are a multiple of 16 and channels of 8, all
// three sizes are positive, and every pointer is aligned to 16 bytes.
struct GemmQ {
  const void* x;              // [tokens, inputs], contiguous
  const void* weight;         // [channels, inputs], contiguous
  const float* x_scale;       // [tokens]
  const float* weight_scale;  // [channels]
  const void* bias;           // [channels] in bfloat16, or null
  void* out;                  // [tokens, channels], contiguous
  int64_t tokens;
  int64_t channels;
  int64_t inputs;
  int32_t swizzle;  // tiles that a wave is wide, at most: 1, 2, 4 or 8
  GemmRaster raster;
  bool early;  // launched while the kernel before it ends, and waiting for that before it reads
  bool gelu_tanh;
};

// One way to compute it.
struct GemmConfig {
  const char* name;
  const char* (*launch)(const GemmQ* call, void* stream);
};

struct GemmConfigs {
  const GemmConfig* first;
  int64_t count;
};

}  // namespace omni

extern "C" {

// Computes the tokens [begin, end) on the calling thread.
void omni_finish_cpu(const omni::Finish* call, int64_t begin, int64_t end);

// The configurations of each file of kernels/.
omni::GemmConfigs omni_gemm_fp8_sm90(void);
omni::GemmConfigs omni_gemm_int8_sm90(void);
omni::GemmConfigs omni_gemm_fp8_sm89(void);
omni::GemmConfigs omni_gemm_int8_sm80(void);
}
