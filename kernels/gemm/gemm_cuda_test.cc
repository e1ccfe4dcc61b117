// Goal: on CUDA products in f32 have the bits of reference(), those with bf16 are near it; for every M from 1 to
// 300 a row has the bits it has alone, for transposed, batched, accumulating and misaligned products.
#include "kernels/gemm/gemm.h"

#include <cmath>
#include <cstring>

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

struct Case {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  int64_t batch;  // 0: matrices
  DType a, b, c;
  bool accumulate, bias;
};

Tensor filled(TensorPool& host, DType dtype, int64_t batch, int64_t rows, int64_t columns) {
  return batch == 0 ? random_as(host, dtype, {rows, columns}) : random_as(host, dtype, {batch, rows, columns});
}

class GemmCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<Case> {};

TEST_P(GemmCudaTest, EqualsReference) {
  const Case p = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor a = p.transpose_a ? filled(host, p.a, p.batch, p.k, p.m) : filled(host, p.a, p.batch, p.m, p.k);
  const Tensor b = p.transpose_b ? filled(host, p.b, p.batch, p.n, p.k) : filled(host, p.b, p.batch, p.k, p.n);
  const Tensor c = filled(host, p.c, p.batch, p.m, p.n), bias = p.bias ? host.random(kF32, {p.n}) : Tensor();
  const Gemm args{.a = device.copy(a, p.a), .b = device.copy(b, p.b), .c = device.copy(c, p.c), .bias = device.copy(bias),
                  .transpose_a = p.transpose_a, .transpose_b = p.transpose_b, .accumulate = p.accumulate};
  const Gemm expected{.a = a, .b = b, .c = c, .bias = bias, .transpose_a = p.transpose_a,
                      .transpose_b = p.transpose_b, .accumulate = p.accumulate};
  launch(args, cuda_stream());
  reference(expected);
  if (p.a == kF32 && p.b == kF32 && p.c == kF32) {
    testing::expect_same_bits(testing::on_host(host, args.c), expected.c);
  } else {
    expect_close(args.c, expected.c, p.c == kF32 ? 2.0f : 1.0f);
  }
  device.expect_fences_intact();
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {3, 5, 7}, {33, 70, 40}, {64, 128, 64},
                               {130, 136, 200}, {300, 96, 33}, {0, 8, 8}, {8, 8, 0}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const DType a : {kF32, kBf16}) {
          for (const DType b : {kF32, kBf16}) {
            const bool odd = (m + k) % 2 == 1;
            all.push_back({m, n, k, transpose_a, transpose_b, 0, a, b, odd ? kBf16 : kF32, transpose_a, !transpose_a});
            all.push_back({m, n, k, transpose_a, transpose_b, 3, a, b, kF32, !transpose_a, false});
          }
        }
      }
    }
  }
  // Rows of whole 16-byte pieces, of sizes that take medium and large tiles (kernels/cuda/wgmma_products.cuh).
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{72, 264, 200}, {1544, 1544, 72}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        all.push_back({m, n, k, transpose_a, transpose_b, 0, kBf16, kBf16, kF32, true, false});
        all.push_back({m, n, k, transpose_a, transpose_b, 0, kBf16, kBf16, kBf16, false, true});
      }
    }
  }
  // mHC's mixes and their gradients, and a router's (kernels/cuda/split_products.cuh, thin_products.cuh).
  for (const int64_t m : {1, 70}) {
    for (const int64_t n : {3, 24, 32}) all.push_back({m, n, 16384, false, true, 0, kBf16, kF32, kF32, false, false});
    all.push_back({m, 24, 1056, false, true, 0, kBf16, kF32, kF32, false, false});
    all.push_back({m, 4096, 24, false, false, 0, kF32, kF32, kBf16, true, false});
    all.push_back({m, 1024, 288, false, false, 0, kF32, kBf16, kBf16, true, false});
  }
  all.push_back({24, 4096, 300, true, false, 0, kF32, kBf16, kF32, true, false});
  all.push_back({288, 1024, 300, true, false, 0, kF32, kBf16, kF32, true, false});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, GemmCudaTest, ::testing::ValuesIn(cases()));

class GemmRowsCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<std::tuple<DType, DType>> {};

// Of a product with as many rows as the largest tile wants.
TEST_P(GemmRowsCudaTest, RowIgnoresTheOthers) {
  const auto [dtype_a, dtype_b] = GetParam();
  TensorPool host(2);
  CudaPool device;
  constexpr int64_t kRows = 4096;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1024, 256}, {97, 131}, {24, 2048}}) {
    for (const bool transpose_b : {true, false}) {
      const Tensor a = device.copy(random_as(host, dtype_a, {kRows, k}), dtype_a);
      const Tensor b =
          device.copy(transpose_b ? random_as(host, dtype_b, {n, k}) : random_as(host, dtype_b, {k, n}), dtype_b);
      const Tensor whole = device.output(kF32, {kRows, n}), part = device.output(kF32, {300, n});
      launch(Gemm{.a = a, .b = b, .c = whole, .bias = {}, .transpose_b = transpose_b}, cuda_stream());
      TensorPool kept(3);
      const Tensor expected = testing::bits_on_host(kept, whole);
      for (int64_t m = 1; m <= 300; ++m) {
        // The last m rows, so that a row changes its place in the tile.
        launch(Gemm{.a = a.slice(0, kRows - m, kRows), .b = b, .c = part.slice(0, 0, m), .bias = {},
                    .transpose_b = transpose_b},
               cuda_stream());
        TensorPool scratch(4);
        const Tensor got = testing::bits_on_host(scratch, part.slice(0, 0, m));
        ASSERT_EQ(std::memcmp(got.f32(), expected.row(kRows - m), static_cast<size_t>(got.bytes())), 0)
            << "M = " << m << ", N = " << n;
      }
    }
  }
  device.expect_fences_intact();
}

// Columns of wider matrices, from an aligned column and from one that no 16-byte piece begins at.
using GemmStridedCudaTest = testing::CudaTest;
TEST_F(GemmStridedCudaTest, EqualsReference) {
  TensorPool host(6);
  CudaPool device;
  const int64_t m = 200, n = 136, k = 72, width = 256;
  const Tensor a = random_as(host, kBf16, {m, width}), b = random_as(host, kBf16, {n, width});
  const Tensor device_a = device.copy(a, kBf16), device_b = device.copy(b, kBf16);
  for (const int64_t begin : {0, 8, 5}) {
    const Tensor expected = host.zeros(kF32, {m, n}), wide = device.output(kBf16, {m, width});
    const Tensor c = wide.slice(1, begin, begin + n);
    launch(Gemm{.a = device_a.slice(1, begin, begin + k), .b = device_b.slice(1, 8, 8 + k), .c = c, .bias = {},
                .transpose_b = true},
           cuda_stream());
    reference(Gemm{.a = a.slice(1, begin, begin + k), .b = b.slice(1, 8, 8 + k), .c = expected, .bias = {},
                   .transpose_b = true});
    expect_close(c, expected);
  }
  device.expect_fences_intact();
}

// The shapes of a model: large tiles beside small ones, long chains.
TEST_P(GemmRowsCudaTest, LargeAndSmallTilesAgree) {
  const auto [dtype_a, dtype_b] = GetParam();
  TensorPool host(5);
  CudaPool device;
  const int64_t m = 1500, n = 1536;
  for (const int64_t k : {1024, 6152}) {
    const Tensor a = device.copy(random_as(host, dtype_a, {m, k}), dtype_a);
    const Tensor b = device.copy(random_as(host, dtype_b, {n, k}), dtype_b);
    const Tensor whole = device.output(kF32, {m, n});
    launch(Gemm{.a = a, .b = b, .c = whole, .bias = {}, .transpose_b = true}, cuda_stream());
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {777, 800}, {790, 806}, {800, 832}, {1000, 1100}, {1499, 1500}}) {
      const Tensor part = device.output(kF32, {end - begin, n});
      launch(Gemm{.a = a.slice(0, begin, end), .b = b, .c = part, .bias = {}, .transpose_b = true}, cuda_stream());
      testing::expect_same_bits_on_device(part, whole.slice(0, begin, end));
    }
  }
  device.expect_fences_intact();
}

// Products of one step of k that differ by forty binary places, so that a sum taken in another order, or in parts, would show.
using GemmWideCudaTest = testing::CudaTest;
TEST_F(GemmWideCudaTest, RowIgnoresTheOthersAtAllMagnitudes) {
  TensorPool host(7);
  CudaPool device;
  const int64_t m = 256, n = 520, k = 1032;
  const auto wide = [&](std::initializer_list<int64_t> shape, float seed_low) {
    const Tensor values = random_as(host, kBf16, shape), exponents = random_as(host, kF32, shape, seed_low, seed_low + 20.0f);
    for (int64_t i = 0; i < values.numel(); ++i) values.f32()[i] = std::ldexp(values.f32()[i], static_cast<int>(exponents.f32()[i]));
    return device.copy(values, kBf16);
  };
  const Tensor a = wide({m, k}, -10.0f), b = wide({n, k}, -10.0f), whole = device.output(kF32, {m, n});
  launch(Gemm{.a = a, .b = b, .c = whole, .bias = {}, .transpose_b = true}, cuda_stream());
  for (const int64_t rows : {1, 7, 8, 9, 16, 17, 31, 32, 33, 100}) {
    const Tensor part = device.output(kF32, {rows, n});
    launch(Gemm{.a = a.slice(0, 5, 5 + rows), .b = b, .c = part, .bias = {}, .transpose_b = true}, cuda_stream());
    testing::expect_same_bits_on_device(part, whole.slice(0, 5, 5 + rows));
  }
  device.expect_fences_intact();
}

// Few columns from long rows, whose k are summed in runs: few rows by other kernels than many.
TEST_F(GemmWideCudaTest, FewColumnsOfLongRows) {
  TensorPool host(9);
  CudaPool device;
  for (const int64_t k : {1024, 3072, 16416}) {
    for (const int64_t n : {3, 24, 32}) {
      const Tensor a = device.copy(random_as(host, kBf16, {100, k}), kBf16), w = device.copy(host.random(kF32, {n, k}));
      const Tensor whole = device.output(kF32, {100, n});
      launch(Gemm{.a = a, .b = w, .c = whole, .bias = {}, .transpose_b = true}, cuda_stream());
      for (const int64_t rows : {1, 7, 16, 17, 32, 33, 65}) {
        const Tensor part = device.output(kF32, {rows, n});
        launch(Gemm{.a = a.slice(0, 3, 3 + rows), .b = w, .c = part, .bias = {}, .transpose_b = true}, cuda_stream());
        testing::expect_same_bits_on_device(part, whole.slice(0, 3, 3 + rows));
      }
    }
  }
  device.expect_fences_intact();
}

// Each head's queries by its absorbed weight: [heads, rows, k] out of [rows, heads, width], times [heads, k, n].
TEST_F(GemmWideCudaTest, FewRowsOfHeads) {
  TensorPool host(10);
  CudaPool device;
  for (const auto& [heads, n, k] : {std::tuple<int64_t, int64_t, int64_t>{64, 512, 192}, {3, 72, 264}, {2, 64, 8}, {5, 520, 512}, {2, 48, 520}}) {
    const int64_t width = k + 8;
    const Tensor q = device.copy(random_as(host, kBf16, {100, heads, width}), kBf16);
    const Tensor w = device.copy(random_as(host, kBf16, {heads, k, n}), kBf16);
    const auto of_heads = [](const Tensor& t, int64_t begin, int64_t end) { return t.slice(0, begin, end).transpose01(); };
    const Tensor whole = device.output(kBf16, {100, heads, n});
    launch(Gemm{.a = of_heads(q.slice(2, 0, k), 0, 100), .b = w, .c = of_heads(whole, 0, 100), .bias = {}}, cuda_stream());
    for (const int64_t rows : {1, 3, 8, 9}) {
      const Tensor part = device.output(kBf16, {rows, heads, n});
      launch(Gemm{.a = of_heads(q.slice(2, 0, k), 5, 5 + rows), .b = w, .c = of_heads(part, 0, rows), .bias = {}}, cuda_stream());
      testing::expect_same_bits_on_device(part, whole.slice(0, 5, 5 + rows));
    }
  }
  device.expect_fences_intact();
}

// Of several products together, small and large, in both dtypes, as of each alone.
TEST_F(GemmWideCudaTest, TogetherAsAlone) {
  TensorPool host(8);
  CudaPool device;
  for (const int64_t m : {1, 8, 9, 16, 17, 100, 600}) {
    std::vector<Gemm> together;
    std::vector<Tensor> alone;
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{24, 520}, {520, 136}, {64, 1024}, {9000, 64}, {40, 77}, {128, 264}, {8, 8}, {16, 64},
                               {96, 200}, {72, 72}, {48, 512}}) {
      const DType dtype = n % 3 == 0 ? kF32 : kBf16;
      Gemm gemm{.a = device.copy(random_as(host, kBf16, {m, k}), kBf16), .b = device.copy(random_as(host, kBf16, {n, k}), kBf16),
                .c = device.output(dtype, {m, n}), .bias = n == 64 ? device.copy(host.random(kF32, {n})) : Tensor(), .transpose_b = true};
      launch(gemm, cuda_stream());
      alone.push_back(gemm.c);
      gemm.c = device.output(dtype, {m, n});
      together.push_back(gemm);
    }
    launch(Gemms{together}, cuda_stream());
    for (size_t i = 0; i < alone.size(); ++i) testing::expect_same_bits_on_device(together[i].c, alone[i]);
  }
  launch(Gemms{}, cuda_stream());
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(DTypes, GemmRowsCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(kF32, kBf16)));

}  // namespace
}  // namespace slipstream::kernels
