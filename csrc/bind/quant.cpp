// Binds the quant family.
#include <algorithm>
#include <tuple>

#include "../common/quant.h"
#include "bind.h"

namespace {

using omni::Activate;
using omni::Activation;
using omni::dtype_of;
using omni::ScalarType;
using omni::Tensor;
using omni::with_dense_rows;

// The struct but for the output; x and up become rows that the caller keeps.
Activate activate_call(const char* op, Activation activation, Tensor& x, Tensor* up) {
  STD_TORCH_CHECK(x.dim() == 2, op, ": x must be [T, C], got ", x.dim(), " dimensions");
  Activate call{};
  call.activation = activation;
  x = with_dense_rows(x);
  call.x = x.const_data_ptr();
  call.x_stride = x.stride(0);
  call.tokens = x.size(0);
  call.channels = x.size(1);
  call.x_dtype = dtype_of(x, op, "x");
  if (up != nullptr) {
    STD_TORCH_CHECK(up->dim() == 2 && up->size(0) == x.size(0) && up->size(1) == x.size(1), op,
                    ": up must have the shape of x");
    STD_TORCH_CHECK(up->scalar_type() == x.scalar_type(), op, ": x and up have different dtypes; they must be alike");
    STD_TORCH_CHECK(up->device() == x.device(), op, ": x and up must be on one device");
    *up = with_dense_rows(*up);
    call.up = up->const_data_ptr();
    call.up_stride = up->stride(0);
  }
  return call;
}

Tensor rows_like(const Tensor& x, Activate& call) {
  Tensor out = omni::new_empty(x, x.sizes());
  call.out = out.mutable_data_ptr();
  return out;
}

using Run = void (*)(const char* op, const Activate&, const Tensor& x);

void run_cpu(const char*, const Activate& call, const Tensor&) {
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
std::tuple<Tensor, Tensor> coded(const char* op, Activation activation, Tensor& x, Tensor* up, bool int8) {
  Activate call = activate_call(op, activation, x, up);
  Tensor codes = omni::new_empty(x, x.sizes(), int8 ? ScalarType::Char : ScalarType::Float8_e4m3fn);
  Tensor scales = omni::new_empty(x, {x.size(0)}, ScalarType::Float);
  call.code = int8 ? omni::Code::kInt8 : omni::Code::kFloat8;
  call.out = codes.mutable_data_ptr();
  call.out_scale = static_cast<float*>(scales.mutable_data_ptr());
  run(op, call, x);
  return {codes, scales};
}

template <Run run>
Tensor gelu_tanh(Tensor x) {
  Activate call = activate_call("gelu_tanh", Activation::kGeluTanh, x, nullptr);
  Tensor out = rows_like(x, call);
  run("gelu_tanh", call, x);
  return out;
}

template <Run run>
Tensor silu_mul(Tensor x, Tensor up) {
  Activate call = activate_call("silu_mul", Activation::kSiluMul, x, &up);
  Tensor out = rows_like(x, call);
  run("silu_mul", call, x);
  return out;
}

template <Run run>
std::tuple<Tensor, Tensor> quantize_rows(Tensor x, bool int8) {
  return coded<run>("quantize_rows", Activation::kIdentity, x, nullptr, int8);
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
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows<run>));
  m.impl("gelu_tanh_quantize_rows", TORCH_BOX(&gelu_tanh_quantize_rows<run>));
  m.impl("silu_mul_quantize_rows", TORCH_BOX(&silu_mul_quantize_rows<run>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { register_all<run_cpu>(m); }

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { register_all<run_cuda>(m); }
#endif
