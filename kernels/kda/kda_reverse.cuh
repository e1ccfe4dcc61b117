// The bf16 form's backward, segment after segment of spans from the last to the first, a segment in four
// launches:
//   kda_prepare_backward  records of its chunks, as the forward's
//   kda_fold              the state at the start of each chunk, from its span's
//   kda_reverse           the one that goes in order: D, the gradient of the state, chunk by chunk, with it
//   dU and dR kda_gradients         what is left is each chunk's own: dq, dk and the gradients of decays and
//   beta
// Names as in kda_backward.cuh, layouts as in kda_record.cuh; factors are bf16, sums f32.
#pragma once

#include <cstddef>

#include "kernels/kda/kda_backward.cuh"
#include "kernels/kda/kda_scan.cuh"

namespace slipstream::kernels {

struct alignas(128) KdaBackwardRecord {
  static constexpr int kSums = 2 * 3 * kChunk;  // of minus_a, minus_a_own and b

  uint4 carried[kKdaSteps][kWarp];   // k_j E_Cj as KdaRecord::key_prefix
  uint4 prefixes[kKdaTiles][kWarp];  // k P and q P of rows 4 c .. 4 c + 3, at swizzled(lane)
  float4 minus_a[3][4][4];   // [b - 1][r][c]: -A of rows 4 b .. 4 b + 3, column 4 c + r; 0 unless b > c
  float4 minus_a_own[4][4];  // [r][c]: rows 4 c .. 4 c + 3, column 4 c + r; 0 unless below the diagonal
  uint2 b[2][kWarp];         // [h]: B of rows 4 c .. 4 c + 3, column (h, g)
  float4 total[kWarp];
  float4 beta[4];
  uint2 folded[kKdaTiles][kWarp];  // k_j E_Cj of rows 4 c .. 4 c + 3, at swizzled(lane); not for kda_reverse
};
constexpr int kKdaReverseBytes = offsetof(KdaBackwardRecord, folded);
static_assert(kKdaReverseBytes % 16 == 0);

__device__ __forceinline__ void put_a(KdaBackwardRecord& record, int i, int j, float sum, bool) {
  float4& four = i / 4 == j / 4 ? record.minus_a_own[j % 4][j / 4] : record.minus_a[i / 4 - 1][j % 4][j / 4];
  (&four.x)[i % 4] = -sum;
}
__device__ __forceinline__ void put_b(KdaBackwardRecord& record, int i, int j, float sum) {
  store(reinterpret_cast<bf16*>(&record.b[tile_of_row(j)][column_of_row(j) * 4 + i / 4]) + i % 4, sum);
}
__device__ __forceinline__ uint2 rows_of_channel(const float4* rows, int d) {  // four rows
  return {pack_bf16(channel_of(rows[0], d), channel_of(rows[1], d)),
          pack_bf16(channel_of(rows[2], d), channel_of(rows[3], d))};
}
__device__ __forceinline__ int own_place(int lane, int d,
                                         int c) {  // of channel d of four in tile 2 s + d / 2
  return swizzled(4 * (2 * (lane % 4) + d % 2) + c);
}
__device__ __forceinline__ void put_prefixes(KdaBackwardRecord& record, int i, const float4* key,
                                             const float4* query, int lane) {
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const uint2 k = rows_of_channel(key, d), q = rows_of_channel(query, d);
    record.prefixes[lane / 4 * 2 + d / 2][own_place(lane, d, i / 4)] = {k.x, k.y, q.x, q.y};
  }
}
__device__ __forceinline__ void put_carried(KdaBackwardRecord& record, const float4 (&w)[kChunk], int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint2 first = bf16_of(w[row_of(0, n)]), second = bf16_of(w[row_of(1, n)]);
    record.carried[lane / 4][4 * n + lane % 4] = {first.x, first.y, second.x, second.y};
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int d = 0; d < 4; ++d)
      record.folded[lane / 4 * 2 + d / 2][own_place(lane, d, c)] = rows_of_channel(w + 4 * c, d);
  }
}

constexpr int kSpanChunks = kSpan / kChunk, kKdaMatrix = kKdaWidth * kKdaWidth;

// Spans [begin, end) of the batch. Chunk q of span s, head h has place ((s - begin) kSpanChunks + q) heads +
// h.
struct KdaBackwardPass {
  KdaView<bf16> view;  // without a cache; r and span_states are inputs
  Heads<bf16> d_o, dq, dk, dv;
  Heads<float> dlog_decay;
  Rows<float> dbeta;
  int begin, end;
  KdaBackwardRecord* records;
  bf16 *states, *d_states;  // [place, dk, dv]: S at the chunk's start, D at its end
  bf16* du;                 // [place, kChunk, dv]
  int first_sequence;       // of kda_reverse
  const float* carry_in;    // D of a sequence that goes on in the segment before, or after
  float* carry_out;

  __device__ __forceinline__ int64_t place(int span, int chunk, int head) const {
    return (int64_t{span - begin} * kSpanChunks + chunk) * view.heads + head;
  }
};

// Chunk q of a span; `end` <= 0 when the sequence has ended before. Called by whole warps.
__device__ __forceinline__ KdaChunk chunk_of_span(const DeviceSequences& batch, int span, int q) {
  const Piece piece = find_piece(batch, kSpan, span);
  if (piece.sequence < 0) return {-1, 0, 0, 0};
  const KdaSequence sequence = sequence_at(batch, piece.sequence);
  const int from = piece.first + q * kChunk;
  return {piece.sequence, 0, min(kChunk, sequence.rows - from), sequence.first + from};
}

__global__ void __launch_bounds__(4 * kWarp, 2)
    kda_prepare_backward(const __grid_constant__ KdaBackwardPass pass) {
  extern __shared__ __align__(128) unsigned char bytes[];
  KdaBackwardRecord& record = reinterpret_cast<KdaBackwardRecord*>(bytes)[threadIdx.x / kWarp];
  const int index = static_cast<int>(blockIdx.x * 4 + threadIdx.x / kWarp), heads = pass.view.heads;
  const int span = pass.begin + index / heads / kSpanChunks;
  if (span >= pass.end) return;
  const KdaChunk chunk = chunk_of_span(pass.view.batch, span, index / heads % kSpanChunks);
  if (chunk.end <= 0) return;
  prepare_chunk(pass.view, chunk, index % heads, record);
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) copy_bytes_out(pass.records + index, &record, sizeof(KdaBackwardRecord));
}

// Sᵀ in bf16 to [dk, dv].
__device__ __forceinline__ void store_rounded(KdaStateTiles& state, bf16* to, int lane) {
  for_state(state, lane, [&](int channel, float x, float y) {
    *reinterpret_cast<uint32_t*>(to + channel * kKdaWidth) = pack_bf16(x, y);
  });
}
// Rows 4 c .. 4 c + 3 as left factor in bf16.
__device__ __forceinline__ void row_factor(const float (&rows)[4][2], uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack_bf16(rows[i / 2 * 2][i % 2], rows[i / 2 * 2 + 1][i % 2]);
}

__global__ void __launch_bounds__(kKdaPassThreads) kda_fold(const __grid_constant__ KdaBackwardPass pass) {
  const KdaView<bf16>& view = pass.view;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp,
            c = lane % 4;
  const int head = static_cast<int>(blockIdx.y), span = pass.begin + static_cast<int>(blockIdx.z);
  const int column = static_cast<int>(blockIdx.x) * kKdaScanColumns + warp * 16 + lane / 4 * 2;
  const KdaChunk first = chunk_of_span(view.batch, span, 0);
  if (first.end <= 0) return;
  const int rows = view.batch.row_begin[first.sequence + 1] - first.row;
  KdaStateTiles state;
  load_state(state, view.span_states + span * view.span_stride + head * view.span_head + column,
             view.span_row, lane);
  for (int q = 0; q < kSpanChunks && q * kChunk < rows; ++q) {
    const int64_t place = pass.place(span, q, head);
    store_rounded(state, pass.states + place * kKdaMatrix + column, lane);
    if (q + 1 == kSpanChunks || (q + 1) * kChunk >= rows) break;
    const KdaBackwardRecord& record = pass.records[place];
    const float4 beta = record.beta[c];
    const float betas[4] = {beta.x, beta.y, beta.z, beta.w};
    float u[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 r =
          *reinterpret_cast<const float2*>(view.r.at(first.row + q * kChunk + 4 * c + i, head) + column);
      u[i][0] = betas[i] * r.x;
      u[i][1] = betas[i] * r.y;
    }
    uint32_t factor[4];
    row_factor(u, factor);
    decay_state(state, record.total, lane);
#pragma unroll
    for (int t = 0; t < kKdaTiles; ++t) {
      const uint2 k = record.folded[t][swizzled(lane)];
      mma(state[t], factor, k.x, k.y);
    }
  }
}

struct KdaReverseShared {
  struct alignas(128) Stage {
    unsigned char bytes[kKdaReverseBytes];
  } records[kKdaRecords];
  uint32_t d_o[kKdaValues][kKdaScanWarps][4][kWarp];
  uint64_t full[kKdaRecords], empty[kKdaRecords];
};

__global__ void __launch_bounds__(kKdaPassThreads, 2)
    kda_reverse(const __grid_constant__ KdaBackwardPass pass) {
  extern __shared__ __align__(128) unsigned char bytes[];
  KdaReverseShared& shared = *reinterpret_cast<KdaReverseShared*>(bytes);
  const KdaView<bf16>& view = pass.view;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane / 4, c = lane % 4, head = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.x) * kKdaScanColumns + warp * 16 + 2 * g;
  const KdaSequence sequence = sequence_at(view.batch, pass.first_sequence + static_cast<int>(blockIdx.z));
  int before = 0;  // spans
  for (int b = lane; b < sequence.index; b += kWarp)
    before += (view.batch.row_begin[b + 1] - view.batch.row_begin[b] + kSpan - 1) / kSpan;
  before = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(before)));
  const int after = before + (sequence.rows + kSpan - 1) / kSpan;
  if (max(before, pass.begin) >= min(after, pass.end)) return;
  const int chunks = (sequence.rows + kChunk - 1) / kChunk;  // the sequence's chunks, and those of them here
  const int begin = (max(before, pass.begin) - before) * kSpanChunks;
  const int end = min(chunks, (min(after, pass.end) - before) * kSpanChunks);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kKdaRecords; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kArrivalsOfWarp * kKdaScanWarps);
    }
    barrier_init_done();
  }
  __syncthreads();
  int next_chunk = end - 1;
  const auto bring_record = [&](int stage) {  // by thread 0
    barrier_arrive_expecting(&shared.full[stage], kKdaReverseBytes);
    copy_bytes_in(&shared.records[stage], pass.records + pass.place(before, next_chunk--, head),
                  kKdaReverseBytes, &shared.full[stage]);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < min(kKdaRecords, end - begin); ++i) bring_record(i);
  }
  int next_rows = end - 1;
  const auto bring_d_o = [&] {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = next_rows * kChunk + 4 * c + i;
      const bool present = next_rows >= begin && row < sequence.rows;
      copy_async_4(shared_address(&shared.d_o[next_rows & (kKdaValues - 1)][warp][i][lane]),
                   present ? pass.d_o.at(sequence.first + row, head) + column : pass.d_o.data, present);
    }
    commit_copies();
    --next_rows;
  };
#pragma unroll
  for (int i = 0; i < kKdaValues - 1; ++i) bring_d_o();

  KdaStateTiles state = {};
  const int64_t carried_at = int64_t{head} * kKdaMatrix + column;
  if (end < chunks) load_state(state, pass.carry_in + carried_at, kKdaWidth, lane);
  int stage = 0, parity = 0;
  for (int index = end - 1; index >= begin; --index) {
    const KdaBackwardRecord& record = *reinterpret_cast<const KdaBackwardRecord*>(&shared.records[stage]);
    const int64_t place = pass.place(before, index, head);
    bring_d_o();
    store_rounded(state, pass.d_states + place * kKdaMatrix + column, lane);
    barrier_wait(&shared.full[stage], parity);
    float products[2][2][4] = {};
#pragma unroll
    for (int s = 0; s < kKdaSteps; ++s) {
      uint32_t a[4];
      state_factor(state, s, a);
      const uint4 k = record.carried[s][lane];
      mma(products[0][s % 2], a, k.x, k.y);
      mma(products[1][s % 2], a, k.z, k.w);
    }
    decay_state(state, record.total, lane);
    wait_for_copies<kKdaValues - 1>();
    uint32_t words[4], d_o[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = shared.d_o[index & (kKdaValues - 1)][warp][i][lane];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      d_o[i] = __byte_perm(words[i / 2 * 2], words[i / 2 * 2 + 1], i % 2 == 0 ? 0x5410 : 0x7632);
    float y[4][2], du[4][2], dr[4][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = products[h][0][i] + products[h][1][i];
      mma(sum, d_o, record.b[h][lane].x, record.b[h][lane].y);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[2 * h + i % 2][i / 2] = sum[i];
    }
    // The forward's solve from the last row to the first.
    const float4 beta = record.beta[c];
    const float betas[4] = {beta.x, beta.y, beta.z, beta.w};
    const float4 a0 = record.minus_a_own[0][c], a1 = record.minus_a_own[1][c], a2 = record.minus_a_own[2][c];
#pragma unroll
    for (int b = 3; b >= 0; --b) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        du[3][m] = y[3][m];
        dr[3][m] = betas[3] * du[3][m];
        du[2][m] = fmaf(a2.w, dr[3][m], y[2][m]);
        dr[2][m] = betas[2] * du[2][m];
        du[1][m] = fmaf(a1.z, dr[2][m], fmaf(a1.w, dr[3][m], y[1][m]));
        dr[1][m] = betas[1] * du[1][m];
        du[0][m] = fmaf(a0.y, dr[1][m], fmaf(a0.z, dr[2][m], fmaf(a0.w, dr[3][m], y[0][m])));
        dr[0][m] = betas[0] * du[0][m];
      }
      if (b == 0) break;
      float after_dr[4][2];
#pragma unroll
      for (int j = 0; j < 8; ++j) after_dr[j / 2][j % 2] = __shfl_sync(~0u, dr[j / 2][j % 2], b, 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 a = record.minus_a[b - 1][i][c];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          y[i][m] =
              fmaf(a.x, after_dr[0][m],
                   fmaf(a.y, after_dr[1][m], fmaf(a.z, after_dr[2][m], fmaf(a.w, after_dr[3][m], y[i][m]))));
        }
      }
    }
    if (threadIdx.x == 0 && index < end - 1 && next_chunk >= begin) {
      const int before_stage = stage == 0 ? kKdaRecords - 1 : stage - 1;
      barrier_wait(&shared.empty[before_stage], stage == 0 ? parity ^ 1 : parity);
      bring_record(before_stage);
    }
    __syncwarp();
    bf16* const du_rows = pass.du + place * kChunk * kKdaWidth + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = index * kChunk + 4 * c + i;
      *reinterpret_cast<uint32_t*>(du_rows + (4 * c + i) * kKdaWidth) = pack_bf16(du[i][0], du[i][1]);
      if (row < sequence.rows)
        *reinterpret_cast<uint32_t*>(pass.dv.at(sequence.first + row, head) + column) =
            pack_bf16(dr[i][0], dr[i][1]);
#pragma unroll
      for (int m = 0; m < 2; ++m) dr[i][m] = -dr[i][m];
    }
    uint32_t minus_dr[4];
    row_factor(dr, minus_dr);
#pragma unroll
    for (int t = 0; t < kKdaTiles; ++t) {
      const uint4 p = record.prefixes[t][swizzled(lane)];
      mma(state[t], minus_dr, p.x, p.y);
      mma(state[t], d_o, p.z, p.w);
    }
    __syncwarp();
    barrier_arrive_warp(&shared.empty[stage], lane == 0);
    if (++stage == kKdaRecords) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (begin > 0) store_state(state, pass.carry_out + carried_at, kKdaWidth, lane);
}

struct KdaGradientsShared {
  // Swizzled tiles in bf16: S and D [dk, dv]; rows of dO, dR and u.
  alignas(128) unsigned char state[kKdaMatrix * 2], d_state[kKdaMatrix * 2];
  alignas(128) unsigned char d_o[kChunk * kKdaWidth * 2], dr[kChunk * kKdaWidth * 2],
      u[kChunk * kKdaWidth * 2];
  float key_prefix[kChunk][kRowPitch], query_prefix[kChunk][kRowPitch],
      carried[kChunk][kRowPitch];  // gradients
  float da[kChunk][kChunk], db[kChunk][kChunk];
};

__device__ __forceinline__ SwizzledTile tile_at(const unsigned char* bytes) {
  return {shared_address(bytes), 2 * kKdaWidth};
}

// A chunk of one head; thread d ends with the gradients of channel d (row_gradients() of kda_backward.cuh,
// from registers).
__global__ void __launch_bounds__(kKdaWidth, 2) kda_gradients(const __grid_constant__ KdaBackwardPass pass) {
  extern __shared__ __align__(128) unsigned char bytes[];
  KdaGradientsShared& s = *reinterpret_cast<KdaGradientsShared*>(bytes);
  const KdaView<bf16>& view = pass.view;
  const int d = static_cast<int>(threadIdx.x), warp = d / kWarp, lane = d % kWarp;
  const int head = static_cast<int>(blockIdx.x),
            span = pass.begin + static_cast<int>(blockIdx.y) / kSpanChunks;
  const int q_of_span = static_cast<int>(blockIdx.y) % kSpanChunks;
  const KdaChunk chunk = chunk_of_span(view.batch, span, q_of_span);
  if (chunk.end <= 0) return;
  const int count = chunk.end, row = chunk.row;
  const int64_t place = pass.place(span, q_of_span, head);
  const SwizzledTile state = tile_at(s.state), d_state = tile_at(s.d_state), d_o = tile_at(s.d_o),
                     dr = tile_at(s.dr), u = tile_at(s.u);
  for (int i = d; i < kKdaMatrix / 8; i += kKdaWidth) {
    copy_async(state.chunk(i / 16, i % 16), pass.states + place * kKdaMatrix + i * 8);
    copy_async(d_state.chunk(i / 16, i % 16), pass.d_states + place * kKdaMatrix + i * 8);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {  // eight values of a row; sixteen lanes have a row
    const int i = n * 8 + d / 16, e = d % 16 * 8;
    uint4 of_o = {}, of_r = {}, of_u = {};
    float sum = 0.0f;
    if (i < count) {
      of_o = *reinterpret_cast<const uint4*>(pass.d_o.at(row + i, head) + e);
      of_r = *reinterpret_cast<const uint4*>(pass.dv.at(row + i, head) + e);
      const uint4 of_du = *reinterpret_cast<const uint4*>(pass.du + (place * kChunk + i) * kKdaWidth + e);
      const float4 r0 = load4(view.r.at(row + i, head) + e), r1 = load4(view.r.at(row + i, head) + e + 4);
      const float beta = view.beta[row + i][head];
      const float4 b = {beta, beta, beta, beta};
      const uint2 u0 = bf16_of(b * r0), u1 = bf16_of(b * r1);
      of_u = {u0.x, u0.y, u1.x, u1.y};
      sum = dot(floats_of({of_du.x, of_du.y}), r0) + dot(floats_of({of_du.z, of_du.w}), r1);
    }
    const auto put = [&](const SwizzledTile& tile, unsigned char* to, const uint4& value) {
      *reinterpret_cast<uint4*>(to + (tile.chunk(i, e / 8) - tile.base)) = value;
    };
    put(d_o, s.d_o, of_o);
    put(dr, s.dr, of_r);
    put(u, s.u, of_u);
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane % 16 == 0 && i < count) pass.dbeta[row + i][head] = sum;
  }
  float k[kChunk], q[kChunk], a[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const bool present = i < count;
    k[i] = present ? load(view.k.at(row + i, head) + d) : 0.0f;
    q[i] = present ? load(view.q.at(row + i, head) + d) : 0.0f;
    a[i] = present ? fast_exp(view.log_decay.at(row + i, head)[d]) : 1.0f;
  }
  commit_copies();
  wait_for_copies();
  __syncthreads();

  {  // dR Sᵀ, dO Sᵀ, U Dᵀ: a warp has 32 channels
    float by_key[4][4] = {}, by_query[4][4] = {}, by_carried[4][4] = {};
    float scores[2][4] = {};  // warp 0: dR Uᵀ, warp 1: dO Uᵀ
    const auto l = static_cast<uint32_t>(lane);
#pragma unroll
    for (uint32_t e = 0; e < kKdaWidth; e += 16) {
      uint32_t left_r[4], left_o[4], left_u[4];
      load_a(left_r, dr, 0, e, l);
      load_a(left_o, d_o, 0, e, l);
      load_a(left_u, u, 0, e, l);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const auto n = static_cast<uint32_t>(warp * 32 + pair * 16);
        uint32_t right[4];
        load_b(right, state, n, e, l);
        mma(by_key[2 * pair], left_r, right[0], right[1]);
        mma(by_key[2 * pair + 1], left_r, right[2], right[3]);
        mma(by_query[2 * pair], left_o, right[0], right[1]);
        mma(by_query[2 * pair + 1], left_o, right[2], right[3]);
        load_b(right, d_state, n, e, l);
        mma(by_carried[2 * pair], left_u, right[0], right[1]);
        mma(by_carried[2 * pair + 1], left_u, right[2], right[3]);
      }
      if (warp < 2) {
        uint32_t right[4];
        load_b(right, u, 0, e, l);
        mma(scores[0], warp == 0 ? left_r : left_o, right[0], right[1]);
        mma(scores[1], warp == 0 ? left_r : left_o, right[2], right[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = lane / 4 + i / 2 * 8, in_tile = 2 * (lane % 4) + i % 2;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int channel = warp * 32 + t * 8 + in_tile;
        s.key_prefix[at][channel] = -by_key[t][i];
        s.query_prefix[at][channel] = by_query[t][i];
        s.carried[at][channel] = by_carried[t][i];
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (warp == 0) s.da[at][t * 8 + in_tile] = -scores[t][i];
        if (warp == 1) s.db[at][t * 8 + in_tile] = scores[t][i];
      }
    }
  }
  float d_total = 0.0f;  // sum over S D of row d
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const uint32_t offset = state.chunk(static_cast<uint32_t>(d), static_cast<uint32_t>(e)) - state.base;
    const uint4 x = *reinterpret_cast<const uint4*>(s.state + offset),
                y = *reinterpret_cast<const uint4*>(s.d_state + offset);
    d_total +=
        dot(floats_of({x.x, x.y}), floats_of({y.x, y.y})) + dot(floats_of({x.z, x.w}), floats_of({y.z, y.w}));
  }
  __syncthreads();

  float z[kChunk], prefix = 1.0f;
  // What a thread has read of its own column makes room for what comes of it: registers would not do.
  const auto reads = [&](int i) -> float& { return s.query_prefix[i][d]; };
  const auto left = [&](int i) -> float& { return s.key_prefix[i][d]; };
  const auto carried = [&](int i) -> float& { return s.carried[i][d]; };
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {  // z holds k_j E_ij
    prefix *= a[i];
    float by_key = prefix * s.key_prefix[i][d], by_query = prefix * s.query_prefix[i][d];
    reads(i) = fmaf(k[i], by_key, q[i] * by_query);
#pragma unroll
    for (int j = 0; j < i; ++j) {
      z[j] *= a[i];
      by_key = fmaf(s.da[i][j], z[j], by_key);
      by_query = fmaf(s.db[i][j], z[j], by_query);
    }
    z[i] = k[i];
    if (i < count) store(pass.dq.at(row + i, head) + d, fmaf(s.db[i][i], k[i], by_query));
    left(i) = fmaf(s.db[i][i], q[i], by_key);
  }
  d_total *= prefix;
  float decay = 1.0f;
#pragma unroll
  for (int j = kChunk - 1; j >= 0; --j) {
    const float gradient = decay * carried(j);
    left(j) += gradient;
    carried(j) = k[j] * gradient;
    decay *= a[j];
  }
  float sum_before = 0.0f;  // carried rows before decay m
#pragma unroll
  for (int m = 0; m < kChunk; ++m) {
    const float own = carried(m);
    carried(m) = sum_before;
    sum_before += own;
    z[m] = 0.0f;
  }
  float suffix = 0.0f;
#pragma unroll
  for (int m = kChunk - 1; m >= 0; --m) {
    const float next = m + 1 < kChunk ? a[(m + 1) % kChunk] : 0.0f;
    float scores = 0.0f, between = 1.0f;
#pragma unroll
    for (int j = m - 1; j >= 0; --j) {
      z[j] = fmaf(s.db[m][j], q[m], fmaf(s.da[m][j], k[m], next * z[j]));
      scores = fmaf(z[j], k[j] * between, scores);
      between *= a[j];
    }
    suffix += reads(m);
    if (m >= count) continue;
    store(pass.dk.at(row + m, head) + d, fmaf(next, z[m], left(m)));
    pass.dlog_decay.at(row + m, head)[d] = fmaf(a[m], scores, suffix + carried(m) + d_total);
  }
}

}  // namespace slipstream::kernels
