#include "bench/kernel_trace.h"

namespace slipstream::bench {

absl::Status KernelTrace::start() { return absl::UnimplementedError("a trace of kernels needs a build with CUDA"); }
void KernelTrace::report(const std::string&, int, bool, int) {}

}  // namespace slipstream::bench
