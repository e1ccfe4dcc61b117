// Goal: on CUDA launch() is reference() within tolerance, for empty, odd, strided and real shapes in f32 and bf16; a row
// ignores its neighbours, bit for bit; a residual's sum on the way has the bits of Add and changes none of the norm's.
#include "kernels/rmsnorm/rmsnorm.h"

#include <utility>

#include "kernels/add/add.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::TensorPool;

class RmsNormCudaTest : public testing::CudaTest,
                        public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t, bool>> {};

TEST_P(RmsNormCudaTest, EqualsReference) {
  const auto [dtype, tokens, hidden, weighted] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor wide = testing::random_as(host, dtype, {tokens, hidden + 3});
  const Tensor w = weighted ? host.random(DType::kF32, {hidden}) : Tensor();
  const RmsNorm args{.x = device.copy(wide, dtype).slice(1, 1, hidden + 1), .w = device.copy(w),
                     .y = device.output(dtype, {tokens, hidden}), .inv_rms = device.output(DType::kF32, {tokens}),
                     .eps = 1e-5f};
  const RmsNorm expected{.x = wide.slice(1, 1, hidden + 1), .w = w, .y = host.output(DType::kF32, {tokens, hidden}),
                         .inv_rms = host.output(DType::kF32, {tokens}), .eps = 1e-5f};
  launch(args, cuda_stream());
  reference(expected);
  testing::expect_close(args.y, expected.y);
  testing::expect_close(args.inv_rms, expected.inv_rms);

  const Tensor dy = testing::random_as(host, dtype, {tokens, hidden});
  const RmsNormBackward backward{.x = args.x, .w = args.w, .inv_rms = device.copy(expected.inv_rms),
                                 .dy = device.copy(dy, dtype), .dx = device.output(dtype, {tokens, hidden}),
                                 .dw = weighted ? device.zeros(DType::kF32, {hidden}) : Tensor()};
  const RmsNormBackward expected_backward{.x = expected.x, .w = w, .inv_rms = expected.inv_rms, .dy = dy,
                                          .dx = host.output(DType::kF32, {tokens, hidden}),
                                          .dw = weighted ? host.zeros(DType::kF32, {hidden}) : Tensor()};
  launch(backward, cuda_stream());
  reference(expected_backward);
  testing::expect_close(backward.dx, expected_backward.dx);
  if (weighted) testing::expect_close(backward.dw, expected_backward.dw);
  device.expect_fences_intact();
}

TEST_P(RmsNormCudaTest, SumOnTheWay) {
  const auto [dtype, tokens, hidden, weighted] = GetParam();
  TensorPool host(5);
  CudaPool device;
  const Tensor a = device.copy(testing::random_as(host, dtype, {tokens, hidden + 3}), dtype).slice(1, 1, hidden + 1);
  const Tensor aligned = device.copy(testing::random_as(host, dtype, {tokens, hidden}), dtype);
  const Tensor w = device.copy(weighted ? host.random(DType::kF32, {hidden}) : Tensor());
  const auto output = [&, dtype = dtype, tokens = tokens, hidden = hidden] { return device.output(dtype, {tokens, hidden}); };
  for (const Tensor& x : {a, aligned}) {
    const Tensor b = device.copy(testing::random_as(host, dtype, {tokens, hidden}), dtype);
    const Tensor sum = output(), y = output(), inv_rms = device.output(DType::kF32, {tokens});
    launch(Add{.a = x, .b = b, .y = sum}, cuda_stream());
    launch(RmsNorm{.x = sum, .w = w, .y = y, .inv_rms = inv_rms, .eps = 1e-5f}, cuda_stream());
    for (const bool in_place : {false, true}) {
      const RmsNorm both{.x = x, .w = w, .y = output(), .inv_rms = device.output(DType::kF32, {tokens}), .eps = 1e-5f,
                         .b = b, .sum = in_place ? b : output()};
      launch(both, cuda_stream());
      testing::expect_same_bits_on_device(both.sum, sum);
      testing::expect_same_bits_on_device(both.y, y);
      testing::expect_same_bits_on_device(both.inv_rms, inv_rms);
    }
  }
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormCudaTest,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kBf16), ::testing::Values(0, 1, 3, 65),
                                            ::testing::Values(8, 16, 127, 1030, 4096, 6144, 8200), ::testing::Bool()));

TEST_F(RmsNormCudaTest, RowIgnoresItsNeighbours) {
  TensorPool host(2);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    CudaPool device;
    const Tensor x = device.copy(testing::random_as(host, dtype, {37, 200}), dtype);
    const Tensor w = device.copy(host.random(DType::kF32, {200}));
    const Tensor together = device.output(dtype, {37, 200});
    launch(RmsNorm{.x = x, .w = w, .y = together, .inv_rms = {}, .eps = 1e-6f}, cuda_stream());
    for (int64_t t = 0; t < 37; ++t) {
      const Tensor alone = device.output(dtype, {1, 200});
      launch(RmsNorm{.x = x.slice(0, t, t + 1), .w = w, .y = alone, .inv_rms = {}, .eps = 1e-6f}, cuda_stream());
      testing::expect_same_bits_on_device(alone, together.slice(0, t, t + 1));
    }
  }
}

// Wide aligned rows take w's gradient along: dx has the bits of the form without, also over dy itself.
TEST_F(RmsNormCudaTest, GradientOfTheWeightChangesNoBitOfDx) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const auto& [tokens, hidden] : {std::pair<int64_t, int64_t>{1, 1024}, {700, 1000}, {300, 4096}, {530, 6144}, {5, 7000}}) {
      TensorPool host(3);
      CudaPool device;
      const Tensor x = testing::random_as(host, dtype, {tokens, hidden}), dy = testing::random_as(host, dtype, {tokens, hidden});
      const Tensor w = host.random(DType::kF32, {hidden}), inv_rms = host.random(DType::kF32, {tokens}, 0.5f, 2.0f);
      const Tensor dw = host.random(DType::kF32, {hidden});
      const RmsNormBackward without{.x = device.copy(x, dtype), .w = device.copy(w), .inv_rms = device.copy(inv_rms),
                                    .dy = device.copy(dy, dtype), .dx = device.output(dtype, {tokens, hidden}), .dw = {}};
      RmsNormBackward with = without;
      with.dx = with.dy = device.copy(dy, dtype);
      with.dw = device.copy(dw);
      launch(without, cuda_stream());
      launch(with, cuda_stream());
      testing::expect_same_bits_on_device(with.dx, without.dx);
      reference(RmsNormBackward{.x = x, .w = w, .inv_rms = inv_rms, .dy = dy, .dx = host.output(DType::kF32, {tokens, hidden}),
                                .dw = dw});
      testing::expect_close(with.dw, dw, 4.0f);
      device.expect_fences_intact();
    }
  }
}

}  // namespace
}  // namespace slipstream::kernels
