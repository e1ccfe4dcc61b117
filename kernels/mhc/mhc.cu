#include <algorithm>

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"
#include "kernels/mhc/mhc.h"
#include "kernels/mhc/sinkhorn.cuh"

namespace slipstream::kernels {
namespace {

constexpr int kStreamsMax = 8;
constexpr int kColumnsMax = (2 + kStreamsMax) * kStreamsMax;
constexpr int kTokenThreads = 64;  // of the kernels with a thread a token

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The scale of column e of z: pre, post or comb.
__device__ float scale_of(const float* scale, int e, int n) { return scale[min(e / n, 2)]; }

// Streams of a token are its heads.
template <class X>
struct MixView {
  Heads<X> x;
  Rows<float> zr;
  const float *base, *scale;
  float norm_eps, eps;
  float* inv_rms;
  Rows<float> post;
  Heads<float> comb;
  Rows<X> u;
  int n, width, iterations;
  bool whole;
};

// --- MhcMix: a block a token, then a thread a token for comb ---

template <class X>
__global__ void mix_streams(const MixView<X> view) {
  __shared__ float pre[kStreamsMax];
  const int64_t t = blockIdx.x;
  float squares = 0.0f;
  for (int i = 0; i < view.n; ++i) {
    const X* const x = view.x.at(t, i);
    for_fours(view.width, [&](int64_t h, int64_t count) {
      const float4 v = load_run(x + h, count, view.whole);
      squares = fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, squares))));
    });
  }
  const float mean = block_sum(squares) / static_cast<float>(static_cast<int64_t>(view.n) * view.width);
  const float inv_rms = 1.0f / sqrtf(mean + view.norm_eps);
  if (threadIdx.x == 0) view.inv_rms[t] = inv_rms;
  const int e = static_cast<int>(threadIdx.x);
  if (e < 2 * view.n) {
    const float z = view.zr[t][e] * inv_rms;
    const float gate = sigmoid(fmaf(z, scale_of(view.scale, e, view.n), view.base[e]));
    if (e < view.n) {
      pre[e] = gate + view.eps;
    } else {
      view.post[t][e - view.n] = 2.0f * gate;
    }
  }
  __syncthreads();
  X* const u = view.u[t];
  for_fours(view.width, [&](int64_t h, int64_t count) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < view.n; ++i) {
      const float4 v = load_run(view.x.at(t, i) + h, count, view.whole);
      const float p = pre[i];
      sum = {fmaf(p, v.x, sum.x), fmaf(p, v.y, sum.y), fmaf(p, v.z, sum.z), fmaf(p, v.w, sum.w)};
    }
    store_run(u + h, sum, count, view.whole);
  });
}

template <int N>
__device__ Matrix<N> comb_logits(const Rows<float>& zr, const float* base, const float* scale,
                                 const float* inv_rms, int64_t t) {
  Matrix<N> m;
  const float r = inv_rms[t];
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int e = 2 * N + i * N + j;
      m.at[i][j] = fmaf(zr[t][e] * r, scale[2], base[e]);
    }
  }
  return m;
}

template <int N>
__global__ void __launch_bounds__(kTokenThreads)
    mix_comb(Rows<float> zr, const float* base, const float* scale, const float* inv_rms, float eps,
             int iterations, int64_t tokens, Heads<float> comb) {
  const int64_t t = int64_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (t >= tokens) return;
  Matrix<N> m = comb_logits<N>(zr, base, scale, inv_rms, t);
  sinkhorn<N>(iterations, eps, m, {nullptr, 0});
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) comb.at(t, i)[j] = m.at[i][j];
  }
}

// --- MhcMixBackward: dzr holds the gradients of the logits until the last kernel ---

template <int N>
__global__ void __launch_bounds__(kTokenThreads)
    mix_comb_backward(Rows<float> zr, const float* base, const float* scale, const float* inv_rms, float eps,
                      int iterations, int64_t begin, int64_t end, Heads<float> dcomb, Rows<float> dzr,
                      float* tape_data, int64_t tape_stride) {
  const int64_t local = int64_t{blockIdx.x} * kTokenThreads + threadIdx.x, t = begin + local;
  if (t >= end) return;
  const SinkhornTape tape{tape_data + local, tape_stride};
  Matrix<N> m = comb_logits<N>(zr, base, scale, inv_rms, t), d;
  sinkhorn<N>(iterations, eps, m, tape);
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) d.at[i][j] = dcomb.at(t, i)[j];
  }
  sinkhorn_backward<N>(iterations, tape, d);
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) dzr[t][2 * N + i * N + j] = d.at[i][j];
  }
}

template <class X>
struct MixBackwardView {
  Heads<X> x, dx;
  Rows<X> du;
  Rows<float> zr, dpost, dzr;
  const float *base, *scale, *inv_rms;
  float eps;
  int n, width;
  bool whole;
};

template <class X>
__global__ void mix_streams_backward(const MixBackwardView<X> view) {
  __shared__ float pre[kStreamsMax], dlogits[kColumnsMax];
  const int64_t t = blockIdx.x;
  const int n = view.n, columns = (2 + n) * n;
  const float inv_rms = view.inv_rms[t];
  const X* const du = view.du[t];
  for (int i = 0; i < n; ++i) {
    const X* const x = view.x.at(t, i);
    float sum = 0.0f;
    for_fours(view.width, [&](int64_t h, int64_t count) {
      const float4 v = load_run(x + h, count, view.whole), g = load_run(du + h, count, view.whole);
      sum = fmaf(v.w, g.w, fmaf(v.z, g.z, fmaf(v.y, g.y, fmaf(v.x, g.x, sum))));
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) dlogits[i] = sum;
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < columns; e += static_cast<int>(blockDim.x)) {
    if (e >= 2 * n) {
      dlogits[e] = view.dzr[t][e];
      continue;
    }
    const float logit = fmaf(view.zr[t][e] * inv_rms, scale_of(view.scale, e, n), view.base[e]);
    const float gate = sigmoid(logit), complement = sigmoid(-logit);  // 1 - gate would cancel
    const float slope = e < n ? dlogits[e] : 2.0f * view.dpost[t][e - n];
    dlogits[e] = slope * (gate * complement);
    if (e < n) pre[e] = gate + view.eps;
    view.dzr[t][e] = dlogits[e];
  }
  __syncthreads();
  float dinv_rms = 0.0f;
  for (int e = 0; e < columns; ++e)
    dinv_rms = fmaf(dlogits[e] * scale_of(view.scale, e, n), view.zr[t][e], dinv_rms);
  // d inv_rms / d x = -inv_rms^3 x / (n H).
  const float along_x =
      -dinv_rms * inv_rms * inv_rms * inv_rms / static_cast<float>(static_cast<int64_t>(n) * view.width);
  for_fours(view.width, [&](int64_t h, int64_t count) {
    const float4 g = load_run(du + h, count, view.whole);
    for (int i = 0; i < n; ++i) {
      const float4 v = load_run(view.x.at(t, i) + h, count, view.whole);
      float4 d = load_run(view.dx.at(t, i) + h, count, view.whole);
      const float p = pre[i];
      d = {fmaf(along_x, v.x, fmaf(p, g.x, d.x)), fmaf(along_x, v.y, fmaf(p, g.y, d.y)),
           fmaf(along_x, v.z, fmaf(p, g.z, d.z)), fmaf(along_x, v.w, fmaf(p, g.w, d.w))};
      store_run(view.dx.at(t, i) + h, d, count, view.whole);
    }
  });
}

__global__ void mix_finish_dzr(Rows<float> dzr, const float* scale, const float* inv_rms, int n,
                               int64_t tokens) {
  const int columns = (2 + n) * n;
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= tokens * columns) return;
  const int64_t t = at / columns;
  const int e = static_cast<int>(at % columns);
  dzr[t][e] = dzr[t][e] * scale_of(scale, e, n) * inv_rms[t];
}

// --- MhcMerge ---

template <class X>
struct MergeView {
  Heads<X> x, out, dout, dx;
  Rows<X> y, dy;
  Rows<float> post, dpost;
  Heads<float> comb, dcomb;
  int width;
  bool whole;
};

template <class X, int N>
__global__ void merge_streams(const MergeView<X> view) {
  const int64_t t = blockIdx.x;
  float post[N], comb[N][N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    post[i] = view.post[t][i];
#pragma unroll
    for (int j = 0; j < N; ++j) comb[i][j] = view.comb.at(t, i)[j];
  }
  for_fours(view.width, [&](int64_t h, int64_t count) {
    float4 x[N];  // all read before any is written: out may be x
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = load_run(view.x.at(t, i) + h, count, view.whole);
    const float4 y = load_run(view.y[t] + h, count, view.whole);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float4 sum = {post[j] * y.x, post[j] * y.y, post[j] * y.z, post[j] * y.w};
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float c = comb[i][j];
        sum = {fmaf(c, x[i].x, sum.x), fmaf(c, x[i].y, sum.y), fmaf(c, x[i].z, sum.z),
               fmaf(c, x[i].w, sum.w)};
      }
      store_run(view.out.at(t, j) + h, sum, count, view.whole);
    }
  });
}

__device__ float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

template <class X, int N>
__global__ void merge_streams_backward(const MergeView<X> view) {
  const int64_t t = blockIdx.x;
  float post[N], comb[N][N], dpost[N] = {}, dcomb[N][N] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    post[i] = view.post[t][i];
#pragma unroll
    for (int j = 0; j < N; ++j) comb[i][j] = view.comb.at(t, i)[j];
  }
  for_fours(view.width, [&](int64_t h, int64_t count) {
    float4 g[N];  // all read before any dx is written: dx may be dout
    float4 dy = {0.0f, 0.0f, 0.0f, 0.0f};
    const float4 y = load_run(view.y[t] + h, count, view.whole);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      g[j] = load_run(view.dout.at(t, j) + h, count, view.whole);
      const float p = post[j];
      dy = {fmaf(p, g[j].x, dy.x), fmaf(p, g[j].y, dy.y), fmaf(p, g[j].z, dy.z), fmaf(p, g[j].w, dy.w)};
      dpost[j] = dot4(g[j], y, dpost[j]);
    }
    store_run(view.dy[t] + h, dy, count, view.whole);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float4 x = load_run(view.x.at(t, i) + h, count, view.whole);
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float c = comb[i][j];
        dcomb[i][j] = dot4(g[j], x, dcomb[i][j]);
        sum = {fmaf(c, g[j].x, sum.x), fmaf(c, g[j].y, sum.y), fmaf(c, g[j].z, sum.z),
               fmaf(c, g[j].w, sum.w)};
      }
      store_run(view.dx.at(t, i) + h, sum, count, view.whole);
    }
  });
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float sum = block_sum(dpost[i]);
    if (threadIdx.x == 0) view.dpost[t][i] = sum;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float product = block_sum(dcomb[i][j]);
      if (threadIdx.x == 0) view.dcomb.at(t, i)[j] = product;
    }
  }
}

// --- the ends ---

// out = (sum over streams, ascending) / divisor
template <class X>
__global__ void sum_streams(Heads<X> x, Rows<X> out, int n, int width, float divisor, bool whole) {
  const int64_t t = blockIdx.x;
  for_fours(width, [&](int64_t h, int64_t count) {
    float4 sum = load_run(x.at(t, 0) + h, count, whole);
    for (int i = 1; i < n; ++i) {
      const float4 v = load_run(x.at(t, i) + h, count, whole);
      sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
    }
    store_run(out[t] + h, {sum.x / divisor, sum.y / divisor, sum.z / divisor, sum.w / divisor}, count, whole);
  });
}

// Each stream of out = x / divisor
template <class X>
__global__ void copy_to_streams(Rows<X> x, Heads<X> out, int n, int width, float divisor, bool whole) {
  const int64_t t = blockIdx.x;
  for_fours(width, [&](int64_t h, int64_t count) {
    const float4 v = load_run(x[t] + h, count, whole);
    const float4 value = {v.x / divisor, v.y / divisor, v.z / divisor, v.w / divisor};
    for (int i = 0; i < n; ++i) store_run(out.at(t, i) + h, value, count, whole);
  });
}

// --- launches ---

// f is called with the compile-time number of streams.
template <class F>
void for_stream_count(int64_t n, F&& f) {
  switch (n) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 4:
      return f(std::integral_constant<int, 4>());
    case 5:
      return f(std::integral_constant<int, 5>());
    case 6:
      return f(std::integral_constant<int, 6>());
    case 7:
      return f(std::integral_constant<int, 7>());
    case 8:
      return f(std::integral_constant<int, 8>());
    default:
      CHECK(false && "streams");
  }
}

unsigned token_blocks(int64_t tokens) { return static_cast<unsigned>(divide_up(tokens, kTokenThreads)); }

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
                        .n = static_cast<int>(args.x.size(1)),
                        .width = static_cast<int>(args.x.size(2)),
                        .iterations = static_cast<int>(args.iterations),
                        .whole = fours(args.x) && fours(args.u)};
  const int64_t tokens = args.x.size(0);
  mix_streams<X><<<static_cast<unsigned>(tokens), row_threads(view.width), 0, cuda_stream(stream)>>>(view);
  for_stream_count(view.n, [&](auto n) {
    mix_comb<n()><<<token_blocks(tokens), kTokenThreads, 0, cuda_stream(stream)>>>(
        view.zr, view.base, view.scale, view.inv_rms, view.eps, view.iterations, tokens, view.comb);
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
                                .base = args.base.f32(),
                                .scale = args.scale.f32(),
                                .inv_rms = args.inv_rms.f32(),
                                .eps = args.eps,
                                .n = static_cast<int>(n),
                                .width = static_cast<int>(args.x.size(2)),
                                .whole = fours(args.x) && fours(args.dx) && fours(args.du)};
  Arena& workspace = stream.workspace();
  {
    const ArenaScope scope(workspace);
    const int64_t tape_bytes = sinkhorn_tape_size(n, args.iterations) * 4;
    const int64_t round = std::min(tokens, (workspace.capacity() - workspace.used() - 1024) / tape_bytes);
    CHECK_GE(round, 1);  // the workspace holds one token's tape
    float* const tape = workspace.alloc(DType::kF32, {round * tape_bytes / 4}).f32();
    for (int64_t begin = 0; begin < tokens; begin += round) {
      const int64_t end = std::min(begin + round, tokens);
      for_stream_count(n, [&](auto count) {
        mix_comb_backward<count()><<<token_blocks(end - begin), kTokenThreads, 0, cuda_stream(stream)>>>(
            view.zr, view.base, view.scale, view.inv_rms, view.eps, static_cast<int>(args.iterations), begin,
            end, heads_of<float>(args.dcomb), view.dzr, tape, round);
      });
    }
  }
  mix_streams_backward<X>
      <<<static_cast<unsigned>(tokens), row_threads(view.width), 0, cuda_stream(stream)>>>(view);
  add_column_sums([dzr = view.dzr] __device__(int64_t t, int64_t e) { return dzr[t][e]; }, tokens, columns,
                  args.dbase.f32(), stream);
  add_column_sums(
      [dzr = view.dzr, zr = view.zr, inv_rms = view.inv_rms, n = view.n] __device__(int64_t t, int64_t part) {
        const int begin = static_cast<int>(part) * n, end = part < 2 ? begin + n : (2 + n) * n;
        float sum = 0.0f;
        for (int e = begin; e < end; ++e) sum = fmaf(dzr[t][e], zr[t][e] * inv_rms[t], sum);
        return sum;
      },
      tokens, 3, args.dscale.f32(), stream);
  mix_finish_dzr<<<static_cast<unsigned>(divide_up(tokens * columns, 256)), 256, 0, cuda_stream(stream)>>>(
      view.dzr, view.scale, view.inv_rms, view.n, tokens);
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
    merge_streams<X, n()>
        <<<static_cast<unsigned>(args.x.size(0)), row_threads(view.width), 0, cuda_stream(stream)>>>(view);
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

void sum(const Tensor& x, float divisor, const Tensor& out, Stream& stream) {
  if (x.size(0) == 0) return;
  const int n = static_cast<int>(x.size(1)), width = static_cast<int>(x.size(2));
  with_type(x.dtype(), [&](auto type) {
    using X = decltype(type);
    sum_streams<X><<<static_cast<unsigned>(x.size(0)), row_threads(width), 0, cuda_stream(stream)>>>(
        heads_of<X>(x), rows_of<X>(out), n, width, divisor, fours(x) && fours(out));
  });
  check_launch("mhc: sum of streams");
}

void copy(const Tensor& x, float divisor, const Tensor& out, Stream& stream) {
  if (x.size(0) == 0) return;
  const int n = static_cast<int>(out.size(1)), width = static_cast<int>(out.size(2));
  with_type(x.dtype(), [&](auto type) {
    using X = decltype(type);
    copy_to_streams<X><<<static_cast<unsigned>(x.size(0)), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<X>(x), heads_of<X>(out), n, width, divisor, fours(x) && fours(out));
  });
  check_launch("mhc: copy to streams");
}

}  // namespace

template <>
void launch_cuda<MhcMix>(const MhcMix& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { mix<decltype(x)>(args, stream); });
  check_launch("mhc_mix");
}
template <>
void launch_cuda<MhcMixBackward>(const MhcMixBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { mix_backward<decltype(x)>(args, stream); });
  check_launch("mhc_mix_backward");
}
template <>
void launch_cuda<MhcMerge>(const MhcMerge& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { merge<decltype(x)>(args, stream); });
  check_launch("mhc_merge");
}
template <>
void launch_cuda<MhcMergeBackward>(const MhcMergeBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { merge_backward<decltype(x)>(args, stream); });
  check_launch("mhc_merge_backward");
}
template <>
void launch_cuda<MhcExpand>(const MhcExpand& args, Stream& stream) {
  copy(args.x, 1.0f, args.out, stream);
}
template <>
void launch_cuda<MhcMean>(const MhcMean& args, Stream& stream) {
  sum(args.x, static_cast<float>(args.x.size(1)), args.out, stream);
}
template <>
void launch_cuda<MhcExpandBackward>(const MhcExpandBackward& args, Stream& stream) {
  sum(args.dout, 1.0f, args.dx, stream);
}
template <>
void launch_cuda<MhcMeanBackward>(const MhcMeanBackward& args, Stream& stream) {
  copy(args.dout, static_cast<float>(args.dx.size(1)), args.dx, stream);
}

}  // namespace slipstream::kernels
