// RMSNorm of a row that a block holds: for RmsNorm, and for what makes the row and norms it in one pass.
#pragma once

#include "kernels/cuda/row_values.cuh"

namespace slipstream::kernels {

// With few rows a kernel's time is that of waiting for memory: once, not once more for the norm's weight, if it is asked for early.
constexpr unsigned kRowsThatWait = 128;
template <int kRuns>
__device__ __forceinline__ void prefetch_norm(const float* w, const RowShare& share) {
  if (gridDim.x > kRowsThatWait || w == nullptr) return;
  for_runs<kRuns>(share, [&](int, int column) { prefetch_line(w + column); });
}

// y = w x / sqrt(mean(x^2) + eps); returns the factor of w x. sum(v): over the threads of `share`.
template <class X, int kRuns, class Sum>
__device__ __forceinline__ float norm_row(const HeldRow<X, kRuns>& x, const float* w, X* y, float eps, const RowShare& share, Sum&& sum) {
  float squares = 0.0f;
  for_runs<kRuns>(share, [&](int r, int column) { squares = add_squares(x.at(r, column, share), squares); });
  const float inv = 1.0f / sqrtf(sum(squares) / static_cast<float>(share.width) + eps);
  for_runs<kRuns>(share, [&](int r, int column) {
    const int count = share.width - column;
    const float4 v = x.at(r, column, share);
    const float4 g = w == nullptr ? float4{1.0f, 1.0f, 1.0f, 1.0f} : load_run(w + column, count, share.whole);
    store_run(y + column, {g.x * (v.x * inv), g.y * (v.y * inv), g.z * (v.z * inv), g.w * (v.w * inv)}, count, share.whole);
  });
  return inv;
}

}  // namespace slipstream::kernels
