// Activations on the CPU, and rows in 8 bits: over a row that stays in cache as float32 one pass for the activation, one for
// the largest magnitude, and one for the codes.
#include "../common/quant.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../common/cpu.h"
#include "../common/cpu_codes.h"
#include "../common/dtype.h"

namespace {

using omni::Activate;
using omni::Activation;
using omni::BFloat16;
using omni::Code;

template <Activation kActivation>
OMNI_INLINE void activate(const float* x, const float* up, int64_t channels, float* out) {
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    out[c] = kActivation == Activation::kSiluMul ? omni::silu(x[c]) * up[c] : omni::gelu_tanh(x[c]);
  }
}

template <Activation kActivation, Code kCode, class X>
OMNI_INLINE void rows(const Activate& call, int64_t begin, int64_t end) {
  const int64_t channels = call.channels;
  const int64_t kept = kActivation == Activation::kConcatGeluTanh ? call.x_channels : 0;
  std::vector<float> held(2 * channels);
  float* h = held.data();
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = call.index == nullptr ? token : call.index[token];
    const float* x = omni::wide(static_cast<const X*>(call.x) + row * call.x_stride, call.x_channels, h);
    if constexpr (kActivation != Activation::kIdentity) {
      const float* up = nullptr;
      if constexpr (kActivation == Activation::kSiluMul || kActivation == Activation::kConcatGeluTanh) {
        up = omni::wide(static_cast<const X*>(call.up) + token * call.up_stride, channels - kept, h + channels);
      }
      // float32 that is to stay so is written where it goes
      constexpr bool kDirect = kCode == Code::kNone && sizeof(X) == sizeof(float);
      float* made = kDirect ? static_cast<float*>(call.out) + token * channels : h;
      if constexpr (kActivation == Activation::kConcatGeluTanh) {
        if (x != made) std::copy_n(x, kept, made);
        activate<kActivation>(up, nullptr, channels - kept, made + kept);
      } else {
        activate<kActivation>(x, up, channels, made);
      }
      x = made;
      if (kDirect) continue;
    }
    if constexpr (kCode == Code::kNone) {
      X* __restrict__ out = static_cast<X*>(call.out) + token * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) omni::store(out + c, x[c]);
    } else {
      omni::code_row<kCode>(x, channels, static_cast<uint8_t*>(call.out) + token * channels, call.out_scale + token);
    }
  }
}

using Kernel = void (*)(const Activate&, int64_t, int64_t);

// Clones cannot be templates, so each has its name.
#define OMNI_ACTIVATE(name, activation, code, X)                                        \
  OMNI_CLONES void name(const Activate& call, int64_t begin, int64_t end) {             \
    rows<Activation::activation, Code::code, X>(call, begin, end);                      \
  }
#define OMNI_ACTIVATE_CODES(name, activation, X)                                        \
  OMNI_ACTIVATE(name, activation, kNone, X)                                             \
  OMNI_ACTIVATE(name##_float8, activation, kFloat8, X)                                  \
  OMNI_ACTIVATE(name##_int8, activation, kInt8, X)
#define OMNI_ACTIVATE_DTYPES(name, activation)                                          \
  OMNI_ACTIVATE_CODES(name##_f32, activation, float)                                    \
  OMNI_ACTIVATE_CODES(name##_bf16, activation, BFloat16)

OMNI_ACTIVATE_DTYPES(identity, kIdentity)
OMNI_ACTIVATE_DTYPES(gelu_tanh, kGeluTanh)
OMNI_ACTIVATE_DTYPES(silu_mul, kSiluMul)
OMNI_ACTIVATE_DTYPES(concat, kConcatGeluTanh)

// By activation, dtype and code, in the order of their enums.
constexpr Kernel kKernels[4][2][3] = {
    {{identity_f32, identity_f32_float8, identity_f32_int8}, {identity_bf16, identity_bf16_float8, identity_bf16_int8}},
    {{gelu_tanh_f32, gelu_tanh_f32_float8, gelu_tanh_f32_int8},
     {gelu_tanh_bf16, gelu_tanh_bf16_float8, gelu_tanh_bf16_int8}},
    {{silu_mul_f32, silu_mul_f32_float8, silu_mul_f32_int8},
     {silu_mul_bf16, silu_mul_bf16_float8, silu_mul_bf16_int8}},
    {{concat_f32, concat_f32_float8, concat_f32_int8}, {concat_bf16, concat_bf16_float8, concat_bf16_int8}},
};

}  // namespace

void omni_activate_cpu(const Activate* call, int64_t begin, int64_t end) {
  const auto& of_dtype = kKernels[static_cast<int>(call->activation)][static_cast<int>(call->x_dtype)];
  of_dtype[static_cast<int>(call->code)](*call, begin, end);
}
