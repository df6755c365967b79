// Configurations of int8 from Ampere on.
#include <cstdint>

#include "../common/gemm.h"
#include "gemm_mma.cuh"

namespace {

template <int kM, int kN, int kK, int kWarpM, int kWarpN, int kStages>
using Gemm = omni::GemmMma<int8_t, int32_t, cutlass::arch::Sm80, cutlass::arch::OpMultiplyAddSaturate, kM, kN, kK,
                           kWarpM, kWarpN, kStages>;

constexpr omni::GemmConfig kConfigs[] = {
    Gemm<128, 128, 64, 64, 32, 4>::config("mma_128x128"),
    Gemm<64, 64, 64, 32, 32, 4>::config("mma_64x64"),
};

}  // namespace

omni::GemmConfigs omni_gemm_int8_sm80(void) { return {kConfigs, sizeof(kConfigs) / sizeof(kConfigs[0])}; }
