// Names of enum values as callers write them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <google/protobuf/descriptor.h>

#include "omni_grpc/error.hpp"

namespace omni::internal {

// The number of a value by its name without the prefix of the enum, in any case. nullopt, and one more fault for
// `field`, for a name that there is not; the unspecified value has no name.
std::optional<int> NumberOf(const google::protobuf::EnumDescriptor* type, const std::string& field,
                            const std::string& name, std::vector<FieldViolation>& faults);

}  // namespace omni::internal
