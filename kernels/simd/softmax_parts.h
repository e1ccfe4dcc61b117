// What the per-target code of logsumexp-inl.h and its callers hand to one another.
#pragma once

#include <algorithm>
#include <cstdint>

namespace slipstream::kernels {

constexpr int64_t kSoftmaxBlock = 4096;  // 16 KiB: the second look at a block comes from the L1 cache

inline int64_t softmax_blocks(int64_t vocab) { return (vocab + kSoftmaxBlock - 1) / kSoftmaxBlock; }

// One block of a row, with d = (logit - max) / temperature.
struct SoftmaxPart {
  float max;
  float weight;  // exp((max - the row's maximum) / temperature), set by the merge
  float sum;     // of exp(d)
  float dot;     // of exp(d) d; only where the entropy is wanted
};

struct RowSoftmax {
  float max;
  float inv_temperature;
  float sum;  // of exp((logit - max) / temperature), >= 1
  float log_sum;
  float entropy;

  // Relative to the maximum, where log-probs are most exact; lse() itself is rounded at the scale of the
  // logits.
  float logprob(float logit) const { return (logit - max) * inv_temperature - log_sum; }
  float lse() const { return max * inv_temperature + log_sum; }
};

// Where the parts of a few rows fit on the caller's stack, all their blocks are spread over the threads.
constexpr int64_t kSoftmaxPartsOnStack = 1024;

}  // namespace slipstream::kernels
