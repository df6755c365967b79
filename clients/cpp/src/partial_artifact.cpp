#include "partial_artifact.hpp"

#include "digest.hpp"

namespace omni::internal {

void PartialArtifact::Add(const v1::ArtifactChunk& chunk) {
  if (chunk.offset() != offset()) {
    throw Corrupt("a chunk starts at byte " + std::to_string(chunk.offset()) + ", expected " + std::to_string(offset()));
  }
  data_ += chunk.data();
  if (offset() > artifact_.size_bytes()) {
    throw Corrupt(std::to_string(offset()) + " bytes arrived, but " + std::to_string(artifact_.size_bytes()) +
                  " were announced");
  }
}

void PartialArtifact::CheckResumed(const v1::Artifact& artifact) const {
  if (artifact.artifact_id() != artifact_.artifact_id() || artifact.sha256() != artifact_.sha256()) {
    throw Corrupt("it is a different artifact than the one whose first bytes arrived");
  }
}

const std::string& PartialArtifact::Data() const {
  if (!complete()) {
    throw Corrupt(std::to_string(offset()) + " of " + std::to_string(artifact_.size_bytes()) + " bytes arrived");
  }
  const std::string digest = Sha256(data_);
  if (digest != artifact_.sha256()) {
    throw Corrupt("its SHA-256 is " + Hex(digest) + ", but " + Hex(artifact_.sha256()) + " was announced");
  }
  return data_;
}

Error PartialArtifact::Corrupt(const std::string& what) const {
  Failure failure;
  failure.code = Code::Internal;
  failure.reason = "ARTIFACT_CORRUPT";
  failure.message = "artifact " + artifact_.artifact_id() + ": " + what + "; download it again";
  failure.metadata = {{"artifact_id", artifact_.artifact_id()}};
  return Error(std::move(failure));
}

}  // namespace omni::internal
