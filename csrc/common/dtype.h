// The dtypes that a call names.
#pragma once

#include <cstdint>

namespace omni {

enum class Dtype : int32_t { kFloat32, kBFloat16 };

// What a result is written as: in the dtype of its input, or in 8 bits with a float32 scale for each row.
enum class Code : int32_t { kNone, kFloat8, kInt8 };

}  // namespace omni
