// WeightPanels: the matrices of a set of weights once more, in the order in which products read them
// (kernels/pack_panels). An engine that decodes few tokens at a time keeps them, for as much memory again as the matrices
// it multiplies with; results do not change by a bit.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "common/status.h"
#include "kernels/arena.h"
#include "kernels/stream.h"
#include "model/weights.h"

namespace slipstream::model {

// Panels are made as they are asked for. One thread uses an object; it must not outlive the weights it follows.
class WeightPanels {
 public:
  // ResourceExhausted: no address space for as many bytes as the weights.
  static absl::StatusOr<WeightPanels> create(const WeightStore& weights);

  // To be called whenever the weights have changed, or others of the same model and dtype take their place: panels are
  // made again, in the same memory, when next asked for.
  void follow(const WeightStore& weights);
  // The panels of w, [N, K] or [E, N, K]: a matrix of these weights, or rows of one. The same rows each time.
  Tensor of(const Tensor& w, kernels::Stream& stream);

  int64_t bytes() const { return arena_.used(); }

 private:
  struct Panels {
    Tensor panels;
    int64_t rows = 0;  // of the matrix they were made from
    uint64_t version = 0;
  };
  explicit WeightPanels(kernels::Arena arena) : arena_(std::move(arena)) {}

  kernels::Arena arena_;
  const char* base_ = nullptr;  // of the weights
  uint64_t version_ = 0;        // counts follow()
  std::unordered_map<int64_t, Panels> panels_;  // by the offset of a matrix from base_
};

}  // namespace slipstream::model
