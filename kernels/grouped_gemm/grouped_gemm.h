// GroupedGemm: rows sorted by expert, each multiplied by its expert's weights. The order of sums is Gemm's
// (kernels/gemm/gemm.h): a row's result does not depend on how many rows its expert or its neighbours received.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct GroupedGemm {
  Tensor x;          // in   [R, K] f32
  Tensor w;          // in   [E, N, K] f32 or bf16: y = x wᵀ; or [E, K, N] when !transpose_w: y = x w (the input gradient)
  Tensor row_begin;  // in   [E+1] i32: rows row_begin[e] .. row_begin[e+1] belong to expert e; ascending from 0 to R
  Tensor y;          // out  [R, N] f32
  bool transpose_w = true;
  Tensor w_panels = {};  // in   w as PackPanels lays it out, read in its place; only with transpose_w; may be absent
};

struct GroupedWeightGrad {
  Tensor dy;         // in   [R, N] f32
  Tensor x;          // in   [R, K] f32
  Tensor row_begin;  // in   [E+1] i32
  Tensor dw;         // in/out [E, N, K] f32: dw[e] += dyᵀ x over the rows of e, in ascending order
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const GroupedGemm& args);
absl::Status validate(const GroupedWeightGrad& args);

// The definition: plain loops over CPU tensors.
void reference(const GroupedGemm& args);
void reference(const GroupedWeightGrad& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const GroupedGemm& args, Stream& stream);
void launch(const GroupedWeightGrad& args, Stream& stream);

}  // namespace slipstream::kernels
