// attend_latents: a query in one block of threads. One warpgroup copies, one scores, two weigh half of the columns each.
#pragma once

#include "kernels/sparse_mla/attention_latents_rows.cuh"

namespace slipstream::kernels {

// --- Scores ---

constexpr int kLatentStages = 3;
// Registers hold this many sixteens of the queries' columns, shared memory the others.
constexpr int kHeldSteps = 27, kStepBytes = 64 * 32;
// Warpgroups that restore codes.
constexpr int kRestorers = 2;

// As much as a block of threads may have: hence few registers for queries, and two last tiles for three
// stages.
template <bool kRope>
struct LatentShared {
  static constexpr int kSharedSteps = kLatentWidth / 16 - kHeldSteps + (kRope ? 4 : 0);

  unsigned char stages[kLatentStages][kLatentTiles][kTileBytes];  // 64 heads or keys: the latents
  // Rope columns of a block's keys; once it is scored, its weights. Of every second block.
  unsigned char last[2][kTileBytes];
  unsigned char queries[kSharedSteps][kStepBytes];  // eights of rows and columns, 128 bytes each
  float rescale[2][kLatentHeads];
  float factor[kLatentHeads];  // 1 / sum of the weights, with a query's last block
  uint64_t full[kLatentStages], empty[kLatentStages];
  uint64_t copied[kLatentStages];   // with codes: these are there, or a query's heads; `full` when they are restored
  uint64_t weighed[kLatentStages];  // the block's weights are there
  uint64_t scored[kLatentStages];   // the products of the block after it are done
  uint64_t last_full[2];            // the tile is free, and then has the rope columns
  uint64_t queries_empty;

  __device__ __forceinline__ void init(bool codes) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kLatentStages; ++i) {
        barrier_init(&full[i], codes ? kArrivalsOfWarp * kRestorers * 4 : 128);
        barrier_init(&copied[i], 128);
        barrier_init(&empty[i], kArrivalsOfWarp * 8);
        barrier_init(&weighed[i], kArrivalsOfWarp * 4);
        barrier_init(&scored[i], kArrivalsOfWarp * 4);
      }
      for (int i = 0; i < 2; ++i) barrier_init(&last_full[i], 128);
      barrier_init(&queries_empty, kArrivalsOfWarp * 4);
      barrier_init_done();
    }
    __syncthreads();
  }
};

// The warpgroup that copies: of each query the heads, then blocks of keys. A block's last tile was that of
// the block two before. When a stage becomes free, so does the last tile of the block before the one that
// comes into the stage, as that stage held what came three before. After a query's heads, which have no last
// tile, it is the block's own.
template <bool kRope, class K>
__device__ __forceinline__ void fetch_latents(LatentShared<kRope>& shared, const LatentView<K>& view,
                                              const LatentShare& share) {
  constexpr bool kCodes = sizeof(K) == 1;
  Ring<kLatentStages> stage;
  Ring<2> last;
  Ring<1> query;
  const auto await_stage = [&] {
    barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
  };  // passes at first
  const auto done = [&] {
    barrier_arrive_after_copies(kCodes ? &shared.copied[stage.place] : &shared.full[stage.place]);
    stage.advance();
  };
  const int rope_column = kCodes ? view.latents.ropes / static_cast<int>(sizeof(bf16)) : kLatentWidth;
  const auto as_bf16 = [](const SourceRow<K>& row) { return SourceRow<bf16>{reinterpret_cast<const bf16*>(row.from)}; };
  const auto copy_last = [&](const auto& source) {
    if constexpr (kRope) {
      RowCopier::copy<1>(shared.last[last.place], rope_column, [&](int i) { return as_bf16(source(i)); });
    }
    barrier_arrive_after_copies(&shared.last_full[last.place]);
    last.advance();
  };
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    const KeyList list = keys_of(view, t);
    const int begin = share.begin(), end = share.end(list.count);
    if (begin >= end) continue;
    const auto head = [&](int i) {
      const int h = first_head() + RowCopier::row() + 16 * i;
      return SourceRow<bf16>{h < view.heads ? view.q.at(t, h) : nullptr};
    };
    KeyFinder<K> keys(view, list, begin);
    await_stage();
    RowCopier::copy<kLatentTiles>(shared.stages[stage.place][0], 0, head);
    if constexpr (kRope) {
      barrier_wait(&shared.queries_empty, query.parity ^ 1);
      const uint32_t to =
          shared_address(shared.queries[kLatentWidth / 16 - kHeldSteps + RowCopier::chunk() / 2]) +
          static_cast<uint32_t>(RowCopier::row() / 8 * 256 + RowCopier::chunk() % 2 * 128 +
                                RowCopier::row() % 8 * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        head(i).copy(to + static_cast<uint32_t>(i * 512), kLatentWidth + RowCopier::chunk() * 8);
      }
      query.advance();
    }
    done();
    for (int block = begin; block < end; ++block) {
      keys.advance();
      await_stage();
      if (block > begin + 2) copy_last([&](int i) { return keys.source_before(i); });
      const auto source = [&](int i) { return keys.source(i); };
      unsigned char* const tiles = shared.stages[stage.place][0];
      if constexpr (kCodes) {
        CodeCopier::copy(tiles, view.latents, source);
      } else {
        RowCopier::copy<kLatentTiles>(tiles, 0, source);
      }
      done();
      if (block < begin + 2) {
        copy_last(source);
      } else if constexpr (kRope) {
        // To be copied soon, and then quickly: the products that wait for the tile stand between two blocks' weighing.
        prefetch_line(as_bf16(keys.own()).from + rope_column + (thread_again() % kWarp < 16 ? 0 : 56));
      }
    }
    if (end > begin + 2) {
      await_stage();
      copy_last([&](int i) { return keys.source(i); });
    }
  }
}

// 64 queries against keys in a stage. Those in registers need not be fetched from shared memory for every
// block.
template <bool kRope>
struct LatentQueries {
  uint32_t held[kHeldSteps][4];

  __device__ __forceinline__ void load(LatentShared<kRope>& shared, int stage) {
    const uint32_t thread = thread_again() % 128;
    const uint32_t lane = thread % kWarp, row = thread / kWarp * 16 + (lane & 15);
    const uint32_t from = shared_address(shared.stages[stage][0]) + row * 128;
#pragma unroll
    for (uint32_t k = 0; k < kHeldSteps; ++k) {
      load_tiles(held[k], from + k / 4 * kTileBytes + (((k % 4 * 2 + (lane >> 4)) ^ (row & 7)) << 4));
    }
    sync();  // every thread has awaited its products with the queries before, but not the others'
#pragma unroll
    for (uint32_t k = kHeldSteps; k < kLatentWidth / 16; ++k) {
      const uint32_t r = thread % 64, half = thread / 64;
      *reinterpret_cast<uint4*>(shared.queries[k - kHeldSteps] + r / 8 * 256 + half * 128 + r % 8 * 16) =
          *reinterpret_cast<const uint4*>(shared.stages[stage][k / 4] + r * 128 +
                                          (((k % 4 * 2 + half) ^ (r & 7)) << 4));
    }
    fence_async_proxy();
    sync();
  }

  __device__ __forceinline__ void score(LatentShared<kRope>& shared, int stage, const Ring<2>& last,
                                        float (&scores)[32]) const {
    const uint64_t keys = factor_descriptor(shared.stages[stage][0], 0);
    const uint64_t queries = eights_descriptor(shared.queries, 128, 256);
    wgmma_pin(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLatentWidth / 16; ++k) {
      const uint64_t columns = keys + ((k / 4 * kTileBytes + k % 4 * 32) >> 4);
      if (k < kHeldSteps) {
        wgmma<true>(scores, held[k], columns, k > 0);
      } else {
        wgmma<false, true>(scores, queries + ((k - kHeldSteps) * kStepBytes >> 4), columns, 1);
      }
    }
    wgmma_commit();
    barrier_wait(&shared.last_full[last.place], last.parity);
    if constexpr (kRope) {
      fence_async_proxy();
      wgmma_fence();
      const uint64_t rope = factor_descriptor(shared.last[last.place], 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<false, true>(scores, queries + ((kLatentWidth / 16 - kHeldSteps + k) * kStepBytes >> 4),
                           rope + (k * 32 >> 4), 1);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_pin(scores);
  }
  static __device__ __forceinline__ void sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
};

__device__ __forceinline__ void arrive_once_a_warp(uint64_t* barrier, int arrivals = 1) {
  __syncwarp();
  barrier_arrive_warp(barrier, thread_again() % kWarp == 0, arrivals);
}

// One of kRestorers warpgroups that restore codes, its share of a block's rows each; a query's heads come first, as they are.
// Where there are no codes it does nothing.
template <bool kRope, class K>
struct StageRestorer {
  LatentShared<kRope>& shared;
  int part;
  Ring<kLatentStages> stage = {};

  __device__ __forceinline__ void next(bool heads) {
    if constexpr (sizeof(K) == 1) {
      constexpr int kRows = 4 / kRestorers;
      barrier_wait(&shared.copied[stage.place], stage.parity);
      if (!heads) CodeCopier::restore(shared.stages[stage.place][0], part * kRows, part * kRows + kRows);
      arrive_once_a_warp(&shared.full[stage.place]);
      stage.advance();
    }
  }
};

// --- A block of threads: one warpgroup copies, one scores, two weigh half of the columns each ---

constexpr int kLatentThreads = 4 * 128;

// The tensor cores are to have work during the softmax of a block. So the weighing of the block before starts
// only when this one's products are done, though its weights were there earlier; unless this one's keys are not yet there.
template <bool kRope, class K>
__device__ __forceinline__ void score_queries(LatentShared<kRope>& shared, const LatentView<K>& view,
                                              const LatentShare& share) {
  Ring<kLatentStages> stage, previous = {-1, 0};  // of the block before, perhaps of the query before
  Ring<2> last;
  bool scored = true;  // the weighing of the block before may start
  const auto may_weigh = [&] {
    if (!scored) arrive_once_a_warp(&shared.scored[previous.place]);
    scored = true;
  };
  const auto await_stage = [&] {
    if (!__all_sync(~0u, barrier_passed(&shared.full[stage.place], stage.parity))) {
      may_weigh();
      barrier_wait(&shared.full[stage.place], stage.parity);
    }
  };
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    int left = key_count(view, t);
    SoftmaxRows rows;
    if (left > 0) {
      LatentQueries<kRope> queries;
      await_stage();
      queries.load(shared, stage.place);
      arrive_once_a_warp(&shared.empty[stage.place], 2);  // instead of the warps that weigh
      arrive_once_a_warp(&shared.weighed[stage.place]);
      arrive_once_a_warp(&shared.scored[stage.place]);
      stage.advance();
      do {
        await_stage();
        fence_async_proxy();
        float scores[32];
        queries.score(shared, stage.place, last, scores);
        may_weigh();
        if (left <= kLatentKeys) {
          arrive_once_a_warp(&shared.queries_empty);
          // The factor before has been read.
          if (previous.place >= 0) barrier_wait(&shared.empty[previous.place], previous.parity);
        }
        previous = stage;
        scored = false;
        if (kRope) LatentQueries<kRope>::sync();  // all have awaited the products with the last tile
        float rescale[2];
        uint32_t weights[4][4];
        rows.add(scores, left, share.scale, rescale, weights);
        const uint32_t thread = thread_again();
        const int row = row_of_thread();
        const SwizzledTile tile{shared_address(shared.last[last.place]), 128};
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          store_tiles(tile.chunk(thread % 128 / kWarp * 16 + thread % 16, k * 2 + thread % kWarp / 16),
                      weights[k]);
        }
        if (thread_again() % 4 == 0) {
          shared.rescale[last.place][row] = rescale[0];
          shared.rescale[last.place][row + 8] = rescale[1];
        }
        left -= kLatentKeys;
        if (left <= 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            rows.sum[r] = sum_of_row(rows.sum[r]);
            if (thread_again() % 4 == 0) shared.factor[row + 8 * r] = 1.0f / rows.sum[r];
          }
        }
        fence_async_proxy();
        arrive_once_a_warp(&shared.weighed[stage.place]);
        stage.advance();
        last.advance();
      } while (left > 0);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_lse(view, t, first_head() + row_of_thread() + 8 * r, rows.top[r], rows.sum[r]);
  }
  may_weigh();  // nothing follows the last block
}

template <bool kRope, class K>
__device__ __forceinline__ void weigh_queries(LatentShared<kRope>& shared, const LatentView<K>& view,
                                              const LatentShare& share, int half) {
  constexpr int kTiles = kLatentTiles / 2;
  StageRestorer<kRope, K> restorer{shared, half};
  Ring<kLatentStages> stage;
  Ring<2> last;
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    const int end = share.end(key_count(view, t));
    float o[2][64] = {}, factor[2] = {0.0f, 0.0f};
    if (end > 0) {
      stage.advance();  // the queries
      restorer.next(true);
      restorer.next(false);
    }
    for (int block = 0; block < end; ++block) {
      // Its products are what this block's weighing waits for.
      if (block + 1 < end) restorer.next(false);
      const int row = row_of_thread();
      barrier_wait(&shared.weighed[stage.place], stage.parity);
      barrier_wait(&shared.scored[stage.place], stage.parity);
      const float rescale[2] = {shared.rescale[last.place][row], shared.rescale[last.place][row + 8]};
      if (block + 1 == end) factor[0] = shared.factor[row], factor[1] = shared.factor[row + 8];
      if (!all_ones(rescale)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i / 64][i % 64] *= rescale[i / 2 % 2];
      }
      fence_async_proxy();
      const uint64_t weights = factor_descriptor(shared.last[last.place], 0);
      const uint64_t values = factor_descriptor(shared.stages[stage.place][half * kTiles], kTileBytes);
      wgmma_pin(o[0]);
      wgmma_pin(o[1]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          wgmma<false, false>(o[i], weights + (k * 32 >> 4),
                              values + ((i * 2 * kTileBytes + k * 16 * 128) >> 4), 1);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(o[0]);
      wgmma_pin(o[1]);
      arrive_once_a_warp(&shared.empty[stage.place]);
      stage.advance();
      last.advance();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) store_rows(view, t, half * kTiles * 64 + i * 128, o[i], factor);
  }
}

template <bool kRope, class K>
__global__ void __launch_bounds__(kLatentThreads, 1)
    attend_latents(const __grid_constant__ LatentView<K> view, const LatentShare share) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<LatentShared<kRope>*>(memory);
  shared.init(sizeof(K) == 1);
  const int role = static_cast<int>(threadIdx.x) / 128;
  // All of the 512 that there are for four threads. With less, the compiler makes products wait for each
  // other.
  if (role == 0) {
    give_registers<24>();
    fetch_latents(shared, view, share);
  } else if (role == 1) {
    take_registers<168>();
    score_queries(shared, view, share);
  } else {
    take_registers<160>();
    weigh_queries(shared, view, share, role - 2);
  }
}

}  // namespace slipstream::kernels
