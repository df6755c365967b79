// Configurations of float8 e4m3 on Hopper for many tokens.
#include "gemm_sm90.cuh"

namespace {

using omni::GemmSm90;
using omni::Fp8;

constexpr omni::GemmConfig kConfigs[] = {
    GemmSm90<Fp8, 128, 128, 128, 2, 1, true>::config("pingpong_128x128"),
    GemmSm90<Fp8, 128, 192, 128, 2, 1, true>::config("pingpong_128x192"),
    GemmSm90<Fp8, 64, 256, 128, 2, 1, true>::config("pingpong_64x256"),
    GemmSm90<Fp8, 128, 256, 128, 2, 1, false>::config("cooperative_128x256"),
};

}  // namespace

omni::GemmConfigs omni_gemm_fp8_sm90(void) { return {kConfigs, sizeof(kConfigs) / sizeof(kConfigs[0])}; }
