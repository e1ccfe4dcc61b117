// WeightPanels: the matrices of a set of weights once more, in the order in which products read them
// (kernels/pack_panels). An engine that decodes few tokens at a time keeps them, for about as much memory again as the
// matrices of the layers and the head take; results do not change by a bit.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "common/status.h"
#include "kernels/arena.h"
#include "kernels/stream.h"
#include "model/weights.h"

namespace slipstream::model {

// Made as they are asked for. One thread uses it; it must not outlive the weights.
class WeightPanels {
 public:
  // ResourceExhausted: no address space for as many bytes as the weights.
  static absl::StatusOr<WeightPanels> create(const WeightStore& weights);

  // The panels of w, [N, K] or [E, N, K]: a matrix of those weights or rows of one. Packed now, unless they were since
  // the last expire().
  Tensor of(const Tensor& w, kernels::Stream& stream);
  // To be called whenever the weights have changed: all panels are packed again when next asked for.
  void expire() { ++version_; }

  int64_t bytes() const { return arena_.used(); }

 private:
  struct Panels {
    Tensor panels;
    int64_t rows = 0;      // of the matrix they were made from
    uint64_t version = 0;
  };
  explicit WeightPanels(kernels::Arena arena) : arena_(std::move(arena)) {}

  kernels::Arena arena_;
  uint64_t version_ = 1;
  std::unordered_map<const void*, Panels> panels_;  // by the matrix's first element
};

}  // namespace slipstream::model
