// AdamW on one parameter, and the sum of squares that a gradient's norm is made of. Loshchilov & Hutter 2019,
// arXiv:1711.05101. Every form gives the same bits: an optimiser may move between host and device.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// With g = gradient scale:  first = beta1 first + (1 - beta1) g,  second = beta2 second + (1 - beta2) g g,
// master = master decay - rate first / (sqrt(second correct2) + eps), each operation rounded by itself, in this order.
struct AdamWStep {
  Tensor gradient;   // in      [n] f32; here and below any shape, dense
  Tensor first;      // in/out  [n] f32
  Tensor second;     // in/out  [n] f32
  Tensor master;     // in/out  [n] f32
  Tensor rounded;    // out     [n] f32 or bf16: the master, to nearest even; may be absent
  Tensor nonfinite;  // out     [1] i32: 1 if a master is not finite now, else left alone
  float beta1, beta2;
  float rate;      // learning rate, with the first moment's bias correction
  float correct2;  // the second's
  float eps;
  float decay;  // 1 - learning rate x weight decay
  float scale;  // of the gradient, for clipping
};

// sum = sum x^2 in fp64. Pieces of 2^14 values: lane l of 256 adds values l, l + 256, ...; then l and l + 128, l and l + 64,
// ... are added. The pieces' sums are added by the same rule.
struct SumSquares {
  Tensor x;    // in   f32, any shape, dense
  Tensor sum;  // out  [2] i32: the bits of a double
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const AdamWStep& args);
absl::Status validate(const SumSquares& args);

// The definition: plain loops over CPU tensors.
void reference(const AdamWStep& args);
void reference(const SumSquares& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const AdamWStep& args, Stream& stream);
void launch(const SumSquares& args, Stream& stream);

constexpr int kSquareLanes = 256;
constexpr int64_t kSquarePiece = 1 << 14;

}  // namespace slipstream::kernels
