// Benchmarks of CUDA kernels: kernels/<op>/<op>_cuda_bench.cc define theirs, all are one binary, kernels_cuda_bench.
//   CUDA_BENCH(gemm) { ... bench.milliseconds(...) ... print a row ... }
// Not Google Benchmark: peers run in turns with ours in one process, as the card's clock follows its load.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "kernels/arena.h"
#include "kernels/stream.h"

namespace slipstream::kernels::testing {

// A stream, an arena of device tensors with random values, and the time of a launch.
class CudaBench {
 public:
  // Ends the process where there is no device.
  CudaBench();

  Stream& stream() { return *stream_; }
  Arena& arena() { return arena_; }

  // Uniform in [low, high), f32 or bf16; the values repeat every four million.
  Tensor random(DType dtype, std::initializer_list<int64_t> shape, float low = -1.0f, float high = 1.0f);
  // A copy on the device of host values, dense.
  Tensor upload(const void* values, DType dtype, std::initializer_list<int64_t> shape);

  // Milliseconds a launch of run(i), the mean of `launches` after three to warm up; i counts up, so that run may take
  // one of several copies of what would otherwise stay in the L2.
  double milliseconds(absl::FunctionRef<void(int)> run, int launches = 20);
  // The same in a recorded graph, as a decode step has it: launches follow each other on the device. run must neither upload
  // nor wait.
  double recorded_milliseconds(absl::FunctionRef<void(int)> run);

  // One row of a table for an operator that is bound by memory: its time, and the floor's share of it: `bytes`, each read or
  // written once, at the 4.3 TB/s of a copy. Few tokens are measured recorded.
  void memory_row(const std::string& name, int64_t tokens, int64_t bytes, absl::FunctionRef<void(int)> run);

 private:
  std::unique_ptr<Stream> stream_;
  Arena arena_;
};

// For CUDA_BENCH.
int add_cuda_bench(const char* name, void (*run)(CudaBench&));
#define CUDA_BENCH(name)                                                                                 \
  static void run_##name(::slipstream::kernels::testing::CudaBench& bench);                              \
  [[maybe_unused]] static const int added_##name = ::slipstream::kernels::testing::add_cuda_bench(#name, run_##name); \
  static void run_##name(::slipstream::kernels::testing::CudaBench& bench)

}  // namespace slipstream::kernels::testing
