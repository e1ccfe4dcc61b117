// Goal: launch() equals reference() bit for bit in every form (transposes, panels, dtypes, bias, accumulation,
// batch) and for empty, odd, strided and unaligned shapes that cross every tile and block edge; a row ignores its
// neighbours and the number of threads; bad arguments are refused by name.
#include "kernels/gemm/gemm.h"

#include "hwy/targets.h"
#include "kernels/pack_panels/pack_panels.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

struct Shape {
  int64_t m, n, k;
};

// A matrix inside a wider one, at an odd address.
Tensor random_view(TensorPool& pool, DType dtype, int64_t rows, int64_t columns) {
  return pool.random(dtype, {rows, columns + 5}).slice(1, 3, columns + 3);
}

Tensor panels_of(TensorPool& pool, const Tensor& w) {
  const std::vector<int64_t> shape = panels_shape(w);
  const Tensor panels = w.rank() == 2 ? pool.output(w.dtype(), {shape[0], shape[1], shape[2]})
                                      : pool.output(w.dtype(), {shape[0], shape[1], shape[2], shape[3]});
  launch(PackPanels{w, panels}, testing::single_thread_stream());
  return panels;
}

struct Form {
  bool transpose_a, transpose_b;
  DType dtype;
  bool accumulate = false, bias = false;
};

void expect_equals_reference(const Shape& shape, const Form& form, Stream& stream) {
  SCOPED_TRACE(absl::StrCat(shape.m, " x ", shape.n, " x ", shape.k, form.transpose_a ? " T" : " N",
                            form.transpose_b ? "T " : "N ", name_of(form.dtype)));
  TensorPool pool(static_cast<uint64_t>(shape.m * 7919 + shape.n * 31 + shape.k));
  const auto [m, n, k] = shape;
  Gemm args{
      .a = form.transpose_a ? random_view(pool, DType::kF32, k, m) : random_view(pool, DType::kF32, m, k),
      .b = form.transpose_b ? random_view(pool, form.dtype, n, k) : random_view(pool, form.dtype, k, n),
      .c = form.accumulate ? random_view(pool, DType::kF32, m, n)
                           : pool.output(DType::kF32, {m, n + 3}).slice(1, 1, n + 1),
      .bias = form.bias ? pool.random(DType::kF32, {n}) : Tensor(),
      .transpose_a = form.transpose_a,
      .transpose_b = form.transpose_b,
      .accumulate = form.accumulate};
  const auto result = [&] { return form.accumulate ? pool.copy(args.c) : pool.output(DType::kF32, {m, n}); };
  Gemm expected = args, from_panels = args;
  expected.c = result();
  from_panels.c = result();
  launch(args, stream);
  reference(expected);
  testing::expect_same_bits(args.c, expected.c);
  if (form.transpose_b) {
    from_panels.b_panels = panels_of(pool, args.b);
    launch(from_panels, stream);
    testing::expect_same_bits(from_panels.c, expected.c);
  }
  pool.expect_fences_intact();
}

// Every tile height and width, masked columns, and the edges of the register transposes.
TEST(GemmTest, EqualsReferenceOnSmallShapes) {
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        for (int64_t m = 1; m <= 26; ++m) {
          for (const int64_t n : {1, 15, 16, 17, 33, 48, 79}) {
            for (const int64_t k : {1, 7, 16, 45}) {
              const bool odd = (m + n + k) % 2 == 1;
              expect_equals_reference({m, n, k}, {transpose_a, transpose_b, dtype, odd, m % 3 == 0},
                                      test_stream());
            }
          }
        }
      }
    }
  }
}

// Several blocks of k, of columns and of rows, and more than one thread's work.
TEST(GemmTest, EqualsReferenceOnLargeShapes) {
  const Shape shapes[] = {{1, 1030, 300}, {3, 700, 513}, {5, 530, 257},  {12, 200, 400}, {13, 300, 260},
                          {30, 129, 515}, {97, 150, 130}, {150, 64, 64}, {65, 257, 300}, {401, 70, 33},  {390, 130, 270}};
  for (const Shape& shape : shapes) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        const DType dtype = transpose_a ? DType::kF32 : DType::kBf16;
        expect_equals_reference(shape, {transpose_a, transpose_b, dtype, transpose_b, !transpose_b},
                                test_stream());
        expect_equals_reference(shape, {transpose_a, transpose_b, DType::kF32},
                                testing::single_thread_stream());
      }
    }
  }
}

// AVX2 machines compute what AVX-512 ones do.
TEST(GemmTest, EveryTargetEqualsReference) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const testing::ScopedTarget chosen(target);
    for (int64_t m = 1; m <= 14; ++m) {
      for (const bool transpose_a : {false, true}) {
        for (const bool transpose_b : {false, true}) {
          const DType dtype = m % 2 == 0 ? DType::kF32 : DType::kBf16;
          expect_equals_reference({m, 75, 37}, {transpose_a, transpose_b, dtype, m % 3 == 0}, test_stream());
        }
      }
    }
    expect_equals_reference({61, 90, 300}, {false, true, DType::kBf16, true}, test_stream());
    expect_equals_reference({61, 90, 300}, {true, false, DType::kF32}, test_stream());
  }
}

TEST(GemmTest, EmptyDimensions) {
  for (const bool transposed : {false, true}) {
    for (const Shape& shape :
         {Shape{0, 5, 3}, Shape{4, 0, 3}, Shape{4, 5, 0}, Shape{0, 0, 0}, Shape{40, 70, 0}}) {
      for (const bool accumulate : {false, true}) {
        expect_equals_reference(shape, {transposed, transposed, DType::kF32, accumulate, true},
                                test_stream());
        expect_equals_reference(shape, {transposed, transposed, DType::kBf16, accumulate, false},
                                test_stream());
      }
    }
  }
}

TEST(GemmTest, BatchIsIndependentProducts) {
  for (const Shape& shape : {Shape{1, 64, 48}, Shape{5, 33, 17}, Shape{70, 40, 90}}) {
    const auto [m, n, k] = shape;
    for (const int64_t batch : {0, 1, 7}) {
      for (const bool transpose_b : {false, true}) {
        TensorPool pool(5);
        // Heads of a token: [m, batch, k] seen as [batch, m, k].
        const Tensor a = pool.random(DType::kF32, {m, batch, k}).transpose01();
        const Tensor b =
            transpose_b ? pool.random(DType::kBf16, {batch, n, k}) : pool.random(DType::kF32, {batch, k, n});
        const Tensor c = pool.output(DType::kF32, {m, batch, n}).transpose01();
        launch(Gemm{.a = a, .b = b, .c = c, .bias = {}, .transpose_b = transpose_b}, test_stream());
        for (int64_t i = 0; i < batch; ++i) {
          const Tensor expected = pool.output(DType::kF32, {m, n});
          reference(Gemm{.a = a[i], .b = b[i], .c = expected, .bias = {}, .transpose_b = transpose_b});
          testing::expect_same_bits(c[i], expected);
        }
        if (transpose_b) {
          const Tensor again = pool.output(DType::kF32, {m, batch, n}).transpose01();
          launch(Gemm{.a = a, .b = b, .c = again, .bias = {}, .transpose_b = true, .b_panels = panels_of(pool, b)},
                 test_stream());
          testing::expect_same_bits(again, c);
        }
        const Tensor whole = pool.output(DType::kF32, {batch, m, n});
        reference(Gemm{.a = a, .b = b, .c = whole, .bias = {}, .transpose_b = transpose_b});
        testing::expect_same_bits(c, whole);
        pool.expect_fences_intact();
      }
    }
  }
}

TEST(GemmTest, RowIgnoresItsNeighbours) {
  TensorPool pool(6);
  const Tensor x = pool.random(DType::kF32, {70, 300});
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Tensor w = pool.random(dtype, {530, 300});
    const Tensor together = pool.output(DType::kF32, {70, 530});
    launch(Gemm{.a = x, .b = w, .c = together, .bias = {}, .transpose_b = true}, test_stream());
    for (const int64_t rows : {1, 3, 8, 13, 33}) {
      for (int64_t t = 0; t + rows <= 70; t += 17) {
        const Tensor alone = pool.output(DType::kF32, {rows, 530});
        launch(Gemm{.a = x.slice(0, t, t + rows), .b = w, .c = alone, .bias = {}, .transpose_b = true},
               testing::single_thread_stream());
        testing::expect_same_bits(alone, together.slice(0, t, t + rows));
      }
    }
  }
}

TEST(GemmTest, NaNStaysInItsRow) {
  TensorPool pool(7);
  const Tensor x = pool.random(DType::kF32, {20, 40});
  const Tensor w = pool.random(DType::kF32, {50, 40});
  const Tensor clean = pool.output(DType::kF32, {20, 50}), spoiled = pool.output(DType::kF32, {20, 50});
  launch(Gemm{.a = x, .b = w, .c = clean, .bias = {}, .transpose_b = true}, test_stream());
  x.row(9)[39] = std::numeric_limits<float>::quiet_NaN();
  launch(Gemm{.a = x, .b = w, .c = spoiled, .bias = {}, .transpose_b = true}, test_stream());
  testing::expect_same_bits(spoiled.slice(0, 0, 9), clean.slice(0, 0, 9));
  testing::expect_same_bits(spoiled.slice(0, 10, 20), clean.slice(0, 10, 20));
  for (int64_t n = 0; n < 50; ++n) EXPECT_NE(spoiled.row(9)[n], spoiled.row(9)[n]);
}

TEST(GemmTest, RefusesByName) {
  TensorPool pool(8);
  const Tensor a = pool.random(DType::kF32, {2, 8}), w = pool.random(DType::kBf16, {3, 8});
  const Tensor c = pool.output(DType::kF32, {2, 3});
  EXPECT_TRUE(validate(Gemm{.a = a, .b = w, .c = c, .bias = {}, .transpose_b = true}).ok());
  EXPECT_EQ(validate(Gemm{.a = a, .b = w, .c = c, .bias = {}}).message(),
            "gemm: b: bf16 [3, 8], expected f32 or bf16 [8, 3]");
  EXPECT_EQ(
      validate(Gemm{.a = a, .b = w, .c = c, .bias = {}, .transpose_a = true, .transpose_b = true}).message(),
      "gemm: a: f32 [2, 8], expected f32 [2, 2]");
  EXPECT_EQ(validate(Gemm{.a = a, .b = w, .c = c, .bias = a.view({16}), .transpose_b = true}).message(),
            "gemm: bias: f32 [16], expected f32 [3]");
  const Tensor panels = pool.random(DType::kBf16, {1, 8, 16}), wrong = pool.random(DType::kBf16, {2, 8, 16});
  const Tensor b = pool.random(DType::kBf16, {8, 3});
  EXPECT_EQ(validate(Gemm{.a = a, .b = b, .c = c, .bias = {}, .b_panels = panels}).message(),
            "gemm: b_panels needs transpose_b");
  EXPECT_EQ(validate(Gemm{.a = a, .b = w, .c = c, .bias = {}, .transpose_b = true, .b_panels = wrong}).message(),
            "gemm: b_panels: bf16 [2, 8, 16], expected bf16 [1, 8, 16]");
  const Tensor a3 = pool.random(DType::kF32, {2, 4, 8}), b3 = pool.random(DType::kF32, {2, 8, 3});
  const Tensor c3 = pool.output(DType::kF32, {2, 4, 3}), bias = pool.random(DType::kF32, {3});
  EXPECT_EQ(validate(Gemm{.a = a3, .b = b3, .c = c3, .bias = bias}).message(),
            "gemm: bias must be absent when there is a leading dimension");
  EXPECT_EQ(validate(Gemm{.a = a3.slice(0, 0, 1), .b = b3, .c = c3, .bias = {}}).message(),
            "gemm: a: f32 [1, 4, 8], expected f32 [2, *, *]");
}

}  // namespace
}  // namespace slipstream::kernels
