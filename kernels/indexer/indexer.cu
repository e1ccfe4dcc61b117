#include <algorithm>

#include "kernels/indexer/indexer.h"
#include "kernels/indexer/indexer_backward.cuh"
#include "kernels/indexer/indexer_select.cuh"
#include "kernels/indexer/indexer_wgmma.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// f is called with the dtypes of queries and keys.
template <class Args, class F>
void for_dtypes(const Args& args, F&& f) {
  with_type(args.q.dtype(), [&](auto x) { with_type(args.keys.pool.dtype(), [&](auto k) { f(x, k); }); });
}

// Query rows a piece, but for decode: with one row a sequence, pieces are these rows.
constexpr int kPieceQueries = 8;
// The most that a round's ranks take: more pieces a round fill the device no better.
constexpr int64_t kRoundBytes = int64_t{1} << 28;
// Blocks a multiprocessor that select.
constexpr int64_t kSelectBlocks = 3;
// A sample pays for itself in longer rows.
constexpr int64_t kSampledColumns = 16384;

unsigned blocks(int64_t n, int64_t size) { return static_cast<unsigned>(divide_up(n, size)); }

void score_round(const IndexerSelect& args, const SelectRound& round, Stream& stream) {
  if (wgmma_takes_indexer(args)) {
    return round.queries == 1 ? launch_select_scores<1>(args, round, stream)
                              : launch_select_scores<kPieceQueries>(args, round, stream);
  }
  for_dtypes(args, [&]<class X, class K>(X, K) {
    const int bytes = plain_shared_bytes(args.q.size(1), args.q.size(2));
    allow_shared(select_scores_plain<X, K>, bytes);
    const dim3 grid(blocks(round.columns, kPlainKeys), static_cast<unsigned>(round.piece_count));
    select_scores_plain<X, K>
        <<<grid, kPlainThreads, bytes, cuda_stream(stream)>>>(view_of<X, K>(args), round);
  });
}

// The map of bits of a row of that many columns.
int64_t map_words(int64_t columns) { return divide_up(columns, kUnit) * (kUnit / 32); }
bool map_is_shared(int64_t columns) {
  return static_cast<int64_t>(sizeof(SelectShared)) + map_words(columns) * 4 <= kSharedMax;
}

void select_round(const IndexerSelect& args, const SelectRound& round, Stream& stream) {
  const ArenaScope scope(stream.workspace());
  const int64_t rows = int64_t{round.piece_count} * round.queries, words = map_words(round.columns);
  const bool shared = map_is_shared(round.columns);
  uint32_t* const maps =
      shared ? nullptr
             : reinterpret_cast<uint32_t*>(stream.workspace().alloc(DType::kI32, {rows * words}).i32());
  const int bytes = static_cast<int>(sizeof(SelectShared) + (shared ? words * 4 : 0));
  const auto run = [&]<class Shape>(Shape) {
    allow_shared(select_rows<Shape>, bytes);
    select_rows<Shape><<<static_cast<unsigned>(rows), Shape::kThreads, bytes, cuda_stream(stream)>>>(
        round, static_cast<int>(args.pool), args.tail, rows_of<int32_t>(args.indices),
        static_cast<int>(args.indices.size(1)), args.counts.i32(), static_cast<int>(words), maps);
  };
  if (round.columns <= kSampledColumns) return run(SelectShape<512, false>());
  rows <= multiprocessors() ? run(SelectShape<1024, true>()) : run(SelectShape<512, true>());
}

template <class X, class K>
void backward(const IndexerScoresBackward& args, Stream& stream) {
  Arena& workspace = stream.workspace();
  const ArenaScope scope(workspace);
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2),
                asked = args.rows.size(1);
  const int64_t keys = args.dkeys.size(0);
  IndexerGradView<X, K> view{.forward = view_of<X, K>(args),
                             .rows = rows_of<int32_t>(args.rows),
                             .asked = static_cast<int>(asked),
                             .dscores = rows_of<float>(args.dscores),
                             .dq = heads_of<X>(args.dq),
                             .dweights = rows_of<float>(args.dweights),
                             .first = 0,
                             .last = 0,
                             .slopes = nullptr,
                             .key_sums = workspace.zeros(DType::kF32, {keys, width}, stream).f32()};
  const int64_t query_bytes = std::max<int64_t>(heads * asked, 1) * 4;
  const int64_t round = std::min(tokens, (workspace.capacity() - workspace.used() - 1024) / query_bytes);
  CHECK_GE(round, 1);  // the workspace holds one query's slopes
  view.slopes = workspace.alloc(DType::kF32, {round * query_bytes / 4}).f32();
  const int bytes = grad_queries_shared_bytes(heads, width);
  allow_shared(indexer_backward_queries<X, K>, bytes);
  allow_shared(indexer_backward_keys<X, K>, sizeof(IndexerGradShared));
  for (int64_t first = 0; first < tokens; first += round) {
    view.first = static_cast<int>(first);
    view.last = static_cast<int>(std::min(first + round, tokens));
    indexer_backward_queries<X, K>
        <<<static_cast<unsigned>(view.last - view.first), kGradThreads, bytes, cuda_stream(stream)>>>(view);
    const dim3 grid(pieces_at_most(args.sequences, kGradTileKeys * args.pool),
                    blocks(width, kGradTileColumns));
    indexer_backward_keys<X, K><<<grid, kGradThreads, sizeof(IndexerGradShared), cuda_stream(stream)>>>(view);
  }
  if (keys == 0) return;
  round_key_sums<X><<<static_cast<unsigned>(keys), 128, 0, cuda_stream(stream)>>>(
      view.key_sums, rows_of<X>(args.dkeys), static_cast<int>(width));
}

}  // namespace

template <>
void launch_cuda<IndexerSelect>(const IndexerSelect& args, Stream& stream) {
  const int64_t tokens = args.q.size(0), sequences = args.sequences.count();
  if (tokens == 0) return;
  Arena& workspace = stream.workspace();
  const ArenaScope scope(workspace);
  // Sizes follow from T, B and the table's width alone: a graph of a decode step holds them.
  SelectRound round{};
  round.queries = tokens > sequences ? kPieceQueries : 1;
  round.topk_rows = static_cast<int>(args.topk / args.pool);
  round.columns = args.keys.page_table.size(1) * kPageRows;
  const int64_t places = pieces_at_most(args.sequences, round.queries);
  auto* const pieces = reinterpret_cast<QueryPiece*>(workspace.alloc(DType::kI32, {places, 4}).i32());
  int* const page_begin = workspace.alloc(DType::kI32, {places + 1}).i32();
  plan_pieces<<<1, kPlanThreads, 0, cuda_stream(stream)>>>(
      on_device(args.sequences), round.queries, static_cast<int>(places), static_cast<int>(args.pool),
      round.topk_rows, pieces, page_begin);
  const bool scored = round.columns > round.topk_rows;
  const int64_t row_bytes =
      round.columns * 4 + (map_is_shared(round.columns) ? 0 : map_words(round.columns) * 4);
  const int64_t piece_bytes = std::max<int64_t>(round.queries * row_bytes, 1);
  const int64_t room = std::min(kRoundBytes, workspace.capacity() - workspace.used() - 1024);
  int64_t pieces_a_round = scored ? std::min(places, room / piece_bytes) : places;
  CHECK_GE(pieces_a_round, 1);  // the workspace holds the ranks of one piece
  // Rounds of about the same size, and as many as leave the fewest waves of rows to select.
  const int64_t resident = kSelectBlocks * multiprocessors();
  const auto pieces_in = [&](int64_t rounds) { return divide_up(places, rounds); };
  const auto waves = [&](int64_t rounds) {
    return rounds * divide_up(pieces_in(rounds) * round.queries, resident);
  };
  const int64_t least = divide_up(places, pieces_a_round);
  int64_t rounds = least;
  for (int64_t more = least + 1; least > 1 && more <= 2 * least; ++more) {
    if (waves(more) < waves(rounds)) rounds = more;
  }
  pieces_a_round = pieces_in(rounds);
  if (scored) {
    round.ranks = reinterpret_cast<uint32_t*>(
        workspace.alloc(DType::kI32, {pieces_a_round * round.queries * round.columns}).i32());
  }
  for (int64_t first = 0; first < places; first += pieces_a_round) {
    round.pieces = pieces + first;
    round.page_begin = page_begin + first;
    round.piece_count = static_cast<int>(std::min(pieces_a_round, places - first));
    if (scored) score_round(args, round, stream);
    select_round(args, round, stream);
  }
  check_launch("indexer_select");
}

template <>
void launch_cuda<IndexerScores>(const IndexerScores& args, Stream& stream) {
  const int64_t tokens = args.q.size(0), asked = args.rows.size(1);
  if (tokens == 0 || asked == 0) return;
  const auto rows = rows_of<int32_t>(args.rows);
  const auto scores = rows_of<float>(args.scores);
  const auto x = static_cast<unsigned>(tokens);
  if (wgmma_takes_indexer(args)) {
    CHECK(aligned_16(args.q) && aligned_16(args.keys.pool));
    allow_shared(given_scores_wgmma, sizeof(GivenShared));
    given_scores_wgmma<<<x, kWarpgroup, sizeof(GivenShared), cuda_stream(stream)>>>(
        view_of<bf16, bf16>(args), rows, static_cast<int>(asked), scores);
  } else {
    for_dtypes(args, [&]<class X, class K>(X, K) {
      const int bytes = plain_shared_bytes(args.q.size(1), args.q.size(2));
      allow_shared(given_scores_plain<X, K>, bytes);
      given_scores_plain<X, K>
          <<<dim3(x, blocks(asked, kPlainKeys)), kPlainThreads, bytes, cuda_stream(stream)>>>(
              view_of<X, K>(args), rows, static_cast<int>(asked), scores);
    });
  }
  check_launch("indexer_scores");
}

template <>
void launch_cuda<IndexerScoresBackward>(const IndexerScoresBackward& args, Stream& stream) {
  if (args.q.size(0) == 0) return;
  for_dtypes(args, [&]<class X, class K>(X, K) { backward<X, K>(args, stream); });
  check_launch("indexer_scores_backward");
}

}  // namespace slipstream::kernels
