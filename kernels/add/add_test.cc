// Goal: launch() equals reference() bit for bit for empty, odd, strided and unaligned shapes, in place too,
// on one thread or two; a column's sum does not depend on how the tokens were cut into calls; bad arguments
// are refused by name.
#include "kernels/add/add.h"

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

class AddTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(AddTest, EqualsReference) {
  const auto [tokens, hidden] = GetParam();
  TensorPool pool(1);
  const Tensor a = pool.random(DType::kF32, {tokens, hidden + 3}).slice(1, 1, hidden + 1);
  const Tensor b = pool.random(DType::kF32, {tokens, hidden + 1}).slice(1, 0, hidden);
  const Tensor expected = pool.output(DType::kF32, {tokens, hidden});
  reference(Add{.a = a, .b = b, .y = expected});
  const Tensor y = pool.output(DType::kF32, {tokens, hidden + 2}).slice(1, 1, hidden + 1);
  launch(Add{.a = a, .b = b, .y = y}, test_stream());
  testing::expect_same_bits(y, expected);
  const Tensor twice = pool.output(DType::kF32, {tokens, hidden});
  reference(Add{.a = expected, .b = b, .y = twice});
  launch(Add{.a = y, .b = b, .y = y}, testing::single_thread_stream());  // in place of a
  testing::expect_same_bits(y, twice);
  launch(Add{.a = a, .b = b, .y = b}, test_stream());  // in place of b
  testing::expect_same_bits(b, expected);
  pool.expect_fences_intact();
}

TEST_P(AddTest, ColumnSumEqualsReference) {
  const auto [tokens, hidden] = GetParam();
  TensorPool pool(2);
  const Tensor x = pool.random(DType::kF32, {tokens, hidden + 3}).slice(1, 1, hidden + 1);
  const Tensor start = pool.random(DType::kF32, {hidden});
  const Tensor expected = pool.copy(start), y = pool.copy(start), pieces = pool.copy(start);
  reference(ColumnSum{.x = x, .y = expected});
  launch(ColumnSum{.x = x, .y = y}, test_stream());
  testing::expect_same_bits(y, expected);
  launch(ColumnSum{.x = x.slice(0, 0, tokens / 3), .y = pieces}, testing::single_thread_stream());
  launch(ColumnSum{.x = x.slice(0, tokens / 3, tokens), .y = pieces}, test_stream());
  testing::expect_same_bits(pieces, expected);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, AddTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 65, 700),
                                            ::testing::Values(0, 1, 15, 16, 64, 127, 1000)));

TEST(AddTest, RefusesByName) {
  TensorPool pool(3);
  const Tensor a = pool.random(DType::kF32, {2, 8}), b = pool.random(DType::kF32, {2, 7});
  const Tensor half = pool.random(DType::kBf16, {2, 8});
  EXPECT_EQ(validate(Add{.a = a, .b = b, .y = a}).message(), "add: b: f32 [2, 7], expected f32 [2, 8]");
  EXPECT_EQ(validate(Add{.a = a, .b = a, .y = half}).message(), "add: y: bf16 [2, 8], expected f32 [2, 8]");
  EXPECT_EQ(validate(ColumnSum{.x = a, .y = b.view({14})}).message(),
            "column_sum: y: f32 [14], expected f32 [8]");
}

}  // namespace
}  // namespace slipstream::kernels
