// Goal: on CUDA rows are stored with the bits of reference(), whatever their widths, dtype and magnitude, NaN included.
#include "kernels/latent_rows/latent_rows.h"

#include <cmath>
#include <limits>

#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::TensorPool;

struct Case {
  int64_t rank, rope;
  DType dtype;
};

class LatentRowsCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<Case> {};

TEST_P(LatentRowsCudaTest, EqualsReference) {
  const auto [rank, rope, dtype] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Sequences sequences = testing::sequences_of(host, {1, 0, 70, 130}, {63, 5, 0, 100});
  const Tensor rows = testing::random_as(host, dtype, {sequences.rows(), rank + rope});
  for (int64_t i = 0; i < rank; ++i) rows.row(7)[i] = 0.0f;
  rows.row(8)[rank / 2] = std::numeric_limits<float>::infinity();
  rows.row(9)[rank - 1] = std::numeric_limits<float>::quiet_NaN();
  rows.row(9)[rank / 2] = -std::numeric_limits<float>::infinity();
  for (int64_t r = 10; r < 50; ++r) {
    for (int64_t i = 0; i < rank; ++i) rows.row(r)[i] *= std::ldexp(1.0f, static_cast<int>(r * 5) - 150);
  }
  const PagedRows store{.pool = host.zeros(DType::kF8E4M3, {20, kPageRows, latent_row(rank, rope).bytes}),
                        .page_table = testing::pages_in_turn(host, 4, 4)};
  const PagedRows on_device = device.copy(store);
  launch(LatentWrite{.rows = device.copy(rows, dtype), .rank = rank, .sequences = device.copy(sequences),
                     .store = on_device},
         cuda_stream());
  reference(LatentWrite{.rows = rows, .rank = rank, .sequences = sequences, .store = store});
  // As words: bytes of scales may look like NaN.
  const auto words = [](const Tensor& t) {
    return Tensor(t.raw(), DType::kI32, {t.size(0), t.size(1), t.size(2) / 4}, t.device());
  };
  testing::expect_same_bits(testing::bits_on_host(host, words(on_device.pool)), words(store.pool));
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatentRowsCudaTest,
                         ::testing::Values(Case{512, 64, DType::kBf16}, Case{512, 0, DType::kF32}, Case{1, 0, DType::kBf16},
                                           Case{33, 6, DType::kF32}, Case{129, 1, DType::kBf16}, Case{300, 64, DType::kF32},
                                           Case{1200, 64, DType::kBf16}));

}  // namespace
}  // namespace slipstream::kernels
