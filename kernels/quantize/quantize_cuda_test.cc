// Goal: on CUDA codes and scales have the bits of reference(), for both kinds of blocks, shapes that they do
// not divide, experts, misaligned rows, NaN and values that overflow a code.
#include <cstring>
#include <limits>

#include "kernels/quantize/quantize.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::cuda_stream;
using testing::CudaPool;
using testing::TensorPool;

class QuantizeCudaTest : public testing::CudaTest,
                         public ::testing::WithParamInterface<std::tuple<DType, int64_t>> {};

TEST_P(QuantizeCudaTest, EqualsReference) {
  const auto [dtype, block_rows] = GetParam();
  TensorPool host(1);
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1},
                                      {3, 128},
                                      {5, 300},
                                      {300, 77},
                                      {33, 4096},
                                      {257, 1000},
                                      {0, 8},
                                      {8, 0}}) {
    SCOPED_TRACE(absl::StrCat(rows, " x ", columns));
    CudaPool device;
    const int64_t scale_rows = (rows + block_rows - 1) / block_rows, scale_columns = (columns + 127) / 128;
    for (const int64_t margin : {0, 3}) {
      const Tensor wide = host.random(dtype, {2, rows, columns + margin}, -7.0f, 7.0f);
      if (columns > 2 && rows > 2 && dtype == DType::kF32) {
        wide.row(0, 1)[1] = std::numeric_limits<float>::quiet_NaN();
        wide.row(1, 2)[2] = -3e38f;
        wide.row(1, 0)[0] = 0.0f;
      }
      const Quantize expected{.x = wide.slice(2, margin, margin + columns),
                              .codes = host.zeros(DType::kF8E4M3, {2, rows, columns}),
                              .scales = host.output(DType::kF32, {2, scale_rows, scale_columns}),
                              .block_rows = block_rows};
      const Tensor codes = device.zeros(DType::kF8E4M3, {2, rows, columns + margin});
      const Quantize args{.x = device.copy(wide, dtype).slice(2, margin, margin + columns),
                          .codes = codes.slice(2, 0, columns),
                          .scales = device.output(DType::kF32, {2, scale_rows, scale_columns}),
                          .block_rows = block_rows};
      launch(args, cuda_stream());
      reference(expected);
      testing::expect_same_bits(testing::bits_on_host(host, args.scales), expected.scales);
      const Tensor got = testing::bits_on_host(host, args.codes);
      EXPECT_EQ(std::memcmp(got.raw(), expected.codes.raw(), static_cast<size_t>(got.bytes())), 0);
      for (int64_t e = 0; e < 2; ++e) {  // each alone, as a matrix
        const Quantize one{.x = args.x[e],
                           .codes = device.zeros(DType::kF8E4M3, {rows, columns}),
                           .scales = device.output(DType::kF32, {scale_rows, scale_columns}),
                           .block_rows = block_rows};
        launch(one, cuda_stream());
        testing::expect_same_bits_on_device(one.scales, args.scales[e]);
      }
    }
    device.expect_fences_intact();
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, QuantizeCudaTest,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(1, 128)));

}  // namespace
}  // namespace slipstream::kernels
