// Uses what the installed package has; needs no server.
#include <omni_grpc/client.hpp>

#include <iostream>

int main() {
  omni::ClientOptions options;
  options.token = "secret";
  try {
    omni::Client client("server.example:50051", options);
  } catch (const omni::Error& error) {
    if (error.reason() == "TOKEN_NEEDS_TLS") return 0;
    std::cerr << error.what() << '\n';
  }
  return 1;
}
