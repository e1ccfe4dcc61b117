// Attention over latents on Hopper: bf16, one key row a position whose first 512 columns are the value too,
// up to 64 heads of one query at a time. Rows may be stored in fp8: they become bf16 on their way into shared
// memory, and all that follows is the same.
//
// The arithmetic of a head, whichever kernel does it: its keys in blocks of 64, ascending. A score is one
// chain of products over sixteen columns at a time. Weights are 2^(scaled score - top). `top` follows a
// block's largest score only where that lies more than kTopSlack above it: what has been added up is then
// rarely rescaled, and weights stay below 2^kTopSlack. o is one chain over blocks and sixteens of keys; the
// sum of weights is four chains, a lane each. None of it depends on the other queries.
//
// attend_latents does all of it in one block of threads. For few queries two kernels share a query out among
// many multiprocessors without cutting a chain: score_latents by blocks of keys, weigh_latents by columns of
// o.
#pragma once

#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/sparse_mla/attention_device.cuh"

namespace slipstream::kernels {

constexpr int kLatentWidth = 512, kLatentHeads = 64, kLatentKeys = 64;
// 64 rows of 64 columns as the tensor cores take them; a key row is eight such tiles, or nine with rope
// columns.
constexpr int kTileBytes = 64 * 128, kLatentTiles = kLatentWidth / 64;
constexpr float kTopSlack = 8.0f;

template <class K>
using LatentView = AttentionView<bf16, K>;

// --- Shares of the work ---

// Which keys a block of threads is for, of each query blockIdx.x + i gridDim.x: blocks [z span, (z + 1) span)
// of their lists. And which heads: 64 from 64 blockIdx.y on.
struct LatentShare {
  int queries, span;
  float scale;  // of scores as powers of 2

  __device__ int begin() const { return static_cast<int>(blockIdx.z) * span; }
  __device__ int end(int keys) const { return min(begin() + span, (keys + kLatentKeys - 1) / kLatentKeys); }
};
__device__ __forceinline__ int first_head() { return static_cast<int>(blockIdx.y) * kLatentHeads; }
__device__ __forceinline__ int next_query(int t) { return t + static_cast<int>(gridDim.x); }
template <class K>
__device__ __forceinline__ int key_count(const LatentView<K>& view, int t) {
  return view.counts != nullptr ? view.counts[t] : keys_of(view, t).count;
}

// --- A query's block of the softmax ---

// threadIdx.x, read anew: where registers are scarce, nothing that follows from it is kept.
__device__ __forceinline__ uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// The thread's row of 64; the other is eight below it.
__device__ __forceinline__ int row_of_thread() {
  const uint32_t thread = thread_again();
  return static_cast<int>(thread % 128 / kWarp * 16 + thread % kWarp / 4);
}

// What a thread knows of its two rows, row and row + 8 of the warp's sixteen: `sum` is its own columns'
// share.
struct SoftmaxRows {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  // From the products of queries and keys to weights, as wgmma lays out both; the first `count` keys exist.
  // What was added up before is to be multiplied by `rescale`.
  __device__ __forceinline__ void add(float (&scores)[32], int count, float scale, float (&rescale)[2],
                                      uint32_t (&weights)[4][4]) {
    if (count < kLatentKeys) {
      const int column = static_cast<int>(thread_again() % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i / 4 * 8 + column + i % 2 >= count) scores[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest[2] = {scores[2 * r], scores[2 * r + 1]};
#pragma unroll
      for (int j = 1; j < 8; ++j) {
        largest[0] = fmaxf(largest[0], scores[4 * j + 2 * r]);
        largest[1] = fmaxf(largest[1], scores[4 * j + 2 * r + 1]);
      }
      rescale[r] = fmaxf(largest[0], largest[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = fmaxf(rescale[r], __shfl_xor_sync(~0u, rescale[r], 1));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 2)) * scale;
      const float before = top[r];
      if (all > before + kTopSlack) top[r] = all;
      rescale[r] = top[r] == before ? 1.0f : fast_exp2(before - top[r]);
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float low = fast_exp2(fmaf(scores[4 * j + 2 * r], scale, -top[r]));
        const float high = fast_exp2(fmaf(scores[4 * j + 2 * r + 1], scale, -top[r]));
        sum[r] += low + high;
        weights[j / 2][j % 2 * 2 + r] = pack_bf16(low, high);
      }
    }
  }
  // Of the whole row.
  __device__ __forceinline__ float total(int r) const {
    float all = sum[r];
    all += __shfl_xor_sync(~0u, all, 1);
    return all + __shfl_xor_sync(~0u, all, 2);
  }
};

__device__ __forceinline__ bool all_ones(const float (&rescale)[2]) {
  return __all_sync(~0u, rescale[0] == 1.0f && rescale[1] == 1.0f);
}

template <class K>
__device__ __forceinline__ void store_lse(const LatentView<K>& view, int t, int head, float top, float total) {
  constexpr float kLn2 = 0.6931471805599453f;
  if (threadIdx.x % 4 != 0 || head >= view.heads || view.lse.data == nullptr) return;
  view.lse[t][head] = (top + log2f(total)) * kLn2;  // without keys: -infinity - infinity
}

// The sums of a warpgroup's product, each row by its factor, to columns [column, column + kCount / 2) of o.
template <int kCount, class K>
__device__ __forceinline__ void store_rows(const LatentView<K>& view, int t, int column,
                                           const float (&o)[kCount], const float (&factor)[2]) {
  const bool odd = threadIdx.x % 2 == 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head() + row_of_thread() + 8 * r;
    // Neighbours exchange a pair: even threads then have four columns of eight, odd ones of the next eight.
    bf16* const to = view.o.at(t, head) + column + threadIdx.x % 4 * 2 + (odd ? 6 : 0);
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      const uint32_t first = pack_bf16(o[i + 2 * r] * factor[r], o[i + 2 * r + 1] * factor[r]);
      const uint32_t second = pack_bf16(o[i + 4 + 2 * r] * factor[r], o[i + 5 + 2 * r] * factor[r]);
      const uint32_t got = __shfl_xor_sync(~0u, odd ? first : second, 1);
      if (head < view.heads)
        *reinterpret_cast<uint2*>(to + i * 2) = odd ? uint2{got, second} : uint2{first, got};
    }
  }
}

// --- Rows to shared memory ---

// A row to copy; what does not exist is null and becomes zeros, since it must not be NaN.
template <class T>
struct SourceRow {
  const T* from;

  // 16 bytes from column `column` on, behind the thread's back.
  __device__ __forceinline__ void copy(uint32_t to, int column) const {
    asm volatile(
        "{\n.reg .pred missing;\nsetp.eq.b64 missing, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, missing;\n}" ::"r"(to),
        "l"(from + column), "l"(from)
        : "memory");
  }
};

// One of 128 threads that copy 64 rows: 16 bytes of each tile's rows `row` + 16 i.
struct RowCopier {
  static __device__ __forceinline__ int row() { return static_cast<int>(thread_again() % 128 / 8); }
  static __device__ __forceinline__ int chunk() { return static_cast<int>(thread_again() % 8); }

  // source(i) is row `row` + 16 i.
  template <int kTiles, class Source>
  static __device__ __forceinline__ void copy(unsigned char* tiles, int column, const Source& source) {
    uint32_t to = SwizzledTile{shared_address(tiles), 128}.chunk(static_cast<uint32_t>(row()),
                                                                 static_cast<uint32_t>(chunk()));
    column += chunk() * 8;
    SourceRow<bf16> next = source(0);
#pragma unroll
    for (int i = 0; i < 4; ++i, to += 16 * 128) {
      const SourceRow<bf16> row = next;
      if (i < 3) next = source(i + 1);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        row.copy(to + static_cast<uint32_t>(tile * kTileBytes), column + tile * 64);
      }
    }
  }
};

// The same for rows of fp8 latents. Codes wait where their values will lie: sixteen of a row in one half of the 32
// bytes that the values take, and beside the thread's first sixteen, in the other half, the scales of the row. One thread
// restores what one thread copied, so that nobody else need be waited for. parity() chooses the half: eight threads of
// a row, in two tiles, then reach all banks.
struct CodeCopier {
  static __device__ __forceinline__ int parity() { return RowCopier::chunk() / 4; }

  // source(i) as above; a thread has sixteens number chunk() + 8 k of codes.
  template <class Source>
  static __device__ __forceinline__ void copy(unsigned char* tiles, const LatentRow& layout, const Source& source) {
    uint32_t to = first(tiles);
    SourceRow<e4m3> next = source(0);
#pragma unroll
    for (int i = 0; i < 4; ++i, to += 16 * 128) {
      const SourceRow<e4m3> row = next;
      if (i < 3) next = source(i + 1);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        row.copy(to + static_cast<uint32_t>(k * 2 * kTileBytes), RowCopier::chunk() * 16 + k * 128);
      }
      row.copy(to ^ 16, layout.scales);
    }
  }
  // Rows `begin` to end - 1 of those.
  static __device__ __forceinline__ void restore(unsigned char* tiles, int begin, int end) {
    static_assert(kScaleColumns == 8 * 16);  // sixteen number chunk() + 8 k is of group k
    constexpr uint32_t kNext = 2 * kTileBytes;
    const uint32_t parity_at = static_cast<uint32_t>(parity() * 8);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      // Downwards, as the scales lie beside the first sixteen. Each load long before its use.
      const uint32_t scales = (first(tiles) + static_cast<uint32_t>(i * 16 * 128)) ^ 16;
      uint32_t to = (scales ^ 16) + 3 * kNext;
      uint2 first_codes = load_shared_8(to + parity_at), last_codes = load_shared_8(to + 8 - parity_at);
      float scale = load_shared_float(scales + 12);
#pragma unroll 1
      for (int k = 3; k >= 0; --k, to -= kNext) {
        const uint2 first_now = first_codes, last_now = last_codes;
        const float scale_now = scale;
        if (k > 0) {
          first_codes = load_shared_8(to - kNext + parity_at);
          last_codes = load_shared_8(to - kNext + 8 - parity_at);
          scale = load_shared_float(scales + static_cast<uint32_t>(k * 4 - 4));
        }
        store_shared(to, scaled_to_bf16(first_now, scale_now));
        store_shared(to ^ 16, scaled_to_bf16(last_now, scale_now));
      }
    }
  }

  // The same for columns column .. column + 63 alone, one tile: a thread has two rows of it, row() + 16 (2 parity() + i).
  template <class Source>
  static __device__ __forceinline__ void copy_tile(unsigned char* tile, int column, const LatentRow& layout,
                                                   const Source& source) {
    const uint32_t first_to = first_of_tile(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SourceRow<e4m3> row = source(i + 2 * parity());
      const uint32_t to = first_to + static_cast<uint32_t>(i * 16 * 128);
      row.copy(to, column + RowCopier::chunk() % 4 * 16);
      row.copy(to ^ 16, layout.scales);
    }
  }
  static __device__ __forceinline__ void restore_tile(unsigned char* tile, int column) {
    const uint32_t to = first_of_tile(tile);
    const int group = column / static_cast<int>(kScaleColumns);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = to + static_cast<uint32_t>(i * 16 * 128);
      const float4 scales = load_shared_floats(row ^ 16);
      const float scale = group == 0 ? scales.x : group == 1 ? scales.y : group == 2 ? scales.z : scales.w;
      const uint2 first_codes = load_shared_8(row), last_codes = load_shared_8(row + 8);
      store_shared(row, scaled_to_bf16(first_codes, scale));
      store_shared(row ^ 16, scaled_to_bf16(last_codes, scale));
    }
  }

 private:
  static __device__ __forceinline__ uint32_t first_of_tile(unsigned char* tile) {
    return SwizzledTile{shared_address(tile), 128}.chunk(static_cast<uint32_t>(RowCopier::row() + parity() * 32),
                                                         static_cast<uint32_t>(RowCopier::chunk() % 4 * 2));
  }
  static __device__ __forceinline__ uint32_t first(unsigned char* tiles) {
    const int chunk = RowCopier::chunk() % 4 * 2 + parity();
    return SwizzledTile{shared_address(tiles), 128}.chunk(static_cast<uint32_t>(RowCopier::row()),
                                                          static_cast<uint32_t>(chunk)) +
           static_cast<uint32_t>(parity() * kTileBytes);
  }
};

// Where the keys of a query's blocks lie, found in time: the list and the table of pages each take as long to
// answer as a block takes to be attended to, so what is asked for before a block is used before the next. A lane looks
// for one of its warp's sixteen rows.
template <class K>
class KeyFinder {
 public:
  __device__ __forceinline__ KeyFinder(const LatentView<K>& view, const KeyList& list, int block)
      : view_(view), list_(list), block_(block) {
    const int first = position(block);
    position_ = position(block + 1);
    later_ = position(block + 2);
    next_ = place(page(first), first);
    page_ = page(position_);
  }
  // To be called before each block.
  __device__ __forceinline__ void advance() {
    before_ = this_;
    this_ = next_;
    next_ = place(page_, position_);
    page_ = page(later_);
    position_ = later_;
    later_ = position(block_ + 3);
    ++block_;
  }
  // For the copiers: row i of this block, or of the block before. All the warp's lanes call.
  __device__ __forceinline__ SourceRow<K> source(int i) const { return at(found(this_, i)); }
  __device__ __forceinline__ SourceRow<K> source_before(int i) const { return at(found(before_, i)); }
  // The row of this block that the lane has looked for; two lanes have the same.
  __device__ __forceinline__ SourceRow<K> own() const { return at(this_); }

 private:
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(K));  // places count 16 bytes
  static constexpr uint32_t kNowhere = ~0u;

  __device__ __forceinline__ int position(int block) const {
    const uint32_t thread = thread_again();
    const int entry =
        block * kLatentKeys + static_cast<int>(thread % 128 / kWarp * 4 + thread % 4 + thread % 16 / 4 * 16);
    return entry < list_.count ? list_.position(entry) : -1;
  }
  __device__ __forceinline__ int page(int position) const {
    if (position < 0) return 0;
    return view_.keys.table[list_.sequence * view_.keys.table_stride + position / kPageRows];
  }
  __device__ __forceinline__ uint32_t place(int page, int position) const {
    if (position < 0) return kNowhere;
    return static_cast<uint32_t>(page) * static_cast<uint32_t>(view_.keys.page_stride / kUnit) +
           static_cast<uint32_t>(position) % static_cast<uint32_t>(kPageRows) *
               static_cast<uint32_t>(view_.keys.row_stride / kUnit);
  }

  static __device__ __forceinline__ uint32_t found(uint32_t place, int i) {
    return __shfl_sync(~0u, place, i * 4 + static_cast<int>(thread_again() % kWarp / 8));
  }
  __device__ __forceinline__ SourceRow<K> at(uint32_t place) const {
    return {place == kNowhere ? nullptr : view_.keys.pool + uint64_t{place} * kUnit};
  }

  const LatentView<K>& view_;
  const KeyList list_;
  int block_, later_;
  int page_, position_;  // of the block after the next
  uint32_t next_, this_ = kNowhere, before_ = kNowhere;
};

// --- Scores ---

constexpr int kLatentStages = 3;
// Registers hold this many sixteens of the queries' columns, shared memory the others.
constexpr int kHeldSteps = 27, kStepBytes = 64 * 32;
// Warpgroups that restore codes.
constexpr int kRestorers = 2;

// As much as a block of threads may have: hence few registers for queries, and two last tiles for three
// stages.
template <bool kRope>
struct LatentShared {
  static constexpr int kSharedSteps = kLatentWidth / 16 - kHeldSteps + (kRope ? 4 : 0);

  unsigned char stages[kLatentStages][kLatentTiles][kTileBytes];  // 64 heads or keys: the latents
  // Rope columns of a block's keys; once it is scored, its weights. Of every second block.
  unsigned char last[2][kTileBytes];
  unsigned char queries[kSharedSteps][kStepBytes];  // eights of rows and columns, 128 bytes each
  float rescale[2][kLatentHeads];
  float factor[kLatentHeads];  // 1 / sum of the weights, with a query's last block
  uint64_t full[kLatentStages], empty[kLatentStages];
  uint64_t copied[kLatentStages];   // with codes: these are there, or a query's heads; `full` when they are restored
  uint64_t weighed[kLatentStages];  // the block's weights are there
  uint64_t scored[kLatentStages];   // the products of the block after it are done
  uint64_t last_full[2];            // the tile is free, and then has the rope columns
  uint64_t queries_empty;

  __device__ __forceinline__ void init(bool codes) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kLatentStages; ++i) {
        barrier_init(&full[i], codes ? kArrivalsOfWarp * kRestorers * 4 : 128);
        barrier_init(&copied[i], 128);
        barrier_init(&empty[i], kArrivalsOfWarp * 8);
        barrier_init(&weighed[i], kArrivalsOfWarp * 4);
        barrier_init(&scored[i], kArrivalsOfWarp * 4);
      }
      for (int i = 0; i < 2; ++i) barrier_init(&last_full[i], 128);
      barrier_init(&queries_empty, kArrivalsOfWarp * 4);
      barrier_init_done();
    }
    __syncthreads();
  }
};

// The warpgroup that copies: of each query the heads, then blocks of keys. A block's last tile was that of
// the block two before. When a stage becomes free, so does the last tile of the block before the one that
// comes into the stage, as that stage held what came three before. After a query's heads, which have no last
// tile, it is the block's own.
template <bool kRope, class K>
__device__ __forceinline__ void fetch_latents(LatentShared<kRope>& shared, const LatentView<K>& view,
                                              const LatentShare& share) {
  constexpr bool kCodes = sizeof(K) == 1;
  Ring<kLatentStages> stage;
  Ring<2> last;
  Ring<1> query;
  const auto await_stage = [&] {
    barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
  };  // passes at first
  const auto done = [&] {
    barrier_arrive_after_copies(kCodes ? &shared.copied[stage.place] : &shared.full[stage.place]);
    stage.advance();
  };
  const int rope_column = kCodes ? view.latents.ropes / static_cast<int>(sizeof(bf16)) : kLatentWidth;
  const auto as_bf16 = [](const SourceRow<K>& row) { return SourceRow<bf16>{reinterpret_cast<const bf16*>(row.from)}; };
  const auto copy_last = [&](const auto& source) {
    if constexpr (kRope) {
      RowCopier::copy<1>(shared.last[last.place], rope_column, [&](int i) { return as_bf16(source(i)); });
    }
    barrier_arrive_after_copies(&shared.last_full[last.place]);
    last.advance();
  };
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    const KeyList list = keys_of(view, t);
    const int begin = share.begin(), end = share.end(list.count);
    if (begin >= end) continue;
    const auto head = [&](int i) {
      const int h = first_head() + RowCopier::row() + 16 * i;
      return SourceRow<bf16>{h < view.heads ? view.q.at(t, h) : nullptr};
    };
    KeyFinder<K> keys(view, list, begin);
    await_stage();
    RowCopier::copy<kLatentTiles>(shared.stages[stage.place][0], 0, head);
    if constexpr (kRope) {
      barrier_wait(&shared.queries_empty, query.parity ^ 1);
      const uint32_t to =
          shared_address(shared.queries[kLatentWidth / 16 - kHeldSteps + RowCopier::chunk() / 2]) +
          static_cast<uint32_t>(RowCopier::row() / 8 * 256 + RowCopier::chunk() % 2 * 128 +
                                RowCopier::row() % 8 * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        head(i).copy(to + static_cast<uint32_t>(i * 512), kLatentWidth + RowCopier::chunk() * 8);
      }
      query.advance();
    }
    done();
    for (int block = begin; block < end; ++block) {
      keys.advance();
      await_stage();
      if (block > begin + 2) copy_last([&](int i) { return keys.source_before(i); });
      const auto source = [&](int i) { return keys.source(i); };
      unsigned char* const tiles = shared.stages[stage.place][0];
      if constexpr (kCodes) {
        CodeCopier::copy(tiles, view.latents, source);
      } else {
        RowCopier::copy<kLatentTiles>(tiles, 0, source);
      }
      done();
      if (block < begin + 2) {
        copy_last(source);
      } else if constexpr (kRope) {
        // To be copied soon, and then quickly: the products that wait for the tile stand between two blocks' weighing.
        const bf16* const row = as_bf16(keys.own()).from;
        if (row != nullptr) prefetch_line(row + rope_column + (thread_again() % kWarp < 16 ? 0 : 56));
      }
    }
    if (end > begin + 2) {
      await_stage();
      copy_last([&](int i) { return keys.source(i); });
    }
  }
}

// 64 queries against keys in a stage. Those in registers need not be fetched from shared memory for every
// block.
template <bool kRope>
struct LatentQueries {
  uint32_t held[kHeldSteps][4];

  __device__ __forceinline__ void load(LatentShared<kRope>& shared, int stage) {
    const uint32_t thread = thread_again() % 128;
    const uint32_t lane = thread % kWarp, row = thread / kWarp * 16 + (lane & 15);
    const uint32_t from = shared_address(shared.stages[stage][0]) + row * 128;
#pragma unroll
    for (uint32_t k = 0; k < kHeldSteps; ++k) {
      load_tiles(held[k], from + k / 4 * kTileBytes + (((k % 4 * 2 + (lane >> 4)) ^ (row & 7)) << 4));
    }
    sync();  // every thread has awaited its products with the queries before, but not the others'
#pragma unroll
    for (uint32_t k = kHeldSteps; k < kLatentWidth / 16; ++k) {
      const uint32_t r = thread % 64, half = thread / 64;
      *reinterpret_cast<uint4*>(shared.queries[k - kHeldSteps] + r / 8 * 256 + half * 128 + r % 8 * 16) =
          *reinterpret_cast<const uint4*>(shared.stages[stage][k / 4] + r * 128 +
                                          (((k % 4 * 2 + half) ^ (r & 7)) << 4));
    }
    fence_async_proxy();
    sync();
  }

  __device__ __forceinline__ void score(LatentShared<kRope>& shared, int stage, const Ring<2>& last,
                                        float (&scores)[32]) const {
    const uint64_t keys = factor_descriptor(shared.stages[stage][0], 0);
    const uint64_t queries = eights_descriptor(shared.queries, 128, 256);
    wgmma_pin(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLatentWidth / 16; ++k) {
      const uint64_t columns = keys + ((k / 4 * kTileBytes + k % 4 * 32) >> 4);
      if (k < kHeldSteps) {
        wgmma<true>(scores, held[k], columns, k > 0);
      } else {
        wgmma<false, true>(scores, queries + ((k - kHeldSteps) * kStepBytes >> 4), columns, 1);
      }
    }
    wgmma_commit();
    barrier_wait(&shared.last_full[last.place], last.parity);
    if constexpr (kRope) {
      fence_async_proxy();
      wgmma_fence();
      const uint64_t rope = factor_descriptor(shared.last[last.place], 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<false, true>(scores, queries + ((kLatentWidth / 16 - kHeldSteps + k) * kStepBytes >> 4),
                           rope + (k * 32 >> 4), 1);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_pin(scores);
  }
  static __device__ __forceinline__ void sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
};

__device__ __forceinline__ void arrive_once_a_warp(uint64_t* barrier, int arrivals = 1) {
  __syncwarp();
  barrier_arrive_warp(barrier, thread_again() % kWarp == 0, arrivals);
}

// One of kRestorers warpgroups that restore codes, its share of a block's rows each; a query's heads come first, as they are.
// Where there are no codes it does nothing.
template <bool kRope, class K>
struct StageRestorer {
  LatentShared<kRope>& shared;
  int part;
  Ring<kLatentStages> stage = {};

  __device__ __forceinline__ void next(bool heads) {
    if constexpr (sizeof(K) == 1) {
      constexpr int kRows = 4 / kRestorers;
      barrier_wait(&shared.copied[stage.place], stage.parity);
      if (!heads) CodeCopier::restore(shared.stages[stage.place][0], part * kRows, part * kRows + kRows);
      arrive_once_a_warp(&shared.full[stage.place]);
      stage.advance();
    }
  }
};

// --- A block of threads: one warpgroup copies, one scores, two weigh half of the columns each ---

constexpr int kLatentThreads = 4 * 128;

// The tensor cores are to have work during the softmax of a block. So the weighing of the block before starts
// only when this one's products are done, though its weights were there earlier; unless this one's keys are not yet there.
template <bool kRope, class K>
__device__ __forceinline__ void score_queries(LatentShared<kRope>& shared, const LatentView<K>& view,
                                              const LatentShare& share) {
  Ring<kLatentStages> stage, previous = {-1, 0};  // of the block before, perhaps of the query before
  Ring<2> last;
  bool scored = true;  // the weighing of the block before may start
  const auto may_weigh = [&] {
    if (!scored) arrive_once_a_warp(&shared.scored[previous.place]);
    scored = true;
  };
  const auto await_stage = [&] {
    if (!__all_sync(~0u, barrier_passed(&shared.full[stage.place], stage.parity))) {
      may_weigh();
      barrier_wait(&shared.full[stage.place], stage.parity);
    }
  };
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    int left = key_count(view, t);
    SoftmaxRows rows;
    if (left > 0) {
      LatentQueries<kRope> queries;
      await_stage();
      queries.load(shared, stage.place);
      arrive_once_a_warp(&shared.empty[stage.place], 2);  // instead of the warps that weigh
      arrive_once_a_warp(&shared.weighed[stage.place]);
      arrive_once_a_warp(&shared.scored[stage.place]);
      stage.advance();
      do {
        await_stage();
        fence_async_proxy();
        float scores[32];
        queries.score(shared, stage.place, last, scores);
        may_weigh();
        if (left <= kLatentKeys) {
          arrive_once_a_warp(&shared.queries_empty);
          // The factor before has been read.
          if (previous.place >= 0) barrier_wait(&shared.empty[previous.place], previous.parity);
        }
        previous = stage;
        scored = false;
        if (kRope) LatentQueries<kRope>::sync();  // all have awaited the products with the last tile
        float rescale[2];
        uint32_t weights[4][4];
        rows.add(scores, left, share.scale, rescale, weights);
        const uint32_t thread = thread_again();
        const int row = row_of_thread();
        const SwizzledTile tile{shared_address(shared.last[last.place]), 128};
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          store_tiles(tile.chunk(thread % 128 / kWarp * 16 + thread % 16, k * 2 + thread % kWarp / 16),
                      weights[k]);
        }
        if (thread_again() % 4 == 0) {
          shared.rescale[last.place][row] = rescale[0];
          shared.rescale[last.place][row + 8] = rescale[1];
        }
        left -= kLatentKeys;
        if (left <= 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            rows.sum[r] = rows.total(r);
            if (thread_again() % 4 == 0) shared.factor[row + 8 * r] = 1.0f / rows.sum[r];
          }
        }
        fence_async_proxy();
        arrive_once_a_warp(&shared.weighed[stage.place]);
        stage.advance();
        last.advance();
      } while (left > 0);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_lse(view, t, first_head() + row_of_thread() + 8 * r, rows.top[r], rows.sum[r]);
  }
  may_weigh();  // nothing follows the last block
}

template <bool kRope, class K>
__device__ __forceinline__ void weigh_queries(LatentShared<kRope>& shared, const LatentView<K>& view,
                                              const LatentShare& share, int half) {
  constexpr int kTiles = kLatentTiles / 2;
  StageRestorer<kRope, K> restorer{shared, half};
  Ring<kLatentStages> stage;
  Ring<2> last;
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    const int end = share.end(key_count(view, t));
    float o[2][64] = {}, factor[2] = {0.0f, 0.0f};
    if (end > 0) {
      stage.advance();  // the queries
      restorer.next(true);
      restorer.next(false);
    }
    for (int block = 0; block < end; ++block) {
      // Its products are what this block's weighing waits for.
      if (block + 1 < end) restorer.next(false);
      const int row = row_of_thread();
      barrier_wait(&shared.weighed[stage.place], stage.parity);
      barrier_wait(&shared.scored[stage.place], stage.parity);
      const float rescale[2] = {shared.rescale[last.place][row], shared.rescale[last.place][row + 8]};
      if (block + 1 == end) factor[0] = shared.factor[row], factor[1] = shared.factor[row + 8];
      if (!all_ones(rescale)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i / 64][i % 64] *= rescale[i / 2 % 2];
      }
      fence_async_proxy();
      const uint64_t weights = factor_descriptor(shared.last[last.place], 0);
      const uint64_t values = factor_descriptor(shared.stages[stage.place][half * kTiles], kTileBytes);
      wgmma_pin(o[0]);
      wgmma_pin(o[1]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          wgmma<false, false>(o[i], weights + (k * 32 >> 4),
                              values + ((i * 2 * kTileBytes + k * 16 * 128) >> 4), 1);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(o[0]);
      wgmma_pin(o[1]);
      arrive_once_a_warp(&shared.empty[stage.place]);
      stage.advance();
      last.advance();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) store_rows(view, t, half * kTiles * 64 + i * 128, o[i], factor);
  }
}

template <bool kRope, class K>
__global__ void __launch_bounds__(kLatentThreads, 1)
    attend_latents(const __grid_constant__ LatentView<K> view, const LatentShare share) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<LatentShared<kRope>*>(memory);
  shared.init(sizeof(K) == 1);
  const int role = static_cast<int>(threadIdx.x) / 128;
  // All of the 512 that there are for four threads. With less, the compiler makes products wait for each
  // other.
  if (role == 0) {
    give_registers<24>();
    fetch_latents(shared, view, share);
  } else if (role == 1) {
    take_registers<168>();
    score_queries(shared, view, share);
  } else {
    take_registers<160>();
    weigh_queries(shared, view, share, role - 2);
  }
}

// --- A query in many blocks of threads ---

// Products of a block of 64 keys, between the kernels: 32 values of each of 128 threads, as wgmma leaves
// them, by fours.
constexpr int kScoreValues = kLatentHeads * kLatentKeys;
struct LatentScores {
  float* data;
  int blocks;  // of a run of heads, at most

  __device__ float* at(int64_t t, int block) const {
    return data + ((t * gridDim.y + blockIdx.y) * blocks + block) * kScoreValues;
  }
};

template <bool kRope, class K>
__device__ __forceinline__ void store_scores(LatentShared<kRope>& shared, const LatentView<K>& view,
                                             const LatentShare& share, const LatentScores& to) {
  Ring<kLatentStages> stage;
  Ring<2> last;
  for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
    const int begin = share.begin(), end = share.end(key_count(view, t));
    if (begin >= end) continue;
    LatentQueries<kRope> queries;
    barrier_wait(&shared.full[stage.place], stage.parity);
    queries.load(shared, stage.place);
    arrive_once_a_warp(&shared.empty[stage.place], 2);
    stage.advance();
    for (int block = begin; block < end; ++block) {
      barrier_wait(&shared.full[stage.place], stage.parity);
      fence_async_proxy();
      float scores[32];
      queries.score(shared, stage.place, last, scores);
      if (block + 1 == end) arrive_once_a_warp(&shared.queries_empty);
      arrive_once_a_warp(&shared.empty[stage.place], 2);
      stage.advance();
      last.advance();
      float* const at = to.at(t, block) + threadIdx.x % 128 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        *reinterpret_cast<float4*>(at + i * 512) = {scores[4 * i], scores[4 * i + 1], scores[4 * i + 2],
                                                    scores[4 * i + 3]};
      }
    }
  }
}

// One warpgroup copies, one scores; two restore where there are codes.
template <class K>
constexpr int kScoreThreads = (sizeof(K) == 1 ? 2 + kRestorers : 2) * 128;

template <bool kRope, class K>
__global__ void __launch_bounds__(kScoreThreads<K>, 1)
    score_latents(const __grid_constant__ LatentView<K> view, const LatentShare share, const LatentScores to) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<LatentShared<kRope>*>(memory);
  constexpr bool kCodes = sizeof(K) == 1;
  shared.init(kCodes);
  const int role = static_cast<int>(threadIdx.x) / 128;
  if (role == 1) {
    if constexpr (kCodes) take_registers<168>();
    store_scores(shared, view, share, to);
  } else {
    if constexpr (kCodes) give_registers<112>();
    if (role == 0) {
      fetch_latents(shared, view, share);
    } else if constexpr (kCodes) {
      StageRestorer<kRope, K> restorer{shared, role - 2};
      for (int t = static_cast<int>(blockIdx.x); t < share.queries; t = next_query(t)) {
        const int blocks = share.end(key_count(view, t)) - share.begin();
        for (int stage = 0; blocks > 0 && stage <= blocks; ++stage) restorer.next(stage == 0);
      }
    }
  }
}

constexpr int kWeighStages = 4;
struct WeighShared {
  unsigned char values[kWeighStages][kTileBytes];  // 64 columns
  float scores[kWeighStages][kScoreValues];
  uint64_t full[kWeighStages], empty[kWeighStages];
  uint64_t copied[kWeighStages];  // with codes, as LatentShared's
};

// One warpgroup copies, one weighs; one restores where there are codes.
template <class K>
constexpr int kWeighThreads = (sizeof(K) == 1 ? 3 : 2) * 128;

// Columns from 64 blockIdx.z on.
template <class K>
__global__ void __launch_bounds__(kWeighThreads<K>, 2)
    weigh_latents(const __grid_constant__ LatentView<K> view, const LatentShare share, const LatentScores from) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WeighShared*>(memory);
  constexpr bool kCodes = sizeof(K) == 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWeighStages; ++i) {
      barrier_init(&shared.full[i], kCodes ? kArrivalsOfWarp * 4 : 128);
      barrier_init(&shared.copied[i], 128);
      barrier_init(&shared.empty[i], kArrivalsOfWarp * 4);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int t = static_cast<int>(blockIdx.x), column = static_cast<int>(blockIdx.z) * 64;
  const int count = key_count(view, t);
  Ring<kWeighStages> stage;
  const int role = static_cast<int>(threadIdx.x) / 128;
  if (role == 0) {
    if constexpr (kCodes) give_registers<40>();
    const KeyList list = keys_of(view, t);
    KeyFinder<K> keys(view, list, 0);
    for (int block = 0; block * kLatentKeys < count; ++block, stage.advance()) {
      keys.advance();
      barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
      const auto source = [&](int i) { return keys.source(i); };
      if constexpr (kCodes) {
        CodeCopier::copy_tile(shared.values[stage.place], column, view.latents, source);
      } else {
        RowCopier::copy<1>(shared.values[stage.place], column, source);
      }
      const float* const scores = from.at(t, block) + threadIdx.x * 4;
      const uint32_t to = shared_address(shared.scores[stage.place] + threadIdx.x * 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) copy_async(to + i * 2048, scores + i * 512);
      barrier_arrive_after_copies(kCodes ? &shared.copied[stage.place] : &shared.full[stage.place]);
    }
    return;
  }
  if (role == 2) {
    if constexpr (kCodes) {
      give_registers<56>();
      for (int block = 0; block * kLatentKeys < count; ++block, stage.advance()) {
        barrier_wait(&shared.copied[stage.place], stage.parity);
        CodeCopier::restore_tile(shared.values[stage.place], column);
        arrive_once_a_warp(&shared.full[stage.place]);
      }
    }
    return;
  }
  if constexpr (kCodes) take_registers<144>();
  const int row = row_of_thread();
  SoftmaxRows rows;
  float o[32] = {}, factor[2] = {0.0f, 0.0f};
  uint32_t weights[4][4];
  for (int block = 0; block * kLatentKeys < count; ++block, stage.advance()) {
    barrier_wait(&shared.full[stage.place], stage.parity);
    fence_async_proxy();
    float scores[32], rescale[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 four =
          *reinterpret_cast<const float4*>(shared.scores[stage.place] + i * 512 + threadIdx.x % 128 * 4);
      scores[4 * i] = four.x, scores[4 * i + 1] = four.y, scores[4 * i + 2] = four.z,
                 scores[4 * i + 3] = four.w;
    }
    rows.add(scores, count - block * kLatentKeys, share.scale, rescale, weights);
    if (!all_ones(rescale)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] *= rescale[i / 2 % 2];
    }
    const uint64_t values = factor_descriptor(shared.values[stage.place], 0);
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<false>(o, weights[k], values + (k * 16 * 128 >> 4), 1);
    wgmma_commit();
    // At once: while products run, the compiler would have other values in the registers of the weights.
    wgmma_wait<0>();
    wgmma_pin(o);
    arrive_once_a_warp(&shared.empty[stage.place]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    if (count > 0) factor[r] = 1.0f / total;
    if (column == 0) store_lse(view, t, first_head() + row + 8 * r, rows.top[r], total);
  }
  store_rows(view, t, column, o, factor);
}

}  // namespace slipstream::kernels
