// Goal: on CUDA launch() is reference() within tolerance, forward and backward; a sequence cut into calls gives the bits of
// the whole.
#include "kernels/short_conv/short_conv.h"

#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class ShortConvCudaTest : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t>> {};

class ShortConvCudaLong : public testing::CudaTest {};

TEST_P(ShortConvCudaTest, EqualsReference) {
  const auto [dtype, channels, taps] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Sequences sequences = testing::sequences_of(host, {1, 0, 7, 64, 2});
  const int64_t rows = sequences.rows();
  const Tensor x = random_as(host, dtype, {rows, channels}), w = host.random(kF32, {channels, taps});
  const ShortConv args{.x = device.copy(x, dtype), .w = device.copy(w), .sequences = device.copy(sequences), .tail = {},
                       .slots = {}, .y = device.output(dtype, {rows, channels})};
  const ShortConv expected{.x = x, .w = w, .sequences = sequences, .tail = {}, .slots = {},
                           .y = host.output(kF32, {rows, channels})};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.y, expected.y);

  const Tensor dy = random_as(host, dtype, {rows, channels});
  const ShortConvBackward backward{.x = args.x, .w = args.w, .sequences = args.sequences, .dy = device.copy(dy, dtype),
                                   .dx = device.output(dtype, {rows, channels}),
                                   .dw = device.zeros(kF32, {channels, taps})};
  const ShortConvBackward expected_backward{.x = x, .w = w, .sequences = sequences, .dy = dy,
                                            .dx = host.output(kF32, {rows, channels}),
                                            .dw = host.zeros(kF32, {channels, taps})};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dx, expected_backward.dx);
  expect_close(backward.dw, expected_backward.dw);
  device.expect_fences_intact();
}

TEST_P(ShortConvCudaTest, PiecesAreTheWhole) {
  const auto [dtype, channels, taps] = GetParam();
  TensorPool host(2);
  CudaPool device;
  const int64_t length = 40;
  const Tensor x = device.copy(random_as(host, dtype, {length, channels}), dtype);
  const Tensor w = device.copy(host.random(kF32, {channels, taps})), slots = device.copy(host.ints({1}, {2}));
  const Tensor whole = device.output(dtype, {length, channels}), pieces = device.output(dtype, {length, channels});
  const Tensor tail = device.output(kF32, {3, taps - 1, channels});
  launch(ShortConv{.x = x, .w = w, .sequences = device.copy(testing::sequences_of(host, {40})), .tail = {}, .slots = {},
                   .y = whole},
         cuda_stream());
  int32_t begin = 0;
  for (const int32_t count : {1, 1, 5, 2, 30, 1}) {
    launch(ShortConv{.x = x.slice(0, begin, begin + count), .w = w,
                     .sequences = device.copy(testing::sequences_of(host, {count}, {begin})), .tail = tail, .slots = slots,
                     .y = pieces.slice(0, begin, begin + count)},
           cuda_stream());
    begin += count;
  }
  testing::expect_same_bits_on_device(pieces, whole);
  device.expect_fences_intact();
}

// More rows than a block takes, ragged: the bits of each sequence alone, and the backward of the definition.
TEST_F(ShortConvCudaLong, SequencesAreAlone) {
  const std::vector<int32_t> lengths = {1500, 1, 3, 0, 700, 2200, 100};
  const int64_t channels = 64, taps = 4;
  TensorPool host(3);
  CudaPool device;
  const Sequences sequences = testing::sequences_of(host, lengths);
  const int64_t rows = sequences.rows();
  const Tensor x = random_as(host, kBf16, {rows, channels}), w = host.random(kF32, {channels, taps});
  const ShortConv args{.x = device.copy(x, kBf16), .w = device.copy(w), .sequences = device.copy(sequences), .tail = {},
                       .slots = {}, .y = device.output(kBf16, {rows, channels})};
  launch(args, cuda_stream());
  const Tensor alone = device.output(kBf16, {rows, channels});
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int64_t begin = sequences.begin(b), end = sequences.end(b);
    ShortConv one = args;
    one.x = args.x.slice(0, begin, end);
    one.y = alone.slice(0, begin, end);
    one.sequences = device.copy(testing::sequences_of(host, {static_cast<int32_t>(end - begin)}));
    launch(one, cuda_stream());
  }
  testing::expect_same_bits_on_device(alone, args.y);
  const Tensor dy = random_as(host, kBf16, {rows, channels});
  const ShortConvBackward backward{.x = args.x, .w = args.w, .sequences = args.sequences, .dy = device.copy(dy, kBf16),
                                   .dx = device.output(kBf16, {rows, channels}), .dw = device.zeros(kF32, {channels, taps})};
  const ShortConvBackward expected{.x = x, .w = w, .sequences = sequences, .dy = dy,
                                   .dx = host.output(kF32, {rows, channels}), .dw = host.zeros(kF32, {channels, taps})};
  launch(backward, cuda_stream());
  reference(expected);
  expect_close(backward.dx, expected.dx);
  expect_close(backward.dw, expected.dw);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShortConvCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(1, 30, 400),
                                            ::testing::Values(1, 2, 4)));

}  // namespace
}  // namespace slipstream::kernels
