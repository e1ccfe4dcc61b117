#include <algorithm>

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/limits.cuh"
#include "kernels/launch_cuda.h"
#include "kernels/mhc/merge.cuh"
#include "kernels/mhc/mhc.h"
#include "kernels/mhc/mix.cuh"

namespace slipstream::kernels {
namespace {

// f(X{}) enqueues for the tokens of x, if there are any.
template <class F>
void for_tokens(const Tensor& x, const char* op, F&& f) {
  if (x.size(0) == 0) return;
  with_type(x.dtype(), f);
  check_launch(op);
}

// f is called with the compile-time number of streams.
template <class F>
void for_stream_count(int64_t n, F&& f) {
  switch (n) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    case 6: return f(std::integral_constant<int, 6>());
    case 7: return f(std::integral_constant<int, 7>());
    case 8: return f(std::integral_constant<int, 8>());
    default: CHECK(false && "streams");
  }
}

template <class X>
void mix(const MhcMix& args, Stream& stream) {
  const MixView<X> view{.x = heads_of<X>(args.x),
                        .zr = rows_of<float>(args.zr),
                        .base = args.base.f32(),
                        .scale = args.scale.f32(),
                        .norm_eps = args.norm_eps,
                        .eps = args.eps,
                        .inv_rms = args.inv_rms.f32(),
                        .post = rows_of<float>(args.post),
                        .comb = heads_of<float>(args.comb),
                        .u = rows_of<X>(args.u),
                        .w = data_of<float>(args.w),
                        .y = rows_of<X>(args.y),
                        .u_inv = data_of<float>(args.u_inv),
                        .width = static_cast<int>(args.x.size(2)),
                        .iterations = static_cast<int>(args.iterations),
                        .whole = fours(args.x) && fours(args.u) && fours(args.w) && fours(args.y)};
  const int64_t tokens = args.x.size(0);
  for_stream_count(args.x.size(1), [&](auto n) {
    constexpr int kN = n();
    const unsigned blocks = static_cast<unsigned>(tokens);
    if (tokens <= kFewTokens) {
      mix_streams<X, kN, true><<<blocks, row_threads(view.width) + kMixThreadsMore<true>, 0, cuda_stream(stream)>>>(view);
      return;
    }
    mix_streams<X, kN, false><<<blocks, row_threads(view.width), 0, cuda_stream(stream)>>>(view);
    const int64_t comb_blocks = divide_up(tokens, kCombThreads / LaneMatrix<kN>::kGroup);
    mix_comb<X, kN><<<static_cast<unsigned>(comb_blocks), kCombThreads, 0, cuda_stream(stream)>>>(view, tokens);
  });
}

template <class X>
void mix_backward(const MhcMixBackward& args, Stream& stream) {
  const int64_t tokens = args.x.size(0), n = args.x.size(1), columns = (2 + n) * n;
  const MixBackwardView<X> view{.x = heads_of<X>(args.x),
                                .dx = heads_of<X>(args.dx),
                                .du = rows_of<X>(args.du),
                                .zr = rows_of<float>(args.zr),
                                .dpost = rows_of<float>(args.dpost),
                                .dzr = rows_of<float>(args.dzr),
                                .dcomb = heads_of<float>(args.dcomb),
                                .base = args.base.f32(),
                                .scale = args.scale.f32(),
                                .inv_rms = args.inv_rms.f32(),
                                .eps = args.eps,
                                .width = static_cast<int>(args.x.size(2)),
                                .iterations = static_cast<int>(args.iterations),
                                .whole = fours(args.x) && fours(args.dx) && fours(args.du)};
  for_stream_count(n, [&](auto count) {
    constexpr int kN = count();
    const int tape = SinkhornTape<kN>::size(view.iterations) * int{sizeof(float)};
    const int warps = std::clamp(40 * 1024 / tape, 1, 4), tokens_each = warps * kWarp / LaneMatrix<kN>::kGroup;
    allow_shared(mix_comb_backward<X, kN>, warps * tape);
    mix_comb_backward<X, kN><<<static_cast<unsigned>(divide_up(tokens, tokens_each)), warps * kWarp,
                               static_cast<size_t>(warps * tape), cuda_stream(stream)>>>(view, tokens);
    mix_streams_backward<X, kN>
        <<<static_cast<unsigned>(tokens), row_threads(view.width), 0, cuda_stream(stream)>>>(view);
  });
  add_column_sums([dzr = view.dzr] __device__(int64_t t, int64_t e) { return dzr[t][e]; }, tokens, columns,
                  args.dbase.f32(), stream);
  add_column_sums(
      [dzr = view.dzr, zr = view.zr, inv_rms = view.inv_rms, n] __device__(int64_t t, int64_t part) {
        const int64_t begin = part * n, end = part < 2 ? begin + n : (2 + n) * n;
        float sum = 0.0f;
        for (int64_t e = begin; e < end; ++e) sum = fmaf(dzr[t][e], zr[t][e] * inv_rms[t], sum);
        return sum;
      },
      tokens, 3, args.dscale.f32(), stream);
  mix_finish_dzr<<<static_cast<unsigned>(divide_up(tokens * columns, 256)), 256, 0, cuda_stream(stream)>>>(
      view.dzr, view.scale, view.inv_rms, static_cast<int>(n), tokens);
}

template <class X>
void merge(const MhcMerge& args, Stream& stream) {
  MergeView<X> view{};
  view.x = heads_of<X>(args.x);
  view.out = heads_of<X>(args.out);
  view.y = rows_of<X>(args.y);
  view.post = rows_of<float>(args.post);
  view.comb = heads_of<float>(args.comb);
  view.width = static_cast<int>(args.x.size(2));
  view.whole = fours(args.x) && fours(args.y) && fours(args.out);
  for_stream_count(args.x.size(1), [&](auto n) {
    const int64_t tokens = args.x.size(0);
    const dim3 grid = tokens <= kFewTokens ? part_grid<1>(tokens, view.width) : dim3(static_cast<unsigned>(tokens));
    merge_streams<X, n()><<<grid, kPartThreads, 0, cuda_stream(stream)>>>(view);
  });
}

template <class X>
void merge_backward(const MhcMergeBackward& args, Stream& stream) {
  MergeView<X> view{};
  view.x = heads_of<X>(args.x);
  view.dout = heads_of<X>(args.dout);
  view.dx = heads_of<X>(args.dx);
  view.y = rows_of<X>(args.y);
  view.dy = rows_of<X>(args.dy);
  view.post = rows_of<float>(args.post);
  view.dpost = rows_of<float>(args.dpost);
  view.comb = heads_of<float>(args.comb);
  view.dcomb = heads_of<float>(args.dcomb);
  view.width = static_cast<int>(args.x.size(2));
  view.whole = fours(args.x) && fours(args.y) && fours(args.dout) && fours(args.dx) && fours(args.dy);
  for_stream_count(args.x.size(1), [&](auto n) {
    merge_streams_backward<X, n()>
        <<<static_cast<unsigned>(args.x.size(0)), row_threads(view.width), 0, cuda_stream(stream)>>>(view);
  });
}

template <class X>
void sum(const Tensor& x, float divisor, const Tensor& out, Stream& stream) {
  const int n = static_cast<int>(x.size(1)), width = static_cast<int>(x.size(2));
  sum_streams<X><<<static_cast<unsigned>(x.size(0)), row_threads(width), 0, cuda_stream(stream)>>>(
      heads_of<X>(x), rows_of<X>(out), n, width, divisor, fours(x) && fours(out));
}

template <class X>
void copy(const Tensor& x, float divisor, const Tensor& out, Stream& stream) {
  const int n = static_cast<int>(out.size(1)), width = static_cast<int>(out.size(2));
  copy_to_streams<X><<<static_cast<unsigned>(x.size(0)), row_threads(width), 0, cuda_stream(stream)>>>(
      rows_of<X>(x), heads_of<X>(out), n, width, divisor, fours(x) && fours(out));
}

}  // namespace

template <>
void launch_cuda<MhcMix>(const MhcMix& args, Stream& stream) {
  for_tokens(args.x, "mhc_mix", [&](auto x) { mix<decltype(x)>(args, stream); });
}
template <>
void launch_cuda<MhcMixBackward>(const MhcMixBackward& args, Stream& stream) {
  for_tokens(args.x, "mhc_mix_backward", [&](auto x) { mix_backward<decltype(x)>(args, stream); });
}
template <>
void launch_cuda<MhcMerge>(const MhcMerge& args, Stream& stream) {
  for_tokens(args.x, "mhc_merge", [&](auto x) { merge<decltype(x)>(args, stream); });
}
template <>
void launch_cuda<MhcMergeBackward>(const MhcMergeBackward& args, Stream& stream) {
  for_tokens(args.x, "mhc_merge_backward", [&](auto x) { merge_backward<decltype(x)>(args, stream); });
}
template <>
void launch_cuda<MhcExpand>(const MhcExpand& args, Stream& stream) {
  for_tokens(args.x, "mhc_expand", [&](auto x) { copy<decltype(x)>(args.x, 1.0f, args.out, stream); });
}
template <>
void launch_cuda<MhcMean>(const MhcMean& args, Stream& stream) {
  const float n = static_cast<float>(args.x.size(1));
  for_tokens(args.x, "mhc_mean", [&](auto x) { sum<decltype(x)>(args.x, n, args.out, stream); });
}
template <>
void launch_cuda<MhcExpandBackward>(const MhcExpandBackward& args, Stream& stream) {
  for_tokens(args.dout, "mhc_expand_backward", [&](auto x) { sum<decltype(x)>(args.dout, 1.0f, args.dx, stream); });
}
template <>
void launch_cuda<MhcMeanBackward>(const MhcMeanBackward& args, Stream& stream) {
  const float n = static_cast<float>(args.dx.size(1));
  for_tokens(args.dout, "mhc_mean_backward", [&](auto x) { copy<decltype(x)>(args.dout, n, args.dx, stream); });
}

}  // namespace slipstream::kernels
