// The bf16 form's two kernels. kda_pass() goes through the chunks in order with the state in registers and,
// in the same launch, makes the records of the chunks that the next pass goes through: the first waits on
// latencies, the second computes. kda_decode() does both for sequences with one new row.
#pragma once

#include "kernels/kda/kda_record.cuh"

namespace slipstream::kernels {

constexpr int kKdaScanWarps = 4;  // of 16 columns each: two blocks a head
constexpr int kKdaScanColumns = 16 * kKdaScanWarps, kKdaSlices = kKdaWidth / kKdaScanColumns;
constexpr int kKdaRecords = 5;  // a block's: those on their way; preparing warps need one each
constexpr int kKdaPassThreads = kKdaScanWarps * kWarp;

constexpr int kKdaValues = 4;  // chunks whose values are here or on their way

struct KdaPassShared {
  KdaRecord records[kKdaRecords];
  // v of rows 4 c + i, two columns, each for its lane alone.
  uint32_t values[kKdaValues][kKdaScanWarps][4][kWarp];
  uint64_t full[kKdaRecords], empty[kKdaRecords];
};

// Sᵀ of 16 columns: tiles as in KdaRecord, rows of the accumulator g and g + 8 are columns 2 g and 2 g + 1 of
// S.
using KdaStateTiles = float[kKdaTiles][4];

// Calls f(channel, step): with `from` the lane's first column, S[channel + i][from .. from + 1] are state i
// of the step, i = 0 .. 3.
template <class F>
__device__ __forceinline__ void for_state(KdaStateTiles& state, int lane, F&& f) {
#pragma unroll
  for (int s = 0; s < kKdaSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      f(16 * s + 4 * (lane % 4) + i, state[2 * s + i / 2][i % 2], state[2 * s + i / 2][2 + i % 2]);
  }
}
__device__ __forceinline__ void load_state(KdaStateTiles& state, const float* from, int64_t stride,
                                           int lane) {
  for_state(state, lane, [&](int channel, float& x, float& y) {
    const float2 two = *reinterpret_cast<const float2*>(from + channel * stride);
    x = two.x;
    y = two.y;
  });
}
__device__ __forceinline__ void store_state(KdaStateTiles& state, float* to, int64_t stride, int lane) {
  for_state(state, lane, [&](int channel, float x, float y) {
    *reinterpret_cast<float2*>(to + channel * stride) = {x, y};
  });
}
// The left factor of step s: Sᵀ in bf16.
__device__ __forceinline__ void state_factor(const KdaStateTiles& state, int s, uint32_t (&a)[4]) {
  a[0] = pack_bf16(state[2 * s][0], state[2 * s][1]);
  a[1] = pack_bf16(state[2 * s][2], state[2 * s][3]);
  a[2] = pack_bf16(state[2 * s + 1][0], state[2 * s + 1][1]);
  a[3] = pack_bf16(state[2 * s + 1][2], state[2 * s + 1][3]);
}
// S <- Diag(P_C) S, then S += sum over j of (k_j E_Cj) u_jᵀ; u as left factors.
__device__ __forceinline__ void decay_state(KdaStateTiles& state, const float4* total, int lane) {
#pragma unroll
  for (int s = 0; s < kKdaSteps; ++s) {
    const float4 p = total[4 * s + lane % 4];
    state[2 * s][0] *= p.x, state[2 * s][1] *= p.y, state[2 * s][2] *= p.x, state[2 * s][3] *= p.y;
    state[2 * s + 1][0] *= p.z, state[2 * s + 1][1] *= p.w, state[2 * s + 1][2] *= p.z,
        state[2 * s + 1][3] *= p.w;
  }
}
__device__ __forceinline__ void add_to_state(KdaStateTiles& state, const uint32_t (&u)[2][4],
                                             const float4 (*carried)[kWarp], int lane) {
#pragma unroll
  for (int from = 0; from < kKdaTiles; from += 8) {  // eight products in flight
    float4 k[8];
#pragma unroll
    for (int t = 0; t < 8; ++t) k[t] = carried[from + t][swizzled(lane)];
#pragma unroll
    for (int t = 0; t < 8; ++t) mma_tf32(state[from + t], u[0], k[t].x, k[t].y);
#pragma unroll
    for (int t = 0; t < 8; ++t) mma_tf32(state[from + t], u[1], k[t].z, k[t].w);
  }
}
// Rows 4 c .. 4 c + 3 of u as left factors in tf32.
__device__ __forceinline__ void u_factors(const float (&u)[4][2], uint32_t (&factors)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) factors[i / 4][i % 4] = __float_as_uint(rounded_tf32(u[i / 2][i % 2]));
}

// Chunks [begin, end) of the batch, and where the records of each (times heads) are.
struct KdaSegment {
  KdaRecord* records;
  int begin, end;
};
struct KdaPass {
  KdaView<bf16> view;
  KdaSegment scanned, prepared;
  int first_sequence, scan_blocks;  // sequence, head, slice of columns: the last counts fastest
  const float* carry_in;            // [h, dk, dv]: of a sequence that other passes began, or will go on with
  float* carry_out;
};

__device__ inline void scan_chunks(const KdaPass& pass, KdaPassShared& shared) {
  const KdaView<bf16>& view = pass.view;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int slice = static_cast<int>(blockIdx.x) % kKdaSlices;
  const int head = static_cast<int>(blockIdx.x) / kKdaSlices % view.heads;
  const KdaSequence sequence =
      sequence_at(view.batch, pass.first_sequence + static_cast<int>(blockIdx.x) / kKdaSlices / view.heads);
  const int before = chunks_before(view.batch, sequence.index), after = before + sequence.chunks();
  const int begin = max(before, pass.scanned.begin), end = min(after, pass.scanned.end);
  if (begin >= end) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kKdaRecords; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kArrivalsOfWarp * kKdaScanWarps);
    }
    barrier_init_done();
  }
  __syncthreads();
  const KdaRecord* next_record =
      pass.scanned.records + int64_t{begin - pass.scanned.begin} * view.heads + head;
  const auto bring_record = [&](int stage) {  // of the next chunk; by thread 0
    barrier_arrive_expecting(&shared.full[stage], sizeof(KdaRecord));
    copy_bytes_in(&shared.records[stage], next_record, sizeof(KdaRecord), &shared.full[stage]);
    next_record += view.heads;
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < min(kKdaRecords, end - begin); ++i) bring_record(i);
  }

  const int g = lane / 4, c = lane % 4, column = slice * kKdaScanColumns + warp * 16 + 2 * g;
  const bool keeps = view.slots != nullptr;
  const int slot = keeps ? view.slots[sequence.index] : 0;
  int span = 0;
  if (view.span_states != nullptr) {
    for (int b = lane; b < sequence.index; b += kWarp)
      span += (view.batch.row_begin[b + 1] - view.batch.row_begin[b] + kSpan - 1) / kSpan;
    span = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(span)));
  }
  const int64_t carried_at = int64_t{head} * kKdaWidth * kKdaWidth + column;
  float* const stored = keeps ? view.cache.state_at(slot, head) + column : nullptr;
  const bool folds = keeps && sequence.cached % kChunk + sequence.rows >= kChunk;  // a chunk at least
  KdaStateTiles state = {};
  if (begin > before) {
    load_state(state, pass.carry_in + carried_at, kKdaWidth, lane);
  } else if (keeps && sequence.cached >= kChunk) {
    load_state(state, stored, view.cache.state_row, lane);
  }
  const int begin_in_chunk = sequence.cached % kChunk;  // of new rows in the sequence's first chunk
  const int64_t first_row = sequence.first - begin_in_chunk + int64_t{begin - before} * kChunk + 4 * c;
  const int64_t v_stride = view.v.row_stride, o_stride = view.o.row_stride;
  const bf16* v_row = view.v.at(first_row, head) + column;
  bf16* o_row = view.o.at(first_row, head) + column;
  int v_index = begin;
  const auto bring_values = [&] {  // of the next chunk
    const KdaChunk chunk = sequence.chunk(v_index - before);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool present = v_index < end && 4 * c + i >= chunk.begin && 4 * c + i < chunk.end;
      copy_async_4(shared_address(&shared.values[v_index % kKdaValues][warp][i][lane]),
                   present ? v_row + i * v_stride : view.v.data, present);
    }
    commit_copies();
    v_row += kChunk * v_stride;
    ++v_index;
  };
#pragma unroll
  for (int i = 0; i < kKdaValues - 1; ++i) bring_values();

  int stage = 0, parity = 0;
  // What is stored between chunks stays out of the loop over them: with one warp a scheduler nothing hides
  // the fetching of instructions. What follows an open chunk is not kept (the cache has the state before it),
  // so that its fold, whatever it is, does no harm, and the state stays in the same registers.
  const int open = keeps && (sequence.cached + sequence.rows) % kChunk != 0 ? after - 1 : after;
  for (int index = begin, stop; index < end;) {
    stop = index < open ? min(end, open) : end;
    if (view.span_states != nullptr) {
      constexpr int kChunks = kSpan / kChunk;
      const int chunk = index - before;
      stop = min(stop, index + kChunks - chunk % kChunks);
      if (chunk % kChunks == 0) {
        const int64_t at = int64_t{span + chunk / kChunks} * view.span_stride;
        store_state(state, view.span_states + at + head * view.span_head + column, view.span_row, lane);
      }
    }
    if (index == open && folds) store_state(state, stored, view.cache.state_row, lane);
    for (; index < stop; ++index) {
      const KdaRecord& record = shared.records[stage];
      const KdaChunk chunk = sequence.chunk(index - before);
      bring_values();
      barrier_wait(&shared.full[stage], parity);
      float read[2][2][4] = {}, out[2][2][4] = {};  // [tile of rows][even steps, odd steps]
#pragma unroll
      for (int s = 0; s < kKdaSteps; ++s) {
        uint32_t a[4];
        state_factor(state, s, a);
        const uint4 k = record.key_prefix[s][lane], q = record.query_prefix[s][lane];
        mma(read[0][s % 2], a, k.x, k.y);
        mma(read[1][s % 2], a, k.z, k.w);
        mma(out[0][s % 2], a, q.x, q.y);
        mma(out[1][s % 2], a, q.z, q.w);
      }
      decay_state(state, record.total, lane);
      // r of rows 4 c + i before what the chunk's own rows add to it.
      float r[4][2], own[4][2], u[4][2];
      wait_for_copies<kKdaValues - 1>();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t v = shared.values[index % kKdaValues][warp][i][lane];
        r[i][0] = __uint_as_float(v << 16) - (read[i / 2][0][i % 2] + read[i / 2][1][i % 2]);
        r[i][1] = __uint_as_float(v & 0xffff0000u) - (read[i / 2][0][2 + i % 2] + read[i / 2][1][2 + i % 2]);
      }
      if (chunk.begin > 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (4 * c + i >= chunk.begin) continue;
          const float2 kept =
              *reinterpret_cast<const float2*>(view.cache.u_at(slot, 4 * c + i, head) + column);
          r[i][0] = kept.x;
          r[i][1] = kept.y;
        }
      }
      // Rows of lane c = 0, then 1, 2, 3: each lane solves for its own rows, those of lane b are final in
      // round b.
      const float4 beta = record.beta[c];
      const float betas[4] = {beta.x, beta.y, beta.z, beta.w};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float4 a1 = record.minus_a_own[1][c], a2 = record.minus_a_own[2][c],
                       a3 = record.minus_a_own[3][c];
          own[0][m] = r[0][m];
          u[0][m] = betas[0] * own[0][m];
          own[1][m] = fmaf(a1.x, u[0][m], r[1][m]);
          u[1][m] = betas[1] * own[1][m];
          own[2][m] = fmaf(a2.y, u[1][m], fmaf(a2.x, u[0][m], r[2][m]));
          u[2][m] = betas[2] * own[2][m];
          own[3][m] = fmaf(a3.z, u[2][m], fmaf(a3.y, u[1][m], fmaf(a3.x, u[0][m], r[3][m])));
          u[3][m] = betas[3] * own[3][m];
        }
        if (b == 3) break;
        float before_u[4][2];
#pragma unroll
        for (int j = 0; j < 8; ++j) before_u[j / 2][j % 2] = __shfl_sync(~0u, u[j / 2][j % 2], b, 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 a = record.minus_a[b][i][c];  // 0 for the rows that came before
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            r[i][m] = fmaf(
                a.w, before_u[3][m],
                fmaf(a.z, before_u[2][m], fmaf(a.y, before_u[1][m], fmaf(a.x, before_u[0][m], r[i][m]))));
          }
        }
      }
      // The chunk before is done with, also by warps a little behind.
      if (threadIdx.x == 0 && index > begin && index - 1 + kKdaRecords < end) {
        const int before_stage = stage == 0 ? kKdaRecords - 1 : stage - 1;
        barrier_wait(&shared.empty[before_stage], stage == 0 ? parity ^ 1 : parity);
        bring_record(before_stage);
      }
      __syncwarp();
      uint32_t factors[2][4];
      u_factors(u, factors);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 b = record.b[h][lane];
        float o[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i] = out[h][0][i] + out[h][1][i];
        mma_tf32(o, factors[0], b.x, b.y);
        mma_tf32(o, factors[1], b.z, b.w);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 4 * c + 2 * h + i;
          if (row < chunk.begin || row >= chunk.end) continue;
          *reinterpret_cast<uint32_t*>(o_row + (2 * h + i) * o_stride) = pack_bf16(o[i], o[2 + i]);
        }
      }
      o_row += kChunk * o_stride;
      add_to_state(state, factors, record.carried, lane);
      __syncwarp();
      barrier_arrive_warp(&shared.empty[stage], lane == 0);
      if (view.r.data != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (4 * c + i < chunk.end)
            *reinterpret_cast<float2*>(view.r.at(chunk.row + 4 * c + i, head) + column) = {own[i][0],
                                                                                           own[i][1]};
        }
      }
      if (keeps && chunk.end < kChunk) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (4 * c + i >= chunk.begin && 4 * c + i < chunk.end)
            *reinterpret_cast<float2*>(view.cache.u_at(slot, 4 * c + i, head) + column) = {u[i][0], u[i][1]};
        }
      }
      if (++stage == kKdaRecords) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
  if (end < after) {
    store_state(state, pass.carry_out + carried_at, kKdaWidth, lane);
  } else if (folds && (sequence.cached + sequence.rows) % kChunk == 0) {
    store_state(state, stored, view.cache.state_row, lane);
  }
}

__global__ void __launch_bounds__(kKdaPassThreads, 2) kda_pass(const __grid_constant__ KdaPass pass) {
  extern __shared__ __align__(128) unsigned char bytes[];
  KdaPassShared& shared = *reinterpret_cast<KdaPassShared*>(bytes);
  if (static_cast<int>(blockIdx.x) < pass.scan_blocks) return scan_chunks(pass, shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, heads = pass.view.heads;
  const int index = (static_cast<int>(blockIdx.x) - pass.scan_blocks) * kKdaScanWarps + warp;
  if (index >= (pass.prepared.end - pass.prepared.begin) * heads) return;
  const KdaChunk chunk = find_chunk(pass.view.batch, pass.prepared.begin + index / heads);
  if (chunk.sequence < 0) return;
  KdaRecord& record = shared.records[warp];
  prepare_chunk(pass.view, chunk, index % heads, record);
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) copy_bytes_out(pass.prepared.records + index, &record, sizeof(KdaRecord));
}

// --- one new row a sequence

constexpr int kKdaDecodeWarps = kKdaScanWarps;

// Of the chunk, up to the new row.
struct KdaDecodeShared {
  float4 decay[kChunk][kWarp], key[kChunk][kWarp], query[kWarp];
  uint2 prefix[2][kWarp];  // k P, q P of the new row in bf16
  float4 total[kWarp];
  float minus_a[kChunk], b[kChunk];
  float u[kChunk][kKdaScanColumns];
};

__global__ void __launch_bounds__(kKdaDecodeWarps* kWarp, 5)
    kda_decode(const __grid_constant__ KdaView<bf16> view) {
  __shared__ KdaDecodeShared s;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int slice = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int sequence = static_cast<int>(blockIdx.z), row = view.batch.row_begin[sequence];
  if (view.batch.row_begin[sequence + 1] == row) return;
  const int slot = view.slots[sequence], cached = view.batch.cached[sequence], own = cached % kChunk;
  const int c = lane % 4, first_column = slice * kKdaScanColumns, place = warp * 16 + lane / 4 * 2;
  KdaStateTiles state = {};
  float* const stored = view.cache.state_at(slot, head) + first_column + place;
  if (cached >= kChunk) load_state(state, stored, view.cache.state_row, lane);

  for (int i = warp; i <= own; i += kKdaDecodeWarps) {
    if (i < own) {
      s.key[i][lane] = load4(view.cache.k_at(slot, i, head) + 4 * lane);
      s.decay[i][lane] = load4(view.cache.g_at(slot, i, head) + 4 * lane);
      if (lane < kKdaScanColumns / 4)
        *reinterpret_cast<float4*>(&s.u[i][4 * lane]) =
            load4(view.cache.u_at(slot, i, head) + first_column + 4 * lane);
    } else {
      const float4 k = load4(view.k.at(row, head) + 4 * lane);
      const float4 a = decay_of(load4(view.log_decay.at(row, head) + 4 * lane));
      s.key[i][lane] = k;
      s.decay[i][lane] = a;
      s.query[lane] = load4(view.q.at(row, head) + 4 * lane);
      if (slice == 0 && own + 1 < kChunk) {
        store4(view.cache.k_at(slot, i, head) + 4 * lane, k);
        store4(view.cache.g_at(slot, i, head) + 4 * lane, a);
      }
    }
  }
  if (threadIdx.x < kChunk) s.b[threadIdx.x] = 0.0f;
  __syncthreads();
  const float4 key = s.key[own][lane], query = s.query[lane];
  for (int j = warp; j <= own; j += kKdaDecodeWarps) {
    float4 w = s.key[j][lane];
    for (int i = j + 1; i <= own; ++i) w = w * s.decay[i][lane];
    const float a = warp_sum(dot(key, w)), b = warp_sum(dot(query, w));
    if (lane == 0) {
      s.minus_a[j] = -a;
      s.b[j] = rounded_tf32(b);
    }
    if (j < own) s.key[j][lane] = w;  // for the end of the chunk; until the barrier nobody else reads it
  }
  if (warp == kKdaDecodeWarps - 1) {
    float4 prefix = s.decay[0][lane];
    for (int i = 1; i <= own; ++i) prefix = prefix * s.decay[i][lane];
    s.prefix[0][lane] = bf16_of(key * prefix);
    s.prefix[1][lane] = bf16_of(query * prefix);
    s.total[lane] = prefix;
  }
  __syncthreads();

  // One tile of columns: 0 is the row's key, 1 its query.
  float parts[2][4] = {};
#pragma unroll
  for (int step = 0; step < kKdaSteps; ++step) {
    uint32_t a[4];
    state_factor(state, step, a);
    const uint2 factor = lane < 8 ? s.prefix[lane / 4][4 * step + c] : uint2{0, 0};
    mma(parts[step % 2], a, factor.x, factor.y);
  }
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = parts[0][i] + parts[1][i];
  float r[2], new_u[2];
  const bf16* const value = view.v.at(row, head) + first_column + place;
  const float beta = view.beta[row][head];
#pragma unroll
  for (int m = 0; m < 2; ++m) {  // of lanes c = 0
    r[m] = load(value + m) - sums[2 * m];
    for (int j = 0; j < own; ++j) r[m] = fmaf(s.minus_a[j], s.u[j][place + m], r[m]);
    new_u[m] = __shfl_sync(~0u, beta * r[m], 0, 4);
  }
  float u[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
      u[i][m] = 4 * c + i < own ? s.u[4 * c + i][place + m] : 4 * c + i == own ? new_u[m] : 0.0f;
  }
  uint32_t factors[2][4];
  u_factors(u, factors);
  const bool of_query = lane / 4 == 1;
#pragma unroll
  for (int x = 0; x < 2; ++x)
    mma_tf32(sums, factors[x], of_query ? s.b[4 * c + 2 * x] : 0.0f,
             of_query ? s.b[4 * c + 2 * x + 1] : 0.0f);
  if (c == 0) {
    *reinterpret_cast<uint32_t*>(view.o.at(row, head) + first_column + place) = pack_bf16(sums[1], sums[3]);
    if (own + 1 < kChunk)
      *reinterpret_cast<float2*>(view.cache.u_at(slot, own, head) + first_column + place) = {new_u[0],
                                                                                             new_u[1]};
  }
  if (own + 1 < kChunk) return;
  decay_state(state, s.total, lane);
#pragma unroll
  for (int t = 0; t < kKdaTiles; ++t) {
    // The channel of KdaRecord's tile t, column g, as a float of s.key.
    const int g = lane / 4, channel = 16 * (t / 2) + 4 * (g / 2) + 2 * (t % 2) + g % 2;
    float k[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) k[i] = rounded_tf32((&s.key[4 * c + i][0].x)[channel]);
    mma_tf32(state[t], factors[0], k[0], k[1]);
    mma_tf32(state[t], factors[1], k[2], k[3]);
  }
  store_state(state, stored, view.cache.state_row, lane);
}

}  // namespace slipstream::kernels
