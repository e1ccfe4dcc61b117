// Goal: on CUDA sums are those of reference(), for empty, odd, strided and real shapes.
#include "kernels/add/add.h"

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class AddCudaTest : public testing::CudaTest,
                    public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t>> {};

TEST_P(AddCudaTest, EqualsReference) {
  const auto [dtype, tokens, hidden] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor a = random_as(host, dtype, {tokens, hidden + 1}), b = random_as(host, dtype, {tokens, hidden});
  const Add args{.a = device.copy(a, dtype).slice(1, 1, hidden + 1), .b = device.copy(b, dtype),
                 .y = device.output(dtype, {tokens, hidden})};
  const Add expected{.a = a.slice(1, 1, hidden + 1), .b = b, .y = host.output(kF32, {tokens, hidden})};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.y, expected.y);

  const Tensor before = host.random(kF32, {hidden});
  const ColumnSum sum{.x = args.a, .y = device.copy(before)}, again{.x = args.a, .y = device.copy(before)};
  const ColumnSum expected_sum{.x = expected.a, .y = host.copy(before)};
  launch(sum, cuda_stream());
  launch(again, cuda_stream());
  reference(expected_sum);
  expect_close(sum.y, expected_sum.y);
  testing::expect_same_bits_on_device(sum.y, again.y);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, AddCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(0, 1, 3, 600),
                                            ::testing::Values(1, 7, 64, 6144)));

}  // namespace
}  // namespace slipstream::kernels
