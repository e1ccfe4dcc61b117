// Quantize: values as e4m3 codes with one f32 scale for each block of 128 columns and one or more rows: x =
// code * scale, nearly. The largest magnitude of a block has the code 448: scale = largest / 448, code =
// e4m3(x * (448 / largest)). (DeepSeek-V3 2024, arXiv:2412.19437, section 3.3. Scales that are powers of two,
// UE8M0, would lose up to one more bit of the codes' range and buy nothing where the products multiply by f32
// scales.)
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

constexpr int64_t kScaleColumns = 128;

struct Quantize {
  Tensor x;                // in   [T, K] or [E, T, K] f32 or bf16
  Tensor codes;            // out  the shape of x, f8_e4m3
  Tensor scales;           // out  [T / block_rows, K / 128], each rounded up, f32; with the leading E of x
  int64_t block_rows = 1;  // 1: activations; 128: weights
};
// A block's largest magnitude counts as 2^-100 where it is less (it may be 0). NaN becomes the code NaN.

// InvalidArgument: shapes or dtypes disagree, or block_rows is neither 1 nor 128. Unimplemented: no code for
// this device.
absl::Status validate(const Quantize& args);

// The definition: plain loops over CPU tensors.
void reference(const Quantize& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Quantize& args, Stream& stream);

}  // namespace slipstream::kernels
