// MhcMix and its backward: a block a token, whose streams stay in registers between the norm and the mix; Sinkhorn by lanes of a
// warp.
#pragma once

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/norm_row.cuh"
#include "kernels/mhc/sinkhorn.cuh"

namespace slipstream::kernels {

constexpr int kStreamsMax = 8;
constexpr int kColumnsMax = (2 + kStreamsMax) * kStreamsMax;
constexpr int kTokenThreadsMax = 256;  // row_threads() of wide rows
// Runs of four columns a thread holds of each stream: all of 4096 columns, where streams are four.
template <int N>
constexpr int kHeldRuns = 16 / (N < 4 ? 4 : N);
// Blocks a multiprocessor for which the held values leave registers.
template <class X, int kBlocks>
constexpr int kMixBlocks = sizeof(X) == 2 ? kBlocks : 1;

// The scale of column e of z: pre, post or comb.
__device__ inline float scale_of(const float* scale, int e, int n) { return scale[min(e / n, 2)]; }

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
  const float* w;
  Rows<X> y;  // no norm without
  float* u_inv;
  int width, iterations;
  bool whole;
};

// Before the iterations. Of MixView or MixBackwardView.
template <int N, class View>
__device__ __forceinline__ LaneMatrix<N> comb_logits(const View& view, int64_t t, float inv_rms) {
  LaneMatrix<N> m;
#pragma unroll
  for (int held = 0; held < LaneMatrix<N>::kHeld; ++held) {
    const int column = 2 * N + LaneMatrix<N>::element(held);
    m.at[held] = fmaf(view.zr[t][column] * inv_rms, view.scale[2], view.base[column]);
  }
  return m;
}

// By all lanes of a warp, a group of them a token; where `wanted` the token's comb is written.
template <int N, class X>
__device__ __forceinline__ void make_comb(const MixView<X>& view, int64_t t, float inv_rms, bool wanted) {
  LaneMatrix<N> m = comb_logits<N>(view, t, inv_rms);
  sinkhorn<N, false>(view.iterations, view.eps, m, {nullptr});
#pragma unroll
  for (int held = 0; held < LaneMatrix<N>::kHeld; ++held) {
    const int element = LaneMatrix<N>::element(held);
    if (wanted && LaneMatrix<N>::owns(held)) view.comb.at(t, element / N)[element % N] = m.at[held];
  }
}

// With many tokens comb has a launch of its own: a block's last warp would keep its registers from the next block.
constexpr int64_t kFewTokens = 264;  // two blocks a multiprocessor
constexpr int kCombThreads = 128;

template <class X, int N>
__global__ void __launch_bounds__(kCombThreads) mix_comb(const MixView<X> view, int64_t tokens) {
  const int64_t token = (int64_t{blockIdx.x} * kCombThreads + threadIdx.x) / LaneMatrix<N>::kGroup;
  const int64_t t = min(token, tokens - 1);  // lanes without a token work for nothing
  make_comb<N>(view, t, view.inv_rms[t], token < tokens);
}

// With few tokens comb is made by one more warp, beside the mix.
template <bool kWithComb>
constexpr int kMixThreadsMore = kWithComb ? kWarp : 0;

template <class X, int N, bool kWithComb>
__global__ void __launch_bounds__(kTokenThreadsMax + kMixThreadsMore<kWithComb>, kWithComb ? 2 : kMixBlocks<X, 4>)
    mix_streams(const MixView<X> view) {
  constexpr int kRuns = kHeldRuns<N>;
  __shared__ float pre[N];
  const int64_t t = blockIdx.x;
  const int e = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x) - kMixThreadsMore<kWithComb>;
  const bool mixes = !kWithComb || e < threads;
  const RowShare share = {e, threads, mixes ? view.width : 0, view.whole};
  if (view.y.data != nullptr) prefetch_norm<kRuns>(view.w, share);
  HeldRow<X, kRuns> x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = HeldRow<X, kRuns>(view.x.at(t, i), share);
  float z = 0.0f, scale = 0.0f, base = 0.0f;  // of the gates, before the norm is known
  if (e < 2 * N) z = view.zr[t][e], scale = scale_of(view.scale, e, N), base = view.base[e];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    for_runs<kRuns>(share, [&](int r, int column) { squares = add_squares(x[i].at(r, column, share), squares); });
  }
  const float mean = block_sum(squares) / static_cast<float>(int64_t{N} * view.width);
  const float inv_rms = 1.0f / sqrtf(mean + view.norm_eps);
  if (e == 0) view.inv_rms[t] = inv_rms;
  if (e < 2 * N) {
    const float gate = sigmoid(fmaf(z * inv_rms, scale, base));
    if (e < N) {
      pre[e] = gate + view.eps;
    } else {
      view.post[t][e - N] = 2.0f * gate;
    }
  }
  __syncthreads();
  if (!mixes) return make_comb<N>(view, t, inv_rms, e % kWarp < LaneMatrix<N>::kGroup);
  HeldRow<X, kRuns> u(view.u[t]);
  for_runs<kRuns>(share, [&](int r, int column) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; ++i) sum = add_scaled(pre[i], x[i].at(r, column, share), sum);
    sum = {rounded<X>(sum.x), rounded<X>(sum.y), rounded<X>(sum.z), rounded<X>(sum.w)};
    store_run(view.u[t] + column, sum, share.width - column, share.whole);
    if (r < kRuns) u.keep(r, sum);
  });
  if (view.y.data == nullptr) return;
  const float u_inv = norm_row(u, view.w, view.y[t], view.norm_eps, share, [&](float value) {
    return sum_of_warps(value, threads / kWarp, [&] {
      if constexpr (kWithComb) {
        asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
      } else {
        __syncthreads();
      }
    });
  });
  if (view.u_inv != nullptr && e == 0) view.u_inv[t] = u_inv;
}

// --- MhcMixBackward: dzr holds the gradients of the logits until the last kernel ---

template <class X>
struct MixBackwardView {
  Heads<X> x, dx;
  Rows<X> du;
  Rows<float> zr, dpost, dzr;
  Heads<float> dcomb;
  const float *base, *scale, *inv_rms;
  float eps;
  int width, iterations;
  bool whole;
};

// dzr of comb's columns. A group of lanes a token; the tapes of a block's warps are its shared memory.
template <class X, int N>
__global__ void mix_comb_backward(const MixBackwardView<X> view, int64_t tokens) {
  using Lanes = LaneMatrix<N>;
  extern __shared__ float tapes[];
  const SinkhornTape<N> tape{tapes + threadIdx.x / kWarp * SinkhornTape<N>::size(view.iterations)};
  const int64_t token = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / Lanes::kGroup;
  const int64_t t = min(token, tokens - 1);  // lanes without a token work for nothing
  Lanes m = comb_logits<N>(view, t, view.inv_rms[t]), d;
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) {
    const int element = Lanes::element(held);
    d.at[held] = view.dcomb.at(t, element / N)[element % N];
  }
  sinkhorn<N, true>(view.iterations, view.eps, m, tape);
  sinkhorn_backward<N>(view.iterations, tape, d);
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) {
    if (token < tokens && Lanes::owns(held)) view.dzr[t][2 * N + Lanes::element(held)] = d.at[held];
  }
}

// dx, the sum so far, is read in the end, two runs at a time, from the L2.
template <class X, int N>
__global__ void __launch_bounds__(kTokenThreadsMax, kMixBlocks<X, 3>) mix_streams_backward(const MixBackwardView<X> view) {
  constexpr int kRuns = kHeldRuns<N>, kColumns = (2 + N) * N;
  __shared__ float sums[kWarp][N], pre[N], dlogits[kColumns], terms[kColumns];
  const int64_t t = blockIdx.x;
  const RowShare share = block_share(view.width, view.whole);
  const HeldRow<X, kRuns> du(view.du[t], share);
  HeldRow<X, kRuns> x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = HeldRow<X, kRuns>(view.x.at(t, i), share);
  constexpr int kLine = 128 / sizeof(X);
  for (int i = 0; i < N; ++i) {
    for (int h = kLine * share.thread; h < share.width; h += kLine * share.threads) prefetch_line(view.dx.at(t, i) + h);
  }
  // dpre_i = x_i · du, the warps' sums ascending as in block_sum().
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float sum = 0.0f;
    for_runs<kRuns>(share, [&](int r, int column) {
      sum = add_products(x[i].at(r, column, share), du.at(r, column, share), sum);
    });
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp][i] = sum;
  }
  __syncthreads();
  const float inv_rms = view.inv_rms[t];
  for (int e = static_cast<int>(threadIdx.x); e < kColumns; e += static_cast<int>(blockDim.x)) {
    const float zr = view.zr[t][e], scale = scale_of(view.scale, e, N);
    if (e >= 2 * N) {
      dlogits[e] = view.dzr[t][e];
    } else {
      const float logit = fmaf(zr * inv_rms, scale, view.base[e]);
      const float gate = sigmoid(logit), complement = sigmoid(-logit);  // 1 - gate would cancel
      float slope = 0.0f;
      if (e < N) {
        for (unsigned w = 0; w < blockDim.x / kWarp; ++w) slope += sums[w][e];
        pre[e] = gate + view.eps;
      } else {
        slope = 2.0f * view.dpost[t][e - N];
      }
      dlogits[e] = slope * (gate * complement);
      view.dzr[t][e] = dlogits[e];
    }
    dlogits[e] *= scale;
    terms[e] = zr;
  }
  __syncthreads();
  float dinv_rms = 0.0f;
#pragma unroll
  for (int e = 0; e < kColumns; ++e) dinv_rms = fmaf(dlogits[e], terms[e], dinv_rms);
  // d inv_rms / d x = -inv_rms^3 x / (n H).
  const float along_x = -dinv_rms * inv_rms * inv_rms * inv_rms / static_cast<float>(int64_t{N} * view.width);
  const auto update = [&](int r, int column, int i, float4 before) {
    const float4 sum = add_scaled(pre[i], du.at(r, column, share), before);
    store_run(view.dx.at(t, i) + column, add_scaled(along_x, x[i].at(r, column, share), sum), share.width - column,
              share.whole);
  };
  const auto before = [&](int column, int i) {
    return load_four(view.dx.at(t, i) + column, share.width - column, share.whole);
  };
#pragma unroll
  for (int base = 0; base < kRuns; base += 2) {
    Four<X> dx[2][N];
#pragma unroll
    for (int r = base; r < min(base + 2, kRuns); ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (share.column(r) < share.width) dx[r - base][i] = before(share.column(r), i);
      }
    }
#pragma unroll
    for (int r = base; r < min(base + 2, kRuns); ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (share.column(r) < share.width) update(r, share.column(r), i, dx[r - base][i].values());
      }
    }
  }
  for (int column = share.column(kRuns); column < share.width; column += 4 * share.threads) {
#pragma unroll
    for (int i = 0; i < N; ++i) update(kRuns, column, i, before(column, i).values());
  }
}

static __global__ void mix_finish_dzr(Rows<float> dzr, const float* scale, const float* inv_rms, int n, int64_t tokens) {
  const int columns = (2 + n) * n;
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= tokens * columns) return;
  const int64_t t = at / columns;
  const int e = static_cast<int>(at % columns);
  dzr[t][e] = dzr[t][e] * scale_of(scale, e, n) * inv_rms[t];
}

}  // namespace slipstream::kernels
