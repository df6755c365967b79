// Binds the quant family.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "../common/dtype.h"
#include "../common/quant.h"
#include "bind.h"

namespace {

using omni::Activate;
using omni::Activation;
using omni::dtype_of;
using omni::Optional;
using omni::ScalarType;
using omni::Tensor;
using omni::with_dense_rows;

// The struct but for the output; x and up become rows that the caller keeps.
Activate activate_call(const char* op, Activation activation, Tensor& x, Tensor* up) {
  const bool concat = activation == Activation::kConcatGeluTanh;
  STD_TORCH_CHECK(x.dim() == 2, op, ": x must be [T, C], got ", x.dim(), " dimensions");
  Activate call{};
  call.activation = activation;
  x = with_dense_rows(x);
  call.x = x.const_data_ptr();
  call.x_stride = x.stride(0);
  call.tokens = x.size(0);
  call.channels = call.x_channels = x.size(1);
  call.x_dtype = dtype_of(x, op, "x");
  if (up != nullptr) {
    const char* name = concat ? "y" : "up";
    STD_TORCH_CHECK(up->dim() == 2 && up->size(0) == x.size(0) && (concat || up->size(1) == x.size(1)), op, ": ", name,
                    concat ? " must have as many rows as x" : " must have the shape of x");
    STD_TORCH_CHECK(up->scalar_type() == x.scalar_type(), op, ": x and ", name,
                    " must have the same dtype");
    STD_TORCH_CHECK(up->device() == x.device(), op, ": x and ", name, " must be on one device");
    *up = with_dense_rows(*up);
    if (concat) call.channels += up->size(1);
    call.up = up->const_data_ptr();
    call.up_stride = up->stride(0);
  }
  return call;
}

// Where there is an index, each row of the result is one of x.
void take_rows(const char* op, const Optional& index, const Tensor& x, Activate& call) {
  if (!index) return;
  const bool dense = index->dim() == 1 && (index->size(0) <= 1 || index->stride(0) == 1);
  STD_TORCH_CHECK(dense && index->scalar_type() == ScalarType::Int, op,
                  ": index must be int32 [S] and contiguous");
  STD_TORCH_CHECK(index->device() == x.device(), op, ": x and index must be on one device");
  call.index = static_cast<const int32_t*>(index->const_data_ptr());
  call.tokens = index->size(0);
}

using Run = void (*)(const char* op, const Activate&, const Tensor& x);

void run_cpu(const char* op, const Activate& call, const Tensor& x) {
  const auto wrong = omni::outside(call.index, call.tokens, x.size(0));
  STD_TORCH_CHECK(!wrong, op, ": index holds ", wrong.value_or(0), ", x has ", x.size(0), " rows");
  const int64_t grain = std::max<int64_t>(1, omni::kParallelElements / std::max<int64_t>(1, call.channels));
  torch::stable::parallel_for(0, call.tokens, grain,
                              [&](int64_t begin, int64_t end) { omni_activate_cpu(&call, begin, end); });
}

#ifdef OMNI_GRPC_CUDA_ARCHS
void run_cuda(const char* op, const Activate& call, const Tensor& x) {
  if (call.tokens > 0) omni::launch(op, &omni_activate_cuda, call, x);
}
#endif

template <Run run>
Tensor plain(const char* op, Activation activation, Tensor& x, Tensor* up) {
  Activate call = activate_call(op, activation, x, up);
  Tensor out = omni::new_empty(x, {call.tokens, call.channels});
  call.out = out.mutable_data_ptr();
  run(op, call, x);
  return out;
}

template <Run run>
std::tuple<Tensor, Tensor> coded(const char* op, Activation activation, Tensor& x, Tensor* up, bool int8,
                                 const Optional& index = std::nullopt) {
  Activate call = activate_call(op, activation, x, up);
  take_rows(op, index, x, call);
  const auto kind = int8 ? ScalarType::Char : ScalarType::Float8_e4m3fn;
  Tensor codes = omni::new_empty(x, {call.tokens, call.channels}, kind);
  Tensor scales = omni::new_empty(x, {call.tokens}, ScalarType::Float);
  call.code = int8 ? omni::Code::kInt8 : omni::Code::kFloat8;
  call.out = codes.mutable_data_ptr();
  call.out_scale = static_cast<float*>(scales.mutable_data_ptr());
  run(op, call, x);
  return {codes, scales};
}

template <Run run>
Tensor gelu_tanh(Tensor x) {
  return plain<run>("gelu_tanh", Activation::kGeluTanh, x, nullptr);
}

template <Run run>
Tensor silu_mul(Tensor x, Tensor up) {
  return plain<run>("silu_mul", Activation::kSiluMul, x, &up);
}

template <Run run>
Tensor concat_gelu_tanh(Tensor x, Tensor y) {
  return plain<run>("concat_gelu_tanh", Activation::kConcatGeluTanh, x, &y);
}

template <Run run>
std::tuple<Tensor, Tensor> quantize_rows(Tensor x, const Optional& index, bool int8) {
  return coded<run>("quantize_rows", Activation::kIdentity, x, nullptr, int8, index);
}

template <Run run>
std::tuple<Tensor, Tensor> concat_gelu_tanh_quantize_rows(Tensor x, Tensor y, bool int8) {
  return coded<run>("concat_gelu_tanh_quantize_rows", Activation::kConcatGeluTanh, x, &y, int8);
}

template <Run run>
std::tuple<Tensor, Tensor> gelu_tanh_quantize_rows(Tensor x, bool int8) {
  return coded<run>("gelu_tanh_quantize_rows", Activation::kGeluTanh, x, nullptr, int8);
}

template <Run run>
std::tuple<Tensor, Tensor> silu_mul_quantize_rows(Tensor x, Tensor up, bool int8) {
  return coded<run>("silu_mul_quantize_rows", Activation::kSiluMul, x, &up, int8);
}

template <Run run, class Library>
void register_all(Library& m) {
  m.impl("gelu_tanh", TORCH_BOX(&gelu_tanh<run>));
  m.impl("silu_mul", TORCH_BOX(&silu_mul<run>));
  m.impl("concat_gelu_tanh", TORCH_BOX(&concat_gelu_tanh<run>));
  m.impl("concat_gelu_tanh_quantize_rows", TORCH_BOX(&concat_gelu_tanh_quantize_rows<run>));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows<run>));
  m.impl("gelu_tanh_quantize_rows", TORCH_BOX(&gelu_tanh_quantize_rows<run>));
  m.impl("silu_mul_quantize_rows", TORCH_BOX(&silu_mul_quantize_rows<run>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { register_all<run_cpu>(m); }

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { register_all<run_cuda>(m); }
#endif
