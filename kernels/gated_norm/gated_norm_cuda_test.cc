// Goal: on CUDA launch() is reference() within tolerance, forward and backward; a row ignores its neighbours, bit for bit.
#include "kernels/gated_norm/gated_norm.h"

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class GatedNormCudaTest : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t>> {};

TEST_P(GatedNormCudaTest, EqualsReference) {
  const auto [dtype, rows, d] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor x = random_as(host, dtype, {rows, d}), gate = random_as(host, dtype, {rows, d}, -4.0f, 4.0f);
  const Tensor w = host.random(kF32, {d});
  const GatedNorm args{.x = device.copy(x, dtype), .w = device.copy(w), .gate = device.copy(gate, dtype),
                       .y = device.output(dtype, {rows, d}), .inv_rms = device.output(kF32, {rows}), .eps = 1e-5f};
  const GatedNorm expected{.x = x, .w = w, .gate = gate, .y = host.output(kF32, {rows, d}),
                           .inv_rms = host.output(kF32, {rows}), .eps = 1e-5f};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.y, expected.y);
  expect_close(args.inv_rms, expected.inv_rms);
  for (int64_t r = 0; r < std::min<int64_t>(rows, 3); ++r) {
    const GatedNorm alone{.x = args.x.slice(0, r, r + 1), .w = args.w, .gate = args.gate.slice(0, r, r + 1),
                          .y = device.output(dtype, {1, d}), .inv_rms = {}, .eps = 1e-5f};
    launch(alone, cuda_stream());
    testing::expect_same_bits_on_device(alone.y, args.y.slice(0, r, r + 1));
  }

  const Tensor dy = random_as(host, dtype, {rows, d});
  GatedNormBackward backward{.x = args.x, .gate = args.gate, .w = args.w, .inv_rms = device.copy(expected.inv_rms),
                             .dy = device.copy(dy, dtype), .dx = {}, .dgate = device.output(dtype, {rows, d}),
                             .dw = device.zeros(kF32, {d})};
  backward.dx = backward.dy;
  const GatedNormBackward expected_backward{.x = x, .gate = gate, .w = w, .inv_rms = expected.inv_rms, .dy = dy,
                                            .dx = host.output(kF32, {rows, d}), .dgate = host.output(kF32, {rows, d}),
                                            .dw = host.zeros(kF32, {d})};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dx, expected_backward.dx);
  expect_close(backward.dgate, expected_backward.dgate);
  expect_close(backward.dw, expected_backward.dw);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, GatedNormCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(0, 1, 500, 9001),
                                            ::testing::Values(3, 16, 127, 128, 1030)));

}  // namespace
}  // namespace slipstream::kernels
