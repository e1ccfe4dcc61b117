// The driver's functions come through the runtime: a binary linked to libcuda would not start on a machine
// without it. Includes CUDA: for .cu files and kernels/cuda only.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda/check.h"

namespace slipstream::kernels::cuda {

template <class Function>
Function* driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  CHECK(found == cudaDriverEntryPointSuccess);
  return reinterpret_cast<Function*>(function);
}

}  // namespace slipstream::kernels::cuda
