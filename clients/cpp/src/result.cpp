#include "omni_grpc/result.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "digest.hpp"

namespace omni {
namespace {

Error NotSaved(const std::string& path) {
  Failure failure;
  failure.code = Code::Internal;
  failure.reason = "SAVE_FAILED";
  failure.message = path + ": " + std::strerror(errno);
  return Error(std::move(failure));
}

}  // namespace

void Output::Save(const std::string& path) const {
  // a reader of `path` never sees half a file, and a full disk leaves the old one
  const std::string beside = path + "." + internal::Uuid4() + ".part";
  std::ofstream file(beside, std::ios::binary);
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  file.close();
  if (!file || std::rename(beside.c_str(), path.c_str()) != 0) {
    const Error error = NotSaved(path);
    std::remove(beside.c_str());
    throw error;
  }
}

void Result::Save(const std::string& path) const {
  if (outputs.size() == 1) return outputs[0].Save(path);
  const std::filesystem::path whole(path);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::string name = whole.stem().string() + "-" + std::to_string(i) + whole.extension().string();
    outputs[i].Save((whole.parent_path() / name).string());
  }
}

}  // namespace omni
