// Binds the heads family. On the CPU its reference serves.
#include <cstdint>
#include <tuple>

#include "../common/heads.h"
#include "bind.h"

#ifdef OMNI_GRPC_CUDA_ARCHS
namespace {

using omni::PackedHeads;
using omni::QuantizeHeads;
using omni::ScalarType;
using omni::Tensor;

// A head's elements side by side, and its heads too.
Tensor with_dense_heads(const Tensor& x) {
  const bool dense = (x.stride(2) == 1 || x.size(2) == 1) && (x.stride(1) == x.size(2) || x.size(1) == 1);
  return dense ? x : omni::contiguous(x);
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k) {
  for (const Tensor* x : {&q, &k, &v}) {
    STD_TORCH_CHECK(x->dim() == 3, "quantize_heads: q, k, v must be [T, H, D], got ", x->dim(), " dimensions");
    STD_TORCH_CHECK(x->scalar_type() == q.scalar_type(), "quantize_heads: q, k and v must have the same dtype");
    STD_TORCH_CHECK(x->device() == q.device(), "quantize_heads: all tensors must be on one device");
  }
  STD_TORCH_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1) && k.size(2) == v.size(2) && k.size(2) == q.size(2),
                  "quantize_heads: k and v must have the same shape and q's head size");
  STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "quantize_heads: ", q.size(1),
                  " query heads are not a multiple of ", k.size(1), " key heads");
  for (const Tensor* cu : {&cu_q, &cu_k}) {
    STD_TORCH_CHECK(cu->scalar_type() == ScalarType::Int && cu->dim() == 1 && cu->size(0) == cu_q.size(0) &&
                        cu->size(0) > 0 && cu->device() == q.device(),
                    "quantize_heads: cu_q and cu_k must be int32, on the device of q and of the same length");
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_heads_cuda(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k,
                                                               int64_t longest_q, int64_t longest_k) {
  check(q, k, v, cu_q, cu_k);
  const Tensor given[3] = {with_dense_heads(q), with_dense_heads(k), with_dense_heads(v)};
  const Tensor offsets[2] = {omni::contiguous(cu_q), omni::contiguous(cu_k)};
  Tensor codes[3];
  QuantizeHeads call{};
  call.x_dtype = omni::dtype_of(q, "quantize_heads", "q");
  call.rows = cu_q.size(0) - 1;
  call.kv_heads = k.size(1);
  call.head_size = q.size(2);
  for (int i = 0; i < 3; ++i) {
    codes[i] = omni::new_empty(given[i], given[i].sizes(), ScalarType::Float8_e4m3fn);
    PackedHeads& part = call.parts[i];
    part.x = given[i].const_data_ptr();
    part.codes = codes[i].mutable_data_ptr();
    part.cu = static_cast<const int32_t*>(offsets[i > 0].const_data_ptr());
    part.stride = given[i].stride(0);
    part.heads = given[i].size(1);
    part.longest = i == 0 ? longest_q : longest_k;
  }
  Tensor peaks = omni::new_empty(q, {3, call.rows, call.kv_heads}, ScalarType::Int);
  Tensor scales = omni::new_empty(q, {3, call.rows, call.kv_heads}, ScalarType::Float);
  call.peaks = static_cast<uint32_t*>(peaks.mutable_data_ptr());
  call.scales = static_cast<float*>(scales.mutable_data_ptr());
  if (call.rows > 0) omni::launch("quantize_heads", &omni_quantize_heads_cuda, call, q);
  return {codes[0], codes[1], codes[2], scales};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { m.impl("quantize_heads", TORCH_BOX(&quantize_heads_cuda)); }
#endif
