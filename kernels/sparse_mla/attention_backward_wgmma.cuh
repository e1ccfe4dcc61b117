// The gradients of MLA at the models' shapes: up to 64 heads that share keys of 512 or 576 values, bf16
// throughout.
//
// A query's block takes its keys 64 at a time and forms all five products of a tile at once: scores and dO ·
// v, from them p and ds, then its share of dq and, for every one of the 64 keys, what this query adds to
// dkeys: ds q + p dO summed over the heads. Those rows, the shares, go to memory in bf16, in the order of the
// query's list; a second kernel sums every key's shares over the queries in ascending order, in fp32. That is
// one bf16 row a (query, key) written and read once, whatever the selection looks like: for 4096 queries of
// 2048 keys 9.7 GB each way. Rejected: sums in memory by atomics, twice the bytes and no order (in fixed
// point: a bound of every key's sum first); a block per tile of keys, as in attend_backward_keys, which reads
// all queries once a tile: good for one dense sequence, hopeless where 128K keys are selected at random.
//
// Rounds of queries are as large as the workspace allows (2.4 MB a query of 2048 keys; a GB makes rounds of
// three blocks a multiprocessor). Sums wait in fp32 in between, so rounds change no bits.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/sparse_mla/attention_backward.cuh"

namespace slipstream::kernels {

// Columns are handled 64 at a time: "boxes", kBoxBytes for 64 rows of them in the layout of
// factor_descriptor(). kRope: 0 or 64 columns beyond the 512 that keys and values share.
template <int kRope_>
struct WgmmaGrad {
  static constexpr int kRope = kRope_, kRank = 512, kWidth = kRank + kRope;
  static constexpr int kHeads = 64, kKeys = 64;  // of a tile
  static constexpr int kValueBoxes = kRank / 64, kBoxes = kWidth / 64;
  static constexpr int kConsumers = 256, kThreads = kConsumers + 128;
  static constexpr float kLog2e = 1.4426950408889634f;
};

template <class Shape>
struct WgmmaGradShared {
  // For 64 columns: q of heads 0-31, dO of the same, q of heads 32-63, dO of the same. So a warpgroup, which
  // has half of the heads, multiplies the keys by q and dO at once, in products 64 wide.
  unsigned char queries[Shape::kValueBoxes][4][kBoxBytes / 2];
  unsigned char rope[Shape::kRope / 64 * kBoxBytes + 1024 * (Shape::kRope == 0)];  // of q; heads 0-63
  unsigned char keys[Shape::kBoxes][kBoxBytes];
  unsigned char ds[kBoxBytes], p[kBoxBytes];  // [keys, heads]
  float2 rows[Shape::kHeads];                 // a head's lse / ln 2, and dO · o
  uint64_t queries_full;
  uint64_t keys_full[Shape::kBoxes], keys_empty[Shape::kBoxes];
  uint64_t tile_read;  // ds and p of a tile have been used
};

struct WgmmaGradArguments {
  CUtensorMap q, d_o;  // [T, heads, columns], boxes of 32 heads
  GradientView<bf16, bf16> view;
  bf16* shares;  // [queries of the round, view.entries, width], columns in the order of share_place()
};

// A thread stores what it has of a row in pieces of 16 bytes: in each 32 columns, place q * 8 + j * 2 + b
// holds column j * 8 + q * 2 + b, as wgmma deals the columns out to lanes q of a quad.
__device__ __forceinline__ int share_place(int column) {
  return (column & ~31) + (column >> 1 & 3) * 8 + (column >> 3 & 3) * 2 + (column & 1);
}

// The warpgroup that fetches: q and dO once, then the boxes of one tile of keys after the other. A box is
// given out when the copies of it have landed, while those of the next kLag boxes are on their way.
template <class Shape>
__device__ __forceinline__ void fetch_grad_factors(WgmmaGradShared<Shape>& s, const WgmmaGradArguments& args,
                                                   int t, const KeyList& list) {
  constexpr int kLag = 4, kRows = 16;  // rows of a box fetched at a time, eight threads each
  const AttentionView<bf16, bf16>& forward = args.view.forward;
  const int thread = static_cast<int>(threadIdx.x) - Shape::kConsumers;
  if (thread == 0) {
    barrier_arrive_expecting(&s.queries_full, (Shape::kWidth + Shape::kRank) * Shape::kHeads * 2);
    for (int box = 0; box < Shape::kValueBoxes; ++box) {
      for (int half = 0; half < 2; ++half) {
        copy_box(s.queries[box][2 * half], args.q, &s.queries_full, box * 64, half * 32, t);
        copy_box(s.queries[box][2 * half + 1], args.d_o, &s.queries_full, box * 64, half * 32, t);
      }
    }
    for (int half = 0; half < 2 * (Shape::kRope / 64); ++half) {
      copy_box(s.rope + half * (kBoxBytes / 2), args.q, &s.queries_full, Shape::kRank, half * 32, t);
    }
  }
  const int row = thread / 8, chunk = thread % 8;
  const SwizzledTile box0{shared_address(s.keys[0]), 128};
  const uint32_t to = box0.chunk(static_cast<uint32_t>(row), static_cast<uint32_t>(chunk));
  for (int begin = 0, parity = 1; begin < list.count; begin += Shape::kKeys, parity ^= 1) {
    const bf16* from[Shape::kKeys / kRows];
    bool present[Shape::kKeys / kRows];
#pragma unroll
    for (int i = 0; i < Shape::kKeys / kRows; ++i) {
      const int entry = begin + row + i * kRows;
      present[i] = entry < list.count;
      from[i] =
          present[i] ? forward.keys.row(list.sequence, list.position(entry)) + chunk * 8 : forward.keys.pool;
    }
#pragma unroll
    for (int box = 0; box < Shape::kBoxes + kLag; ++box) {
      if (box < Shape::kBoxes) {
        barrier_wait(&s.keys_empty[box], parity);  // passes for the first tile
#pragma unroll
        for (int i = 0; i < Shape::kKeys / kRows; ++i) {
          copy_async(to + box * kBoxBytes + i * kRows * 128, from[i] + (present[i] ? box * 64 : 0),
                     present[i] ? 16 : 0);
        }
      }
      commit_copies();
      if (box < kLag) continue;
      wait_for_copies<kLag>();
      fence_async_proxy();
      barrier_arrive(&s.keys_full[box - kLag]);
    }
  }
}

// Sixteen columns' pairs to a row of eight aligned ones: threads of a quad exchange pairs, so that each
// writes 8 bytes and the quad whole sectors. `to` is the first of the sixteen columns.
__device__ __forceinline__ void store_sixteen(bf16* to, const float* first, const float* second,
                                              bool present) {
  const int quad = static_cast<int>(threadIdx.x) % 4;
  const bool odd = quad % 2 == 1;
  const uint32_t pair0 = pack_bf16(first[0], first[1]), pair1 = pack_bf16(second[0], second[1]);
  const uint32_t got = __shfl_xor_sync(~0u, odd ? pair0 : pair1, 1);
  if (!present) return;
  *reinterpret_cast<uint2*>(to + quad / 2 * 4 + (odd ? 8 : 0)) = odd ? uint2{got, pair1} : uint2{pair0, got};
}

// A warpgroup's sums of shares: rows lane / 4 and + 8 of its warp's sixteen keys, kSums / 2 columns.
template <int kSums>
struct PackedShares {
  uint4 pieces[kSums / 16][2];

  __device__ __forceinline__ explicit PackedShares(const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 16; ++i) {
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const float* const d = sums + i * 16 + low * 2;
        uint4& piece = pieces[i][low];
        piece = {pack_bf16(d[0], d[1]), pack_bf16(d[4], d[5]), pack_bf16(d[8], d[9]),
                 pack_bf16(d[12], d[13])};
      }
    }
  }
  // `to`: this thread's place in its first row, at the first of the columns. Streaming: nobody reads them
  // soon.
  __device__ __forceinline__ void store(bf16* to, int width, bool first, bool second) const {
#pragma unroll
    for (int i = 0; i < kSums / 16; ++i) {
      if (first) __stcs(reinterpret_cast<uint4*>(to + i * 32), pieces[i][0]);
      if (second) __stcs(reinterpret_cast<uint4*>(to + 8 * width + i * 32), pieces[i][1]);
    }
  }
};

// What the scores of a head are compared with. Absent heads have lse = infinity, which makes their p zero.
template <class Shape>
__device__ __forceinline__ void prepare_rows(WgmmaGradShared<Shape>& s, const GradientView<bf16, bf16>& view,
                                             int t) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  constexpr int kHeadsAWarp = Shape::kHeads * kWarp / Shape::kConsumers;
#pragma unroll 4
  for (int i = 0; i < kHeadsAWarp; ++i) {
    const int head = warp * kHeadsAWarp + i;
    float2 row = {INFINITY, 0.0f};
    if (head < view.forward.heads) {
      const bf16 *const o = view.forward.o.at(t, head) + lane * 4, *const d_o =
                                                                       view.d_o.at(t, head) + lane * 4;
#pragma unroll
      for (int c = 0; c < Shape::kRank; c += 4 * kWarp) {
        const float4 a = load4(o + c), b = load4(d_o + c);
        row.y = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, row.y))));
      }
      row = {view.forward.lse[t][head] * Shape::kLog2e, warp_sum(row.y)};
    }
    if (lane == 0) s.rows[head] = row;
  }
}

// A warpgroup that multiplies. Of the scores it has half of the heads; of dq and the shares, 256 columns and
// half of the rope. A tile's last 64 columns of shares are multiplied with the next tile's scores, so that
// the tensor cores have work while p and ds are computed.
template <class Shape, int kWarpgroup>  // known to the compiler, which needs few registers for addresses then
__device__ __forceinline__ void multiply_grads(WgmmaGradShared<Shape>& s, const WgmmaGradArguments& args,
                                               int t, const KeyList& list) {
  constexpr bool kRope = Shape::kRope > 0;
  constexpr int kSixteenRows = 16 * 128;  // bytes
  const AttentionView<bf16, bf16>& forward = args.view.forward;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int warp = thread / kWarp, lane = thread % kWarp;
  // factor_descriptor() of a member, written so that the compiler keeps one base and adds constants:
  // registers are short. (The null pointer's low 18 bits, all that a descriptor looks at, are 0 in shared
  // memory too.)
  const uint32_t base = shared_address(&s) >> 4;
  const auto at = [&](const auto& member, int leading) {
    const auto offset =
        reinterpret_cast<const unsigned char*>(&member) - reinterpret_cast<const unsigned char*>(&s);
    return factor_descriptor(nullptr, static_cast<uint32_t>(leading)) + base +
           static_cast<uint64_t>(offset >> 4);
  };
  const SwizzledTile ds_tile{shared_address(s.ds), 128}, p_tile{shared_address(s.p), 128};

  // ds q + p dO for the keys of the tile, from `box` of the warpgroup's columns on.
  const auto multiply_shares = [&](auto& sums, int box) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // heads 16 k on
      const auto& heads = s.queries[4 * kWarpgroup + box];
      wgmma<false, false>(sums, at(s.ds[k * 32], 0),
                          at(heads[k / 2 * 2][k % 2 * kSixteenRows], 2 * kBoxBytes), k);
      wgmma<false, false>(sums, at(s.p[k * 32], 0),
                          at(heads[k / 2 * 2 + 1][k % 2 * kSixteenRows], 2 * kBoxBytes), 1);
    }
  };

  float dq[128] = {}, dq_rope[16] = {};
  const float scale = forward.scale * Shape::kLog2e;
  constexpr int kColumn = kWarpgroup * 256, kLateColumn = kColumn + 192;
  int entry = warp * 16 + lane / 4;  // of the list, this thread's first of the tile
  bf16* shares = args.shares +
                 (static_cast<int64_t>(t - args.view.first) * args.view.entries + entry) * Shape::kWidth +
                 lane % 4 * 8;
  const auto store_shares = [&](const auto& packed, int column) {
    packed.store(shares + column, Shape::kWidth, entry < list.count, entry + 8 < list.count);
  };
  const int tiles = (list.count + Shape::kKeys - 1) / Shape::kKeys;
  barrier_wait(&s.queries_full, 0);
  for (int tile = 0; tile < tiles; ++tile) {
    float scores[32], late[32];  // [keys, 32 heads] of q · key, then of dO · value
    wgmma_pin(scores);
    wgmma_pin(late);
#pragma unroll
    for (int box = 0; box < Shape::kValueBoxes; ++box) {
      barrier_wait(&s.keys_full[box], tile & 1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<false, true>(scores, at(s.keys[box][k * 32], 0), at(s.queries[box][2 * kWarpgroup][k * 32], 0),
                           box + k);
      }
    }
    if constexpr (kRope) {
      barrier_wait(&s.keys_full[Shape::kBoxes - 1], tile & 1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<false, true>(reinterpret_cast<float(&)[16]>(scores), at(s.keys[Shape::kValueBoxes][k * 32], 0),
                           at(s.rope[kWarpgroup * (kBoxBytes / 2) + k * 32], 0), 1);
      }
    }
    wgmma_commit();
    multiply_shares(late, 3);  // of the tile before; of the first tile nothing is kept
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_pin(scores);

    uint32_t packed_ds[2][4], packed_p[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 row = *reinterpret_cast<const float4*>(&s.rows[kWarpgroup * 32 + j * 8 + lane % 4 * 2]);
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const bool present = entry + low * 8 < list.count;
        const float* const score = scores + j * 4 + low * 2;
        const float p0 = present ? fast_exp2(fmaf(score[0], scale, -row.x)) : 0.0f;
        const float p1 = present ? fast_exp2(fmaf(score[1], scale, -row.z)) : 0.0f;
        packed_p[low][j] = pack_bf16(p0, p1);
        packed_ds[low][j] =
            pack_bf16(p0 * (score[16] - row.y) * forward.scale, p1 * (score[17] - row.w) * forward.scale);
      }
    }
    wgmma_wait<0>();
    wgmma_pin(late);
    const PackedShares<32> packed_late(late);
    barrier_arrive_warp(&s.tile_read, lane == 0);
    barrier_wait(&s.tile_read, tile & 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const uint32_t key = static_cast<uint32_t>(warp * 16 + lane / 4 + low * 8);
        const uint32_t head = static_cast<uint32_t>(kWarpgroup * 32 + j * 8 + lane % 4 * 2);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(ds_tile.element(key, head)), "r"(packed_ds[low][j])
                     : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(p_tile.element(key, head)), "r"(packed_p[low][j])
                     : "memory");
      }
    }
    fence_async_proxy();
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");

    wgmma_pin(dq);
    if constexpr (kRope) wgmma_pin(dq_rope);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // keys 16 k on
      const int row = k * kSixteenRows;
      wgmma<true, false>(dq, at(s.ds[row], 0), at(s.keys[4 * kWarpgroup][row], kBoxBytes), 1);
      if constexpr (kRope) {
        wgmma<true, false>(dq_rope, at(s.ds[row], 0),
                           at(s.keys[Shape::kValueBoxes][row + kWarpgroup * 64], 0), 1);
      }
    }
    wgmma_commit();
    packed_late.store(shares + kLateColumn - Shape::kKeys * Shape::kWidth, Shape::kWidth, tile > 0, tile > 0);
    __syncwarp();
    float sums[64];
    wgmma_pin(sums);
    wgmma_fence();
    multiply_shares(sums, 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_pin(dq);
    if constexpr (kRope) wgmma_pin(dq_rope);
#pragma unroll
    for (int box = 0; box < 4; ++box) barrier_arrive_warp(&s.keys_empty[4 * kWarpgroup + box], lane == 0);
    if constexpr (kRope) barrier_arrive_warp(&s.keys_empty[Shape::kBoxes - 1], lane == 0);
    wgmma_wait<0>();
    wgmma_pin(sums);
    store_shares(PackedShares<64>(sums), kColumn);
    __syncwarp();  // stores stay before it, and so the sums make room
    float more[32];
    wgmma_pin(more);
    wgmma_fence();
    multiply_shares(more, 2);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(more);
    const PackedShares<32> packed_more(more);
    if constexpr (kRope) {
      float last[16];
      wgmma_pin(last);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<false, false>(last, at(s.ds[k * 32], 0), at(s.rope[k * kSixteenRows + kWarpgroup * 64], 0), k);
      }
      wgmma_commit();
      store_shares(packed_more, kColumn + 128);
      wgmma_wait<0>();
      wgmma_pin(last);
      store_shares(PackedShares<16>(last), Shape::kRank + kWarpgroup * 32);
    } else {
      store_shares(packed_more, kColumn + 128);
    }
    entry += Shape::kKeys;
    shares += Shape::kKeys * Shape::kWidth;
  }
  if (tiles > 0) {
    float late[32];
    wgmma_pin(late);
    wgmma_fence();
    multiply_shares(late, 3);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(late);
    entry -= Shape::kKeys;
    shares -= Shape::kKeys * Shape::kWidth;
    store_shares(PackedShares<32>(late), kLateColumn);
  }
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    const int head = warp * 16 + lane / 4 + low * 8;
    bf16* const to = args.view.dq.at(t, min(head, forward.heads - 1));
    if (head - lane / 4 >= forward.heads) continue;  // the whole warp: the others exchange values
    const bool present = head < forward.heads;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      store_sixteen(to + kWarpgroup * 256 + j * 8, dq + j * 4 + low * 2, dq + j * 4 + 4 + low * 2, present);
    }
    if constexpr (kRope) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        store_sixteen(to + Shape::kRank + kWarpgroup * 32 + j * 8, dq_rope + j * 4 + low * 2,
                      dq_rope + j * 4 + 4 + low * 2, present);
      }
    }
  }
}

// Blocks in descending order of queries: the longest lists of a dense sequence come first.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attend_backward_wgmma(const __grid_constant__ WgmmaGradArguments args) {
  extern __shared__ __align__(1024) unsigned char grad_memory[];
  auto& s = *reinterpret_cast<WgmmaGradShared<Shape>*>(grad_memory);
  const int t = args.view.last - 1 - static_cast<int>(blockIdx.x);
  const KeyList list = keys_of(args.view.forward, t);
  if (threadIdx.x == 0) {
    barrier_init(&s.queries_full, 1);
    barrier_init(&s.tile_read, kArrivalsOfWarp * Shape::kConsumers / kWarp);
    for (int box = 0; box < Shape::kBoxes; ++box) {
      barrier_init(&s.keys_full[box], Shape::kThreads - Shape::kConsumers);
      barrier_init(&s.keys_empty[box],
                   kArrivalsOfWarp * (box < Shape::kValueBoxes ? 4 : 8));  // the warps that form its columns of dq
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x < Shape::kConsumers) {
    take_registers<240>();
    prepare_rows<Shape>(s, args.view, t);
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
    if (threadIdx.x < 128) {
      multiply_grads<Shape, 0>(s, args, t, list);
    } else {
      multiply_grads<Shape, 1>(s, args, t, list);
    }
  } else {
    give_registers<24>();
    fetch_grad_factors<Shape>(s, args, t, list);
  }
}

// --- the keys' sums of the shares ---

constexpr int kSumKeys = 16;       // of a block, one a warp
constexpr int kSumQueries = 1024;  // whose selections a block looks at together
constexpr int kSumThreads = kSumKeys * kWarp;

// starts[tile * queries + q]: the first entry of the list of the round's query q that is not before key tile
// * kSumKeys of its sequence. A block a query.
static __global__ void find_tile_starts(const GradientView<bf16, bf16> view, int32_t* starts, int tiles) {
  const KeyList list = keys_of(view.forward, view.first + static_cast<int>(blockIdx.x));
  const int queries = view.last - view.first;
  const auto tile_at = [&](int entry) {
    return entry < list.count ? list.selection[entry] / kSumKeys : tiles - 1;
  };
  for (int entry = static_cast<int>(threadIdx.x); entry <= list.count;
       entry += static_cast<int>(blockDim.x)) {
    const int last = tile_at(entry);
    for (int tile = entry == 0 ? 0 : tile_at(entry - 1) + 1; tile <= last; ++tile) {
      starts[static_cast<int64_t>(tile) * queries + blockIdx.x] = entry;
    }
  }
}

struct ShareSums {
  GradientView<bf16, bf16> view;
  const bf16* shares;
  const int32_t* starts;  // null without a selection
};

struct SumShared {
  uint32_t keys[kSumQueries];  // which keys of the tile a query selected
  int row[kSumQueries];        // of the first of them in the shares
  int rows[kSumKeys][kWarp + 8];
};

// Adds rows[0 .. count) of the shares, count <= 8, in order: 8 columns a thread.
__device__ __forceinline__ void add_rows(float (&sum)[8], const bf16* shares, int width, const int* rows,
                                         int count) {
  uint4 values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count)
      values[i] = __ldcs(reinterpret_cast<const uint4*>(shares + static_cast<int64_t>(rows[i]) * width));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= count) break;
    const uint32_t pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[2 * j] += __uint_as_float(pairs[j] << 16);
      sum[2 * j + 1] += __uint_as_float(pairs[j] & 0xffff0000u);
    }
  }
}

// A block sums a part of the columns for a tile of keys; neighbouring blocks have the other parts of the same
// rows.
template <int kWidth>
__global__ void __launch_bounds__(kSumThreads, 2) sum_shares(const ShareSums args) {
  constexpr int kPieces = kWidth / 8, kParts = kPieces % 3 == 0 ? 3 : 2, kLanes = kPieces / kParts;
  static_assert(kLanes <= kWarp && kLanes * kParts == kPieces);
  __shared__ SumShared s;
  const GradientView<bf16, bf16>& view = args.view;
  const AttentionView<bf16, bf16>& forward = view.forward;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const Piece piece = find_piece(forward.batch, kSumKeys, static_cast<int>(blockIdx.x) / kParts);
  if (piece.sequence < 0) return;
  const int begin = forward.batch.row_begin[piece.sequence],
            end = forward.batch.row_begin[piece.sequence + 1];
  const int first_query = max(view.first, begin + piece.first), last_query = min(view.last, end);
  if (first_query >= last_query) return;
  const int column = (static_cast<int>(blockIdx.x) % kParts * kLanes + lane) * 8,
            key = begin + piece.first + warp;
  const bool mine = lane < kLanes && key < end;
  float* const kept = view.key_sums + static_cast<int64_t>(key) * kWidth + column;
  const bf16* const shares = args.shares + column;
  float sum[8] = {};
  if (mine) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 four = load4(kept + i);
      sum[i] = four.x, sum[i + 1] = four.y, sum[i + 2] = four.z, sum[i + 3] = four.w;
    }
  }
  for (int base = first_query; base < last_query; base += kSumQueries) {
    const int queries = min(kSumQueries, last_query - base);
    __syncthreads();
    for (int i = thread; i < queries; i += kSumThreads) {
      const int t = base + i, q = t - view.first;
      int entry = piece.first;
      uint32_t keys = 0;
      if (args.starts == nullptr) {
        keys = (1u << min(kSumKeys, t - begin + 1 - piece.first)) - 1;
      } else {
        const int32_t* const selection = forward.indices + t * forward.indices_stride;
        entry = args.starts[static_cast<int64_t>(piece.first / kSumKeys) * (view.last - view.first) + q];
        for (int e = entry; e < forward.counts[t]; ++e) {
          const int place = selection[e] - piece.first;
          if (place >= kSumKeys) break;
          keys |= 1u << place;
        }
      }
      s.keys[i] = keys;
      s.row[i] = q * static_cast<int>(view.entries) + entry;
    }
    __syncthreads();
    // The rows of the warp's key, queued in the order of queries and added eight at a time.
    int* const rows = s.rows[warp];
    int waiting = 0;
    for (int i = 0; i < queries; i += kWarp) {
      const uint32_t keys = i + lane < queries ? s.keys[i + lane] : 0u;
      const bool selected = keys >> warp & 1;
      const unsigned all = __ballot_sync(~0u, selected);
      if (selected) {
        rows[waiting + __popc(all & ((1u << lane) - 1))] =
            s.row[i + lane] + __popc(keys & ((1u << warp) - 1));
      }
      __syncwarp();
      waiting += __popc(all);
      int done = 0;
      for (; waiting - done >= 8; done += 8) {
        if (mine) add_rows(sum, shares, kWidth, rows + done, 8);
      }
      const int left = lane < waiting - done ? rows[done + lane] : 0;
      __syncwarp();
      waiting -= done;
      if (done > 0 && lane < waiting) rows[lane] = left;
      __syncwarp();
    }
    if (mine) add_rows(sum, shares, kWidth, rows, waiting);
  }
  if (mine) {
    store4(kept, {sum[0], sum[1], sum[2], sum[3]});
    store4(kept + 4, {sum[4], sum[5], sum[6], sum[7]});
  }
}

// A block a key.
static __global__ void round_share_sums(const float* sums, Rows<bf16> dkeys, int width) {
  const int64_t key = blockIdx.x;
  for (int column = static_cast<int>(threadIdx.x); column < width; column += static_cast<int>(blockDim.x)) {
    store(dkeys[key] + column, sums[key * width + share_place(column)]);
  }
}

// --- launches ---

// By heads, widths and alignment alone.
inline bool wgmma_grad_takes(const AttentionBackward& args) {
  const Attention& forward = args.forward;
  const int64_t width = forward.q.size(2);
  return args.dvalues.empty() && forward.kv_heads == 1 && forward.q.size(1) <= 64 &&
         forward.o.size(2) == 512 && (width == 512 || width == 576) && aligned_16(forward.q) &&
         aligned_16(forward.o) && aligned_16(args.d_o) && aligned_16(forward.keys.pool) &&
         aligned_16(args.dq);
}

template <class Shape>
void backward_wgmma(const AttentionBackward& args, Stream& stream) {
  const Attention& forward = args.forward;
  const int64_t tokens = forward.q.size(0);
  Arena& workspace = stream.workspace();
  const ArenaScope scope(workspace);
  const auto map = [&](const Tensor& x) {
    return tensor_map<bf16>(x.raw(), x.size(2), x.size(1), x.size(0), x.stride(1), x.stride(0), 32);
  };
  WgmmaGradArguments grads{.q = map(forward.q), .d_o = map(args.d_o), .view = {}, .shares = nullptr};
  GradientView<bf16, bf16>& view = grads.view;
  view.forward = view_of<bf16, bf16>(forward);
  view.d_o = heads_of<bf16>(args.d_o);
  view.dq = heads_of<bf16>(args.dq);
  view.key_sums = workspace.zeros(DType::kF32, {tokens, Shape::kWidth}, stream).f32();

  const bool selects = !forward.indices.empty();
  int64_t longest = 1;
  std::vector<int64_t> entries(static_cast<size_t>(tokens));  // of a query's list, at most
  for (int64_t b = 0; b < forward.sequences.count(); ++b) {
    const int64_t begin = forward.sequences.begin(b), end = forward.sequences.end(b);
    longest = std::max(longest, end - begin);
    for (int64_t t = begin; t < end; ++t) {
      entries[static_cast<size_t>(t)] = selects ? forward.indices.size(1) : t - begin + 1;
    }
  }
  const int64_t tiles = divide_up(longest, kSumKeys), blocks = multiprocessors();
  const int64_t memory = workspace.capacity() - workspace.used() - 1024;
  const auto kernel = attend_backward_wgmma<Shape>;
  allow_shared(kernel, sizeof(WgmmaGradShared<Shape>));
  for (int64_t first = 0, last = 0; first < tokens; first = last) {
    view.entries = 1;
    for (; last < tokens; ++last) {
      const int64_t more = std::max(view.entries, entries[static_cast<size_t>(last)]);
      if ((last + 1 - first) * (more * Shape::kWidth * 2 + (selects ? tiles * 4 : 0)) > memory) break;
      view.entries = more;
    }
    CHECK_GT(last, first);  // the workspace holds one query's shares
    if (last < tokens && last - first > blocks) last -= (last - first) % blocks;
    const ArenaScope round(workspace);
    view.first = static_cast<int>(first);
    view.last = static_cast<int>(last);
    const auto queries = static_cast<unsigned>(last - first);
    grads.shares =
        workspace.alloc(DType::kBf16, {last - first, view.entries, Shape::kWidth}).template data<bf16>();
    int32_t* starts = nullptr;
    if (selects) {
      starts = workspace.alloc(DType::kI32, {tiles, last - first}).i32();
      find_tile_starts<<<queries, 256, 0, cuda_stream(stream)>>>(view, starts, static_cast<int>(tiles));
    }
    kernel<<<queries, Shape::kThreads, sizeof(WgmmaGradShared<Shape>), cuda_stream(stream)>>>(grads);
    constexpr unsigned kParts = Shape::kWidth / 8 % 3 == 0 ? 3 : 2;
    sum_shares<Shape::kWidth>
        <<<pieces_at_most(forward.sequences, kSumKeys) * kParts, kSumThreads, 0, cuda_stream(stream)>>>(
            {.view = view, .shares = grads.shares, .starts = starts});
  }
  round_share_sums<<<static_cast<unsigned>(tokens), 192, 0, cuda_stream(stream)>>>(
      view.key_sums, rows_of<bf16>(args.dkeys), Shape::kWidth);
}

}  // namespace slipstream::kernels
