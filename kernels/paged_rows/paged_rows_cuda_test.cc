// Goal: on CUDA rows are stored at their positions, rounded to the store's dtype: the bits of reference().
#include "kernels/paged_rows/paged_rows.h"

#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class PagedRowsCudaTest : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<DType, DType, int64_t>> {};

TEST_P(PagedRowsCudaTest, EqualsReference) {
  const auto [dtype, stored, width] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Sequences sequences = testing::sequences_of(host, {1, 0, 70, 130}, {63, 5, 0, 100});
  const Tensor rows = random_as(host, dtype, {sequences.rows(), width});
  const PagedRows store{.pool = host.zeros(stored, {20, kPageRows, width}), .page_table = testing::pages_in_turn(host, 4, 4)};
  const PagedRows on_device{.pool = device.copy(store.pool, stored), .page_table = device.copy(store.page_table)};
  launch(PagedWrite{.rows = device.copy(rows, dtype), .sequences = device.copy(sequences), .store = on_device},
         cuda_stream());
  reference(PagedWrite{.rows = rows, .sequences = sequences, .store = store});
  testing::expect_same_bits(testing::bits_on_host(host, on_device.pool), store.pool);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, PagedRowsCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(kF32, kBf16),
                                            ::testing::Values(1, 30, 576)));

}  // namespace
}  // namespace slipstream::kernels
