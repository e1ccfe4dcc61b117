#include "kernels/mhc/mhc.h"
#include "kernels/rmsnorm/rmsnorm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/mhc/mhc_simd.cc"
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "hwy/foreach_target.h"
#include "kernels/launch_cuda.h"
#include "kernels/mhc/sinkhorn-inl.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// Calls body(std::integral_constant<int, n>()): with n known the streams of a column stay in registers.
template <class Body>
void for_stream_count(int64_t n, Body&& body) {
  switch (n) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 5:
      return body(std::integral_constant<int, 5>());
    case 6:
      return body(std::integral_constant<int, 6>());
    case 7:
      return body(std::integral_constant<int, 7>());
    case 8:
      return body(std::integral_constant<int, 8>());
    default:
      CHECK(false);  // validate() refused it
  }
}

// The n rows of one token: of its streams, or of its matrix.
template <int N>
struct TokenRows {
  TokenRows(const Tensor& x, int64_t token) {
    for (int i = 0; i < N; ++i) at[i] = x.row(token, i);
  }
  float* at[N];
};

// Element (row, column) of the matrices of up to sixteen consecutive tokens, a token a lane; the other lanes
// are 0.
HWY_INLINE Lanes load_across(const float* p, int64_t token_stride, int64_t count) {
  float values[kLanes] = {};
  for (int64_t t = 0; t < count; ++t) values[t] = p[t * token_stride];
  return load(values);
}
HWY_INLINE void store_across(const Lanes& x, float* p, int64_t token_stride, int64_t count) {
  float values[kLanes];
  store(x, values);
  for (int64_t t = 0; t < count; ++t) p[t * token_stride] = values[t];
}

// The logits z scale + base of pre and post: lanes 0..N-1 and N..2N-1 of one vector.
template <int N>
class GateLogits {
 public:
  GateLogits(const float* base, const float* scale) {
    float lanes[kLanes] = {};
    std::fill(lanes, lanes + N, scale[0]);
    std::fill(lanes + N, lanes + 2 * N, scale[1]);
    scale_ = load(lanes);
    base_ = load_first(base, 2 * N);
  }
  HWY_INLINE Lanes operator()(const float* zr, float inv_rms) const {
    return fma(mul(load_first(zr, 2 * N), broadcast(inv_rms)), scale_, base_);
  }

 private:
  Lanes scale_;
  Lanes base_;
};

// The logits of comb for `count` tokens from `token` on.
template <int N, class Args>
HWY_INLINE TokenMatrices<N> comb_logits(const Args& args, int64_t token, int64_t count) {
  const float* zr = args.zr.row(token) + 2 * N;
  const float* base = args.base.f32() + 2 * N;
  const int64_t zr_stride = args.zr.stride(0);
  const Lanes inv_rms = load_across(args.inv_rms.f32() + token, 1, count);
  const Lanes scale = broadcast(args.scale.f32()[2]);
  TokenMatrices<N> logits;
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) {
      const int e = i * N + j;
      logits.at[i][j] = fma(mul(load_across(zr + e, zr_stride, count), inv_rms), scale, broadcast(base[e]));
    }
  }
  return logits;
}

// 1 / sqrt(mean of the squares + eps): a chain of its own for each stream, added in ascending order.
template <int N>
HWY_INLINE float inverse_rms(const TokenRows<N>& x, int64_t width, float eps) {
  Lanes squares[N];
  for (Lanes& s : squares) s = zero_lanes();
  for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
    for (int i = 0; i < N; ++i) {
      const Lanes v = chunk.load(x.at[i] + h);
      squares[i] = fma(v, v, squares[i]);
    }
  });
  for (int i = 1; i < N; ++i) squares[0] = add(squares[0], squares[i]);
  return 1.0f / std::sqrt(sum_lanes(squares[0]) / static_cast<float>(N * width) + eps);
}

template <int N>
void mix_streams(const MhcMix& args, int64_t begin, int64_t end) {
  const int64_t width = args.x.size(2);
  const GateLogits<N> gate_logits(args.base.f32(), args.scale.f32());
  for (int64_t t = begin; t < end; ++t) {
    const TokenRows<N> x(args.x, t);
    const float inv_rms = inverse_rms<N>(x, width, args.norm_eps);
    args.inv_rms.f32()[t] = inv_rms;
    float gates[kLanes];
    store(sigmoid(gate_logits(args.zr.row(t), inv_rms)), gates);
    Lanes pre[N];
    float* post = args.post.row(t);
    for (int i = 0; i < N; ++i) {
      pre[i] = broadcast(gates[i] + args.eps);
      post[i] = 2.0f * gates[N + i];
    }
    float* u = args.u.row(t);
    for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
      Lanes sum = mul(pre[0], chunk.load(x.at[0] + h));
      for (int i = 1; i < N; ++i) sum = fma(pre[i], chunk.load(x.at[i] + h), sum);
      chunk.store(sum, u + h);
    });
  }
}

template <int N>
void mix_comb(const MhcMix& args, int64_t token, int64_t count) {
  TokenMatrices<N> comb = comb_logits<N>(args, token, count);
  sinkhorn<N>(args.iterations, args.eps, comb, /*tape=*/nullptr);
  float* to = args.comb.f32() + token * args.comb.stride(0);
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) {
      store_across(comb.at[i][j], to + i * args.comb.stride(1) + j, args.comb.stride(0), count);
    }
  }
}

void mix(const MhcMix& args, int64_t begin, int64_t end) {
  for_stream_count(args.x.size(1), [&](auto n) {
    for (int64_t t = begin; t < end; t += kLanes) {
      const int64_t count = std::min(kLanes, end - t);
      mix_streams<n()>(args, t, t + count);
      mix_comb<n()>(args, t, count);
    }
  });
}

// Leaves the gradients of comb's logits in the last N * N columns of dzr.
template <int N>
void mix_comb_backward(const MhcMixBackward& args, int64_t token, int64_t count, float* tape) {
  TokenMatrices<N> forward = comb_logits<N>(args, token, count);
  sinkhorn<N>(args.iterations, args.eps, forward, tape);
  const float* dcomb = args.dcomb.f32() + token * args.dcomb.stride(0);
  TokenMatrices<N> d;
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) {
      d.at[i][j] = load_across(dcomb + i * args.dcomb.stride(1) + j, args.dcomb.stride(0), count);
    }
  }
  sinkhorn_backward<N>(args.iterations, tape, d);
  float* dlogits = args.dzr.row(token) + 2 * N;
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) store_across(d.at[i][j], dlogits + i * N + j, args.dzr.stride(0), count);
  }
}

// The scale of each column of z.
template <int N>
void fill_column_scales(const float* scale, float* out) {
  std::fill(out, out + N, scale[0]);
  std::fill(out + N, out + 2 * N, scale[1]);
  std::fill(out + 2 * N, out + (2 + N) * N, scale[2]);
}

// dx, and the gradients of the logits of pre and post in the first 2 N columns of dzr. After
// mix_comb_backward.
template <int N>
void mix_streams_backward(const MhcMixBackward& args, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = (2 + N) * N;
  const int64_t width = args.x.size(2);
  const GateLogits<N> gate_logits(args.base.f32(), args.scale.f32());
  float scales[(kColumns + kLanes - 1) / kLanes * kLanes];
  fill_column_scales<N>(args.scale.f32(), scales);
  for (int64_t t = begin; t < end; ++t) {
    const TokenRows<N> x(args.x, t), dx(args.dx, t);
    const float* du = args.du.row(t);
    Lanes dpre[N];
    for (Lanes& d : dpre) d = zero_lanes();
    for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
      const Lanes slope = chunk.load(du + h);
      for (int i = 0; i < N; ++i) dpre[i] = fma(slope, chunk.load(x.at[i] + h), dpre[i]);
    });

    const float inv_rms = args.inv_rms.f32()[t];
    const float* zr = args.zr.row(t);
    const Lanes logits = gate_logits(zr, inv_rms);
    const Lanes gates = sigmoid(logits);
    const Lanes complements = sigmoid(sub(zero_lanes(), logits));  // 1 - gates would cancel
    float dgates[kLanes] = {};
    for (int i = 0; i < N; ++i) {
      dgates[i] = sum_lanes(dpre[i]);
      dgates[N + i] = 2.0f * args.dpost.row(t)[i];
    }
    float* dlogits = args.dzr.row(t);
    store_first(mul(load(dgates), mul(gates, complements)), dlogits, 2 * N);

    Lanes dinv_rms = zero_lanes();
    for_lanes(kColumns, [&](int64_t e, auto chunk) HWY_ATTR {
      dinv_rms = fma(mul(chunk.load(dlogits + e), chunk.load(scales + e)), chunk.load(zr + e), dinv_rms);
    });
    // d inv_rms / d x = -inv_rms^3 x / (n H).
    const Lanes along_x =
        broadcast(-sum_lanes(dinv_rms) * inv_rms * inv_rms * inv_rms / static_cast<float>(N * width));
    float gate_values[kLanes];
    store(gates, gate_values);
    Lanes pre[N];
    for (int i = 0; i < N; ++i) pre[i] = broadcast(gate_values[i] + args.eps);
    for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
      const Lanes slope = chunk.load(du + h);
      for (int i = 0; i < N; ++i) {
        const Lanes sum = fma(pre[i], slope, chunk.load(dx.at[i] + h));
        chunk.store(fma(along_x, chunk.load(x.at[i] + h), sum), dx.at[i] + h);
      }
    });
  }
}

void mix_backward(const MhcMixBackward& args, int64_t begin, int64_t end, Worker& worker) {
  for_stream_count(args.x.size(1), [&](auto n) {
    float* tape = worker.scratch<float>(sinkhorn_tape_size<n()>(args.iterations));
    for (int64_t t = begin; t < end; t += kLanes) {
      const int64_t count = std::min(kLanes, end - t);
      mix_comb_backward<n()>(args, t, count, tape);
      mix_streams_backward<n()>(args, t, t + count);
    }
  });
}

// For the (up to sixteen) columns of z from `column` on, over all tokens in order: dbase, each column's share
// of dscale, and dzr from the gradients of the logits that it holds until now.
void mix_column_sums(const MhcMixBackward& args, int64_t column, float* scale_shares) {
  const int64_t n = args.x.size(1), columns = (2 + n) * n;
  const int64_t dzr_stride = args.dzr.stride(0), zr_stride = args.zr.stride(0);
  float* dzr = args.dzr.f32() + column;
  const float* zr = args.zr.f32() + column;
  const float* inv_rms = args.inv_rms.f32();
  float* dbase = args.dbase.f32() + column;
  float scales[kLanes] = {};
  for (int64_t e = column; e < std::min(column + kLanes, columns); ++e) {
    scales[e - column] = args.scale.f32()[std::min<int64_t>(e / n, 2)];
  }
  const auto sum = [&](auto chunk) HWY_ATTR {
    const Lanes scale = load(scales);
    Lanes base_sum = zero_lanes(), scale_sum = zero_lanes();
    for (int64_t t = 0; t < args.x.size(0); ++t) {
      const Lanes r = broadcast(inv_rms[t]);
      const Lanes dlogits = chunk.load(dzr + t * dzr_stride);
      base_sum = add(base_sum, dlogits);
      scale_sum = fma(dlogits, mul(chunk.load(zr + t * zr_stride), r), scale_sum);
      chunk.store(mul(mul(dlogits, scale), r), dzr + t * dzr_stride);
    }
    chunk.store(add(chunk.load(dbase), base_sum), dbase);
    chunk.store(scale_sum, scale_shares + column);
  };
  if (column + kLanes <= columns) {
    sum(FullChunk{});
  } else {
    sum(TailChunk{columns - column});
  }
}

template <int N>
void merge_streams(const MhcMerge& args, int64_t begin, int64_t end) {
  const int64_t width = args.x.size(2);
  for (int64_t t = begin; t < end; ++t) {
    const TokenRows<N> x(args.x, t), out(args.out, t), comb_rows(args.comb, t);
    const float* y = args.y.row(t);
    Lanes post[N], comb[N][N];
    for (int i = 0; i < N; ++i) {
      post[i] = broadcast(args.post.row(t)[i]);
      for (int j = 0; j < N; ++j) comb[i][j] = broadcast(comb_rows.at[i][j]);
    }
    for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
      Lanes streams[N];  // all read before any is written: out may be x
      for (int i = 0; i < N; ++i) streams[i] = chunk.load(x.at[i] + h);
      const Lanes update = chunk.load(y + h);
      for (int j = 0; j < N; ++j) {
        Lanes sum = mul(post[j], update);
        for (int i = 0; i < N; ++i) sum = fma(comb[i][j], streams[i], sum);
        chunk.store(sum, out.at[j] + h);
      }
    });
  }
}

void merge(const MhcMerge& args, int64_t begin, int64_t end) {
  for_stream_count(args.x.size(1), [&](auto n) { merge_streams<n()>(args, begin, end); });
}

template <int N>
void merge_backward_streams(const MhcMergeBackward& args, int64_t begin, int64_t end) {
  const int64_t width = args.x.size(2);
  for (int64_t t = begin; t < end; ++t) {
    const TokenRows<N> x(args.x, t), dout(args.dout, t), dx(args.dx, t), comb_rows(args.comb, t);
    const TokenRows<N> dcomb_rows(args.dcomb, t);
    const float* y = args.y.row(t);
    float* dy = args.dy.row(t);
    Lanes post[N], comb[N][N], dpost[N], dcomb[N][N];
    for (int i = 0; i < N; ++i) {
      post[i] = broadcast(args.post.row(t)[i]);
      dpost[i] = zero_lanes();
      for (int j = 0; j < N; ++j) {
        comb[i][j] = broadcast(comb_rows.at[i][j]);
        dcomb[i][j] = zero_lanes();
      }
    }
    for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
      Lanes slopes[N];  // all read before any dx is written: dx may be dout
      const Lanes update = chunk.load(y + h);
      Lanes update_slope = zero_lanes();
      for (int j = 0; j < N; ++j) {
        slopes[j] = chunk.load(dout.at[j] + h);
        update_slope = fma(post[j], slopes[j], update_slope);
        dpost[j] = fma(slopes[j], update, dpost[j]);
      }
      chunk.store(update_slope, dy + h);
      for (int i = 0; i < N; ++i) {
        const Lanes stream = chunk.load(x.at[i] + h);
        Lanes sum = zero_lanes();
        for (int j = 0; j < N; ++j) {
          dcomb[i][j] = fma(slopes[j], stream, dcomb[i][j]);
          sum = fma(comb[i][j], slopes[j], sum);
        }
        chunk.store(sum, dx.at[i] + h);
      }
    });
    for (int i = 0; i < N; ++i) {
      args.dpost.row(t)[i] = sum_lanes(dpost[i]);
      for (int j = 0; j < N; ++j) dcomb_rows.at[i][j] = sum_lanes(dcomb[i][j]);
    }
  }
}

void merge_backward(const MhcMergeBackward& args, int64_t begin, int64_t end) {
  for_stream_count(args.x.size(1), [&](auto n) { merge_backward_streams<n()>(args, begin, end); });
}

// out = (sum over streams, ascending) / divisor
void sum_streams(const Tensor& x, float divisor, const Tensor& out, int64_t begin, int64_t end) {
  const int64_t n = x.size(1), width = x.size(2), stride = x.stride(1);
  const Lanes divisors = broadcast(divisor);
  for (int64_t t = begin; t < end; ++t) {
    const float* from = x.row(t);
    float* to = out.row(t);
    for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
      Lanes sum = chunk.load(from + h);
      for (int64_t i = 1; i < n; ++i) sum = add(sum, chunk.load(from + i * stride + h));
      chunk.store(div(sum, divisors), to + h);
    });
  }
}

// Each stream of out = x / divisor
void copy_to_streams(const Tensor& x, float divisor, const Tensor& out, int64_t begin, int64_t end) {
  const int64_t n = out.size(1), width = out.size(2), stride = out.stride(1);
  const Lanes divisors = broadcast(divisor);
  for (int64_t t = begin; t < end; ++t) {
    const float* from = x.row(t);
    float* to = out.row(t);
    for_lanes(width, [&](int64_t h, auto chunk) HWY_ATTR {
      const Lanes value = div(chunk.load(from + h), divisors);
      for (int64_t i = 0; i < n; ++i) chunk.store(value, to + i * stride + h);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(mix);
HWY_EXPORT(mix_backward);
HWY_EXPORT(mix_column_sums);
HWY_EXPORT(merge);
HWY_EXPORT(merge_backward);
HWY_EXPORT(sum_streams);
HWY_EXPORT(copy_to_streams);

namespace {

constexpr int64_t kGroup = 16;           // tokens whose Sinkhorn iterations run side by side
constexpr int64_t kColumnsMax = 80;      // (2 + n) n of eight streams

int64_t grain_tokens(const Tensor& streams) { return task_rows(streams.size(1) * streams.size(2)); }

// Whole groups when every thread gets some; otherwise smaller ones, which waste lanes but share the rows'
// traffic.
int64_t grain_groups(const Tensor& streams, const Stream& stream) {
  const int64_t threads = stream.threads();
  const int64_t share = (streams.size(0) + threads - 1) / threads;
  return std::min(kGroup, std::max(share, grain_tokens(streams)));
}

}  // namespace

void launch(const MhcMix& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.x.size(0), grain_groups(args.x, stream), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(mix)(args, begin, end);
  });
  if (!args.y.empty()) launch(RmsNorm{.x = args.u, .w = args.w, .y = args.y, .inv_rms = args.u_inv, .eps = args.norm_eps}, stream);
}

void launch(const MhcMixBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t n = args.x.size(1), columns = (2 + n) * n;
  stream.parallel_for(args.x.size(0), grain_groups(args.x, stream),
                      [&](int64_t begin, int64_t end, Worker& worker) {
                        HWY_DYNAMIC_DISPATCH(mix_backward)(args, begin, end, worker);
                      });
  float scale_shares[kColumnsMax];
  stream.parallel_for((columns + kGroup - 1) / kGroup, 1, [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t c = begin; c < end; ++c)
      HWY_DYNAMIC_DISPATCH(mix_column_sums)(args, c * kGroup, scale_shares);
  });
  for (int64_t e = 0; e < columns; ++e) args.dscale.f32()[std::min<int64_t>(e / n, 2)] += scale_shares[e];
}

void launch(const MhcMerge& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.x.size(0), grain_tokens(args.x), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(merge)(args, begin, end);
  });
}

void launch(const MhcMergeBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.x.size(0), grain_tokens(args.x), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(merge_backward)(args, begin, end);
  });
}

void launch(const MhcExpand& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.x.size(0), grain_tokens(args.out), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(copy_to_streams)(args.x, 1.0f, args.out, begin, end);
  });
}

void launch(const MhcMean& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const auto n = static_cast<float>(args.x.size(1));
  stream.parallel_for(args.x.size(0), grain_tokens(args.x), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(sum_streams)(args.x, n, args.out, begin, end);
  });
}

void launch(const MhcExpandBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.dx.size(0), grain_tokens(args.dout), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(sum_streams)(args.dout, 1.0f, args.dx, begin, end);
  });
}

void launch(const MhcMeanBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const auto n = static_cast<float>(args.dx.size(1));
  stream.parallel_for(args.dx.size(0), grain_tokens(args.dx), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(copy_to_streams)(args.dout, n, args.dx, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
