// The address of a server as a caller gives it.
#pragma once

#include <string>

namespace omni::internal {

// Throws Error (INVALID_ARGUMENT, field address) for what is neither HOST:PORT, [IPV6]:PORT, nor a target of gRPC such
// as unix:/path or dns:///HOST:PORT: gRPC would dial something else than the caller means.
void CheckAddress(const std::string& address);

// Whether a valid address is on this machine: a loopback address or name, or a Unix socket.
bool IsLocal(const std::string& address);

bool IsUnix(const std::string& address);

}  // namespace omni::internal
