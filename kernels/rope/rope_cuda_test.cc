// Goal: on CUDA the angles have the bits of reference(), at position 10^6 too, and pairs are turned within tolerance.
#include "kernels/rope/rope.h"

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class RopeCudaTest : public testing::CudaTest,
                     public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t, RopeLayout, bool>> {};

TEST_P(RopeCudaTest, EqualsReference) {
  const auto [dtype, tokens, dims, layout, inverse] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor positions = host.random_ints({tokens}, 0, 1'000'000);
  const RopeTable table{.positions = device.copy(positions), .cos = device.output(kF32, {tokens, dims / 2}),
                        .sin = device.output(kF32, {tokens, dims / 2}), .theta = 8e6};
  const RopeTable expected_table{.positions = positions, .cos = host.output(kF32, {tokens, dims / 2}),
                                 .sin = host.output(kF32, {tokens, dims / 2}), .theta = 8e6};
  launch(table, cuda_stream());
  reference(expected_table);
  expect_close(table.cos, expected_table.cos, 0.1f);
  expect_close(table.sin, expected_table.sin, 0.1f);

  const Tensor x = random_as(host, dtype, {tokens, 3, dims + 2});
  const Tensor rotated = device.copy(x, dtype);
  launch(Rope{.x = rotated.slice(2, 2, dims + 2), .cos = table.cos, .sin = table.sin, .layout = layout, .inverse = inverse},
         cuda_stream());
  reference(Rope{.x = x.slice(2, 2, dims + 2), .cos = expected_table.cos, .sin = expected_table.sin, .layout = layout,
                 .inverse = inverse});
  expect_close(rotated, x);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RopeCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(0, 1, 37),
                                            ::testing::Values(2, 6, 12, 64),
                                            ::testing::Values(RopeLayout::kInterleaved, RopeLayout::kHalfSplit),
                                            ::testing::Bool()));

}  // namespace
}  // namespace slipstream::kernels
