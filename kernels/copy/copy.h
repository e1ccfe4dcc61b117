// Copy: values from one view to another, rounded to nearest even where that one is bf16.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct Copy {
  Tensor from;  // in   [T, h, d] f32 (on CUDA also bf16), outer dimensions strided
  Tensor to;    // out  [T, h, d] f32 or bf16, outer dimensions strided; does not overlap from
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const Copy& args);

// The definition: plain loops over CPU tensors.
void reference(const Copy& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Copy& args, Stream& stream);

}  // namespace slipstream::kernels
