#include "kernels/cuda/runtime.h"

#include <nvtx3/nvToolsExt.h>

#include "kernels/cuda/driver.h"
#include "kernels/range.h"

namespace slipstream::kernels::cuda {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

absl::StatusOr<void*> allocated(cudaError_t error, void* memory, int64_t bytes, const char* where) {
  if (error == cudaSuccess) return memory;
  return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes of ", where, ": ",
                                                   cudaGetErrorString(error)));
}

void check_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  static auto* const describe = driver<decltype(cuGetErrorString)>("cuGetErrorString");
  describe(result, &text);
  check_failed("CUDA", 0, std::string(what) + ": " + (text != nullptr ? text : "unknown error"));
}

constexpr int64_t kGrowth = int64_t{1} << 27;  // a multiple of any page size

int64_t round_up(int64_t bytes) { return (bytes + kGrowth - 1) / kGrowth * kGrowth; }

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

absl::StatusOr<GrowingRange> reserve_range(int64_t bytes) {
  const int64_t capacity = round_up(bytes);
  CUdeviceptr base = 0;
  check_cuda(cudaFree(nullptr), "create a context");
  const CUresult result =
      driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&base, static_cast<size_t>(capacity), 0, 0, 0);
  if (result != CUDA_SUCCESS) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot reserve ", capacity, " bytes of device addresses: CUDA error ",
                                                     static_cast<int>(result)));
  }
  return GrowingRange{reinterpret_cast<char*>(base), bytes, 0};
}

void grow_range(GrowingRange* range, int64_t bytes, int32_t device) {
  CHECK_LE(bytes, range->capacity);
  if (bytes <= range->backed) return;
  const size_t count = static_cast<size_t>(round_up(bytes) - range->backed);
  const CUdeviceptr begin = reinterpret_cast<CUdeviceptr>(range->base + range->backed);
  const CUmemLocation where{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  CUmemAllocationProp property{};
  property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  property.location = where;
  CUmemGenericAllocationHandle memory = 0;
  const std::string what = absl::StrCat("allocate ", count, " bytes of device memory beside ", range->backed);
  check_driver(driver<decltype(cuMemCreate)>("cuMemCreate")(&memory, count, &property, 0), what.c_str());
  check_driver(driver<decltype(cuMemMap)>("cuMemMap")(begin, count, 0, memory, 0), "map device memory");
  check_driver(driver<decltype(cuMemRelease)>("cuMemRelease")(memory), "hand device memory to its mapping");
  const CUmemAccessDesc access{.location = where, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check_driver(driver<decltype(cuMemSetAccess)>("cuMemSetAccess")(begin, count, &access, 1), "open device memory");
  range->backed += static_cast<int64_t>(count);
}

void release_range(GrowingRange* range) {
  const CUdeviceptr base = reinterpret_cast<CUdeviceptr>(range->base);
  // Unmapping does not wait for kernels as cudaFree does; a driver that is gone already has no say.
  if (cudaDeviceSynchronize() != cudaSuccess) return;
  if (range->backed > 0) driver<decltype(cuMemUnmap)>("cuMemUnmap")(base, static_cast<size_t>(range->backed));
  driver<decltype(cuMemAddressFree)>("cuMemAddressFree")(base, static_cast<size_t>(round_up(range->capacity)));
  *range = {};
}

// At the end of the process the driver may be gone already: its errors no longer matter.
void release(void* device_memory) { static_cast<void>(cudaFree(device_memory)); }
void release_pinned(void* memory) { static_cast<void>(cudaFreeHost(memory)); }

int64_t free_memory() {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "ask for free memory");
  return static_cast<int64_t>(free);
}

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

void begin_recording(void* stream) {
  check_cuda(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeThreadLocal), "record launches");
}

void* end_recording(void* stream) {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(as_stream(stream), &graph), "record launches");
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "make a graph of launches");
  check_cuda(cudaGraphDestroy(graph), "make a graph of launches");
  return executable;
}

bool recording(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(as_stream(stream), &status), "record launches");
  return status != cudaStreamCaptureStatusNone;
}

void launch_graph(void* graph, void* stream) {
  check_cuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), as_stream(stream)), "launch a graph");
}

void destroy_graph(void* graph) { static_cast<void>(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph))); }

}  // namespace slipstream::kernels::cuda

namespace slipstream::kernels {

Range::Range(const char* name) { nvtxRangePushA(name); }
Range::~Range() { nvtxRangePop(); }

}  // namespace slipstream::kernels
