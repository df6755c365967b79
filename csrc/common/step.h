// The step family as plain C. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace omni {

constexpr int kStepStates = 32;     // outputs of one launch: they travel as kernel arguments, which end at 4 KiB
constexpr int kStepPartials = 64;   // parts of an output whose sums are taken apart
constexpr int kStepSums = 4;        // of cond, of its squares, of guided, of its squares

enum class GuidanceNorm : int32_t { kNone, kRenorm, kRenormClipped };

// One output. Its tensors are [tokens, channels], contiguous.
struct StepState {
  const void* cond;
  const void* uncond;  // null: the output is not guided
  const void* latents;
  void* guided;  // null where uncond is
  void* next;
  int64_t tokens;
  float scale;
  float rescale;
  float width;
  GuidanceNorm norm;
};

// Some outputs of a guide_step. Pointers are of the device that the launcher serves. `guided` and `next` are of the
// prediction's dtype.
struct GuideStep {
  StepState state[kStepStates];
  double* partials;  // [states, kStepPartials, kStepSums]: scratch; null where no output is rescaled
  int32_t* nonfinite;  // [states], of zeros: made 1 where something of `next` is not finite
  int64_t channels;
  int32_t states;
  Dtype prediction_dtype;
  Dtype latents_dtype;
};

}  // namespace omni

extern "C" {

// Fills the first partial of an output that is rescaled, on the calling thread.
void omni_guide_step_measure_cpu(const omni::GuideStep* call, int32_t state);

// Computes the tokens [begin, end) of one output on the calling thread. Returns whether all of them are finite.
bool omni_guide_step_cpu(const omni::GuideStep* call, int32_t state, int64_t begin, int64_t end);

// Launches on `stream` (a cudaStream_t). Returns null, or what is wrong in words.
const char* omni_guide_step_cuda(const omni::GuideStep* call, void* stream);
}
