// ShortConv: a causal depthwise convolution of width K over each sequence, then SiLU: the mixing of neighbours in front of
// linear attention.  y[t, c] = silu(sum over j = 0..K-1, ascending, of w[c, j] x[t - (K-1) + j, c]), x before the start = 0.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct ShortConv {
  Tensor x;             // in   [T, C] f32
  Tensor w;             // in   [C, K] f32
  Sequences sequences;  // T rows
  Tensor tail;          // in/out [slots, K-1, C] f32: the last K-1 inputs of a sequence, oldest first. Read where cached > 0
                        //      (what stands before the start counts as 0), always written. May be absent: every cached is
                        //      then 0 and nothing is kept
  Tensor slots;         // in   [B] i32, the slot of each sequence in `tail`, each used once; absent when tail is
  Tensor y;             // out  [T, C] f32; not x
};

// For whole sequences (every cached == 0).
struct ShortConvBackward {
  Tensor x;             // in   [T, C] f32
  Tensor w;             // in   [C, K] f32
  Sequences sequences;
  Tensor dy;            // in   [T, C] f32
  Tensor dx;            // out  [T, C] f32; neither x nor dy
  Tensor dw;            // in/out [C, K] f32, added to
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const ShortConv& args);
absl::Status validate(const ShortConvBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const ShortConv& args);
void reference(const ShortConvBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const ShortConv& args, Stream& stream);
void launch(const ShortConvBackward& args, Stream& stream);

}  // namespace slipstream::kernels
