// Walks over the elements of a possibly strided tensor, in row-major order.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "kernels/tensor.h"

namespace slipstream::model {

inline std::vector<int64_t> shape_of(const kernels::Tensor& t) {
  std::vector<int64_t> shape;
  for (int dim = 0; dim < t.rank(); ++dim) shape.push_back(t.size(dim));
  return shape;
}

// Calls f(void* elements, int64_t count) for runs of contiguous elements that together are all of t, in
// row-major order: one run of a dense tensor, else one a row. No run is empty.
template <class F>
void for_each_run(const kernels::Tensor& t, F f) {
  const int64_t numel = t.numel();
  if (numel == 0) return;
  if (t.dense()) return f(t.raw(), numel);
  const int outer_rank = t.rank() - 1;
  const int64_t row_size = t.size(outer_rank);
  std::array<int64_t, kernels::Tensor::kMaxRank> index{};
  for (int64_t row = 0; row < numel / row_size; ++row) {
    int64_t offset = 0;
    for (int dim = 0; dim < outer_rank; ++dim) offset += index[static_cast<size_t>(dim)] * t.stride(dim);
    f(static_cast<char*>(t.raw()) + offset * size_of(t.dtype()), row_size);
    for (int dim = outer_rank - 1; dim >= 0; --dim) {
      if (++index[static_cast<size_t>(dim)] < t.size(dim)) break;
      index[static_cast<size_t>(dim)] = 0;
    }
  }
}

}  // namespace slipstream::model
