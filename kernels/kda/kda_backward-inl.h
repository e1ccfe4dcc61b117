// KDA backward in the chunked form. With D the gradient of the state at a chunk's end, and the forward's
// names (kda.h):
//   dU = Bᵀ dO + K_C D, then from the last row up: dR_i = beta_i dU_i, dU_j -= A_ij dR_i for j < i;
//   dbeta_i = dU_i · r_i;  dV = dR;  dA = -dR Uᵀ, dB = dO Uᵀ (on and below the diagonal);
//   d(kP) = -dR S0ᵀ, d(qP) = dO S0ᵀ, dK_C = U Dᵀ;  D <- Diag(P_C) D + (qP)ᵀ dO - (kP)ᵀ dR
// where K_C holds the rows k_j E_Cj. Most products want the states transposed, so here they are: [dv, dk].
//
// Included by kda_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_KDA_KDA_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_KDA_KDA_BACKWARD_INL_H_
#undef SLIPSTREAM_KERNELS_KDA_KDA_BACKWARD_INL_H_
#else
#define SLIPSTREAM_KERNELS_KDA_KDA_BACKWARD_INL_H_
#endif

#include "kernels/kda/kda_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kSpanChunks = kKdaSpan / kKdaChunk;

// Four values from each of four addresses `stride` apart, one after the other.
HWY_INLINE Lanes load_quarters(const float* from, int64_t stride) {
  constexpr int64_t kQuarters = kLanesPartSize / 4;
  const LanesTag d;
  return map([&](int64_t part) HWY_ATTR {
    const float* first = from + part * kQuarters * stride;
    LanesVec v = hn::LoadDup128(d, first);
    for (int64_t n = 1; n < kQuarters; ++n) {
      v = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(4 * n)), v, hn::LoadDup128(d, first + n * stride));
    }
    return v;
  });
}

// out[16, 16] = in[16, 16]ᵀ. Each register gathers a column block from rows r, r + 4, r + 8, r + 12, so that
// transposing the 4 x 4 blocks inside registers leaves whole rows.
HWY_INLINE void transpose_tile(const float* in, int64_t ldi, float* out, int64_t ldo) {
  const LanesTag d;
  const hn::Repartition<double, LanesTag> pairs;
  for (int64_t c = 0; c < kLanes; c += 4) {
    Lanes v[4];
    for (int64_t r = 0; r < 4; ++r) {
      v[r] = load_quarters(in + r * ldi + c, 4 * ldi);
    }
    for (int64_t part = 0; part < kLanesParts; ++part) {
      const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, v[0].part[part], v[1].part[part]));
      const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, v[0].part[part], v[1].part[part]));
      const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, v[2].part[part], v[3].part[part]));
      const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, v[2].part[part], v[3].part[part]));
      float* to = out + c * ldo + part * kLanesPartSize;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, to + ldo);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, to + 2 * ldo);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, to + 3 * ldo);
    }
  }
}

// out[cols, rows] = in[rows, cols]ᵀ; columns of out from `rows` up to whole lanes become zero.
HWY_INLINE void transpose(int64_t rows, int64_t cols, const float* in, int64_t ldi, float* out, int64_t ldo) {
  const int64_t whole_rows = rows / kLanes * kLanes, whole_cols = cols / kLanes * kLanes;
  for (int64_t r = 0; r < whole_rows; r += kLanes) {
    for (int64_t c = 0; c < whole_cols; c += kLanes)
      transpose_tile(in + r * ldi + c, ldi, out + c * ldo + r, ldo);
    for (int64_t c = whole_cols; c < cols; ++c) {
      for (int64_t i = r; i < r + kLanes; ++i) out[c * ldo + i] = in[i * ldi + c];
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = whole_rows; r < pad_to_lanes(rows); ++r)
      out[c * ldo + r] = r < rows ? in[r * ldi + c] : 0.0f;
  }
}

// A chunk between the two passes over its span. Rows beyond the sequence's end are neutral: no decay, all
// else zero.
struct SpanChunk {
  ChunkRows rows;
  float* carried;  // [16, ldk]  k_j E_Cj
  float* u;        // [16, ldv]
  float* state;    // [dv, ldk]  at the chunk's start; undefined where that is zero
};

struct BackwardBuffers {
  int64_t dk, dv, ldk, ldv;
  SpanChunk chunks[kSpanChunks];
  float* d_state;     // [dv, ldk]
  float* du_columns;  // [ldv, 16]  dU transposed
  float* du;          // [16, ldv]
  float* u_columns;   // [ldv, 16]  U transposed
  float* slopes;      // [32, ldv]  -dR, then dO
  float* d_scaled;    // [32, ldk]  d(kP), then d(qP)
  float* d_carried;   // [16, ldk]  dK_C
  float* d_total;     // [ldk]      P_C dP_C
  float* d_scores;    // [32, 16]   dA, then dB
};

HWY_INLINE BackwardBuffers allocate_backward(int64_t dk, int64_t dv, Worker& worker) {
  const int64_t ldk = pad_to_lanes(dk), ldv = pad_to_lanes(dv);
  BackwardBuffers buffers{.dk = dk,
                          .dv = dv,
                          .ldk = ldk,
                          .ldv = ldv,
                          .chunks = {},
                          .d_state = worker.scratch<float>(dv * ldk),
                          .du_columns = worker.scratch<float>(ldv * kKdaChunk),
                          .du = worker.scratch<float>(kKdaChunk * ldv),
                          .u_columns = worker.scratch<float>(ldv * kKdaChunk),
                          .slopes = worker.scratch<float>(2 * kKdaChunk * ldv),
                          .d_scaled = worker.scratch<float>(2 * kKdaChunk * ldk),
                          .d_carried = worker.scratch<float>(kKdaChunk * ldk),
                          .d_total = worker.scratch<float>(ldk),
                          .d_scores = worker.scratch<float>(2 * kKdaChunk * kKdaChunk)};
  for (SpanChunk& chunk : buffers.chunks) {
    chunk = {.rows = allocate_chunk_rows(dk, worker),
             .carried = worker.scratch<float>(kKdaChunk * ldk),
             .u = worker.scratch<float>(kKdaChunk * ldv),
             .state = worker.scratch<float>(dv * ldk)};
  }
  // The products write dv of these ldv rows; the rest meets r padded with zeros and must be finite.
  std::fill(buffers.du_columns + dv * kKdaChunk, buffers.du_columns + ldv * kKdaChunk, 0.0f);
  return buffers;
}

// One head's view of the arguments.
struct BackwardHead {
  HeadRows q, k, log_decay, r, d_o, dq, dk, dlog_decay, dv;  // from the sequence's first row
  HeadRows beta, dbeta;                                      // rows of one value
};

// Everything of a chunk that depends on its rows alone.
HWY_INLINE void load_chunk(const BackwardHead& head, const BackwardBuffers& buffers, int64_t first,
                           int64_t count, const SpanChunk& chunk) {
  const ChunkRows& rows = chunk.rows;
  const int64_t ldk = buffers.ldk, ldv = buffers.ldv;
  for (int64_t i = 0; i < count; ++i) {
    load_row(rows, i, head.q.row(first + i), head.k.row(first + i), head.log_decay.row(first + i));
    const float* r = head.r.row(first + i);
    const Lanes beta = broadcast(*head.beta.row(first + i));
    for_lanes(buffers.dv, [&](int64_t e, auto lanes)
                              HWY_ATTR { store(mul(beta, lanes.load(r + e)), chunk.u + i * ldv + e); });
  }
  std::fill(rows.query + count * ldk, rows.query + kKdaChunk * ldk, 0.0f);
  std::fill(rows.key + count * ldk, rows.key + kKdaChunk * ldk, 0.0f);
  std::fill(rows.decay + count * ldk, rows.decay + kKdaChunk * ldk, 1.0f);
  std::fill(chunk.u + count * ldv, chunk.u + kKdaChunk * ldv, 0.0f);
  scale_rows(rows, 0, kKdaChunk);
  score_rows(rows, 0, kKdaChunk);
  for (int64_t d = 0; d < ldk; d += kLanes) {
    Lanes decay = broadcast(1.0f);
    for (int64_t j = kKdaChunk - 1; j >= 0; --j) {
      store(mul(load(rows.key + j * ldk + d), decay), chunk.carried + j * ldk + d);
      decay = mul(decay, load(rows.decay + j * ldk + d));
    }
  }
}

// x[rows, ldk] <- x Diag(factor) + left right, the products of `depth` terms.
HWY_INLINE void decay_and_add(const BackwardBuffers& buffers, const float* factor, const float* from,
                              float* to, LeftFactor left, const float* right, int64_t depth) {
  const int64_t ldk = buffers.ldk;
  if (from != nullptr) {
    for (int64_t e = 0; e < buffers.dv; ++e) {
      for (int64_t d = 0; d < ldk; d += kLanes)
        store(mul(load(from + e * ldk + d), load(factor + d)), to + e * ldk + d);
    }
  }
  block_gemm(buffers.dv, ldk, depth, left, right, ldk, to, ldk, from != nullptr);
}

// Back substitution in kVectors lanes of columns: slopes[i] = -dR_i and du[i] = dU_i, from the last row up.
template <int kVectors>
HWY_INLINE void solve_transposed(const BackwardHead& head, const BackwardBuffers& buffers,
                                 const ChunkRows& rows, int64_t first, int64_t count, int64_t column) {
  const int64_t ld = buffers.ldv;
  float* minus_dr = buffers.slopes + column;
  const float* d_o = buffers.slopes + kKdaChunk * ld + column;
  float* du = buffers.du + column;
  for (int64_t j = count - 1; j >= 0; --j) {
    Lanes sum[kVectors];
    const Lanes bjj = broadcast(rows.b[j * kKdaChunk + j]);
    for (int n = 0; n < kVectors; ++n) {
      sum[n] = fma(bjj, load(d_o + j * ld + n * kLanes), load(du + j * ld + n * kLanes));
    }
    for (int64_t i = j + 1; i < count; ++i) {
      const Lanes aij = broadcast(rows.a[i * kKdaChunk + j]), bij = broadcast(rows.b[i * kKdaChunk + j]);
      for (int n = 0; n < kVectors; ++n) {
        sum[n] = fma(bij, load(d_o + i * ld + n * kLanes), sum[n]);
        sum[n] = fma(aij, load(minus_dr + i * ld + n * kLanes), sum[n]);
      }
    }
    const Lanes minus_beta = broadcast(-*head.beta.row(first + j));
    for (int n = 0; n < kVectors; ++n) {
      store(sum[n], du + j * ld + n * kLanes);
      store(mul(minus_beta, sum[n]), minus_dr + j * ld + n * kLanes);
    }
  }
}

// dq, dk and dlog_decay of sixteen channels from `d` on, from the gradients of everything the rows went into.
// With
//   L_i = d(kP)_i P_i + sum_{j<i} dA_ij k_j E_ij,   Q_i = d(qP)_i P_i + sum_{j<i} dB_ij k_j E_ij   (i reads
//   what was) Z_j = sum_{i>j} (dA_ij k_i + dB_ij q_i) E_ij (j is read later)
// dq_i = Q_i + dB_ii k_i,  dk_i = L_i + Z_i + dB_ii q_i + E_Ci dK_Ci.  dg_t sums whatever decayed at t: all
// of P_C dP_C, the carried rows before t, and for rows from t on what they read less what is read of them.
HWY_INLINE void row_gradients(const BackwardHead& head, const BackwardBuffers& buffers,
                              const SpanChunk& chunk, int64_t first, int64_t count, int64_t d) {
  const int64_t ld = buffers.ldk;
  const ChunkRows& rows = chunk.rows;
  const float* da = buffers.d_scores;
  const float* db = buffers.d_scores + kKdaChunk * kKdaChunk;
  const int64_t tail = std::min(kLanes, buffers.dk - d);
  const auto put = [&](const HeadRows& to, int64_t i, const Lanes& value) HWY_ATTR {
    if (tail < kLanes) {
      store_first(value, to.row(first + i) + d, tail);
    } else {
      store(value, to.row(first + i) + d);
    }
  };
  Lanes reach[kKdaChunk], left[kKdaChunk], reads[kKdaChunk], carried[kKdaChunk];
  Lanes carried_sum = load(buffers.d_total + d);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = i * ld + d;
    const Lanes decay = load(rows.decay + at), k = load(rows.key + at), q = load(rows.query + at);
    const Lanes prefix = load(rows.prefix + at), bii = broadcast(db[i * kKdaChunk + i]);
    Lanes l = mul(load(buffers.d_scaled + at), prefix);
    Lanes m = mul(load(buffers.d_scaled + kKdaChunk * ld + at), prefix);
    for (int64_t j = 0; j < i; ++j) {
      reach[j] = mul(reach[j], decay);
      l = fma(broadcast(da[i * kKdaChunk + j]), reach[j], l);
      m = fma(broadcast(db[i * kKdaChunk + j]), reach[j], m);
    }
    reach[i] = k;
    reads[i] = fma(q, m, mul(k, l));
    left[i] = fma(bii, q, l);
    put(head.dq, i, fma(bii, k, m));
    carried[i] = carried_sum;
    carried_sum = fma(load(chunk.carried + at), load(buffers.d_carried + at), carried_sum);
  }
  Lanes later[kKdaChunk], suffix = zero_lanes(), to_end = broadcast(1.0f);
  for (int64_t i = kKdaChunk - 1; i >= count; --i) to_end = mul(to_end, load(rows.decay + i * ld + d));
  for (int64_t i = 0; i < count; ++i) later[i] = zero_lanes();
  for (int64_t i = count - 1; i >= 0; --i) {
    const int64_t at = i * ld + d;
    const Lanes decay = load(rows.decay + at), k = load(rows.key + at), q = load(rows.query + at);
    suffix = add(suffix, fnma(k, later[i], reads[i]));
    put(head.dlog_decay, i, add(carried[i], suffix));
    put(head.dk, i, fma(to_end, load(buffers.d_carried + at), add(left[i], later[i])));
    to_end = mul(to_end, decay);
    for (int64_t j = 0; j < i; ++j) {
      const Lanes aij = broadcast(da[i * kKdaChunk + j]), bij = broadcast(db[i * kKdaChunk + j]);
      later[j] = mul(fma(aij, k, fma(bij, q, later[j])), decay);
    }
  }
}

// The gradients of one chunk, rows [first, first + count) of the sequence. `fresh`: its start state is zero;
// `last`: so is D, the gradient of its end state. Replaces D by the gradient of the start state.
HWY_INLINE void backward_chunk(const BackwardHead& head, const BackwardBuffers& buffers,
                               const SpanChunk& chunk, int64_t first, int64_t count, bool fresh, bool last) {
  const int64_t dk = buffers.dk, dv = buffers.dv, ldk = buffers.ldk, ldv = buffers.ldv;
  const ChunkRows& rows = chunk.rows;
  float* d_o = buffers.slopes + kKdaChunk * ldv;
  for (int64_t i = 0; i < count; ++i) pack_row(head.d_o.row(first + i), dv, d_o + i * ldv);
  std::fill(d_o + count * ldv, d_o + kKdaChunk * ldv, 0.0f);
  std::fill(buffers.slopes + count * ldv, buffers.slopes + kKdaChunk * ldv, 0.0f);

  if (last) {
    std::fill(buffers.du, buffers.du + kKdaChunk * ldv, 0.0f);
  } else {
    block_gemm(dv, kKdaChunk, dk, LeftFactor{buffers.d_state, ldk, 1}, rows.reach, kKdaChunk,
               buffers.du_columns, kKdaChunk, false);
    transpose(ldv, kKdaChunk, buffers.du_columns, kKdaChunk, buffers.du, ldv);
  }
  constexpr int kWide = kLanesParts == 1 ? 4 : 2;
  int64_t column = 0;
  for (; column + kWide * kLanes <= ldv; column += kWide * kLanes) {
    solve_transposed<kWide>(head, buffers, rows, first, count, column);
  }
  for (; column < ldv; column += kLanes) solve_transposed<1>(head, buffers, rows, first, count, column);
  for (int64_t i = 0; i < count; ++i) {
    const float* r = head.r.row(first + i);
    const float* du = buffers.du + i * ldv;
    const float* minus_dr = buffers.slopes + i * ldv;
    float* dv_row = head.dv.row(first + i);
    Lanes dots = zero_lanes();
    for_lanes(dv, [&](int64_t e, auto lanes) HWY_ATTR {
      dots = fma(load(du + e), lanes.load(r + e), dots);
      lanes.store(sub(zero_lanes(), load(minus_dr + e)), dv_row + e);
    });
    *head.dbeta.row(first + i) = sum_lanes(dots);
  }

  transpose(kKdaChunk, ldv, chunk.u, ldv, buffers.u_columns, kKdaChunk);
  block_gemm(2 * kKdaChunk, kKdaChunk, dv, LeftFactor{buffers.slopes, ldv, 1}, buffers.u_columns, kKdaChunk,
             buffers.d_scores, kKdaChunk, false);
  if (fresh) {
    std::fill(buffers.d_scaled, buffers.d_scaled + 2 * kKdaChunk * ldk, 0.0f);
  } else {
    block_gemm(2 * kKdaChunk, ldk, dv, LeftFactor{buffers.slopes, ldv, 1}, chunk.state, ldk, buffers.d_scaled,
               ldk, false);
  }
  if (last) {
    std::fill(buffers.d_carried, buffers.d_carried + kKdaChunk * ldk, 0.0f);
  } else {
    block_gemm(kKdaChunk, ldk, dv, LeftFactor{chunk.u, ldv, 1}, buffers.d_state, ldk, buffers.d_carried, ldk,
               false);
  }
  const float* total = rows.prefix + (kKdaChunk - 1) * ldk;
  for (int64_t d = 0; d < ldk; d += kLanes) {
    Lanes sum = zero_lanes();
    for (int64_t e = 0; e < dv && !fresh && !last; ++e) {
      sum = fma(load(chunk.state + e * ldk + d), load(buffers.d_state + e * ldk + d), sum);
    }
    store(mul(load(total + d), sum), buffers.d_total + d);
  }
  for (int64_t d = 0; d < dk; d += kLanes) row_gradients(head, buffers, chunk, first, count, d);

  if (fresh) return;
  decay_and_add(buffers, total, last ? nullptr : buffers.d_state, buffers.d_state,
                LeftFactor{buffers.slopes, 1, ldv}, rows.scaled, 2 * kKdaChunk);
}

// One head of a whole sequence of `count` rows, span after span from the end. `span`: its first entry of
// span_states.
HWY_INLINE void backward_head(const BackwardHead& head, const BackwardBuffers& buffers,
                              const Tensor& span_states, int64_t span, int64_t head_index, int64_t count) {
  for (int64_t start = (count - 1) / kKdaSpan * kKdaSpan; start >= 0; start -= kKdaSpan) {
    const int64_t rows = std::min(kKdaSpan, count - start), chunks = (rows + kKdaChunk - 1) / kKdaChunk;
    const auto rows_of = [&](int64_t c) { return std::min(kKdaChunk, rows - c * kKdaChunk); };
    if (start > 0) {
      const float* state = span_states.f32() + (span + start / kKdaSpan) * span_states.stride(0) +
                           head_index * span_states.stride(1);
      transpose(buffers.dk, buffers.dv, state, span_states.stride(2), buffers.chunks[0].state, buffers.ldk);
    }
    for (int64_t c = 0; c < chunks; ++c) {
      const SpanChunk& chunk = buffers.chunks[c];
      load_chunk(head, buffers, start + c * kKdaChunk, rows_of(c), chunk);
      if (c + 1 == chunks) break;
      decay_and_add(buffers, chunk.rows.prefix + (kKdaChunk - 1) * buffers.ldk,
                    start + c > 0 ? chunk.state : nullptr, buffers.chunks[c + 1].state,
                    LeftFactor{chunk.u, 1, buffers.ldv}, chunk.carried, kKdaChunk);
    }
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t first = start + c * kKdaChunk;
      backward_chunk(head, buffers, buffers.chunks[c], first, rows_of(c), first == 0,
                     first + kKdaChunk >= count);
    }
  }
}

// Items [begin, end) of sequences x heads.
void kda_backward_items(const KdaBackward& args, int64_t begin, int64_t end, Worker& worker) {
  const FlushSubnormals flush;
  const int64_t heads = args.q.size(1);
  const BackwardBuffers buffers = allocate_backward(args.q.size(2), args.r.size(2), worker);
  int64_t b = -1, span = 0;
  for (int64_t item = begin; item < end; ++item) {
    for (; b < item / heads; ++b) {
      if (b >= 0) span += (args.sequences.end(b) - args.sequences.begin(b) + kKdaSpan - 1) / kKdaSpan;
    }
    const int64_t first = args.sequences.begin(b), count = args.sequences.end(b) - first, head = item % heads;
    if (count == 0) continue;
    const auto rows = [&](const Tensor& t) { return head_rows(t, first, head); };
    const auto values = [&](const Tensor& t) { return HeadRows{t.row(first) + head, t.stride(0)}; };
    const BackwardHead view{.q = rows(args.q),
                            .k = rows(args.k),
                            .log_decay = rows(args.log_decay),
                            .r = rows(args.r),
                            .d_o = rows(args.d_o),
                            .dq = rows(args.dq),
                            .dk = rows(args.dk),
                            .dlog_decay = rows(args.dlog_decay),
                            .dv = rows(args.dv),
                            .beta = values(args.beta),
                            .dbeta = values(args.dbeta)};
    backward_head(view, buffers, args.span_states, span, head, count);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
