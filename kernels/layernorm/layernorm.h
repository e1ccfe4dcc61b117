// LayerNorm with weight and bias (the indexer's k_norm): y = w (x - mean) / sqrt(var + eps) + b, in fp32, with the
// biased variance. Ba et al. 2016, arXiv:1607.06450.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct LayerNorm {
  Tensor x;        // in   [T, H] f32
  Tensor w;        // in   [H] f32
  Tensor b;        // in   [H] f32
  Tensor y;        // out  [T, H] f32; may be x itself
  Tensor mean;     // out  [T] f32, for the backward; may be absent
  Tensor inv_std;  // out  [T] f32, for the backward; absent when mean is
  float eps;       // added to the variance; > 0
};

struct LayerNormBackward {
  Tensor x;        // in   [T, H] f32
  Tensor w;        // in   [H] f32
  Tensor mean;     // in   [T] f32
  Tensor inv_std;  // in   [T] f32
  Tensor dy;       // in   [T, H] f32
  Tensor dx;       // out  [T, H] f32; may be dy itself
  Tensor dw;       // in/out [H] f32, added to
  Tensor db;       // in/out [H] f32, added to
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const LayerNorm& args);
absl::Status validate(const LayerNormBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const LayerNorm& args);
void reference(const LayerNormBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const LayerNorm& args, Stream& stream);
void launch(const LayerNormBackward& args, Stream& stream);

}  // namespace slipstream::kernels
