// Range: names a stretch of the host's work for a profiler (NVTX), so that its timeline says which layer or phase the launches
// belong to. Costs nothing to speak of without one, and nothing at all in a build without CUDA.
#pragma once

namespace slipstream::kernels {

class Range {
 public:
  explicit Range(const char* name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace slipstream::kernels
