// Goal: on CUDA launch() is reference() within tolerance, forward and backward, for any grouping of heads in
// f32 and bf16; a token's bits do not depend on how its sequence is cut into calls, on its neighbours or on
// the pages.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/gqa/gqa.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::cuda_stream;
using testing::CudaPool;
using testing::Piece;
using testing::TensorPool;

struct Shape {
  int64_t heads, kv_heads, width;
};

struct World {
  World(TensorPool& pool, const Shape& sizes, std::vector<int64_t> sequence_lengths, DType activations,
        DType store)
      : shape(sizes), lengths(std::move(sequence_lengths)), dtype(activations) {
    tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    q = testing::random_as(pool, dtype, {tokens, shape.heads, shape.width});
    k = pool.random(store, {tokens, shape.kv_heads * shape.width});
    v = pool.random(store, {tokens, shape.kv_heads * shape.width});
  }
  Gqa call(TensorPool& pool, const std::vector<Piece>& pieces, uint64_t seed) const {
    const Sequences sequences = testing::sequences_of_pieces(pool, pieces);
    const int64_t rows = sequences.rows();
    const Gqa call{.q = pool.output(DType::kF32, {rows, shape.heads, shape.width}),
                   .k = testing::store_pieces(pool, k, lengths, pieces, seed),
                   .v = testing::store_pieces(pool, v, lengths, pieces, seed + 1),
                   .sequences = sequences,
                   .kv_heads = shape.kv_heads,
                   .scale = 2.0f / std::sqrt(static_cast<float>(shape.width)),
                   .o = pool.output(DType::kF32, {rows, shape.heads, shape.width}),
                   .lse = pool.output(DType::kF32, {rows, shape.heads})};
    testing::copy_pieces(q, lengths, pieces, call.q);
    return call;
  }

  Shape shape;
  testing::Lengths lengths;
  DType dtype;
  int64_t tokens = 0;
  Tensor q, k, v;
};

Gqa on_cuda(CudaPool& device, const Gqa& host, DType dtype) {
  Gqa call = host;
  call.q = device.copy(host.q, dtype);
  call.k = device.copy(host.k);
  call.v = device.copy(host.v);
  call.sequences = device.copy(host.sequences);
  call.o = device.output(dtype, {host.o.size(0), host.o.size(1), host.o.size(2)});
  call.lse = device.output(DType::kF32, {host.lse.size(0), host.lse.size(1)});
  return call;
}

class GqaCudaTest : public testing::CudaTest,
                    public ::testing::WithParamInterface<std::tuple<Shape, DType, DType>> {};

TEST_P(GqaCudaTest, EqualsReference) {
  const auto [shape, dtype, store] = GetParam();
  TensorPool pool(1);
  CudaPool device;
  const World world(pool, shape, {3, 150, 1, 90}, dtype, store);
  const Gqa expected = world.call(pool, {{0, 0, 3}, {1, 101, 150}, {2, 1, 1}, {3, 89, 90}}, 1);
  const Gqa call = on_cuda(device, expected, dtype);
  launch(call, cuda_stream());
  reference(expected);
  testing::expect_close(call.o, expected.o);
  testing::expect_close(call.lse, expected.lse, dtype == DType::kBf16 ? 200.0f : 1.0f);
  device.expect_fences_intact();
}

TEST_P(GqaCudaTest, BackwardEqualsReference) {
  const auto [shape, dtype, store] = GetParam();
  TensorPool pool(2);
  CudaPool device;
  const World world(pool, shape, {3, 130, 0, 65}, dtype, store);
  const Gqa forward = world.call(pool, testing::whole_sequences(world.lengths), 0);
  reference(forward);
  if (dtype == DType::kBf16) {
    for (int64_t i = 0; i < forward.o.numel(); ++i) forward.o.f32()[i] = to_f32(to_bf16(forward.o.f32()[i]));
  }
  const int64_t tokens = world.tokens;
  const Tensor d_o = testing::random_as(pool, dtype, {tokens, shape.heads, shape.width});
  const GqaBackward expected{.q = forward.q,
                             .k = forward.k,
                             .v = forward.v,
                             .sequences = forward.sequences,
                             .kv_heads = shape.kv_heads,
                             .scale = forward.scale,
                             .o = forward.o,
                             .lse = forward.lse,
                             .d_o = d_o,
                             .dq = pool.output(DType::kF32, {tokens, shape.heads, shape.width}),
                             .dk = pool.output(DType::kF32, {tokens, shape.kv_heads, shape.width}),
                             .dv = pool.output(DType::kF32, {tokens, shape.kv_heads, shape.width})};
  reference(expected);
  const auto on_device = [&] {
    const Gqa call = on_cuda(device, forward, dtype);
    return GqaBackward{.q = call.q,
                       .k = call.k,
                       .v = call.v,
                       .sequences = call.sequences,
                       .kv_heads = shape.kv_heads,
                       .scale = call.scale,
                       .o = device.copy(forward.o, dtype),
                       .lse = device.copy(forward.lse),
                       .d_o = device.copy(d_o, dtype),
                       .dq = device.output(dtype, {tokens, shape.heads, shape.width}),
                       .dk = device.output(dtype, {tokens, shape.kv_heads, shape.width}),
                       .dv = device.output(dtype, {tokens, shape.kv_heads, shape.width})};
  };
  const GqaBackward args = on_device(), again = on_device();
  launch(args, cuda_stream());
  launch(again, cuda_stream());
  testing::expect_close(args.dq, expected.dq, 2.0f);
  testing::expect_close(args.dk, expected.dk, 2.0f);
  testing::expect_close(args.dv, expected.dv, 2.0f);
  testing::expect_same_bits_on_device(again.dq, args.dq);
  testing::expect_same_bits_on_device(again.dk, args.dk);
  testing::expect_same_bits_on_device(again.dv, args.dv);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, GqaCudaTest,
                         ::testing::Combine(::testing::Values(Shape{1, 1, 1}, Shape{3, 3, 10},
                                                              Shape{8, 2, 64}, Shape{6, 2, 33},
                                                              Shape{40, 2, 16}, Shape{24, 2, 128}),
                                            ::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

class GqaCudaBits : public testing::CudaTest,
                    public ::testing::WithParamInterface<std::tuple<Shape, DType>> {};

TEST_P(GqaCudaBits, CutsDoNotChangeBits) {
  const auto [shape, dtype] = GetParam();
  TensorPool pool(3);
  CudaPool device;
  const World world(pool, shape, {131, 70, 2}, dtype, dtype);
  const Gqa all = on_cuda(device, world.call(pool, testing::whole_sequences(world.lengths), 0), dtype);
  launch(all, cuda_stream());
  std::vector<std::vector<Piece>> calls{{{0, 0, 64}},
                                        {{0, 64, 100}, {1, 0, 1}},
                                        {{1, 1, 70}, {0, 100, 131}, {2, 0, 2}},
                                        {{2, 2, 2}, {1, 69, 70}}};
  for (int64_t t = 0; t < 131; t += 7) calls.push_back({{0, t, t + 1}, {1, t % 70, t % 70 + 1}});
  for (const std::vector<Piece>& pieces : calls) {
    const Gqa call = on_cuda(device, world.call(pool, pieces, 3), dtype);
    launch(call, cuda_stream());
    testing::expect_same_tokens(testing::bits_on_host(pool, call.o), world.lengths, pieces,
                                testing::bits_on_host(pool, all.o));
    testing::expect_same_tokens(testing::bits_on_host(pool, call.lse), world.lengths, pieces,
                                testing::bits_on_host(pool, all.lse));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GqaCudaBits,
                         ::testing::Combine(::testing::Values(Shape{6, 2, 20}, Shape{24, 2, 128}),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

}  // namespace
}  // namespace slipstream::kernels
