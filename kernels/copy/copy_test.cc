// Goal: a copy between strided views moves exactly the viewed values; shapes that differ are refused by name.
#include "kernels/copy/copy.h"

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;

TEST(CopyTest, MovesTheViewAndNothingElse) {
  for (const int64_t tokens : {0, 1, 65}) {
    TensorPool pool(1);
    const Tensor from = pool.random(DType::kF32, {tokens, 3, 9}).slice(2, 2, 7);
    const Tensor whole = pool.output(DType::kF32, {tokens, 4, 8});
    const Tensor to = whole.slice(1, 1, 4).slice(2, 3, 8);
    const Tensor expected = pool.output(DType::kF32, {tokens, 3, 5});
    launch(Copy{from, to}, testing::test_stream());
    reference(Copy{from, expected});
    testing::expect_same_bits(to, expected);
    if (tokens > 0) {
      EXPECT_TRUE(std::isnan(whole.f32()[0]));
    }
    pool.expect_fences_intact();
  }
}

TEST(CopyTest, RoundsToBf16) {
  TensorPool pool(3);
  const Tensor from = pool.random(DType::kF32, {33, 2, 70}), to = pool.output(DType::kBf16, {33, 3, 70});
  const Tensor expected = pool.output(DType::kBf16, {33, 2, 70});
  launch(Copy{from, to.slice(1, 1, 3)}, testing::test_stream());
  reference(Copy{from, expected});
  testing::expect_same_bits(to.slice(1, 1, 3), expected);
  pool.expect_fences_intact();
}

TEST(CopyTest, RefusesByName) {
  TensorPool pool(2);
  const Copy args{pool.random(DType::kF32, {2, 3, 4}), pool.output(DType::kF32, {2, 3, 5})};
  EXPECT_EQ(validate(args).message(), "copy: to: f32 [2, 3, 5], expected f32 or bf16 [2, 3, 4]");
}

}  // namespace
}  // namespace slipstream::kernels
