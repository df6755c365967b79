// Binds the cache family.
#include "../common/cache.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/dtype.h"
#include "bind.h"

namespace {

using omni::CompareStore;
using omni::ScalarType;
using omni::Tensor;

bool is_contiguous(const Tensor& tensor) {
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) return false;
    expected *= tensor.size(dim);
  }
  return true;
}

// --- compare_store ---------------------------------------------------------------------------------------------------

void check_compare_store(const Tensor& now, const std::vector<Tensor>& before, const std::vector<int64_t>& offsets,
                         const std::vector<int64_t>& known) {
  STD_TORCH_CHECK(now.dim() == 2, "compare_store: now must be [T, C], got ", now.dim(), " dimensions");
  STD_TORCH_CHECK(offsets.size() == before.size() + 1 && known.size() == before.size(), "compare_store: ",
                  before.size(), " rows, ", offsets.size(), " offsets and ", known.size(),
                  " known; there must be R + 1 and R");
  for (size_t row = 0; row < before.size(); ++row) {
    const Tensor& memory = before[row];
    STD_TORCH_CHECK(0 <= offsets[row] && offsets[row] <= offsets[row + 1] && offsets[row + 1] <= now.size(0),
                    "compare_store: row ", row, " is ", offsets[row], " to ", offsets[row + 1], " of ", now.size(0),
                    " tokens");
    STD_TORCH_CHECK(memory.scalar_type() == now.scalar_type() && memory.device() == now.device(),
                    "compare_store: before ", row, " must be of the dtype and on the device of now");
    const int64_t tokens = offsets[row + 1] - offsets[row];
    STD_TORCH_CHECK(memory.numel() == 0 || (memory.numel() == tokens * now.size(1) && is_contiguous(memory)),
                    "compare_store: before ", row, " must be contiguous with ", tokens, " x ", now.size(1),
                    " elements, or empty");
  }
}

// The rows [begin, end) as a call; its partials start at 0.
CompareStore compare_store_call(const Tensor& now, const std::vector<Tensor>& before,
                                const std::vector<int64_t>& offsets, const std::vector<int64_t>& known, size_t begin,
                                size_t end, float* sums) {
  CompareStore call{};
  const int64_t channels = now.size(1);
  call.dtype = omni::dtype_of(now, "compare_store", "now");
  const int64_t bytes = call.dtype == omni::Dtype::kFloat32 ? 4 : 2;
  call.rows = static_cast<int32_t>(end - begin);
  call.sums = sums + omni::kCompareSums * static_cast<int64_t>(begin);
  for (size_t row = begin; row < end; ++row) {
    const size_t at = row - begin;
    const bool kept = before[row].numel() > 0;
    call.now[at] = static_cast<const char*>(now.const_data_ptr()) + offsets[row] * channels * bytes;
    call.before[at] = kept ? const_cast<void*>(before[row].const_data_ptr()) : nullptr;
    call.elements[at] = before[row].numel();
    call.known[at] = known[row] != 0;
    call.first_chunk[at + 1] = call.first_chunk[at] + (call.elements[at] + omni::kChunk - 1) / omni::kChunk;
  }
  return call;
}

using Run = void (*)(CompareStore&, const Tensor& now);

template <Run run>
Tensor compare_store(const Tensor& now, std::vector<Tensor> before, std::vector<int64_t> offsets,
                     std::vector<int64_t> known) {
  check_compare_store(now, before, offsets, known);
  const Tensor whole = is_contiguous(now) ? now : omni::contiguous(now);
  Tensor sums = omni::new_empty(now, {static_cast<int64_t>(before.size()), omni::kCompareSums},
                                         ScalarType::Float);
  for (size_t begin = 0; begin < before.size(); begin += omni::kCompareRows) {
    const size_t end = std::min(before.size(), begin + omni::kCompareRows);
    CompareStore call = compare_store_call(whole, before, offsets, known, begin, end,
                                           static_cast<float*>(sums.mutable_data_ptr()));
    run(call, whole);
  }
  return sums;
}

void run_compare_store_cpu(CompareStore& call, const Tensor&) {
  torch::stable::parallel_for(0, call.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) omni_compare_store_cpu(&call, static_cast<int32_t>(row));
  });
}

#ifdef OMNI_GRPC_CUDA_ARCHS

void run_compare_store_cuda(CompareStore& call, const Tensor& now) {
  const int64_t chunks = std::max<int64_t>(1, call.first_chunk[call.rows]);
  const Tensor partials = omni::new_empty(now, {chunks, omni::kCompareSums}, ScalarType::Float);
  call.partials = static_cast<float*>(partials.mutable_data_ptr());
  omni::launch("compare_store", &omni_compare_store_cuda, call, now);
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) {
  m.impl("compare_store", TORCH_BOX(&compare_store<run_compare_store_cpu>));
}

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) {
  m.impl("compare_store", TORCH_BOX(&compare_store<run_compare_store_cuda>));
}
#endif
