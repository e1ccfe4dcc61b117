// Goal: on CUDA an expert's rows are multiplied by its weights: bits of reference() in f32, near it in bf16; a row ignores the
// others, bit for bit; gradients of weights add up over an expert's rows.
#include "kernels/grouped_gemm/grouped_gemm.h"

#include <numeric>

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
  std::vector<int32_t> counts;  // rows of each expert
  int64_t n, k;
};

class GroupedGemmCudaTest : public testing::CudaTest,
                            public ::testing::WithParamInterface<std::tuple<DType, DType, int>> {
 protected:
  // So many experts, of which few have rows: {expert, rows}.
  static std::vector<int32_t> sparse(size_t experts, std::initializer_list<std::pair<size_t, int32_t>> used) {
    std::vector<int32_t> counts(experts, 0);
    for (const auto& [expert, rows] : used) counts[expert] = rows;
    return counts;
  }
  static const Case& case_of(int i) {
    static const std::vector<Case> cases = {{{0, 0}, 8, 8}, {{1}, 5, 7}, {{3, 0, 65, 1}, 70, 40},
                                            {{130, 2, 0, 0, 40, 300}, 192, 128}, {std::vector<int32_t>(40, 3), 64, 64},
                                            {{300, 0, 77, 520}, 2304, 72}, {{17, 70, 0, 130}, 2048, 512},
                                            {sparse(288, {{3, 1}, {64, 4}, {65, 1}, {287, 2}}), 200, 136},
                                            {sparse(70, {{0, 9}, {33, 1}, {69, 6}}), 72, 1032}};
    return cases[static_cast<size_t>(i)];
  }
};

TEST_P(GroupedGemmCudaTest, EqualsReference) {
  const auto [dtype, weights, index] = GetParam();
  const Case& c = case_of(index);
  TensorPool host(1);
  CudaPool device;
  std::vector<int32_t> begin = {0};
  for (const int32_t count : c.counts) begin.push_back(begin.back() + count);
  const int64_t experts = static_cast<int64_t>(c.counts.size()), rows = begin.back();
  const Tensor row_begin = host.ints({experts + 1}, begin);
  for (const bool transpose : {true, false}) {
    const Tensor x = random_as(host, dtype, {rows, c.k});
    const Tensor w = transpose ? random_as(host, weights, {experts, c.n, c.k}) : random_as(host, weights, {experts, c.k, c.n});
    const GroupedGemm args{.x = device.copy(x, dtype), .w = device.copy(w, weights), .row_begin = device.copy(row_begin),
                           .y = device.output(dtype, {rows, c.n}), .transpose_w = transpose};
    const GroupedGemm expected{.x = x, .w = w, .row_begin = row_begin, .y = host.output(kF32, {rows, c.n}),
                               .transpose_w = transpose};
    launch(args, cuda_stream());
    reference(expected);
    if (dtype == kF32 && weights == kF32) {
      testing::expect_same_bits(testing::on_host(host, args.y), expected.y);
    } else {
      expect_close(args.y, expected.y);
    }
    // Each expert alone, as a product.
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = begin[static_cast<size_t>(e)], end = begin[static_cast<size_t>(e + 1)];
      if (first == end) continue;
      const Tensor alone = device.output(dtype, {1, c.n}), both = device.copy(host.ints({2}, {0, 1}));
      launch(GroupedGemm{.x = args.x.slice(0, end - 1, end), .w = args.w.slice(0, e, e + 1), .row_begin = both,
                         .y = alone, .transpose_w = transpose},
             cuda_stream());
      testing::expect_same_bits_on_device(alone, args.y.slice(0, end - 1, end));
    }
  }

  const Tensor dy = random_as(host, dtype, {rows, c.n}), x = random_as(host, dtype, {rows, c.k});
  const Tensor before = host.random(kF32, {experts, c.n, c.k});
  const GroupedWeightGrad grad{.dy = device.copy(dy, dtype), .x = device.copy(x, dtype),
                               .row_begin = device.copy(row_begin), .dw = device.copy(before)};
  const GroupedWeightGrad expected_grad{.dy = dy, .x = x, .row_begin = row_begin, .dw = host.copy(before)};
  launch(grad, cuda_stream());
  reference(expected_grad);
  expect_close(grad.dw, expected_grad.dw, 2.0f);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, GroupedGemmCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(kF32, kBf16),
                                            ::testing::Range(0, 9)));

}  // namespace
}  // namespace slipstream::kernels
