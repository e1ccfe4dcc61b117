// Sinkhorn iterations of a token by lanes of one warp, an element each: what counts is the chain of 2 iterations - 1
// normalisations, each as long as a sum of N and a division.
#pragma once

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

// An N x N matrix in a group of lanes: lane l holds elements l and, where they are more than a warp's lanes, l + 32, row by row.
// Lanes that are left repeat the first elements. All lanes of the warp call every function.
template <int N>
struct LaneMatrix {
  static constexpr int kGroup = N * N <= 16 ? 16 : 32, kHeld = (N * N + kGroup - 1) / kGroup;
  float at[kHeld];

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kGroup; }
  static __device__ int element(int held) { return (lane() + held * kGroup) % (N * N); }
  // Whether this lane answers for what it holds.
  static __device__ bool owns(int held) { return lane() + held * kGroup < N * N; }
  // Any element's value.
  __device__ float get(int e) const {
    float value = __shfl_sync(0xffffffffu, at[0], e % kGroup, kGroup);
    if constexpr (kHeld == 2) {
      const float second = __shfl_sync(0xffffffffu, at[1], e % kGroup, kGroup);
      value = e < kGroup ? value : second;
    }
    return value;
  }
};

// Element j of the row (column) that element e is in.
template <int N, bool kRows>
__device__ int mate(int e, int j) {
  return kRows ? e / N * N + j : j * N + e % N;
}

// What the backward needs of the iterations: the softmax, then of each normalisation (columns, rows, columns, ...) its result
// and the factors it multiplied with; in shared memory, a warp's own.
template <int N>
struct SinkhornTape {
  using Lanes = LaneMatrix<N>;
  static constexpr int kStep = 2 * Lanes::kHeld * kWarp;  // values a normalisation
  float* data;
  static __host__ __device__ constexpr int size(int iterations) { return 2 * iterations * kStep; }
  __device__ float& factor(int step, int held) const {
    return data[step * kStep + (Lanes::kHeld + held) * kWarp + threadIdx.x % kWarp];
  }
  // Of this lane's group.
  __device__ float& result(int step, int e) const {
    const int first = static_cast<int>(threadIdx.x) % kWarp / Lanes::kGroup * Lanes::kGroup;
    return data[step * kStep + e / Lanes::kGroup * kWarp + first + e % Lanes::kGroup];
  }
  __device__ void keep(int step, const Lanes& m) const {
#pragma unroll
    for (int held = 0; held < Lanes::kHeld; ++held) {
      if (Lanes::owns(held)) result(step, Lanes::element(held)) = m.at[held];
    }
  }
};

// Each row (column) times 1 / (its sum + eps).
template <int N, bool kRows, bool kTaped>
__device__ __forceinline__ void normalize(float eps, LaneMatrix<N>& m, const SinkhornTape<N>& tape, int step) {
  using Lanes = LaneMatrix<N>;
  float factors[Lanes::kHeld];
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) {
    const int e = Lanes::element(held);
    float sum = m.get(mate<N, kRows>(e, 0));
#pragma unroll
    for (int j = 1; j < N; ++j) sum += m.get(mate<N, kRows>(e, j));
    factors[held] = 1.0f / (sum + eps);
  }
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) {
    m.at[held] *= factors[held];
    if constexpr (kTaped) tape.factor(step, held) = factors[held];
  }
  if constexpr (kTaped) tape.keep(step, m);
}

// m: logits in, the iterated matrix out. The tape's data is null unless kTaped.
template <int N, bool kTaped>
__device__ __forceinline__ void sinkhorn(int iterations, float eps, LaneMatrix<N>& m, const SinkhornTape<N>& tape) {
  using Lanes = LaneMatrix<N>;
  float largest[Lanes::kHeld];
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) {
    const int e = Lanes::element(held);
    largest[held] = m.get(mate<N, true>(e, 0));
#pragma unroll
    for (int j = 1; j < N; ++j) largest[held] = fmaxf(largest[held], m.get(mate<N, true>(e, j)));
  }
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) m.at[held] = expf(m.at[held] - largest[held]);
  float sums[Lanes::kHeld];
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) {
    const int e = Lanes::element(held);
    sums[held] = m.get(mate<N, true>(e, 0));
#pragma unroll
    for (int j = 1; j < N; ++j) sums[held] += m.get(mate<N, true>(e, j));
  }
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) m.at[held] /= sums[held];
  if constexpr (kTaped) tape.keep(0, m);
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) m.at[held] += eps;
  normalize<N, false, kTaped>(eps, m, tape, 1);
  for (int i = 1; i < iterations; ++i) {
    normalize<N, true, kTaped>(eps, m, tape, 2 * i);
    normalize<N, false, kTaped>(eps, m, tape, 2 * i + 1);
  }
}

// The sum over the row (column) of d times the result of the step, ascending.
template <int N, bool kRows>
__device__ __forceinline__ float along(const LaneMatrix<N>& d, const SinkhornTape<N>& tape, int step, int e) {
  float dot = 0.0f;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int other = mate<N, kRows>(e, j);
    dot = fmaf(d.get(other), tape.result(step, other), dot);
  }
  return dot;
}

// d becomes the gradient of the step's input: (d - (d · result)) * factor, along each row (column).
template <int N, bool kRows>
__device__ __forceinline__ void normalize_backward(const SinkhornTape<N>& tape, int step, LaneMatrix<N>& d) {
  using Lanes = LaneMatrix<N>;
  float dots[Lanes::kHeld];
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) dots[held] = along<N, kRows>(d, tape, step, Lanes::element(held));
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) d.at[held] = (d.at[held] - dots[held]) * tape.factor(step, held);
}

// d: the gradient of sinkhorn()'s result in, of its logits out.
template <int N>
__device__ __forceinline__ void sinkhorn_backward(int iterations, const SinkhornTape<N>& tape, LaneMatrix<N>& d) {
  using Lanes = LaneMatrix<N>;
  __syncwarp();  // other lanes' results are read
  for (int i = iterations - 1; i >= 1; --i) {
    normalize_backward<N, false>(tape, 2 * i + 1, d);
    normalize_backward<N, true>(tape, 2 * i, d);
  }
  normalize_backward<N, false>(tape, 1, d);
  float dots[Lanes::kHeld];
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) dots[held] = along<N, true>(d, tape, 0, Lanes::element(held));
#pragma unroll
  for (int held = 0; held < Lanes::kHeld; ++held) {
    d.at[held] = (d.at[held] - dots[held]) * tape.result(0, Lanes::element(held));
  }
}

}  // namespace slipstream::kernels
