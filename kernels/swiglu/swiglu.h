// SwiGLU: y = silu(min(gate, L)) * clamp(up, -L, L). Shazeer 2020, arXiv:2002.05202; the clamp is GLM-5.3-Flash's.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct SwiGlu {
  Tensor gate;  // in   [T, F] f32
  Tensor up;    // in   [T, F] f32
  Tensor y;     // out  [T, F] f32; may be gate or up
  float limit;  // L > 0; infinity: no clamp
};

// At the clamp's edge the gradient passes (gate <= L, -L <= up <= L), beyond it is zero.
struct SwiGluBackward {
  Tensor gate;   // in   [T, F] f32
  Tensor up;     // in   [T, F] f32
  Tensor dy;     // in   [T, F] f32
  Tensor dgate;  // out  [T, F] f32; may be dy or gate
  Tensor dup;    // out  [T, F] f32; may be dy or up, but not the same as dgate
  float limit;
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const SwiGlu& args);
absl::Status validate(const SwiGluBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const SwiGlu& args);
void reference(const SwiGluBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const SwiGlu& args, Stream& stream);
void launch(const SwiGluBackward& args, Stream& stream);

}  // namespace slipstream::kernels
