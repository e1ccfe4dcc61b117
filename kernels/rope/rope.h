// RoPE: rotates pairs of dimensions by an angle that grows with the position. Su et al. 2021, arXiv:2104.09864.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// cos and sin of position * theta^(-2i/R) for i in 0..R/2-1, computed as the published models do: inverse frequencies
// and angles in fp32. Made once a batch, shared by all layers.
struct RopeTable {
  Tensor positions;  // in   [T] i32
  Tensor cos;        // out  [T, R/2] f32
  Tensor sin;        // out  [T, R/2] f32
  double theta;      // > 0
};

enum class RopeLayout { kInterleaved, kHalfSplit };  // pairs (2i, 2i+1), or (i, i + R/2)

// Rotates dimensions 0..R-1 of every head in place (pass a slice to rotate others). inverse: by minus the angle, which
// is the backward.
struct Rope {
  Tensor x;    // in/out [T, heads, R] f32, outer dimensions strided
  Tensor cos;  // in   [T, R/2] f32
  Tensor sin;  // in   [T, R/2] f32
  RopeLayout layout;
  bool inverse = false;
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const RopeTable& args);
absl::Status validate(const Rope& args);

// The definition: plain loops over CPU tensors.
void reference(const RopeTable& args);
void reference(const Rope& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const RopeTable& args, Stream& stream);
void launch(const Rope& args, Stream& stream);

}  // namespace slipstream::kernels
