// Binds the 8-bit attention family; on the CPU its references serve.
#include <cstdint>
#include <string>
#include <vector>

#include "../common/attention_q.h"
#include "../common/rope.h"
#include "bind.h"
#include "tiles.h"

#ifdef OMNI_GRPC_CUDA_ARCHS
namespace {

using omni::ScalarType;
using omni::Tensor;
using Tensors = std::vector<Tensor>;

// A token's heads side by side, and each token at a multiple of 16 bytes.
Tensor with_dense_heads(const Tensor& x) {
  constexpr int64_t kPiece = 8;
  const bool fits = x.stride(2) == 1 && (x.stride(1) == x.size(2) || x.size(1) == 1) && x.stride(0) % kPiece == 0 &&
                    reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return fits ? x : omni::contiguous(x);
}

Tensors attention_quantize(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k) {
  constexpr const char* kOp = "attention_quantize";
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, kOp, ": q, k, v must be [T, H, D], got ", q.dim(), ", ",
                  k.dim(), " and ", v.dim(), " dimensions");
  const int64_t heads = q.size(1), kv_heads = k.size(1);
  STD_TORCH_CHECK(v.size(0) == k.size(0) && v.size(1) == kv_heads && v.size(2) == k.size(2), kOp,
                  ": k and v must have the same shape");
  STD_TORCH_CHECK(q.size(2) == omni::kHeadSize && k.size(2) == omni::kHeadSize, kOp, ": heads must have ",
                  omni::kHeadSize, " channels, got ", q.size(2), " and ", k.size(2));
  STD_TORCH_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, kOp, ": ", heads,
                  " query heads are not a multiple of ", kv_heads, " key heads");
  const Tensors x{with_dense_heads(q), with_dense_heads(k), with_dense_heads(v)};
  for (const Tensor& each : x) {
    STD_TORCH_CHECK(each.scalar_type() == ScalarType::BFloat16, kOp, ": the kernel takes bfloat16 alone");
  }
  STD_TORCH_CHECK(omni::on_same_device(q, x), kOp, ": all tensors must be on one device");
  omni::AttentionCode call{};
  auto& stream = call.from.streams[0];
  stream.q = x[0].const_data_ptr();
  stream.k = x[1].const_data_ptr();
  stream.v = x[2].const_data_ptr();
  stream.q_stride = x[0].stride(0);
  stream.k_stride = x[1].stride(0);
  stream.v_stride = x[2].stride(0);
  call.from.stream_count = 1;
  call.from.norm = omni::QkNorm::kNone;
  call.rows.queries = q.size(0);
  call.rows.keys = k.size(0);
  call.rows.heads = heads;
  call.rows.kv_heads = kv_heads;
  return omni::code_tiles(kOp, call, q, cu_q, cu_k);
}

omni::AttentionPlan plan_of(const std::string& plan) {
  if (plan == "together") return omni::AttentionPlan::kTogether;
  if (plan == "turns") return omni::AttentionPlan::kTurns;
  STD_TORCH_CHECK(plan == "apart", "attention_q: plan must be one of together, turns, apart, got ", plan);
  return omni::AttentionPlan::kApart;
}

Tensor attention_q(const Tensor& q, const Tensor& q_scale, const Tensor& k, const Tensor& k_scale, const Tensor& v,
                   const Tensor& v_scale, const Tensor& cu_q, const Tensor& cu_k, int64_t queries, double scale,
                   const std::string& plan) {
  constexpr const char* kOp = "attention_q";
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Char && k.scalar_type() == ScalarType::Char &&
                      v.scalar_type() == ScalarType::Float8_e4m3fn,
                  kOp, ": q and k must be int8 and v float8_e4m3fn");
  STD_TORCH_CHECK(scale > 0, kOp, ": scale must be above 0, got ", scale);
  omni::AttentionQ call{};
  const Tensors offsets = omni::set_rows(kOp, call.rows, q, cu_q, cu_k);
  const int64_t heads = q.dim() == 4 ? q.size(0) : 0, kv_heads = k.dim() == 4 ? k.size(0) : 0;
  STD_TORCH_CHECK(heads > 0 && q.size(1) == queries / omni::kTileQueries + call.rows.rows &&
                      q.size(2) == omni::kTileQueries && q.size(3) == omni::kHeadSize,
                  kOp, ": q is not what attention_quantize returns for ", queries, " queries in ", call.rows.rows,
                  " rows");
  STD_TORCH_CHECK(kv_heads > 0 && k.size(2) == omni::kTileKeys && k.size(3) == omni::kHeadSize && v.dim() == 4 &&
                      v.size(0) == kv_heads && v.size(1) == k.size(1) && v.size(2) == omni::kHeadSize &&
                      v.size(3) == omni::kTileKeys,
                  kOp, ": k and v are not what attention_quantize returns");
  STD_TORCH_CHECK(heads % kv_heads == 0, kOp, ": ", heads, " query heads are not a multiple of ", kv_heads,
                  " key heads");
  STD_TORCH_CHECK(q_scale.numel() == heads * q.size(1) * omni::kTileQueries && k_scale.numel() == kv_heads * k.size(1) &&
                      v_scale.numel() == k_scale.numel(),
                  kOp, ": the scales do not match the quantized values");
  const Tensors parts{omni::contiguous(q),       omni::contiguous(k),
                      omni::contiguous(v),       omni::contiguous(q_scale),
                      omni::contiguous(k_scale), omni::contiguous(v_scale)};
  STD_TORCH_CHECK(omni::on_same_device(q, parts), kOp, ": all tensors must be on one device");
  for (int i = 3; i < 6; ++i) {
    STD_TORCH_CHECK(parts[i].scalar_type() == ScalarType::Float, kOp, ": scales must be float32");
  }
  call.rows.queries = queries;
  call.rows.heads = heads;
  call.rows.kv_heads = kv_heads;
  // the struct is shared with the op that writes through these
  const auto at = [&parts](int i) { return const_cast<void*>(parts[i].const_data_ptr()); };
  call.in = {static_cast<int8_t*>(at(0)),  static_cast<float*>(at(3)),   static_cast<int8_t*>(at(1)),
             static_cast<float*>(at(4)),   static_cast<uint8_t*>(at(2)), static_cast<float*>(at(5)),
             q.size(1), k.size(1)};
  call.scale = static_cast<float>(scale);
  call.plan = plan_of(plan);
  call.persistent = true;
  Tensor out = omni::new_empty(q, {queries, heads, omni::kHeadSize}, ScalarType::BFloat16);
  call.out = out.mutable_data_ptr();
  if (queries > 0) omni::launch(kOp, &omni_attention_q_cuda, call, q);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) {
  m.impl("attention_quantize", TORCH_BOX(&attention_quantize));
  m.impl("attention_q", TORCH_BOX(&attention_q));
}
#endif
