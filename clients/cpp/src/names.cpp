#include "names.hpp"

#include <cctype>

namespace omni::internal {

std::optional<int> NumberOf(const google::protobuf::EnumDescriptor* type, const std::string& field,
                            const std::string& name, std::vector<FieldViolation>& faults) {
  const std::string unspecified = "UNSPECIFIED";
  const std::string& zero = type->value(0)->name();
  const std::string prefix = zero.substr(0, zero.size() - unspecified.size());
  std::string upper = name;
  for (char& one : upper) one = static_cast<char>(std::toupper(static_cast<unsigned char>(one)));
  const auto* value = type->FindValueByName(prefix + upper);
  if (value != nullptr && value->number() != 0) return value->number();
  std::string known;
  for (int i = 1; i < type->value_count(); ++i) {
    known += (known.empty() ? "" : ", ") + type->value(i)->name().substr(prefix.size());
  }
  faults.push_back({field, "is '" + name + "'; it is one of " + known});
  return std::nullopt;
}

}  // namespace omni::internal
