// KDA forward: the chunked form, and the plain recurrence for decode.
//
// Included by kda_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_KDA_KDA_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_KDA_KDA_FORWARD_INL_H_
#undef SLIPSTREAM_KERNELS_KDA_KDA_FORWARD_INL_H_
#else
#define SLIPSTREAM_KERNELS_KDA_KDA_FORWARD_INL_H_
#endif

#include "kernels/kda/kda_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// What rows of a chunk read and write per value column. Row i of v, o and r is at row(i - begin).
struct ChunkColumns {
  const float* beta;
  int64_t beta_stride;
  HeadRows v, o, r;  // r.data may be null
  const float* x;    // [32, ld] products with the state
  float* u;          // [16, ld]
  int64_t ld;
};

// Forward substitution for rows [begin, end) in kVectors lanes of columns from `column` on: r and o are
// chains over ascending j. The last vector holds `tail` columns (16 = full).
template <int kVectors>
HWY_NOINLINE void solve_columns(const ChunkRows& rows, const ChunkColumns& columns, int64_t begin,
                                int64_t end, int64_t column, int64_t tail) {
  const int64_t ld = columns.ld;
  const float* x = columns.x + column;
  float* u = columns.u + column;
  const auto partial = [&](int n) { return n == kVectors - 1 && tail != kLanes; };
  const auto put = [&](const HeadRows& to, int64_t i, int n, const Lanes& value) HWY_ATTR {
    float* at = to.row(i - begin) + column + n * kLanes;
    if (partial(n)) {
      store_first(value, at, tail);
    } else {
      store(value, at);
    }
  };
  for (int64_t i = begin; i < end; ++i) {
    Lanes r[kVectors], o[kVectors];
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      const float* v = columns.v.row(i - begin) + column + n * kLanes;
      r[n] = sub(partial(n) ? load_first(v, tail) : load(v), load(x + i * ld + n * kLanes));
      o[n] = load(x + (kKdaChunk + i) * ld + n * kLanes);
    }
    const float* a = rows.a + i * kKdaChunk;
    const float* b = rows.b + i * kKdaChunk;
    for (int64_t j = 0; j < i; ++j) {
      const Lanes aij = broadcast(a[j]), bij = broadcast(b[j]);
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        const Lanes uj = load(u + j * ld + n * kLanes);
        r[n] = fnma(aij, uj, r[n]);
        o[n] = fma(bij, uj, o[n]);
      }
    }
    const Lanes beta = broadcast(columns.beta[(i - begin) * columns.beta_stride]), bii = broadcast(b[i]);
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      const Lanes ui = mul(beta, r[n]);
      store(ui, u + i * ld + n * kLanes);
      put(columns.o, i, n, fma(bii, ui, o[n]));
      if (columns.r.data != nullptr) put(columns.r, i, n, r[n]);
    }
  }
}

HWY_INLINE void solve_rows(const ChunkRows& rows, const ChunkColumns& columns, int64_t begin, int64_t end,
                           int64_t dv) {
  constexpr int kWide = kLanesParts == 1 ? 4 : 2;
  int64_t column = 0;
  for (; column + kWide * kLanes <= dv; column += kWide * kLanes) {
    solve_columns<kWide>(rows, columns, begin, end, column, kLanes);
  }
  for (; column < dv; column += kLanes) {
    solve_columns<1>(rows, columns, begin, end, column, std::min(kLanes, dv - column));
  }
}

HWY_INLINE float* live_row(const Tensor& rows, int64_t slot, int64_t i, int64_t head) {
  return rows.f32() + slot * rows.stride(0) + i * rows.stride(1) + head * rows.stride(2);
}

struct ForwardBuffers {
  ChunkRows rows;
  int64_t ld;    // dv in whole lanes
  float* x;      // [32, ld]
  float* u;      // [16, ld]
  float* state;  // [dk, ld], where no cache holds it
};

// The new rows of sequence b in one head, chunk after chunk. `span`: the sequence's first entry of
// span_states.
HWY_INLINE void forward_head(const Kda& args, int64_t b, int64_t head, int64_t span,
                             const ForwardBuffers& buffers) {
  const int64_t dk = args.q.size(2), dv = args.v.size(2), ldv = buffers.ld;
  const int64_t cached = args.sequences.cached_tokens(b), first = args.sequences.begin(b);
  const int64_t count = args.sequences.end(b) - first;
  const KdaState& cache = args.cache;
  const bool kept = !cache.state.empty();
  const int64_t slot = kept ? args.slots.i32()[b] : 0;

  const ChunkRows& rows = buffers.rows;
  float* x = buffers.x;
  float* u = buffers.u;
  float* state = kept ? live_row(cache.state, slot, head, 0) : buffers.state;
  const int64_t state_stride = kept ? cache.state.stride(2) : ldv;

  for (int64_t done = 0; done < count;) {
    const int64_t position = cached + done, row = first + done;
    const int64_t begin = position % kKdaChunk, end = std::min(kKdaChunk, begin + count - done);
    const bool fresh = position < kKdaChunk;  // the state is still zero
    if (!args.r.empty() && position % kKdaSpan == 0) {
      float* to = live_row(args.span_states, span + position / kKdaSpan, head, 0);
      for (int64_t d = 0; d < dk; ++d) {
        float* line = to + d * args.span_states.stride(2);
        if (fresh) {
          std::fill(line, line + dv, 0.0f);
        } else {
          std::copy(state + d * state_stride, state + d * state_stride + dv, line);
        }
      }
    }
    for (int64_t i = 0; i < begin; ++i) {
      pack_row(live_row(cache.chunk_k, slot, i, head), dk, rows.key + i * rows.ld);
      pack_row(live_row(cache.chunk_g, slot, i, head), dk, rows.decay + i * rows.ld);
      pack_row(live_row(cache.chunk_u, slot, i, head), dv, u + i * ldv);
    }
    const HeadRows q = head_rows(args.q, row, head), k = head_rows(args.k, row, head);
    const HeadRows log_decay = head_rows(args.log_decay, row, head), v = head_rows(args.v, row, head);
    const int64_t next = std::min(kKdaChunk, count - done - (end - begin));
    prefetch_rows(q, end - begin, next, dk);
    prefetch_rows(k, end - begin, next, dk);
    prefetch_rows(log_decay, end - begin, next, dk);
    prefetch_rows(v, end - begin, next, dv);
    for (int64_t i = begin; i < end; ++i)
      load_row(rows, i, q.row(i - begin), k.row(i - begin), log_decay.row(i - begin));
    scale_rows(rows, begin, end);
    if (fresh) {
      std::fill(x + begin * ldv, x + end * ldv, 0.0f);
      std::fill(x + (kKdaChunk + begin) * ldv, x + (kKdaChunk + end) * ldv, 0.0f);
    } else {
      state_products(rows, begin, end, state, state_stride, dv, x, ldv);
    }
    score_rows(rows, begin, end);
    const ChunkColumns columns{.beta = args.beta.row(row) + head,
                               .beta_stride = args.beta.stride(0),
                               .v = v,
                               .o = head_rows(args.o, row, head),
                               .r = args.r.empty() ? HeadRows{nullptr, 0} : head_rows(args.r, row, head),
                               .x = x,
                               .u = u,
                               .ld = ldv};
    solve_rows(rows, columns, begin, end, dv);
    if (end == kKdaChunk) {
      fold_chunk(rows, u, ldv, dv, fresh, state, state_stride);
    } else if (kept) {
      for (int64_t i = begin; i < end; ++i) {
        std::copy(rows.key + i * rows.ld, rows.key + i * rows.ld + dk,
                  live_row(cache.chunk_k, slot, i, head));
        std::copy(rows.decay + i * rows.ld, rows.decay + i * rows.ld + dk,
                  live_row(cache.chunk_g, slot, i, head));
        std::copy(u + i * ldv, u + i * ldv + dv, live_row(cache.chunk_u, slot, i, head));
      }
    }
    done += end - begin;
  }
}

// Asks for what a head of a sequence with stored rows reads first.
HWY_INLINE void prefetch_head(const Kda& args, int64_t b, int64_t head) {
  if (args.cache.state.empty() || args.sequences.begin(b) == args.sequences.end(b)) return;
  const int64_t slot = args.slots.i32()[b], dk = args.q.size(2), dv = args.v.size(2);
  const int64_t live = args.sequences.cached_tokens(b) % kKdaChunk;
  const auto rows = [&](const Tensor& t) { return HeadRows{live_row(t, slot, 0, head), t.stride(1)}; };
  prefetch_rows(rows(args.cache.chunk_k), 0, live, dk);
  prefetch_rows(rows(args.cache.chunk_g), 0, live, dk);
  prefetch_rows(rows(args.cache.chunk_u), 0, live, dv);
}

// Items [begin, end) of sequences x heads.
void kda_forward_items(const Kda& args, int64_t begin, int64_t end, Worker& worker) {
  const FlushSubnormals flush;
  const int64_t heads = args.q.size(1), dk = args.q.size(2), ldv = pad_to_lanes(args.v.size(2));
  const ForwardBuffers buffers{.rows = allocate_chunk_rows(dk, worker),
                               .ld = ldv,
                               .x = worker.scratch<float>(2 * kKdaChunk * ldv),
                               .u = worker.scratch<float>(kKdaChunk * ldv),
                               .state = worker.scratch<float>(dk * ldv)};
  int64_t b = -1, span = 0;
  for (int64_t item = begin; item < end; ++item) {
    for (; b < item / heads; ++b) {
      if (b >= 0) span += kda_spans(args.sequences.end(b) - args.sequences.begin(b));
    }
    if (item + 1 < end) prefetch_head(args, (item + 1) / heads, (item + 1) % heads);
    forward_head(args, b, item % heads, span, buffers);
  }
}

// The recurrence in kVectors lanes of columns: one pass decays the state and reads it with k, one writes it
// and reads it with q. The columns of a block stay in the first-level cache between the two.
template <int kVectors>
HWY_NOINLINE void recurrent_columns(const float* q, const float* k, const float* decay, float beta,
                                    const float* v, int64_t dk, bool fresh, float* state,
                                    int64_t state_stride, float* o, int64_t tail) {
  const auto partial = [&](int n) { return n == kVectors - 1 && tail != kLanes; };
  const auto get = [&](const float* from, int n) HWY_ATTR {
    return partial(n) ? load_first(from + n * kLanes, tail) : load(from + n * kLanes);
  };
  const auto put = [&](const Lanes& value, float* to, int n) HWY_ATTR {
    if (partial(n)) {
      store_first(value, to + n * kLanes, tail);
    } else {
      store(value, to + n * kLanes);
    }
  };
  Lanes read[kVectors], out[kVectors];
#pragma GCC unroll 16
  for (int n = 0; n < kVectors; ++n) read[n] = out[n] = zero_lanes();
  for (int64_t d = 0; d < dk && !fresh; ++d) {
    const Lanes kd = broadcast(k[d]), a = broadcast(decay[d]);
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) read[n] = fma(kd, mul(a, get(state + d * state_stride, n)), read[n]);
  }
  Lanes u[kVectors];
#pragma GCC unroll 16
  for (int n = 0; n < kVectors; ++n) u[n] = mul(broadcast(beta), sub(get(v, n), read[n]));
  for (int64_t d = 0; d < dk; ++d) {
    float* row = state + d * state_stride;
    const Lanes kd = broadcast(k[d]), a = broadcast(decay[d]), qd = broadcast(q[d]);
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      const Lanes s = fresh ? mul(kd, u[n]) : fma(kd, u[n], mul(a, get(row, n)));
      put(s, row, n);
      out[n] = fma(qd, s, out[n]);
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < kVectors; ++n) put(out[n], o, n);
}

void kda_recurrent_items(const KdaRecurrent& args, int64_t begin, int64_t end, Worker& worker) {
  const FlushSubnormals flush;
  constexpr int kWide = kLanesParts == 1 ? 4 : 2;
  const int64_t heads = args.q.size(1), dk = args.q.size(2), dv = args.v.size(2);
  float* decay = worker.scratch<float>(pad_to_lanes(dk));
  for (int64_t item = begin; item < end; ++item) {
    const int64_t b = item / heads, head = item % heads;
    const int64_t first = args.sequences.begin(b), count = args.sequences.end(b) - first;
    float* state = live_row(args.state, args.slots.i32()[b], head, 0);
    const int64_t stride = args.state.stride(2);
    bool fresh = args.sequences.cached_tokens(b) == 0;
    for (int64_t d = 0; d < dk && fresh && count == 0; ++d)
      std::fill(state + d * stride, state + d * stride + dv, 0.0f);
    for (int64_t t = first; t < first + count; ++t, fresh = false) {
      const float* log_decay = head_rows(args.log_decay, t, head).data;
      for_lanes(dk,
                [&](int64_t d, auto chunk) HWY_ATTR { store(exp(chunk.load(log_decay + d)), decay + d); });
      const float* q = head_rows(args.q, t, head).data;
      const float* k = head_rows(args.k, t, head).data;
      const float* v = head_rows(args.v, t, head).data;
      float* o = head_rows(args.o, t, head).data;
      const float beta = args.beta.row(t)[head];
      int64_t column = 0;
      for (; column + kWide * kLanes <= dv; column += kWide * kLanes) {
        recurrent_columns<kWide>(q, k, decay, beta, v + column, dk, fresh, state + column, stride, o + column,
                                 kLanes);
      }
      for (; column < dv; column += kLanes) {
        recurrent_columns<1>(q, k, decay, beta, v + column, dk, fresh, state + column, stride, o + column,
                             std::min(kLanes, dv - column));
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
