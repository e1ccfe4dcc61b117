// PackPanels: a weight once more, in the order in which Gemm and GroupedGemm read it. For few rows of a product
// most of the time is reading the weight; panels are read straight on, a row-major weight has to be transposed.
#pragma once

#include <vector>

#include "kernels/stream.h"
#include "kernels/tensor.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

constexpr int64_t kPanelColumns = 16;

struct PackPanels {
  Tensor w;       // in   [N, K] or [E, N, K], f32 or bf16
  Tensor panels;  // out  [P, K, 16] or [E, P, K, 16], dense but for the first dimension; P = N / 16 rounded up.
                  //      panels[p, k, j] = w[16 p + j, k], zero beyond N. The dtype of w.
};

// The shape of the panels of w.
std::vector<int64_t> panels_shape(const Tensor& w);

// InvalidArgument unless `panels` could be those of a weight w: what an operator asks of a Tensor it reads for w.
absl::Status expect_panels(const Operands& op, const char* name, const Tensor& panels, const Tensor& w);

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const PackPanels& args);

// The definition: plain loops over CPU tensors.
void reference(const PackPanels& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const PackPanels& args, Stream& stream);

}  // namespace slipstream::kernels
