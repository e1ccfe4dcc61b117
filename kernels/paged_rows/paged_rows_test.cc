// Goal: launch() stores every new row where reference() does and touches nothing else, for ragged batches
// with empty sequences, both store dtypes, strided rows and pools; cutting a batch into calls changes no bit;
// bad arguments are refused by name.
#include "kernels/paged_rows/paged_rows.h"

#include <limits>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

constexpr float kUntouched = 7.5f;

Tensor filled(TensorPool& pool, DType dtype, std::initializer_list<int64_t> shape) {
  return pool.random(dtype, shape, kUntouched, kUntouched);
}

class PagedWriteTest : public ::testing::TestWithParam<std::tuple<int64_t, DType>> {};

TEST_P(PagedWriteTest, EqualsReference) {
  const auto [width, dtype] = GetParam();
  TensorPool pool(1);
  // Sequence 1 has no new rows; 0 and 3 cross page boundaries; pages are given out of order and page 5 is
  // free.
  const Sequences sequences{.row_begin = pool.ints({5}, {0, 70, 70, 71, 271}),
                            .cached = pool.ints({4}, {60, 3, 64, 1})};
  const Tensor table = pool.ints({4, 4}, {8, 2, 0, -1, 1, -1, -1, -1, 9, 4, -1, -1, 10, 3, 7, 6});
  const Tensor rows = pool.random(DType::kF32, {271, width + 3}).slice(1, 1, width + 1);
  const Tensor wide = filled(pool, dtype, {11, kPageRows, width + 2});
  const Tensor expected_wide = filled(pool, dtype, {11, kPageRows, width + 2});
  const PagedRows store{.pool = wide.slice(2, 1, width + 1), .page_table = table};
  const PagedRows expected{.pool = expected_wide.slice(2, 1, width + 1), .page_table = table};
  launch(PagedWrite{.rows = rows, .sequences = sequences, .store = store}, test_stream());
  reference(PagedWrite{.rows = rows, .sequences = sequences, .store = expected});
  testing::expect_same_bits(wide, expected_wide);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Widths, PagedWriteTest,
                         ::testing::Combine(::testing::Values(1, 15, 16, 64, 127, 576),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

TEST(PagedWriteTest, RowsLandAtTheirPositions) {
  TensorPool pool(2);
  const Sequences sequences{.row_begin = pool.ints({3}, {0, 2, 3}), .cached = pool.ints({2}, {63, 0})};
  const PagedRows store{.pool = filled(pool, DType::kF32, {3, kPageRows, 1}),
                        .page_table = pool.ints({2, 2}, {2, 0, 1, -1})};
  const Tensor rows = pool.random(DType::kF32, {3, 1});
  launch(PagedWrite{.rows = rows, .sequences = sequences, .store = store}, test_stream());
  const float* at = store.pool.f32();
  EXPECT_EQ(at[2 * kPageRows + 63], rows.f32()[0]);  // position 63 of sequence 0: last row of its first page
  EXPECT_EQ(at[0 * kPageRows + 0], rows.f32()[1]);   // position 64: first row of its second
  EXPECT_EQ(at[1 * kPageRows + 0], rows.f32()[2]);
  int64_t untouched = 0;
  for (int64_t i = 0; i < store.pool.numel(); ++i) untouched += at[i] == kUntouched;
  EXPECT_EQ(untouched, 3 * kPageRows - 3);
}

TEST(PagedWriteTest, CutIntoCallsGivesTheSameStore) {
  TensorPool pool(3);
  const int64_t tokens = 150, width = 33;
  const Tensor rows = pool.random(DType::kF32, {tokens, width});
  const Tensor table = pool.ints({1, 3}, {2, 0, 1});
  const Tensor whole = filled(pool, DType::kBf16, {3, kPageRows, width});
  const Tensor pieces = filled(pool, DType::kBf16, {3, kPageRows, width});
  const auto write = [&](const Tensor& store, int64_t begin, int64_t end, Stream& stream) {
    const Sequences sequences{.row_begin = pool.ints({2}, {0, static_cast<int32_t>(end - begin)}),
                              .cached = pool.ints({1}, {static_cast<int32_t>(begin)})};
    launch(PagedWrite{.rows = rows.slice(0, begin, end),
                      .sequences = sequences,
                      .store = {.pool = store, .page_table = table}},
           stream);
  };
  write(whole, 0, tokens, test_stream());
  const int64_t cuts[] = {0, 1, 64, 65, 149, tokens};
  for (int i = 0; i < 5; ++i) write(pieces, cuts[i], cuts[i + 1], testing::single_thread_stream());
  testing::expect_same_bits(pieces, whole);
}

TEST(PagedWriteTest, NothingToWrite) {
  TensorPool pool(4);
  const Tensor rows = pool.random(DType::kF32, {0, 8});
  const Tensor store = filled(pool, DType::kF32, {1, kPageRows, 8});
  launch(PagedWrite{.rows = rows,
                    .sequences = {.row_begin = pool.ints({1}, {0}), .cached = pool.ints({0}, {})},
                    .store = {.pool = store, .page_table = pool.ints({0, 1}, {})}},
         test_stream());
  launch(PagedWrite{.rows = rows,
                    .sequences = {.row_begin = pool.ints({3}, {0, 0, 0}), .cached = pool.ints({2}, {5, 0})},
                    .store = {.pool = store, .page_table = pool.ints({2, 1}, {0, -1})}},
         test_stream());
  for (int64_t i = 0; i < store.numel(); ++i) ASSERT_EQ(store.f32()[i], kUntouched);
}

TEST(PagedWriteTest, KeepsNaN) {
  TensorPool pool(5);
  const Tensor rows = pool.random(DType::kF32, {2, 20});
  rows.row(0)[17] = std::numeric_limits<float>::quiet_NaN();
  const Tensor store = filled(pool, DType::kBf16, {1, kPageRows, 20});
  launch(PagedWrite{.rows = rows,
                    .sequences = {.row_begin = pool.ints({2}, {0, 2}), .cached = pool.ints({1}, {0})},
                    .store = {.pool = store, .page_table = pool.ints({1, 1}, {0})}},
         test_stream());
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(to_f32(store.bf()[i]) != to_f32(store.bf()[i]), i == 17);
}

TEST(PagedWriteTest, RefusesByName) {
  TensorPool pool(6);
  PagedWrite args{
      .rows = pool.random(DType::kF32, {65, 8}),
      .sequences = {.row_begin = pool.ints({2}, {0, 65}), .cached = pool.ints({1}, {0})},
      .store = {.pool = pool.zeros(DType::kF32, {2, kPageRows, 8}), .page_table = pool.ints({1, 2}, {0, 2})}};
  EXPECT_EQ(validate(args).message(), "paged_write: page_table: page out of range");
  args.store.page_table = pool.ints({1, 1}, {0});
  EXPECT_EQ(validate(args).message(), "paged_write: page_table: too few pages for a sequence");
  args.store.page_table = pool.ints({1, 2}, {0, 1});
  EXPECT_TRUE(validate(args).ok());
  args.rows = pool.random(DType::kF32, {65, 9});
  EXPECT_EQ(validate(args).message(), "paged_write: store: f32 [2, 64, 8], expected f32 or bf16 [*, 64, 9]");
  args.rows = pool.random(DType::kF32, {64, 8});
  EXPECT_EQ(validate(args).message(), "paged_write: row_begin must ascend from 0 to the number of rows");
}

}  // namespace
}  // namespace slipstream::kernels
