// Configurations of float8 e4m3 from Ada on.
#include "../common/gemm.h"
#include "gemm_mma.cuh"

namespace {

template <int kM, int kN, int kK, int kWarpM, int kWarpN, int kStages>
using Gemm = omni::GemmMma<cutlass::float_e4m3_t, float, cutlass::arch::Sm89, cutlass::arch::OpMultiplyAddFastAccum, kM, kN, kK,
                           kWarpM, kWarpN, kStages>;

constexpr omni::GemmConfig kConfigs[] = {
    Gemm<128, 128, 64, 64, 32, 4>::config("mma_128x128"),
    Gemm<64, 64, 64, 32, 32, 4>::config("mma_64x64"),
};

}  // namespace

omni::GemmConfigs omni_gemm_fp8_sm89(void) { return {kConfigs, sizeof(kConfigs) / sizeof(kConfigs[0])}; }
