// ScaledGemm: the product of e4m3 factors whose values are code * scale (kernels/quantize/quantize.h):
// activations with a scale for each row and 128 columns, a weight with one for each 128 x 128 block. Dense,
// or rows sorted by expert.
//
// c[m, n] is one chain over ascending blocks of 128 k, started at 0: acc = fma(block, a_scale * b_scale,
// acc), where `block` is the block's sum of a[m, k] b[n, k] (on the CPU a chain of fused multiply-adds from
// 0; on CUDA the tensor cores' own, of some 14 bits: the reason why blocks are added up outside of them). A
// row's bits depend neither on M nor on the other rows.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct ScaledGemm {
  Tensor a;               // in   [M, K] f8_e4m3
  Tensor a_scales;        // in   [M, K / 128 rounded up] f32
  Tensor b;               // in   [N, K] f8_e4m3 (a weight [out x in]); or [E, N, K]
  Tensor b_scales;        // in   [N / 128, K / 128], each rounded up, f32; with the leading E of b
  Tensor row_begin = {};  // in   [E+1] i32, where b has E: rows row_begin[e] .. row_begin[e+1] of a and c
                          //      belong to expert e; ascending from 0 to M
  Tensor c;               // out  [M, N] f32; on CUDA bf16. Does not overlap a or b
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device; on CUDA K and the
// strides of a and b must be multiples of 16.
absl::Status validate(const ScaledGemm& args);

// The definition: plain loops over CPU tensors.
void reference(const ScaledGemm& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const ScaledGemm& args, Stream& stream);

}  // namespace slipstream::kernels
