// DecodeGraphs: on a GPU, decode steps' launches recorded once and replayed as one, as some 150 kernels of microseconds each cost
// as much to launch as to run. The kernels and so the bits are the same.
#pragma once

#include <map>
#include <tuple>

#include "kernels/graph.h"
#include "model/model.h"

namespace slipstream::model {

class DecodeGraphs {
 public:
  struct Pass {
    Tensor logits;    // [B, V] f32
    Choices choices;  // empty unless captured
  };

  // forward() and logits() of every row of a batch that has one row a sequence, all in the cache; on a CUDA stream. The first
  // pass of a kind (rows, sizes, weights, and where the arena stands) runs, the second is recorded, the others are replayed.
  // The result lives in step.arena.
  Pass run(const Model& model, const ModelWeights& w, Step& step, bool capture);

 private:
  using Kind = std::tuple<int64_t, int64_t, bool, int64_t, const void*, const void*>;
  struct Recorded {
    kernels::Graph graph;
    Pass pass;
    int64_t arena_end = 0;  // 0: not recorded yet
  };
  std::map<Kind, Recorded> recorded_;
};

}  // namespace slipstream::model
