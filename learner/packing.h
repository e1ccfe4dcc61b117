// Packing: which samples share a forward pass, and which rank runs it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace slipstream::learner {

struct PackItem {
  int64_t tokens = 0;
  float temperature = 1.0f;  // a pass has one
};

// Whole samples, by index into the items, ascending.
struct MicroBatch {
  std::vector<int64_t> items;
  float temperature = 1.0f;
  int64_t tokens = 0;
};

// [rank][micro-batch]. Every item is in exactly one micro-batch; none holds more than micro_batch_tokens
// unless it is one item alone; ranks carry about the same number of tokens. A function of the arguments: no
// order of arrival, no clock.
std::vector<std::vector<MicroBatch>> pack(absl::Span<const PackItem> items, int64_t micro_batch_tokens,
                                          int ranks);

}  // namespace slipstream::learner
