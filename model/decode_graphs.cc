#include "model/decode_graphs.h"

#include "kernels/range.h"

namespace slipstream::model {
namespace {

// Batches shrink and grow one sequence at a time: so many kinds at once, then all begin anew. A graph takes some 200 KB.
constexpr size_t kKindsMax = 512;

}  // namespace

DecodeGraphs::Pass DecodeGraphs::run(const Model& model, const ModelWeights& w, Step& step, bool capture) {
  const kernels::Range range("decode step");
  const PreparedBatch& batch = step.batch;
  CHECK(batch.cache != nullptr && batch.rows() == batch.sequences.count());
  if (recorded_.size() >= kKindsMax) recorded_.clear();
  const int64_t begin = step.arena.mark();
  const Kind kind{batch.rows(), batch.longest, capture, begin, w.embedding.raw(), batch.cache};
  const auto forward = [&](Pass* pass) {
    const Tensor hidden = model.forward(w, step, nullptr, {.replay = nullptr, .capture = capture ? &pass->choices : nullptr});
    pass->logits = model.logits(w, hidden, step);
  };
  const auto [at, first] = recorded_.try_emplace(kind);
  if (first) {
    Pass pass;
    forward(&pass);
    return pass;
  }
  Recorded& recorded = at->second;
  if (recorded.arena_end == 0) {
    recorded.graph = kernels::Graph::record(step.stream, [&] { forward(&recorded.pass); });
    recorded.arena_end = step.arena.mark();
  } else {
    batch.advance();
    // The memory that the pass's results are in.
    step.arena.alloc(kernels::DType::kI32, {(recorded.arena_end - begin) / 4});
    CHECK_EQ(step.arena.mark(), recorded.arena_end);
  }
  recorded.graph.replay(step.stream);
  return recorded.pass;
}

}  // namespace slipstream::model
