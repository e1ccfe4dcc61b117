// Random initial weights that depend on nothing but a seed, a name and a position.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::model {

struct NormalInit {
  uint64_t seed = 0;
  std::string_view name;  // the tensor's name: tensors of one seed are independent of each other
  float std = 0.02f;      // >= 0
};

// Fills dst, f32 or bf16 on the CPU, with draws from normal(0, std). Element i, in row-major order of dst
// whatever its strides, is a function of (seed, name, i) alone, the same to the bit for every number of
// threads and on every machine; in bf16 it is the f32 value, rounded to nearest even. Box and Muller 1958,
// doi:10.1214/aoms/1177706645, over a hash of the position; |value| <= 7.5 std.
void init_normal(const NormalInit& init, const kernels::Tensor& dst, kernels::Stream& stream);

}  // namespace slipstream::model
