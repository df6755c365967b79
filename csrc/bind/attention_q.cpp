// Binds the 8-bit attention family; on the CPU its references serve.
#include <string>
#include <vector>

#include "../common/attention_q.h"
#include "bind.h"

#ifdef OMNI_GRPC_CUDA_ARCHS
namespace {

using omni::ScalarType;
using omni::Tensor;
using Tensors = std::vector<Tensor>;

bool on_same_device(const Tensor& like, const Tensors& others) {
  for (const Tensor& other : others) {
    if (other.device() != like.device()) return false;
  }
  return true;
}

// cu_q and cu_k become tensors that the caller keeps.
omni::PackedRows rows_of(const char* op, const Tensor& like, Tensor& cu_q, Tensor& cu_k) {
  STD_TORCH_CHECK(cu_q.scalar_type() == ScalarType::Int && cu_k.scalar_type() == ScalarType::Int && cu_q.dim() == 1 &&
                      cu_k.dim() == 1 && cu_k.size(0) == cu_q.size(0),
                  op, ": cu_q and cu_k must be int32 and as long as each other");
  STD_TORCH_CHECK(cu_q.size(0) > 0, op, ": cu_q is empty; it begins with 0");
  STD_TORCH_CHECK(on_same_device(like, {cu_q, cu_k}), op, ": all tensors must be on one device");
  cu_q = torch::stable::contiguous(cu_q);
  cu_k = torch::stable::contiguous(cu_k);
  omni::PackedRows rows{};
  rows.cu_q = static_cast<const int32_t*>(cu_q.const_data_ptr());
  rows.cu_k = static_cast<const int32_t*>(cu_k.const_data_ptr());
  rows.rows = cu_q.size(0) - 1;
  return rows;
}

// Pieces of 16 bytes wherever a token and a head begin.
Tensor in_pieces(const Tensor& x) {
  constexpr int64_t kPiece = 8;
  const bool fits = x.stride(2) == 1 && x.stride(0) % kPiece == 0 && x.stride(1) % kPiece == 0 &&
                    reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return fits ? x : torch::stable::contiguous(x);
}

Tensors attention_quantize(const Tensor& q, const Tensor& k, const Tensor& v, Tensor cu_q, Tensor cu_k) {
  constexpr const char* kOp = "attention_quantize";
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, kOp, ": q, k, v must be [T, H, D], got ", q.dim(), ", ",
                  k.dim(), " and ", v.dim(), " dimensions");
  const int64_t heads = q.size(1), kv_heads = k.size(1);
  STD_TORCH_CHECK(v.size(0) == k.size(0) && v.size(1) == kv_heads && v.size(2) == k.size(2), kOp,
                  ": k and v must be alike");
  STD_TORCH_CHECK(q.size(2) == omni::kHeadSize && k.size(2) == omni::kHeadSize, kOp, ": heads must have ",
                  omni::kHeadSize, " channels, q has ", q.size(2), " and k ", k.size(2));
  STD_TORCH_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, kOp, ": ", heads,
                  " query heads are no multiple of ", kv_heads, " key heads");
  Tensors x{q, k, v};
  for (const Tensor& each : x) {
    STD_TORCH_CHECK(each.scalar_type() == ScalarType::BFloat16, kOp, ": the kernel takes bfloat16 alone");
  }
  STD_TORCH_CHECK(on_same_device(q, x), kOp, ": all tensors must be on one device");
  omni::AttentionQuantize call{};
  call.rows = rows_of(kOp, q, cu_q, cu_k);
  call.rows.queries = q.size(0);
  call.rows.keys = k.size(0);
  call.rows.heads = heads;
  call.rows.kv_heads = kv_heads;
  for (int i = 0; i < 3; ++i) {
    x[i] = in_pieces(x[i]);
    call.x[i] = x[i].const_data_ptr();
    call.token_stride[i] = x[i].stride(0);
    call.head_stride[i] = x[i].stride(1);
  }
  const int64_t q_tiles = call.rows.queries / omni::kTileQueries + call.rows.rows;
  const int64_t k_tiles = call.rows.keys / omni::kTileKeys + call.rows.rows;
  const auto make = [&q](std::vector<int64_t> size, ScalarType type) {
    return torch::stable::new_empty(q, size, type);
  };
  Tensors out{make({heads, q_tiles, omni::kTileQueries, omni::kHeadSize}, ScalarType::Char),
              make({heads, q_tiles, omni::kTileQueries}, ScalarType::Float),
              make({kv_heads, k_tiles, omni::kTileKeys, omni::kHeadSize}, ScalarType::Char),
              make({kv_heads, k_tiles}, ScalarType::Float),
              make({kv_heads, k_tiles, omni::kHeadSize, omni::kTileKeys}, ScalarType::Float8_e4m3fn),
              make({kv_heads, k_tiles}, ScalarType::Float)};
  call.out.q = static_cast<int8_t*>(out[0].mutable_data_ptr());
  call.out.q_scale = static_cast<float*>(out[1].mutable_data_ptr());
  call.out.k = static_cast<int8_t*>(out[2].mutable_data_ptr());
  call.out.k_scale = static_cast<float*>(out[3].mutable_data_ptr());
  call.out.v = static_cast<uint8_t*>(out[4].mutable_data_ptr());
  call.out.v_scale = static_cast<float*>(out[5].mutable_data_ptr());
  call.out.q_tiles = q_tiles;
  call.out.k_tiles = k_tiles;
  if (call.rows.rows > 0) omni::launch(kOp, &omni_attention_quantize_cuda, call, q);
  return out;
}

omni::AttentionPlan plan_of(const std::string& plan) {
  if (plan == "plain") return omni::AttentionPlan::kPlain;
  if (plan == "overlapped") return omni::AttentionPlan::kOverlapped;
  STD_TORCH_CHECK(plan == "ping_pong", "attention_q: plan must be one of plain, overlapped, ping_pong, got ", plan);
  return omni::AttentionPlan::kPingPong;
}

Tensor attention_q(const Tensor& q, const Tensor& q_scale, const Tensor& k, const Tensor& k_scale, const Tensor& v,
                   const Tensor& v_scale, Tensor cu_q, Tensor cu_k, int64_t queries, double scale,
                   const std::string& plan) {
  constexpr const char* kOp = "attention_q";
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Char && k.scalar_type() == ScalarType::Char &&
                      v.scalar_type() == ScalarType::Float8_e4m3fn,
                  kOp, ": q and k must be int8 and v float8_e4m3fn");
  STD_TORCH_CHECK(scale > 0, kOp, ": scale must be above 0, got ", scale);
  omni::AttentionQ call{};
  call.rows = rows_of(kOp, q, cu_q, cu_k);
  const int64_t heads = q.dim() == 4 ? q.size(0) : 0, kv_heads = k.dim() == 4 ? k.size(0) : 0;
  STD_TORCH_CHECK(heads > 0 && q.size(1) == queries / omni::kTileQueries + call.rows.rows &&
                      q.size(2) == omni::kTileQueries && q.size(3) == omni::kHeadSize,
                  kOp, ": q is not what attention_quantize gives for ", queries, " queries in ", call.rows.rows,
                  " rows");
  STD_TORCH_CHECK(kv_heads > 0 && k.size(2) == omni::kTileKeys && k.size(3) == omni::kHeadSize && v.dim() == 4 &&
                      v.size(0) == kv_heads && v.size(1) == k.size(1) && v.size(2) == omni::kHeadSize &&
                      v.size(3) == omni::kTileKeys,
                  kOp, ": k and v are not what attention_quantize gives");
  STD_TORCH_CHECK(heads % kv_heads == 0, kOp, ": ", heads, " query heads are no multiple of ", kv_heads, " key heads");
  STD_TORCH_CHECK(q_scale.numel() == heads * q.size(1) * omni::kTileQueries && k_scale.numel() == kv_heads * k.size(1) &&
                      v_scale.numel() == k_scale.numel(),
                  kOp, ": the scales do not fit the codes");
  const Tensors parts{torch::stable::contiguous(q),       torch::stable::contiguous(k),
                      torch::stable::contiguous(v),       torch::stable::contiguous(q_scale),
                      torch::stable::contiguous(k_scale), torch::stable::contiguous(v_scale)};
  STD_TORCH_CHECK(on_same_device(q, parts), kOp, ": all tensors must be on one device");
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
  Tensor out = torch::stable::new_empty(q, {queries, heads, omni::kHeadSize}, ScalarType::BFloat16);
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
