// The dtypes that a call names.
#pragma once

#include <cstdint>

namespace omni {

enum class Dtype : int32_t { kFloat32, kBFloat16 };

}  // namespace omni
