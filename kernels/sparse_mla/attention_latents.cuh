// Attention over latents on Hopper: bf16, one key row a position whose first 512 columns are the value too,
// up to 64 heads of one query at a time. Rows may be stored in fp8: they become bf16 on their way into shared
// memory, and all that follows is the same.
//
// The arithmetic of a head, whichever kernel does it: its keys in blocks of 64, ascending. A score is one
// chain of products over sixteen columns at a time. Weights are 2^(scaled score - top). `top` follows a
// block's largest score only where that lies more than kTopSlack above it: what has been added up is then
// rarely rescaled, and weights stay below 2^kTopSlack. o is one chain over blocks and sixteens of keys; the
// sum of weights is four chains, a lane each. None of it depends on the other queries.
//
// attend_latents does all of it in one block of threads. For few queries two kernels share a query out among
// many multiprocessors without cutting a chain: score_latents by blocks of keys, weigh_latents by columns of
// o.
//
// Here what all of them share; rows on their way to shared memory are in attention_latents_rows.cuh, the first kernel in
// attention_latents_whole.cuh, the other two in attention_latents_split.cuh.
#pragma once

#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/sparse_mla/attention_device.cuh"

namespace slipstream::kernels {

constexpr int kLatentWidth = 512, kLatentHeads = 64, kLatentKeys = 64;
// 64 rows of 64 columns as the tensor cores take them; a key row is eight such tiles, or nine with rope
// columns.
constexpr int kTileBytes = 64 * 128, kLatentTiles = kLatentWidth / 64;
constexpr float kTopSlack = 8.0f;

template <class K>
using LatentView = AttentionView<bf16, K>;

// --- Shares of the work ---

// Which keys a block of threads is for, of each query blockIdx.x + i gridDim.x: blocks [z span, (z + 1) span)
// of their lists. And which heads: 64 from 64 blockIdx.y on.
struct LatentShare {
  int queries, span;
  float scale;  // of scores as powers of 2

  __device__ int begin() const { return static_cast<int>(blockIdx.z) * span; }
  __device__ int end(int keys) const { return min(begin() + span, (keys + kLatentKeys - 1) / kLatentKeys); }
};
__device__ __forceinline__ int first_head() { return static_cast<int>(blockIdx.y) * kLatentHeads; }
__device__ __forceinline__ int next_query(int t) { return t + static_cast<int>(gridDim.x); }
template <class K>
__device__ __forceinline__ int key_count(const LatentView<K>& view, int t) {
  return view.counts != nullptr ? view.counts[t] : keys_of(view, t).count;
}

// --- A query's block of the softmax ---

// threadIdx.x, read anew: where registers are scarce, nothing that follows from it is kept.
__device__ __forceinline__ uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// The thread's row of 64; the other is eight below it.
__device__ __forceinline__ int row_of_thread() {
  const uint32_t thread = thread_again();
  return static_cast<int>(thread % 128 / kWarp * 16 + thread % kWarp / 4);
}

// The steps of a block, of the products of queries and keys as wgmma lays them out: two rows a thread, row and row + 8 of the warp's
// sixteen.

// Keys from `count` on do not exist.
__device__ __forceinline__ void leave_out_missing(float (&scores)[32], int count) {
  if (count >= kLatentKeys) return;
  const int column = static_cast<int>(thread_again() % 4 * 2);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i / 4 * 8 + column + i % 2 >= count) scores[i] = -INFINITY;
  }
}
// Of the thread's columns of row r, and of the whole row.
__device__ __forceinline__ float largest_here(const float (&scores)[32], int r) {
  float largest[2] = {scores[2 * r], scores[2 * r + 1]};
#pragma unroll
  for (int j = 1; j < 8; ++j) {
    largest[0] = fmaxf(largest[0], scores[4 * j + 2 * r]);
    largest[1] = fmaxf(largest[1], scores[4 * j + 2 * r + 1]);
  }
  return fmaxf(largest[0], largest[1]);
}
__device__ __forceinline__ float largest_of_row(float here) {
  const float all = fmaxf(here, __shfl_xor_sync(~0u, here, 1));
  return fmaxf(all, __shfl_xor_sync(~0u, all, 2));
}
// `top` after a block with this largest scaled score; returns what all that was added up before is to be multiplied by.
__device__ __forceinline__ float move_top(float& top, float largest) {
  const float before = top;
  if (largest > before + kTopSlack) top = largest;
  return top == before ? 1.0f : fast_exp2(before - top);
}
// The weights of columns 8 j + ... of row r, as products take them; low + high is the thread's share of the sum.
__device__ __forceinline__ float2 weigh_pair(const float (&scores)[32], int j, int r, float scale, float top) {
  return {fast_exp2(fmaf(scores[4 * j + 2 * r], scale, -top)), fast_exp2(fmaf(scores[4 * j + 2 * r + 1], scale, -top))};
}
__device__ __forceinline__ float sum_of_row(float here) {
  here += __shfl_xor_sync(~0u, here, 1);
  return here + __shfl_xor_sync(~0u, here, 2);
}

// What a thread knows of its two rows: `sum` is its own columns' share.
struct SoftmaxRows {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  // From the products to weights; the first `count` keys exist.
  __device__ __forceinline__ void add(float (&scores)[32], int count, float scale, float (&rescale)[2],
                                      uint32_t (&weights)[4][4]) {
    leave_out_missing(scores, count);
#pragma unroll
    for (int r = 0; r < 2; ++r) rescale[r] = largest_here(scores, r);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rescale[r] = move_top(top[r], largest_of_row(rescale[r]) * scale);
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = weigh_pair(scores, j, r, scale, top[r]);
        sum[r] += pair.x + pair.y;
        weights[j / 2][j % 2 * 2 + r] = pack_bf16(pair.x, pair.y);
      }
    }
  }
};

__device__ __forceinline__ bool all_ones(const float (&rescale)[2]) {
  return __all_sync(~0u, rescale[0] == 1.0f && rescale[1] == 1.0f);
}

template <class K>
__device__ __forceinline__ void store_lse(const LatentView<K>& view, int t, int head, float top, float total) {
  constexpr float kLn2 = 0.6931471805599453f;
  if (threadIdx.x % 4 != 0 || head >= view.heads || view.lse.data == nullptr) return;
  view.lse[t][head] = (top + log2f(total)) * kLn2;  // without keys: -infinity - infinity
}

// The sums of a warpgroup's product, each row by its factor, to columns [column, column + kCount / 2) of o.
template <int kCount, class K>
__device__ __forceinline__ void store_rows(const LatentView<K>& view, int t, int column,
                                           const float (&o)[kCount], const float (&factor)[2]) {
  const bool odd = threadIdx.x % 2 == 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head() + row_of_thread() + 8 * r;
    // Neighbours exchange a pair: even threads then have four columns of eight, odd ones of the next eight.
    bf16* const to = view.o.at(t, head) + column + threadIdx.x % 4 * 2 + (odd ? 6 : 0);
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      const uint32_t first = pack_bf16(o[i + 2 * r] * factor[r], o[i + 2 * r + 1] * factor[r]);
      const uint32_t second = pack_bf16(o[i + 4 + 2 * r] * factor[r], o[i + 5 + 2 * r] * factor[r]);
      const uint32_t got = __shfl_xor_sync(~0u, odd ? first : second, 1);
      if (head < view.heads)
        *reinterpret_cast<uint2*>(to + i * 2) = odd ? uint2{got, second} : uint2{first, got};
    }
  }
}

}  // namespace slipstream::kernels
