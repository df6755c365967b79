// What most sources of this client include; compiled once.
#include <grpcpp/grpcpp.h>

#include <omni_grpc/v1/artifact.pb.h>
#include <omni_grpc/v1/generation.pb.h>
#include <omni_grpc/v1/job.pb.h>
#include <omni_grpc/v1/model.pb.h>
