// What the per-target code of logsumexp-inl.h and its callers hand to one another.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/stream.h"

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

// For each of `rows` rows: parts[b] = part(row, b) for its blocks, then finish(row, parts, worker). Tasks take row_grain
// rows. Of few rows the blocks are shared out instead, and then the ends, finish_grain to a task.
template <class Part, class Finish>
void for_softmax_rows(Stream& stream, int64_t rows, int64_t blocks, int64_t row_grain, int64_t finish_grain,
                      Part&& part, Finish&& finish) {
  constexpr int64_t kPartsOnStack = 1024, kBlockGrain = 4;
  if (rows * blocks <= kPartsOnStack) {
    SoftmaxPart parts[kPartsOnStack];
    stream.parallel_for(rows * blocks, kBlockGrain, [&](int64_t begin, int64_t end, Worker&) {
      for (int64_t i = begin; i < end; ++i) parts[i] = part(i / blocks, i % blocks);
    });
    stream.parallel_for(rows, finish_grain, [&](int64_t begin, int64_t end, Worker& worker) {
      for (int64_t t = begin; t < end; ++t) {
        worker.reset();
        finish(t, parts + t * blocks, worker);
      }
    });
    return;
  }
  stream.parallel_for(rows, row_grain, [&](int64_t begin, int64_t end, Worker& worker) {
    for (int64_t t = begin; t < end; ++t) {
      worker.reset();
      SoftmaxPart* parts = worker.scratch<SoftmaxPart>(blocks);
      for (int64_t b = 0; b < blocks; ++b) parts[b] = part(t, b);
      finish(t, parts, worker);
    }
  });
}

}  // namespace slipstream::kernels
