// What the CUDA runtime says of devices and kernels, asked once by each thread: a launch would ask up to five times, and
// waits a microsecond or two for each answer.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <map>
#include <tuple>
#include <vector>

namespace omni {

struct Device {
  int number = -1;
  int processors = 0;
  int major = 0;
  int minor = 0;
  int most_shared = 0;  // bytes of shared memory that a block can be allowed
};

// The current one. All zeros where there is none.
inline Device current_device() {
  thread_local std::vector<Device> known;
  int number = 0;
  if (cudaGetDevice(&number) != cudaSuccess || number < 0) number = 0;
  if (known.size() <= static_cast<size_t>(number)) known.resize(number + 1);
  Device& device = known[number];
  if (device.number < 0) {
    cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, number);
    cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, number);
    cudaDeviceGetAttribute(&device.minor, cudaDevAttrComputeCapabilityMinor, number);
    cudaDeviceGetAttribute(&device.most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, number);
    if (device.processors > 0) device.number = number;
  }
  return device;
}

// How many blocks of a kernel a multiprocessor of the current device runs at once, with so many bytes of dynamic shared
// memory, which it is allowed from then on; 0 where it runs none. Kernels that are launched with unlike amounts are
// allowed all that there is: a smaller one would take back what a larger one needs.
inline int resident_blocks(const void* kernel, unsigned threads, size_t shared) {
  thread_local std::map<std::tuple<const void*, int, unsigned, size_t>, int> known;
  const Device device = current_device();
  int& resident = known[{kernel, device.number, threads, shared}];
  if (resident > 0) return resident;
  cudaFuncAttributes attributes{};
  if (shared > 0 && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) {
    const int most = device.most_shared - static_cast<int>(attributes.sharedSizeBytes);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  }
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, static_cast<int>(threads), shared);
  return resident;
}

// What is wrong where it is 0. The runtime forgets it, so that nobody takes it for an error of the next launch.
inline const char* no_block() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "the device runs no block of this kernel" : cudaGetErrorString(error);
}

}  // namespace omni
