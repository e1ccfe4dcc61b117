// Goal: on CUDA launch() is reference() within tolerance for empty, odd, strided and real shapes of one to
// eight streams in f32 and bf16, and in place; a token ignores its neighbours and runs repeat, bit for bit.
#include <algorithm>
#include <tuple>

#include "kernels/mhc/mhc.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::cuda_stream;
using testing::CudaPool;
using testing::TensorPool;

struct Shape {
  int64_t tokens, n, width;
  int64_t columns() const { return (2 + n) * n; }
};

MhcMix make_mix(TensorPool& pool, const Shape& s, DType dtype) {
  return {.x = testing::random_as(pool, dtype, {s.tokens, s.n, s.width}),
          .zr = pool.random(DType::kF32, {s.tokens, s.columns()}, -2.0f, 2.0f),
          .base = pool.random(DType::kF32, {s.columns()}),
          .scale = pool.random(DType::kF32, {3}, 0.5f, 1.5f),
          .norm_eps = 1e-5f,
          .eps = 1e-6f,
          .iterations = 20,
          .inv_rms = pool.output(DType::kF32, {s.tokens}),
          .post = pool.output(DType::kF32, {s.tokens, s.n}),
          .comb = pool.output(DType::kF32, {s.tokens, s.n, s.n}),
          .u = pool.output(DType::kF32, {s.tokens, s.width})};
}

MhcMix on_cuda(CudaPool& device, const MhcMix& host, DType dtype) {
  MhcMix args = host;
  args.x = device.copy(host.x, dtype);
  args.zr = device.copy(host.zr);
  args.base = device.copy(host.base);
  args.scale = device.copy(host.scale);
  args.inv_rms = device.copy(host.inv_rms);
  args.post = device.copy(host.post);
  args.comb = device.copy(host.comb);
  args.u = device.copy(host.u, dtype);
  return args;
}

MhcMixBackward make_mix_backward(TensorPool& pool, const MhcMix& mix, DType dtype) {
  const int64_t tokens = mix.x.size(0), n = mix.x.size(1), width = mix.x.size(2);
  return {.x = mix.x,
          .zr = mix.zr,
          .base = mix.base,
          .scale = mix.scale,
          .eps = mix.eps,
          .iterations = mix.iterations,
          .inv_rms = mix.inv_rms,
          .du = testing::random_as(pool, dtype, {tokens, width}),
          .dpost = pool.random(DType::kF32, {tokens, n}),
          .dcomb = pool.random(DType::kF32, {tokens, n, n}),
          .dx = testing::random_as(pool, dtype, {tokens, n, width}),
          .dzr = pool.output(DType::kF32, {tokens, mix.zr.size(1)}),
          .dbase = pool.random(DType::kF32, {mix.zr.size(1)}),
          .dscale = pool.random(DType::kF32, {3})};
}

MhcMixBackward on_cuda(CudaPool& device, const MhcMixBackward& host, DType dtype) {
  MhcMixBackward args = host;
  for (const auto member : {&MhcMixBackward::x, &MhcMixBackward::du, &MhcMixBackward::dx}) {
    args.*member = device.copy(host.*member, dtype);
  }
  for (const auto member : {&MhcMixBackward::zr, &MhcMixBackward::base, &MhcMixBackward::scale,
                            &MhcMixBackward::inv_rms, &MhcMixBackward::dpost, &MhcMixBackward::dcomb,
                            &MhcMixBackward::dzr, &MhcMixBackward::dbase, &MhcMixBackward::dscale}) {
    args.*member = device.copy(host.*member);
  }
  return args;
}

class MhcCudaTest : public testing::CudaTest,
                    public ::testing::WithParamInterface<std::tuple<DType, Shape>> {};

TEST_P(MhcCudaTest, MixEqualsReference) {
  const auto [dtype, shape] = GetParam();
  TensorPool pool(1);
  CudaPool device;
  const MhcMix expected = make_mix(pool, shape, dtype);
  const MhcMix args = on_cuda(device, expected, dtype), again = on_cuda(device, expected, dtype);
  launch(args, cuda_stream());
  launch(again, cuda_stream());
  reference(expected);
  testing::expect_close(args.inv_rms, expected.inv_rms);
  testing::expect_close(args.post, expected.post);
  testing::expect_close(args.comb, expected.comb);
  testing::expect_close(args.u, expected.u);
  testing::expect_same_bits_on_device(again.comb, args.comb);
  testing::expect_same_bits_on_device(again.u, args.u);

  const MhcMixBackward expected_backward = make_mix_backward(pool, expected, dtype);
  const MhcMixBackward backward = on_cuda(device, expected_backward, dtype);
  const MhcMixBackward backward_again = on_cuda(device, expected_backward, dtype);
  launch(backward, cuda_stream());
  launch(backward_again, cuda_stream());
  reference(expected_backward);
  testing::expect_close(backward.dx, expected_backward.dx);
  testing::expect_close(backward.dzr, expected_backward.dzr);
  testing::expect_close(backward.dbase, expected_backward.dbase);
  testing::expect_close(backward.dscale, expected_backward.dscale);
  testing::expect_same_bits_on_device(backward_again.dx, backward.dx);
  testing::expect_same_bits_on_device(backward_again.dzr, backward.dzr);
  testing::expect_same_bits_on_device(backward_again.dbase, backward.dbase);
  device.expect_fences_intact();
}

TEST_P(MhcCudaTest, MergeEqualsReference) {
  const auto [dtype, s] = GetParam();
  TensorPool pool(2);
  CudaPool device;
  const auto streams_out = [&] { return device.output(dtype, {s.tokens, s.n, s.width}); };
  const MhcMerge expected{.x = testing::random_as(pool, dtype, {s.tokens, s.n, s.width}),
                          .y = testing::random_as(pool, dtype, {s.tokens, s.width}),
                          .post = pool.random(DType::kF32, {s.tokens, s.n}),
                          .comb = pool.random(DType::kF32, {s.tokens, s.n, s.n}),
                          .out = pool.output(DType::kF32, {s.tokens, s.n, s.width})};
  const MhcMerge args{.x = device.copy(expected.x, dtype),
                      .y = device.copy(expected.y, dtype),
                      .post = device.copy(expected.post),
                      .comb = device.copy(expected.comb),
                      .out = streams_out()};
  launch(args, cuda_stream());
  reference(expected);
  testing::expect_close(args.out, expected.out);
  MhcMerge in_place = args;
  in_place.x = in_place.out = device.copy(expected.x, dtype);
  launch(in_place, cuda_stream());
  testing::expect_same_bits_on_device(in_place.out, args.out);

  const MhcMergeBackward expected_backward{.x = expected.x,
                                           .y = expected.y,
                                           .post = expected.post,
                                           .comb = expected.comb,
                                           .dout = testing::random_as(pool, dtype, {s.tokens, s.n, s.width}),
                                           .dx = pool.output(DType::kF32, {s.tokens, s.n, s.width}),
                                           .dy = pool.output(DType::kF32, {s.tokens, s.width}),
                                           .dpost = pool.output(DType::kF32, {s.tokens, s.n}),
                                           .dcomb = pool.output(DType::kF32, {s.tokens, s.n, s.n})};
  reference(expected_backward);
  const MhcMergeBackward backward{.x = args.x,
                                  .y = args.y,
                                  .post = args.post,
                                  .comb = args.comb,
                                  .dout = device.copy(expected_backward.dout, dtype),
                                  .dx = streams_out(),
                                  .dy = device.output(dtype, {s.tokens, s.width}),
                                  .dpost = device.output(DType::kF32, {s.tokens, s.n}),
                                  .dcomb = device.output(DType::kF32, {s.tokens, s.n, s.n})};
  launch(backward, cuda_stream());
  testing::expect_close(backward.dx, expected_backward.dx);
  testing::expect_close(backward.dy, expected_backward.dy);
  testing::expect_close(backward.dpost, expected_backward.dpost);
  testing::expect_close(backward.dcomb, expected_backward.dcomb);
  MhcMergeBackward backward_in_place = backward;
  backward_in_place.dout = backward_in_place.dx = device.copy(expected_backward.dout, dtype);
  backward_in_place.dcomb = device.output(DType::kF32, {s.tokens, s.n, s.n});
  launch(backward_in_place, cuda_stream());
  testing::expect_same_bits_on_device(backward_in_place.dx, backward.dx);
  testing::expect_same_bits_on_device(backward_in_place.dcomb, backward.dcomb);
  device.expect_fences_intact();
}

TEST_P(MhcCudaTest, EndsEqualReference) {
  const auto [dtype, s] = GetParam();
  TensorPool pool(3);
  CudaPool device;
  const Tensor row = testing::random_as(pool, dtype, {s.tokens, s.width});
  const Tensor streams = testing::random_as(pool, dtype, {s.tokens, s.n, s.width});
  const Tensor device_row = device.copy(row, dtype), device_streams = device.copy(streams, dtype);
  const auto host_rows = [&] { return pool.output(DType::kF32, {s.tokens, s.width}); };
  const auto host_streams = [&] { return pool.output(DType::kF32, {s.tokens, s.n, s.width}); };
  const auto rows_out = [&] { return device.output(dtype, {s.tokens, s.width}); };
  const auto streams_out = [&] { return device.output(dtype, {s.tokens, s.n, s.width}); };
  const MhcExpand expand{.x = device_row, .out = streams_out()}, expand_ref{.x = row, .out = host_streams()};
  launch(expand, cuda_stream());
  reference(expand_ref);
  testing::expect_close(expand.out, expand_ref.out);
  const MhcMeanBackward spread{.dout = device_row, .dx = streams_out()},
      spread_ref{.dout = row, .dx = host_streams()};
  launch(spread, cuda_stream());
  reference(spread_ref);
  testing::expect_close(spread.dx, spread_ref.dx);
  const MhcMean mean{.x = device_streams, .out = rows_out()}, mean_ref{.x = streams, .out = host_rows()};
  launch(mean, cuda_stream());
  reference(mean_ref);
  testing::expect_close(mean.out, mean_ref.out);
  const MhcExpandBackward sum{.dout = device_streams, .dx = rows_out()},
      sum_ref{.dout = streams, .dx = host_rows()};
  launch(sum, cuda_stream());
  reference(sum_ref);
  testing::expect_close(sum.dx, sum_ref.dx);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MhcCudaTest,
    ::testing::Combine(::testing::Values(DType::kF32, DType::kBf16),
                       ::testing::Values(Shape{0, 4, 8}, Shape{3, 1, 5}, Shape{19, 2, 67}, Shape{65, 3, 16},
                                         Shape{33, 4, 130}, Shape{70, 4, 4096}, Shape{9, 4, 6151}, Shape{20, 5, 67},
                                         Shape{20, 6, 16}, Shape{20, 7, 67}, Shape{20, 8, 67})));

class MhcCudaBits : public testing::CudaTest, public ::testing::WithParamInterface<DType> {};

TEST_P(MhcCudaBits, TokenIgnoresItsNeighbours) {
  const DType dtype = GetParam();
  TensorPool pool(6);
  CudaPool device;
  const MhcMix host = make_mix(pool, {290, 4, 260}, dtype);  // many tokens, then few: two forms
  const MhcMix together = on_cuda(device, host, dtype), pieces = on_cuda(device, host, dtype);
  launch(together, cuda_stream());
  const MhcMixBackward backward_host = make_mix_backward(pool, host, dtype);
  MhcMixBackward back_together = on_cuda(device, backward_host, dtype),
                 back_pieces = on_cuda(device, backward_host, dtype);
  back_together.inv_rms = back_pieces.inv_rms = together.inv_rms;
  launch(back_together, cuda_stream());
  for (int64_t begin = 0, size = 1; begin < 290; begin += size++) {
    const int64_t end = std::min<int64_t>(begin + size, 290);
    MhcMix part = pieces;
    for (const auto member :
         {&MhcMix::x, &MhcMix::zr, &MhcMix::inv_rms, &MhcMix::post, &MhcMix::comb, &MhcMix::u}) {
      part.*member = (pieces.*member).slice(0, begin, end);
    }
    launch(part, cuda_stream());
    MhcMixBackward back = back_pieces;
    for (const auto member :
         {&MhcMixBackward::x, &MhcMixBackward::zr, &MhcMixBackward::inv_rms, &MhcMixBackward::du,
          &MhcMixBackward::dpost, &MhcMixBackward::dcomb, &MhcMixBackward::dx, &MhcMixBackward::dzr}) {
      back.*member = (back_pieces.*member).slice(0, begin, end);
    }
    launch(back, cuda_stream());
  }
  testing::expect_same_bits_on_device(pieces.inv_rms, together.inv_rms);
  testing::expect_same_bits_on_device(pieces.post, together.post);
  testing::expect_same_bits_on_device(pieces.comb, together.comb);
  testing::expect_same_bits_on_device(pieces.u, together.u);
  testing::expect_same_bits_on_device(back_pieces.dx, back_together.dx);
  testing::expect_same_bits_on_device(back_pieces.dzr, back_together.dzr);
}

TEST_P(MhcCudaBits, MixWithTheNormHasTheBitsOfBoth) {
  const DType dtype = GetParam();
  TensorPool pool(8);
  CudaPool device;
  for (const Shape& s : {Shape{290, 4, 260}, Shape{5, 4, 4096}, Shape{3, 2, 67}, Shape{3, 4, 6151}, Shape{300, 4, 4096}, Shape{2, 8, 5}}) {
    const MhcMix host = make_mix(pool, s, dtype), mix = on_cuda(device, host, dtype);
    launch(mix, cuda_stream());
    for (const Tensor& w : {Tensor(), device.copy(pool.random(DType::kF32, {s.width}))}) {
      const Tensor y = device.output(dtype, {s.tokens, s.width}), u_inv = device.output(DType::kF32, {s.tokens});
      launch(RmsNorm{.x = mix.u, .w = w, .y = y, .inv_rms = u_inv, .eps = mix.norm_eps}, cuda_stream());
      MhcMix both = on_cuda(device, host, dtype);
      both.w = w, both.y = device.output(dtype, {s.tokens, s.width}), both.u_inv = device.output(DType::kF32, {s.tokens});
      launch(both, cuda_stream());
      testing::expect_same_bits_on_device(both.u, mix.u);
      testing::expect_same_bits_on_device(both.y, y);
      testing::expect_same_bits_on_device(both.u_inv, u_inv);
      testing::expect_same_bits_on_device(both.post, mix.post);
      testing::expect_same_bits_on_device(both.comb, mix.comb);
    }
  }
  device.expect_fences_intact();
}

TEST_P(MhcCudaBits, RefusesMoreIterationsThanItKeeps) {
  TensorPool pool(7);
  CudaPool device;
  const MhcMix mix = make_mix(pool, {2, 4, 8}, GetParam());
  MhcMixBackward args = on_cuda(device, make_mix_backward(pool, mix, GetParam()), GetParam());
  args.iterations = kMhcIterationsCuda;
  EXPECT_TRUE(validate(args).ok());
  launch(args, cuda_stream());
  ++args.iterations;
  EXPECT_EQ(validate(args).code(), absl::StatusCode::kUnimplemented);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MhcCudaBits, ::testing::Values(DType::kF32, DType::kBf16));

}  // namespace
}  // namespace slipstream::kernels
