// Binds the gemm family on the CPU: torch's product of int8, and one pass over its sums. On CUDA it is bound in Python.
#include "../common/gemm.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "bind.h"

namespace {

using omni::dtype_of;
using omni::ScalarType;
using omni::Tensor;

Tensor product(const Tensor& x, const Tensor& weight) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(torch::stable::transpose(weight, 0, 1))};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_int_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void check_scale(const char* name, const Tensor& scale, const Tensor& x, int64_t length) {
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float && scale.dim() == 1 && scale.size(0) == length, "gemm_q: ",
                  name, " must be float32 [", length, "]");
  STD_TORCH_CHECK(scale.device() == x.device(), "gemm_q: all tensors must be on one device");
}

Tensor gemm_q_cpu(const Tensor& x, const Tensor& x_scale, const Tensor& weight, const Tensor& weight_scale,
                  const std::optional<Tensor>& bias, const std::string& act, ScalarType dtype) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
                  "gemm_q: x must be [T, K] and weight [N, K]");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Char && weight.scalar_type() == ScalarType::Char,
                  "gemm_q: the kernel takes int8; the function of this name in omni_grpc.ops serves every dtype");
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "gemm_q: the kernel gives float32 and bfloat16; the function of this name in omni_grpc.ops serves "
                  "every dtype");
  STD_TORCH_CHECK(act == "none" || act == "gelu_tanh", "gemm_q: act must be one of none, gelu_tanh, got '", act, "'");
  const int64_t tokens = x.size(0), channels = weight.size(0);
  check_scale("x_scale", x_scale, x, tokens);
  check_scale("weight_scale", weight_scale, x, channels);
  STD_TORCH_CHECK(weight.device() == x.device() && (!bias || bias->device() == x.device()),
                  "gemm_q: all tensors must be on one device");
  Tensor out = torch::stable::new_empty(x, {tokens, channels}, dtype);
  if (tokens == 0 || channels == 0) return out;

  omni::Finish call{};
  Tensor kept_bias = x;
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == channels, "gemm_q: bias must be [", channels, "]");
    kept_bias = torch::stable::contiguous(*bias);
    call.bias = kept_bias.const_data_ptr();
    call.bias_dtype = dtype_of(kept_bias, "gemm_q", "bias");
  }
  const Tensor sums = x.size(1) == 0 ? torch::stable::new_zeros(x, {tokens, channels}, ScalarType::Int)
                                     : torch::stable::contiguous(product(x, weight));
  const Tensor of_tokens = torch::stable::contiguous(x_scale), of_channels = torch::stable::contiguous(weight_scale);
  call.sums = static_cast<const int32_t*>(sums.const_data_ptr());
  call.x_scale = static_cast<const float*>(of_tokens.const_data_ptr());
  call.weight_scale = static_cast<const float*>(of_channels.const_data_ptr());
  call.out = out.mutable_data_ptr();
  call.channels = channels;
  call.gelu_tanh = act == "gelu_tanh";
  call.out_dtype = dtype == ScalarType::Float ? omni::Dtype::kFloat32 : omni::Dtype::kBFloat16;
  const int64_t grain = std::max<int64_t>(1, omni::kParallelElements / channels);
  torch::stable::parallel_for(0, tokens, grain,
                              [&](int64_t begin, int64_t end) { omni_finish_cpu(&call, begin, end); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { m.impl("gemm_q", TORCH_BOX(&gemm_q_cpu)); }
