#include "kernels/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/check.h"

namespace slipstream::kernels::cuda {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

absl::StatusOr<void*> allocated(cudaError_t error, void* memory, int64_t bytes, const char* where) {
  if (error == cudaSuccess) return memory;
  return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes of ", where, ": ",
                                                   cudaGetErrorString(error)));
}

}  // namespace

absl::Status select_device(int32_t index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || index < 0 || index >= count) {
    return absl::NotFoundError(absl::StrCat("CUDA device ", index, ": not among ", count, " devices (",
                                            cudaGetErrorString(error), ")"));
  }
  if (const cudaError_t chosen = cudaSetDevice(index); chosen != cudaSuccess) {
    return absl::UnavailableError(absl::StrCat("CUDA device ", index, ": ", cudaGetErrorString(chosen)));
  }
  return absl::OkStatus();
}

absl::StatusOr<void*> allocate(int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes));
  return allocated(error, memory, bytes, "device memory");
}

absl::StatusOr<void*> allocate_pinned(int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocHost(&memory, static_cast<size_t>(bytes));
  return allocated(error, memory, bytes, "pinned memory");
}

// At the end of the process the driver may be gone already: its errors no longer matter.
void release(void* device_memory) { static_cast<void>(cudaFree(device_memory)); }
void release_pinned(void* memory) { static_cast<void>(cudaFreeHost(memory)); }

absl::StatusOr<void*> create_stream() {
  cudaStream_t stream = nullptr;
  if (const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); error != cudaSuccess) {
    return absl::UnavailableError(absl::StrCat("cannot create a CUDA stream: ", cudaGetErrorString(error)));
  }
  return static_cast<void*>(stream);
}

void destroy_stream(void* stream) { static_cast<void>(cudaStreamDestroy(as_stream(stream))); }
void synchronize(void* stream) { check_cuda(cudaStreamSynchronize(as_stream(stream)), "synchronize"); }

void copy(void* to, const void* from, int64_t bytes, void* stream) {
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, as_stream(stream)), "copy");
}

void zero(void* to, int64_t bytes, void* stream) {
  check_cuda(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), as_stream(stream)), "zero");
}

}  // namespace slipstream::kernels::cuda
