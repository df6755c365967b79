#include "digest.hpp"

#include <openssl/evp.h>

#include <random>

#include "omni_grpc/error.hpp"

namespace omni::internal {

std::string Sha256(std::string_view data) {
  std::string digest(32, '\0');
  unsigned int size = 0;
  auto* out = reinterpret_cast<unsigned char*>(digest.data());
  if (EVP_Digest(data.data(), data.size(), out, &size, EVP_sha256(), nullptr) != 1 || size != digest.size()) {
    Failure failure;
    failure.code = Code::Internal;
    failure.reason = "DIGEST_FAILED";
    failure.message = "OpenSSL could not compute a SHA-256";
    throw Error(std::move(failure));
  }
  return digest;
}

std::string Hex(std::string_view bytes) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

std::string Uuid4() {
  std::random_device device;
  std::uniform_int_distribution<int> byte(0, 255);
  std::string bytes(16, '\0');
  for (char& one : bytes) one = static_cast<char>(byte(device));
  bytes[6] = static_cast<char>((bytes[6] & 0x0f) | 0x40);  // version 4
  bytes[8] = static_cast<char>((bytes[8] & 0x3f) | 0x80);  // the variant of RFC 9562
  std::string text = Hex(bytes);
  for (const int at : {20, 16, 12, 8}) text.insert(at, 1, '-');
  return text;
}

}  // namespace omni::internal
