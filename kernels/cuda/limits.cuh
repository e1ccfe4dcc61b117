// What the device offers a launch.
#pragma once

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

inline int64_t multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "multiprocessors");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return count;
}

// Lets a kernel have this much dynamic shared memory. The device's limit is kSharedMax.
constexpr int kSharedMax = 232448;
template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  CHECK_LE(bytes, kSharedMax);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory");
}

}  // namespace slipstream::kernels
