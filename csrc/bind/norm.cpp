// Binds the norm family.
#include <algorithm>

#include "../common/norm.h"
#include "bind.h"

namespace {

using omni::dtype_of;
using omni::kParallelElements;
using omni::ScalarType;
using omni::Tensor;
using omni::with_dense_rows;

// --- norm_modulate ---------------------------------------------------------------------------------------------------

void check_norm_modulate(const Tensor& x, const Tensor& scale, const Tensor& shift, const Tensor& index) {
  STD_TORCH_CHECK(x.dim() == 2, "norm_modulate: x must be [T, C], got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(scale.dim() == 2 && shift.dim() == 2, "norm_modulate: scale and shift must be [M, C], got ",
                  scale.dim(), " and ", shift.dim(), " dimensions");
  STD_TORCH_CHECK(scale.size(1) == x.size(1) && shift.size(1) == x.size(1), "norm_modulate: x has ", x.size(1),
                  " channels, scale ", scale.size(1), " and shift ", shift.size(1));
  STD_TORCH_CHECK(scale.size(0) == shift.size(0), "norm_modulate: scale has ", scale.size(0), " rows and shift ",
                  shift.size(0));
  STD_TORCH_CHECK(scale.scalar_type() == shift.scalar_type(),
                  "norm_modulate: scale and shift have different dtypes; they must be alike");
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Int && index.dim() == 1,
                  "norm_modulate: index must be int32 [T], got ", index.dim(), " dimensions or another dtype");
  STD_TORCH_CHECK(index.size(0) == x.size(0), "norm_modulate: index has ", index.size(0), " entries for ", x.size(0),
                  " tokens");
  STD_TORCH_CHECK(scale.device() == x.device() && shift.device() == x.device() && index.device() == x.device(),
                  "norm_modulate: x, scale, shift and index must be on one device");
}

// Fills a call from checked tensors with dense rows. The tensors must outlive it.
omni::NormModulate norm_modulate_call(const Tensor& x, const Tensor& scale, const Tensor& shift, const Tensor& index,
                                      double eps, Tensor& out) {
  omni::NormModulate call{};
  call.x = x.const_data_ptr();
  call.scale = scale.const_data_ptr();
  call.shift = shift.const_data_ptr();
  call.index = scale.size(0) == 1 ? nullptr : static_cast<const int32_t*>(index.const_data_ptr());
  call.out = out.mutable_data_ptr();
  call.tokens = x.size(0);
  call.channels = x.size(1);
  call.rows = scale.size(0);
  call.x_stride = x.stride(0);
  call.scale_stride = scale.stride(0);
  call.shift_stride = shift.stride(0);
  call.eps = static_cast<float>(eps);
  call.x_dtype = dtype_of(x, "norm_modulate", "x");
  call.modulation_dtype = dtype_of(scale, "norm_modulate", "scale");
  return call;
}

using Run = void (*)(const omni::NormModulate&, const Tensor& x);

template <Run run>
Tensor norm_modulate(const Tensor& x, const Tensor& scale, const Tensor& shift, const Tensor& index, double eps) {
  check_norm_modulate(x, scale, shift, index);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const Tensor x_rows = with_dense_rows(x), scale_rows = with_dense_rows(scale), shift_rows = with_dense_rows(shift),
               index_row = with_dense_rows(index);
  const omni::NormModulate call = norm_modulate_call(x_rows, scale_rows, shift_rows, index_row, eps, out);
  if (call.tokens > 0 && call.channels > 0) run(call, x);
  return out;
}

void run_norm_modulate_cpu(const omni::NormModulate& call, const Tensor&) {
  if (call.index != nullptr) {
    const auto [low, high] = std::minmax_element(call.index, call.index + call.tokens);
    STD_TORCH_CHECK(*low >= 0 && *high < call.rows, "norm_modulate: index holds ", *low < 0 ? *low : *high,
                    ", scale and shift have ", call.rows, " rows");
  }
  const int64_t grain = std::max<int64_t>(1, kParallelElements / call.channels);
  torch::stable::parallel_for(0, call.tokens, grain,
                              [&](int64_t begin, int64_t end) { omni_norm_modulate_cpu(&call, begin, end); });
}

#ifdef OMNI_GRPC_CUDA_ARCHS

void run_norm_modulate_cuda(const omni::NormModulate& call, const Tensor& x) {
  omni::launch("norm_modulate", &omni_norm_modulate_cuda, call, x);
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) {
  m.impl("norm_modulate", TORCH_BOX(&norm_modulate<run_norm_modulate_cpu>));
}

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) {
  m.impl("norm_modulate", TORCH_BOX(&norm_modulate<run_norm_modulate_cuda>));
}
#endif
