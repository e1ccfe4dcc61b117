// Goal: on CUDA launch() is reference() within tolerance, with and without the clamp, in place too.
#include "kernels/swiglu/swiglu.h"

#include <limits>

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class SwiGluCudaTest : public testing::CudaTest,
                       public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t, float>> {};

TEST_P(SwiGluCudaTest, EqualsReference) {
  const auto [dtype, tokens, width, limit] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor gate = random_as(host, dtype, {tokens, width}, -3.0f, 3.0f);
  const Tensor up = random_as(host, dtype, {tokens, width}, -3.0f, 3.0f), dy = random_as(host, dtype, {tokens, width});
  const SwiGlu args{.gate = device.copy(gate, dtype), .up = device.copy(up, dtype),
                    .y = device.output(dtype, {tokens, width}), .limit = limit};
  const SwiGlu expected{.gate = gate, .up = up, .y = host.output(kF32, {tokens, width}), .limit = limit};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.y, expected.y);

  SwiGluBackward backward{.gate = args.gate, .up = args.up, .dy = device.copy(dy, dtype), .dgate = {},
                          .dup = device.output(dtype, {tokens, width}), .limit = limit};
  backward.dgate = backward.dy;
  const SwiGluBackward expected_backward{.gate = gate, .up = up, .dy = dy, .dgate = host.output(kF32, {tokens, width}),
                                         .dup = host.output(kF32, {tokens, width}), .limit = limit};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dgate, expected_backward.dgate);
  expect_close(backward.dup, expected_backward.dup);

  launch(SwiGlu{.gate = args.gate, .up = args.up, .y = args.up, .limit = limit}, cuda_stream());
  testing::expect_same_bits_on_device(args.up, args.y);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, SwiGluCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(0, 1, 65),
                                            ::testing::Values(1, 30, 2048, 4101),
                                            ::testing::Values(1.5f, std::numeric_limits<float>::infinity())));

}  // namespace
}  // namespace slipstream::kernels
