// Goal: on CUDA every value of a strided view is moved, and none beside it is touched.
#include "kernels/copy/copy.h"

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class CopyCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<std::tuple<DType, int64_t>> {};

TEST_P(CopyCudaTest, MovesViews) {
  const auto [dtype, width] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor from = random_as(host, dtype, {5, 3, width + 2}), rest = random_as(host, dtype, {5, 3, width + 4});
  const Tensor source = device.copy(from, dtype), target = device.copy(rest, dtype);
  launch(Copy{.from = source.slice(2, 2, width + 2), .to = target.slice(2, 4, width + 4)}, cuda_stream());
  reference(Copy{.from = from.slice(2, 2, width + 2), .to = rest.slice(2, 4, width + 4)});
  testing::expect_same_bits(testing::on_host(host, target), rest);
  launch(Copy{.from = source.slice(0, 0, 0), .to = source.slice(0, 0, 0)}, cuda_stream());
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, CopyCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(1, 6, 64, 130)));

class CopyAcrossTypesTest : public testing::CudaTest {};

TEST_F(CopyAcrossTypesTest, RoundsAndWidens) {
  TensorPool host(2);
  CudaPool device;
  const Tensor from = host.random(kF32, {9, 1, 130}), rounded = host.output(kBf16, {9, 1, 130});
  const Tensor there = device.output(kBf16, {9, 1, 130}), wide = device.output(kF32, {9, 1, 130});
  launch(Copy{.from = device.copy(from), .to = there}, cuda_stream());
  launch(Copy{.from = there, .to = wide}, cuda_stream());
  reference(Copy{.from = from, .to = rounded});
  testing::expect_same_bits(testing::bits_on_host(host, there), rounded);
  testing::expect_same_bits(testing::on_host(host, wide), testing::on_host(host, there));
  device.expect_fences_intact();
}

}  // namespace
}  // namespace slipstream::kernels
