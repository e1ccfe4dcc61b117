// Small products of bf16 by a stored [n, k]: a decode step's. They take the time of reading the weight, unless the chain of each sum
// takes longer: a step of sixteen k that wgmma adds in some 80 cycles, however narrow, mma.sync adds in 33. Each warp stands alone:
// sixteen rows of the weight come through its own ring in shared memory, without a barrier of the block. (Registers would not do
// as a ring: a warp has six counters to wait for loads by, and so waits for the youngest as well.)
//
// Bits are those of wgmma_products.cuh: the tensor cores add a step's sixteen products and the sum at once, by either instruction
// (gemm_cuda_test says so of the device it runs on).
#pragma once

#include "kernels/cuda/limits.cuh"
#include "kernels/cuda/products.cuh"
#include "kernels/cuda/wgmma_products.cuh"

namespace slipstream::kernels {

// A stage: 64 k, of sixteen rows of the weight and of 8 kTiles rows of A. Rows are 16 bytes longer than their values, so that
// neighbours fall into other banks.
template <int kTiles>
struct FewRowsStage {
  static constexpr int kDepth = 64, kPitch = kDepth * 2 + 16;
  unsigned char weight[16 * kPitch], rows[kTiles * 8 * kPitch];
};

// As copy_async, through the L1: the warps of a multiprocessor read the same rows of A at about the same time.
__device__ __forceinline__ void copy_async_kept(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The values of a stage as mma takes them.
template <int kTiles>
struct FewRowsFactors {
  uint32_t weight[4][4], rows[kTiles][2][4];

  __device__ __forceinline__ void load(const FewRowsStage<kTiles>& stage) {
    constexpr int kPitch = FewRowsStage<kTiles>::kPitch;
    const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 4; ++i) load_tiles(weight[i], shared_address(stage.weight + lane % 16 * kPitch + (i * 2 + lane / 16) * 16));
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) load_tiles(rows[t][i], shared_address(stage.rows + (t * 8 + lane % 8) * kPitch + (i * 4 + lane / 8) * 16));
    }
  }
  __device__ __forceinline__ void add_products(float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mma(sums[t], weight[i], rows[t][i / 2][i % 2 * 2], rows[t][i / 2][i % 2 * 2 + 1]);
    }
  }
};

// Several products at once: many of a model's are so small that each takes the time of its chain and leaves the device idle.
struct FewRowsGroup {
  static constexpr int kMost = 8;
  Product products[kMost];
  bool f32[kMost];  // of c; else bf16
  int end[kMost];   // blocks of this product and those before it
};

// What a block works on: rows [m0, m_end) of a and c, of which it takes 8 kTiles, columns from n0 on, and which stored matrix.
struct FewRowsPlace {
  int64_t n0, m0, m_end, batch;
};
// The place number `index` of a product. False: there is nothing. Experts' rows are so few that all of one's are in one place: of
// as many places as there are rows the one whose number is the expert's first row.
template <int kTiles>
__device__ __forceinline__ bool find_place(const Product& p, int64_t index, FewRowsPlace& place) {
  const int64_t columns = (p.n + 15) / 16, tiles = (p.m + 8 * kTiles - 1) / (8 * kTiles), rest = index / columns;
  place = {index % columns * 16, rest % tiles * 8 * kTiles, p.m, rest / tiles};
  if (!p.rows_grouped) return true;
  int owner = -1, end = 0;
#pragma unroll 8
  for (int base = 0; base < p.batch; base += kWarp) {
    const int e = base + static_cast<int>(threadIdx.x);
    if (e >= p.batch) continue;
    const int begin = p.row_begin[e], next = p.row_begin[e + 1];
    if (begin == rest && next > begin) owner = e, end = next;
  }
  owner = __reduce_max_sync(~0u, owner);
  place.m0 = rest, place.m_end = __reduce_max_sync(~0u, end), place.batch = owner;
  return owner >= 0;
}

// One warp: sixteen columns of c, 8 kTiles rows.
template <int kTiles, int kStages>
__global__ void __launch_bounds__(kWarp) few_rows_products(const __grid_constant__ FewRowsGroup group) {
  using Stage = FewRowsStage<kTiles>;
  extern __shared__ __align__(16) unsigned char memory[];
  Stage* const ring = reinterpret_cast<Stage*>(memory);
  const int lane = static_cast<int>(threadIdx.x);
  int which = 0;
  while (static_cast<int>(blockIdx.x) >= group.end[which]) ++which;
  const Product& p = group.products[which];
  FewRowsPlace place;
  if (!find_place<kTiles>(p, static_cast<int>(blockIdx.x) - (which == 0 ? 0 : group.end[which - 1]), place)) return;
  const auto [n0, m0, m_end, batch] = place;

  // A lane copies 16 bytes of every fourth row. Rows of A that do not exist are zeros; of the weight, the last one's.
  const int piece = lane % 8 * 8, row = lane / 8;
  const bf16 *weight[4], *rows[2 * kTiles];
  bool exists[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    weight[i] = static_cast<const bf16*>(p.b) + batch * p.stride_b + min(n0 + row + 4 * i, p.n - 1) * p.ldb + piece;
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    exists[i] = m0 + row + 4 * i < m_end;
    rows[i] = static_cast<const bf16*>(p.a) + batch * p.stride_a + (exists[i] ? m0 + row + 4 * i : m0) * p.lda + piece;
  }
  const int k = static_cast<int>(p.k) - piece;
  int copied = 0;  // k of the next stage to copy
  const auto copy_stage = [&](int at) {
    if (copied < p.k) {
      const bool there = copied < k;
      unsigned char* const to = ring[at].weight + row * Stage::kPitch + piece * 2;
      unsigned char* const to_rows = ring[at].rows + row * Stage::kPitch + piece * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) copy_async(shared_address(to + 4 * i * Stage::kPitch), weight[i] + copied, there ? 16 : 0);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i)
        copy_async_kept(shared_address(to_rows + 4 * i * Stage::kPitch), rows[i] + copied, there && exists[i] ? 16 : 0);
    }
    commit_copies();
    copied += Stage::kDepth;
  };
  const auto await_stage = [] {  // the eldest that is on its way
    wait_for_copies<kStages - 2>();
    __syncwarp();
  };

  float sums[kTiles][4] = {};
  FewRowsFactors<kTiles> even, odd;
  for (int i = 0; i < kStages - 1; ++i) copy_stage(i);
  await_stage();
  even.load(ring[0]);
  int next_stage = kStages - 1;  // to copy
  // While a stage's products run, the next one's factors are loaded. Stages beyond the end are not added.
  const auto turn = [&](FewRowsFactors<kTiles>& now, FewRowsFactors<kTiles>& next) {
    copy_stage(next_stage);
    await_stage();
    next_stage = (next_stage + 1) % kStages;
    next.load(ring[(next_stage + 1) % kStages]);
    now.add_products(sums);
  };
  int k0 = 0;
  for (; k0 + Stage::kDepth < p.k; k0 += 2 * Stage::kDepth) {
    turn(even, odd);
    turn(odd, even);
  }
  if (k0 < p.k) even.add_products(sums);

  const int64_t base = batch * p.stride_c;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t m = m0 + t * 8 + lane % 4 * 2 + i % 2, n = n0 + lane / 4 + i / 2 * 8;
      if (m >= m_end || n >= p.n) continue;
      const float sum = p.bias == nullptr ? sums[t][i] : sums[t][i] + p.bias[n];
      if (group.f32[which]) {
        store(static_cast<float*>(p.c) + base + m * p.ldc + n, sum);
      } else {
        store(static_cast<bf16*>(p.c) + base + m * p.ldc + n, sum);
      }
    }
  }
}

// Of products that wgmma takes, those that are faster here, as measured on an H200: of up to sixteen rows, all whose blocks run at
// once; of more rows, which read the weight again, only those that leave most of the device idle either way. Of sixteen rows of
// all experts together always, as most experts have none.
inline bool few_rows_take(const Product& p, DType a, DType b, bool transpose_a, bool transpose_b) {
  if (a != DType::kBf16 || b != DType::kBf16 || transpose_a || !transpose_b || !wgmma_takes(p, transpose_a, transpose_b)) return false;
  if (p.depth_grouped || p.accumulate) return false;
  if (p.rows_grouped) return p.m <= 16;
  const int64_t blocks = divide_up(p.m, p.m <= 8 ? 8 : 16) * divide_up(p.n, 16) * p.batch;
  const int64_t at_once = p.m <= 8 ? 8 : p.m <= 16 ? 6 : 2;  // on a multiprocessor; the first two fill its shared memory
  return blocks <= at_once * multiprocessors();
}

// Products that few_rows_take, for one launch.
class FewRows {
 public:
  bool add(const Product& p, DType c) {  // false: it does not go with those before
    const int tiles = p.m <= 8 ? 1 : 2;
    if (count_ == FewRowsGroup::kMost || (count_ > 0 && tiles != tiles_)) return false;
    tiles_ = tiles;
    blocks_ += (p.rows_grouped ? p.m : divide_up(p.m, 8 * tiles) * p.batch) * divide_up(p.n, 16);
    group_.products[count_] = p;
    group_.f32[count_] = c == DType::kF32;
    group_.end[count_] = static_cast<int>(blocks_);
    ++count_;
    return true;
  }
  void launch(Stream& stream) const {
    if (blocks_ == 0) return;
    // Half as many blocks want twice as much on its way in each.
    if (tiles_ == 1) {
      blocks_ <= 4 * multiprocessors() ? launch_as<1, 16>(stream) : launch_as<1, 8>(stream);
    } else {
      blocks_ <= 3 * multiprocessors() ? launch_as<2, 16>(stream) : launch_as<2, 8>(stream);
    }
    check_launch("product");
  }

 private:
  template <int kTiles, int kStages>
  void launch_as(Stream& stream) const {
    constexpr int kBytes = kStages * static_cast<int>(sizeof(FewRowsStage<kTiles>));
    allow_shared(few_rows_products<kTiles, kStages>, kBytes);
    few_rows_products<kTiles, kStages><<<static_cast<unsigned>(blocks_), kWarp, kBytes, cuda_stream(stream)>>>(group_);
  }
  FewRowsGroup group_;
  int count_ = 0, tiles_ = 0;
  int64_t blocks_ = 0;
};

}  // namespace slipstream::kernels
