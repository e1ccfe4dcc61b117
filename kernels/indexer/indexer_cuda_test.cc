// Goal: on CUDA the plain form has the bits of reference() and selects what it selects, for pools, tails,
// ties, NaN, long contexts and ragged, bf16 and empty inputs; on tensor cores scores are close to it and the
// selection is that of the scores that IndexerScores reports; a query's selection ignores batch, cuts and
// workspace; the gradients are close to reference()'s.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/indexer/indexer.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::cuda_stream;
using testing::CudaPool;
using testing::Length;
using testing::TensorPool;

struct Shape {
  std::vector<Length> lengths;
  int64_t heads = 8, width = 16, topk = 8, pool = 1;
  bool tail = false;
  DType dtype = DType::kF32, store = DType::kF32;

  bool on_tensor_cores() const {
    return dtype == DType::kBf16 && store == DType::kBf16 && heads == 32 && width == 128;
  }
};

// Rows that no sequence has reached are NaN: never to be read.
PagedRows make_keys(TensorPool& pool, const Shape& shape) {
  int64_t columns = 1;
  for (const Length& length : shape.lengths)
    columns = std::max(columns, (length.cached + length.fresh) / kPageRows + 1);
  const int64_t count = static_cast<int64_t>(shape.lengths.size());
  const PagedRows keys{.pool = pool.output(shape.store, {count * columns, kPageRows, shape.width}),
                       .page_table = testing::pages_in_turn(pool, count, columns)};
  for (int64_t b = 0; b < count; ++b) {
    const Length& length = shape.lengths[static_cast<size_t>(b)];
    for (int64_t row = 0; row < (length.cached + length.fresh) / shape.pool; ++row) {
      for (int64_t i = 0; i < shape.width; ++i) {
        const float value = 2.0f * pool.uniform() - 1.0f;
        if (shape.store == DType::kBf16) {
          keys.pool.bf()[keys.offset(b, row) + i] = to_bf16(value);
        } else {
          keys.pool.f32()[keys.offset(b, row) + i] = value;
        }
      }
    }
  }
  return keys;
}

IndexerSelect make_select(TensorPool& pool, const Shape& shape) {
  const Sequences sequences = testing::make_sequences(pool, shape.lengths);
  const int64_t rows = sequences.rows();
  int64_t longest = 0;
  for (const Length& length : shape.lengths) longest = std::max(longest, length.cached + length.fresh);
  const int64_t columns = selection_width(shape.topk, shape.pool, shape.tail, longest) + 1;
  return {.q = testing::random_as(pool, shape.dtype, {rows, shape.heads, shape.width}),
          .weights = pool.random(DType::kF32, {rows, shape.heads}),
          .keys = make_keys(pool, shape),
          .sequences = sequences,
          .topk = shape.topk,
          .pool = shape.pool,
          .tail = shape.tail,
          .key_scale = 1.0f / std::sqrt(static_cast<float>(shape.width)),
          .indices = pool.output(DType::kI32, {rows, columns}),
          .counts = pool.output(DType::kI32, {rows})};
}

IndexerSelect on_cuda(CudaPool& device, const IndexerSelect& host, DType dtype) {
  IndexerSelect args = host;
  args.q = device.copy(host.q, dtype);
  args.weights = device.copy(host.weights);
  args.keys = device.copy(host.keys);
  args.sequences = device.copy(host.sequences);
  args.indices = device.output(DType::kI32, {host.indices.size(0), host.indices.size(1)});
  args.counts = device.output(DType::kI32, {host.counts.size(0)});
  return args;
}

// The scores of rows 0 .. most-1 for every query, by IndexerScores on the device.
Tensor all_scores(TensorPool& pool, CudaPool& device, const IndexerSelect& on_device, int64_t most) {
  const int64_t tokens = on_device.q.size(0);
  const Tensor rows = pool.zeros(DType::kI32, {tokens, most});
  const Sequences& sequences = on_device.sequences;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int64_t limit =
        (sequences.cached_tokens(b) + sequences.end(b) - sequences.begin(b)) / on_device.pool;
    for (int64_t t = sequences.begin(b); t < sequences.end(b); ++t) {
      for (int64_t i = 0; i < most; ++i) rows.i32()[t * most + i] = static_cast<int32_t>(i < limit ? i : -1);
    }
  }
  const IndexerScores scores{.q = on_device.q,
                             .weights = on_device.weights,
                             .keys = on_device.keys,
                             .sequences = sequences,
                             .pool = on_device.pool,
                             .key_scale = on_device.key_scale,
                             .rows = device.copy(rows),
                             .scores = device.output(DType::kF32, {tokens, most})};
  launch(scores, cuda_stream());
  return testing::on_host(pool, scores.scores);
}

// What reference() selects of these scores.
void select_by_scores(const IndexerSelect& host, const Tensor& scores) {
  const Sequences& sequences = host.sequences;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    for (int64_t t = sequences.begin(b); t < sequences.end(b); ++t) {
      const int64_t position = sequences.cached_tokens(b) + t - sequences.begin(b);
      const int64_t candidates = (position + 1) / host.pool;
      std::vector<int64_t> chosen(static_cast<size_t>(candidates));
      std::iota(chosen.begin(), chosen.end(), 0);
      if (candidates > host.topk / host.pool) {
        std::stable_sort(chosen.begin(), chosen.end(),
                         [&](int64_t i, int64_t j) { return scores.row(t)[i] > scores.row(t)[j]; });
        chosen.resize(static_cast<size_t>(host.topk / host.pool));
        std::sort(chosen.begin(), chosen.end());
      }
      std::vector<int32_t> selection;
      for (const int64_t row : chosen) {
        for (int64_t r = 0; r < host.pool; ++r)
          selection.push_back(static_cast<int32_t>(row * host.pool + r));
      }
      for (int64_t s = candidates * host.pool; host.tail && s <= position; ++s)
        selection.push_back(static_cast<int32_t>(s));
      host.counts.i32()[t] = static_cast<int32_t>(selection.size());
      selection.resize(static_cast<size_t>(host.indices.size(1)), -1);
      std::copy(selection.begin(), selection.end(), host.indices.i32() + t * host.indices.stride(0));
    }
  }
}

const Shape kShapes[] = {
    {.lengths = {}},
    {.lengths = {{0, 0}}},
    {.lengths = {{0, 1}}},
    {.lengths = {{0, 7}, {5, 0}, {0, 200}, {63, 2}}},
    {.lengths = {{0, 70}, {130, 33}}, .heads = 13, .width = 17, .topk = 5},
    {.lengths = {{300, 1}, {0, 90}}, .heads = 1, .width = 1, .topk = 1},
    {.lengths = {{40, 50}, {3, 1}}, .width = 6, .topk = 16, .pool = 2, .tail = true, .store = DType::kBf16},
    {.lengths = {{0, 50}, {33, 1}, {400, 9}}, .topk = 16, .pool = 4, .tail = true, .dtype = DType::kBf16},
    {.lengths = {{0, 50}, {33, 1}, {400, 9}}, .topk = 16, .pool = 4},
    {.lengths = {{1000, 60}}, .topk = 15, .pool = 5, .tail = true},
    {.lengths = {{5000, 1}, {9, 3}, {3000, 40}}, .topk = 100},
    {.lengths = {{9000, 2}},
     .topk = 64,
     .pool = 4,
     .tail = true,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
    {.lengths = {{0, 300}, {200, 1}},
     .heads = 32,
     .width = 128,
     .topk = 64,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
    {.lengths = {{700, 30}, {4000, 1}, {2, 3}},
     .heads = 32,
     .width = 128,
     .topk = 256,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
    {.lengths = {{701, 30}, {4000, 1}, {2, 3}},
     .heads = 32,
     .width = 128,
     .topk = 64,
     .pool = 4,
     .tail = true,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
    {.lengths = {{701, 30}, {2, 3}},
     .heads = 16,
     .width = 64,
     .topk = 64,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
    {.lengths = {{5000, 1}, {63, 1}, {3000, 1}, {0, 1}, {127, 0}},
     .heads = 32,
     .width = 128,
     .topk = 64,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
    {.lengths = {{20000, 3}},
     .heads = 32,
     .width = 128,
     .topk = 2048,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
    {.lengths = {{70000, 1}},
     .heads = 32,
     .width = 128,
     .topk = 2048,
     .dtype = DType::kBf16,
     .store = DType::kBf16},
};

class IndexerCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<size_t> {};

TEST_P(IndexerCudaTest, SelectsWhatReferenceSelects) {
  const Shape& shape = kShapes[GetParam()];
  TensorPool pool(1);
  CudaPool device;
  const IndexerSelect host = make_select(pool, shape);
  const IndexerSelect args = on_cuda(device, host, shape.dtype);
  launch(args, cuda_stream());
  if (shape.on_tensor_cores()) {
    int64_t most = 1;
    for (const Length& length : shape.lengths)
      most = std::max(most, (length.cached + length.fresh) / shape.pool);
    select_by_scores(host, all_scores(pool, device, args, most));
  } else {
    reference(host);
  }
  testing::expect_same_bits(testing::on_host(pool, args.indices), host.indices);
  testing::expect_same_bits(testing::on_host(pool, args.counts), host.counts);
  // Less workspace, more rounds.
  const IndexerSelect again = on_cuda(device, host, shape.dtype);
  const ArenaScope scope(cuda_stream().workspace());
  const int64_t left = cuda_stream().workspace().capacity() - cuda_stream().workspace().used();
  cuda_stream().workspace().alloc(DType::kF8E4M3,
                                  {left - 4096 - 40 * host.keys.page_table.numel() * kPageRows * 4});
  launch(again, cuda_stream());
  testing::expect_same_bits_on_device(again.indices, args.indices);
  device.expect_fences_intact();
}

TEST_P(IndexerCudaTest, ScoresAndGradientsEqualReference) {
  Shape shape = kShapes[GetParam()];
  for (Length& length : shape.lengths) length = {0, std::min<int64_t>(length.cached + length.fresh, 150)};
  TensorPool pool(10);
  CudaPool device;
  const IndexerSelect select = make_select(pool, shape);
  const Sequences& sequences = select.sequences;
  const int64_t tokens = select.q.size(0), asked = 37;
  const Tensor rows = pool.zeros(DType::kI32, {tokens, asked});
  int64_t keys = 0;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int64_t limit = (sequences.end(b) - sequences.begin(b)) / shape.pool;
    keys += limit;
    for (int64_t i = sequences.begin(b) * asked; i < sequences.end(b) * asked; ++i) {
      rows.i32()[i] = static_cast<int32_t>(pool.uniform() * static_cast<float>(limit + 1)) - 1;
    }
  }
  const IndexerScores expected{.q = select.q,
                               .weights = select.weights,
                               .keys = select.keys,
                               .sequences = sequences,
                               .pool = shape.pool,
                               .key_scale = select.key_scale,
                               .rows = rows,
                               .scores = pool.output(DType::kF32, {tokens, asked})};
  reference(expected);
  IndexerScores args = expected;
  const IndexerSelect inputs = on_cuda(device, select, shape.dtype);
  args.q = inputs.q;
  args.weights = inputs.weights;
  args.keys = inputs.keys;
  args.sequences = inputs.sequences;
  args.rows = device.copy(rows);
  args.scores = device.output(DType::kF32, {tokens, asked});
  launch(args, cuda_stream());
  if (shape.on_tensor_cores()) {
    testing::expect_close(args.scores, expected.scores);  // other order of sums, the same products
  } else {
    testing::expect_same_bits(testing::on_host(pool, args.scores), expected.scores);
  }

  const int64_t heads = shape.heads, width = shape.width;
  const IndexerScoresBackward expected_backward{.q = select.q,
                                                .weights = select.weights,
                                                .keys = select.keys,
                                                .sequences = sequences,
                                                .pool = shape.pool,
                                                .key_scale = select.key_scale,
                                                .rows = rows,
                                                .dscores = pool.random(DType::kF32, {tokens, asked}),
                                                .dq = pool.output(DType::kF32, {tokens, heads, width}),
                                                .dweights = pool.output(DType::kF32, {tokens, heads}),
                                                .dkeys = pool.output(DType::kF32, {keys, width})};
  reference(expected_backward);
  const auto on_device = [&] {
    IndexerScoresBackward backward = expected_backward;
    backward.q = args.q;
    backward.weights = args.weights;
    backward.keys = args.keys;
    backward.sequences = args.sequences;
    backward.rows = args.rows;
    backward.dscores = device.copy(expected_backward.dscores);
    backward.dq = device.output(shape.dtype, {tokens, heads, width});
    backward.dweights = device.output(DType::kF32, {tokens, heads});
    backward.dkeys = device.output(shape.dtype, {keys, width});
    return backward;
  };
  const IndexerScoresBackward backward = on_device(), again = on_device();
  launch(backward, cuda_stream());
  testing::expect_close(backward.dq, expected_backward.dq);
  testing::expect_close(backward.dweights, expected_backward.dweights);
  testing::expect_close(backward.dkeys, expected_backward.dkeys);
  const ArenaScope scope(cuda_stream().workspace());
  const int64_t left = cuda_stream().workspace().capacity() - cuda_stream().workspace().used();
  cuda_stream().workspace().alloc(DType::kF8E4M3, {left - keys * width * 4 - 8192 - 13 * heads * asked * 4});
  launch(again, cuda_stream());
  testing::expect_same_bits_on_device(again.dq, backward.dq);
  testing::expect_same_bits_on_device(again.dkeys, backward.dkeys);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, IndexerCudaTest, ::testing::Range(size_t{0}, std::size(kShapes)));

class IndexerCudaBits : public testing::CudaTest {};

TEST_F(IndexerCudaBits, EqualScoresGoToTheLowerPosition) {
  for (const Length length : {Length{0, 200}, Length{4500, 1}}) {
    TensorPool pool(2);
    CudaPool device;
    const IndexerSelect host = make_select(pool, {.lengths = {length}, .heads = 4, .width = 4, .topk = 24});
    for (const Tensor& t : {host.q, host.weights, host.keys.pool}) {
      for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = std::round(2.0f * pool.uniform() - 1.0f);
    }
    const IndexerSelect args = on_cuda(device, host, DType::kF32);
    launch(args, cuda_stream());
    reference(host);
    testing::expect_same_bits(testing::on_host(pool, args.indices), host.indices);
  }
}

TEST_F(IndexerCudaBits, NanComesLastAndMinusZeroIsZero) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  const auto select = [&](const std::vector<float>& keys, int64_t topk, float weight = 1.0f) {
    TensorPool pool(4);
    CudaPool device;
    const int64_t count = static_cast<int64_t>(keys.size());
    const IndexerSelect host =
        make_select(pool, {.lengths = {{count - 1, 1}}, .heads = 1, .width = 1, .topk = topk});
    host.q.row(0)[0] = 1.0f;
    host.weights.row(0)[0] = weight;
    for (int64_t i = 0; i < count; ++i)
      host.keys.pool.f32()[host.keys.offset(0, i)] = keys[static_cast<size_t>(i)];
    const IndexerSelect args = on_cuda(device, host, DType::kF32);
    launch(args, cuda_stream());
    const Tensor indices = testing::on_host(pool, args.indices);
    return std::vector<int32_t>(indices.i32(), indices.i32() + topk);
  };
  using Rows = std::vector<int32_t>;
  EXPECT_EQ(select({kNan, 1, -kNan, -1, kInf, 3}, 3), (Rows{1, 4, 5}));
  EXPECT_EQ(select({kNan, 1, -kNan, -1, kInf, 3}, 4), (Rows{1, 3, 4, 5}));
  EXPECT_EQ(select({kNan, 1, -kNan, -1, kInf, 3}, 5), (Rows{0, 1, 3, 4, 5}));
  EXPECT_EQ(select({kNan, kInf, 2, 1}, 2, -1.0f), (Rows{2, 3}));
  EXPECT_EQ(select({1e-30f, 0, 1e-30f, -1}, 2, -1e-30f), (Rows{0, 1}));
  EXPECT_EQ(select({0, 1e-30f, 1, 1e-30f, 0}, 3, -1e-30f), (Rows{0, 1, 3}));
}

// More scores that are equal, or nearly so, than a block lists in shared memory.
TEST_F(IndexerCudaBits, BunchedScoresAreSettledByFurtherDigits) {
  for (const int64_t count : {9000, 30000}) {
    for (const int bits : {0, 4, 14}) {  // of the score's last sixteen or so, at random
      TensorPool pool(5);
      CudaPool device;
      const IndexerSelect host = make_select(
          pool, {.lengths = {{count - 1, 1}}, .heads = 1, .width = 1, .topk = 2048, .store = DType::kF32});
      host.q.row(0)[0] = 1.0f;
      host.weights.row(0)[0] = 1.0f;
      for (int64_t i = 0; i < count; ++i) {
        const float step = std::floor(pool.uniform() * static_cast<float>(1 << bits));
        host.keys.pool.f32()[host.keys.offset(0, i)] = 1.0f + step * 0x1p-23f;
      }
      const IndexerSelect args = on_cuda(device, host, DType::kF32);
      launch(args, cuda_stream());
      reference(host);
      testing::expect_same_bits(testing::on_host(pool, args.indices), host.indices);
    }
  }
}

// A table for two million keys, of which few exist, as a graph of decode steps has it.
TEST_F(IndexerCudaBits, IgnoresTheWidthOfTheTable) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    TensorPool pool(6);
    CudaPool device;
    const Shape shape{.lengths = {{3000, 1}, {600, 2}},
                      .heads = 32,
                      .width = 128,
                      .topk = 64,
                      .dtype = dtype,
                      .store = dtype};
    const IndexerSelect host = make_select(pool, shape);
    const IndexerSelect args = on_cuda(device, host, dtype);
    launch(args, cuda_stream());
    constexpr int64_t kPages = 30000;
    const int64_t pages = host.keys.page_table.size(1);
    const Tensor wide = pool.ints({2, kPages}, std::vector<int32_t>(2 * kPages, -1));
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < pages; ++i)
        wide.i32()[b * kPages + i] = host.keys.page_table.i32()[b * pages + i];
    }
    IndexerSelect again = on_cuda(device, host, dtype);
    again.keys = args.keys;
    again.q = args.q;
    again.weights = args.weights;
    again.keys.page_table = device.copy(wide);
    launch(again, cuda_stream());
    testing::expect_same_bits_on_device(again.indices, args.indices);
    testing::expect_same_bits_on_device(again.counts, args.counts);
  }
}

// A query alone, with everything before it cached, selects what it selects in a whole prefill.
TEST_F(IndexerCudaBits, IgnoresBatchAndCuts) {
  const Shape shapes[] = {{.lengths = {{0, 150}, {40, 77}}, .topk = 24, .pool = 1, .tail = true},
                          {.lengths = {{0, 600}, {40, 77}},
                           .heads = 32,
                           .width = 128,
                           .topk = 64,
                           .pool = 1,
                           .dtype = DType::kBf16,
                           .store = DType::kBf16},
                          {.lengths = {{0, 600}, {40, 77}},
                           .heads = 32,
                           .width = 128,
                           .topk = 64,
                           .pool = 4,
                           .tail = true,
                           .dtype = DType::kBf16,
                           .store = DType::kBf16}};
  for (const Shape& shape : shapes) {
    TensorPool pool(7);
    CudaPool device;
    const IndexerSelect whole = on_cuda(device, make_select(pool, shape), shape.dtype);
    launch(whole, cuda_stream());
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = whole.sequences.begin(b); t < whole.sequences.end(b); t += 7) {
        IndexerSelect alone = whole;
        const int64_t cached = whole.sequences.cached_tokens(b) + t - whole.sequences.begin(b);
        alone.sequences = device.copy(testing::make_sequences(pool, {{cached, 1}}));
        alone.q = whole.q.slice(0, t, t + 1);
        alone.weights = whole.weights.slice(0, t, t + 1);
        alone.keys.page_table = whole.keys.page_table.slice(0, b, b + 1);
        alone.indices = device.output(DType::kI32, {1, whole.indices.size(1)});
        alone.counts = device.output(DType::kI32, {1});
        launch(alone, cuda_stream());
        testing::expect_same_bits_on_device(alone.indices, whole.indices.slice(0, t, t + 1));
      }
    }
  }
}

}  // namespace
}  // namespace slipstream::kernels
