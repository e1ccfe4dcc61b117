// Goal: on CUDA launch() is reference() within tolerance, forward and backward; a row ignores its neighbours, bit for bit.
#include "kernels/layernorm/layernorm.h"

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class LayerNormCudaTest : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t>> {};

TEST_P(LayerNormCudaTest, EqualsReference) {
  const auto [dtype, tokens, width] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor x = random_as(host, dtype, {tokens, width}), w = host.random(kF32, {width}), b = host.random(kF32, {width});
  const LayerNorm args{.x = device.copy(x, dtype), .w = device.copy(w), .b = device.copy(b),
                       .y = device.output(dtype, {tokens, width}), .mean = device.output(kF32, {tokens}),
                       .inv_std = device.output(kF32, {tokens}), .eps = 1e-6f};
  const LayerNorm expected{.x = x, .w = w, .b = b, .y = host.output(kF32, {tokens, width}),
                           .mean = host.output(kF32, {tokens}), .inv_std = host.output(kF32, {tokens}), .eps = 1e-6f};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.y, expected.y);
  expect_close(args.mean, expected.mean);
  expect_close(args.inv_std, expected.inv_std);
  for (int64_t t = 0; t < std::min<int64_t>(tokens, 3); ++t) {
    LayerNorm alone = args;
    alone.x = args.x.slice(0, t, t + 1);
    alone.y = device.output(dtype, {1, width});
    alone.mean = alone.inv_std = Tensor();
    launch(alone, cuda_stream());
    testing::expect_same_bits_on_device(alone.y, args.y.slice(0, t, t + 1));
  }

  const Tensor dy = random_as(host, dtype, {tokens, width});
  const LayerNormBackward backward{.x = args.x, .w = args.w, .mean = device.copy(expected.mean),
                                   .inv_std = device.copy(expected.inv_std), .dy = device.copy(dy, dtype),
                                   .dx = device.output(dtype, {tokens, width}), .dw = device.zeros(kF32, {width}),
                                   .db = device.zeros(kF32, {width})};
  const LayerNormBackward expected_backward{.x = x, .w = w, .mean = expected.mean, .inv_std = expected.inv_std, .dy = dy,
                                            .dx = host.output(kF32, {tokens, width}), .dw = host.zeros(kF32, {width}),
                                            .db = host.zeros(kF32, {width})};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dx, expected_backward.dx);
  expect_close(backward.dw, expected_backward.dw);
  expect_close(backward.db, expected_backward.db);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, LayerNormCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(0, 1, 300),
                                            ::testing::Values(5, 14, 128, 1030)));

}  // namespace
}  // namespace slipstream::kernels
