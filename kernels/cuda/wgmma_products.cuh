// Products of bf16 factors, and of e4m3 ones with scales, at Hopper's full rate. In each block one thread has
// the copy engine fill a ring of stages in shared memory, and warpgroups multiply from there (wgmma). An
// element's chain is the same in every shape of tile: from 0 or c, one step of 32 bytes of k after the other
// into one f32 sum (of e4m3: into the sum of 128 k, which is scaled and added to another). Shapes only choose
// which chains run side by side, so the bits do not depend on M or on the other rows.
//
// The copy engine wants rows that begin on 16 bytes; products.cuh has the form for others (wgmma_takes()).
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/limits.cuh"
#include "kernels/cuda/products.cuh"

namespace slipstream::kernels {

// The rows of a stage, as the copy engine writes them and the tensor cores read them.
constexpr int kRowBytes = 128;

// Tiles of 64 kWarpgroups x kN; kStages stages of 128 bytes of k.
template <class Factor_, int kWarpgroups_, int kN_, int kStages_>
struct WgmmaShape {
  using Factor = Factor_;
  static constexpr bool kScaled = sizeof(Factor) == 1;  // e4m3
  static constexpr int kWarpgroups = kWarpgroups_, kN = kN_, kStages = kStages_;
  static constexpr int kM = 64 * kWarpgroups, kDepth = kRowBytes / static_cast<int>(sizeof(Factor));
  static constexpr int kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 128;
};
// A box of 64 rows. Boxes of k along the rows follow each other without a seam.
constexpr int kBoxBytes = 64 * kRowBytes;

// A block's threads: warpgroups that multiply, then one of which a thread copies factors and, where there are
// scales, the second warp copies these.
template <class Shape>
constexpr int kTileTakers = Shape::kConsumers / kWarp + (Shape::kScaled ? 1 : 0);  // warps

template <class Shape>
struct StageScales {
  static constexpr int kParts = Shape::kN < 128 ? 1 : Shape::kN / 128;
  float a[Shape::kM], b[kParts];  // of each row; of each 128 columns
};
struct NoScales {};

template <class Shape>
struct WgmmaShared {
  unsigned char a[Shape::kStages][Shape::kM / 64 * kBoxBytes];
  unsigned char b[Shape::kStages][Shape::kN / 64 * kBoxBytes];
  std::conditional_t<Shape::kScaled, StageScales<Shape>, NoScales> scales[Shape::kStages];
  uint64_t full[Shape::kStages];   // the stage's bytes are there
  uint64_t empty[Shape::kStages];  // all warps are done with them
  int tile[2];                     // what is worked on next, from the one thread to all
  uint64_t tile_given[2], tile_taken[2];
};

struct WgmmaArguments {
  CUtensorMap a, b;
  Product product;
  int box_rows;    // of a copy of A's rows
  int* next_tile;  // counts, from 0, the tiles taken beyond each block's first; null where there are none. As leave_at_zero()
};

// A place in a ring, and the parity of the barriers' phase in this round.
template <int kCount>
struct Ring {
  int place = 0, parity = 0;
  __device__ void advance() {
    if (++place == kCount) place = 0, parity ^= 1;
  }
};

// Finds tiles by ascending index. Sixteen tiles of rows at a time go through all columns, so that what runs
// at the same time shares rows of both factors in the L2.
template <class Shape>
class TileFinder {
 public:
  __device__ explicit TileFinder(const Product& p) : p_(p) {}
  __device__ bool find(int index, Tile& tile) {  // false: it is beyond the last
    constexpr int kGroup = 16;
    const int columns = static_cast<int>((p_.n + Shape::kN - 1) / Shape::kN);
    for (; batch_ < p_.batch; ++batch_) {
      const int64_t begin = p_.row_begin == nullptr ? 0 : p_.row_begin[batch_];
      const int64_t count = p_.row_begin == nullptr ? 0 : p_.row_begin[batch_ + 1] - begin;
      const int64_t m = p_.rows_grouped ? count : p_.m;
      const int rows = static_cast<int>((m + Shape::kM - 1) / Shape::kM), i = index - first_;
      if (i >= rows * columns) {
        first_ += rows * columns;
        continue;
      }
      const int group = i / (kGroup * columns), place = i % (kGroup * columns);
      const int height = min(kGroup, rows - group * kGroup);
      tile = {.batch = batch_,
              .row_offset = begin,
              .m = m,
              .k = p_.depth_grouped ? count : p_.k,
              .m0 = int64_t{group * kGroup + place % height} * Shape::kM,
              .n0 = int64_t{place / height} * Shape::kN};
      return true;
    }
    return false;
  }

 private:
  const Product& p_;
  int64_t batch_ = 0;  // product or expert
  int first_ = 0;      // its first tile
};

// `count` > 0 rows of A or columns of B from `side` on, a stage's k from `depth` on. Stored along k a box is
// `box` of them, else 64.
template <bool kDepthInner>
__device__ __forceinline__ void copy_factor(unsigned char* to, const CUtensorMap& map, uint64_t* barrier,
                                            int count, int box, int64_t side, int64_t depth, int64_t batch) {
  const int x = static_cast<int>(side), y = static_cast<int>(depth), z = static_cast<int>(batch);
  if constexpr (kDepthInner) {
    copy_box(to, map, barrier, y, x, z);
    for (int i = box; i < count; i += box) copy_box(to + i * kRowBytes, map, barrier, y, x + i, z);
  } else {
    for (int i = 0; i < count; i += 64) copy_box(to + i * kRowBytes, map, barrier, x + i, y, z);
  }
}

// Who leaves last sets the count of tiles to 0 again, for the next launch: a launch of its own to do so takes four microseconds.
// `count` and how many blocks have left are neighbours.
__device__ __forceinline__ void leave_at_zero(int* count) {
  __threadfence();
  auto* const left = reinterpret_cast<unsigned*>(count + 1);
  if (atomicInc(left, gridDim.x - 1) == gridDim.x - 1) atomicExch(count, 0);
}

// The one thread that hands out tiles and starts all copies of its block. A block takes its next tile when it
// needs one, not by a fixed rule: neighbouring tiles then start at about the same time whatever happened
// before, and share what they read in the L2.
template <class Shape, bool kTransposeA, bool kTransposeB>
__device__ void feed(WgmmaShared<Shape>& shared, const WgmmaArguments& args) {
  const Product& p = args.product;
  TileFinder<Shape> finder(p);
  Ring<Shape::kStages> stage;
  Ring<2> turn;
  for (int index = static_cast<int>(blockIdx.x), next = 0;; index = next, turn.advance()) {
    barrier_wait(&shared.tile_taken[turn.place], turn.parity ^ 1);  // passes in the first round
    shared.tile[turn.place] = index;
    barrier_arrive(&shared.tile_given[turn.place]);
    Tile tile;
    if (!finder.find(index, tile)) {
      if (args.next_tile != nullptr) leave_at_zero(args.next_tile);
      return;
    }
    next = static_cast<int>(gridDim.x) + (args.next_tile == nullptr ? index : atomicAdd(args.next_tile, 1));
    const int64_t batch_a = p.rows_grouped || p.depth_grouped ? 0 : tile.batch,
                  batch_b = p.depth_grouped ? 0 : tile.batch;
    const int64_t row = tile.m0 + (p.rows_grouped ? tile.row_offset : 0),
                  depth = p.depth_grouped ? tile.row_offset : 0;
    // Rows of A that do not exist stay what they are: nothing reads their sums.
    const int rows = kTransposeA ? Shape::kM : static_cast<int>(min(int64_t{Shape::kM}, tile.m - tile.m0));
    const int copied = kTransposeA ? rows : (rows + args.box_rows - 1) / args.box_rows * args.box_rows;
    const int bytes = (copied + Shape::kN) * kRowBytes;
    for (int64_t k = 0; k < tile.k; k += Shape::kDepth, stage.advance()) {
      uint64_t* const full = &shared.full[stage.place];
      barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
      barrier_arrive_expecting(full, bytes);
      copy_factor<!kTransposeA>(shared.a[stage.place], args.a, full, rows, args.box_rows, row, depth + k,
                                batch_a);
      copy_factor<kTransposeB>(shared.b[stage.place], args.b, full, Shape::kN, Shape::kN, tile.n0, depth + k,
                               batch_b);
    }
  }
}

__device__ __forceinline__ void arrive(uint64_t* barrier) { barrier_arrive_warp(barrier, threadIdx.x % kWarp == 0); }

// The next tile; false: there is none. All lanes of a warp call; the first reads for all and says that it has, so that who writes
// the next waits for the very thread that read.
template <class Shape>
__device__ __forceinline__ bool take_tile(WgmmaShared<Shape>& shared, TileFinder<Shape>& finder,
                                          Ring<2>& turn, Tile& tile) {
  int index = 0;
  if (threadIdx.x % kWarp == 0) {
    barrier_wait(&shared.tile_given[turn.place], turn.parity);
    index = shared.tile[turn.place];
    barrier_arrive(&shared.tile_taken[turn.place]);
  }
  turn.advance();
  return finder.find(__shfl_sync(0xffffffffu, index, 0), tile);
}

// The warp that copies each stage's scales, behind which the stage's barrier waits as well: read by those who
// multiply they came too late.
template <class Shape>
__device__ void feed_scales(WgmmaShared<Shape>& shared, const WgmmaArguments& args) {
  constexpr int kParts = StageScales<Shape>::kParts;
  const Product& p = args.product;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  TileFinder<Shape> finder(p);
  Ring<Shape::kStages> stage;
  Ring<2> turn;
  for (Tile tile; take_tile(shared, finder, turn, tile);) {
    // Rows and columns that do not exist take the last one's.
    const float* from_a[Shape::kM / kWarp];
#pragma unroll
    for (int i = 0; i < Shape::kM / kWarp; ++i) {
      const int64_t row = min(tile.m0 + lane + i * kWarp, tile.m - 1);
      from_a[i] = p.scales_a + (tile.row_offset + row) * p.ld_scales_a;
    }
    const float* const from_b = p.scales_b + tile.batch * p.stride_scales_b +
                                min(tile.n0 + lane % kParts * 128, p.n - 1) / 128 * p.ld_scales_b;
    const int blocks = static_cast<int>((p.k + Shape::kDepth - 1) / Shape::kDepth);
    for (int block = 0; block < blocks; ++block, stage.advance()) {
      StageScales<Shape>& to = shared.scales[stage.place];
      barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
#pragma unroll
      for (int i = 0; i < Shape::kM / kWarp; ++i) copy_float(&to.a[lane + i * kWarp], from_a[i] + block);
      if (lane < kParts) copy_float(&to.b[lane], from_b + block);
      barrier_arrive_after_copies(&shared.full[stage.place]);
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Where a thread's sums belong: pairs of neighbouring columns, pair j eight columns from pair j - 1; `low` is
// 0 in the thread's upper row and 1 in the one eight below.
template <class C>
struct PairsOfC {
  C* c;  // of the product or the expert
  int64_t ldc, m, n, row0, column0;
  bool whole;  // pairs are aligned, and of each eight columns all exist or none

  __device__ PairsOfC(const Product& p, const Tile& tile)
      : c(static_cast<C*>(p.c) + (p.rows_grouped ? tile.row_offset * p.ldc : tile.batch * p.stride_c)),
        ldc(p.ldc),
        m(tile.m),
        n(p.n),
        row0(tile.m0 + threadIdx.x / kWarp * 16 + threadIdx.x % kWarp / 4),
        column0(tile.n0 + threadIdx.x % 4 * 2),
        whole(p.fast_c) {}

  __device__ void load_pair(float* pair, int j, int low) const {
    const int64_t row = row0 + low * 8, column = column0 + j * 8;
    if (row >= m || column >= n) return;
    const C* const at = c + row * ldc + column;
    if (whole && sizeof(C) == 4) {
      const float2 both = *reinterpret_cast<const float2*>(at);
      pair[0] = both.x, pair[1] = both.y;
    } else {
      pair[0] = load(at);
      if (column + 1 < n) pair[1] = load(at + 1);
    }
  }
  // Pairs j and j + 1: a quad of threads writes whole sectors of 32 bytes where it can.
  __device__ void store_two(const float* first, const float* second, int j, int low) const {
    const int64_t row = row0 + low * 8, column = column0 + j * 8;
    if (!whole) {
      for (int i = 0; i < 4; ++i) {
        const int64_t at = column + i / 2 * 8 + i % 2;
        if (row < m && at < n) store(c + row * ldc + at, i < 2 ? first[i] : second[i - 2]);
      }
    } else if constexpr (sizeof(C) == 4) {
      if (row < m && column < n) *reinterpret_cast<float2*>(c + row * ldc + column) = {first[0], first[1]};
      if (row < m && column + 8 < n)
        *reinterpret_cast<float2*>(c + row * ldc + column + 8) = {second[0], second[1]};
    } else {
      // Neighbours exchange a pair: even threads then have four columns of the first eight, odd ones of the
      // second.
      const bool odd = threadIdx.x % 2 == 1;
      const uint32_t pair0 = pack_bf16(first[0], first[1]), pair1 = pack_bf16(second[0], second[1]);
      const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? pair0 : pair1, 1);
      const int64_t four = column + (odd ? 6 : 0);
      if (row < m && four < n) {
        *reinterpret_cast<uint2*>(c + row * ldc + four) = odd ? uint2{got, pair1} : uint2{pair0, got};
      }
    }
  }
  template <int kSums>
  __device__ void store_all(const float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float* const first = sums + i / 2 * 8 + i % 2 * 2;
      store_two(first, first + 4, i / 2 * 2, i % 2);
    }
  }
};

// k beyond an expert's rows belong to the next one: zeros instead, in both factors, as 0 * inf is not 0.
template <class Shape>
__device__ void clear_depth(unsigned char* a, unsigned char* b, int from) {
  const int pieces = (Shape::kDepth - from) * 8;  // of 16 bytes in each box, whose rows are k
  for (int i = static_cast<int>(threadIdx.x); i < pieces * (Shape::kM + Shape::kN) / 64;
       i += Shape::kConsumers) {
    const int box = i / pieces;
    unsigned char* const to =
        box < Shape::kM / 64 ? a + box * kBoxBytes : b + (box - Shape::kM / 64) * kBoxBytes;
    *reinterpret_cast<uint4*>(to + (from * 8 + i % pieces) * 16) = uint4{0, 0, 0, 0};
  }
  fence_async_proxy();
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");  // all warpgroups that multiply
}

// What becomes of a tile's sums: they go to c. Another epilogue has the same two members; each thread's sums are laid out
// as in PairsOfC.
template <class C>
struct StoreSums {
  template <int kSums>
  __device__ void begin(const Product& p, const Tile& tile, float (&sums)[kSums]) const {  // of products that accumulate
    const PairsOfC<C> pairs(p, tile);
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) pairs.load_pair(sums + i * 2, i / 2, i % 2);
  }
  template <int kSums>
  __device__ void end(const Product& p, const Tile& tile, float (&sums)[kSums]) const {
    const PairsOfC<C> pairs(p, tile);
    if (p.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int64_t column = pairs.column0 + i / 4 * 8 + i % 2;
        if (column < p.n) sums[i] += p.bias[column];
      }
    }
    pairs.store_all(sums);
  }
};

// Into the sums goes the whole of tile.k, stage after stage.
template <class Shape, bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void add_products(float (&sums)[Shape::kN / 2], WgmmaShared<Shape>& shared,
                                             Ring<Shape::kStages>& stage, const Product& p,
                                             const Tile& tile) {
  // Sixteen k in bytes: rows of 128 where rows are k.
  constexpr int kStepA = kTransposeA ? 16 * kRowBytes : 32, kStepB = kTransposeB ? 32 : 16 * kRowBytes;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  wgmma_pin(sums);
  uint64_t* previous = nullptr;  // barrier of the stage that is still being read
  int add = p.accumulate ? 1 : 0;
  int64_t k_left = tile.k;
  do {
    unsigned char *const a = shared.a[stage.place], *const b = shared.b[stage.place];
    barrier_wait(&shared.full[stage.place], stage.parity);
    if constexpr (kTransposeA && !kTransposeB) {
      if (p.depth_grouped && k_left < Shape::kDepth) clear_depth<Shape>(a, b, static_cast<int>(k_left));
    }
    const uint64_t from_a = factor_descriptor(a + warpgroup * kBoxBytes, kBoxBytes);
    const uint64_t from_b = factor_descriptor(b, kBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kDepth / 16; ++i) {
      wgmma<kTransposeA, kTransposeB>(sums, from_a + (i * kStepA >> 4), from_b + (i * kStepB >> 4),
                                      i == 0 ? add : 1);
    }
    wgmma_commit();
    // The stage before has been read; this one's products run on while the next is awaited.
    wgmma_wait<1>();
    if (previous != nullptr) arrive(previous);
    previous = &shared.empty[stage.place];
    add = 1;
    k_left -= Shape::kDepth;
    stage.advance();
  } while (k_left > 0);
  wgmma_wait<0>();
  arrive(previous);
  wgmma_pin(sums);
}

// The same of e4m3 factors. The tensor cores add up 128 k, with fewer bits than f32 has; then they are scaled
// and added here. Meanwhile the other warpgroup's products keep the tensor cores busy. A part of 128 columns
// at a time: the registers hold no more sums than 64 x 256 and one part's.
template <class Shape>
__device__ __forceinline__ void add_scaled_products(float (&sums)[Shape::kN / 2], WgmmaShared<Shape>& shared,
                                                    Ring<Shape::kStages>& stage, const Product& p,
                                                    const Tile& tile) {
  constexpr int kPart = Shape::kN < 128 ? Shape::kN : 128, kParts = Shape::kN / kPart;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int row =
      static_cast<int>(threadIdx.x) / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;  // and + 8
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const int blocks = static_cast<int>((p.k + Shape::kDepth - 1) / Shape::kDepth);
  for (int block = 0; block < blocks; ++block, stage.advance()) {
    barrier_wait(&shared.full[stage.place], stage.parity);
    const uint64_t from_a = factor_descriptor(shared.a[stage.place] + warpgroup * kBoxBytes, kBoxBytes);
    const uint64_t from_b = factor_descriptor(shared.b[stage.place], kBoxBytes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float products[kPart / 2];
      wgmma_pin(products);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kRowBytes / 32; ++i) {
        wgmma_e4m3(products, from_a + i * 2, from_b + (part * kPart * kRowBytes >> 4) + i * 2, i > 0);
      }
      wgmma_commit();
      const StageScales<Shape>& scales = shared.scales[stage.place];
      const float scale[2] = {scales.a[row] * scales.b[part], scales.a[row + 8] * scales.b[part]};
      wgmma_wait<0>();
      wgmma_pin(products);
      if (part == kParts - 1) arrive(&shared.empty[stage.place]);
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) {
        float& sum = sums[part * kPart / 2 + i];
        sum = fmaf(products[i], scale[i / 2 % 2], sum);
      }
    }
  }
}

// A warpgroup that multiplies: 64 rows of each tile.
template <class Shape, bool kTransposeA, bool kTransposeB, class Epilogue>
__device__ __forceinline__ void multiply(WgmmaShared<Shape>& shared, const WgmmaArguments& args, const Epilogue& epilogue) {
  constexpr int kPairs = Shape::kN / 8;
  const Product& p = args.product;
  TileFinder<Shape> finder(p);
  Ring<Shape::kStages> stage;
  Ring<2> turn;
  for (Tile tile; take_tile(shared, finder, turn, tile);) {
    if (tile.k == 0) continue;  // an expert without rows, whose c keeps its values
    if constexpr (!kTransposeA) {
      if (tile.m0 + threadIdx.x / 128 * 64 >= tile.m) {  // no row of this warpgroup's exists: it keeps step
        for (int64_t k = 0; k < tile.k; k += Shape::kDepth, stage.advance()) {
          barrier_wait(&shared.full[stage.place], stage.parity);
          arrive(&shared.empty[stage.place]);
        }
        continue;
      }
    }
    float sums[kPairs * 4];
    if constexpr (Shape::kScaled) {
      add_scaled_products<Shape>(sums, shared, stage, p, tile);
    } else {
      if (p.accumulate) epilogue.begin(p, tile, sums);
      add_products<Shape, kTransposeA, kTransposeB>(sums, shared, stage, p, tile);
    }
    epilogue.end(p, tile, sums);
  }
}

template <class Shape, bool kTransposeA, bool kTransposeB, class Epilogue>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    wgmma_product(const __grid_constant__ WgmmaArguments args, const __grid_constant__ Epilogue epilogue) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WgmmaShared<Shape>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&shared.full[i], Shape::kScaled ? 1 + kWarp : 1);
      barrier_init(&shared.empty[i], kArrivalsOfWarp * Shape::kConsumers / kWarp);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.tile_given[i], 1);
      barrier_init(&shared.tile_taken[i], kTileTakers<Shape>);
    }
    barrier_init_done();
  }
  __syncthreads();
  // 128 sums a thread and what goes with them need more than an even share of the registers.
  if (threadIdx.x < Shape::kConsumers) {
    if constexpr (Shape::kWarpgroups == 2) take_registers<232>();
    multiply<Shape, kTransposeA, kTransposeB>(shared, args, epilogue);
  } else {
    if constexpr (Shape::kWarpgroups == 2) give_registers<40>();
    if (threadIdx.x == Shape::kConsumers) feed<Shape, kTransposeA, kTransposeB>(shared, args);
    if constexpr (Shape::kScaled) {
      if (threadIdx.x / kWarp == Shape::kConsumers / kWarp + 1) feed_scales(shared, args);
    }
  }
}

// --- Launches -------------------------------------------------------------------------------

// `batch` stored matrices as the copy engine sees them: boxes of 128 bytes of columns and `box_rows` rows.
template <class Factor>
CUtensorMap tensor_map(const void* data, int64_t columns, int64_t rows, int64_t batch, int64_t ld, int64_t stride,
                       int64_t box_rows) {
  constexpr int64_t kSize = sizeof(Factor);
  static auto* const encode = cuda::driver<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const auto u64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[3] = {u64(columns), u64(rows), u64(batch)};
  const cuuint64_t strides[2] = {u64(ld * kSize), u64((batch == 1 ? rows * ld : stride) * kSize)};
  const cuuint32_t box[3] = {kRowBytes / kSize, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, kSize == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK_EQ(static_cast<int>(result), 0);
  return map;
}

template <class Shape, bool kTransposeA, bool kTransposeB, class Epilogue>
void launch_wgmma_product(const Product& p, const Epilogue& epilogue, Stream& stream) {
  const int64_t batch_a = p.rows_grouped || p.depth_grouped ? 1 : p.batch,
                batch_b = p.depth_grouped ? 1 : p.batch;
  // Of few rows no more are copied than there are, in eights: of a product at once, of an expert in boxes for
  // about as many as experts have.
  const int64_t rows = divide_up(p.m, p.batch);
  const int64_t box_rows = !p.rows_grouped ? std::min<int64_t>(Shape::kM, divide_up(p.m, 8) * 8)
                           : rows > 32     ? 64
                           : rows > 16     ? 32
                           : rows > 8      ? 16
                                           : 8;
  const int64_t tiles =
      row_tiles(p, Shape::kM) * (p.rows_grouped ? 1 : p.batch) * divide_up(p.n, Shape::kN);  // at most
  const int64_t blocks = std::min(tiles, multiprocessors());
  const WgmmaArguments args{
      .a = kTransposeA ? tensor_map<typename Shape::Factor>(p.a, p.m, p.k, batch_a, p.lda, p.stride_a, 64)
                       : tensor_map<typename Shape::Factor>(p.a, p.k, p.m, batch_a, p.lda, p.stride_a, box_rows),
      .b = kTransposeB ? tensor_map<typename Shape::Factor>(p.b, p.k, p.n, batch_b, p.ldb, p.stride_b, Shape::kN)
                       : tensor_map<typename Shape::Factor>(p.b, p.n, p.k, batch_b, p.ldb, p.stride_b, 64),
      .product = p,
      .box_rows = static_cast<int>(box_rows),
      .next_tile = tiles > blocks ? stream.counters().i32() : nullptr};
  const auto kernel = wgmma_product<Shape, kTransposeA, kTransposeB, Epilogue>;
  constexpr int kBytes = sizeof(WgmmaShared<Shape>);
  allow_shared(kernel, kBytes);
  kernel<<<static_cast<unsigned>(blocks), Shape::kThreads, kBytes, cuda_stream(stream)>>>(args, epilogue);
}

template <class Shape, class C>
void launch_wgmma_shape(const Product& p, bool transpose_a, bool transpose_b, Stream& stream) {
  if (transpose_a) return launch_wgmma_product<Shape, true, false>(p, StoreSums<C>(), stream);
  if (transpose_b) return launch_wgmma_product<Shape, false, true>(p, StoreSums<C>(), stream);
  launch_wgmma_product<Shape, false, false>(p, StoreSums<C>(), stream);
}

// Whether this form takes the product, or few_rows.cuh, whose bits are the same. The answer does not depend on the number of rows.
// (Of a stored [k, m], m is the weight's.)
inline bool wgmma_takes(const Product& p, bool transpose_a, bool transpose_b) {
  const bool used = !(transpose_a && transpose_b);  // by layers: kernels that nobody needs are not compiled
  return p.fast_a && p.fast_b && p.k > 0 && used;
}

// A shape of tiles and its launch. `time` of a tile: relative, as measured on an H200.
struct WgmmaChoice {
  int64_t rows, columns, time;
  void (*launch)(const Product&, bool transpose_a, bool transpose_b, Stream&);
};
// The shape whose rounds over all multiprocessors take least.
inline void launch_best(const Product& p, std::initializer_list<WgmmaChoice> choices, bool transpose_a,
                        bool transpose_b, Stream& stream) {
  const int64_t rows = p.rows_grouped ? divide_up(p.m, p.batch) : p.m;  // an expert's, on average
  const int64_t blocks = multiprocessors();
  const auto time = [&](const WgmmaChoice& choice) {
    const int64_t tiles = divide_up(rows, choice.rows) * divide_up(p.n, choice.columns) * p.batch;
    return divide_up(tiles, blocks) * choice.time;
  };
  std::min_element(choices.begin(), choices.end(), [&](const WgmmaChoice& x, const WgmmaChoice& y) {
    return time(x) < time(y);
  })->launch(p, transpose_a, transpose_b, stream);
}

template <class C>
void wgmma_product_as(const Product& p, bool transpose_a, bool transpose_b, Stream& stream) {
  // From 1 to 16384 rows x 6144 x 6144; below 128 x 128 it is the time of the steps of k one after the other.
  launch_best(p,
              {{128, 256, 256, launch_wgmma_shape<WgmmaShape<bf16, 2, 256, 4>, C>},
               {128, 192, 200, launch_wgmma_shape<WgmmaShape<bf16, 2, 192, 5>, C>},
               {128, 128, 150, launch_wgmma_shape<WgmmaShape<bf16, 2, 128, 6>, C>},
               {64, 128, 115, launch_wgmma_shape<WgmmaShape<bf16, 1, 128, 8>, C>},
               {64, 64, 104, launch_wgmma_shape<WgmmaShape<bf16, 1, 64, 12>, C>}},
              transpose_a, transpose_b, stream);
}

}  // namespace slipstream::kernels
