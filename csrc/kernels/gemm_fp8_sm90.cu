// Configurations of float8 e4m3 on Hopper: two for many tokens, one for tiles that come out as few waves, one for few tokens.
//
// Tried and left out, see docs/performance.md: 64 x 256 in ping-pong, 128 x 256 and 256 x 128 together, and stream-K.
#include "../common/gemm.h"
#include "gemm_sm90.cuh"

namespace {

using omni::Fp8;
using omni::GemmSm90;

constexpr omni::GemmConfig kConfigs[] = {
    GemmSm90<Fp8, 128, 128, 128, 2, 1, true>::config("pingpong_128x128"),
    GemmSm90<Fp8, 128, 192, 128, 2, 1, true>::config("pingpong_128x192"),
    GemmSm90<Fp8, 128, 192, 128, 2, 1, false>::config("cooperative_128x192"),
    GemmSm90<Fp8, 64, 128, 128, 1, 1, true>::config("pingpong_64x128"),
};

}  // namespace

omni::GemmConfigs omni_gemm_fp8_sm90(void) { return {kConfigs, sizeof(kConfigs) / sizeof(kConfigs[0])}; }
