// What operator tests share: fenced tensors, random inputs, comparisons, finite differences.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels::testing {

// Owns tensors for one test, on cache lines as in a model. Every tensor stands between fences of a known byte
// pattern; outputs start as NaN (integers as INT32_MIN), so gaps and stray writes fail the comparison or
// expect_fences_intact().
class TensorPool {
 public:
  explicit TensorPool(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  // Uniform in [low, high), rounded to the dtype.
  Tensor random(DType dtype, std::initializer_list<int64_t> shape, float low = -1.0f, float high = 1.0f);
  Tensor random_ints(std::initializer_list<int64_t> shape, int32_t low, int32_t high);  // in [low, high)
  Tensor ints(std::initializer_list<int64_t> shape, const std::vector<int32_t>& values);
  Tensor output(DType dtype, std::initializer_list<int64_t> shape);                     // NaN / INT32_MIN
  Tensor zeros(DType dtype, std::initializer_list<int64_t> shape);
  Tensor copy(const Tensor& other);  // dense copy of the values
  void expect_fences_intact() const;

  float uniform();  // [0, 1)

 private:
  Tensor allocate(DType dtype, std::initializer_list<int64_t> shape);
  uint64_t state_;
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    std::byte* start;  // of the first fence
    size_t size;       // payload
    std::string what;
  };
  std::vector<Block> blocks_;
};

// While it lives, operators run the form compiled for this Highway target (HWY_AVX2, or one of
// hwy::SupportedAndGeneratedTargets(); 0: the best one).
class ScopedTarget {
 public:
  explicit ScopedTarget(int64_t target);
  ~ScopedTarget();
  ScopedTarget(const ScopedTarget&) = delete;
  ScopedTarget& operator=(const ScopedTarget&) = delete;
};

// A CPU stream of two threads, made once a process; and one of a single thread.
Stream& test_stream();
Stream& single_thread_stream();

// The tolerances of operator tests, in one place: |a - b| <= tolerance * (1 + max |b|), of finite values; an
// infinity must be the same infinity.
float tolerance(DType weights);  // 2e-6 for f32, 2e-6 for bf16 (same rounded inputs, fp32 arithmetic)

void expect_near(const Tensor& actual, const Tensor& expected, float tolerance);
void expect_same_bits(const Tensor& actual, const Tensor& expected);  // NaN != NaN is a failure as well
// || actual - expected || / || expected ||, over all elements of f32 tensors.
double relative_error(const Tensor& actual, const Tensor& expected);

// Central differences of loss() with respect to each element of x (f32, changed and restored in place), compared
// with grad: relative error of the whole tensor <= tolerance. `loss` must be computed in double where it sums.
void expect_gradient(const std::function<double()>& loss, const Tensor& x, const Tensor& grad, double tolerance = 2e-3,
                     float step = 1e-2f);

// sum of y * coefficient, in double: the usual scalar loss whose gradient with respect to y is `coefficient`.
double dot(const Tensor& y, const Tensor& coefficient);

}  // namespace slipstream::kernels::testing
