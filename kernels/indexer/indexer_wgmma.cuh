// I(t, s) on tensor cores: bf16 queries and keys of 32 heads x 128 channels, which published models have.
// Products are of 64 keys (rows of A) with the heads of one or eight queries (columns of B), so that a thread
// holds eight heads of a key and query, and the sum over heads stays in its quad. The order of a score's sums
// is the same in all kernels here: sixteen channels after the other in the tensor cores; a thread's heads
// 8 j + 2 (t % 4) and the next, ascending in j; then the quad's neighbours, then its halves. key_scale, being
// positive, has moved from the products into the weights.
#pragma once

#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/indexer/indexer_scores.cuh"

namespace slipstream::kernels {

constexpr int kWgmmaHeads = 32, kWgmmaWidth = 128, kThreadHeads = kWgmmaHeads / 4;
constexpr int kWarpgroup = 128;

template <class Args>
bool wgmma_takes_indexer(const Args& args) {
  return args.q.dtype() == DType::kBf16 && args.keys.pool.dtype() == DType::kBf16 &&
         args.q.size(1) == kWgmmaHeads && args.q.size(2) == kWgmmaWidth;
}

using WgmmaView = IndexerView<bf16, bf16>;

// 64 keys, or the heads of kQueries queries, as two boxes of 64 channels.
struct KeyTile {
  unsigned char halves[2][kBoxBytes];
};
template <int kQueries>
struct QueryTile {
  unsigned char halves[2][kQueries * kWgmmaHeads * 128];
};

// Of a thread's heads. Queries beyond `count` have zeros.
template <int kQueries>
struct HeadWeights {
  float of[kQueries][kThreadHeads];

  __device__ void load(const WgmmaView& view, int first, int count) {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
#pragma unroll
      for (int h = 0; h < kThreadHeads; ++h) {
        const int head = h / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + h % 2;
        of[q][h] = q < count ? view.weights[first + q][head] * view.key_scale : 0.0f;
      }
    }
  }
};

template <int kQueries>
using HeadProducts = float[kQueries * kThreadHeads * 2];

// Steps [kFirst, kLast) of sixteen channels. The caller fences, commits and waits.
template <int kFirst, int kLast, int kQueries>
__device__ __forceinline__ void multiply_heads(HeadProducts<kQueries>& products, const KeyTile& keys,
                                               const QueryTile<kQueries>& queries) {
#pragma unroll
  for (int step = kFirst; step < kLast; ++step) {
    const int half = step / 4, offset = step % 4 * 32;
    wgmma<false, true>(products, factor_descriptor(keys.halves[half], 0) + (offset >> 4),
                       factor_descriptor(queries.halves[half], 0) + (offset >> 4), step == 0 ? 0 : 1);
  }
}

// A NaN stays one.
__device__ __forceinline__ float relu_nan(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// What a thread gets: scores of key row `score_row()` of its warpgroup's 64, for queries `first` and on.
template <int kQueries>
struct HeadSums {
  static constexpr int kCount = kQueries == 1 ? 1 : kQueries / 2;
  float scores[kCount];
  int first;    // query
  bool unique;  // false: another lane has the same

  __device__ HeadSums(const HeadProducts<kQueries>& products, const HeadWeights<kQueries>& weights) {
    const bool odd = threadIdx.x % 2 == 1, upper = threadIdx.x % 4 >= 2;
    float sums[kQueries];
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      float rows[2] = {};  // this row and the one eight below
#pragma unroll
      for (int h = 0; h < kThreadHeads; ++h) {
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const float product = products[q * 2 * kThreadHeads + h / 2 * 4 + low * 2 + h % 2];
          rows[low] = fmaf(weights.of[q][h], relu_nan(product), rows[low]);
        }
      }
      // Even lanes go on with this row, odd ones with the lower.
      sums[q] = (odd ? rows[1] : rows[0]) + __shfl_xor_sync(~0u, odd ? rows[0] : rows[1], 1);
    }
    if constexpr (kQueries == 1) {
      scores[0] = sums[0] + __shfl_xor_sync(~0u, sums[0], 2);
      first = 0, unique = !upper;
    } else {
#pragma unroll
      for (int q = 0; q < kCount; ++q) {  // the lower lanes with the first half of the queries
        const float give = upper ? sums[q] : sums[q + kCount];
        scores[q] = (upper ? sums[q + kCount] : sums[q]) + __shfl_xor_sync(~0u, give, 2);
      }
      first = upper ? kCount : 0, unique = true;
    }
  }
};
__device__ __forceinline__ int score_row() {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  return thread / kWarp * 16 + thread % kWarp / 4 + thread % 2 * 8;
}

// --- Ranks of a round ---

// Pages in turn belong to the two warpgroups that multiply, which so work at different times: while one sums
// over heads, the other has the tensor cores.
template <int kQueries_>
struct ScoreShape {
  static constexpr int kQueries = kQueries_;
  static constexpr int kStages = kQueries == 1 ? 12 : 6;  // of a page; even
  static constexpr int kConsumers = 2 * kWarpgroup, kThreads = kConsumers + kWarpgroup;
};

template <class Shape>
struct ScoreShared {
  KeyTile keys[Shape::kStages];
  QueryTile<Shape::kQueries> queries[2];
  uint64_t keys_full[Shape::kStages], keys_empty[Shape::kStages];
  uint64_t queries_full[2], queries_empty[2];
  int place;
};

struct ScoreArguments {
  CUtensorMap q, keys;
  WgmmaView view;
  SelectRound round;
};

// A block's share of the round's pages: [begin, end), piece by piece.
struct PageRange {
  int begin, end, place;  // of the piece of `begin`

  // each(piece's place, first page, end page), counted in the round.
  template <class Each>
  __device__ void for_pieces(const SelectRound& round, Each&& each) const {
    const int origin = round.page_begin[0];
    for (int p = place, page = begin; page < end; ++p) {
      const int last = min(end, round.page_begin[p + 1] - origin);
      if (last > page) each(p, page, last);
      page = last;
    }
  }
};

// A warp. Page ids are read 32 at a time, before they are needed.
template <class Shape>
__device__ void feed_scores(ScoreShared<Shape>& shared, const ScoreArguments& args, const PageRange& range) {
  const SelectRound& round = args.round;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, origin = round.page_begin[0];
  Ring<Shape::kStages> stage;
  Ring<2> turn;
  range.for_pieces(round, [&](int place, int first, int last) {
    const QueryPiece piece = round.pieces[place];
    const int32_t* const table = args.view.keys.table + piece.sequence * args.view.keys.table_stride -
                                 (round.page_begin[place] - origin);
    const auto page_id = [&](int page) { return page < last ? table[page] : 0; };
    int next_ids = page_id(first + lane);
    if (lane == 0) {
      barrier_wait(&shared.queries_empty[turn.place], turn.parity ^ 1);  // passes in the first round
      uint64_t* const full = &shared.queries_full[turn.place];
      barrier_arrive_expecting(full, sizeof(QueryTile<Shape::kQueries>));
      for (int half = 0; half < 2; ++half)
        copy_box(shared.queries[turn.place].halves[half], args.q, full, half * 64, 0, piece.first);
    }
    for (int base = first; base < last; base += kWarp) {
      const int ids = next_ids;
      next_ids = page_id(base + kWarp + lane);
      for (int i = 0; i < min(kWarp, last - base); ++i, stage.advance()) {
        const int id = __shfl_sync(~0u, ids, i);
        if (lane != 0) continue;
        barrier_wait(&shared.keys_empty[stage.place], stage.parity ^ 1);
        uint64_t* const full = &shared.keys_full[stage.place];
        barrier_arrive_expecting(full, sizeof(KeyTile));
        for (int half = 0; half < 2; ++half)
          copy_box(shared.keys[stage.place].halves[half], args.keys, full, half * 64, 0, id);
      }
      __syncwarp();
    }
    turn.advance();
  });
}

// Turns of the two warpgroups at the tensor cores. Barriers 1 and 2.
__device__ __forceinline__ void wait_for_turn(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + warpgroup) : "memory");
}

template <class Shape>
__device__ __forceinline__ void score_pages(ScoreShared<Shape>& shared, const ScoreArguments& args,
                                            const PageRange& range) {
  constexpr int kQueries = Shape::kQueries;
  constexpr bool kTurns = kQueries > 1;  // with one query the tensor cores have little to do
  const SelectRound& round = args.round;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup, origin = round.page_begin[0];
  const auto arrive = [&](uint64_t* barrier) {  // once a warp
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  };
  Ring<Shape::kStages> stage;
  Ring<2> turn;
  if (warpgroup == 1) {
    stage.advance();
    if constexpr (kTurns) give_turn(0);
  }
  range.for_pieces(round, [&](int place, int first, int last) {
    const QueryPiece piece = round.pieces[place];
    HeadWeights<kQueries> weights;
    weights.load(args.view, piece.first, piece.count);
    const QueryTile<kQueries>& queries = shared.queries[turn.place];
    uint32_t* const ranks = round.row(place, 0) + score_row();
    const int piece_begin = round.page_begin[place] - origin;
    barrier_wait(&shared.queries_full[turn.place], turn.parity);
    for (int page = first + ((first - range.begin) % 2 != warpgroup ? 1 : 0); page < last; page += 2) {
      const KeyTile& keys = shared.keys[stage.place];
      HeadProducts<kQueries> products;
      if constexpr (kTurns) wait_for_turn(warpgroup);
      barrier_wait(&shared.keys_full[stage.place], stage.parity);
      wgmma_pin(products);
      wgmma_fence();
      multiply_heads<0, 6, kQueries>(products, keys, queries);
      wgmma_commit();
      multiply_heads<6, 8, kQueries>(products, keys, queries);
      wgmma_commit();
      if constexpr (kTurns) {
        // The other's products queue up behind the rest of these.
        wgmma_wait<1>();
        give_turn(1 - warpgroup);
      }
      wgmma_wait<0>();
      wgmma_pin(products);
      arrive(&shared.keys_empty[stage.place]);
      stage.advance(), stage.advance();
      const HeadSums<kQueries> sums(products, weights);
      uint32_t* const to = ranks + sums.first * round.columns + (page - piece_begin) * kPageRows;
#pragma unroll
      for (int q = 0; q < sums.kCount; ++q) {
        if (sums.unique) to[q * round.columns] = rank_of(sums.scores[q]);
      }
    }
    arrive(&shared.queries_empty[turn.place]);
    turn.advance();
  });
}

// One block a multiprocessor; each has the same number of pages.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    select_scores_wgmma(const __grid_constant__ ScoreArguments args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<ScoreShared<Shape>*>(memory);
  const SelectRound& round = args.round;
  const int thread = static_cast<int>(threadIdx.x), origin = round.page_begin[0];
  const int64_t pages = round.page_begin[round.piece_count] - origin;
  PageRange range{.begin = static_cast<int>(pages * blockIdx.x / gridDim.x),
                  .end = static_cast<int>(pages * (blockIdx.x + 1) / gridDim.x),
                  .place = 0};
  if (range.begin == range.end) return;
  for (int p = thread; p < round.piece_count; p += Shape::kThreads) {
    if (round.page_begin[p] - origin <= range.begin && range.begin < round.page_begin[p + 1] - origin)
      shared.place = p;
  }
  if (thread == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&shared.keys_full[i], 1);
      barrier_init(&shared.keys_empty[i], kWarpgroup / kWarp);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.queries_full[i], 1);
      barrier_init(&shared.queries_empty[i], Shape::kConsumers / kWarp);
    }
    barrier_init_done();
  }
  __syncthreads();
  range.place = shared.place;
  // 128 products and 64 weights a thread need more than an even share of the registers.
  if (thread < Shape::kConsumers) {
    if constexpr (Shape::kQueries > 1) take_registers<232>();
    score_pages<Shape>(shared, args, range);
  } else {
    if constexpr (Shape::kQueries > 1) give_registers<40>();
    if (thread < Shape::kConsumers + kWarp) feed_scores<Shape>(shared, args, range);
  }
}

template <int kQueries>
void launch_select_scores(const IndexerSelect& args, const SelectRound& round, Stream& stream) {
  using Shape = ScoreShape<kQueries>;
  const Tensor &q = args.q, &keys = args.keys.pool;
  CHECK(aligned_16(q) && aligned_16(keys));
  const ScoreArguments arguments{.q = tensor_map<bf16>(q.raw(), kWgmmaWidth, kWgmmaHeads, q.size(0), q.stride(1),
                                                 q.stride(0), kWgmmaHeads, kQueries),
                                 .keys = tensor_map<bf16>(keys.raw(), kWgmmaWidth, kPageRows, keys.size(0),
                                                    keys.stride(1), keys.stride(0), kPageRows),
                                 .view = view_of<bf16, bf16>(args),
                                 .round = round};
  constexpr int kBytes = sizeof(ScoreShared<Shape>);
  allow_shared(select_scores_wgmma<Shape>, kBytes);
  select_scores_wgmma<Shape>
      <<<static_cast<unsigned>(multiprocessors()), Shape::kThreads, kBytes, cuda_stream(stream)>>>(arguments);
}

// --- Scores of given rows ---

// A block a query: 64 rows at a time are gathered while those before are multiplied.
struct GivenShared {
  KeyTile keys[2];
  QueryTile<1> query;
};

// Sixteen threads copy a row of 256 bytes: chunk c is the c-th sixteen bytes.
template <class Tile>
__device__ __forceinline__ void copy_chunk(Tile& to, int row, int chunk, const bf16* from) {
  copy_async(SwizzledTile{shared_address(to.halves[chunk / 8]), 128}.chunk(static_cast<uint32_t>(row),
                                                                           static_cast<uint32_t>(chunk % 8)),
             from + chunk * 8);
}

static __global__ void __launch_bounds__(kWarpgroup)
    given_scores_wgmma(const WgmmaView view, Rows<int32_t> rows, int asked, Rows<float> scores) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<GivenShared*>(memory);
  const int t = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int b = sequence_of(view.batch.row_begin, view.batch.count, t);
  const int chunk = thread % 16;
  const auto gather = [&](int first) {
    KeyTile& to = shared.keys[first / kPageRows % 2];
    for (int i = thread / 16; i < kPageRows; i += kWarpgroup / 16) {
      const int row = first + i < asked ? rows[t][first + i] : -1;  // -1: nobody reads the score
      if (row >= 0) copy_chunk(to, i, chunk, view.keys.row(b, row));
    }
  };
  for (int h = thread / 16; h < kWgmmaHeads; h += kWarpgroup / 16)
    copy_chunk(shared.query, h, chunk, view.q.at(t, h));
  gather(0);
  HeadWeights<1> weights;
  weights.load(view, t, 1);
  for (int first = 0; first < asked; first += static_cast<int>(kPageRows)) {
    wait_for_copies();
    fence_async_proxy();
    __syncthreads();  // these rows are here, and everybody is done with those before
    if (first + kPageRows < asked) gather(first + static_cast<int>(kPageRows));
    commit_copies();
    HeadProducts<1> products;
    wgmma_pin(products);
    wgmma_fence();
    multiply_heads<0, 8, 1>(products, shared.keys[first / kPageRows % 2], shared.query);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(products);
    const HeadSums<1> sums(products, weights);
    const int at = first + score_row();
    if (sums.unique && at < asked) scores[t][at] = rows[t][at] < 0 ? 0.0f : sums.scores[0];
  }
}

}  // namespace slipstream::kernels
