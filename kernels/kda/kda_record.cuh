// What the tensor cores need of one chunk of one head, made of its keys, queries and decays alone: the bf16
// form's first step, which all chunks take at once. Names as in kda.h; the state is kept transposed.
//
// Products with the state are mma.sync's with Sᵀ as accumulator and as left factor, so that a warp keeps its
// 16 columns of S in registers and exchanges nothing with other warps. Records hold the right factors in the
// order in which lanes take them: lane 4 g + c, where the fragments' own indices are
//   rows:     column n of tile h stands for row 4 (n / 2) + 2 h + n % 2, so that lane c sums rows 4 c .. 4 c
//   + 3 channels: columns 2 c + b of tiles 2 s + p stand for channel 16 s + 4 c + 2 p + b, so that what lane
//   4 s + c
//             of the preparing warp has of a row is what lane c needs in step s
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/kda/kda_forward.cuh"

namespace slipstream::kernels {

constexpr int kKdaWidth = 128;  // d_k and d_v of this form
constexpr int kKdaSteps = kKdaWidth / 16, kKdaTiles = kKdaWidth / 8;
static_assert(kChunk == 16 && kKdaWidth == 4 * kWarp);

__device__ __forceinline__ int tile_of_row(int row) { return row / 2 % 2; }
__device__ __forceinline__ int column_of_row(int row) { return row / 4 * 2 + row % 2; }
__device__ __forceinline__ int row_of(int tile, int column) { return column / 2 * 4 + tile * 2 + column % 2; }

struct alignas(128) KdaRecord {
  static constexpr int kSums = 2 * 4 * kChunk;  // of minus_a, minus_a_own and b

  uint4 key_prefix[kKdaSteps][kWarp];    // k P in bf16: channels 16 s + 4 c .. + 3 of rows (0, g) and (1, g)
  uint4 query_prefix[kKdaSteps][kWarp];  // q P
  float4 carried[kKdaTiles][kWarp];      // k_j E_Cj in tf32: rows 4 c .. 4 c + 3, at swizzled(lane)
  float4 minus_a[3][4][4];   // [b][r][c]: -A of row 4 c + r, columns 4 b .. 4 b + 3; 0 unless b < c
  float4 minus_a_own[4][4];  // [r][c]: row 4 c + r, columns 4 c .. 4 c + 3; 0 unless below the diagonal
  float4 b[2][kWarp];        // [h]: B in tf32 of row (h, g), columns 4 c .. 4 c + 3
  float4 total[kWarp];       // P_C: channels 4 lane .. 4 lane + 3
  float4 beta[4];            // of rows 4 c .. 4 c + 3
};

// Stores of the preparing warp to carried[][] fall into different banks.
__device__ __forceinline__ int swizzled(int lane) { return lane ^ (lane / 8); }

// Four aligned bytes to shared memory behind the thread's back, or zeros.
__device__ __forceinline__ void copy_async_4(uint32_t to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(present ? 4 : 0)
               : "memory");
}

// --- arithmetic that every path shares, operation by operation

// C[16, 8] += A[16, 8] B[8, 8] in tf32: a as rows g, g + 8 of column c, then of c + 4; b rows c, c + 4 of
// column g.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ __forceinline__ float rounded_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

__device__ __forceinline__ float4 operator*(float4 x, float4 y) {
  return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w};
}
__device__ __forceinline__ float4 decay_of(float4 log_decay) {
  return {fast_exp(log_decay.x), fast_exp(log_decay.y), fast_exp(log_decay.z), fast_exp(log_decay.w)};
}
__device__ __forceinline__ float4 floats_of(uint2 bits) {
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
          __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ __forceinline__ uint2 bf16_of(float4 x) { return {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)}; }
// A lane's part of A_ij or B_ij; the lanes' parts are then added as warp_sum() does.
__device__ __forceinline__ float dot(float4 x, float4 y) {
  return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, x.x * y.x)));
}

__device__ __forceinline__ int root_of(int x) {  // the whole part; x < 2^10
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(static_cast<float>(x)));
  return static_cast<int>(root + 1e-3f);
}

// Lane l receives the sum over the lanes of values[l]: the additions of warp_sum(), a tenth of its exchanges.
template <int kCount = kWarp>
__device__ __forceinline__ float sum_of_own(float (&values)[kWarp], int lane) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & kHalf) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float kept = upper ? values[i + kHalf] : values[i], given = upper ? values[i] : values[i + kHalf];
      values[i] = kept + __shfl_xor_sync(~0u, given, kHalf);
    }
    return sum_of_own<kHalf>(values, lane);
  }
}

// A chunk of a sequence: rows [begin, end) of it are new, those before are in the cache; `row` is the batch's
// row at which the chunk would start.
struct KdaChunk {
  int sequence, begin, end, row;
};
struct KdaSequence {
  int index, first, rows, cached;
  __device__ __forceinline__ int chunks() const {
    return rows == 0 ? 0 : (cached % kChunk + rows + kChunk - 1) / kChunk;
  }
  // Counted from the one that the first new row is in.
  __device__ __forceinline__ KdaChunk chunk(int number) const {
    const int begin = cached % kChunk, base = number * kChunk;
    return {index, max(begin - base, 0), min(kChunk, begin + rows - base), first + base - begin};
  }
};
__device__ __forceinline__ KdaSequence sequence_at(const DeviceSequences& batch, int index) {
  const int first = batch.row_begin[index];
  return {index, first, batch.row_begin[index + 1] - first, batch.cached[index]};
}
// Chunks of all sequences before this one. Called by whole warps.
__device__ __forceinline__ int chunks_before(const DeviceSequences& batch, int sequence) {
  int sum = 0;
  for (int b = static_cast<int>(threadIdx.x) % kWarp; b < sequence; b += kWarp)
    sum += sequence_at(batch, b).chunks();
  return static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(sum)));
}
// Chunk `number` of all; sequence -1 beyond the last. Called by whole warps.
__device__ __forceinline__ KdaChunk find_chunk(const DeviceSequences& batch, int number) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int base = 0; base < batch.count; base += kWarp) {
    const int chunks = base + lane < batch.count ? sequence_at(batch, base + lane).chunks() : 0;
    int end = chunks;
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(~0u, end, static_cast<unsigned>(step));
      if (lane >= step) end += below;
    }
    const unsigned mine = __ballot_sync(~0u, number >= end - chunks && number < end);
    if (mine != 0) {
      const int owner = __ffs(static_cast<int>(mine)) - 1;
      return sequence_at(batch, base + owner).chunk(number - __shfl_sync(~0u, end - chunks, owner));
    }
    number -= __shfl_sync(~0u, end, kWarp - 1);
  }
  return {-1, 0, 0, 0};
}

// Where 256 sums A_ij, B_ij go; rows of lane 4 g + c are 4 c .. 4 c + 3.
__device__ __forceinline__ void put_a(KdaRecord& record, int i, int j, float sum, bool fresh) {
  float4& four = i / 4 == j / 4 ? record.minus_a_own[i % 4][i / 4] : record.minus_a[j / 4][i % 4][i / 4];
  (&four.x)[j % 4] = fresh ? -sum : 0.0f;
}
__device__ __forceinline__ void put_b(KdaRecord& record, int i, int j, float sum) {
  (&record.b[tile_of_row(i)][column_of_row(i) * 4 + j / 4].x)[j % 4] = rounded_tf32(sum);
}
__device__ __forceinline__ float channel_of(const float4& x, int d) {
  return d == 0 ? x.x : d == 1 ? x.y : d == 2 ? x.z : x.w;
}
// Rows i - 3 .. i are at hand, i = 4 c + 3.
__device__ __forceinline__ void put_prefixes(KdaRecord& record, int i, const float4* key, const float4* query,
                                             int lane) {
#pragma unroll
  for (int below = 1; below >= 0; --below) {  // rows (0, n) and (1, n)
    const int n = column_of_row(i - below), at = 4 * n + lane % 4;
    const uint2 k0 = bf16_of(key[1 - below]), k1 = bf16_of(key[3 - below]);
    const uint2 q0 = bf16_of(query[1 - below]), q1 = bf16_of(query[3 - below]);
    record.key_prefix[lane / 4][at] = {k0.x, k0.y, k1.x, k1.y};
    record.query_prefix[lane / 4][at] = {q0.x, q0.y, q1.x, q1.y};
  }
}
__device__ __forceinline__ void put_carried(KdaRecord& record, const float4 (&w)[kChunk], int lane) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      record.carried[2 * (lane / 4) + d / 2][swizzled(4 * (2 * (lane % 4) + d % 2) + c)] = {
          rounded_tf32(channel_of(w[4 * c], d)), rounded_tf32(channel_of(w[4 * c + 1], d)),
          rounded_tf32(channel_of(w[4 * c + 2], d)), rounded_tf32(channel_of(w[4 * c + 3], d))};
    }
  }
}

// A warp makes the record of one chunk and head in shared memory. A lane has channels 4 lane .. 4 lane + 3.
// Row after row, w_j = k_j E_ij for all j < i; the 256 sums A_ij, B_ij come in order of i and are added over
// the lanes in eights of 32: sum i² + j is A_ij, i² + i + j is B_ij.
template <class View, class Record>
__device__ __forceinline__ void prepare_chunk(const View& view, const KdaChunk& chunk, int head,
                                              Record& record) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint2 key[kChunk], query[kChunk];
  float4 decay[kChunk];
  const bool whole = chunk.begin == 0 && chunk.end == kChunk;
  {
    const int first = whole ? chunk.row : chunk.row + chunk.begin;  // a row that exists
    const bf16 *k = view.k.at(first, head) + 4 * lane, *q = view.q.at(first, head) + 4 * lane;
    const float* g = view.log_decay.at(first, head) + 4 * lane;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {  // rows that are not new are read where one is, then put right
      key[i] = *reinterpret_cast<const uint2*>(k);
      query[i] = *reinterpret_cast<const uint2*>(q);
      decay[i] = load4(g);
      const bool next = whole || (i >= chunk.begin && i + 1 < chunk.end);
      k += next ? view.k.row_stride : 0;
      q += next ? view.q.row_stride : 0;
      g += next ? view.log_decay.row_stride : 0;
    }
  }
  // A and B: what is above the diagonal stays 0.
  for (int i = lane; i < Record::kSums; i += kWarp) (&record.minus_a[0][0][0])[i] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (lane < kChunk) {
    const bool present = lane >= chunk.begin && lane < chunk.end;
    // A cached row's u comes in place of v, and out as it came.
    (&record.beta[0].x)[lane] = present              ? view.beta[chunk.row + lane][head]
                                : lane < chunk.begin ? 1.0f
                                                     : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) decay[i] = decay_of(decay[i]);
  if (!whole) {
    const int slot = chunk.begin > 0 ? view.slots[chunk.sequence] : 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i >= chunk.begin && i < chunk.end) continue;
      const bool cached = i < chunk.begin;
      key[i] = cached ? bf16_of(load4(view.cache.k_at(slot, i, head) + 4 * lane)) : uint2{0, 0};
      decay[i] = cached ? load4(view.cache.g_at(slot, i, head) + 4 * lane) : float4{1.0f, 1.0f, 1.0f, 1.0f};
      query[i] = {0, 0};
    }
  }
  __syncwarp();

  float4 w[kChunk], prefix, key_prefix[4], query_prefix[4];
  float sums[kWarp];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float4 k = floats_of(key[i]), q = floats_of(query[i]), a = decay[i];
    prefix = i == 0 ? a : prefix * a;
    key_prefix[i % 4] = i < chunk.begin ? float4{0.0f, 0.0f, 0.0f, 0.0f} : k * prefix;
    query_prefix[i % 4] = q * prefix;
    if (i % 4 == 3) put_prefixes(record, i, key_prefix, query_prefix, lane);
    w[i] = k;
#pragma unroll
    for (int s = 0; s <= 2 * i; ++s) {
      const int v = i * i + s, j = s < i ? s : s - i;
      if (s < i) w[j] = w[j] * a;
      sums[v % kWarp] = dot(s < i ? k : q, w[j]);
      if (v % kWarp != kWarp - 1) continue;
      const float sum = sum_of_own(sums, lane);
      const int own = v - (kWarp - 1) + lane, row = root_of(own), place = own - row * row;
      if (place < row) {
        put_a(record, row, place, sum, row >= chunk.begin);
      } else {
        put_b(record, row, place - row, sum);
      }
    }
  }
  record.total[lane] = prefix;
  put_carried(record, w, lane);
}

}  // namespace slipstream::kernels
