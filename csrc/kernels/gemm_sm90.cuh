// Products of 8 bits on Hopper (wgmma, TMA), by CUTLASS 3: what every configuration of gemm_*_sm90.cu is made from.
//
// The epilogue is one visitor: out = act(sum * x_scale * weight_scale + bias) from the sums in registers. Whether there
// is a bias and which activation follows is a value of the call, not a kernel of its own: both are the same for a whole
// grid, and the tensor cores are at work on the next tile meanwhile (ping-pong).
#pragma once

#include <cuda_runtime.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "finish_sums.cuh"
#include "../common/asked.cuh"
#include "../common/gemm.h"

namespace omni {

struct Fp8 {
  using Element = cutlass::float_e4m3_t;
  using Sum = float;
  // The sums of the tensor cores are added up in their own registers, as torch's use_fast_accum has it.
  using PingPong = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
  using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
};

struct Int8 {
  using Element = int8_t;
  using Sum = int32_t;
  using PingPong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

// kM x kN is a tile of the output, and a block takes kK inputs at a time. kClusterM x kClusterN blocks share what they
// load. Ping-pong: two warp groups on two tiles, of which one computes while the other writes. Else both share a tile.
template <class Kind, int kM, int kN, int kK, int kClusterM, int kClusterN, bool kPingPong>
struct GemmSm90 {
  using Element = typename Kind::Element;
  using Out = cutlass::bfloat16_t;
  using Tile = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using Schedule = std::conditional_t<kPingPong, typename Kind::PingPong, typename Kind::Cooperative>;
  using EpilogueSchedule = std::conditional_t<kPingPong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;

  using OfToken = cute::Stride<cute::_1, cute::_0, cute::_0>;
  using OfChannel = cute::Stride<cute::_0, cute::_1, cute::_0>;
  using Visitor = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<FinishSums, Out, float, cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90AccFetch,
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float, float, OfToken>,
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, OfChannel>,
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, Out, float, OfChannel>>;

  static constexpr int kAlignment = 16 / sizeof(Element), kOutAlignment = 16 / sizeof(Out);
  using RowMajor = cutlass::layout::RowMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, typename Kind::Sum, float, void, RowMajor, kOutAlignment, Out,
      RowMajor, kOutAlignment, EpilogueSchedule, Visitor>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlignment, Element,
      cutlass::layout::ColumnMajor, kAlignment, typename Kind::Sum, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                      cutlass::gemm::PersistentScheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Kernel::Arguments arguments_of(const GemmQ& call) {
    const int m = static_cast<int>(call.tokens), n = static_cast<int>(call.channels), k = static_cast<int>(call.inputs);
    const auto of_x = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, cute::make_shape(m, k, 1));
    const auto of_weight = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, cute::make_shape(n, k, 1));
    const auto of_out = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, cute::make_shape(m, n, 1));
    typename Visitor::Arguments visitor{{},
                                        {call.x_scale, 0.f, {}},
                                        {call.weight_scale, 0.f, {}},
                                        {static_cast<const Out*>(call.bias), Out(0), {}},
                                        {call.gelu_tanh}};
    typename Kernel::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {static_cast<const Element*>(call.x), of_x, static_cast<const Element*>(call.weight), of_weight},
        {visitor, nullptr, of_out, static_cast<Out*>(call.out), of_out}};
    const omni::Device device = current_device();
    arguments.hw_info.device_id = device.number;
    arguments.hw_info.sm_count = device.processors;
    using Order = decltype(arguments.scheduler.raster_order);
    arguments.scheduler.max_swizzle_size = call.swizzle;
    arguments.scheduler.raster_order = call.raster == GemmRaster::kAlongTokens     ? Order::AlongM
                                       : call.raster == GemmRaster::kAlongChannels ? Order::AlongN
                                                                                   : Order::Heuristic;
    return arguments;
  }

  // By the runtime itself: the adapter would set again what stays, and ask again for what is known, at each launch.
  static const char* launch(const GemmQ* call, void* stream) {
    const typename Kernel::Arguments arguments = arguments_of(*call);
    if (Device::can_implement(arguments) != cutlass::Status::kSuccess) return "the configuration cannot do this shape";
    if (Device::get_workspace_size(arguments) != 0) return "the configuration needs a workspace";
    const auto kernel = cutlass::device_kernel<Kernel>;
    constexpr size_t kShared = Kernel::SharedStorageSize;
    if (resident_blocks(reinterpret_cast<const void*>(kernel), Kernel::MaxThreadsPerBlock, kShared) == 0) {
      return no_block();
    }
    const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = kClusterM;
    attributes[0].val.clusterDim.y = kClusterN;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = Device::get_grid_shape(params);
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = kShared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = call->early ? 2 : 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  }

  static constexpr GemmConfig config(const char* name) { return {name, launch}; }
};

}  // namespace omni
