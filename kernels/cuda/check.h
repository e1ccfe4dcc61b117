// CUDA errors after start-up are fatal: the context is lost. Includes CUDA: for .cu files and kernels/cuda only.
#pragma once

#include <cuda_runtime_api.h>

#include "common/check.h"

namespace slipstream::kernels {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) check_failed("CUDA", 0, std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace slipstream::kernels
