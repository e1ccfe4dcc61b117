// Sinkhorn iterations on sixteen tokens at once: lane t of every vector belongs to token t, so a token's
// arithmetic is the same whoever its neighbours are, and spare lanes may hold anything finite.
//
// Included by mhc_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_MHC_SINKHORN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_MHC_SINKHORN_INL_H_
#undef SLIPSTREAM_KERNELS_MHC_SINKHORN_INL_H_
#else
#define SLIPSTREAM_KERNELS_MHC_SINKHORN_INL_H_
#endif

#include <cstdint>

#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// Element (i, j) of sixteen n x n matrices.
template <int N>
struct TokenMatrices {
  Lanes at[N][N];
};

template <int N>
HWY_INLINE void store_matrices(const TokenMatrices<N>& m, float* to) {
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) store(m.at[i][j], to + (i * N + j) * kLanes);
  }
}
template <int N>
HWY_INLINE TokenMatrices<N> load_matrices(const float* from) {
  TokenMatrices<N> m;
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) m.at[i][j] = load(from + (i * N + j) * kLanes);
  }
  return m;
}

// What the backward needs of one normalisation: its result, then the N factors it multiplied with.
template <int N>
constexpr int64_t kSinkhornStep = (N * N + N) * kLanes;
// The softmax, then 2 iterations - 1 normalisations: columns, rows, columns, ...
template <int N>
int64_t sinkhorn_tape_size(int64_t iterations) {
  return N * N * kLanes + (2 * iterations - 1) * kSinkhornStep<N>;
}

// Each row (column) times 1 / (its sum + eps): N divisions instead of N * N.
template <int N, bool Rows>
HWY_INLINE void normalize(const Lanes& eps, TokenMatrices<N>& m, float* tape) {
  const Lanes one = broadcast(1.0f);
  for (int a = 0; a < N; ++a) {
    Lanes sum = Rows ? m.at[a][0] : m.at[0][a];
    for (int b = 1; b < N; ++b) sum = add(sum, Rows ? m.at[a][b] : m.at[b][a]);
    const Lanes factor = div(one, add(sum, eps));
    for (int b = 0; b < N; ++b) {
      Lanes& value = Rows ? m.at[a][b] : m.at[b][a];
      value = mul(value, factor);
    }
    if (tape != nullptr) store(factor, tape + (N * N + a) * kLanes);
  }
  if (tape != nullptr) store_matrices<N>(m, tape);
}

// d becomes the gradient of the input: (d - (d · result)) * factor, along each row (column).
template <int N, bool Rows>
HWY_INLINE void normalize_backward(const float* tape, TokenMatrices<N>& d) {
  const TokenMatrices<N> result = load_matrices<N>(tape);
  for (int a = 0; a < N; ++a) {
    Lanes dot = zero_lanes();
    for (int b = 0; b < N; ++b) {
      dot = Rows ? fma(d.at[a][b], result.at[a][b], dot) : fma(d.at[b][a], result.at[b][a], dot);
    }
    const Lanes factor = load(tape + (N * N + a) * kLanes);
    for (int b = 0; b < N; ++b) {
      Lanes& value = Rows ? d.at[a][b] : d.at[b][a];
      value = mul(sub(value, dot), factor);
    }
  }
}

template <int N>
HWY_INLINE void softmax_rows(TokenMatrices<N>& m) {
  for (int i = 0; i < N; ++i) {
    Lanes largest = m.at[i][0];
    for (int j = 1; j < N; ++j) largest = max(largest, m.at[i][j]);
    Lanes sum = zero_lanes();
    for (int j = 0; j < N; ++j) {
      m.at[i][j] = exp(sub(m.at[i][j], largest));
      sum = add(sum, m.at[i][j]);
    }
    for (int j = 0; j < N; ++j) m.at[i][j] = div(m.at[i][j], sum);
  }
}

// m: logits in, the iterated matrices out. tape: null, or sinkhorn_tape_size floats for the backward.
template <int N>
HWY_INLINE void sinkhorn(int64_t iterations, float eps_value, TokenMatrices<N>& m, float* tape) {
  const Lanes eps = broadcast(eps_value);
  const auto step = [&](int64_t index) {
    return tape == nullptr ? nullptr : tape + N * N * kLanes + index * kSinkhornStep<N>;
  };
  softmax_rows<N>(m);
  if (tape != nullptr) store_matrices<N>(m, tape);
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) m.at[i][j] = add(m.at[i][j], eps);
  }
  normalize<N, /*Rows=*/false>(eps, m, step(0));
  for (int64_t i = 1; i < iterations; ++i) {
    normalize<N, /*Rows=*/true>(eps, m, step(2 * i - 1));
    normalize<N, /*Rows=*/false>(eps, m, step(2 * i));
  }
}

// d: the gradient of sinkhorn()'s result in, of its logits out.
template <int N>
HWY_INLINE void sinkhorn_backward(int64_t iterations, const float* tape, TokenMatrices<N>& d) {
  const auto step = [&](int64_t index) { return tape + N * N * kLanes + index * kSinkhornStep<N>; };
  for (int64_t i = iterations - 1; i >= 1; --i) {
    normalize_backward<N, /*Rows=*/false>(step(2 * i), d);
    normalize_backward<N, /*Rows=*/true>(step(2 * i - 1), d);
  }
  normalize_backward<N, /*Rows=*/false>(step(0), d);
  const TokenMatrices<N> softmax = load_matrices<N>(tape);
  for (int i = 0; i < N; ++i) {
    Lanes dot = zero_lanes();
    for (int j = 0; j < N; ++j) dot = fma(d.at[i][j], softmax.at[i][j], dot);
    for (int j = 0; j < N; ++j) d.at[i][j] = mul(sub(d.at[i][j], dot), softmax.at[i][j]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
