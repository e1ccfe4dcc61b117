// Goal: on CUDA products of e4m3 factors are near reference(), dense and by expert; for every M a row has the
// bits it has alone, in every shape of tile; shapes that the copy engine cannot read are refused.
#include "kernels/quantize/quantize.h"
#include "kernels/scaled_gemm/scaled_gemm.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::cuda_stream;
using testing::CudaPool;
using testing::expect_close;
using testing::TensorPool;

constexpr DType kF8 = DType::kF8E4M3, kF32 = DType::kF32, kBf16 = DType::kBf16;

int64_t blocks(int64_t n) { return (n + 127) / 128; }

// Random values, quantised; a row's size grows with its index, so that scales differ.
Quantize quantized(TensorPool& pool, int64_t rows, int64_t k, int64_t block_rows) {
  const Tensor x = pool.random(kF32, {rows, k});
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < k; ++j) x.row(i)[j] *= 0.1f + static_cast<float>((i / block_rows + j / 128) % 7);
  }
  const Quantize q{x, pool.zeros(kF8, {rows, k}),
                   pool.zeros(kF32, {(rows + block_rows - 1) / block_rows, blocks(k)}), block_rows};
  reference(q);
  return q;
}
Quantize quantized_experts(TensorPool& pool, int64_t experts, int64_t n, int64_t k) {
  const Quantize q{pool.random(kF32, {experts, n, k}), pool.zeros(kF8, {experts, n, k}),
                   pool.zeros(kF32, {experts, blocks(n), blocks(k)}), 128};
  reference(q);
  return q;
}

using ScaledGemmCudaTest = testing::CudaTest;

TEST_F(ScaledGemmCudaTest, EqualsReference) {
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 16},
                                {3, 5, 128},
                                {33, 70, 144},
                                {64, 128, 256},
                                {130, 264, 400},
                                {300, 1000, 272},
                                {0, 8, 16},
                                {1100, 640, 128}}) {
    SCOPED_TRACE(absl::StrCat(m, " x ", n, " x ", k));
    TensorPool host(1);
    CudaPool device;
    const Quantize a = quantized(host, m, k, 1), b = quantized(host, n, k, 128);
    const ScaledGemm expected{.a = a.codes,
                              .a_scales = a.scales,
                              .b = b.codes,
                              .b_scales = b.scales,
                              .c = host.output(kF32, {m, n})};
    const ScaledGemm args{.a = device.copy(a.codes),
                          .a_scales = device.copy(a.scales),
                          .b = device.copy(b.codes),
                          .b_scales = device.copy(b.scales),
                          .c = device.output(kBf16, {m, n})};
    launch(args, cuda_stream());
    reference(expected);
    expect_close(args.c, expected.c);
    device.expect_fences_intact();
  }
}

TEST_F(ScaledGemmCudaTest, RowsMeetTheirExperts) {
  for (const std::vector<int32_t>& counts : {std::vector<int32_t>{0, 0},
                                             {1},
                                             {3, 0, 65, 1},
                                             {130, 2, 0, 0, 40, 300},
                                             std::vector<int32_t>(40, 3)}) {
    TensorPool host(2);
    CudaPool device;
    std::vector<int32_t> begin = {0};
    for (const int32_t count : counts) begin.push_back(begin.back() + count);
    const int64_t experts = static_cast<int64_t>(counts.size()), rows = begin.back(), n = 328, k = 272;
    SCOPED_TRACE(absl::StrCat(experts, " experts, ", rows, " rows"));
    const Quantize a = quantized(host, rows, k, 1), b = quantized_experts(host, experts, n, k);
    const ScaledGemm expected{.a = a.codes,
                              .a_scales = a.scales,
                              .b = b.codes,
                              .b_scales = b.scales,
                              .row_begin = host.ints({experts + 1}, begin),
                              .c = host.output(kF32, {rows, n})};
    const ScaledGemm args{.a = device.copy(a.codes),
                          .a_scales = device.copy(a.scales),
                          .b = device.copy(b.codes),
                          .b_scales = device.copy(b.scales),
                          .row_begin = device.copy(expected.row_begin),
                          .c = device.output(kBf16, {rows, n})};
    launch(args, cuda_stream());
    reference(expected);
    expect_close(args.c, expected.c);
    for (int64_t e = 0; e < experts; ++e) {  // its last row alone, as a dense product
      const int64_t end = begin[static_cast<size_t>(e + 1)];
      if (end == begin[static_cast<size_t>(e)]) continue;
      const Tensor alone = device.output(kBf16, {1, n});
      launch(ScaledGemm{.a = args.a.slice(0, end - 1, end),
                        .a_scales = args.a_scales.slice(0, end - 1, end),
                        .b = args.b[e],
                        .b_scales = args.b_scales[e],
                        .c = alone},
             cuda_stream());
      testing::expect_same_bits_on_device(alone, args.c.slice(0, end - 1, end));
    }
    device.expect_fences_intact();
  }
}

TEST_F(ScaledGemmCudaTest, RowIgnoresTheOthers) {
  TensorPool host(3);
  CudaPool device;
  constexpr int64_t kRows = 4096;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1024, 1072}, {104, 128}}) {
    const Quantize a = quantized(host, kRows, k, 1), b = quantized(host, n, k, 128);
    const Tensor codes = device.copy(a.codes), scales = device.copy(a.scales),
                 whole = device.output(kBf16, {kRows, n});
    ScaledGemm args{.a = codes,
                    .a_scales = scales,
                    .b = device.copy(b.codes),
                    .b_scales = device.copy(b.scales),
                    .c = whole};
    launch(args, cuda_stream());
    const Tensor part = device.output(kBf16, {2000, n});
    for (const int64_t m :
         {1, 2, 7, 8, 9, 16, 31, 63, 64, 65, 100, 128, 129, 191, 192, 200, 256, 300, 511, 1000, 2000}) {
      SCOPED_TRACE(m);
      // The last m rows, so that a row changes its place in the tile.
      args.a = codes.slice(0, kRows - m, kRows);
      args.a_scales = scales.slice(0, kRows - m, kRows);
      args.c = part.slice(0, 0, m);
      launch(args, cuda_stream());
      testing::expect_same_bits_on_device(args.c, whole.slice(0, kRows - m, kRows));
    }
  }
  device.expect_fences_intact();
}

TEST_F(ScaledGemmCudaTest, RefusesWhatTheCopyEngineCannotRead) {
  CudaPool device;
  const ScaledGemm args{.a = device.zeros(kF8, {3, 72}),
                        .a_scales = device.zeros(kF32, {3, 1}),
                        .b = device.zeros(kF8, {8, 72}),
                        .b_scales = device.zeros(kF32, {1, 1}),
                        .c = device.zeros(kBf16, {3, 8})};
  EXPECT_EQ(validate(args).code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace slipstream::kernels
