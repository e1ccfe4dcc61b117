#include "parallel/group.h"

namespace slipstream::parallel {
namespace {

class SelfGroup final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(const kernels::Tensor&, kernels::Stream&) override {}
};

}  // namespace

Group& self_group() {
  static SelfGroup group;
  return group;
}

}  // namespace slipstream::parallel
