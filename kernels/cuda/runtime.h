// The CUDA runtime as host code outside .cu files uses it: handles are void*, so that nothing here includes CUDA. Without
// CUDA (runtime_none.cc) what can fail says Unimplemented and the rest is never reached.
#pragma once

#include <cstdint>

#include "common/status.h"

namespace slipstream::kernels::cuda {

// Makes this device the calling thread's. NotFound: there is no such device.
absl::Status select_device(int32_t index);

// ResourceExhausted: no memory. Errors after start-up are fatal: the context is lost.
absl::StatusOr<void*> allocate(int64_t bytes);
absl::StatusOr<void*> allocate_pinned(int64_t bytes);  // host memory that the device copies from at full speed
void release(void* device_memory);
int64_t free_memory();  // of the thread's device, in bytes

// Device addresses without memory behind them, which it gets from the front as it is needed: how much a pass takes is known
// once it ran. Growing costs a driver call of some milliseconds and happens only at a new high-water mark. Dies when the
// device has no more.
struct GrowingRange {
  char* base = nullptr;
  int64_t capacity = 0;  // bytes of addresses
  int64_t backed = 0;    // of them with memory
};
absl::StatusOr<GrowingRange> reserve_range(int64_t bytes);  // of the thread's device
void grow_range(GrowingRange* range, int64_t bytes, int32_t device);  // to at least so many bytes
void release_range(GrowingRange* range);
void release_pinned(void* memory);

absl::StatusOr<void*> create_stream();  // a cudaStream_t
void destroy_stream(void* stream);
void synchronize(void* stream);

// Enqueue: either side may be device or host memory; bytes of zero.
void copy(void* to, const void* from, int64_t bytes, void* stream);
void zero(void* to, int64_t bytes, void* stream);

// Launches of a stream recorded instead of run, and run as one.
void begin_recording(void* stream);
void* end_recording(void* stream);  // a cudaGraphExec_t
bool recording(void* stream);
void launch_graph(void* graph, void* stream);
void destroy_graph(void* graph);

}  // namespace slipstream::kernels::cuda
