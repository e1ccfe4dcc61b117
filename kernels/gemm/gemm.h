// Gemm: the dense matrix product of every projection, its input gradient and its weight gradient.
//
// Each element of c is one chain of fused multiply-adds over ascending k, started at 0 (or at c when accumulating):
// for k in 0..K-1: acc = fma(a[m, k], b[k, n], acc). The bias is added last. The order does not depend on M, on the
// other rows, on the number of threads or on the CPU, so reference() and launch() agree bit for bit.
#pragma once

#include <span>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct Gemm {
  Tensor a;     // in   [M, K] f32, or [K, M] when transpose_a
  Tensor b;     // in   [K, N] f32 or bf16, or [N, K] when transpose_b (a weight [out x in])
  Tensor c;     // out  [M, N] f32; in/out when accumulate. Does not overlap a or b
  Tensor bias;  // in   [N] f32, added to every row; may be absent
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  Tensor b_panels = {};  // in   b as PackPanels lays it out, read in its place; only with transpose_b; may be absent
};
// a, b and c may all have one more leading dimension: as many independent products (bias then absent).
// Outer dimensions may be strided.

// Products of which none needs another's result: launched together where that saves time, with the same bits.
struct Gemms {
  std::span<const Gemm> products;
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const Gemm& args);

// The definition: plain loops over CPU tensors.
void reference(const Gemm& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Gemm& args, Stream& stream);
void launch(const Gemms& args, Stream& stream);

}  // namespace slipstream::kernels
