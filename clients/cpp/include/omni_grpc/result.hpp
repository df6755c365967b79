// What a job that succeeded has made.
#pragma once

#include <string>
#include <vector>

#include <omni_grpc/v1/event.pb.h>
#include <omni_grpc/v1/media.pb.h>

#include "omni_grpc/error.hpp"

namespace omni {

// The messages of the API: events, jobs, models and artifacts are used as they are.
namespace v1 = ::omni_grpc::v1;

// One encoded output, checked against the SHA-256 that the server announced.
struct Output {
  v1::Artifact artifact;
  std::string data;

  // Writes the file, whole or not at all. Throws Error (INTERNAL, SAVE_FAILED).
  void Save(const std::string& path) const;
};

struct Result {
  std::string job_id;
  std::vector<Output> outputs;  // by index
  v1::EffectiveParams effective;
  v1::GenerationStats stats;
  std::vector<v1::Warning> warnings;

  // Writes every output; several become path-0.EXT, path-1.EXT...
  void Save(const std::string& path) const;
};

}  // namespace omni
