// The bytes of one artifact as they arrive.
#pragma once

#include <string>

#include <omni_grpc/v1/media.pb.h>

#include "omni_grpc/error.hpp"

namespace omni::internal {

namespace v1 = ::omni_grpc::v1;

// Offsets are checked as chunks arrive, the SHA-256 at the end. Throws Error (INTERNAL, ARTIFACT_CORRUPT) if the bytes
// are not the ones that the server announced.
class PartialArtifact {
 public:
  explicit PartialArtifact(v1::Artifact artifact) : artifact_(std::move(artifact)) {}

  const v1::Artifact& artifact() const noexcept { return artifact_; }
  // Bytes received so far, which is where a download goes on.
  std::uint64_t offset() const noexcept { return data_.size(); }
  bool complete() const noexcept { return offset() == artifact_.size_bytes(); }
  void Add(const v1::ArtifactChunk& chunk);
  // A resumed download must be of the same artifact as the bytes received so far.
  void CheckResumed(const v1::Artifact& artifact) const;
  // All bytes, checked.
  const std::string& Data() const;

 private:
  Error Corrupt(const std::string& what) const;

  v1::Artifact artifact_;
  std::string data_;
};

}  // namespace omni::internal
