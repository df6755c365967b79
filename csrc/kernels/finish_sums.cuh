// What becomes of the sums of a product of 8 bits, in registers: out = act(sum * x_scale * weight_scale + bias).
#pragma once

#include <cutlass/array.h>
#include <cutlass/fast_math.h>

#include <cmath>

namespace omni {

struct FinishArguments {
  bool gelu_tanh = false;
};

// CUTLASS asks the type of one element for the arguments, and that of a run of them for the work.
template <class T>
struct FinishSums {
  using Arguments = FinishArguments;
};

template <int kCount>
struct FinishSums<cutlass::Array<float, kCount>> {
  using Arguments = FinishArguments;
  using Values = cutlass::Array<float, kCount>;

  CUTLASS_DEVICE Values operator()(const Values& sums, const Values& x_scale, const Values& weight_scale,
                                   const Values& bias, const Arguments& arguments) const {
    Values out;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) out[i] = fmaf(sums[i] * x_scale[i], weight_scale[i], bias[i]);
    if (arguments.gelu_tanh) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        constexpr float kLinear = 0.7978845608f;  // sqrt(2 / pi)
        const float half = 0.5f * out[i];
        const float inner = out[i] * fmaf(kLinear * 0.044715f * out[i], out[i], kLinear);
        out[i] = fmaf(half, cutlass::fast_tanh(inner), half);
      }
    }
    return out;
  }
};

}  // namespace omni
