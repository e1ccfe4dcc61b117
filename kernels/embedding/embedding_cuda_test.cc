// Goal: on CUDA rows are looked up, and gradients of repeated tokens are summed in their order: the bits of reference().
#include "kernels/embedding/embedding.h"

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class EmbeddingCudaTest : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<DType, DType, int64_t, int64_t>> {};

TEST_P(EmbeddingCudaTest, EqualsReference) {
  const auto [weights, dtype, tokens, hidden] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const int64_t vocab = 19;  // repeats
  const Tensor ids = host.random_ints({tokens}, 0, static_cast<int32_t>(vocab));
  const Tensor table = random_as(host, kBf16, {vocab, hidden});  // exact in every dtype
  const Embedding args{.ids = device.copy(ids), .table = device.copy(table, weights),
                       .y = device.output(dtype, {tokens, hidden})};
  const Embedding expected{.ids = ids, .table = table, .y = host.output(kF32, {tokens, hidden})};
  launch(args, cuda_stream());
  reference(expected);
  testing::expect_same_bits(testing::on_host(host, args.y), expected.y);

  const Tensor dy = random_as(host, dtype, {tokens, hidden}), before = host.random(kF32, {vocab, hidden});
  const EmbeddingBackward backward{.ids = args.ids, .dy = device.copy(dy, dtype), .dtable = device.copy(before)};
  const EmbeddingBackward expected_backward{.ids = ids, .dy = dy, .dtable = host.copy(before)};
  launch(backward, cuda_stream());
  reference(expected_backward);
  testing::expect_same_bits(testing::on_host(host, backward.dtable), expected_backward.dtable);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, EmbeddingCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(kF32, kBf16),
                                            ::testing::Values(0, 1, 700), ::testing::Values(1, 40, 130)));

}  // namespace
}  // namespace slipstream::kernels
