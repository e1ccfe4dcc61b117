// The DSA lightning indexer as a layer: from the hidden state to the positions each query attends to (model-spec 4).
// It is outside the graph: its inputs carry no gradient, and its weights are frozen unless the indexer's own loss trains them.
#pragma once

#include "model/step.h"
#include "model/weights.h"

namespace slipstream::model {

// Positions each query attends to: indices [T, W] i32 ascending then -1, counts [T] i32.
struct Selection {
  Tensor indices;
  Tensor counts;
  bool empty() const { return indices.empty(); }
};

class Indexer {
 public:
  using Weights = IndexerWeights;
  Indexer(const IndexerConfig& config, int64_t rope) : config_(config), rope_(rope) {}

  Selection allocate(Step& step) const;
  // x [T, H] the layer's normed hidden state, q_resid [T, q_lora_rank]. Stores this batch's keys in `cache` and fills
  // `selection`.
  void forward(const Weights& w, const Tensor& x, const Tensor& q_resid, const LayerCache& cache,
               const Selection& selection, Step& step) const;

 private:
  IndexerConfig config_;
  int64_t rope_;
};

}  // namespace slipstream::model
