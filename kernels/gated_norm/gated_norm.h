// GatedNorm: y = (w x / sqrt(mean(x^2) + eps)) * sigmoid(gate), in fp32: KDA's output norm and gate, one row per token
// and head.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct GatedNorm {
  Tensor x;        // in   [R, d] f32
  Tensor w;        // in   [d] f32
  Tensor gate;     // in   [R, d] f32
  Tensor y;        // out  [R, d] f32; may be x
  Tensor inv_rms;  // out  [R] f32; may be absent
  float eps;
};

constexpr int64_t kGatedNormDimMax = 8192;

// dw is summed within ranges of rows that depend on R and d alone, then over the ranges in ascending order.
struct GatedNormBackward {
  Tensor x, gate;  // in   [R, d] f32; d <= kGatedNormDimMax
  Tensor w;        // in   [d] f32
  Tensor inv_rms;  // in   [R] f32
  Tensor dy;       // in   [R, d] f32
  Tensor dx;       // out  [R, d] f32; may be dy
  Tensor dgate;    // out  [R, d] f32; not dy
  Tensor dw;       // in/out [d] f32, added to
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const GatedNorm& args);
absl::Status validate(const GatedNormBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const GatedNorm& args);
void reference(const GatedNormBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const GatedNorm& args, Stream& stream);
void launch(const GatedNormBackward& args, Stream& stream);

}  // namespace slipstream::kernels
