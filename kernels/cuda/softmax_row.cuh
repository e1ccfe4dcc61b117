// The softmax of a row of logits without writing it. LogProb and Sampling share it, so that a sampled token's log-prob has
// the bits the learner will compute. One block of kSoftmaxThreads a row; the order of sums depends on V alone.
#pragma once

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

constexpr int kSoftmaxThreads = 512;

struct RowSoftmax {
  float max, inv_temperature;
  float log_sum;  // of exp((logit - max) / temperature), >= 0; NaN for a row with a NaN, a plus infinity or no finite logit
  float entropy;
  // Relative to the maximum, where log-probs are most exact; lse() itself is rounded at the scale of the logits.
  __device__ float exponent(float logit) const { return (logit - max) * inv_temperature; }
  __device__ float logprob(float logit) const { return exponent(logit) - log_sum; }
  __device__ float lse() const { return max * inv_temperature + log_sum; }
};

// All threads call and receive it.
__device__ __forceinline__ RowSoftmax softmax_of(const float* logits, int64_t vocab, float inv_temperature, bool entropy) {
  float largest = -INFINITY;
  for (int64_t i = threadIdx.x; i < vocab; i += kSoftmaxThreads) largest = fmaxf(largest, logits[i]);
  RowSoftmax row = {block_max(largest), inv_temperature, 0.0f, 0.0f};
  float sum = 0.0f, dot = 0.0f;
  for (int64_t i = threadIdx.x; i < vocab; i += kSoftmaxThreads) {
    const float d = row.exponent(logits[i]), e = expf(d);
    sum += e;
    // A bounded exponent keeps 0 * d from becoming NaN for logits of minus infinity; NaN passes through the sum.
    if (entropy) dot = fmaf(e, fmaxf(d, -87.5f), dot);
  }
  sum = block_sum(sum);
  if (entropy) dot = block_sum(dot);
  row.log_sum = sum >= 1.0f ? logf(sum) : NAN;  // legal rows sum to at least 1, the term of the maximum
  row.entropy = row.log_sum - dot / sum;
  return row;
}

}  // namespace slipstream::kernels
