// Configurations of float8 e4m3 on Hopper where tiles are few: for few tokens, or for few waves.
#include "gemm_sm90.cuh"

namespace {

using omni::GemmSm90;
using omni::Fp8;

constexpr omni::GemmConfig kConfigs[] = {
    GemmSm90<Fp8, 128, 192, 128, 2, 1, false>::config("cooperative_128x192"),
    GemmSm90<Fp8, 256, 128, 128, 2, 1, false>::config("cooperative_256x128"),
    GemmSm90<Fp8, 64, 128, 128, 1, 1, true>::config("pingpong_64x128"),
    GemmSm90<Fp8, 128, 128, 128, 2, 1, false, true>::config("stream_k_128x128"),
};

}  // namespace

omni::GemmConfigs omni_gemm_fp8_few_sm90(void) { return {kConfigs, sizeof(kConfigs) / sizeof(kConfigs[0])}; }
