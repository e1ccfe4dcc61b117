// Goal: on CUDA launch() is reference() within tolerance, forward and backward, for ragged, paged, selected,
// empty, odd and real shapes in f32 and bf16; a token's bits do not depend on how its sequence is cut into
// calls, on its neighbours, on the pages, on the workspace, or on whether its prefix is given by absent or
// explicit indices; a store of fp8 latents gives the bits of one that holds their values, whether rows are restored one by
// one or pages first; NaN stays with those who see it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/sparse_mla/sparse_mla.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::cuda_stream;
using testing::CudaPool;
using testing::Piece;
using testing::TensorPool;

struct Shape {
  int64_t heads, rank, rope;
  std::vector<int64_t> lengths;
  int64_t topk;
  int64_t width() const { return rank + rope; }
};

// Whole sequences with all their keys, on the host; values that `dtype` holds exactly.
struct World {
  World(TensorPool& pool, const Shape& sizes, DType activations, DType store)
      : shape(sizes), dtype(activations), store_dtype(store) {
    tokens = std::accumulate(shape.lengths.begin(), shape.lengths.end(), int64_t{0});
    q = testing::random_as(pool, dtype, {tokens, shape.heads, shape.width()});
    rows = pool.random(store_dtype, {tokens, shape.width()});
    if (shape.topk == 0) return;
    indices = pool.zeros(DType::kI32, {tokens, shape.topk});
    counts = pool.zeros(DType::kI32, {tokens});
    for (size_t b = 0; b < shape.lengths.size(); ++b) {
      for (int64_t t = 0; t < shape.lengths[b]; ++t) {
        const int64_t row = testing::first_row(shape.lengths, static_cast<int64_t>(b)) + t;
        int32_t& count = counts.i32()[row];
        if (t % 11 == 10) continue;  // sees nothing
        for (int64_t s = 0; s <= t && count < shape.topk; ++s) {
          if (pool.uniform() * static_cast<float>(t + 1) <= static_cast<float>(shape.topk)) {
            indices.i32()[row * shape.topk + count++] = static_cast<int32_t>(s);
          }
        }
      }
    }
  }

  // A call on the host, for reference().
  SparseMla call(TensorPool& pool, const std::vector<Piece>& pieces, uint64_t seed) const {
    SparseMla call;
    call.sequences = testing::sequences_of_pieces(pool, pieces);
    const int64_t rows_of_call = call.sequences.rows();
    call.q = pool.output(DType::kF32, {rows_of_call, shape.heads, shape.width()});
    testing::copy_pieces(q, shape.lengths, pieces, call.q);
    call.keys = testing::store_pieces(pool, rows, shape.lengths, pieces, seed);
    if (shape.topk > 0) {
      call.indices = pool.output(DType::kI32, {rows_of_call, shape.topk});
      call.counts = pool.output(DType::kI32, {rows_of_call});
      int64_t row = 0;
      for (const Piece& piece : pieces) {
        const int64_t from = testing::first_row(shape.lengths, piece.sequence) + piece.begin;
        const int64_t count = piece.end - piece.begin;
        std::copy_n(indices.i32() + from * shape.topk, count * shape.topk,
                    call.indices.i32() + row * shape.topk);
        std::copy_n(counts.i32() + from, count, call.counts.i32() + row);
        row += count;
      }
    }
    call.scale = 2.0f / std::sqrt(static_cast<float>(shape.width()));
    call.o = pool.output(DType::kF32, {rows_of_call, shape.heads, shape.rank});
    call.lse = pool.output(DType::kF32, {rows_of_call, shape.heads});
    return call;
  }

  Shape shape;
  DType dtype, store_dtype;
  int64_t tokens = 0;
  Tensor q, rows, indices, counts;
};

// The same call on the device with fresh outputs.
SparseMla on_cuda(CudaPool& device, const SparseMla& host, DType dtype) {
  SparseMla call = host;
  call.q = device.copy(host.q, dtype);
  call.keys = device.copy(host.keys);
  call.sequences = device.copy(host.sequences);
  call.indices = device.copy(host.indices);
  call.counts = device.copy(host.counts);
  call.o = device.output(dtype, {host.o.size(0), host.o.size(1), host.o.size(2)});
  call.lse = device.output(DType::kF32, {host.lse.size(0), host.lse.size(1)});
  return call;
}

// -infinity is where it should be; the rest is close.
void expect_close_lse(const Tensor& actual, const Tensor& expected, DType dtype) {
  TensorPool pool(1);
  const Tensor a = testing::on_host(pool, actual);
  const float tolerance = dtype == DType::kBf16 ? 2e-3f : 1e-5f;
  for (int64_t i = 0; i < expected.numel(); ++i) {
    const float x = a.f32()[i], y = expected.f32()[i];
    ASSERT_TRUE(x == y || std::abs(x - y) <= tolerance * (1.0f + std::abs(y)))
        << i << ": " << x << ", expected " << y;
  }
}

void expect_same_tokens(const SparseMla& call, const World& world, const std::vector<Piece>& pieces,
                        const SparseMla& all) {
  TensorPool pool(1);
  testing::expect_same_tokens(testing::bits_on_host(pool, call.o), world.shape.lengths, pieces,
                              testing::bits_on_host(pool, all.o));
  testing::expect_same_tokens(testing::bits_on_host(pool, call.lse), world.shape.lengths, pieces,
                              testing::bits_on_host(pool, all.lse));
}

const Shape kShapes[] = {
    {.heads = 1, .rank = 1, .rope = 0, .lengths = {3, 90}, .topk = 0},
    {.heads = 3, .rank = 24, .rope = 8, .lengths = {3, 150, 1, 90}, .topk = 24},
    {.heads = 13, .rank = 48, .rope = 16, .lengths = {70, 0, 140}, .topk = 0},
    {.heads = 5, .rank = 33, .rope = 6, .lengths = {150}, .topk = 24},
    {.heads = 20, .rank = 512, .rope = 64, .lengths = {66, 5}, .topk = 0},  // GLM-4.7-Flash
    {.heads = 64, .rank = 512, .rope = 64, .lengths = {80}, .topk = 70},    // GLM-5
    {.heads = 64, .rank = 512, .rope = 0, .lengths = {66, 5}, .topk = 0},   // Flash
    {.heads = 33, .rank = 512, .rope = 64, .lengths = {1, 190, 30}, .topk = 150},
    {.heads = 100, .rank = 20, .rope = 4, .lengths = {40}, .topk = 8},
    {.heads = 2, .rank = 8, .rope = 0, .lengths = {}, .topk = 0},
};

class SparseMlaCudaTest : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<size_t, DType, DType>> {};

TEST_P(SparseMlaCudaTest, EqualsReference) {
  const auto [index, dtype, store] = GetParam();
  const Shape& shape = kShapes[index];
  TensorPool pool(1);
  CudaPool device;
  const World world(pool, shape, dtype, store);
  const SparseMla expected = world.call(pool, testing::whole_sequences(shape.lengths), 2);
  const SparseMla call = on_cuda(device, expected, dtype);
  launch(call, cuda_stream());
  reference(expected);
  testing::expect_close(call.o, expected.o);
  expect_close_lse(call.lse, expected.lse, dtype);
  const SparseMla again = on_cuda(device, expected, dtype);
  launch(again, cuda_stream());
  testing::expect_same_bits_on_device(again.o, call.o);
  testing::expect_same_bits_on_device(again.lse, call.lse);
  device.expect_fences_intact();
}

TEST_P(SparseMlaCudaTest, BackwardEqualsReference) {
  const auto [index, dtype, store] = GetParam();
  const Shape& shape = kShapes[index];
  TensorPool pool(2);
  CudaPool device;
  const World world(pool, shape, dtype, store);
  const SparseMla forward = world.call(pool, testing::whole_sequences(shape.lengths), 3);
  reference(forward);
  const int64_t tokens = world.tokens, heads = shape.heads;
  const Tensor d_o = testing::random_as(pool, dtype, {tokens, heads, shape.rank});
  if (dtype == DType::kBf16) {  // o as the activations' dtype holds it
    for (int64_t i = 0; i < forward.o.numel(); ++i) forward.o.f32()[i] = to_f32(to_bf16(forward.o.f32()[i]));
  }
  const SparseMlaBackward expected{.q = forward.q,
                                   .keys = forward.keys,
                                   .sequences = forward.sequences,
                                   .indices = forward.indices,
                                   .counts = forward.counts,
                                   .scale = forward.scale,
                                   .o = forward.o,
                                   .lse = forward.lse,
                                   .d_o = d_o,
                                   .dq = pool.output(DType::kF32, {tokens, heads, shape.width()}),
                                   .dkeys = pool.output(DType::kF32, {tokens, shape.width()})};
  reference(expected);
  const auto on_device = [&] {
    const SparseMla call = on_cuda(device, forward, dtype);
    return SparseMlaBackward{.q = call.q,
                             .keys = call.keys,
                             .sequences = call.sequences,
                             .indices = call.indices,
                             .counts = call.counts,
                             .scale = call.scale,
                             .o = device.copy(forward.o, dtype),
                             .lse = device.copy(forward.lse),
                             .d_o = device.copy(d_o, dtype),
                             .dq = device.output(dtype, {tokens, heads, shape.width()}),
                             .dkeys = device.output(dtype, {tokens, shape.width()})};
  };
  const SparseMlaBackward args = on_device(), again = on_device();
  launch(args, cuda_stream());
  testing::expect_close(args.dq, expected.dq, 2.0f);
  testing::expect_close(args.dkeys, expected.dkeys, 2.0f);
  // Less workspace, more rounds.
  const ArenaScope scope(cuda_stream().workspace());
  const int64_t sums = tokens * shape.width() * 4, row = 2 * heads * std::max<int64_t>(shape.topk, 150) * 4;
  const int64_t left = cuda_stream().workspace().capacity() - cuda_stream().workspace().used();
  cuda_stream().workspace().alloc(DType::kF8E4M3, {left - sums - 8192 - 17 * row});
  launch(again, cuda_stream());
  testing::expect_same_bits_on_device(again.dq, args.dq);
  testing::expect_same_bits_on_device(again.dkeys, args.dkeys);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, SparseMlaCudaTest,
                         ::testing::Combine(::testing::Range(size_t{0}, std::size(kShapes)),
                                            ::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

class SparseMlaCudaBits : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<int, DType>> {};

// One sequence beyond several softmax blocks, whole, in pieces, in batches and one by one.
TEST_P(SparseMlaCudaBits, CutsDoNotChangeBits) {
  const auto [kind, dtype] = GetParam();
  const Shape shapes[] = {{.heads = 3, .rank = 24, .rope = 8, .lengths = {131, 70, 2}, .topk = 0},
                          {.heads = 3, .rank = 24, .rope = 8, .lengths = {131, 70, 2}, .topk = 24},
                          {.heads = 64, .rank = 512, .rope = 64, .lengths = {131, 70, 2}, .topk = 100},
                          {.heads = 20, .rank = 512, .rope = 64, .lengths = {131, 70, 2}, .topk = 0}};
  TensorPool pool(3);
  CudaPool device;
  const World world(pool, shapes[kind], dtype, dtype);
  const SparseMla all =
      on_cuda(device, world.call(pool, testing::whole_sequences(world.shape.lengths), 1), dtype);
  launch(all, cuda_stream());
  const std::vector<std::vector<Piece>> calls{{{0, 0, 64}},
                                              {{0, 64, 100}, {1, 0, 1}},
                                              {{1, 1, 70}, {0, 100, 131}, {2, 0, 2}},
                                              {{2, 2, 2}, {1, 69, 70}},
                                              {{1, 0, 70}, {2, 0, 2}, {0, 0, 131}}};
  for (const std::vector<Piece>& pieces : calls) {
    const SparseMla call = on_cuda(device, world.call(pool, pieces, 3), dtype);
    launch(call, cuda_stream());
    expect_same_tokens(call, world, pieces, all);
  }
  for (int64_t t = 0; t < 131; t += 5) {
    const std::vector<Piece> pieces{{0, t, t + 1},
                                    {1, std::min<int64_t>(t, 69), std::min<int64_t>(t, 69) + 1}};
    const SparseMla call = on_cuda(device, world.call(pool, pieces, static_cast<uint64_t>(t)), dtype);
    launch(call, cuda_stream());
    expect_same_tokens(call, world, pieces, all);
  }
  device.expect_fences_intact();
}

TEST_P(SparseMlaCudaBits, ExplicitPrefixHasTheBitsOfAbsentIndices) {
  const auto [kind, dtype] = GetParam();
  TensorPool pool(5);
  CudaPool device;
  const int64_t heads[] = {3, 17, 64, 100};
  const World world(pool, {.heads = heads[kind], .rank = 64, .rope = 8, .lengths = {150, 9}, .topk = 0},
                    dtype, dtype);
  SparseMla host = world.call(pool, testing::whole_sequences(world.shape.lengths), 1);
  const SparseMla absent = on_cuda(device, host, dtype);
  launch(absent, cuda_stream());
  host.indices = pool.zeros(DType::kI32, {world.tokens, 150});
  host.counts = pool.zeros(DType::kI32, {world.tokens});
  for (int64_t row = 0; row < world.tokens; ++row) {
    std::iota(host.indices.i32() + row * 150, host.indices.i32() + row * 150 + 150, 0);
    host.counts.i32()[row] = static_cast<int32_t>(row < 150 ? row + 1 : row - 149);
  }
  const SparseMla present = on_cuda(device, host, dtype);
  launch(present, cuda_stream());
  testing::expect_same_bits_on_device(present.o, absent.o);
  testing::expect_same_bits_on_device(present.lse, absent.lse);
}

TEST_P(SparseMlaCudaBits, NanStaysWithTheQueriesThatSeeIt) {
  const auto [kind, dtype] = GetParam();
  TensorPool pool(6);
  CudaPool device;
  const int64_t heads[] = {3, 17, 64, 100};
  const World world(pool, {.heads = heads[kind], .rank = 64, .rope = 8, .lengths = {40, 30}, .topk = 0},
                    dtype, dtype);
  const SparseMla host = world.call(pool, testing::whole_sequences(world.shape.lengths), 1);
  const SparseMla clean = on_cuda(device, host, dtype);
  launch(clean, cuda_stream());
  const int64_t at = host.keys.offset(0, 20);
  if (dtype == DType::kBf16) {
    host.keys.pool.bf()[at] = bf16{0x7fc0};
  } else {
    host.keys.pool.f32()[at] = std::numeric_limits<float>::quiet_NaN();
  }
  host.q.row(7)[0] = std::numeric_limits<float>::quiet_NaN();
  const SparseMla dirty = on_cuda(device, host, dtype);
  launch(dirty, cuda_stream());
  const std::pair<int64_t, int64_t> untouched[] = {{0, 7}, {8, 20}, {40, 70}};
  for (const auto& [begin, end] : untouched) {
    testing::expect_same_bits_on_device(dirty.o.slice(0, begin, end), clean.o.slice(0, begin, end));
  }
  EXPECT_TRUE(std::isnan(testing::on_host(pool, dirty.o).row(20)[0]));
}

// A sequence's gradients have the same bits alone and among others, and in rounds of any size.
TEST_P(SparseMlaCudaBits, GradientsDoNotDependOnTheBatch) {
  const auto [kind, dtype] = GetParam();
  const Shape shapes[] = {{.heads = 3, .rank = 24, .rope = 8, .lengths = {131, 70, 2}, .topk = 24},
                          {.heads = 64, .rank = 512, .rope = 64, .lengths = {131, 70, 2, 300}, .topk = 100},
                          {.heads = 64, .rank = 512, .rope = 0, .lengths = {131, 70, 2}, .topk = 0},
                          {.heads = 20, .rank = 512, .rope = 64, .lengths = {131, 70, 2}, .topk = 0}};
  const Shape& shape = shapes[kind];
  TensorPool pool(7);
  CudaPool device;
  const World world(pool, shape, dtype, dtype);
  const Tensor d_o = testing::random_as(pool, dtype, {world.tokens, shape.heads, shape.rank});
  const auto gradients = [&](const std::vector<Piece>& pieces, int64_t begin, int64_t end) {
    const SparseMla call = on_cuda(device, world.call(pool, pieces, static_cast<uint64_t>(begin)), dtype);
    launch(call, cuda_stream());
    const SparseMlaBackward args{.q = call.q,
                                 .keys = call.keys,
                                 .sequences = call.sequences,
                                 .indices = call.indices,
                                 .counts = call.counts,
                                 .scale = call.scale,
                                 .o = call.o,
                                 .lse = call.lse,
                                 .d_o = device.copy(d_o.slice(0, begin, end), dtype),
                                 .dq = device.output(dtype, {end - begin, shape.heads, shape.width()}),
                                 .dkeys = device.output(dtype, {end - begin, shape.width()})};
    launch(args, cuda_stream());
    return args;
  };
  const SparseMlaBackward all = gradients(testing::whole_sequences(shape.lengths), 0, world.tokens);
  for (size_t b = 0; b < shape.lengths.size(); ++b) {
    const int64_t begin = testing::first_row(shape.lengths, static_cast<int64_t>(b)), end = begin + shape.lengths[b];
    const SparseMlaBackward alone = gradients({{static_cast<int64_t>(b), 0, shape.lengths[b]}}, begin, end);
    testing::expect_same_bits_on_device(alone.dq, all.dq.slice(0, begin, end));
    testing::expect_same_bits_on_device(alone.dkeys, all.dkeys.slice(0, begin, end));
  }
  device.expect_fences_intact();
}

// Lists of several blocks of keys.
const Shape kLongShapes[] = {
    {.heads = 64, .rank = 512, .rope = 64, .lengths = {390}, .topk = 0},
    {.heads = 64, .rank = 512, .rope = 0, .lengths = {390, 20}, .topk = 330},
    {.heads = 100, .rank = 512, .rope = 64, .lengths = {270}, .topk = 200},
    {.heads = 20, .rank = 512, .rope = 64, .lengths = {460}, .topk = 0},
};

class SparseMlaCudaLong : public testing::CudaTest, public ::testing::WithParamInterface<size_t> {};

TEST_P(SparseMlaCudaLong, FewQueriesHaveTheBitsOfMany) {
  const Shape& shape = kLongShapes[GetParam()];
  TensorPool pool(7);
  CudaPool device;
  const World world(pool, shape, DType::kBf16, DType::kBf16);
  const SparseMla all =
      on_cuda(device, world.call(pool, testing::whole_sequences(shape.lengths), 1), DType::kBf16);
  launch(all, cuda_stream());
  const int64_t end = shape.lengths[0];
  const std::vector<std::vector<Piece>> calls{{{0, end - 49, end}}, {{0, end - 17, end}}, {{0, end - 16, end}}, {{0, 0, 1}},
                                              {{0, 63, 64}},        {{0, 64, 65}},        {{0, 200, 217}},
                                              {{0, end - 1, end}}};
  for (const std::vector<Piece>& pieces : calls) {
    const SparseMla call = on_cuda(device, world.call(pool, pieces, 3), DType::kBf16);
    launch(call, cuda_stream());
    expect_same_tokens(call, world, pieces, all);
  }
  device.expect_fences_intact();
}

TEST_P(SparseMlaCudaLong, EqualsReference) {
  const Shape& shape = kLongShapes[GetParam()];
  TensorPool pool(8);
  CudaPool device;
  const World world(pool, shape, DType::kBf16, DType::kBf16);
  const int64_t end = shape.lengths[0];
  const SparseMla expected = world.call(pool, {{0, end - 7, end}}, 2);
  const SparseMla call = on_cuda(device, expected, DType::kBf16);
  launch(call, cuda_stream());
  reference(expected);
  testing::expect_close(call.o, expected.o);
  expect_close_lse(call.lse, expected.lse, DType::kBf16);
  device.expect_fences_intact();
}

// --- fp8 latents ---

// The call on keys in fp8, and the same on the values that those have.
SparseMla with_latents(TensorPool& pool, const SparseMla& host) {
  SparseMla call = host;
  call.keys = testing::latent_store(pool, host.keys, host.o.size(2));
  return call;
}
SparseMla with_restored(TensorPool& pool, const SparseMla& latents, DType dtype) {
  SparseMla call = latents;
  const int64_t rank = latents.o.size(2);
  call.keys = testing::restored_store(pool, latents.keys, latent_row(rank, latents.q.size(2) - rank), dtype);
  return call;
}

class SparseMlaCudaReads : public testing::CudaTest,
                           public ::testing::WithParamInterface<std::tuple<int64_t, int64_t, int64_t, int64_t>> {};

class SparseMlaCudaLatents : public testing::CudaTest, public ::testing::WithParamInterface<std::tuple<size_t, DType>> {};

TEST_P(SparseMlaCudaLatents, HaveTheBitsOfTheirValues) {
  const auto [index, dtype] = GetParam();
  const Shape& shape = index < std::size(kShapes) ? kShapes[index] : kLongShapes[index - std::size(kShapes)];
  TensorPool pool(21);
  CudaPool device;
  const World world(pool, shape, dtype, dtype);
  const SparseMla host = with_latents(pool, world.call(pool, testing::whole_sequences(shape.lengths), 2));
  const SparseMla plain = on_cuda(device, with_restored(pool, host, dtype), dtype);
  launch(plain, cuda_stream());
  const SparseMla pages = on_cuda(device, host, dtype);
  launch(pages, cuda_stream());
  testing::expect_same_bits_on_device(pages.o, plain.o);
  testing::expect_same_bits_on_device(pages.lse, plain.lse);
  {
    // No room for pages: rows are restored where they are read.
    Arena& workspace = cuda_stream().workspace();
    const ArenaScope scope(workspace);
    workspace.alloc(DType::kF8E4M3, {workspace.capacity() - workspace.used() - 1024});
    const SparseMla rows = on_cuda(device, host, dtype);
    launch(rows, cuda_stream());
    testing::expect_same_bits_on_device(rows.o, plain.o);
    testing::expect_same_bits_on_device(rows.lse, plain.lse);
  }
  // Decode steps and other pieces.
  for (const int64_t length : {1, 2, 33, 49}) {
    std::vector<Piece> pieces;
    for (size_t b = 0; b < shape.lengths.size(); ++b) {
      const int64_t end = shape.lengths[b];
      pieces.push_back({static_cast<int64_t>(b), std::max<int64_t>(end - length, 0), end});
    }
    const SparseMla call = on_cuda(device, with_latents(pool, world.call(pool, pieces, 3)), dtype);
    launch(call, cuda_stream());
    expect_same_tokens(call, world, pieces, plain);
  }
  // More steps of decode at once than are shared out over multiprocessors.
  if (world.tokens > 0) {
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < 40; ++i) pieces.push_back({0, shape.lengths[0] - 1, shape.lengths[0]});
    const SparseMla call = on_cuda(device, with_latents(pool, world.call(pool, pieces, 4)), dtype);
    launch(call, cuda_stream());
    expect_same_tokens(call, world, pieces, plain);
  }
  device.expect_fences_intact();
}

// A query of zeros has the value of its only key: every code times scales of all magnitudes, and NaN where a scale is.
TEST_P(SparseMlaCudaReads, EveryCode) {
  const auto [heads, rope, topk, sequences] = GetParam();
  constexpr int64_t kRank = 512;
  TensorPool pool(23);
  CudaPool device;
  const Shape shape{.heads = heads, .rank = kRank, .rope = rope,
                    .lengths = std::vector<int64_t>(static_cast<size_t>(sequences), 1), .topk = topk};
  const World world(pool, shape, DType::kBf16, DType::kBf16);
  SparseMla host = with_latents(pool, world.call(pool, testing::whole_sequences(shape.lengths), 2));
  for (int64_t i = 0; i < host.q.numel(); ++i) host.q.f32()[i] = 0.0f;
  if (topk > 0) std::fill_n(host.counts.i32(), sequences, 1);
  const LatentRow layout = latent_row(kRank, rope);
  for (int64_t b = 0; b < sequences; ++b) {
    e4m3* const row = host.keys.pool.data<e4m3>() + host.keys.offset(b, 0);
    for (int64_t i = 0; i < kRank; ++i) row[i].bits = static_cast<uint8_t>(i * 3 % 127 + i % 2 * 128);
    float* const scales = reinterpret_cast<float*>(row + layout.scales);
    for (int g = 0; g < layout.groups(); ++g) {
      const int exponent = static_cast<int>((b * layout.groups() + g) * 226 / (sequences * layout.groups())) - 108;
      scales[g] = to_f32(to_bf16(std::ldexp(1.0f + pool.uniform(), exponent)));
    }
    if (b == 3) scales[1] = std::numeric_limits<float>::quiet_NaN();
  }
  const SparseMla call = on_cuda(device, host, DType::kBf16);
  launch(call, cuda_stream());
  const Tensor o = testing::on_host(pool, call.o);
  std::vector<float> values(kRank);
  for (int64_t b = 0; b < sequences; ++b) {
    read_latent_row(layout, host.keys.pool.data<e4m3>() + host.keys.offset(b, 0), 0, kRank, values.data());
    for (int64_t i = 0; i < heads * kRank; ++i) {
      const float actual = o.row(b)[i], expected = to_f32(to_bf16(values[static_cast<size_t>(i % kRank)]));
      ASSERT_TRUE(b == 3 ? std::isnan(actual) : actual == expected) << b << ", " << i << ": " << actual << ", " << expected;
    }
  }
}

// Heads, rope columns, entries of a selection, queries.
INSTANTIATE_TEST_SUITE_P(Forms, SparseMlaCudaReads,
                         ::testing::Values(std::tuple{64, 64, 0, 200}, std::tuple{64, 0, 0, 40}, std::tuple{64, 64, 300, 20},
                                           std::tuple{64, 0, 300, 32}, std::tuple{8, 64, 0, 50}));

TEST_P(SparseMlaCudaLatents, EqualReference) {
  const auto [index, dtype] = GetParam();
  const Shape& shape = index < std::size(kShapes) ? kShapes[index] : kLongShapes[index - std::size(kShapes)];
  TensorPool pool(22);
  CudaPool device;
  const World world(pool, shape, dtype, dtype);
  std::vector<Piece> pieces;
  for (size_t b = 0; b < shape.lengths.size(); ++b) {
    const int64_t end = shape.lengths[b];
    pieces.push_back({static_cast<int64_t>(b), std::max<int64_t>(end - 9, 0), end});
  }
  const SparseMla expected = with_latents(pool, world.call(pool, pieces, 2));
  const SparseMla call = on_cuda(device, expected, dtype);
  launch(call, cuda_stream());
  reference(with_restored(pool, expected, dtype));  // its values as the activations' dtype holds them
  testing::expect_close(call.o, expected.o);
  expect_close_lse(call.lse, expected.lse, dtype);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SparseMlaCudaLatents,
                         ::testing::Combine(::testing::Range(size_t{0}, std::size(kShapes) + std::size(kLongShapes)),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

INSTANTIATE_TEST_SUITE_P(Shapes, SparseMlaCudaLong, ::testing::Range(size_t{0}, std::size(kLongShapes)));

INSTANTIATE_TEST_SUITE_P(Kinds, SparseMlaCudaBits,
                         ::testing::Combine(::testing::Range(0, 4),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

}  // namespace
}  // namespace slipstream::kernels
