// The softmax of a row of logits without writing it, in one order for all: columns in blocks of 64 by four threads each,
// then the blocks. LogProb, HeadLogProb (whose logits never leave the registers of the product) and Sampling share it, so
// that a sampled token's log-prob has the bits the learner will compute. The order depends on V alone.
#pragma once

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

constexpr int kSoftmaxThreads = 512;
constexpr int kSoftmaxColumns = 64;  // of a block
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// Some columns of a row, with d = (logit - max) scale and scale = log2(e) / temperature.
struct RowPart {
  float max;
  float sum;  // of 2^d
  float dot;  // of 2^d d, for the entropy
};
__device__ __forceinline__ RowPart no_columns() { return {-INFINITY, 0.0f, 0.0f}; }
// What is relative to a maximum of minus infinity is relative to 0: such columns then add 0, not NaN.
__device__ __forceinline__ float finite_or_0(float max) { return max == -INFINITY ? 0.0f : max; }
// A bounded exponent keeps 0 * d from becoming NaN for logits of minus infinity; NaN passes through the power.
__device__ __forceinline__ float bounded(float d) { return fmaxf(d, -126.0f); }

// A block from the four threads that hold it: thread q has columns 8 j + 2 q and the next at v[2 j] and v[2 j + 1], which is
// where wgmma leaves them. Columns beyond the vocabulary are minus infinity. All four receive the part.
__device__ __forceinline__ RowPart part_of_block(const float (&v)[kSoftmaxColumns / 4], float scale) {
  float max = v[0];
#pragma unroll
  for (int i = 1; i < kSoftmaxColumns / 4; ++i) max = fmaxf(max, v[i]);
  max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
  max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
  const float from = finite_or_0(max);
  float sum = 0.0f, dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kSoftmaxColumns / 4; ++i) {
    const float d = (v[i] - from) * scale, e = fast_exp2(d);
    sum += e;
    dot = fmaf(e, bounded(d), dot);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  dot += __shfl_xor_sync(~0u, dot, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  dot += __shfl_xor_sync(~0u, dot, 2);
  return {max, sum, dot};
}

// The same bits for (a, b) and (b, a).
__device__ __forceinline__ RowPart merged(const RowPart& a, const RowPart& b, float scale) {
  const float max = fmaxf(a.max, b.max), from = finite_or_0(max);
  const float da = (a.max - from) * scale, db = (b.max - from) * scale, ea = fast_exp2(da), eb = fast_exp2(db);
  return {max, a.sum * ea + b.sum * eb,
          fmaf(bounded(da), a.sum, a.dot) * ea + fmaf(bounded(db), b.sum, b.dot) * eb};
}

struct RowSoftmax {
  float max, inv_temperature;
  float log_sum;  // of exp((logit - max) / temperature), >= 0; NaN for a row with a NaN, a plus infinity or no finite logit
  float entropy;
  // Relative to the maximum, where log-probs are most exact; lse() itself is rounded at the scale of the logits.
  __device__ float exponent(float logit) const { return (logit - max) * inv_temperature; }
  __device__ float logprob(float logit) const { return exponent(logit) - log_sum; }
  __device__ float lse() const { return max * inv_temperature + log_sum; }
};

inline __host__ __device__ int64_t column_blocks(int64_t vocab) {
  return (vocab + kSoftmaxColumns - 1) / kSoftmaxColumns;
}

// The whole row from its blocks, part(b). kSoftmaxThreads threads call and receive it: each merges every 512th block, then
// the lanes of a warp, then the warps ascending.
template <class F>
__device__ __forceinline__ RowSoftmax softmax_of_blocks(int64_t blocks, float inv_temperature, F&& part) {
  __shared__ RowPart warps[kSoftmaxThreads / kWarp];
  const float scale = inv_temperature * kLog2E;
  RowPart row = no_columns();
  for (int64_t b = threadIdx.x; b < blocks; b += kSoftmaxThreads) row = merged(row, part(b), scale);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const RowPart other = {__shfl_xor_sync(~0u, row.max, distance), __shfl_xor_sync(~0u, row.sum, distance),
                           __shfl_xor_sync(~0u, row.dot, distance)};
    row = merged(row, other, scale);
  }
  __syncthreads();
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = row;
  __syncthreads();
  row = warps[0];
  for (int w = 1; w < kSoftmaxThreads / kWarp; ++w) row = merged(row, warps[w], scale);
  RowSoftmax out = {row.max, inv_temperature, 0.0f, 0.0f};
  out.log_sum = row.sum >= 1.0f ? logf(row.sum) : NAN;  // legal rows sum to at least 1, the term of the maximum
  out.entropy = out.log_sum - kLn2 * (row.dot / row.sum);
  return out;
}

// This thread's columns of a block of stored logits, as part_of_block() wants them. pairs: rows begin on 8 bytes.
__device__ __forceinline__ void load_block(const float* logits, int64_t vocab, int64_t block, bool pairs,
                                           float (&v)[kSoftmaxColumns / 4]) {
  const int64_t first = block * kSoftmaxColumns + threadIdx.x % 4 * 2;
  const bool whole = pairs && (block + 1) * kSoftmaxColumns <= vocab;
#pragma unroll
  for (int j = 0; j < kSoftmaxColumns / 8; ++j) {
    const int64_t column = first + j * 8;
    if (whole) {
      const float2 both = *reinterpret_cast<const float2*>(logits + column);
      v[2 * j] = both.x, v[2 * j + 1] = both.y;
    } else {
      v[2 * j] = column < vocab ? logits[column] : -INFINITY;
      v[2 * j + 1] = column + 1 < vocab ? logits[column + 1] : -INFINITY;
    }
  }
}
inline bool reads_pairs(const Tensor& logits) {
  return reinterpret_cast<uintptr_t>(logits.raw()) % 8 == 0 && logits.stride(0) % 2 == 0;
}

}  // namespace slipstream::kernels
