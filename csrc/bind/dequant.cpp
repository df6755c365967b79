// Binds the dequant family.
#include "../common/dequant.h"

#include <algorithm>
#include <cstdint>

#include "bind.h"

namespace {

using omni::Dequantize;
using omni::Packing;
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

const char* name_of(Packing packing) {
  switch (packing) {
    case Packing::kQ4_0: return "Q4_0";
    case Packing::kQ8_0: return "Q8_0";
    case Packing::kQ4_K: return "Q4_K";
    case Packing::kQ5_K: return "Q5_K";
    case Packing::kQ6_K: return "Q6_K";
  }
  return nullptr;
}

Dequantize checked(const Tensor& packed, int64_t number, const Tensor& out) {
  const Packing packing = static_cast<Packing>(number);
  const char* name = name_of(packing);
  STD_TORCH_CHECK(name != nullptr, "dequantize: ggml's type ", number, " is not served");
  STD_TORCH_CHECK(packed.dim() == 1 && packed.scalar_type() == ScalarType::Byte && is_contiguous(packed),
                  "dequantize: packed must be uint8 [bytes], contiguous");
  STD_TORCH_CHECK(is_contiguous(out) &&
                      (out.scalar_type() == ScalarType::Float || out.scalar_type() == ScalarType::BFloat16),
                  "dequantize: out must be contiguous and of a floating dtype");
  STD_TORCH_CHECK(out.device() == packed.device(), "dequantize: packed and out must be on one device");
  const omni::Block block = omni::block_of(packing);
  const int64_t blocks = packed.numel() / block.size;
  STD_TORCH_CHECK(packed.numel() % block.size == 0 && blocks * block.elements == out.numel(), "dequantize: ",
                  packed.numel(), " bytes of ", name, " are not ", out.numel(), " elements");
  Dequantize call{};
  call.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
  call.out = out.mutable_data_ptr();
  call.blocks = blocks;
  call.packing = packing;
  call.out_dtype = omni::dtype_of(out, "dequantize", "out");
  return call;
}

void dequantize_cpu(Tensor packed, int64_t number, Tensor out) {
  const Dequantize call = checked(packed, number, out);
  const int64_t grain = std::max<int64_t>(1, omni::kParallelElements / omni::block_of(call.packing).elements);
  torch::stable::parallel_for(0, call.blocks, grain, [&](int64_t begin, int64_t end) {
    omni_dequantize_cpu(&call, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) { m.impl("dequantize", TORCH_BOX(&dequantize_cpu)); }

#ifdef OMNI_GRPC_CUDA_ARCHS
namespace {

void dequantize_cuda(Tensor packed, int64_t number, Tensor out) {
  // kernels read two bytes at a time
  if (reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 2 != 0) packed = omni::clone(packed);
  const Dequantize call = checked(packed, number, out);
  if (call.blocks > 0) omni::launch("dequantize", &omni_dequantize_cuda, call, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) { m.impl("dequantize", TORCH_BOX(&dequantize_cuda)); }
#endif
