// The cache family on the CPU. Sixteen running sums for each quantity: as many as the widest registers hold, and the
// same order of additions for every width.
#include "../common/cache.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../common/cpu.h"
#include "../common/dtype.h"

namespace {

using omni::BFloat16;
using omni::CompareStore;
using omni::to_float;

constexpr int64_t kLanes = 16;

template <class X>
OMNI_INLINE void compare_chunk(const X* now, X* before, int64_t count, double* moved, double* norm) {
  float a[kLanes] = {}, b[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float old = to_float(before[i + lane]);
      a[lane] += std::fabs(to_float(now[i + lane]) - old);
      b[lane] += std::fabs(old);
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    const float old = to_float(before[i]);
    a[i - whole] += std::fabs(to_float(now[i]) - old);
    b[i - whole] += std::fabs(old);
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    *moved += a[lane];
    *norm += b[lane];
  }
  std::memcpy(before, now, static_cast<size_t>(count) * sizeof(X));
}

template <class X>
OMNI_INLINE void compare_row(const CompareStore& call, int32_t row) {
  const X* now = static_cast<const X*>(call.now[row]);
  X* before = static_cast<X*>(call.before[row]);
  const int64_t elements = call.elements[row];
  double moved = 0., norm = 0.;
  for (int64_t at = 0; at < elements; at += omni::kChunk)
    compare_chunk(now + at, before + at, std::min(omni::kChunk, elements - at), &moved, &norm);
  call.sums[omni::kCompareSums * row] = static_cast<float>(moved);
  call.sums[omni::kCompareSums * row + 1] = static_cast<float>(norm);
}

OMNI_CLONES void compare_f32(const CompareStore& call, int32_t row) { compare_row<float>(call, row); }
OMNI_CLONES void compare_bf16(const CompareStore& call, int32_t row) { compare_row<BFloat16>(call, row); }

}  // namespace

void omni_compare_store_cpu(const CompareStore* call, int32_t row) {
  if (call->before[row] == nullptr || !call->known[row]) {
    call->sums[omni::kCompareSums * row] = call->sums[omni::kCompareSums * row + 1] = 0.f;
    if (call->before[row] != nullptr)
      std::memcpy(call->before[row], call->now[row],
                  static_cast<size_t>(call->elements[row]) * (call->dtype == omni::Dtype::kFloat32 ? 4 : 2));
    return;
  }
  (call->dtype == omni::Dtype::kFloat32 ? compare_f32 : compare_bf16)(*call, row);
}
