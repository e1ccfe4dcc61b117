// The two elementwise sums of a residual network and of its biases.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct Add {
  Tensor a;  // in   [T, H] f32
  Tensor b;  // in   [T, H] f32
  Tensor y;  // out  [T, H] f32; may be a or b
};

// y[h] += sum over t, ascending, of x[t, h]: the gradient of a bias.
struct ColumnSum {
  Tensor x;  // in   [T, H] f32
  Tensor y;  // in/out [H] f32
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const Add& args);
absl::Status validate(const ColumnSum& args);

// The definition: plain loops over CPU tensors.
void reference(const Add& args);
void reference(const ColumnSum& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Add& args, Stream& stream);
void launch(const ColumnSum& args, Stream& stream);

}  // namespace slipstream::kernels
