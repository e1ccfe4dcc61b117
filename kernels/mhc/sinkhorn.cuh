// Sinkhorn iterations of one token by one thread: the matrix stays in its registers.
#pragma once

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

template <int N>
struct Matrix {
  float at[N][N];
};

// What the backward needs of the iterations: the softmax, then of each of the 2 iterations - 1 normalisations
// (columns, rows, columns, ...) its result and the N factors it multiplied with. Element e of thread t is at
// e * stride + t.
struct SinkhornTape {
  float* data;
  int64_t stride;
  __device__ float& at(int64_t element) const { return data[element * stride]; }
};
__host__ __device__ constexpr int64_t sinkhorn_tape_size(int64_t n, int64_t iterations) {
  return n * n + (2 * iterations - 1) * (n * n + n);
}

// Each row (column) times 1 / (its sum + eps).
template <int N, bool kRows>
__device__ void normalize(float eps, Matrix<N>& m, const SinkhornTape& tape, int64_t at) {
#pragma unroll
  for (int a = 0; a < N; ++a) {
    float sum = kRows ? m.at[a][0] : m.at[0][a];
#pragma unroll
    for (int b = 1; b < N; ++b) sum += kRows ? m.at[a][b] : m.at[b][a];
    const float factor = 1.0f / (sum + eps);
#pragma unroll
    for (int b = 0; b < N; ++b) {
      float& value = kRows ? m.at[a][b] : m.at[b][a];
      value *= factor;
      if (tape.data != nullptr) tape.at(at + (kRows ? a * N + b : b * N + a)) = value;
    }
    if (tape.data != nullptr) tape.at(at + N * N + a) = factor;
  }
}

// d becomes the gradient of the input: (d - (d · result)) * factor, along each row (column).
template <int N, bool kRows>
__device__ void normalize_backward(const SinkhornTape& tape, int64_t at, Matrix<N>& d) {
#pragma unroll
  for (int a = 0; a < N; ++a) {
    float dot = 0.0f;
#pragma unroll
    for (int b = 0; b < N; ++b) {
      dot = fmaf(kRows ? d.at[a][b] : d.at[b][a], tape.at(at + (kRows ? a * N + b : b * N + a)), dot);
    }
    const float factor = tape.at(at + N * N + a);
#pragma unroll
    for (int b = 0; b < N; ++b) {
      float& value = kRows ? d.at[a][b] : d.at[b][a];
      value = (value - dot) * factor;
    }
  }
}

// m: logits in, the iterated matrix out. tape.data: null, or room for sinkhorn_tape_size values a thread.
template <int N>
__device__ void sinkhorn(int iterations, float eps, Matrix<N>& m, const SinkhornTape& tape) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float largest = m.at[i][0], sum = 0.0f;
#pragma unroll
    for (int j = 1; j < N; ++j) largest = fmaxf(largest, m.at[i][j]);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += m.at[i][j] = expf(m.at[i][j] - largest);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      m.at[i][j] /= sum;
      if (tape.data != nullptr) tape.at(i * N + j) = m.at[i][j];
      m.at[i][j] += eps;
    }
  }
  normalize<N, false>(eps, m, tape, N * N);
  for (int i = 1; i < iterations; ++i) {
    normalize<N, true>(eps, m, tape, N * N + (2 * i - 1) * (N * N + N));
    normalize<N, false>(eps, m, tape, N * N + 2 * i * (N * N + N));
  }
}

// d: the gradient of sinkhorn()'s result in, of its logits out.
template <int N>
__device__ void sinkhorn_backward(int iterations, const SinkhornTape& tape, Matrix<N>& d) {
  for (int i = iterations - 1; i >= 1; --i) {
    normalize_backward<N, false>(tape, N * N + 2 * i * (N * N + N), d);
    normalize_backward<N, true>(tape, N * N + (2 * i - 1) * (N * N + N), d);
  }
  normalize_backward<N, false>(tape, N * N, d);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) dot = fmaf(d.at[i][j], tape.at(i * N + j), dot);
#pragma unroll
    for (int j = 0; j < N; ++j) d.at[i][j] = (d.at[i][j] - dot) * tape.at(i * N + j);
  }
}

}  // namespace slipstream::kernels
