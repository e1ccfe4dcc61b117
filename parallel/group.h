// Process groups: the ranks a layer's shards live on, and the collectives between them.
#pragma once

#include <cstdint>

#include "common/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::parallel {

// Every rank of a group calls the same collectives in the same order. One thread uses a group at a time.
class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // values [any shape] f32, dense: replaced on every rank by the sum over ranks, added in rank order.
  virtual void all_reduce_sum(const kernels::Tensor& values, kernels::Stream& stream) = 0;
};

// The group of this process alone; collectives do nothing. Stateless, so one object serves everybody.
Group& self_group();

// The groups a model is split over. Pointers outlive the model.
struct Groups {
  Group* tensor = &self_group();    // heads and inner widths
  Group* expert = &self_group();    // experts
  Group* pipeline = &self_group();  // layers
};

}  // namespace slipstream::parallel
