// Online softmax of the tiles of scores that a warpgroup has in registers: see attention_q.cu.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

namespace omni {

constexpr float kWeight = 8;         // weights of e4m3 are times 2 to this
constexpr int kHidden = -(1 << 30);  // a score below all others

// A thread has, of 64 lines and 128 columns, lines l and l + 8 with l = 16 * warp + lane / 4; element 4 j + 2 r + e is
// of line l + 8 r and column 8 j + 2 * (lane % 4) + e.
struct Lines {
  float most[2];    // of the scores so far, in the exponent of 2
  float sum[2];     // of this thread's weights
  float factor[2];  // from a score, over the scale of the keys, to the exponent of 2
};

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t e4m3_codes(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// Scores to weights times 2 to `lift` more than kWeight, as the product with the values takes them: of 16 keys, the
// thread's 4 are side by side there. `decay` is what comes to what has been added up so far. Where
// kRagged, `left` keys are there.
template <bool kRagged>
__device__ __forceinline__ void weigh(int (&score)[64], uint32_t (&codes)[16], float (&decay)[2], Lines& lines,
                                      float k_scale, int left, float lift) {
  const int column = threadIdx.x % 4 * 2;
  if constexpr (kRagged) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i / 4 * 8 + column + i % 2 >= left) score[i] = kHidden;
    }
  }
  int most[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
#pragma unroll
  for (int i = 0; i < 64; ++i) most[i % 4] = max(most[i % 4], score[i]);
  float factor[2], shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int top = max(most[2 * r], most[2 * r + 1]);
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
    factor[r] = lines.factor[r] * k_scale;
    const float now = fmaxf(lines.most[r], static_cast<float>(top) * factor[r]);
    decay[r] = exp2_of(lines.most[r] - now);
    lines.most[r] = now;
    shift[r] = kWeight + lift - now;
  }
  float sum[4] = {};
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    float weight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 2 % 2;
      weight[i] = exp2_of(fmaf(static_cast<float>(score[8 * pair + i]), factor[r], shift[r]));
      if constexpr (kRagged) {
        if (pair * 16 + i / 4 * 8 + column + i % 2 >= left) weight[i] = 0.f;
      }
      sum[i % 4] += weight[i];
    }
    codes[2 * pair] = e4m3_codes(weight[0], weight[1], weight[4], weight[5]);
    codes[2 * pair + 1] = e4m3_codes(weight[2], weight[3], weight[6], weight[7]);
  }
  const float unlifted = exp2_of(-lift);
#pragma unroll
  for (int r = 0; r < 2; ++r) lines.sum[r] = fmaf(lines.sum[r], decay[r], (sum[2 * r] + sum[2 * r + 1]) * unlifted);
}

__device__ __forceinline__ bool all_ones(const float (&decay)[2]) {
  return __all_sync(0xffffffffu, decay[0] == 1.f && decay[1] == 1.f);
}

__device__ __forceinline__ void add(float (&out)[64], const float (&made)[64], const float (&decay)[2], float scale) {
  if (all_ones(decay)) {
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = fmaf(made[i], scale, out[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = fmaf(made[i], scale, out[i] * decay[i / 2 % 2]);
  }
}

__device__ __forceinline__ void fade(float (&out)[64], const float (&decay)[2]) {
  if (all_ones(decay)) return;
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] *= decay[i / 2 % 2];
}

}  // namespace omni
