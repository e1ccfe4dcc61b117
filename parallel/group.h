// Process groups: the ranks a layer's shards or a batch's samples live on, and the collectives between them.
#pragma once

#include <cstdint>
#include <string>

#include "common/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::parallel {

// Every rank of a group calls the same collectives in the same order. One thread uses a group at a time. A
// lost peer ends the process: the job restarts from its last checkpoint.
class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // values [any shape] f32, dense: replaced on every rank by the sum over ranks, added in rank order.
  virtual void all_reduce_sum(const kernels::Tensor& values, kernels::Stream& stream) = 0;
  // The largest of all ranks' values.
  virtual int64_t all_reduce_max(int64_t value) = 0;
  // `bytes` of rank `root` replaces everybody's. Ranks that wait sleep: the root may take its time.
  virtual void broadcast(std::string& bytes, int root) = 0;
  // Returns once every rank has called it.
  virtual void barrier() = 0;
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
