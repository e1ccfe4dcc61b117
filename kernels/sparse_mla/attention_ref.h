// What the references of GQA and sparse MLA share: reading heads and stored rows, and the softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/sequences.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// Values [begin, begin + width) of row p of sequence b, as fp32.
inline std::vector<float> stored_row(const PagedRows& rows, int64_t b, int64_t p, int64_t begin, int64_t width) {
  const int64_t offset = rows.offset(b, p) + begin;
  std::vector<float> row;
  for (int64_t i = 0; i < width; ++i) {
    row.push_back(rows.pool.dtype() == DType::kBf16 ? to_f32(rows.pool.bf()[offset + i])
                                                    : rows.pool.f32()[offset + i]);
  }
  return row;
}

inline double dot_product(const float* a, const float* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

// Turns scores into probabilities and returns their log-sum-exp: -infinity of none.
inline double softmax(std::vector<double>& p) {
  if (p.empty()) return -std::numeric_limits<double>::infinity();
  const double top = *std::max_element(p.begin(), p.end());
  double sum = 0.0;
  for (double& x : p) sum += x = std::exp(x - top);
  for (double& x : p) x /= sum;
  return top + std::log(sum);
}

}  // namespace slipstream::kernels
