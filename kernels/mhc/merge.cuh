// MhcMerge and its backward, and the ends of the streams.
#pragma once

#include "kernels/cuda/row_values.cuh"

namespace slipstream::kernels {

template <class X>
struct MergeView {
  Heads<X> x, out, dout, dx;
  Rows<X> y, dy;
  Rows<float> post, dpost;
  Heads<float> comb, dcomb;
  int width;
  bool whole;
};

// A token's coefficients.
template <int N>
struct MergeFactors {
  float post[N], comb[N][N];
  template <class X>
  __device__ __forceinline__ MergeFactors(const MergeView<X>& view, int64_t t) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      post[i] = view.post[t][i];
#pragma unroll
      for (int j = 0; j < N; ++j) comb[i][j] = view.comb.at(t, i)[j];
    }
  }
};

// A token's columns go over gridDim.y blocks: one where tokens are many, so that the coefficients are read once.
template <class X, int N>
__global__ void __launch_bounds__(kPartThreads) merge_streams(const MergeView<X> view) {
  const int64_t t = blockIdx.x;
  const MergeFactors<N> factors(view, t);
  const int step = 4 * static_cast<int>(gridDim.y) * kPartThreads;
  for (int column = 4 * static_cast<int>(blockIdx.y * kPartThreads + threadIdx.x); column < view.width; column += step) {
    const int count = view.width - column;
    Four<X> x[N];  // all read before any is written: out may be x
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = load_four(view.x.at(t, i) + column, count, view.whole);
    const float4 y = load_run(view.y[t] + column, count, view.whole);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float p = factors.post[j];
      float4 sum = {p * y.x, p * y.y, p * y.z, p * y.w};
#pragma unroll
      for (int i = 0; i < N; ++i) sum = add_scaled(factors.comb[i][j], x[i].values(), sum);
      store_run(view.out.at(t, j) + column, sum, count, view.whole);
    }
  }
}

// One block a token. The next run is on its way while one is worked on.
template <class X, int N>
__global__ void __launch_bounds__(256, N <= 4 ? 2 : 1) merge_streams_backward(const MergeView<X> view) {
  constexpr int kSums = N + N * N;
  __shared__ float partial[kSums][8];
  const int64_t t = blockIdx.x;
  const RowShare share = block_share(view.width, view.whole);
  struct Run {
    Four<X> y, x[N], g[N];
  };
  const auto load_all = [&](int column) {
    Run run;
    const int count = share.width - column;
    run.y = load_four(view.y[t] + column, count, share.whole);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      run.g[i] = load_four(view.dout.at(t, i) + column, count, share.whole);
      run.x[i] = load_four(view.x.at(t, i) + column, count, share.whole);
    }
    return run;
  };
  float sums[kSums] = {};  // dpost, then dcomb
  Run next;
  if (share.column(0) < share.width) next = load_all(share.column(0));
  const MergeFactors<N> factors(view, t);
  for (int r = 0; share.column(r) < share.width; ++r) {
    const Run run = next;  // whole before any dx is written: dx may be dout
    const int column = share.column(r), count = share.width - column;
    if (share.column(r + 1) < share.width) next = load_all(share.column(r + 1));
    float4 dy = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      dy = add_scaled(factors.post[j], run.g[j].values(), dy);
      sums[j] = add_products(run.g[j].values(), run.y.values(), sums[j]);
    }
    store_run(view.dy[t] + column, dy, count, share.whole);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float4 x = run.x[i].values();
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float4 g = run.g[j].values();
        sums[N + i * N + j] = add_products(g, x, sums[N + i * N + j]);
        sum = add_scaled(factors.comb[i][j], g, sum);
      }
      store_run(view.dx.at(t, i) + column, sum, count, share.whole);
    }
  }
  // As block_sum(), all sums at once: warps first, then the warps ascending.
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const float sum = warp_sum(sums[s]);
    if (threadIdx.x % kWarp == 0) partial[s][threadIdx.x / kWarp] = sum;
  }
  __syncthreads();
  for (int s = static_cast<int>(threadIdx.x); s < kSums; s += static_cast<int>(blockDim.x)) {
    float sum = 0.0f;
    for (unsigned w = 0; w < blockDim.x / kWarp; ++w) sum += partial[s][w];
    if (s < N) {
      view.dpost[t][s] = sum;
    } else {
      view.dcomb.at(t, (s - N) / N)[(s - N) % N] = sum;
    }
  }
}

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

}  // namespace slipstream::kernels
