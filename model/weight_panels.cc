#include "model/weight_panels.h"

#include "kernels/pack_panels/pack_panels.h"

namespace slipstream::model {

absl::StatusOr<WeightPanels> WeightPanels::create(const WeightStore& weights) {
  int64_t bytes = 0;
  for (const WeightStore::Entry& entry : weights.entries()) {
    // Rows are rounded up to whole panels, once more when they are used in two parts, and tensors to cache lines.
    const Tensor& w = entry.tensor;
    if (w.empty() || w.rank() < 2) continue;
    const int64_t matrices = w.rank() == 3 ? w.size(0) : 1;
    bytes += w.bytes() + 2 * (matrices * kernels::kPanelColumns * w.size(w.rank() - 1) * kernels::size_of(w.dtype()) + 64);
  }
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create_cpu(std::max<int64_t>(bytes, 1)));
  return WeightPanels(std::move(arena));
}

Tensor WeightPanels::of(const Tensor& w, kernels::Stream& stream) {
  Panels& found = panels_[w.raw()];
  if (found.version == version_) {
    CHECK_EQ(found.rows, w.size(w.rank() - 2));
    return found.panels;
  }
  if (found.version == 0) {
    found.panels = arena_.alloc(w.dtype(), kernels::panels_shape(w));
    found.rows = w.size(w.rank() - 2);
  }
  kernels::launch(kernels::PackPanels{.w = w, .panels = found.panels}, stream);
  found.version = version_;
  return found.panels;
}

}  // namespace slipstream::model
