// Binds attention on the CPU. On CUDA it is other packages' kernels that compute it, but for those in 8 bits.
#include "../common/attention.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bind.h"

namespace {

using omni::Attention;
using omni::AttentionPiece;
using omni::ScalarType;
using omni::Tensor;

constexpr const char* kOp = "attention_cpu";
constexpr int64_t kParallelProducts = 500000;  // what one thread should have to do at least, about 10 us

void check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, kOp, ": q, k, v must be [T, H, D], got ", q.dim(), ", ",
                  k.dim(), " and ", v.dim(), " dimensions");
  STD_TORCH_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1) && k.size(2) == v.size(2), kOp, ": k is (",
                  k.size(0), ", ", k.size(1), ", ", k.size(2), ") and v (", v.size(0), ", ", v.size(1), ", ", v.size(2),
                  "); they must have the same shape");
  STD_TORCH_CHECK(q.size(2) == k.size(2), kOp, ": head sizes differ: q ", q.size(2), ", k ", k.size(2));
  STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, kOp, ": ", q.size(1),
                  " query heads are not a multiple of ", k.size(1), " key heads");
  STD_TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), kOp,
                  ": q, k and v must have the same dtype");
  STD_TORCH_CHECK(cu_q.scalar_type() == ScalarType::Int && cu_k.scalar_type() == ScalarType::Int && cu_q.dim() == 1 &&
                      cu_k.dim() == 1 && cu_q.size(0) == cu_k.size(0) && cu_q.size(0) > 0,
                  kOp, ": cu_q and cu_k must be int32 and of the same length");
}

// The kernel reads where they point.
void check_offsets(const char* name, const int32_t* cu, int64_t rows, int64_t tokens) {
  STD_TORCH_CHECK(cu[0] == 0 && cu[rows] == tokens && std::is_sorted(cu, cu + rows + 1), kOp, ": ", name,
                  " must go from 0 to ", tokens, " without decreasing");
}

std::vector<AttentionPiece> pieces(const Attention& call, int64_t rows) {
  std::vector<AttentionPiece> made;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t queries = call.cu_q[row + 1] - call.cu_q[row];
    for (int64_t head = 0; head < call.heads; ++head) {
      for (int64_t first = 0; first < queries; first += omni::kPieceQueries) {
        made.push_back({row, head, first, std::min(queries - first, omni::kPieceQueries)});
      }
    }
  }
  return made;
}

// Memory of this thread, kept from call to call.
float* scratch(int64_t floats) {
  constexpr size_t kLine = 64;
  thread_local std::vector<float> memory;
  const size_t needed = static_cast<size_t>(floats) + kLine / sizeof(float);
  if (memory.size() < needed) memory.resize(needed);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + kLine - 1) / kLine * kLine);
}

void run(const Attention& call, int64_t rows) {
  const std::vector<AttentionPiece> work = pieces(call, rows);
  const int64_t count = static_cast<int64_t>(work.size()), floats = omni_attention_scratch(&call);
  int64_t products = 0;
  for (const AttentionPiece& piece : work) {
    products += 2 * piece.count * (call.cu_k[piece.row + 1] - call.cu_k[piece.row]) * call.head_size;
  }
  const int64_t grain = std::max<int64_t>(1, kParallelProducts * count / std::max<int64_t>(1, products));
  // rows are of unlike lengths: whoever is done takes the next piece
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, count, grain, [&](int64_t, int64_t) {
    float* memory = scratch(floats);
    for (int64_t at = next++; at < count; at = next++) omni_attention_cpu(&call, &work[at], memory);
  });
}

Tensor attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
                     double scale, bool causal) {
  check(q, k, v, cu_q, cu_k);
  const Tensor dense[3] = {omni::with_dense_rows(q), omni::with_dense_rows(k), omni::with_dense_rows(v)};
  const Tensor offsets[2] = {omni::contiguous(cu_q), omni::contiguous(cu_k)};
  Tensor out = omni::new_empty(q, q.sizes());
  Attention call{};
  call.dtype = omni::dtype_of(q, kOp, "q");
  call.q = dense[0].const_data_ptr();
  call.k = dense[1].const_data_ptr();
  call.v = dense[2].const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.cu_q = static_cast<const int32_t*>(offsets[0].const_data_ptr());
  call.cu_k = static_cast<const int32_t*>(offsets[1].const_data_ptr());
  for (int dim = 0; dim < 2; ++dim) {
    call.q_stride[dim] = dense[0].stride(dim);
    call.k_stride[dim] = dense[1].stride(dim);
    call.v_stride[dim] = dense[2].stride(dim);
  }
  call.heads = q.size(1);
  call.kv_heads = k.size(1);
  call.head_size = q.size(2);
  call.scale = static_cast<float>(scale);
  call.causal = causal;
  const int64_t rows = cu_q.size(0) - 1;
  check_offsets("cu_q", call.cu_q, rows, q.size(0));
  check_offsets("cu_k", call.cu_k, rows, k.size(0));
  run(call, rows);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { m.impl("attention_cpu", TORCH_BOX(&attention_cpu)); }
