// SHA-256, hexadecimal text, and random identifiers.
#pragma once

#include <string>
#include <string_view>

namespace omni::internal {

// 32 bytes. Throws Error (INTERNAL) if OpenSSL cannot compute it.
std::string Sha256(std::string_view data);

std::string Hex(std::string_view bytes);

// A UUID of version 4, from std::random_device.
std::string Uuid4();

}  // namespace omni::internal
