// Failures, decoded from what gRPC and google.rpc.Status say.
#pragma once

#include <string>

#include <google/rpc/status.pb.h>
#include <grpcpp/support/status.h>

#include "omni_grpc/error.hpp"
#include "retry.hpp"

namespace omni::internal {

// Details of kinds that are not known here are passed over.
Failure DecodeStatus(const google::rpc::Status& status);

// How a call to `address` failed, with the details of the status if the server sent any.
CallFailure FromCall(const grpc::Status& status, const std::string& address);

// A stream that ended with OK before its job did.
CallFailure EndedEarly();

}  // namespace omni::internal
