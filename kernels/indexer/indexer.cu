#include <algorithm>

#include "kernels/indexer/indexer.h"
#include "kernels/indexer/indexer_backward.cuh"
#include "kernels/indexer/indexer_select.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// f is called with the dtypes of queries and keys.
template <class Args, class F>
void for_dtypes(const Args& args, F&& f) {
  with_type(args.q.dtype(), [&](auto x) { with_type(args.keys.pool.dtype(), [&](auto k) { f(x, k); }); });
}

unsigned blocks(int64_t n, int64_t size) { return static_cast<unsigned>(divide_up(n, size)); }

void score_round(const IndexerSelect& args, const SelectRound& round, int64_t pieces, Stream& stream) {
  const auto y = static_cast<unsigned>(pieces);
  const bool done = for_mma_steps(args, [&](auto steps) {
    const dim3 grid(blocks(round.columns, kMmaBlockKeys), y);
    select_scores_mma<steps()>
        <<<grid, kMmaThreads, 0, cuda_stream(stream)>>>(view_of<bf16, bf16>(args), round);
  });
  if (done) return;
  for_dtypes(args, [&]<class X, class K>(X, K) {
    const int bytes = plain_shared_bytes(args.q.size(1), args.q.size(2));
    allow_shared(select_scores_plain<X, K>, bytes);
    const dim3 grid(blocks(round.columns, kPlainKeys), y);
    select_scores_plain<X, K>
        <<<grid, kPlainThreads, bytes, cuda_stream(stream)>>>(view_of<X, K>(args), round);
  });
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
  round.queries = tokens > 4 * sequences ? 16 : 1;
  round.topk_rows = static_cast<int>(args.topk / args.pool);
  round.columns = args.keys.page_table.size(1) * kPageRows;
  const int64_t pieces = pieces_at_most(args.sequences, round.queries);
  const int64_t piece_bytes = std::max<int64_t>(round.queries * round.columns, 1) * 4;
  const int64_t pieces_a_round =
      std::min(pieces, (workspace.capacity() - workspace.used() - 1024) / piece_bytes);
  CHECK_GE(pieces_a_round, 1);  // the workspace holds the scores of one piece
  round.scores = workspace.alloc(DType::kF32, {pieces_a_round * piece_bytes / 4}).f32();
  for (int64_t first = 0; first < pieces; first += pieces_a_round) {
    round.first_piece = static_cast<int>(first);
    const int64_t count = std::min(pieces_a_round, pieces - first);
    if (round.columns > round.topk_rows) score_round(args, round, count, stream);
    select_rows<<<static_cast<unsigned>(count * round.queries), kSelectThreads, 0, cuda_stream(stream)>>>(
        on_device(args.sequences), round, static_cast<int>(args.pool), args.tail,
        rows_of<int32_t>(args.indices), static_cast<int>(args.indices.size(1)), args.counts.i32());
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
  const bool done = for_mma_steps(args, [&](auto steps) {
    given_scores_mma<steps()><<<dim3(x, blocks(asked, kMmaBlockKeys)), kMmaThreads, 0, cuda_stream(stream)>>>(
        view_of<bf16, bf16>(args), rows, static_cast<int>(asked), scores);
  });
  if (!done) {
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
