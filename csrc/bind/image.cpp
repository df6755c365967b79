// Binds the image family.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <tuple>
#include <vector>

#include "../common/image.h"
#include "bind.h"

namespace {

using omni::dtype_of;
using omni::LatentsToBytes;
using omni::PixelsToBytes;
using omni::ScalarType;
using omni::Tensor;

// A plane's pixels must be neighbours; planes may be anywhere.
Tensor with_dense_planes(const Tensor& x) {
  const int64_t rows = x.dim() - 2, columns = x.dim() - 1;
  const bool row = x.stride(columns) == 1 || x.size(columns) == 1;
  const bool plane = x.stride(rows) == x.size(columns) || x.size(rows) == 1;
  return row && plane ? x : omni::contiguous(x);
}

// --- pixels_to_bytes -------------------------------------------------------------------------------------------------

using RunPixels = void (*)(const PixelsToBytes&, const Tensor&);

template <RunPixels run>
std::tuple<Tensor, Tensor> pixels_to_bytes(const Tensor& pixels) {
  STD_TORCH_CHECK(pixels.dim() == 4 && pixels.size(1) == 3,
                  "pixels_to_bytes: pixels must be [N, 3, height, width], got ", pixels.dim(),
                  " dimensions or another number of colors");
  PixelsToBytes call{};
  call.dtype = dtype_of(pixels, "pixels_to_bytes", "pixels");
  const Tensor dense = with_dense_planes(pixels);
  Tensor out = omni::new_empty(pixels, {pixels.size(0), pixels.size(2), pixels.size(3), 3}, ScalarType::Byte);
  Tensor nonfinite = omni::new_empty(pixels, {1}, ScalarType::Int);
  call.pixels = dense.const_data_ptr();
  call.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  call.nonfinite = static_cast<int32_t*>(nonfinite.mutable_data_ptr());
  call.count = pixels.size(0);
  call.area = pixels.size(2) * pixels.size(3);
  call.stride = dense.stride(0);
  call.plane_stride = dense.stride(1);
  run(call, pixels);
  return {out, nonfinite};
}

void run_pixels_cpu(const PixelsToBytes& call, const Tensor&) {
  std::atomic<int64_t> nonfinite{0};
  torch::stable::parallel_for(0, call.count * call.area, omni::kParallelElements, [&](int64_t begin, int64_t end) {
    nonfinite += omni_pixels_to_bytes_cpu(&call, begin, end);
  });
  *call.nonfinite = static_cast<int32_t>(std::min<int64_t>(nonfinite, INT32_MAX));
}

// --- latents_to_bytes ------------------------------------------------------------------------------------------------

using RunLatents = void (*)(const LatentsToBytes&, const Tensor&);

template <RunLatents run>
Tensor latents_to_bytes(const Tensor& latents, const std::vector<double>& factors, const std::vector<double>& bias) {
  STD_TORCH_CHECK(latents.dim() == 3, "latents_to_bytes: latents must be [C, height, width], got ", latents.dim(),
                  " dimensions");
  const int64_t channels = latents.size(0);
  STD_TORCH_CHECK(static_cast<int64_t>(factors.size()) == 3 * channels && bias.size() == 3, "latents_to_bytes: ",
                  channels, " channels take ", 3 * channels, " factors and a bias of 3, got ", factors.size(), " and ",
                  bias.size());
  STD_TORCH_CHECK(channels <= omni::kMostLatentChannels, "latents_to_bytes: the kernel takes up to ",
                  omni::kMostLatentChannels, " channels, got ", channels);
  LatentsToBytes call{};
  call.dtype = dtype_of(latents, "latents_to_bytes", "latents");
  const Tensor dense = with_dense_planes(latents);
  Tensor out = omni::new_empty(latents, {latents.size(1), latents.size(2), 3}, ScalarType::Byte);
  call.latents = dense.const_data_ptr();
  call.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  call.channels = channels;
  call.area = latents.size(1) * latents.size(2);
  call.plane_stride = dense.stride(0);
  for (int i = 0; i < 3; ++i) call.bias[i] = static_cast<float>(bias[i]);
  for (int64_t i = 0; i < 3 * channels; ++i) call.factors[i / 3][i % 3] = static_cast<float>(factors[i]);
  if (call.area > 0) run(call, latents);
  return out;
}

void run_latents_cpu(const LatentsToBytes& call, const Tensor&) {
  const int64_t grain = omni::kParallelElements / std::max<int64_t>(1, call.channels);
  torch::stable::parallel_for(0, call.area, grain, [&](int64_t begin, int64_t end) {
    omni_latents_to_bytes_cpu(&call, begin, end);
  });
}

#ifdef OMNI_GRPC_CUDA_ARCHS

void run_pixels_cuda(const PixelsToBytes& call, const Tensor& pixels) {
  omni::launch("pixels_to_bytes", &omni_pixels_to_bytes_cuda, call, pixels);
}

void run_latents_cuda(const LatentsToBytes& call, const Tensor& latents) {
  omni::launch("latents_to_bytes", &omni_latents_to_bytes_cuda, call, latents);
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CPU, m) {
  m.impl("pixels_to_bytes", TORCH_BOX(&pixels_to_bytes<run_pixels_cpu>));
  m.impl("latents_to_bytes", TORCH_BOX(&latents_to_bytes<run_latents_cpu>));
}

#ifdef OMNI_GRPC_CUDA_ARCHS
STABLE_TORCH_LIBRARY_IMPL(omni_grpc, CUDA, m) {
  m.impl("pixels_to_bytes", TORCH_BOX(&pixels_to_bytes<run_pixels_cuda>));
  m.impl("latents_to_bytes", TORCH_BOX(&latents_to_bytes<run_latents_cuda>));
}
#endif
