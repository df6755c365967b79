// Configurations of int8 on Hopper for many tokens.
#include "gemm_sm90.cuh"

namespace {

using omni::GemmSm90;
using omni::Int8;

constexpr omni::GemmConfig kConfigs[] = {
    GemmSm90<Int8, 128, 128, 128, 2, 1, true>::config("pingpong_128x128"),
    GemmSm90<Int8, 128, 192, 128, 2, 1, true>::config("pingpong_128x192"),
    GemmSm90<Int8, 64, 256, 128, 2, 1, true>::config("pingpong_64x256"),
    GemmSm90<Int8, 128, 256, 128, 2, 1, false>::config("cooperative_128x256"),
};

}  // namespace

omni::GemmConfigs omni_gemm_int8_sm90(void) { return {kConfigs, sizeof(kConfigs) / sizeof(kConfigs[0])}; }
