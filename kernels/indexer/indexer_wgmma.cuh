// I(t, s) on tensor cores: bf16 queries and keys of 32 heads x 128 channels, which published models have.
// Products are of 64 keys (rows of A) with the heads of one or eight queries (columns of B). The order of a
// score's sums is the same in all kernels here: sixteen channels after the other in the tensor cores; four
// chains, chain c of heads 8 j + 2 c and the next, ascending in j; then (0 + 1) + (2 + 3). Of one query, each
// thread of a quad holds a chain of a key. Of eight, columns are in such an order that a thread holds all
// heads of a key and query, and exchanges nothing. key_scale, being positive, has moved from the products
// into the weights.
#pragma once

#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/indexer/indexer_scores.cuh"

namespace slipstream::kernels {

constexpr int kWgmmaHeads = 32, kWgmmaWidth = 128, kChainHeads = kWgmmaHeads / 4;
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
  // Columns in blocks of four queries: 8 j + 2 q + e is head 2 j + e of query q. Of one query they are its
  // heads.
  static constexpr int kBlock = kQueries == 1 ? 1 : 4, kBlocks = kQueries / kBlock;
  unsigned char halves[2][kBlocks][kBlock * kWgmmaHeads * 128];
};

template <int kQueries>
using HeadProducts = float[kQueries * kWgmmaHeads / 2];

// Steps [kFirst, kLast) of sixteen channels. The caller fences, commits and waits.
template <int kFirst, int kLast, int kQueries>
__device__ __forceinline__ void multiply_heads(HeadProducts<kQueries>& products, uint64_t keys,
                                               uint64_t queries) {
  constexpr int kKeyHalf = kBoxBytes, kQueryHalf = sizeof(QueryTile<kQueries>) / 2;
#pragma unroll
  for (int step = kFirst; step < kLast; ++step) {
    const int half = step / 4, offset = step % 4 * 32;
    wgmma<false, true>(products, keys + ((half * kKeyHalf + offset) >> 4),
                       queries + ((half * kQueryHalf + offset) >> 4), step == 0 ? 0 : 1);
  }
}

// A NaN stays one.
__device__ __forceinline__ float relu_nan(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// What a thread of a warpgroup has of the scores of 64 keys by kQueries queries.
template <int kQueries>
struct HeadSums;

template <>
struct HeadSums<1> {
  float weights[kChainHeads];

  // Of the score. Lanes of a quad have two keys, and two of them report.
  __device__ static int key() {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    return thread / kWarp * 16 + thread % kWarp / 4 + thread % 2 * 8;
  }
  __device__ static bool reports() { return threadIdx.x % 4 < 2; }

  __device__ void load_weights(const WgmmaView& view, int t, int) {
#pragma unroll
    for (int h = 0; h < kChainHeads; ++h) {
      const int head = h / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + h % 2;
      weights[h] = view.weights[t][head] * view.key_scale;
    }
  }
  __device__ float score(const HeadProducts<1>& products) const {
    float chains[2] = {};  // of this row and of the one eight below
#pragma unroll
    for (int h = 0; h < kChainHeads; ++h) {
#pragma unroll
      for (int low = 0; low < 2; ++low)
        chains[low] = fmaf(weights[h], relu_nan(products[h / 2 * 4 + low * 2 + h % 2]), chains[low]);
    }
    // Even lanes go on with this row, odd ones with the lower.
    const bool odd = threadIdx.x % 2 == 1;
    const float sum = (odd ? chains[1] : chains[0]) + __shfl_xor_sync(~0u, odd ? chains[0] : chains[1], 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};

template <>
struct HeadSums<8> {
  float weights[2][kWgmmaHeads];

  // The first of the thread's keys, the other being eight below, and of its queries, the other being four on.
  __device__ static int key() {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    return thread / kWarp * 16 + thread % kWarp / 4;
  }
  __device__ static int query() { return static_cast<int>(threadIdx.x) % 4; }

  // Queries beyond `count` have any.
  __device__ void load_weights(const WgmmaView& view, int first, int count) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const from = view.weights[first + min(query() + 4 * i, count - 1)];
#pragma unroll
      for (int head = 0; head < kWgmmaHeads; ++head) weights[i][head] = from[head] * view.key_scale;
    }
  }
  // Of query query() + 4 i and key row key() + 8 low.
  __device__ float score(const HeadProducts<8>& products, int i, int low) const {
    float chains[4] = {};
#pragma unroll
    for (int h = 0; h < kChainHeads; ++h) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int head = h / 2 * 8 + c * 2 + h % 2;
        const float product = products[i * 64 + head / 2 * 4 + low * 2 + h % 2];
        chains[c] = fmaf(weights[i][head], relu_nan(product), chains[c]);
      }
    }
    return (chains[0] + chains[1]) + (chains[2] + chains[3]);
  }
};

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
  using Queries = QueryTile<Shape::kQueries>;
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
      barrier_arrive_expecting(full, sizeof(Queries));
      for (int half = 0; half < 2; ++half) {
        for (int block = 0; block < Queries::kBlocks; ++block)
          copy_box(shared.queries[turn.place].halves[half][block], args.q, full, half * 64, 0,
                   piece.first + block * Queries::kBlock, 0);
      }
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
  // By a shuffle the compiler knows that it is the same in all lanes.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int origin = round.page_begin[0];
  const bool leads = threadIdx.x % kWarp == 0;  // arrives at barriers for its warp
  Ring<Shape::kStages> stage;
  Ring<2> turn;
  if (warpgroup == 1) {
    stage.advance();
    if constexpr (kTurns) give_turn(0);
  }
  range.for_pieces(round, [&](int place, int first, int last) {
    const QueryPiece piece = round.pieces[place];
    HeadSums<kQueries> sums;
    sums.load_weights(args.view, piece.first, piece.count);
    const int own = first + ((first - range.begin) % 2 != warpgroup ? 1 : 0);
    uint32_t* ranks =
        round.row(place, 0) + sums.key() + (own - (round.page_begin[place] - origin)) * kPageRows;
    if constexpr (kQueries > 1) ranks += sums.query() * round.columns;
    barrier_wait(&shared.queries_full[turn.place], turn.parity);
    const uint64_t queries = factor_descriptor(&shared.queries[turn.place], 0);
    for (int page = own; page < last; page += 2, ranks += 2 * kPageRows) {
      const uint64_t keys = factor_descriptor(&shared.keys[stage.place], 0);
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
      barrier_arrive_warp(&shared.keys_empty[stage.place], leads);
      wgmma_pin(products);
      stage.advance(), stage.advance();
      if constexpr (kQueries == 1) {
        const float score = sums.score(products);
        if (sums.reports()) ranks[0] = rank_of(score);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t* const to = ranks + i * 4 * round.columns;
          to[0] = rank_of(sums.score(products, i, 0));
          to[8] = rank_of(sums.score(products, i, 1));
        }
      }
    }
    barrier_arrive_warp(&shared.queries_empty[turn.place], leads);
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
      barrier_init(&shared.keys_empty[i], kArrivalsOfWarp * kWarpgroup / kWarp);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.queries_full[i], 1);
      barrier_init(&shared.queries_empty[i], kArrivalsOfWarp * Shape::kConsumers / kWarp);
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

// Boxes are the blocks of QueryTile: 64 channels of a pair of heads, of all queries, then the other pairs.
template <int kQueries>
CUtensorMap query_map(const Tensor& q) {
  static auto* const encode = cuda::driver<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const auto row = static_cast<cuuint64_t>(q.stride(0) * 2), head = static_cast<cuuint64_t>(q.stride(1) * 2);
  const cuuint64_t sizes[4] = {kWgmmaWidth, 2, static_cast<cuuint64_t>(q.size(0)), kWgmmaHeads / 2};
  const cuuint64_t strides[3] = {head, row, 2 * head};
  const cuuint32_t box[4] = {64, 2, QueryTile<kQueries>::kBlock, kWgmmaHeads / 2}, steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, q.raw(), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK_EQ(static_cast<int>(result), 0);
  return map;
}

template <int kQueries>
void launch_select_scores(const IndexerSelect& args, const SelectRound& round, Stream& stream) {
  using Shape = ScoreShape<kQueries>;
  const Tensor &q = args.q, &keys = args.keys.pool;
  CHECK(aligned_16(q) && aligned_16(keys));
  const ScoreArguments arguments{.q = query_map<kQueries>(q),
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

// A block a query: rows are gathered two tiles of 64 ahead, and looked up in the page table one further.
constexpr int kGivenStages = 3, kGivenRows = 64;
struct GivenShared {
  KeyTile keys[kGivenStages];
  QueryTile<1> query;
  const bf16* from[2][kGivenRows];  // null where no row is asked for, and nobody reads the score
};

// Sixteen threads copy a row of 256 bytes: chunk c is the c-th sixteen bytes.
__device__ __forceinline__ void copy_chunk(void* half, int row, int chunk, const bf16* from) {
  copy_async(SwizzledTile{shared_address(half), 128}.chunk(static_cast<uint32_t>(row),
                                                           static_cast<uint32_t>(chunk % 8)),
             from + chunk * 8);
}

static __global__ void __launch_bounds__(kWarpgroup)
    given_scores_wgmma(const WgmmaView view, Rows<int32_t> rows, int asked, Rows<float> scores) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<GivenShared*>(memory);
  const int t = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int b = sequence_of(view.batch.row_begin, view.batch.count, t);
  const int tiles = (asked + kGivenRows - 1) / kGivenRows, chunk = thread % 16;
  const auto look_up = [&](int tile) {
    const int i = tile * kGivenRows + thread;
    if (thread >= kGivenRows || tile >= tiles) return;
    const int row = i < asked ? rows[t][i] : -1;
    shared.from[tile % 2][thread] = row < 0 ? nullptr : view.keys.row(b, row);
  };
  const auto gather = [&](int tile) {
    if (tile < tiles) {
      void* const half = shared.keys[tile % kGivenStages].halves[chunk / 8];
      for (int i = thread / 16; i < kGivenRows; i += kWarpgroup / 16) {
        const bf16* const from = shared.from[tile % 2][i];
        if (from != nullptr) copy_chunk(half, i, chunk, from);
      }
    }
    commit_copies();
  };
  for (int h = thread / 16; h < kWgmmaHeads; h += kWarpgroup / 16)
    copy_chunk(shared.query.halves[chunk / 8], h, chunk, view.q.at(t, h));
  look_up(0), look_up(1);
  HeadSums<1> sums;
  sums.load_weights(view, t, 1);
  __syncthreads();
  gather(0), gather(1);
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_copies<kGivenStages - 2>();
    fence_async_proxy();
    __syncthreads();  // these rows are here, and everybody is done with those before
    look_up(tile + 2);
    HeadProducts<1> products;
    wgmma_pin(products);
    wgmma_fence();
    multiply_heads<0, 8, 1>(products, factor_descriptor(&shared.keys[tile % kGivenStages], 0),
                            factor_descriptor(&shared.query, 0));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(products);
    const float score = sums.score(products);
    const int at = tile * kGivenRows + sums.key();
    if (sums.reports() && at < asked) scores[t][at] = rows[t][at] < 0 ? 0.0f : score;
    __syncthreads();  // the rows looked up
    gather(tile + 2);
  }
}

}  // namespace slipstream::kernels
