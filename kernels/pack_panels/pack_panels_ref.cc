#include <cstring>

#include "kernels/pack_panels/pack_panels.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

std::vector<int64_t> panels_shape(const Tensor& w) {
  CHECK(w.rank() == 2 || w.rank() == 3);
  std::vector<int64_t> shape;
  if (w.rank() == 3) shape.push_back(w.size(0));
  shape.push_back((w.size(w.rank() - 2) + kPanelColumns - 1) / kPanelColumns);
  shape.push_back(w.size(w.rank() - 1));
  shape.push_back(kPanelColumns);
  return shape;
}

absl::Status expect_panels(const Operands& op, const char* name, const Tensor& panels, const Tensor& w) {
  const std::vector<int64_t> shape = panels_shape(w);
  if (w.rank() == 2) {
    RETURN_IF_ERROR(expect_tensor(op, name, panels, w.dtype(), {shape[0], shape[1], shape[2]}));
    return expect_that(op, panels.dense(), "panels must be dense");
  }
  RETURN_IF_ERROR(expect_tensor(op, name, panels, w.dtype(), {shape[0], shape[1], shape[2], shape[3]}));
  return expect_that(op, panels.size(0) == 0 || panels[0].dense(), "panels must be dense");
}

absl::Status validate(const PackPanels& args) {
  const Operands op("pack_panels");
  RETURN_IF_ERROR(args.w.rank() == 3 ? expect_weight(op, "w", args.w, {-1, -1, -1})
                                     : expect_weight(op, "w", args.w, {-1, -1}));
  return expect_panels(op, "panels", args.panels, args.w);
}

void reference(const PackPanels& args) {
  CHECK_OK(validate(args));
  if (args.w.rank() == 3) {
    for (int64_t e = 0; e < args.w.size(0); ++e) reference(PackPanels{args.w[e], args.panels[e]});
    return;
  }
  const size_t size = static_cast<size_t>(size_of(args.w.dtype()));
  const char* from = static_cast<const char*>(args.w.raw());
  char* to = static_cast<char*>(args.panels.raw());
  for (int64_t p = 0; p < args.panels.size(0); ++p) {
    for (int64_t k = 0; k < args.w.size(1); ++k) {
      for (int64_t j = 0; j < kPanelColumns; ++j, to += size) {
        const int64_t n = p * kPanelColumns + j;
        if (n < args.w.size(0)) {
          std::memcpy(to, from + static_cast<size_t>(n * args.w.stride(0) + k) * size, size);
        } else {
          std::memset(to, 0, size);
        }
      }
    }
  }
}

}  // namespace slipstream::kernels
