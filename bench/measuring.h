// What whole-system benchmarks share.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace slipstream::bench {

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The value that `share` of the others do not exceed: 0.5 is the median. `values` is not empty.
inline double quantile(std::vector<double> values, double share) {
  const size_t at =
      std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

// Ids below `vocab`, the same for the same seed.
inline std::vector<int32_t> random_ids(int64_t count, int64_t vocab, uint64_t seed) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    ids.push_back(static_cast<int32_t>((seed >> 33) % static_cast<uint64_t>(vocab)));
  }
  return ids;
}

}  // namespace slipstream::bench
