// A query in many blocks of threads: score_latents by blocks of keys, then weigh_latents by columns of o. What must go block of keys
// by block of keys is little: `top`, of which the blocks' largest scores are all it takes; four sums a row; the products. So
// weigh_latents finds all tops first, and three warpgroups make the blocks' weights in turn.
#pragma once

#include "kernels/sparse_mla/attention_latents_whole.cuh"

namespace slipstream::kernels {

// Products of a block of 64 keys, between the kernels: 32 values of each of 128 threads, as wgmma leaves
// them, by fours.
constexpr int kScoreValues = kLatentHeads * kLatentKeys;
struct LatentScores {
  float* data;
  float* largest;  // of each block's rows
  int blocks;      // of a run of heads, at most

  __device__ int64_t number(int64_t t, int block) const { return (t * gridDim.y + blockIdx.y) * blocks + block; }
  __device__ float* at(int64_t t, int block) const { return data + number(t, block) * kScoreValues; }
  __device__ float* largest_at(int64_t t, int block) const { return largest + number(t, block) * kLatentHeads; }
};

template <bool kRope, class K>
__device__ __forceinline__ void store_scores(LatentShared<kRope>& shared, const LatentView<K>& view,
                                             const LatentShare& share, const LatentScores& to) {
  Ring<kLatentStages> stage;
  Ring<2> last;
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    const int count = key_count(view, t), begin = share.begin(), end = share.end(count);
    if (begin >= end) continue;
    LatentQueries<kRope> queries;
    barrier_wait(&shared.full[stage.place], stage.parity);
    queries.load(shared, stage.place);
    arrive_once_a_warp(&shared.empty[stage.place], 2);
    stage.advance();
    for (int block = begin; block < end; ++block) {
      barrier_wait(&shared.full[stage.place], stage.parity);
      fence_async_proxy();
      float scores[32];
      queries.score(shared, stage.place, last, scores);
      if (block + 1 == end) arrive_once_a_warp(&shared.queries_empty);
      arrive_once_a_warp(&shared.empty[stage.place], 2);
      stage.advance();
      last.advance();
      leave_out_missing(scores, count - block * kLatentKeys);  // -infinity: their weights are 0
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float largest = largest_of_row(largest_here(scores, r));
        if (threadIdx.x % 4 == 0) to.largest_at(t, block)[row_of_thread() + 8 * r] = largest;
      }
      float* const at = to.at(t, block) + threadIdx.x % 128 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        *reinterpret_cast<float4*>(at + i * 512) = {scores[4 * i], scores[4 * i + 1], scores[4 * i + 2],
                                                    scores[4 * i + 3]};
      }
    }
  }
}

// One warpgroup copies, one scores; two restore where there are codes.
template <class K>
constexpr int kScoreThreads = (sizeof(K) == 1 ? 2 + kRestorers : 2) * 128;

template <bool kRope, class K>
__global__ void __launch_bounds__(kScoreThreads<K>, 1)
    score_latents(const __grid_constant__ LatentView<K> view, const LatentShare share, const LatentScores to) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<LatentShared<kRope>*>(memory);
  constexpr bool kCodes = sizeof(K) == 1;
  shared.init(kCodes);
  const int role = static_cast<int>(threadIdx.x) / 128;
  if (role == 1) {
    if constexpr (kCodes) take_registers<168>();
    store_scores(shared, view, share, to);
  } else {
    if constexpr (kCodes) give_registers<112>();
    if (role == 0) {
      fetch_latents(shared, view, share);
    } else if constexpr (kCodes) {
      StageRestorer<kRope, K> restorer{shared, role - 2};
      for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
        const int blocks = share.end(key_count(view, t)) - share.begin();
        for (int stage = 0; blocks > 0 && stage <= blocks; ++stage) restorer.next(stage == 0);
      }
    }
  }
}

constexpr int kWeighStages = 6, kWeightTiles = 4, kSofteners = 3;
constexpr int kSplitBlocksMax = 64;  // of keys
struct WeighShared {
  unsigned char values[kWeighStages][kTileBytes];   // 64 columns
  unsigned char weights[kWeightTiles][kTileBytes];  // of 64 heads and keys
  // What block b's weights are relative to, and what is multiplied by what was added up before it.
  float top[kSplitBlocksMax][kLatentHeads], rescale[kSplitBlocksMax][kLatentHeads];
  float sum[2][128];             // of a softener's thread after the block it had, handed from one to the next
  float factor[kLatentHeads];    // 1 / sum
  uint64_t full[kWeighStages], empty[kWeighStages];
  uint64_t copied[kWeighStages];  // with codes, as LatentShared's
  uint64_t weights_full[kWeightTiles], weights_empty[kWeightTiles];
  uint64_t summed[kWeightTiles];  // block b's sums are there: number b % kWeightTiles
  uint64_t tops_full, factor_full;

  __device__ __forceinline__ void init(bool codes) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kWeighStages; ++i) {
        barrier_init(&full[i], codes ? kArrivalsOfWarp * 4 : 128);
        barrier_init(&copied[i], 128);
        barrier_init(&empty[i], kArrivalsOfWarp * 4);
      }
      for (int i = 0; i < kWeightTiles; ++i) {
        barrier_init(&weights_full[i], kArrivalsOfWarp * 4);
        barrier_init(&weights_empty[i], kArrivalsOfWarp * 4);
        barrier_init(&summed[i], kArrivalsOfWarp * 4);
      }
      barrier_init(&tops_full, 128);
      barrier_init(&factor_full, kArrivalsOfWarp * 4);
      barrier_init_done();
    }
    __syncthreads();
  }
};

template <class K>
__device__ __forceinline__ void copy_values(WeighShared& shared, const LatentView<K>& view, int t, int blocks, int column) {
  constexpr bool kCodes = sizeof(K) == 1;
  if (blocks == 0) return;
  Ring<kWeighStages> stage;
  KeyFinder<K> keys(view, keys_of(view, t), 0);
  for (int block = 0; block < blocks; ++block, stage.advance()) {
    keys.advance();
    barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
    const auto source = [&](int i) { return keys.source(i); };
    if constexpr (kCodes) {
      CodeCopier::copy_tile(shared.values[stage.place], column, view.latents, source);
    } else {
      RowCopier::copy<1>(shared.values[stage.place], column, source);
    }
    barrier_arrive_after_copies(kCodes ? &shared.copied[stage.place] : &shared.full[stage.place]);
  }
}

// By the warpgroup that multiplies, before it does: a thread a row.
__device__ __forceinline__ void find_tops(WeighShared& shared, const LatentScores& from, int t, int blocks, float scale) {
  const int row = static_cast<int>(threadIdx.x) % 128;
  if (row < kLatentHeads) {
    float top = -INFINITY;
#pragma unroll 16
    for (int block = 0; block < blocks; ++block) {
      const float rescale = move_top(top, from.largest_at(t, block)[row] * scale);
      shared.top[block][row] = top;
      shared.rescale[block][row] = rescale;
    }
  }
  barrier_arrive(&shared.tops_full);
}

// One of kSofteners: weights of every kSofteners-th block.
template <class K>
__device__ __forceinline__ void soften(WeighShared& shared, const LatentView<K>& view, const LatentScores& from, int t, int blocks,
                                       float scale, int first) {
  const int thread = static_cast<int>(threadIdx.x) % 128, row = row_of_thread();
  const auto load = [&](int block, float (&scores)[32]) {
    const float* const at = from.at(t, block) + thread * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(at + i * 512);
      scores[4 * i] = four.x, scores[4 * i + 1] = four.y, scores[4 * i + 2] = four.z, scores[4 * i + 3] = four.w;
    }
  };
  float scores[32];
  if (first < blocks) load(first, scores);
  barrier_wait(&shared.tops_full, 0);
  for (int block = first; block < blocks; block += kSofteners) {
    const float top[2] = {shared.top[block][row], shared.top[block][row + 8]};
    float shares[8][2];
    uint32_t weights[4][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = weigh_pair(scores, j, r, scale, top[r]);
        shares[j][r] = pair.x + pair.y;
        weights[j / 2][j % 2 * 2 + r] = pack_bf16(pair.x, pair.y);
      }
    }
    const int place = block % kWeightTiles, parity = block / kWeightTiles % 2;
    barrier_wait(&shared.weights_empty[place], parity ^ 1);
    const SwizzledTile tile{shared_address(shared.weights[place]), 128};
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      store_tiles(tile.chunk(static_cast<uint32_t>(thread / kWarp * 16 + thread % 16), k * 2 + static_cast<uint32_t>(thread % kWarp / 16)),
                  weights[k]);
    }
    fence_async_proxy();
    arrive_once_a_warp(&shared.weights_full[place]);
    if (block + kSofteners < blocks) load(block + kSofteners, scores);

    float sum[2] = {0.0f, 0.0f};
    if (block > 0) {
      const int before = block - 1;
      barrier_wait(&shared.summed[before % kWeightTiles], before / kWeightTiles % 2);
      sum[0] = shared.sum[0][thread], sum[1] = shared.sum[1][thread];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] *= shared.rescale[block][row + 8 * r];
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[r] += shares[j][r];
    }
    if (block + 1 < blocks) {
      shared.sum[0][thread] = sum[0], shared.sum[1][thread] = sum[1];
      arrive_once_a_warp(&shared.summed[place]);
      continue;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = sum_of_row(sum[r]);
      if (thread % 4 == 0) shared.factor[row + 8 * r] = 1.0f / total;
      if (blockIdx.z == 0) store_lse(view, t, first_head() + row + 8 * r, top[r], total);
    }
    arrive_once_a_warp(&shared.factor_full);
  }
}

// One warpgroup copies, one multiplies, kSofteners make weights; one restores where there are codes.
template <class K>
constexpr int kWeighThreads = (2 + kSofteners + (sizeof(K) == 1 ? 1 : 0)) * 128;

// Columns from 64 blockIdx.z on.
template <class K>
__global__ void __launch_bounds__(kWeighThreads<K>, 1)
    weigh_latents(const __grid_constant__ LatentView<K> view, const LatentShare share, const LatentScores from) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WeighShared*>(memory);
  constexpr bool kCodes = sizeof(K) == 1;
  shared.init(kCodes);
  const int t = static_cast<int>(blockIdx.x), column = static_cast<int>(blockIdx.z) * 64;
  const int blocks = (key_count(view, t) + kLatentKeys - 1) / kLatentKeys;
  const int role = static_cast<int>(threadIdx.x) / 128;
  if (role == 0) {
    if constexpr (kCodes) give_registers<40>();
    return copy_values(shared, view, t, blocks, column);
  }
  if (role >= 2 && role < 2 + kSofteners) {
    if constexpr (kCodes) take_registers<104>();
    return soften(shared, view, from, t, blocks, share.scale, role - 2);
  }
  Ring<kWeighStages> stage;
  if (role == 2 + kSofteners) {
    if constexpr (kCodes) {
      give_registers<48>();
      for (int block = 0; block < blocks; ++block, stage.advance()) {
        barrier_wait(&shared.copied[stage.place], stage.parity);
        CodeCopier::restore_tile(shared.values[stage.place], column);
        arrive_once_a_warp(&shared.full[stage.place]);
      }
    }
    return;
  }
  find_tops(shared, from, t, blocks, share.scale);
  barrier_wait(&shared.tops_full, 0);
  const int row = row_of_thread();
  Ring<kWeightTiles> tile;
  float o[32] = {}, factor[2] = {0.0f, 0.0f};
  for (int block = 0; block < blocks; ++block, stage.advance(), tile.advance()) {
    const float rescale[2] = {shared.rescale[block][row], shared.rescale[block][row + 8]};
    if (!all_ones(rescale)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] *= rescale[i / 2 % 2];
    }
    barrier_wait(&shared.full[stage.place], stage.parity);
    barrier_wait(&shared.weights_full[tile.place], tile.parity);
    fence_async_proxy();
    const uint64_t weights = factor_descriptor(shared.weights[tile.place], 0);
    const uint64_t values = factor_descriptor(shared.values[stage.place], 0);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<false, false>(o, weights + (k * 32 >> 4), values + (k * 16 * 128 >> 4), 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(o);
    arrive_once_a_warp(&shared.weights_empty[tile.place]);
    arrive_once_a_warp(&shared.empty[stage.place]);
  }
  if (blocks > 0) {
    barrier_wait(&shared.factor_full, 0);
    factor[0] = shared.factor[row], factor[1] = shared.factor[row + 8];
  } else if (blockIdx.z == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_lse(view, t, first_head() + row + 8 * r, -INFINITY, 0.0f);
  }
  store_rows(view, t, column, o, factor);
}

}  // namespace slipstream::kernels
