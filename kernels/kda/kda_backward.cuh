// KDA's backward on the device: a block has one head of one sequence and goes through its chunks from the
// last to the first with the gradient D of the state in shared memory. A chunk's start state is recomputed
// from its span's. With the forward's names (kda.h):
//   dU = Bᵀ dO + K_C D, then from the last row up: dR_i = beta_i dU_i, dU_j -= A_ij dR_i for j < i;
//   dbeta_i = dU_i · r_i;  dV = dR;  dA = -dR Uᵀ, dB = dO Uᵀ (on and below the diagonal);
//   d(kP) = -dR S0ᵀ, d(qP) = dO S0ᵀ, dK_C = U Dᵀ;  D <- Diag(P_C) D + (qP)ᵀ dO - (kP)ᵀ dR
// where K_C holds the rows k_j E_Cj. What these say of q, k and the decays is row_gradients().
#pragma once

#include "kernels/kda/kda_forward.cuh"

namespace slipstream::kernels {

constexpr int kKdaValueMax = 128;          // d_v of the backward
constexpr int kRowPitch = kKdaKeyMax + 4;  // floats; float4 loads down a column fall into different banks
using ChunkRow = float[kRowPitch];

template <class X>
struct KdaBackwardView {
  Heads<X> q, k, d_o, dq, dk, dv_out;
  Heads<float> log_decay, r, dlog_decay;
  Rows<float> beta, dbeta;
  DeviceSequences batch;
  const float* span_states;
  int64_t span_stride, span_head, span_row;
  int heads, dk_width, dv_width;
};

struct KdaBackwardShared {
  float state[kKdaKeyMax][kRowPitch], d_state[kKdaKeyMax][kRowPitch];  // [dk, dv]
  ChunkRow decay[kChunk], key[kChunk], query[kChunk], prefix[kChunk];
  ChunkRow u[kChunk], d_o[kChunk], minus_dr[kChunk];
  ChunkRow d_key_prefix[kChunk];  // dU until it has been used
  ChunkRow d_query_prefix[kChunk];
  ChunkRow carried[kChunk];                      // K_C, then dK_C
  float total[kKdaKeyMax], d_total[kKdaKeyMax];  // P_C, P_C dP_C
  float beta[kChunk];
  float a[kChunk][kChunk], b[kChunk][kChunk], da[kChunk][kChunk], db[kChunk][kChunk];
};
static_assert(sizeof(KdaBackwardShared) <= kSharedMax);

// out[i] = sum over k of left[i][k] right[k]: 128 columns, a thread has one for eight rows.
__device__ inline void rows_times(const ChunkRow* left, const ChunkRow* right, ChunkRow* out) {
  const int column = static_cast<int>(threadIdx.x) % 128, row = static_cast<int>(threadIdx.x) / 128 * 8;
  float sum[8] = {};
  for (int k = 0; k < 128; k += 4) {
    const float r[4] = {right[k][column], right[k + 1][column], right[k + 2][column], right[k + 3][column]};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 l = *reinterpret_cast<const float4*>(&left[row + i][k]);
      sum[i] = fmaf(l.w, r[3], fmaf(l.z, r[2], fmaf(l.y, r[1], fmaf(l.x, r[0], sum[i]))));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) out[row + i][column] = sum[i];
}
// out[i][d] = sum over e of left[i][e] right[d][e].
__device__ inline void rows_times_transposed(const ChunkRow* left, const ChunkRow* right, ChunkRow* out) {
  const int column = static_cast<int>(threadIdx.x) % 128, row = static_cast<int>(threadIdx.x) / 128 * 8;
  float sum[8] = {};
  for (int k = 0; k < 128; k += 4) {
    const float4 r = *reinterpret_cast<const float4*>(&right[column][k]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 l = *reinterpret_cast<const float4*>(&left[row + i][k]);
      sum[i] = fmaf(l.w, r.w, fmaf(l.z, r.z, fmaf(l.y, r.y, fmaf(l.x, r.x, sum[i]))));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) out[row + i][column] = sum[i];
}
// to[d] = to[d] factor[d] + sum over i of left[i][d] scale[i][d] right[i]; scale may be null.
__device__ inline void add_outer(const ChunkRow* left, const ChunkRow* scale, const ChunkRow* right,
                                 const float* factor, ChunkRow* to) {
  const int column = static_cast<int>(threadIdx.x) % 128, group = static_cast<int>(threadIdx.x) / 128;
  float r[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) r[i] = right[i][column];
  for (int d = group * 4; d < 128; d += 8) {
    float sum[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      sum[c] = factor == nullptr ? to[d + c][column] : to[d + c][column] * factor[d + c];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float4 l = *reinterpret_cast<const float4*>(&left[i][d]);
      if (scale != nullptr) {
        const float4 p = *reinterpret_cast<const float4*>(&scale[i][d]);
        l = {l.x * p.x, l.y * p.y, l.z * p.z, l.w * p.w};
      }
      sum[0] = fmaf(l.x, r[i], sum[0]);
      sum[1] = fmaf(l.y, r[i], sum[1]);
      sum[2] = fmaf(l.z, r[i], sum[2]);
      sum[3] = fmaf(l.w, r[i], sum[3]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) to[d + c][column] = sum[c];
  }
}

// Rows of the chunk that starts at batch row `row`; those beyond `count` are neutral. Ends with a barrier.
template <class X>
__device__ void load_chunk(const KdaBackwardView<X>& view, int head, int row, int count, bool whole,
                           KdaBackwardShared& s) {
  const int own = static_cast<int>(threadIdx.x);
  if (own < kChunk) s.beta[own] = own < count ? view.beta[row + own][head] : 0.0f;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * 128; i += kKdaThreads) {  // many loads in flight
    const int r = i / 128, d = i % 128;
    const bool present = r < count, has_key = present && d < view.dk_width,
               has_value = present && d < view.dv_width;
    s.decay[r][d] = has_key ? expf(view.log_decay.at(row + r, head)[d]) : 1.0f;
    s.key[r][d] = has_key ? load(view.k.at(row + r, head) + d) : 0.0f;
    s.u[r][d] = has_value ? view.beta[row + r][head] * view.r.at(row + r, head)[d] : 0.0f;
    if (!whole) continue;
    s.query[r][d] = has_key ? load(view.q.at(row + r, head) + d) : 0.0f;
    s.d_o[r][d] = has_value ? load(view.d_o.at(row + r, head) + d) : 0.0f;
    s.minus_dr[r][d] = 0.0f;
  }
  __syncthreads();
  const int d = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x < 128) {
    float prefix = 1.0f;
    for (int i = 0; i < kChunk; ++i) s.prefix[i][d] = prefix = prefix * s.decay[i][d];
    s.total[d] = prefix;
  } else {
    float decay = 1.0f;
    for (int j = kChunk - 1; j >= 0; --j) {
      s.carried[j][d] = s.key[j][d] * decay;
      decay *= s.decay[j][d];
    }
  }
  __syncthreads();
}

// Column e of the back substitution: minus_dr = -dR, and dU in place of K_C D.
__device__ inline void solve_column(int e, int count, KdaBackwardShared& s) {
  for (int j = count - 1; j >= 0; --j) {
    float sum = fmaf(s.b[j][j], s.d_o[j][e], s.d_key_prefix[j][e]);
    for (int i = j + 1; i < count; ++i) {
      sum = fmaf(s.b[i][j], s.d_o[i][e], sum);
      sum = fmaf(s.a[i][j], s.minus_dr[i][e], sum);
    }
    s.d_key_prefix[j][e] = sum;
    s.minus_dr[j][e] = -s.beta[j] * sum;
  }
}

// Channel d of dq, dk and the gradient of log_decay. Down the rows, what each reads; up the rows, what is
// read of each: z_j(m) = sum over i >= m of (dA_ij k_i + dB_ij q_i) a_{m+1} ... a_i, so that decay m has the
// share a_m sum over j < m of z_j(m) k_j a_{j+1} ... a_{m-1} of the scores. No difference of sums is taken.
template <class X>
__device__ void row_gradients(const KdaBackwardView<X>& view, int d, int head, int row, int count,
                              KdaBackwardShared& s) {
  float k[kChunk], a[kChunk], left[kChunk], reads[kChunk], z[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    k[i] = s.key[i][d];
    a[i] = s.decay[i][d];
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {  // z holds k_j E_ij
    const float q = s.query[i][d];
    float by_key = s.prefix[i][d] * s.d_key_prefix[i][d], by_query = s.prefix[i][d] * s.d_query_prefix[i][d];
    reads[i] = fmaf(k[i], by_key, q * by_query);
#pragma unroll
    for (int j = 0; j < i; ++j) {
      z[j] *= a[i];
      by_key = fmaf(s.da[i][j], z[j], by_key);
      by_query = fmaf(s.db[i][j], z[j], by_query);
    }
    z[i] = k[i];
    if (i < count) store(view.dq.at(row + i, head) + d, fmaf(s.db[i][i], k[i], by_query));
    left[i] = fmaf(s.db[i][i], q, by_key);
  }
  float decay = 1.0f, carried[kChunk];
#pragma unroll
  for (int j = kChunk - 1; j >= 0; --j) {
    const float gradient = decay * s.carried[j][d];
    left[j] += gradient;
    carried[j] = k[j] * gradient;
    decay *= a[j];
  }
  float before = 0.0f;  // carried rows before decay m
#pragma unroll
  for (int m = 0; m < kChunk; ++m) {
    const float own = carried[m];
    carried[m] = before;
    before += own;
    z[m] = 0.0f;
  }
  float suffix = 0.0f;
#pragma unroll
  for (int m = kChunk - 1; m >= 0; --m) {
    const float next = m + 1 < kChunk ? a[(m + 1) % kChunk] : 0.0f;
    const float q = s.query[m][d];
    float scores = 0.0f, between = 1.0f;
#pragma unroll
    for (int j = m - 1; j >= 0; --j) {
      z[j] = fmaf(s.db[m][j], q, fmaf(s.da[m][j], k[m], next * z[j]));
      scores = fmaf(z[j], k[j] * between, scores);
      between *= a[j];
    }
    suffix += reads[m];
    if (m >= count) continue;
    store(view.dk.at(row + m, head) + d, fmaf(next, z[m], left[m]));
    view.dlog_decay.at(row + m, head)[d] = fmaf(a[m], scores, suffix + carried[m] + s.d_total[d]);
  }
}

template <class X>
__global__ void __launch_bounds__(kKdaThreads) kda_backward(const KdaBackwardView<X> view) {
  extern __shared__ __align__(128) unsigned char bytes[];
  KdaBackwardShared& s = *reinterpret_cast<KdaBackwardShared*>(bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int sequence = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x);
  const int first = view.batch.row_begin[sequence], rows = view.batch.row_begin[sequence + 1] - first;
  int span = 0;
  for (int b = lane; b < sequence; b += kWarp)
    span += (view.batch.row_begin[b + 1] - view.batch.row_begin[b] + kSpan - 1) / kSpan;
  span = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(span)));
  for (int i = thread; i < 128 * 128; i += kKdaThreads) s.d_state[i / 128][i % 128] = 0.0f;

  for (int base = (rows - 1) / kChunk * kChunk; base >= 0 && rows > 0; base -= kChunk) {
    __syncthreads();
    const float* const from =
        view.span_states + (span + base / kSpan) * view.span_stride + head * view.span_head;
#pragma unroll 16
    for (int i = thread; i < 128 * 128; i += kKdaThreads) {
      const int d = i / 128, e = i % 128;
      s.state[d][e] = d < view.dk_width && e < view.dv_width ? from[d * view.span_row + e] : 0.0f;
    }
    for (int chunk = base / kSpan * kSpan; chunk < base; chunk += kChunk) {
      load_chunk(view, head, first + chunk, kChunk, /*whole=*/false, s);
      add_outer(s.carried, nullptr, s.u, s.total, s.state);
      __syncthreads();
    }
    const int row = first + base, count = min(kChunk, rows - base);
    load_chunk(view, head, row, count, /*whole=*/true, s);
    score_chunk<kRowPitch>(s.decay, s.key, s.query, 0, kChunk, s.a, s.b);
    rows_times(s.carried, s.d_state, s.d_key_prefix);
    __syncthreads();
    if (thread < 128) solve_column(thread, count, s);
    __syncthreads();
    for (int i = warp; i < count; i += kKdaWarps) {
      float sum = 0.0f;
      for (int e = lane; e < view.dv_width; e += kWarp) {
        sum = fmaf(s.d_key_prefix[i][e], view.r.at(row + i, head)[e], sum);
        store(view.dv_out.at(row + i, head) + e, -s.minus_dr[i][e]);
      }
      sum = warp_sum(sum);
      if (lane == 0) view.dbeta[row + i][head] = sum;
    }
    {
      const int i = thread / kChunk, j = thread % kChunk;
      float da = 0.0f, db = 0.0f;
      for (int e = 0; e < 128; e += 4) {
        const float4 u = *reinterpret_cast<const float4*>(&s.u[j][e]);
        const float4 r = *reinterpret_cast<const float4*>(&s.minus_dr[i][e]),
                     o = *reinterpret_cast<const float4*>(&s.d_o[i][e]);
        da = fmaf(r.w, u.w, fmaf(r.z, u.z, fmaf(r.y, u.y, fmaf(r.x, u.x, da))));
        db = fmaf(o.w, u.w, fmaf(o.z, u.z, fmaf(o.y, u.y, fmaf(o.x, u.x, db))));
      }
      s.da[i][j] = da;
      s.db[i][j] = db;
    }
    if (thread < 128) {
      float sum = 0.0f;
      for (int e = 0; e < 128; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(&s.state[thread][e]);
        const float4 y = *reinterpret_cast<const float4*>(&s.d_state[thread][e]);
        sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
      }
      s.d_total[thread] = s.total[thread] * sum;
    }
    __syncthreads();  // dU has been read
    rows_times_transposed(s.minus_dr, s.state, s.d_key_prefix);
    rows_times_transposed(s.d_o, s.state, s.d_query_prefix);
    rows_times_transposed(s.u, s.d_state, s.carried);
    __syncthreads();
    add_outer(s.query, s.prefix, s.d_o, s.total, s.d_state);
    add_outer(s.key, s.prefix, s.minus_dr, nullptr, s.d_state);
    if (thread < view.dk_width) row_gradients(view, thread, head, row, count, s);
  }
}
static_assert(kKdaThreads == 256 && kKdaKeyMax == 128 && kKdaValueMax == 128);

}  // namespace slipstream::kernels
