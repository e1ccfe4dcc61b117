// Goal: panels hold every value of the weight, bit for bit, and zeros beyond it, for whole and partial panels, strided
// weights, stacks of experts and both dtypes; bad arguments are refused by name.
#include "kernels/pack_panels/pack_panels.h"

#include <cstring>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;

void expect_same_bytes(const Tensor& actual, const Tensor& expected) {
  ASSERT_TRUE(actual.same_shape(expected));
  EXPECT_EQ(std::memcmp(actual.raw(), expected.raw(), static_cast<size_t>(actual.bytes())), 0);
}

TEST(PackPanelsTest, EqualsReference) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t n : {0, 1, 15, 16, 17, 48, 100}) {
      for (const int64_t k : {0, 1, 16, 31, 33, 300}) {
        TensorPool pool(static_cast<uint64_t>(n * 1000 + k));
        const int64_t panels = (n + 15) / 16;
        const Tensor w = pool.random(dtype, {n, k + 3}).slice(1, 1, k + 1);
        const PackPanels one{w, pool.output(dtype, {panels, k, 16})};
        const PackPanels expected{w, pool.output(dtype, {panels, k, 16})};
        launch(one, testing::test_stream());
        reference(expected);
        expect_same_bytes(one.panels, expected.panels);

        // Rows 2.. of each matrix of a stack.
        const Tensor stack = pool.random(dtype, {3, n + 2, k}).slice(1, 2, n + 2);
        const PackPanels all{stack, pool.output(dtype, {3, panels, k, 16})};
        const PackPanels all_expected{stack, pool.output(dtype, {3, panels, k, 16})};
        launch(all, testing::test_stream());
        reference(all_expected);
        expect_same_bytes(all.panels, all_expected.panels);
        pool.expect_fences_intact();
      }
    }
  }
}

TEST(PackPanelsTest, RefusesByName) {
  TensorPool pool(2);
  const Tensor w = pool.random(DType::kF32, {40, 8}), stack = pool.random(DType::kF32, {2, 40, 8});
  EXPECT_TRUE(validate(PackPanels{w, pool.output(DType::kF32, {3, 8, 16})}).ok());
  EXPECT_EQ(validate(PackPanels{w, pool.output(DType::kF32, {2, 8, 16})}).message(),
            "pack_panels: panels: f32 [2, 8, 16], expected f32 [3, 8, 16]");
  EXPECT_EQ(validate(PackPanels{w, pool.output(DType::kBf16, {3, 8, 16})}).message(),
            "pack_panels: panels: bf16 [3, 8, 16], expected f32 [3, 8, 16]");
  EXPECT_EQ(validate(PackPanels{stack, pool.output(DType::kF32, {3, 8, 16})}).message(),
            "pack_panels: panels: f32 [3, 8, 16], expected f32 [2, 3, 8, 16]");
  EXPECT_EQ(validate(PackPanels{w, pool.output(DType::kF32, {3, 9, 16}).slice(1, 0, 8)}).message(),
            "pack_panels: panels must be dense");
  EXPECT_EQ(validate(PackPanels{w.view({320}), pool.output(DType::kF32, {3, 8, 16})}).message(),
            "pack_panels: w: f32 [320], expected f32 or bf16 [*, *]");
}

}  // namespace
}  // namespace slipstream::kernels
