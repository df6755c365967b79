// How a client proves who it is, and how it knows the server.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <grpcpp/security/credentials.h>

#include "omni_grpc/client.hpp"

namespace omni::internal {

// The credentials of the channel. Throws Error (INVALID_ARGUMENT), by field, for files that cannot be used, for one of
// cert and key without the other, and for a token that would go to another machine in plain text.
std::shared_ptr<grpc::ChannelCredentials> Credentials(const std::string& address, const ClientOptions& options);

// What gives the token of each call; empty without one.
std::function<std::string()> TokenSource(const ClientOptions& options);

// The token without white space around it. Throws Error (INVALID_ARGUMENT), without showing it.
std::string CheckedToken(const std::string& text);

}  // namespace omni::internal
