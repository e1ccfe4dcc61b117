#include "model/weight_panels.h"

#include <algorithm>

#include "kernels/pack_panels/pack_panels.h"

namespace slipstream::model {

absl::StatusOr<WeightPanels> WeightPanels::create(const WeightStore& weights) {
  int64_t bytes = 0;
  for (const WeightStore::Entry& entry : weights.entries()) {
    const Tensor& w = entry.tensor;
    if (w.empty() || w.rank() < 2) continue;
    // Rows fill the last panel, twice where a matrix is used in two parts; tensors fill cache lines.
    const int64_t matrices = w.rank() == 3 ? w.size(0) : 1, columns = w.size(w.rank() - 1);
    const int64_t padding = matrices * kernels::kPanelColumns * columns * kernels::size_of(w.dtype()) + 64;
    bytes += w.bytes() + 2 * padding;
  }
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create_cpu(std::max<int64_t>(bytes, 1)));
  WeightPanels panels(std::move(arena));
  panels.follow(weights);
  return panels;
}

void WeightPanels::follow(const WeightStore& weights) {
  // Stores of one model and dtype have their tensors at the same distances from the first.
  base_ = static_cast<const char*>(weights.entries().front().tensor.raw());
  ++version_;
}

Tensor WeightPanels::of(const Tensor& w, kernels::Stream& stream) {
  Panels& found = panels_[static_cast<const char*>(w.raw()) - base_];
  const int64_t rows = w.size(w.rank() - 2);
  if (found.version == 0) {
    found.panels = arena_.alloc(w.dtype(), kernels::panels_shape(w));
    found.rows = rows;
  }
  CHECK_EQ(found.rows, rows);
  if (found.version != version_) {
    kernels::launch(kernels::PackPanels{.w = w, .panels = found.panels}, stream);
    found.version = version_;
  }
  return found.panels;
}

}  // namespace slipstream::model
