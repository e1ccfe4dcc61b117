// A query in many blocks of threads: score_latents by blocks of keys, then weigh_latents by columns of o.
#pragma once

#include "kernels/sparse_mla/attention_latents_whole.cuh"

namespace slipstream::kernels {

// Products of a block of 64 keys, between the kernels: 32 values of each of 128 threads, as wgmma leaves
// them, by fours.
constexpr int kScoreValues = kLatentHeads * kLatentKeys;
struct LatentScores {
  float* data;
  int blocks;  // of a run of heads, at most

  __device__ float* at(int64_t t, int block) const {
    return data + ((t * gridDim.y + blockIdx.y) * blocks + block) * kScoreValues;
  }
};

template <bool kRope, class K>
__device__ __forceinline__ void store_scores(LatentShared<kRope>& shared, const LatentView<K>& view,
                                             const LatentShare& share, const LatentScores& to) {
  Ring<kLatentStages> stage;
  Ring<2> last;
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    const int begin = share.begin(), end = share.end(key_count(view, t));
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

constexpr int kWeighStages = 4;
struct WeighShared {
  unsigned char values[kWeighStages][kTileBytes];  // 64 columns
  float scores[kWeighStages][kScoreValues];
  uint64_t full[kWeighStages], empty[kWeighStages];
  uint64_t copied[kWeighStages];  // with codes, as LatentShared's
};

// One warpgroup copies, one weighs; one restores where there are codes.
template <class K>
constexpr int kWeighThreads = (sizeof(K) == 1 ? 3 : 2) * 128;

// Columns from 64 blockIdx.z on.
template <class K>
__global__ void __launch_bounds__(kWeighThreads<K>, 2)
    weigh_latents(const __grid_constant__ LatentView<K> view, const LatentShare share, const LatentScores from) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WeighShared*>(memory);
  constexpr bool kCodes = sizeof(K) == 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWeighStages; ++i) {
      barrier_init(&shared.full[i], kCodes ? kArrivalsOfWarp * 4 : 128);
      barrier_init(&shared.copied[i], 128);
      barrier_init(&shared.empty[i], kArrivalsOfWarp * 4);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int t = static_cast<int>(blockIdx.x), column = static_cast<int>(blockIdx.z) * 64;
  const int count = key_count(view, t);
  Ring<kWeighStages> stage;
  const int role = static_cast<int>(threadIdx.x) / 128;
  if (role == 0) {
    if constexpr (kCodes) give_registers<40>();
    const KeyList list = keys_of(view, t);
    KeyFinder<K> keys(view, list, 0);
    for (int block = 0; block * kLatentKeys < count; ++block, stage.advance()) {
      keys.advance();
      barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
      const auto source = [&](int i) { return keys.source(i); };
      if constexpr (kCodes) {
        CodeCopier::copy_tile(shared.values[stage.place], column, view.latents, source);
      } else {
        RowCopier::copy<1>(shared.values[stage.place], column, source);
      }
      const float* const scores = from.at(t, block) + threadIdx.x * 4;
      const uint32_t to = shared_address(shared.scores[stage.place] + threadIdx.x * 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) copy_async(to + i * 2048, scores + i * 512);
      barrier_arrive_after_copies(kCodes ? &shared.copied[stage.place] : &shared.full[stage.place]);
    }
    return;
  }
  if (role == 2) {
    if constexpr (kCodes) {
      give_registers<56>();
      for (int block = 0; block * kLatentKeys < count; ++block, stage.advance()) {
        barrier_wait(&shared.copied[stage.place], stage.parity);
        CodeCopier::restore_tile(shared.values[stage.place], column);
        arrive_once_a_warp(&shared.full[stage.place]);
      }
    }
    return;
  }
  if constexpr (kCodes) take_registers<144>();
  const int row = row_of_thread();
  SoftmaxRows rows;
  float o[32] = {}, factor[2] = {0.0f, 0.0f};
  uint32_t weights[4][4];
  for (int block = 0; block * kLatentKeys < count; ++block, stage.advance()) {
    barrier_wait(&shared.full[stage.place], stage.parity);
    fence_async_proxy();
    float scores[32], rescale[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 four =
          *reinterpret_cast<const float4*>(shared.scores[stage.place] + i * 512 + threadIdx.x % 128 * 4);
      scores[4 * i] = four.x, scores[4 * i + 1] = four.y, scores[4 * i + 2] = four.z,
                 scores[4 * i + 3] = four.w;
    }
    rows.add(scores, count - block * kLatentKeys, share.scale, rescale, weights);
    if (!all_ones(rescale)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] *= rescale[i / 2 % 2];
    }
    const uint64_t values = factor_descriptor(shared.values[stage.place], 0);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<false>(o, weights[k], values + (k * 16 * 128 >> 4), 1);
    wgmma_commit();
    // At once: while products run, the compiler would have other values in the registers of the weights.
    wgmma_wait<0>();
    wgmma_pin(o);
    arrive_once_a_warp(&shared.empty[stage.place]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    if (count > 0) factor[r] = 1.0f / total;
    if (column == 0) store_lse(view, t, first_head() + row + 8 * r, rows.top[r], total);
  }
  store_rows(view, t, column, o, factor);
}

}  // namespace slipstream::kernels
