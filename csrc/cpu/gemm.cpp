// What follows a product of int8 on the CPU, in one pass over its sums. The product itself is torch's (oneDNN), which
// runs at the peak of the processor's dot products of bytes.
#include "../common/gemm.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/cpu.h"
#include "../common/dtype.h"

namespace {

using omni::BFloat16;
using omni::Finish;
using omni::to_float;

template <bool kGelu, class Out>
OMNI_INLINE void rows(const Finish& call, const float* __restrict__ bias, int64_t begin, int64_t end) {
  const int64_t channels = call.channels;
  const float* __restrict__ weight_scale = call.weight_scale;
  for (int64_t token = begin; token < end; ++token) {
    const int32_t* __restrict__ sums = call.sums + token * channels;
    Out* __restrict__ out = static_cast<Out*>(call.out) + token * channels;
    const float scale = call.x_scale[token];
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float value = static_cast<float>(sums[c]) * scale * weight_scale[c] + bias[c];
      omni::store(out + c, kGelu ? omni::gelu_tanh(value) : value);
    }
  }
}

using Kernel = void (*)(const Finish&, const float*, int64_t, int64_t);

OMNI_CLONES void plain_f32(const Finish& call, const float* bias, int64_t begin, int64_t end) {
  rows<false, float>(call, bias, begin, end);
}
OMNI_CLONES void plain_bf16(const Finish& call, const float* bias, int64_t begin, int64_t end) {
  rows<false, BFloat16>(call, bias, begin, end);
}
OMNI_CLONES void gelu_f32(const Finish& call, const float* bias, int64_t begin, int64_t end) {
  rows<true, float>(call, bias, begin, end);
}
OMNI_CLONES void gelu_bf16(const Finish& call, const float* bias, int64_t begin, int64_t end) {
  rows<true, BFloat16>(call, bias, begin, end);
}

constexpr Kernel kKernels[2][2] = {{plain_f32, plain_bf16}, {gelu_f32, gelu_bf16}};

template <class B>
void widen(const void* bias, std::vector<float>& wide) {
  for (size_t c = 0; c < wide.size(); ++c) wide[c] = to_float(static_cast<const B*>(bias)[c]);
}

}  // namespace

void omni_finish_cpu(const Finish* call, int64_t begin, int64_t end) {
  // No bias is one of -0, which changes nothing, not even the sign of a zero.
  std::vector<float> bias(static_cast<size_t>(call->channels), -0.f);
  if (call->bias != nullptr && call->bias_dtype == omni::Dtype::kFloat32) widen<float>(call->bias, bias);
  if (call->bias != nullptr && call->bias_dtype == omni::Dtype::kBFloat16) widen<BFloat16>(call->bias, bias);
  kKernels[call->gelu_tanh][static_cast<int>(call->out_dtype)](*call, bias.data(), begin, end);
}
