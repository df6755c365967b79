// What the bindings share: checks of dtypes, dense rows and the current CUDA stream. The files of this folder alone know
// torch: they check tensors, hand plain pointers to the kernels and register them. The schemas are declared in Python
// (omni_grpc/ops), so an import is complete with or without this library.
//
// Everything here is torch's stable ABI with 2.11 as its target: the library loads on every later torch, with or without
// CUDA, under any Python.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>

#include "../common/dtype.h"

namespace omni {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

constexpr int64_t kParallelElements = 32768;  // what one thread should have to do at least, about 10 us

inline Dtype dtype_of(const Tensor& tensor, const char* op, const char* name) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op,
                  ": the kernel takes float32 and bfloat16, ", name,
                  " is neither; the function of this name in omni_grpc.ops serves every dtype");
  return type == ScalarType::Float ? Dtype::kFloat32 : Dtype::kBFloat16;
}

// Raises where a C function of torch failed. The macro for that has another name in each second version of torch.
inline void succeed(const char* what, AOTITorchError code) {
  STD_TORCH_CHECK(code == AOTI_TORCH_SUCCESS, "torch's ", what, " failed");
}

// What makes a tensor fails where there is no memory for it. The stable ABI says of a call only that it failed; these say
// why, in words that omni_grpc/worker/failure.py knows.
template <class Make>
Tensor allocated(Make make) {
  try {
    return make();
  } catch (const std::exception& error) {
    STD_TORCH_CHECK(false, "omni_grpc: out of memory: ", error.what());
  }
}

// Contiguous, by the C function itself: torch::stable::new_empty takes the way of a call from Python, which is half a
// microsecond longer.
inline Tensor new_empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef size,
                        std::optional<ScalarType> dtype = std::nullopt) {
  constexpr size_t kMostDims = 8;
  STD_TORCH_CHECK(size.size() <= kMostDims, "omni_grpc: a result of ", size.size(), " dimensions");
  int64_t strides[kMostDims];
  int64_t stride = 1;
  for (size_t dim = size.size(); dim-- > 0; stride *= std::max<int64_t>(size[dim], 1)) strides[dim] = stride;
  const ScalarType type = dtype.value_or(like.scalar_type());
  const auto of_torch = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  return allocated([&] {
    int32_t device = 0;
    succeed("get_device_type", aoti_torch_get_device_type(like.get(), &device));
    AtenTensorHandle made = nullptr;
    succeed("empty_strided", aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), strides, of_torch,
                                                      device, like.get_device_index(), &made));
    return Tensor(made);
  });
}

inline Tensor new_zeros(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef size,
                        std::optional<ScalarType> dtype = std::nullopt) {
  return allocated([&] { return torch::stable::new_zeros(like, size, dtype); });
}

inline Tensor contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;  // torch's own takes the long way to say so
  return allocated([&] { return torch::stable::contiguous(tensor); });
}

inline Tensor clone(const Tensor& tensor) {
  return allocated([&] { return torch::stable::clone(tensor); });
}

// An entry that names none of `rows` rows, which a kernel on a CPU would read all the same; none where all do or there are
// no entries.
inline std::optional<int32_t> outside(const int32_t* entries, int64_t count, int64_t rows) {
  if (entries == nullptr || count == 0) return std::nullopt;
  const auto [low, high] = std::minmax_element(entries, entries + count);
  if (*low < 0) return *low;
  return *high < rows ? std::nullopt : std::optional(*high);
}

// Rows may be anywhere, elements of a row must be neighbours.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.stride(last) == 1 || tensor.size(last) == 1 ? tensor : omni::contiguous(tensor);
}

#ifdef OMNI_GRPC_CUDA_ARCHS

// Weak, since the libtorch of a CPU installation lacks it; there no tensor is on CUDA, so nobody calls it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

inline void* current_stream(const Tensor& tensor) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
                  "torch returned no current CUDA stream");
  return stream;
}

// Calls a launcher on the device and the current stream of `like`; its words become the error.
template <class Call>
void launch(const char* op, const char* (*launcher)(const Call*, void*), const Call& call, const Tensor& like) {
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  const char* problem = launcher(&call, current_stream(like));
  STD_TORCH_CHECK(problem == nullptr, op, ": ", problem);
}

#endif

}  // namespace omni
