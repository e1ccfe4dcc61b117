// The rows of one chunk of one head, in the arithmetic that KDA's forward and backward share.
//
// Every value is a fixed chain of operations that depends on its row and the chunk's earlier rows alone, so
// rows may arrive one by one, in pieces or all at once.
//
// Included by kda_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_KDA_KDA_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_KDA_KDA_CHUNK_INL_H_
#undef SLIPSTREAM_KERNELS_KDA_KDA_CHUNK_INL_H_
#else
#define SLIPSTREAM_KERNELS_KDA_KDA_CHUNK_INL_H_
#endif

#include <xmmintrin.h>

#include <algorithm>

#include "kernels/kda/kda.h"
#include "kernels/simd/block_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

static_assert(kKdaChunk == kLanes, "the rows of a chunk are the lanes of A, B and the decayed keys");

constexpr int64_t pad_to_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Products of decays pass through the subnormal numbers on their way to zero, where each operation costs a
// hundred cycles. While this lives, subnormal operands and results of the thread count as zero.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kSubnormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kSubnormalsAreZero = 0x0040;
  unsigned saved_;
};

// Rows of one head of a [T, h, n] tensor, from row `first` on.
struct HeadRows {
  float* data;
  int64_t stride;

  float* row(int64_t i) const { return data + i * stride; }
};
HWY_INLINE HeadRows head_rows(const Tensor& t, int64_t first, int64_t head) {
  return {t.row(first, head), t.stride(0)};
}

// Asks for `count` rows of n values. A head's rows are short pieces far apart, which the hardware does not
// foresee; they wait in the second-level cache, since a chunk's own work fills the first.
template <bool kForWriting = false>
HWY_INLINE void prefetch_rows(const HeadRows& rows, int64_t first, int64_t count, int64_t n) {
  constexpr int kSecondLevel = 2;
  for (int64_t i = first; i < first + count; ++i) {
    const float* row = rows.row(i);
    for (int64_t d = 0; d < n; d += kLanes) __builtin_prefetch(row + d, kForWriting ? 1 : 0, kSecondLevel);
  }
}

// Copies n values to a row padded with zeros to whole lanes.
HWY_INLINE void pack_row(const float* from, int64_t n, float* to) {
  for_lanes(n, [&](int64_t i, auto chunk) HWY_ATTR { store(chunk.load(from + i), to + i); });
}

// Rows of dk values are padded with zeros to ld = whole lanes.
struct ChunkRows {
  int64_t dk;
  int64_t ld;
  float* decay;   // [16, ld]  a_i
  float* key;     // [16, ld]
  float* query;   // [16, ld]
  float* prefix;  // [16, ld]  P_i
  float* scaled;  // [32, ld]  k_i P_i, then q_i P_i
  float* reach;   // [dk, 16]  column j: k_j E_ij of the last row i that was scored
  float* a;       // [16, 16]  A_ij for j < i; the rest is undefined
  float* b;       // [16, 16]  B_ij for j <= i; the rest is undefined
};

HWY_INLINE ChunkRows allocate_chunk_rows(int64_t dk, Worker& worker) {
  const int64_t ld = pad_to_lanes(dk), size = kKdaChunk * ld;
  return {.dk = dk,
          .ld = ld,
          .decay = worker.scratch<float>(size),
          .key = worker.scratch<float>(size),
          .query = worker.scratch<float>(size),
          .prefix = worker.scratch<float>(size),
          .scaled = worker.scratch<float>(2 * size),
          .reach = worker.scratch<float>(size),
          .a = worker.scratch<float>(kKdaChunk * kKdaChunk),
          .b = worker.scratch<float>(kKdaChunk * kKdaChunk)};
}

// Row i as it arrives.
HWY_NOINLINE void load_row(const ChunkRows& rows, int64_t i, const float* q, const float* k,
                           const float* log_decay) {
  pack_row(q, rows.dk, rows.query + i * rows.ld);
  pack_row(k, rows.dk, rows.key + i * rows.ld);
  float* decay = rows.decay + i * rows.ld;
  for_lanes(rows.dk,
            [&](int64_t d, auto chunk) HWY_ATTR { store(exp(chunk.load(log_decay + d)), decay + d); });
}

// P of rows [0, end), and k P and q P of rows [begin, end).
HWY_NOINLINE void scale_rows(const ChunkRows& rows, int64_t begin, int64_t end) {
  const int64_t ld = rows.ld;
  for (int64_t d = 0; d < ld; d += kLanes) {
    Lanes prefix = load(rows.decay + d);
    for (int64_t i = 0; i < end; ++i) {
      const int64_t at = i * ld + d;
      if (i > 0) prefix = mul(prefix, load(rows.decay + at));
      store(prefix, rows.prefix + at);
      if (i < begin) continue;
      store(mul(load(rows.key + at), prefix), rows.scaled + at);
      store(mul(load(rows.query + at), prefix), rows.scaled + kKdaChunk * ld + at);
    }
  }
}

// Moves the decayed keys past rows [first, first + kPast + kScored) and writes the last kScored of these rows
// of A and B: lane j of a vector belongs to row j, and each element is a chain over ascending d.
template <int kPast, int kScored>
HWY_NOINLINE void reach_rows(const ChunkRows& rows, int64_t first) {
  constexpr int kRows = kPast + kScored;
  const LanesTag tag;
  const int64_t ld = rows.ld;
  const float* HWY_RESTRICT decay = rows.decay + first * ld;
  const float* HWY_RESTRICT key = rows.key + first * ld;
  const float* HWY_RESTRICT query = rows.query + first * ld;
  float* HWY_RESTRICT reach = rows.reach;
  hn::Mask<LanesTag> own[kRows][kLanesParts];
  Lanes a[kRows], b[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int64_t part = 0; part < kLanesParts; ++part) {
      own[r][part] = hn::Eq(hn::Iota(tag, static_cast<float>(part * kLanesPartSize)),
                            hn::Set(tag, static_cast<float>(first + r)));
    }
    a[r] = zero_lanes();
    b[r] = zero_lanes();
  }
  for (int64_t d = 0; d < rows.dk; ++d) {
    Lanes w = first == 0 ? zero_lanes() : load(reach + d * kKdaChunk);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes k = broadcast(key[r * ld + d]);
      w = mul(w, broadcast(decay[r * ld + d]));
#pragma GCC unroll 16
      for (int64_t part = 0; part < kLanesParts; ++part) {
        w.part[part] = hn::IfThenElse(own[r][part], k.part[part], w.part[part]);
      }
      if (r < kPast) continue;
      a[r] = fma(k, w, a[r]);
      b[r] = fma(broadcast(query[r * ld + d]), w, b[r]);
    }
    store(w, reach + d * kKdaChunk);
  }
#pragma GCC unroll 16
  for (int r = kPast; r < kRows; ++r) {
    store(a[r], rows.a + (first + r) * kKdaChunk);
    store(b[r], rows.b + (first + r) * kKdaChunk);
  }
}

// A and B of rows [begin, end), and the decayed keys after row end - 1. Each pass over the keys takes four
// rows: the last up to three of the past come with the first new row, so that decode needs at most four
// passes.
HWY_INLINE void score_rows(const ChunkRows& rows, int64_t begin, int64_t end) {
  int64_t i = 0;
  for (; i + 4 <= begin; i += 4) reach_rows<4, 0>(rows, i);
  const int64_t past = begin - i;
  if (past == 1) reach_rows<1, 1>(rows, i);
  if (past == 2) reach_rows<2, 1>(rows, i);
  if (past == 3) reach_rows<3, 1>(rows, i);
  if (past > 0) i = begin + 1;
  for (; i + 4 <= end; i += 4) reach_rows<0, 4>(rows, i);
  for (; i < end; ++i) reach_rows<0, 1>(rows, i);
}

// x[i] = (k_i P_i)ᵀ S and x[16 + i] = (q_i P_i)ᵀ S for rows [begin, end): chains over ascending d.
HWY_INLINE void state_products(const ChunkRows& rows, int64_t begin, int64_t end, const float* state,
                               int64_t state_stride, int64_t dv, float* x, int64_t ldx) {
  const int64_t count = end - begin, half = kKdaChunk * rows.ld;
  const float* keys = rows.scaled + begin * rows.ld;
  float* to = x + begin * ldx;
  if (count == kKdaChunk) {
    block_gemm(2 * kKdaChunk, dv, rows.dk, LeftFactor{keys, rows.ld, 1}, state, state_stride, to, ldx, false);
    return;
  }
  if (count > 1) {
    block_gemm(count, dv, rows.dk, LeftFactor{keys, rows.ld, 1}, state, state_stride, to, ldx, false);
    block_gemm(count, dv, rows.dk, LeftFactor{keys + half, rows.ld, 1}, state, state_stride,
               to + kKdaChunk * ldx, ldx, false);
    return;
  }
  // Decode: k and q share one pass over the state.
  block_gemm(2, dv, rows.dk, LeftFactor{keys, half, 1}, state, state_stride, to, kKdaChunk * ldx, false);
}

// S <- Diag(P_15) S + sum_j (k_j E_15,j) u_jᵀ, each element a chain over ascending j. `fresh`: S counts as
// zero before.
HWY_NOINLINE void fold_chunk(const ChunkRows& rows, const float* u, int64_t ldu, int64_t dv, bool fresh,
                             float* state, int64_t state_stride) {
  const float* total = rows.prefix + (kKdaChunk - 1) * rows.ld;
  for (int64_t d = 0; d < rows.dk && !fresh; ++d) {
    float* row = state + d * state_stride;
    const Lanes factor = broadcast(total[d]);
    for_lanes(
        dv, [&](int64_t i, auto chunk) HWY_ATTR { chunk.store(mul(chunk.load(row + i), factor), row + i); });
  }
  block_gemm(rows.dk, dv, kKdaChunk, LeftFactor{rows.reach, kKdaChunk, 1}, u, ldu, state, state_stride,
             !fresh);
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
