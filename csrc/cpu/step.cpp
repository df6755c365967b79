// The step family on the CPU: a token at a time, twice where its length counts.
#include "../common/step.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common/cpu.h"

namespace {

using omni::BFloat16;
using omni::GuideStep;
using omni::GuidanceNorm;
using omni::StepState;
using omni::to_float;

constexpr int64_t kLanes = 16;  // running sums: the order of additions is that of every vector width
constexpr int64_t kBatch = 64;  // channels that stay in the first cache between simple loops
constexpr float kFewestLength = 1e-12f;

OMNI_INLINE float guided(float cond, float uncond, float scale) { return uncond + scale * (cond - uncond); }

// As torch.lerp has it.
OMNI_INLINE float lerp(float from, float to, float share) {
  return share < 0.5f ? from + share * (to - from) : to - (to - from) * (1.f - share);
}

template <class P>
OMNI_INLINE void measure(const StepState& state, int64_t elements, double* partial) {
  const P* cond = static_cast<const P*>(state.cond);
  const P* uncond = static_cast<const P*>(state.uncond);
  double sums[omni::kStepSums][kLanes] = {};
  for (int64_t at = 0; at < elements; at += kLanes) {
    const int64_t count = std::min(kLanes, elements - at);
    for (int64_t lane = 0; lane < count; ++lane) {
      const float c = to_float(cond[at + lane]), g = guided(c, to_float(uncond[at + lane]), state.scale);
      sums[0][lane] += c;
      sums[1][lane] += static_cast<double>(c) * c;
      sums[2][lane] += g;
      sums[3][lane] += static_cast<double>(g) * g;
    }
  }
  for (int i = 0; i < omni::kStepSums; ++i) {
    partial[i] = 0.;
    for (const double sum : sums[i]) partial[i] += sum;
  }
}

float rescale_factor(const double* sums, double count) {
  const double wanted = (sums[1] - sums[0] * sums[0] / count) / (count - 1.);
  const double found = (sums[3] - sums[2] * sums[2] / count) / (count - 1.);
  return static_cast<float>(std::sqrt(std::max(wanted, 0.)) / std::sqrt(std::max(found, 0.)));
}

// The guided prediction of a token, before its norm.
template <class P>
struct Prediction {
  const P* cond;
  const P* uncond;
  float scale;
  float share;
  float factor;

  OMNI_INLINE void load(int64_t first, int64_t count, float* value) const {
    for (int64_t i = 0; i < count; ++i)
      value[i] = guided(to_float(cond[first + i]), to_float(uncond[first + i]), scale);
    if (share == 0.f) return;
    for (int64_t i = 0; i < count; ++i) value[i] = lerp(value[i], value[i] * factor, share);
  }
};

template <class P>
OMNI_INLINE float ratio_of(const Prediction<P>& prediction, int64_t channels, GuidanceNorm norm) {
  float wanted[kLanes] = {}, length[kLanes] = {};
  for (int64_t at = 0; at < channels; at += kLanes) {
    const int64_t count = std::min(kLanes, channels - at);
    float g[kLanes];
    prediction.load(at, count, g);
    for (int64_t lane = 0; lane < count; ++lane) {
      const float c = to_float(prediction.cond[at + lane]);
      wanted[lane] += c * c;
      length[lane] += g[lane] * g[lane];
    }
  }
  for (int64_t lane = 1; lane < kLanes; ++lane) {
    wanted[0] += wanted[lane];
    length[0] += length[lane];
  }
  const float ratio = std::sqrt(wanted[0]) / std::max(std::sqrt(length[0]), kFewestLength);
  return norm == GuidanceNorm::kRenormClipped ? std::min(ratio, 1.f) : ratio;
}

template <class P, class L>
OMNI_INLINE bool guide_step(const GuideStep& call, int32_t number, int64_t begin, int64_t end) {
  const StepState& state = call.state[number];
  const int64_t channels = call.channels;
  const bool is_guided = state.uncond != nullptr, is_rescaled = is_guided && state.rescale != 0.f;
  const float factor =
      is_rescaled ? rescale_factor(call.partials + static_cast<int64_t>(number) * omni::kStepPartials * omni::kStepSums,
                                   static_cast<double>(state.tokens * channels))
                  : 1.f;
  const L* latents = static_cast<const L*>(state.latents);
  P* next = static_cast<P*>(state.next);
  uint32_t nonfinite = 0;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t at = token * channels;
    const P* cond = static_cast<const P*>(state.cond) + at;
    if (!is_guided) {
#pragma omp simd reduction(| : nonfinite)
      for (int64_t c = 0; c < channels; ++c) {
        omni::store(next + at + c, to_float(latents[at + c]) + state.width * to_float(cond[c]));
        nonfinite |= omni::is_nonfinite(to_float(next[at + c]));
      }
      continue;
    }
    const Prediction<P> prediction{cond, static_cast<const P*>(state.uncond) + at, state.scale, state.rescale, factor};
    const float ratio = state.norm == GuidanceNorm::kNone ? 1.f : ratio_of(prediction, channels, state.norm);
    P* guided_out = static_cast<P*>(state.guided) + at;
    for (int64_t first = 0; first < channels; first += kBatch) {
      const int64_t count = std::min(kBatch, channels - first);
      float value[kBatch];
      prediction.load(first, count, value);
      for (int64_t i = 0; i < count; ++i) value[i] *= ratio;
      for (int64_t i = 0; i < count; ++i) omni::store(guided_out + first + i, value[i]);
      for (int64_t i = 0; i < count; ++i) value[i] = to_float(latents[at + first + i]) + state.width * value[i];
      for (int64_t i = 0; i < count; ++i) omni::store(next + at + first + i, value[i]);
      for (int64_t i = 0; i < count; ++i) nonfinite |= omni::is_nonfinite(to_float(next[at + first + i]));
    }
  }
  return nonfinite == 0;
}

using Measure = void (*)(const StepState&, int64_t, double*);
using Step = bool (*)(const GuideStep&, int32_t, int64_t, int64_t);

OMNI_CLONES void measure_f32(const StepState& state, int64_t n, double* out) { measure<float>(state, n, out); }
OMNI_CLONES void measure_bf16(const StepState& state, int64_t n, double* out) { measure<BFloat16>(state, n, out); }

OMNI_CLONES bool f32_f32(const GuideStep& call, int32_t state, int64_t begin, int64_t end) {
  return guide_step<float, float>(call, state, begin, end);
}
OMNI_CLONES bool f32_bf16(const GuideStep& call, int32_t state, int64_t begin, int64_t end) {
  return guide_step<float, BFloat16>(call, state, begin, end);
}
OMNI_CLONES bool bf16_f32(const GuideStep& call, int32_t state, int64_t begin, int64_t end) {
  return guide_step<BFloat16, float>(call, state, begin, end);
}
OMNI_CLONES bool bf16_bf16(const GuideStep& call, int32_t state, int64_t begin, int64_t end) {
  return guide_step<BFloat16, BFloat16>(call, state, begin, end);
}

constexpr Measure kMeasures[2] = {measure_f32, measure_bf16};
constexpr Step kSteps[2][2] = {{f32_f32, f32_bf16}, {bf16_f32, bf16_bf16}};

}  // namespace

void omni_guide_step_measure_cpu(const GuideStep* call, int32_t state) {
  kMeasures[static_cast<int>(call->prediction_dtype)](
      call->state[state], call->state[state].tokens * call->channels,
      call->partials + static_cast<int64_t>(state) * omni::kStepPartials * omni::kStepSums);
}

bool omni_guide_step_cpu(const GuideStep* call, int32_t state, int64_t begin, int64_t end) {
  return kSteps[static_cast<int>(call->prediction_dtype)][static_cast<int>(call->latents_dtype)](*call, state, begin,
                                                                                               end);
}
