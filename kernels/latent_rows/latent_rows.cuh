// Rows of fp8 latents as kernels read them.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/e4m3.cuh"
#include "kernels/latent_rows/latent_row.h"

namespace slipstream::kernels {

// The parts of a row.
__device__ __forceinline__ float latent_scale(const LatentRow& layout, const e4m3* row, int column) {
  return reinterpret_cast<const float*>(row + layout.scales)[column / static_cast<int>(kScaleColumns)];
}
__device__ __forceinline__ const bf16* latent_ropes(const LatentRow& layout, const e4m3* row) {
  return reinterpret_cast<const bf16*>(row + layout.ropes);
}

// A value of the row, as activations of dtype X meet it.
template <class X>
__device__ __forceinline__ float latent_value(const LatentRow& layout, const e4m3* row, int column) {
  if (column >= layout.rank) return load(latent_ropes(layout, row) + column - layout.rank);
  return rounded<X>(e4m3_values(row[column].bits).x * latent_scale(layout, row, column));
}

// Values column .. column + 7 as bf16; those beyond the row are 0. column is a multiple of 8.
__device__ __forceinline__ uint4 latent_eight(const LatentRow& layout, const e4m3* row, int column) {
  if (column + 8 <= layout.rank) {
    return scaled_to_bf16(*reinterpret_cast<const uint2*>(row + column), latent_scale(layout, row, column));
  }
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool exists = column + i < layout.rank + layout.rope;
    const float value = exists ? latent_value<bf16>(layout, row, column + i) : 0.0f;
    words[i / 2] |= __float_as_uint(value) >> 16 << i % 2 * 16;  // it is a bf16
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace slipstream::kernels
