// Binds the step family.
#include "../common/step.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "../common/dtype.h"
#include "bind.h"

namespace {

using omni::GuideStep;
using omni::ScalarType;
using omni::Tensor;

constexpr size_t kPlaces = 5, kFactors = 3;  // as omni_grpc/ops/step.py has them

void check_guide_step(const Tensor& prediction, const Tensor& latents, const std::vector<int64_t>& places,
                      const std::vector<double>& factors) {
  STD_TORCH_CHECK(prediction.dim() == 2 && latents.dim() == 2 && prediction.size(1) == latents.size(1),
                  "guide_step: prediction and latents must be [T, C] and [L, C], got ", prediction.dim(), " and ",
                  latents.dim(), " dimensions, or channels that differ");
  STD_TORCH_CHECK(prediction.device() == latents.device(),
                  "guide_step: prediction and latents must be on one device");
  STD_TORCH_CHECK(places.size() % kPlaces == 0 && places.size() / kPlaces * kFactors == factors.size(),
                  "guide_step: ", places.size(), " places and ", factors.size(), " factors; an output has ", kPlaces,
                  " and ", kFactors);
  for (size_t at = 0; at < places.size(); at += kPlaces) {
    const int64_t cond = places[at], uncond = places[at + 1], first = places[at + 2], tokens = places[at + 3],
                  norm = places[at + 4];
    const int64_t last = prediction.size(0) - tokens;
    STD_TORCH_CHECK(tokens >= 0 && 0 <= cond && cond <= last && -1 <= uncond && uncond <= last && 0 <= first &&
                        first <= latents.size(0) - tokens && 0 <= norm && norm <= 2,
                    "guide_step: output ", at / kPlaces, " lies outside of the prediction or the latents");
  }
}

using Run = void (*)(const GuideStep&, const Tensor& prediction);

template <Run run>
std::tuple<Tensor, Tensor, Tensor> guide_step(const Tensor& prediction, const Tensor& latents,
                                              std::vector<int64_t> places, std::vector<double> factors) {
  check_guide_step(prediction, latents, places, factors);
  const Tensor whole = omni::contiguous(prediction), from = omni::contiguous(latents);
  const int64_t channels = prediction.size(1), states = static_cast<int64_t>(places.size() / kPlaces);
  int64_t tokens = 0, guided_tokens = 0;
  bool rescaled = false;
  for (int64_t i = 0; i < states; ++i) {
    const bool is_guided = places[kPlaces * i + 1] >= 0;
    tokens += places[kPlaces * i + 3];
    guided_tokens += is_guided ? places[kPlaces * i + 3] : 0;
    rescaled = rescaled || (is_guided && factors[kFactors * i + 1] != 0.);
  }
  Tensor guided = omni::new_empty(whole, {guided_tokens, channels});
  Tensor next = omni::new_empty(whole, {tokens, channels});
  Tensor nonfinite = omni::new_zeros(whole, {states}, ScalarType::Int);
  if (tokens == 0 || channels == 0) return {guided, next, nonfinite};

  GuideStep call{};
  call.channels = channels;
  call.prediction_dtype = omni::dtype_of(whole, "guide_step", "prediction");
  call.latents_dtype = omni::dtype_of(from, "guide_step", "latents");
  const Tensor partials = omni::new_empty(
      whole, {rescaled ? std::min<int64_t>(states, omni::kStepStates) * omni::kStepPartials : 0, omni::kStepSums},
      ScalarType::Double);
  call.partials = rescaled ? static_cast<double*>(partials.mutable_data_ptr()) : nullptr;
  const int64_t bytes = channels * (call.prediction_dtype == omni::Dtype::kFloat32 ? 4 : 2);
  const int64_t latents_bytes = channels * (call.latents_dtype == omni::Dtype::kFloat32 ? 4 : 2);
  const char* predicted = static_cast<const char*>(whole.const_data_ptr());
  char* guided_at = static_cast<char*>(guided.mutable_data_ptr());
  char* next_at = static_cast<char*>(next.mutable_data_ptr());
  for (int64_t begin = 0; begin < states; begin += omni::kStepStates) {
    call.states = static_cast<int32_t>(std::min<int64_t>(states - begin, omni::kStepStates));
    call.nonfinite = static_cast<int32_t*>(nonfinite.mutable_data_ptr()) + begin;
    for (int64_t i = begin; i < begin + call.states; ++i) {
      const int64_t* place = &places[kPlaces * i];
      const double* factor = &factors[kFactors * i];
      const bool is_guided = place[1] >= 0;
      omni::StepState& state = call.state[i - begin];
      state.cond = predicted + place[0] * bytes;
      state.uncond = is_guided ? predicted + place[1] * bytes : nullptr;
      state.latents = static_cast<const char*>(from.const_data_ptr()) + place[2] * latents_bytes;
      state.guided = is_guided ? guided_at : nullptr;
      state.next = next_at;
      state.tokens = place[3];
      state.norm = static_cast<omni::GuidanceNorm>(place[4]);
      state.scale = static_cast<float>(factor[0]);
      state.rescale = static_cast<float>(factor[1]);
      state.width = static_cast<float>(factor[2]);
      guided_at += is_guided ? place[3] * bytes : 0;
      next_at += place[3] * bytes;
    }
    run(call, whole);
  }
  return {guided, next, nonfinite};
}

void run_guide_step_cpu(const GuideStep& call, const Tensor&) {
  for (int32_t i = 0; i < call.states; ++i) {
    const omni::StepState& state = call.state[i];
    if (state.uncond != nullptr && state.rescale != 0.f) omni_guide_step_measure_cpu(&call, i);
    std::atomic<bool> finite{true};
    const int64_t grain = std::max<int64_t>(1, omni::kParallelElements / call.channels);
    torch::stable::parallel_for(0, state.tokens, grain, [&](int64_t begin, int64_t end) {
      if (!omni_guide_step_cpu(&call, i, begin, end)) finite = false;
    });
    call.nonfinite[i] = !finite;
  }
}

#ifdef OMNI_GRPC_CUDA_ARCHS

void run_guide_step_cuda(const GuideStep& call, const Tensor& prediction) {
  omni::launch("guide_step", &omni_guide_step_cuda, call, prediction);
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { m.impl("guide_step", TORCH_BOX(&guide_step<run_guide_step_cpu>)); }

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { m.impl("guide_step", TORCH_BOX(&guide_step<run_guide_step_cuda>)); }
#endif
