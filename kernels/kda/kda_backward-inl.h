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
#include "kernels/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kSpanChunks = kKdaSpan / kKdaChunk;

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
HWY_NOINLINE void load_chunk(const BackwardHead& head, const BackwardBuffers& buffers, int64_t first,
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
HWY_NOINLINE void decay_and_add(const BackwardBuffers& buffers, const float* factor, const float* from,
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

// d_total = P_C dP_C = P_C rowsum(S0 * D): a chain over e for each channel, four vectors of channels side by
// side.
HWY_NOINLINE void total_gradient(const BackwardBuffers& buffers, const float* state, const float* total) {
  const int64_t ldk = buffers.ldk;
  const auto columns = [&](auto vectors, int64_t d) HWY_ATTR {
    constexpr int kVectors = decltype(vectors)::value;
    Lanes sums[kVectors];
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) sums[n] = zero_lanes();
    for (int64_t e = 0; e < buffers.dv; ++e) {
      const int64_t at = e * ldk + d;
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        sums[n] = fma(load(state + at + n * kLanes), load(buffers.d_state + at + n * kLanes), sums[n]);
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      store(mul(load(total + d + n * kLanes), sums[n]), buffers.d_total + d + n * kLanes);
    }
  };
  int64_t d = 0;
  for (; d + 4 * kLanes <= ldk; d += 4 * kLanes) columns(std::integral_constant<int, 4>(), d);
  for (; d < ldk; d += kLanes) columns(std::integral_constant<int, 1>(), d);
}

// Back substitution in kVectors lanes of columns: slopes[i] = -dR_i and du[i] = dU_i, from the last row up.
template <int kVectors>
HWY_NOINLINE void solve_transposed(const BackwardHead& head, const BackwardBuffers& buffers,
                                   const ChunkRows& rows, int64_t first, int64_t count, int64_t column) {
  const int64_t ld = buffers.ldv;
  float* minus_dr = buffers.slopes + column;
  const float* d_o = buffers.slopes + kKdaChunk * ld + column;
  float* du = buffers.du + column;
  for (int64_t j = count - 1; j >= 0; --j) {
    Lanes sum[kVectors];
    const Lanes bjj = broadcast(rows.b[j * kKdaChunk + j]);
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      sum[n] = fma(bjj, load(d_o + j * ld + n * kLanes), load(du + j * ld + n * kLanes));
    }
    for (int64_t i = j + 1; i < count; ++i) {
      const Lanes aij = broadcast(rows.a[i * kKdaChunk + j]), bij = broadcast(rows.b[i * kKdaChunk + j]);
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        sum[n] = fma(bij, load(d_o + i * ld + n * kLanes), sum[n]);
        sum[n] = fma(aij, load(minus_dr + i * ld + n * kLanes), sum[n]);
      }
    }
    const Lanes minus_beta = broadcast(-*head.beta.row(first + j));
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      store(sum[n], du + j * ld + n * kLanes);
      store(mul(minus_beta, sum[n]), minus_dr + j * ld + n * kLanes);
    }
  }
}

// What row_gradients() keeps of sixteen channels between its two walks over a chunk's rows. Sixteen vectors
// that every row updates must stay in registers, so the rows are unrolled by templates and indices are
// constants.
struct RowSums {
  Lanes moving[kKdaChunk];   // down: k_j E_ij. Up: Z_j, what later rows read of row j
  Lanes left[kKdaChunk];     // dk_i so far
  Lanes reads[kKdaChunk];    // what of row i's reading depends on decays
  Lanes carried[kKdaChunk];  // what of the carried rows before i depends on decay i
  Lanes carried_sum, suffix, to_end;
};

struct RowGradients {
  const BackwardHead* head;
  const BackwardBuffers* buffers;
  const SpanChunk* chunk;
  int64_t first, count;  // rows of the sequence
  int64_t channel;       // the first of sixteen

  HWY_INLINE void put(const HeadRows& to, int64_t i, const Lanes& value) const {
    if (i >= count) return;
    const int64_t tail = std::min(kLanes, buffers->dk - channel);
    if (tail < kLanes) {
      store_first(value, to.row(first + i) + channel, tail);
    } else {
      store(value, to.row(first + i) + channel);
    }
  }

  template <int kRow>
  HWY_INLINE void down(RowSums& sums) const {
    const ChunkRows& rows = chunk->rows;
    const int64_t at = kRow * rows.ld + channel;
    const float* da = buffers->d_scores + kRow * kKdaChunk;
    const float* db = da + kKdaChunk * kKdaChunk;
    const Lanes decay = load(rows.decay + at), k = load(rows.key + at), q = load(rows.query + at);
    const Lanes prefix = load(rows.prefix + at), diagonal = broadcast(db[kRow]);
    Lanes l = mul(load(buffers->d_scaled + at), prefix);
    Lanes m = mul(load(buffers->d_scaled + kKdaChunk * rows.ld + at), prefix);
#pragma GCC unroll 16
    for (int j = 0; j < kRow; ++j) {
      sums.moving[j] = mul(sums.moving[j], decay);
      l = fma(broadcast(da[j]), sums.moving[j], l);
      m = fma(broadcast(db[j]), sums.moving[j], m);
    }
    sums.moving[kRow] = k;
    sums.reads[kRow] = fma(q, m, mul(k, l));
    sums.left[kRow] = fma(diagonal, q, l);
    put(head->dq, kRow, fma(diagonal, k, m));
    sums.carried[kRow] = sums.carried_sum;
    sums.carried_sum = fma(load(chunk->carried + at), load(buffers->d_carried + at), sums.carried_sum);
    if constexpr (kRow + 1 < kKdaChunk) down<kRow + 1>(sums);
  }

  template <int kRow>
  HWY_INLINE void up(RowSums& sums) const {
    const ChunkRows& rows = chunk->rows;
    const int64_t at = kRow * rows.ld + channel;
    const float* da = buffers->d_scores + kRow * kKdaChunk;
    const float* db = da + kKdaChunk * kKdaChunk;
    const Lanes decay = load(rows.decay + at), k = load(rows.key + at), q = load(rows.query + at);
    sums.suffix = add(sums.suffix, fnma(k, sums.moving[kRow], sums.reads[kRow]));
    put(head->dlog_decay, kRow, add(sums.carried[kRow], sums.suffix));
    put(head->dk, kRow,
        fma(sums.to_end, load(buffers->d_carried + at), add(sums.left[kRow], sums.moving[kRow])));
    sums.to_end = mul(sums.to_end, decay);
#pragma GCC unroll 16
    for (int j = 0; j < kRow; ++j) {
      sums.moving[j] = mul(fma(broadcast(da[j]), k, fma(broadcast(db[j]), q, sums.moving[j])), decay);
    }
    if constexpr (kRow > 0) up<kRow - 1>(sums);
  }
};

// dq, dk and dlog_decay of sixteen channels, from the gradients of everything the rows went into. With
//   L_i = d(kP)_i P_i + sum_{j<i} dA_ij k_j E_ij,   M_i = d(qP)_i P_i + sum_{j<i} dB_ij k_j E_ij   (i reads
//   the past) Z_j = sum_{i>j} (dA_ij k_i + dB_ij q_i) E_ij (j is read later)
// dq_i = M_i + dB_ii k_i,  dk_i = L_i + Z_i + dB_ii q_i + E_Ci dK_Ci.  dg_t sums whatever decayed at t: all
// of P_C dP_C, the carried rows before t, and for rows from t on what they read less what is read of them.
HWY_NOINLINE void row_gradients(const RowGradients& gradients) {
  RowSums sums;
  sums.carried_sum = load(gradients.buffers->d_total + gradients.channel);
  gradients.down<0>(sums);
  sums.suffix = zero_lanes();
  sums.to_end = broadcast(1.0f);
#pragma GCC unroll 16
  for (int j = 0; j < kKdaChunk; ++j) sums.moving[j] = zero_lanes();
  gradients.up<kKdaChunk - 1>(sums);
}

// The gradients of one chunk, rows [first, first + count) of the sequence. `fresh`: its start state is zero;
// `last`: so is D, the gradient of its end state. Replaces D by the gradient of the start state.
HWY_NOINLINE void backward_chunk(const BackwardHead& head, const BackwardBuffers& buffers,
                                 const SpanChunk& chunk, int64_t first, int64_t count, bool fresh,
                                 bool last) {
  const int64_t dk = buffers.dk, dv = buffers.dv, ldk = buffers.ldk, ldv = buffers.ldv;
  const ChunkRows& rows = chunk.rows;
  for (const HeadRows* t : {&head.dq, &head.dk, &head.dlog_decay}) prefetch_rows<true>(*t, first, count, dk);
  prefetch_rows<true>(head.dv, first, count, dv);
  float* d_o = buffers.slopes + kKdaChunk * ldv;
  for (int64_t i = 0; i < count; ++i) pack_row(head.d_o.row(first + i), dv, d_o + i * ldv);
  std::fill(d_o + count * ldv, d_o + kKdaChunk * ldv, 0.0f);
  std::fill(buffers.slopes + count * ldv, buffers.slopes + kKdaChunk * ldv, 0.0f);

  if (last) {
    std::fill(buffers.du, buffers.du + kKdaChunk * ldv, 0.0f);
  } else {
    block_gemm(dv, kKdaChunk, dk, LeftFactor{buffers.d_state, ldk, 1}, rows.reach, kKdaChunk,
               buffers.du_columns, kKdaChunk, false);
    pack_transposed(ldv, kKdaChunk, buffers.du_columns, kKdaChunk, buffers.du, ldv);
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

  pack_transposed(kKdaChunk, ldv, chunk.u, ldv, buffers.u_columns, kKdaChunk);
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
  if (fresh || last) {
    std::fill(buffers.d_total, buffers.d_total + ldk, 0.0f);
  } else {
    total_gradient(buffers, chunk.state, total);
  }
  for (int64_t d = 0; d < dk; d += kLanes) {
    row_gradients(RowGradients{&head, &buffers, &chunk, first, count, d});
  }

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
    if (start > 0) {  // the span before is next, and whole
      const int64_t first = start - kKdaSpan;
      for (const HeadRows* t : {&head.q, &head.k, &head.log_decay})
        prefetch_rows(*t, first, kKdaSpan, buffers.dk);
      for (const HeadRows* t : {&head.r, &head.d_o}) prefetch_rows(*t, first, kKdaSpan, buffers.dv);
    }
    if (start > 0) {
      const float* state = span_states.f32() + (span + start / kKdaSpan) * span_states.stride(0) +
                           head_index * span_states.stride(1);
      pack_transposed(buffers.dk, buffers.dv, state, span_states.stride(2), buffers.chunks[0].state,
                      buffers.ldk);
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
      if (b >= 0) span += kda_spans(args.sequences.end(b) - args.sequences.begin(b));
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
