// RMSNorm: y = w * x / sqrt(mean(x^2) + eps), in fp32. Zhang & Sennrich 2019, arXiv:1910.07467. In the same pass it takes the sum
// of a residual and a sublayer's output, as Add (kernels/add) has it, bit for bit.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// Rows may be strided (a column range of a wider matrix, or the heads of a token).
struct RmsNorm {
  Tensor x;        // in   [T, H] f32
  Tensor w;        // in   [H] f32; absent: w = 1
  Tensor y;        // out  [T, H] f32; may be x itself
  Tensor inv_rms;  // out  [T] f32, 1 / sqrt(mean(x^2) + eps), for the backward; may be absent
  float eps;       // added to the mean square; > 0
  // Both or neither: x + b is stored, rounded to its dtype, and normed instead of x.
  Tensor b = {};    // in   [T, H] f32
  Tensor sum = {};  // out  [T, H] f32; may be x or b, not y
};

// With r = inv_rms and n = x r:  dx = r (w dy - n mean(w dy n)),  dw += sum_t dy n.
struct RmsNormBackward {
  Tensor x;        // in   [T, H] f32
  Tensor w;        // in   [H] f32; absent: w = 1
  Tensor inv_rms;  // in   [T] f32
  Tensor dy;       // in   [T, H] f32
  Tensor dx;       // out  [T, H] f32; may be dy itself
  Tensor dw;       // in/out [H] f32, added to; absent when w is, or when w is frozen
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const RmsNorm& args);
absl::Status validate(const RmsNormBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const RmsNorm& args);
void reference(const RmsNormBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const RmsNorm& args, Stream& stream);
void launch(const RmsNormBackward& args, Stream& stream);

}  // namespace slipstream::kernels
