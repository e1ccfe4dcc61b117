// Goal: launch() equals reference() bit for bit (nothing is rounded but the ordered sums of the backward) for
// empty, odd and strided shapes and both table dtypes; repeated ids add up in token order; a bad id is named.
#include "kernels/embedding/embedding.h"

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

class EmbeddingTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, DType>> {};

TEST_P(EmbeddingTest, EqualsReference) {
  const auto [tokens, hidden, dtype] = GetParam();
  TensorPool pool(1);
  const int64_t vocab = 13;  // fewer than tokens: ids repeat
  const Embedding args{.ids = pool.random_ints({tokens}, 0, vocab),
                       .table = pool.random(dtype, {vocab, hidden + 3}).slice(1, 1, hidden + 1),
                       .y = pool.output(DType::kF32, {tokens, hidden + 5}).slice(1, 5, hidden + 5)};
  Embedding expected = args;
  expected.y = pool.output(DType::kF32, {tokens, hidden});
  launch(args, test_stream());
  reference(expected);
  testing::expect_same_bits(args.y, expected.y);

  const Tensor start = pool.random(DType::kF32, {vocab, hidden});
  const EmbeddingBackward backward{
      .ids = args.ids,
      .dy = pool.random(DType::kF32, {tokens, hidden + 1}).slice(1, 1, hidden + 1),
      .dtable = pool.copy(start)};
  EmbeddingBackward expected_backward = backward;
  expected_backward.dtable = pool.copy(start);
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_same_bits(backward.dtable, expected_backward.dtable);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, EmbeddingTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 100),
                                            ::testing::Values(1, 16, 127, 600),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

TEST(EmbeddingTest, BackwardAddsPerId) {
  TensorPool pool(2);
  const Tensor dtable = pool.zeros(DType::kF32, {4, 3});
  const Tensor dy = pool.random(DType::kF32, {3, 3});
  launch(EmbeddingBackward{.ids = pool.ints({3}, {2, 0, 2}), .dy = dy, .dtable = dtable}, test_stream());
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(dtable.row(0)[i], dy.row(1)[i]);
    EXPECT_EQ(dtable.row(1)[i], 0.0f);
    EXPECT_EQ(dtable.row(2)[i], dy.row(0)[i] + dy.row(2)[i]);
    EXPECT_EQ(dtable.row(3)[i], 0.0f);
  }
}

TEST(EmbeddingTest, RefusesByName) {
  TensorPool pool(3);
  const Tensor table = pool.random(DType::kF32, {10, 4});
  Embedding args{.ids = pool.ints({3}, {9, 10, -1}), .table = table, .y = pool.output(DType::kF32, {3, 4})};
  EXPECT_EQ(validate(args).message(), "embedding: ids[1]: 10, expected 0..9");
  args.ids = pool.ints({3}, {9, 0, -1});
  EXPECT_EQ(validate(args).message(), "embedding: ids[2]: -1, expected 0..9");
  args.y = pool.output(DType::kF32, {3, 5});
  EXPECT_EQ(validate(args).message(), "embedding: y: f32 [3, 5], expected f32 [3, 4]");
  const EmbeddingBackward backward{.ids = args.ids, .dy = pool.random(DType::kF32, {3, 4}), .dtable = table};
  EXPECT_EQ(validate(backward).message(), "embedding_backward: ids[2]: -1, expected 0..9");
}

}  // namespace
}  // namespace slipstream::kernels
