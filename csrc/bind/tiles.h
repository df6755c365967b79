// What the bindings share that make operands of 8-bit attention.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/attention_q.h"
#include "../common/rope.h"
#include "bind.h"

#ifdef OMNI_GRPC_CUDA_ARCHS

namespace omni {

inline bool on_same_device(const Tensor& like, const std::vector<Tensor>& others) {
  for (const Tensor& other : others) {
    if (other.device() != like.device()) return false;
  }
  return true;
}

// Returns the tensors that `rows` then points to.
inline std::vector<Tensor> set_rows(const char* op, PackedRows& rows, const Tensor& like, const Tensor& cu_q,
                                    const Tensor& cu_k) {
  STD_TORCH_CHECK(cu_q.scalar_type() == ScalarType::Int && cu_k.scalar_type() == ScalarType::Int && cu_q.dim() == 1 &&
                      cu_k.dim() == 1 && cu_k.size(0) == cu_q.size(0),
                  op, ": cu_q and cu_k must be int32 and of the same length");
  STD_TORCH_CHECK(cu_q.size(0) > 0, op, ": cu_q is empty; it begins with 0");
  STD_TORCH_CHECK(on_same_device(like, {cu_q, cu_k}), op, ": all tensors must be on one device");
  std::vector<Tensor> offsets{omni::contiguous(cu_q), omni::contiguous(cu_k)};
  rows.cu_q = static_cast<const int32_t*>(offsets[0].const_data_ptr());
  rows.cu_k = static_cast<const int32_t*>(offsets[1].const_data_ptr());
  rows.rows = cu_q.size(0) - 1;
  return offsets;
}

// Makes the operands and what it takes to make them. The caller has set `from`, and lengths and heads of `rows`.
inline std::vector<Tensor> code_tiles(const char* op, AttentionCode& call, const Tensor& like, const Tensor& cu_q,
                                      const Tensor& cu_k) {
  const std::vector<Tensor> offsets = set_rows(op, call.rows, like, cu_q, cu_k);
  const auto& rows = call.rows;
  const int64_t q_tiles = rows.queries / kTileQueries + rows.rows, k_tiles = rows.keys / kTileKeys + rows.rows;
  const auto make = [&like](std::vector<int64_t> size, ScalarType type) {
    return omni::new_empty(like, size, type);
  };
  std::vector<Tensor> out{make({rows.heads, q_tiles, kTileQueries, kHeadSize}, ScalarType::Char),
                          make({rows.heads, q_tiles, kTileQueries}, ScalarType::Float),
                          make({rows.kv_heads, k_tiles, kTileKeys, kHeadSize}, ScalarType::Char),
                          make({rows.kv_heads, k_tiles}, ScalarType::Float),
                          make({rows.kv_heads, k_tiles, kHeadSize, kTileKeys}, ScalarType::Float8_e4m3fn),
                          make({rows.kv_heads, k_tiles}, ScalarType::Float)};
  call.out = {static_cast<int8_t*>(out[0].mutable_data_ptr()),  static_cast<float*>(out[1].mutable_data_ptr()),
              static_cast<int8_t*>(out[2].mutable_data_ptr()),  static_cast<float*>(out[3].mutable_data_ptr()),
              static_cast<uint8_t*>(out[4].mutable_data_ptr()), static_cast<float*>(out[5].mutable_data_ptr()),
              q_tiles, k_tiles};
  const Tensor centre = make({rows.rows, rows.kv_heads, kHeadSize}, ScalarType::Float);
  call.centre = static_cast<float*>(centre.mutable_data_ptr());
  std::vector<Tensor> work;
  bool placed = false;  // a stream without tokens may have no address
  for (int s = 0; s < call.from.stream_count; ++s) placed = placed || call.from.streams[s].place != nullptr;
  if (placed) {
    work.push_back(make({rows.queries}, ScalarType::Int));
    call.source = static_cast<int32_t*>(work.back().mutable_data_ptr());
  }
  if (call.from.norm == QkNorm::kRmsAcross) {
    work.push_back(make({2, rows.queries}, ScalarType::Float));
    call.factor = static_cast<float*>(work.back().mutable_data_ptr());
  }
  if (rows.rows > 0) launch(op, &omni_attention_code_cuda, call, like);
  return out;
}

}  // namespace omni

#endif
