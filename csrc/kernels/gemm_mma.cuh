// Products of 8 bits by mma.sync, from Ampere on, by CUTLASS 2: what every configuration of gemm_int8_sm80.cu and
// gemm_fp8_sm89.cu is made from. The epilogue is one visitor, as in gemm_sm90.cuh.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>
// after those, which it takes for granted
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>

#include <cstdint>

#include "finish_sums.cuh"
#include "../common/gemm.h"

namespace omni {

// Visitors of CUTLASS 2 have no arguments of their own: whether there is an activation is one more operand.
template <class T>
struct FinishSumsIf;

template <int kCount>
struct FinishSumsIf<cutlass::Array<float, kCount>> {
  using Values = cutlass::Array<float, kCount>;
  CUTLASS_DEVICE Values operator()(const Values& sums, const Values& x_scale, const Values& weight_scale,
                                   const Values& bias, const Values& gelu_tanh) const {
    return FinishSums<Values>{}(sums, x_scale, weight_scale, bias, {gelu_tanh[0] != 0.f});
  }
};

// kM x kN is a tile of the output, of which each warp has kWarpM x kWarpN.
template <class Element, class Sum, class Arch, class Operator, int kM, int kN, int kK, int kWarpM, int kWarpN,
          int kStages>
struct GemmMma {
  using Out = cutlass::bfloat16_t;
  using Tile = cutlass::gemm::GemmShape<kM, kN, kK>;
  using Warp = cutlass::gemm::GemmShape<kWarpM, kWarpN, kK>;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
  static constexpr int kAlignment = 16 / sizeof(Element), kOutAlignment = 16 / sizeof(Out), kEpilogueStages = 1;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

  using Map = cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, Out, kOutAlignment, kEpilogueStages>;
  using OfToken = cute::Stride<cute::_1, cute::_0, cute::_0>;
  using OfChannel = cute::Stride<cute::_0, cute::_1, cute::_0>;
  using OfOut = cute::Stride<int64_t, cute::_1, cute::_0>;
  using Visitor = cutlass::epilogue::threadblock::Sm80EVT<
      cutlass::epilogue::threadblock::VisitorAuxStore<Map, Out, kRound, OfOut>,
      cutlass::epilogue::threadblock::Sm80EVT<
          cutlass::epilogue::threadblock::VisitorCompute<FinishSumsIf, Out, float, kRound>,
          cutlass::epilogue::threadblock::VisitorAccFetch,
          cutlass::epilogue::threadblock::VisitorColBroadcast<Map, float, OfToken>,
          cutlass::epilogue::threadblock::VisitorRowBroadcast<Map, float, OfChannel>,
          cutlass::epilogue::threadblock::VisitorRowBroadcast<Map, Out, OfChannel>,
          cutlass::epilogue::threadblock::VisitorScalarBroadcast<float>>>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      Element, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignment, Element,
      cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, kAlignment, Out, cutlass::layout::RowMajor,
      kOutAlignment, Sum, float, cutlass::arch::OpClassTensorOp, Arch, Tile, Warp, Instruction, Visitor,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kStages, Operator, kEpilogueStages>::GemmKernel;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Device::Arguments arguments_of(const GemmQ& call) {
    const int m = static_cast<int>(call.tokens), n = static_cast<int>(call.channels), k = static_cast<int>(call.inputs);
    typename Visitor::Arguments visitor{{{},
                                         {const_cast<float*>(call.x_scale), 0.f, {}},
                                         {const_cast<float*>(call.weight_scale), 0.f, {}},
                                         {static_cast<Out*>(const_cast<void*>(call.bias)), Out(0), {}},
                                         {{call.gelu_tanh ? 1.f : 0.f}},
                                         {}},
                                        {static_cast<Out*>(call.out), {call.channels, cute::_1{}, cute::_0{}}}};
    return {cutlass::gemm::GemmUniversalMode::kGemm,
            {m, n, k},
            1,
            visitor,
            call.x,
            call.weight,
            nullptr,
            nullptr,
            call.tokens * call.inputs,
            call.channels * call.inputs,
            0,
            0,
            call.inputs,
            call.inputs,
            0,
            0};
  }

  static const char* launch(const GemmQ* call, void* stream) {
    const typename Device::Arguments arguments = arguments_of(*call);
    if (Device::can_implement(arguments) != cutlass::Status::kSuccess) return "the configuration cannot do this shape";
    if (Device::get_workspace_size(arguments) != 0) return "the configuration needs a workspace";
    Device device;
    cutlass::Status status = device.initialize(arguments, nullptr, static_cast<cudaStream_t>(stream));
    if (status == cutlass::Status::kSuccess) status = device.run(static_cast<cudaStream_t>(stream));
    return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
  }

  static constexpr GemmConfig config(const char* name) { return {name, launch}; }
};

}  // namespace omni
