// Words that outlive the call which returns them.
#pragma once

#include <string>
#include <utility>

namespace omni {

inline const char* words(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace omni

#ifdef OMNI_GRPC_CUDA_ARCHS

#include <cuda_runtime.h>

namespace omni {

// Makes a device the current one until the end of the scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    problem = cudaGetDevice(&before_);
    if (problem == cudaSuccess && before_ != device) problem = cudaSetDevice(device);
  }
  ~OnDevice() {
    int now = before_;
    if (cudaGetDevice(&now) == cudaSuccess && now != before_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t problem = cudaSuccess;

 private:
  int before_ = 0;
};

inline const char* words(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or the next launch would report it
  return words(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace omni

#endif
