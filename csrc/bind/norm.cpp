// Binds the norm family.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "../common/dtype.h"
#include "../common/norm.h"
#include "bind.h"

namespace {

using omni::dtype_of;
using omni::kParallelElements;
using omni::ScalarType;
using omni::Tensor;
using omni::with_dense_rows;
using omni::Optional;

// What a call names, checked and with dense rows. It holds the tensors that the struct points into.
struct Operands {
  const char* op;
  Tensor x;
  Optional y, gate, scale, shift, index, weight, bias, y_weight;

  void check() const {
    STD_TORCH_CHECK(x.dim() == 2, op, ": x must be [T, C], got ", x.dim(), " dimensions");
    if (y) {
      STD_TORCH_CHECK(y->dim() == 2 && y->size(0) == x.size(0) && y->size(1) == x.size(1), op,
                      ": y must have the shape of x");
      STD_TORCH_CHECK(y->scalar_type() == x.scalar_type(), op,
                      ": x and y must have the same dtype");
      check_device(*y);
    }
    const char* first = nullptr;
    const Tensor* like = nullptr;
    for (const auto& [name, given] : {std::pair{"gate", &gate}, {"scale", &scale}, {"shift", &shift}}) {
      if (!*given) continue;
      const Tensor& table = **given;
      STD_TORCH_CHECK(table.dim() == 2, op, ": ", name, " must be [M, C], got ", table.dim(), " dimensions");
      STD_TORCH_CHECK(table.size(1) == x.size(1), op, ": x has ", x.size(1), " channels and ", name, " ",
                      table.size(1));
      check_device(table);
      if (like == nullptr) {
        first = name;
        like = &table;
        continue;
      }
      STD_TORCH_CHECK(table.size(0) == like->size(0), op, ": ", first, " has ", like->size(0), " rows and ", name, " ",
                      table.size(0));
      STD_TORCH_CHECK(table.scalar_type() == like->scalar_type(), op, ": ", first, " and ", name,
                      " must have the same dtype");
    }
    for (const auto& [name, given] : {std::pair{"weight", &weight}, {"bias", &bias}, {"y_weight", &y_weight}}) {
      if (!*given) continue;
      const Tensor& vector = **given;
      STD_TORCH_CHECK(vector.dim() == 1 && vector.size(0) == x.size(1), op, ": ", name, " must be [C] with C = ",
                      x.size(1));
      check_device(vector);
    }
    if (index) {
      STD_TORCH_CHECK(index->scalar_type() == ScalarType::Int && index->dim() == 1, op,
                      ": index must be int32 [T], got ", index->dim(), " dimensions or another dtype");
      STD_TORCH_CHECK(index->size(0) == x.size(0), op, ": index has ", index->size(0), " entries for ", x.size(0),
                      " tokens");
      check_device(*index);
    }
    STD_TORCH_CHECK(index || like == nullptr || like->size(0) == 1, op, ": index is missing: ",
                    first == nullptr ? "" : first, " has ", like == nullptr ? 0 : like->size(0),
                    " rows, and each token needs the number of its own");
  }

  // The struct but for the outputs.
  omni::Norm call(double eps, double base, bool rms) {
    check();
    omni::Norm call{};
    x = with_dense_rows(x);
    call.x = x.const_data_ptr();
    call.x_stride = x.stride(0);
    call.y = rows_of(y, call.y_stride);
    call.gate = rows_of(gate, call.gate_stride);
    call.scale = rows_of(scale, call.scale_stride);
    call.shift = rows_of(shift, call.shift_stride);
    int64_t one = 1;
    call.weight = rows_of(weight, one);
    call.bias = rows_of(bias, one);
    call.y_weight = rows_of(y_weight, one);
    call.x_dtype = dtype_of(x, op, "x");
    call.parameter_dtype = parameter_dtype();
    call.rows = 1;
    for (const Optional* table : {&gate, &scale, &shift}) {
      if (*table) call.rows = (*table)->size(0);
    }
    if (call.rows != 1) call.index = static_cast<const int32_t*>(rows_of(index, one));
    call.tokens = x.size(0);
    call.channels = x.size(1);
    call.eps = static_cast<float>(eps);
    call.base = static_cast<float>(base);
    call.rms = rms;
    return call;
  }

 private:
  void check_device(const Tensor& tensor) const {
    STD_TORCH_CHECK(tensor.device() == x.device(), op, ": all tensors must be on one device");
  }

  omni::Dtype parameter_dtype() const {
    const Tensor* first = nullptr;
    for (const Optional* given : {&gate, &scale, &shift, &weight, &bias, &y_weight}) {
      if (!*given) continue;
      if (first == nullptr) first = &**given;
      STD_TORCH_CHECK((*given)->scalar_type() == first->scalar_type(), op,
                      ": the kernel takes modulation and weights of the same dtype; the function of this name in "
                      "omni_grpc.ops serves every mixture");
    }
    return first == nullptr ? dtype_of(x, op, "x") : dtype_of(*first, op, "the modulation");
  }

  static const void* rows_of(Optional& given, int64_t& stride) {
    if (!given) return nullptr;
    given = with_dense_rows(*given);
    stride = given->stride(0);
    return given->const_data_ptr();
  }
};

using Run = void (*)(const char* op, const omni::Norm&, const Tensor& x);

void run_cpu(const char* op, const omni::Norm& call, const Tensor&) {
  if (call.tokens == 0 || call.channels == 0) return;
  const auto wrong = omni::outside(call.index, call.tokens, call.rows);
  STD_TORCH_CHECK(!wrong, op, ": index holds ", wrong.value_or(0), ", gate, scale and shift have ", call.rows, " rows");
  const int64_t grain = std::max<int64_t>(1, kParallelElements / call.channels);
  torch::stable::parallel_for(0, call.tokens, grain,
                              [&](int64_t begin, int64_t end) { omni_norm_cpu(&call, begin, end); });
}

#ifdef OMNI_GRPC_CUDA_ARCHS
void run_cuda(const char* op, const omni::Norm& call, const Tensor& x) {
  if (call.tokens == 0 || call.channels == 0) return;
  omni::launch(op, &omni_norm_cuda, call, x);
}
#endif

Tensor rows_like(const Tensor& x, omni::Norm& call) {
  Tensor out = omni::new_empty(x, x.sizes());
  call.out = out.mutable_data_ptr();
  return out;
}

Tensor sum_like(const Tensor& x, omni::Norm& call) {
  Tensor sum = omni::new_empty(x, x.sizes());
  call.sum = sum.mutable_data_ptr();
  return sum;
}

std::tuple<Tensor, Tensor> codes_like(const Tensor& x, bool int8, omni::Norm& call) {
  Tensor codes = omni::new_empty(x, x.sizes(), int8 ? ScalarType::Char : ScalarType::Float8_e4m3fn);
  Tensor scales = omni::new_empty(x, {x.size(0)}, ScalarType::Float);
  call.code = int8 ? omni::Code::kInt8 : omni::Code::kFloat8;
  call.out = codes.mutable_data_ptr();
  call.out_scale = static_cast<float*>(scales.mutable_data_ptr());
  if (call.channels == 0) torch::stable::fill_(scales, 0.);
  return {codes, scales};
}

// --- the ops, in the order of their schemas --------------------------------------------------------------------------

template <Run run>
Tensor norm_modulate(const Tensor& x, const Optional& scale, const Optional& shift, const Optional& index, double eps,
                     const Optional& weight, const Optional& bias, bool rms, double base) {
  Operands operands{"norm_modulate", x, {}, {}, scale, shift, index, weight, bias, {}};
  omni::Norm call = operands.call(eps, base, rms);
  Tensor out = rows_like(x, call);
  run(operands.op, call, x);
  return out;
}

template <Run run>
Tensor gate_add(const Tensor& x, const Tensor& y, const Optional& gate, const Optional& index, double eps,
                const Optional& y_weight) {
  Operands operands{"gate_add", x, y, gate, {}, {}, index, {}, {}, y_weight};
  omni::Norm call = operands.call(eps, 1., false);
  Tensor sum = sum_like(x, call);
  run(operands.op, call, x);
  return sum;
}

template <Run run>
std::tuple<Tensor, Tensor> gate_add_norm_modulate(const Tensor& x, const Tensor& y, const Optional& gate,
                                                  const Optional& scale, const Optional& shift, const Optional& index,
                                                  double eps, const Optional& weight, const Optional& bias, bool rms,
                                                  double base, const Optional& y_weight) {
  Operands operands{"gate_add_norm_modulate", x, y, gate, scale, shift, index, weight, bias, y_weight};
  omni::Norm call = operands.call(eps, base, rms);
  Tensor sum = sum_like(x, call), out = rows_like(x, call);
  run(operands.op, call, x);
  return {sum, out};
}

template <Run run>
std::tuple<Tensor, Tensor> norm_modulate_quantize(const Tensor& x, const Optional& scale, const Optional& shift,
                                                  const Optional& index, double eps, const Optional& weight,
                                                  const Optional& bias, bool rms, double base, bool int8) {
  Operands operands{"norm_modulate_quantize", x, {}, {}, scale, shift, index, weight, bias, {}};
  omni::Norm call = operands.call(eps, base, rms);
  auto result = codes_like(x, int8, call);
  run(operands.op, call, x);
  return result;
}

template <Run run>
std::tuple<Tensor, Tensor, Tensor> gate_add_norm_modulate_quantize(
    const Tensor& x, const Tensor& y, const Optional& gate, const Optional& scale, const Optional& shift,
    const Optional& index, double eps, const Optional& weight, const Optional& bias, bool rms, double base,
    const Optional& y_weight, bool int8) {
  Operands operands{"gate_add_norm_modulate_quantize", x, y, gate, scale, shift, index, weight, bias, y_weight};
  omni::Norm call = operands.call(eps, base, rms);
  Tensor sum = sum_like(x, call);
  auto [codes, scales] = codes_like(x, int8, call);
  run(operands.op, call, x);
  return {sum, codes, scales};
}

template <Run run, class Library>
void register_all(Library& m) {
  m.impl("norm_modulate", TORCH_BOX(&norm_modulate<run>));
  m.impl("norm_modulate_quantize", TORCH_BOX(&norm_modulate_quantize<run>));
  m.impl("gate_add", TORCH_BOX(&gate_add<run>));
  m.impl("gate_add_norm_modulate", TORCH_BOX(&gate_add_norm_modulate<run>));
  m.impl("gate_add_norm_modulate_quantize", TORCH_BOX(&gate_add_norm_modulate_quantize<run>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { register_all<run_cpu>(m); }

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { register_all<run_cuda>(m); }
#endif
