// KDA's forward on the device: a block has one head of one sequence and 32 columns of its state, which stay
// in registers while the chunks go by. In a chunk's arithmetic (kda.h) a row uses the chunk's start state and
// the earlier rows alone.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/pieces.cuh"
#include "kernels/kda/kda.h"

namespace slipstream::kernels {

constexpr int kChunk = static_cast<int>(kKdaChunk), kSpan = static_cast<int>(kKdaSpan);
constexpr int kKdaThreads = 256, kKdaWarps = kKdaThreads / kWarp;
constexpr int kKdaKeyMax = 128;                  // d_k
constexpr int kKdaOwn = kKdaKeyMax / kKdaWarps;  // rows of the state a thread holds: warp w from 16 w on

struct KdaStateView {
  float *state, *chunk_k, *chunk_g, *chunk_u;  // null when absent
  int64_t state_slot, state_head, state_row;
  int64_t k_slot, k_row, k_head, g_slot, g_row, g_head, u_slot, u_row, u_head;

  __device__ float* state_at(int slot, int head) const {
    return state + slot * state_slot + head * state_head;
  }
  __device__ float* k_at(int slot, int row, int head) const {
    return chunk_k + slot * k_slot + row * k_row + head * k_head;
  }
  __device__ float* g_at(int slot, int row, int head) const {
    return chunk_g + slot * g_slot + row * g_row + head * g_head;
  }
  __device__ float* u_at(int slot, int row, int head) const {
    return chunk_u + slot * u_slot + row * u_row + head * u_head;
  }
};

template <class X>
struct KdaView {
  Heads<X> q, k, v, o;
  Heads<float> log_decay, r;
  Rows<float> beta;
  DeviceSequences batch;
  KdaStateView cache;
  const int32_t* slots;  // null without a cache
  float* span_states;    // null unless kept: [spans, h, dk, dv] with these strides
  int64_t span_stride, span_head, span_row;
  int heads, dk, dv;
};

// A and B of rows [begin, end): a pair is one warp's sum over channels lane, lane + 32, ... with the key
// decayed row by row.
template <int kPitch>
__device__ void score_chunk(const float (*decay)[kPitch], const float (*key)[kPitch],
                            const float (*query)[kPitch], int begin, int end, float (*a)[kChunk],
                            float (*b)[kChunk]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  constexpr int kOwn = kKdaKeyMax / kWarp;
  for (int half = 0; half < 2; ++half) {  // a warp's two columns have 17 pairs between them
    const int j = half == 0 ? warp : kChunk - 1 - warp;
    float w[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) w[c] = key[j][lane + c * kWarp];
    int i = j;
    for (; i < begin; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) w[c] *= i > j ? decay[i][lane + c * kWarp] : 1.0f;
    }
#pragma unroll 4
    for (; i < end; ++i) {
      float to_key = 0.0f, to_query = 0.0f;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        const int d = lane + c * kWarp;
        w[c] *= i > j ? decay[i][d] : 1.0f;
        to_key = fmaf(key[i][d], w[c], to_key);
        to_query = fmaf(query[i][d], w[c], to_query);
      }
      to_key = warp_sum(to_key);
      to_query = warp_sum(to_query);
      if (lane == 0) {
        a[i][j] = to_key;
        b[i][j] = to_query;
      }
    }
  }
}
static_assert(2 * kKdaWarps == kChunk);

struct KdaShared {
  float decay[kChunk][kKdaKeyMax], key[kChunk][kKdaKeyMax], query[kChunk][kKdaKeyMax];
  float key_prefix[kChunk][kKdaKeyMax], query_prefix[kChunk][kKdaKeyMax];  // k P, q P
  float carried[kChunk][kKdaKeyMax];                                       // k_j E_Cj
  float total[kKdaKeyMax];                                                 // P_C
  float a[kChunk][kChunk], b[kChunk][kChunk];
  float partial[2 * kChunk][kKdaWarps][kWarp];
  float products[2 * kChunk][kWarp];
  float v[kChunk][kWarp], u[kChunk][kWarp];
  float beta[kChunk];
};

template <class X>
__global__ void __launch_bounds__(kKdaThreads) kda_forward(const KdaView<X> view) {
  extern __shared__ __align__(128) unsigned char bytes[];
  KdaShared& s = *reinterpret_cast<KdaShared*>(bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int sequence = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.x) * kWarp + lane;  // of the state
  const bool inside = column < view.dv;
  const int first = view.batch.row_begin[sequence], rows = view.batch.row_begin[sequence + 1] - first;
  const int cached = view.batch.cached[sequence], end_position = cached + rows;
  if (rows == 0) return;
  const bool keeps = view.slots != nullptr;
  const int slot = keeps ? view.slots[sequence] : 0;
  int span = 0;  // the sequence's first
  if (view.span_states != nullptr) {
    for (int b = lane; b < sequence; b += kWarp)
      span += (view.batch.row_begin[b + 1] - view.batch.row_begin[b] + kSpan - 1) / kSpan;
    span = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(span)));
  }

  float state[kKdaOwn];
#pragma unroll
  for (int i = 0; i < kKdaOwn; ++i) {
    const int d = warp * kKdaOwn + i;
    const bool read = keeps && cached >= kChunk && d < view.dk && inside;
    state[i] = read ? view.cache.state_at(slot, head)[d * view.cache.state_row + column] : 0.0f;
  }
  for (int base = cached / kChunk * kChunk; base < end_position; base += kChunk) {
    const int begin = max(cached - base, 0), end = min(kChunk, end_position - base);
    const int row = first + base - cached;  // of the chunk's row 0
    if (view.span_states != nullptr && base % kSpan == 0) {
      float* const to = view.span_states + (span + base / kSpan) * view.span_stride + head * view.span_head;
#pragma unroll
      for (int i = 0; i < kKdaOwn; ++i) {
        const int d = warp * kKdaOwn + i;
        if (d < view.dk && inside) to[d * view.span_row + column] = state[i];
      }
    }
    __syncthreads();  // the chunk before is done with
#pragma unroll
    for (int i = thread; i < kChunk * kKdaKeyMax; i += kKdaThreads) {
      const int r = i / kKdaKeyMax, d = i % kKdaKeyMax;
      float decay = 1.0f, key = 0.0f, query = 0.0f;
      if (r < end && d < view.dk) {
        if (r < begin) {
          decay = view.cache.g_at(slot, r, head)[d];
          key = view.cache.k_at(slot, r, head)[d];
        } else {
          decay = expf(view.log_decay.at(row + r, head)[d]);
          key = load(view.k.at(row + r, head) + d);
          query = load(view.q.at(row + r, head) + d);
        }
      }
      s.decay[r][d] = decay;
      s.key[r][d] = key;
      s.query[r][d] = query;
    }
    for (int r = warp; r < end; r += kKdaWarps) {
      if (r < begin) {
        s.u[r][lane] = inside ? view.cache.u_at(slot, r, head)[column] : 0.0f;
      } else {
        s.v[r][lane] = inside ? load(view.v.at(row + r, head) + column) : 0.0f;
        if (lane == 0) s.beta[r] = view.beta[row + r][head];
      }
    }
    __syncthreads();
    if (thread < kKdaKeyMax) {
      float prefix = 1.0f;
      for (int i = 0; i < end; ++i) {
        prefix = i == 0 ? s.decay[i][thread] : prefix * s.decay[i][thread];
        s.key_prefix[i][thread] = s.key[i][thread] * prefix;
        s.query_prefix[i][thread] = s.query[i][thread] * prefix;
      }
      s.total[thread] = prefix;
    } else if (end == kChunk) {
      const int d = thread - kKdaKeyMax;
      float decay = 1.0f;
      for (int j = kChunk - 1; j >= 0; --j) {
        s.carried[j][d] = s.key[j][d] * decay;
        decay *= s.decay[j][d];
      }
    }
    score_chunk<kKdaKeyMax>(s.decay, s.key, s.query, begin, end, s.a, s.b);
    __syncthreads();
    for (int i = begin; i < end; ++i) {
      float to_key = 0.0f, to_query = 0.0f;
#pragma unroll
      for (int r = 0; r < kKdaOwn; r += 4) {
        const float4 k = *reinterpret_cast<const float4*>(&s.key_prefix[i][warp * kKdaOwn + r]);
        const float4 q = *reinterpret_cast<const float4*>(&s.query_prefix[i][warp * kKdaOwn + r]);
        to_key = fmaf(k.w, state[r + 3],
                      fmaf(k.z, state[r + 2], fmaf(k.y, state[r + 1], fmaf(k.x, state[r], to_key))));
        to_query = fmaf(q.w, state[r + 3],
                        fmaf(q.z, state[r + 2], fmaf(q.y, state[r + 1], fmaf(q.x, state[r], to_query))));
      }
      s.partial[i][warp][lane] = to_key;
      s.partial[kChunk + i][warp][lane] = to_query;
    }
    __syncthreads();
    for (int i = warp; i < 2 * kChunk; i += kKdaWarps) {
      if (i % kChunk < begin || i % kChunk >= end) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kKdaWarps; ++w) sum += s.partial[i][w][lane];
      s.products[i][lane] = sum;
    }
    __syncthreads();
    if (warp == 0) {
      float u[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        u[i] = i < begin ? s.u[i][lane] : 0.0f;
        if (i < begin || i >= end) continue;
        float r = s.v[i][lane] - s.products[i][lane];
#pragma unroll
        for (int j = 0; j < i; ++j) r = fmaf(-s.a[i][j], u[j], r);
        u[i] = s.beta[i] * r;
        s.u[i][lane] = u[i];
        if (view.r.data != nullptr && inside) view.r.at(row + i, head)[column] = r;
      }
    }
    __syncthreads();
    for (int i = begin + warp; i < end; i += kKdaWarps) {
      float o = s.products[kChunk + i][lane];
      for (int j = 0; j <= i; ++j) o = fmaf(s.b[i][j], s.u[j][lane], o);
      if (inside) store(view.o.at(row + i, head) + column, o);
    }
    if (end < kChunk) {
      if (!keeps || !inside) continue;
      for (int i = begin + warp; i < end; i += kKdaWarps)
        view.cache.u_at(slot, i, head)[column] = s.u[i][lane];
      continue;
    }
    float u[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) u[j] = s.u[j][lane];
#pragma unroll
    for (int i = 0; i < kKdaOwn; ++i) {
      const int d = warp * kKdaOwn + i;
      state[i] *= s.total[d];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) state[i] = fmaf(s.carried[j][d], u[j], state[i]);
    }
  }
  if (!keeps || end_position / kChunk == cached / kChunk) return;  // no chunk was folded
#pragma unroll
  for (int i = 0; i < kKdaOwn; ++i) {
    const int d = warp * kKdaOwn + i;
    if (d < view.dk && inside) view.cache.state_at(slot, head)[d * view.cache.state_row + column] = state[i];
  }
}

// Two instructions; off by a few units in the last place.
__device__ __forceinline__ float fast_exp(float x) { return fast_exp2(x * 1.44269504088896341f); }

// The keys and decays of the open chunk go to the cache once every block of kda_forward has read what stood
// there.
template <class X, bool kFastExp>
__global__ void kda_keep_rows(const KdaView<X> view) {
  const int sequence = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x);
  const int first = view.batch.row_begin[sequence], rows = view.batch.row_begin[sequence + 1] - first;
  const int cached = view.batch.cached[sequence], end_position = cached + rows;
  const int base = end_position / kChunk * kChunk, slot = view.slots[sequence];
  const int begin = max(cached - base, 0), count = end_position - base - begin;
  for (int i = static_cast<int>(threadIdx.x); i < count * view.dk; i += static_cast<int>(blockDim.x)) {
    const int r = begin + i / view.dk, d = i % view.dk, row = first + base - cached + r;
    view.cache.k_at(slot, r, head)[d] = load(view.k.at(row, head) + d);
    const float g = view.log_decay.at(row, head)[d];
    view.cache.g_at(slot, r, head)[d] = kFastExp ? fast_exp(g) : expf(g);
  }
}

// --- the plain recurrence ---

template <class X>
struct KdaRecurrentView {
  Heads<X> q, k, v, o;
  Heads<float> log_decay;
  Rows<float> beta;
  DeviceSequences batch;
  float* state;
  int64_t state_slot, state_head, state_row;
  const int32_t* slots;
  int dk, dv;
};

template <class X>
__global__ void __launch_bounds__(kKdaThreads) kda_recurrent(const KdaRecurrentView<X> view) {
  __shared__ float partial[2][kKdaWarps][kWarp];
  __shared__ float decay[kKdaKeyMax], key[kKdaKeyMax], query[kKdaKeyMax];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int sequence = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.x) * kWarp + lane;
  const bool inside = column < view.dv;
  const int first = view.batch.row_begin[sequence], last = view.batch.row_begin[sequence + 1];
  float* const stored = view.state + view.slots[sequence] * view.state_slot + head * view.state_head;
  const bool fresh = view.batch.cached[sequence] == 0;
  float state[kKdaOwn];
#pragma unroll
  for (int i = 0; i < kKdaOwn; ++i) {
    const int d = warp * kKdaOwn + i;
    state[i] = !fresh && d < view.dk && inside ? stored[d * view.state_row + column] : 0.0f;
  }
  const auto sum_warps = [&](int which) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kKdaWarps; ++w) sum += partial[which][w][lane];
    return sum;
  };
  for (int t = first; t < last; ++t) {
    __syncthreads();
    if (thread < kKdaKeyMax) {
      const bool present = thread < view.dk;
      decay[thread] = present ? expf(view.log_decay.at(t, head)[thread]) : 1.0f;
      key[thread] = present ? load(view.k.at(t, head) + thread) : 0.0f;
      query[thread] = present ? load(view.q.at(t, head) + thread) : 0.0f;
    }
    __syncthreads();
    float read = 0.0f;
#pragma unroll
    for (int i = 0; i < kKdaOwn; ++i) {
      state[i] *= decay[warp * kKdaOwn + i];
      read = fmaf(key[warp * kKdaOwn + i], state[i], read);
    }
    partial[0][warp][lane] = read;
    __syncthreads();
    const float value = inside ? load(view.v.at(t, head) + column) : 0.0f;
    const float u = view.beta[t][head] * (value - sum_warps(0));
    float out = 0.0f;
#pragma unroll
    for (int i = 0; i < kKdaOwn; ++i) {
      state[i] = fmaf(key[warp * kKdaOwn + i], u, state[i]);
      out = fmaf(query[warp * kKdaOwn + i], state[i], out);
    }
    partial[1][warp][lane] = out;
    __syncthreads();
    if (warp == 0 && inside) store(view.o.at(t, head) + column, sum_warps(1));
  }
#pragma unroll
  for (int i = 0; i < kKdaOwn; ++i) {
    const int d = warp * kKdaOwn + i;
    if (d < view.dk && inside) stored[d * view.state_row + column] = state[i];
  }
}

}  // namespace slipstream::kernels
