// KernelTrace: what the GPU ran between start() and report(): kernels and copies with their times, from CUPTI. Says how much of
// the wall time the GPU was busy, which is where launch overhead shows, and which kernels the time went to.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/status.h"

namespace slipstream::bench {

class KernelTrace {
 public:
  // Unimplemented: built without CUDA, or CUPTI refuses, with its words.
  static absl::Status start();
  // Stops and prints: wall time against busy time, then the `most` kernels that took longest, of `passes` equal passes each;
  // with `timeline` everything of the last pass in its order: when it began, how long after the one before ended, and its time.
  static void report(const std::string& what, int passes, bool timeline, int most = 16);
};

}  // namespace slipstream::bench
