// Binds the gemm family. On the CPU: torch's product of int8, and one pass over its sums. On CUDA: the configurations
// that were compiled, each by its name; which one computes what is for Python to say.
#include "../common/gemm.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../common/dtype.h"
#include "bind.h"

namespace {

using omni::dtype_of;
using omni::ScalarType;
using omni::Tensor;

// torch's product judges a matrix by its strides alone, those of a single row and of repeated ones too, and leaves the
// sums of one input channel unwritten. So it gets rows end to end, and of one channel a second one of zeros.
Tensor end_to_end(const Tensor& tensor) {
  const Tensor whole = omni::contiguous(tensor);
  const int64_t rows = whole.size(0), inputs = whole.size(1), width = std::max<int64_t>(inputs, 2);
  if (width == inputs && whole.stride(0) == width && whole.stride(1) == 1) return whole;
  Tensor made = omni::new_zeros(whole, {rows, width});
  const auto* from = static_cast<const int8_t*>(whole.const_data_ptr());
  auto* to = static_cast<int8_t*>(made.mutable_data_ptr());
  for (int64_t row = 0; row < rows; ++row) std::copy_n(from + row * inputs, inputs, to + row * width);
  return made;
}

Tensor product(const Tensor& x, const Tensor& weight) {
  const Tensor columns = torch::stable::transpose(end_to_end(weight), 0, 1);
  std::array<StableIValue, 2> stack{torch::stable::detail::from(end_to_end(x)), torch::stable::detail::from(columns)};
  omni::succeed("_int_mm", torch_call_dispatcher("aten::_int_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void check_scale(const char* name, const Tensor& scale, const Tensor& x, int64_t length) {
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float && scale.dim() == 1 && scale.size(0) == length, "gemm_q: ",
                  name, " must be float32 [", length, "]");
  STD_TORCH_CHECK(scale.device() == x.device(), "gemm_q: all tensors must be on one device");
}

Tensor gemm_q_cpu(const Tensor& x, const Tensor& x_scale, const Tensor& weight, const Tensor& weight_scale,
                  const std::optional<Tensor>& bias, const std::string& act, ScalarType dtype,
                  const std::string& /*config: there is one way*/) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
                  "gemm_q: x must be [T, K] and weight [N, K]");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Char && weight.scalar_type() == ScalarType::Char,
                  "gemm_q: the kernel takes int8; the function of this name in omni_grpc.ops serves every dtype");
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "gemm_q: the kernel returns float32 and bfloat16; the function of this name in omni_grpc.ops serves "
                  "every dtype");
  STD_TORCH_CHECK(act == "none" || act == "gelu_tanh", "gemm_q: act must be one of none, gelu_tanh, got '", act, "'");
  const int64_t tokens = x.size(0), channels = weight.size(0);
  check_scale("x_scale", x_scale, x, tokens);
  check_scale("weight_scale", weight_scale, x, channels);
  STD_TORCH_CHECK(weight.device() == x.device() && (!bias || bias->device() == x.device()),
                  "gemm_q: all tensors must be on one device");
  Tensor out = omni::new_empty(x, {tokens, channels}, dtype);
  if (tokens == 0 || channels == 0) return out;

  omni::Finish call{};
  Tensor kept_bias = x;
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == channels, "gemm_q: bias must be [", channels, "]");
    kept_bias = omni::contiguous(*bias);
    call.bias = kept_bias.const_data_ptr();
    call.bias_dtype = dtype_of(kept_bias, "gemm_q", "bias");
  }
  const Tensor sums = x.size(1) == 0 ? omni::new_zeros(x, {tokens, channels}, ScalarType::Int)
                                     : omni::contiguous(product(x, weight));
  const Tensor of_tokens = omni::contiguous(x_scale), of_channels = omni::contiguous(weight_scale);
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

namespace {

struct Listed {
  const char* generation;
  const char* codes;
  omni::GemmConfigs configs;
};

// The first of each kind is the one that serves any shape.
std::vector<Listed> listed() {
  return {
#ifdef OMNI_GRPC_GEMM_SM90
      {"sm90", "fp8", omni_gemm_fp8_sm90()},
      {"sm90", "int8", omni_gemm_int8_sm90()},
#endif
#ifdef OMNI_GRPC_GEMM_SM89
      {"sm89", "fp8", omni_gemm_fp8_sm89()},
#endif
#ifdef OMNI_GRPC_GEMM_SM80
      {"sm80", "int8", omni_gemm_int8_sm80()},
#endif
  };
}

}  // namespace

// The configurations that this library has, "sm90 fp8 pingpong_128x128" and so on, a line for each.
extern "C" __attribute__((visibility("default"))) const char* omni_grpc_gemm_configs() {
  static const std::string lines = [] {
    std::string text;
    for (const Listed& file : listed()) {
      for (int64_t i = 0; i < file.configs.count; ++i) {
        text += std::string(file.generation) + " " + file.codes + " " + file.configs.first[i].name + "\n";
      }
    }
    return text;
  }();
  return lines.c_str();
}

#if defined(OMNI_GRPC_GEMM_SM80) || defined(OMNI_GRPC_GEMM_SM89) || defined(OMNI_GRPC_GEMM_SM90)
namespace {

const omni::GemmConfig* find(const std::string& codes, const std::string& name) {
  for (const Listed& file : listed()) {
    for (int64_t i = 0; file.codes == codes && i < file.configs.count; ++i) {
      if (file.configs.first[i].name == name) return file.configs.first + i;
    }
  }
  return nullptr;
}

// As kernels take it: contiguous, from a multiple of 16 bytes on.
Tensor ready(const Tensor& tensor) {
  const Tensor whole = omni::contiguous(tensor);
  return reinterpret_cast<uintptr_t>(whole.const_data_ptr()) % 16 == 0 ? whole : omni::clone(whole);
}

// `config` is a name, and after a slash the order of tiles: t (along tokens), c (along channels) or a (any), how wide a
// wave is at most, and e for an early launch.
void choose(const std::string& config, const std::string& codes, const omni::GemmConfig*& chosen, omni::GemmQ& call) {
  const size_t slash = config.find('/');
  chosen = find(codes, config.substr(0, slash));
  call.swizzle = 1;
  call.raster = omni::GemmRaster::kAny;
  if (slash != std::string::npos) {
    const std::string order = config.substr(slash + 1);
    const bool known = (order.size() == 2 || (order.size() == 3 && order[2] == 'e')) &&
                       std::string("atc").find(order[0]) != std::string::npos &&
                       std::string("1248").find(order[1]) != std::string::npos;
    STD_TORCH_CHECK(known, "gemm_q_configured: '", order, "' is not an order of tiles; a1, t4 and c8e are");
    call.early = order.size() == 3;
    call.swizzle = order[1] - '0';
    call.raster = order[0] == 't'   ? omni::GemmRaster::kAlongTokens
                  : order[0] == 'c' ? omni::GemmRaster::kAlongChannels
                                    : omni::GemmRaster::kAny;
  }
  STD_TORCH_CHECK(chosen != nullptr, "gemm_q_configured: this library has no configuration '", config, "' of ", codes);
}

Tensor gemm_q_configured_cuda(const Tensor& x, const Tensor& x_scale, const Tensor& weight, const Tensor& weight_scale,
                              const std::optional<Tensor>& bias, const std::string& act, const std::string& config) {
  constexpr const char* kOp = "gemm_q_configured";
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), kOp,
                  ": x must be [T, K] and weight [N, K]");
  const bool int8 = x.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK((int8 || x.scalar_type() == ScalarType::Float8_e4m3fn) && weight.scalar_type() == x.scalar_type(), kOp,
                  ": x and weight must both be int8 or float8_e4m3fn");
  STD_TORCH_CHECK(act == "none" || act == "gelu_tanh", kOp, ": act must be one of none, gelu_tanh, got '", act, "'");
  const int64_t tokens = x.size(0), channels = weight.size(0), inputs = x.size(1);
  check_scale("x_scale", x_scale, x, tokens);
  check_scale("weight_scale", weight_scale, x, channels);
  STD_TORCH_CHECK(weight.device() == x.device() && (!bias || bias->device() == x.device()), kOp,
                  ": all tensors must be on one device");
  STD_TORCH_CHECK(inputs % 16 == 0 && channels % 8 == 0 && inputs > 0 && std::max({tokens, channels, inputs}) < 1 << 30,
                  kOp, ": inputs must be a multiple of 16 and channels of 8, got ", inputs, " and ", channels);
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == channels &&
                            bias->scalar_type() == ScalarType::BFloat16),
                  kOp, ": bias must be bfloat16 [", channels, "]");
  omni::GemmQ call{};
  const omni::GemmConfig* chosen = nullptr;
  choose(config, int8 ? "int8" : "fp8", chosen, call);
  Tensor out = omni::new_empty(x, {tokens, channels}, ScalarType::BFloat16);
  if (tokens == 0 || channels == 0) return out;
  const Tensor kept[] = {ready(x), ready(weight), ready(x_scale), ready(weight_scale)};
  Tensor kept_bias = x;
  call.x = kept[0].const_data_ptr();
  call.weight = kept[1].const_data_ptr();
  call.x_scale = static_cast<const float*>(kept[2].const_data_ptr());
  call.weight_scale = static_cast<const float*>(kept[3].const_data_ptr());
  if (bias) {
    kept_bias = ready(*bias);
    call.bias = kept_bias.const_data_ptr();
  }
  call.out = out.mutable_data_ptr();
  call.tokens = tokens;
  call.channels = channels;
  call.inputs = inputs;
  call.gelu_tanh = act == "gelu_tanh";
  omni::launch(kOp, chosen->launch, call, x);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { m.impl("gemm_q_configured", TORCH_BOX(&gemm_q_configured_cuda)); }
#endif
