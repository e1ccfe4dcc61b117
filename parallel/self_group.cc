#include "parallel/group.h"

namespace slipstream::parallel {
namespace {

class SelfGroup final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(const kernels::Tensor&, kernels::Stream&) override {}
  int64_t all_reduce_max(int64_t value) override { return value; }
  void broadcast(std::string&, int) override {}
  void barrier() override {}
};

}  // namespace

Group& self_group() {
  static SelfGroup group;
  return group;
}

}  // namespace slipstream::parallel
