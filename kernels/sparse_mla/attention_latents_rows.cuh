// Rows of queries and keys on their way into shared memory, as the tensor cores take them; codes of fp8 rows and their
// restoring.
#pragma once

#include "kernels/sparse_mla/attention_latents.cuh"

namespace slipstream::kernels {

// A row to copy; a head that does not exist is null and becomes zeros.
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
// for one of its warp's sixteen rows. Beyond the list's end it is the last key again, whose weights are 0: it brings no NaN that
// the query does not see anyway. Lists have keys.
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

  __device__ __forceinline__ int position(int block) const {
    const uint32_t thread = thread_again();
    const int entry =
        block * kLatentKeys + static_cast<int>(thread % 128 / kWarp * 4 + thread % 4 + thread % 16 / 4 * 16);
    return list_.position(min(entry, list_.count - 1));
  }
  __device__ __forceinline__ int page(int position) const {
    return view_.keys.table[list_.sequence * view_.keys.table_stride + position / kPageRows];
  }
  __device__ __forceinline__ uint32_t place(int page, int position) const {
    return static_cast<uint32_t>(page) * static_cast<uint32_t>(view_.keys.page_stride / kUnit) +
           static_cast<uint32_t>(position) % static_cast<uint32_t>(kPageRows) *
               static_cast<uint32_t>(view_.keys.row_stride / kUnit);
  }

  static __device__ __forceinline__ uint32_t found(uint32_t place, int i) {
    return __shfl_sync(~0u, place, i * 4 + static_cast<int>(thread_again() % kWarp / 8));
  }
  __device__ __forceinline__ SourceRow<K> at(uint32_t place) const {
    return {view_.keys.pool + uint64_t{place} * kUnit};
  }

  const LatentView<K>& view_;
  const KeyList list_;
  int block_, later_;
  int page_, position_;  // of the block after the next
  uint32_t next_, this_ = 0, before_ = 0;
};

}  // namespace slipstream::kernels
