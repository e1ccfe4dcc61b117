// PagedWrite: stores the new rows of a batch at their positions in a paged store (kernels/sequences.h), rounding to the
// store's dtype.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct PagedWrite {
  Tensor rows;          // in   [T, W] f32
  Sequences sequences;  // T rows
  PagedRows store;      // in/out
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const PagedWrite& args);

// The definition: plain loops over CPU tensors.
void reference(const PagedWrite& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const PagedWrite& args, Stream& stream);

}  // namespace slipstream::kernels
