// Goal: on CUDA launch() is reference() within tolerance, forward and backward; a sequence cut into calls gives the bits of the
// whole.
#include "kernels/pool_keys/pool_keys.h"

#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class PoolKeysCudaTest : public testing::CudaTest,
                         public ::testing::WithParamInterface<std::tuple<DType, DType, int64_t, int64_t>> {};

TEST_P(PoolKeysCudaTest, EqualsReference) {
  const auto [dtype, stored, pool, width] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Sequences sequences = testing::sequences_of(host, {9, 0, 70, 130, 2});
  const int64_t rows = sequences.rows();
  const Tensor k = random_as(host, dtype, {rows, width}), gate = random_as(host, dtype, {rows, width}, -2.0f, 2.0f);
  const Tensor ape = host.random(kF32, {pool, width}), slots = host.ints({5}, {4, 0, 2, 3, 1});
  const PagedRows pooled{.pool = host.zeros(stored, {20, kPageRows, width}), .page_table = testing::pages_in_turn(host, 5, 3)};
  const Tensor open = host.zeros(kF32, {5, pool, 2, width});
  const PoolKeys args{.k = device.copy(k, dtype), .gate = device.copy(gate, dtype), .ape = device.copy(ape),
                      .sequences = device.copy(sequences), .open = device.copy(open), .slots = device.copy(slots),
                      .pooled = {.pool = device.copy(pooled.pool, stored), .page_table = device.copy(pooled.page_table)}};
  const PoolKeys expected{.k = k, .gate = gate, .ape = ape, .sequences = sequences, .open = open, .slots = slots,
                          .pooled = pooled};
  launch(args, cuda_stream());
  reference(expected);
  testing::expect_same_bits(testing::on_host(host, args.open), open);
  const Tensor stored_rows = testing::on_host(host, args.pooled.pool);
  for (int64_t i = 0; i < stored_rows.numel(); ++i) {
    const float value = stored == kBf16 ? to_f32(pooled.pool.bf()[i]) : pooled.pool.f32()[i];
    ASSERT_NEAR(stored_rows.f32()[i], value, stored == kBf16 ? 1e-2f : 1e-5f) << i;
  }

  int64_t pools = 0;
  for (int64_t b = 0; b < sequences.count(); ++b) pools += (sequences.end(b) - sequences.begin(b)) / pool;
  const Tensor dpooled = random_as(host, dtype, {pools, width});
  const PoolKeysBackward backward{.k = args.k, .gate = args.gate, .ape = args.ape, .sequences = args.sequences,
                                  .dpooled = device.copy(dpooled, dtype), .dk = device.output(dtype, {rows, width}),
                                  .dgate = device.output(dtype, {rows, width}), .dape = device.zeros(kF32, {pool, width})};
  const PoolKeysBackward expected_backward{.k = k, .gate = gate, .ape = ape, .sequences = sequences, .dpooled = dpooled,
                                           .dk = host.output(kF32, {rows, width}),
                                           .dgate = host.output(kF32, {rows, width}),
                                           .dape = host.zeros(kF32, {pool, width})};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dk, expected_backward.dk);
  expect_close(backward.dgate, expected_backward.dgate);
  expect_close(backward.dape, expected_backward.dape, 2.0f);
  device.expect_fences_intact();
}

TEST_P(PoolKeysCudaTest, PiecesAreTheWhole) {
  const auto [dtype, stored, pool, width] = GetParam();
  TensorPool host(2);
  CudaPool device;
  const int64_t length = 40;
  const Tensor k = device.copy(random_as(host, dtype, {length, width}), dtype);
  const Tensor gate = device.copy(random_as(host, dtype, {length, width}), dtype);
  const Tensor ape = device.copy(host.random(kF32, {pool, width})), slots = device.copy(host.ints({1}, {1}));
  const Tensor table = device.copy(host.ints({1, 1}, {1}));
  const PagedRows whole{device.zeros(stored, {2, kPageRows, width}), table};
  const PagedRows pieces{device.zeros(stored, {2, kPageRows, width}), table};
  launch(PoolKeys{.k = k, .gate = gate, .ape = ape, .sequences = device.copy(testing::sequences_of(host, {40})),
                  .open = device.output(kF32, {2, pool, 2, width}), .slots = slots, .pooled = whole},
         cuda_stream());
  const Tensor open = device.output(kF32, {2, pool, 2, width});
  int32_t begin = 0;
  for (const int32_t count : {1, 1, 5, 2, 30, 1}) {
    launch(PoolKeys{.k = k.slice(0, begin, begin + count), .gate = gate.slice(0, begin, begin + count), .ape = ape,
                    .sequences = device.copy(testing::sequences_of(host, {count}, {begin})), .open = open, .slots = slots,
                    .pooled = pieces},
           cuda_stream());
    begin += count;
  }
  testing::expect_same_bits_on_device(pieces.pool, whole.pool);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, PoolKeysCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(kF32, kBf16),
                                            ::testing::Values(1, 3, 4), ::testing::Values(12, 128)));

}  // namespace
}  // namespace slipstream::kernels
