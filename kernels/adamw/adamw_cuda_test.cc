// Goal: on CUDA launch() is reference() bit for bit: masters, moments, rounded weights and sums of squares; a master that is
// no number is reported.
#include "kernels/adamw/adamw.h"

#include <limits>

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32;

class AdamWCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<int64_t> {};

TEST_P(AdamWCudaTest, EqualsReference) {
  const int64_t n = GetParam();
  for (const DType dtype : {kF32, DType::kBf16}) {
    TensorPool host(1);
    CudaPool device;
    const AdamWStep expected{.gradient = host.random(kF32, {n}), .first = host.random(kF32, {n}),
                             .second = host.random(kF32, {n}, 0.0f, 1e-3f), .master = host.random(kF32, {n}),
                             .rounded = host.output(dtype, {n}), .nonfinite = host.zeros(DType::kI32, {1}), .beta1 = 0.9f,
                             .beta2 = 0.95f, .rate = 1e-3f, .correct2 = 1.7f, .eps = 1e-8f, .decay = 0.999f, .scale = 0.3f};
    AdamWStep args = expected;
    args.gradient = device.copy(expected.gradient), args.first = device.copy(expected.first);
    args.second = device.copy(expected.second), args.master = device.copy(expected.master);
    args.rounded = device.output(dtype, {n}), args.nonfinite = device.zeros(DType::kI32, {1});
    for (int step = 0; step < 3; ++step) {
      launch(args, cuda_stream());
      reference(expected);
    }
    testing::expect_same_bits(testing::bits_on_host(host, args.first), expected.first);
    testing::expect_same_bits(testing::bits_on_host(host, args.second), expected.second);
    testing::expect_same_bits(testing::bits_on_host(host, args.master), expected.master);
    testing::expect_same_bits(testing::bits_on_host(host, args.rounded), expected.rounded);
    EXPECT_EQ(testing::bits_on_host(host, args.nonfinite).i32()[0], 0);

    const Tensor sum = device.output(DType::kI32, {2}), expected_sum = host.output(DType::kI32, {2});
    launch(SumSquares{.x = args.gradient, .sum = sum}, cuda_stream());
    reference(SumSquares{.x = expected.gradient, .sum = expected_sum});
    testing::expect_same_bits(testing::bits_on_host(host, sum), expected_sum);
    device.expect_fences_intact();
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, AdamWCudaTest, ::testing::Values(0, 1, 7, 255, 1024, 16385, 4 << 20, (4 << 20) + 3));

TEST_F(AdamWCudaTest, MastersThatAreNoNumbersAreReported) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    TensorPool host(2);
    CudaPool device;
    const Tensor master = host.random(kF32, {103});
    master.f32()[102] = bad;
    const AdamWStep args{.gradient = device.zeros(kF32, {103}), .first = device.zeros(kF32, {103}),
                         .second = device.zeros(kF32, {103}), .master = device.copy(master), .rounded = {},
                         .nonfinite = device.zeros(DType::kI32, {1}), .beta1 = 0.9f, .beta2 = 0.95f, .rate = 1e-3f,
                         .correct2 = 1.0f, .eps = 1e-8f, .decay = 1.0f, .scale = 1.0f};
    launch(args, cuda_stream());
    EXPECT_EQ(testing::bits_on_host(host, args.nonfinite).i32()[0], 1);
  }
}

}  // namespace
}  // namespace slipstream::kernels
