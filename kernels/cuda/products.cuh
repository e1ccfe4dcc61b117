// The tiles of Gemm and GroupedGemm. Each element of c is one chain over ascending k: of fused multiply-adds in f32, started
// at 0 or at c, where everything is f32; or of the tensor cores' steps of sixteen k. Tiles only choose which chains run
// side by side: rows of a tile do not meet, so the bits do not depend on M, on the tile or on the other rows.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace slipstream::kernels {

// c[m, n] = sum over k of a(m, k) b(k, n), (+ c), (+ bias[n]). Strides in elements.
struct Product {
  const void* a;
  const void* b;
  void* c;
  const float* bias = nullptr;
  int64_t m, n, k;
  int64_t lda, ldb, ldc;                         // of the stored matrices' rows
  int64_t batch = 1, stride_a = 0, stride_b = 0, stride_c = 0;  // as many products; or one an expert
  // Rows of an expert: [row_begin[e], row_begin[e+1]) of a and c when `rows_grouped`, of the sums (k) when `depth_grouped`.
  const int32_t* row_begin = nullptr;
  bool rows_grouped = false, depth_grouped = false;
  bool accumulate = false;
  bool fast_a = false, fast_b = false, fast_c = false;  // rows of whole 16-byte pieces
  // Of e4m3 factors: of each row of a and 128 k; of 128 rows of b and 128 k.
  const float* scales_a = nullptr;
  const float* scales_b = nullptr;
  int64_t ld_scales_a = 0, ld_scales_b = 0, stride_scales_b = 0;
};

// What one block works on: its tile's product, with pointers moved there.
struct Tile {
  int64_t batch;       // of a, b and c; or the expert
  int64_t row_offset;  // added to rows of a and c (rows_grouped) or to the summed rows (depth_grouped)
  int64_t m, k;        // of the product
  int64_t m0, n0;      // first row and column
};

// The block's tile; false: nothing to do. With rows_grouped blockIdx.y counts tiles of the experts' rows, each rounded up.
template <int kRows, int kColumns>
__device__ bool find_tile(const Product& p, Tile& tile) {
  tile = {blockIdx.z, 0, p.m, p.k, int64_t{blockIdx.y} * kRows, int64_t{blockIdx.x} * kColumns};
  if (p.depth_grouped) {
    tile.row_offset = p.row_begin[blockIdx.z];
    tile.k = p.row_begin[blockIdx.z + 1] - tile.row_offset;
  }
  if (!p.rows_grouped) return true;
  // Whose the tile is: experts 32 at a time, a running sum over the lanes of each warp. All warps find the same.
  const int lane = threadIdx.x % kWarp;
  int64_t before = 0;
  for (int64_t base = 0; base < p.batch; base += kWarp) {
    const int64_t e = base + lane;
    const int rows = e < p.batch ? p.row_begin[e + 1] - p.row_begin[e] : 0;
    const int tiles = (rows + kRows - 1) / kRows;
    int sum = tiles;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    const unsigned found = __ballot_sync(0xffffffffu, before + sum > int64_t{blockIdx.y});
    if (found != 0) {
      const int owner = __ffs(static_cast<int>(found)) - 1;
      const int first = __shfl_sync(0xffffffffu, sum - tiles, owner);
      tile.batch = base + owner;
      tile.row_offset = p.row_begin[tile.batch];
      tile.m = p.row_begin[tile.batch + 1] - tile.row_offset;
      tile.m0 = (int64_t{blockIdx.y} - before - first) * kRows;
      return true;
    }
    before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
  }
  return false;
}

// Where the tile's matrices begin.
template <class A, class B, class C>
struct TileOperands {
  const A* a;
  const B* b;
  C* c;
};
template <class A, class B, class C>
__device__ __forceinline__ TileOperands<A, B, C> operands_of(const Product& p, const Tile& tile) {
  const int64_t batch_a = p.rows_grouped || p.depth_grouped ? 0 : tile.batch * p.stride_a;
  const int64_t batch_b = p.depth_grouped ? 0 : tile.batch * p.stride_b;
  const int64_t batch_c = p.rows_grouped ? 0 : tile.batch * p.stride_c;
  return {static_cast<const A*>(p.a) + batch_a + tile.row_offset * p.lda,
          static_cast<const B*>(p.b) + batch_b + (p.depth_grouped ? tile.row_offset * p.ldb : 0),
          static_cast<C*>(p.c) + batch_c + (p.rows_grouped ? tile.row_offset * p.ldc : 0)};
}

// --- f32 chains ---------------------------------------------------------------------------------

constexpr int kScalarTile = 64, kScalarDepth = 16, kScalarThreads = 256;

inline __global__ void __launch_bounds__(kScalarThreads) scalar_product(Product p, bool transpose_a, bool transpose_b) {
  __shared__ float as[kScalarDepth][kScalarTile + 4];
  __shared__ float bs[kScalarDepth][kScalarTile + 4];
  Tile tile;
  if (!find_tile<kScalarTile, kScalarTile>(p, tile) || (tile.k == 0 && p.accumulate)) return;
  const auto [a, b, c] = operands_of<float, float, float>(p, tile);

  // 64 x 16 values a matrix, four a thread. Neighbouring threads read along the stored rows.
  const auto load_a = [&](int64_t k0) {
    for (int i = threadIdx.x; i < kScalarTile * kScalarDepth; i += kScalarThreads) {
      const int m = transpose_a ? i % kScalarTile : i / kScalarDepth;
      const int k = transpose_a ? i / kScalarTile : i % kScalarDepth;
      const int64_t row = tile.m0 + m, depth = k0 + k;
      as[k][m] = row < tile.m && depth < tile.k ? load(transpose_a ? a + depth * p.lda + row : a + row * p.lda + depth)
                                                : 0.0f;
    }
  };
  const auto load_b = [&](int64_t k0) {
    for (int i = threadIdx.x; i < kScalarTile * kScalarDepth; i += kScalarThreads) {
      const int n = transpose_b ? i / kScalarDepth : i % kScalarTile;
      const int k = transpose_b ? i % kScalarDepth : i / kScalarTile;
      const int64_t column = tile.n0 + n, depth = k0 + k;
      bs[k][n] = column < p.n && depth < tile.k
                     ? load(transpose_b ? b + column * p.ldb + depth : b + depth * p.ldb + column)
                     : 0.0f;
    }
  };

  const int row0 = threadIdx.x / 16 * 4, column0 = threadIdx.x % 16 * 4;
  float sums[4][4];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int64_t row = tile.m0 + row0 + i, column = tile.n0 + column0 + j;
      sums[i][j] = p.accumulate && row < tile.m && column < p.n ? load(c + row * p.ldc + column) : 0.0f;
    }
  }
  for (int64_t k0 = 0; k0 < tile.k; k0 += kScalarDepth) {
    load_a(k0);
    load_b(k0);
    __syncthreads();
    // Zeros beyond K would turn a sum of -0 into 0: the chain ends where K does.
    const int depth = static_cast<int>(min(int64_t{kScalarDepth}, tile.k - k0));
    for (int k = 0; k < depth; ++k) {
      const float4 av = *reinterpret_cast<const float4*>(&as[k][row0]);
      const float4 bv = *reinterpret_cast<const float4*>(&bs[k][column0]);
      const float x[4] = {av.x, av.y, av.z, av.w}, y[4] = {bv.x, bv.y, bv.z, bv.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int64_t row = tile.m0 + row0 + i, column = tile.n0 + column0 + j;
      if (row >= tile.m || column >= p.n) continue;
      store(c + row * p.ldc + column, p.bias == nullptr ? sums[i][j] : sums[i][j] + p.bias[column]);
    }
  }
}

// --- bf16 factors on the tensor cores ---------------------------------------------------------------------------------

// One stored matrix's part of a tile in shared memory: kOuter rows of kInner values (the stored order), padded by 16 bytes
// so that eight rows of an 8 x 8 matrix lie in different banks.
template <int kOuter, int kInner>
struct SharedPart {
  static constexpr int kStride = kInner + 8;
  bf16 values[kOuter * kStride];
  __device__ uint32_t at(int outer, int inner) const { return shared_address(values + outer * kStride + inner); }
};

// What a thread copies of one stored matrix, step after step: pieces of 8 values, whose addresses are made once. The summed
// index k runs along the rows (kDepthInner) or down them; `side` is the other one. Beyond the ends there are zeros.
template <int kOuter, int kInner, bool kDepthInner, int kThreads>
struct PartReader {
  static constexpr int kPieces = kInner / 8, kCount = kOuter * kPieces / kThreads;
  static_assert(kCount * kThreads == kOuter * kPieces);
  static constexpr int kDepth = kDepthInner ? kInner : kOuter;
  const bf16* from[kCount];  // of the next step
  int present[kCount];       // values of a piece that exist along the side
  int64_t advance;
  bool fast;

  __device__ PartReader(const bf16* matrix, int64_t ld, int64_t side0, int64_t side_end, bool fast_) : fast(fast_) {
    advance = kDepthInner ? kDepth : kDepth * ld;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = (threadIdx.x + i * kThreads) / kPieces, piece = (threadIdx.x + i * kThreads) % kPieces * 8;
      const int64_t side = side0 + (kDepthInner ? row : piece);
      const int64_t left = side_end - side;
      present[i] = kDepthInner ? (left > 0 ? 8 : 0) : static_cast<int>(max(int64_t{0}, min(int64_t{8}, left)));
      from[i] = present[i] == 0 ? matrix : matrix + (kDepthInner ? side * ld + piece : row * ld + side);
    }
  }
  // The next step's pieces; k_left: how many k there are from its first one on.
  __device__ void fetch(SharedPart<kOuter, kInner>& part, int64_t k_left) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = (threadIdx.x + i * kThreads) / kPieces, piece = (threadIdx.x + i * kThreads) % kPieces * 8;
      bf16* const to = part.values + row * part.kStride + piece;
      int count = present[i];
      if (k_left < kDepth) {
        const int left = static_cast<int>(k_left) - (kDepthInner ? piece : row);
        count = kDepthInner ? min(count, max(left, 0)) : left > 0 ? count : 0;
      }
      if (fast) {
        copy_async(shared_address(to), from[i], count * 2);
      } else {
        for (int j = 0; j < 8; ++j) to[j] = j < count ? from[i][j] : bf16{0};
      }
      if (count > 0) from[i] += advance;
    }
  }
};

// A warp's sums, fragments of mma from row m0 and column n0 of the tile on: zeros, or c's values where the product accumulates.
template <int kFragmentsM, int kFragmentsN, class C>
struct WarpSums {
  const Product& p;
  const Tile& tile;
  C* c;
  int m0, n0;
  float at[kFragmentsM][kFragmentsN][4];

  __device__ WarpSums(const Product& product, const Tile& tile_, C* c_, int m0_, int n0_)
      : p(product), tile(tile_), c(c_), m0(m0_), n0(n0_) {
    for_all([&](int i, int j, int e) {
      at[i][j][e] = 0.0f;
      if (p.accumulate) element(i, j, e, [&](const C* value, int64_t) { at[i][j][e] = load(value); });
    });
  }
  // Of lane l: rows l / 4 and + 8, columns 2 (l % 4) and + 1.
  template <class F>
  __device__ void element(int i, int j, int e, F&& f) const {
    const int lane = threadIdx.x % kWarp;
    const int64_t row = tile.m0 + m0 + i * 16 + lane / 4 + e / 2 * 8;
    const int64_t column = tile.n0 + n0 + j * 8 + lane % 4 * 2 + e % 2;
    if (row < tile.m && column < p.n) f(c + row * p.ldc + column, column);
  }
  __device__ void store_all() const {
    for_all([&](int i, int j, int e) {
      element(i, j, e, [&](C* to, int64_t column) {
        store(to, p.bias == nullptr ? at[i][j][e] : at[i][j][e] + p.bias[column]);
      });
    });
  }

 private:
  template <class F>
  __device__ __forceinline__ static void for_all(F&& f) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(i, j, e);
      }
    }
  }
};

// kM x kN tiles by warps of kWarpM x kWarpN; 64 k a stage, kStages of them on their way. Few rows are a matter of how many
// bytes of the weight are on their way: small tiles, many stages.
template <int kM_, int kN_, int kWarpM_, int kWarpN_, int kStages_>
struct TileShape {
  static constexpr int kM = kM_, kN = kN_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kDepth = 64, kStages = kStages_;
  static constexpr int kThreads = kM / kWarpM * (kN / kWarpN) * kWarp;
};
using LargeTile = TileShape<128, 128, 64, 32, 3>;
using SmallTile = TileShape<32, 32, 16, 16, 6>;

template <class Shape, bool kTransposeA, bool kTransposeB>
struct ProductStages {
  SharedPart<kTransposeA ? Shape::kDepth : Shape::kM, kTransposeA ? Shape::kM : Shape::kDepth> a[Shape::kStages];
  SharedPart<kTransposeB ? Shape::kN : Shape::kDepth, kTransposeB ? Shape::kDepth : Shape::kN> b[Shape::kStages];
};

template <class Shape, bool kTransposeA, bool kTransposeB, class C>
__global__ void __launch_bounds__(Shape::kThreads) tensor_product(Product p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& stages = *reinterpret_cast<ProductStages<Shape, kTransposeA, kTransposeB>*>(memory);
  Tile tile;
  if (!find_tile<Shape::kM, Shape::kN>(p, tile) || (tile.k == 0 && p.accumulate)) return;
  const auto [a, b, c] = operands_of<bf16, bf16, C>(p, tile);

  PartReader<kTransposeA ? Shape::kDepth : Shape::kM, kTransposeA ? Shape::kM : Shape::kDepth, !kTransposeA,
             Shape::kThreads>
      read_a(a, p.lda, tile.m0, tile.m, p.fast_a);
  PartReader<kTransposeB ? Shape::kN : Shape::kDepth, kTransposeB ? Shape::kDepth : Shape::kN, kTransposeB,
             Shape::kThreads>
      read_b(b, p.ldb, tile.n0, p.n, p.fast_b);
  const auto fetch = [&](int step) {
    const int64_t k_left = tile.k - int64_t{step} * Shape::kDepth;
    if (k_left > 0) {
      const int stage = step % Shape::kStages;
      read_a.fetch(stages.a[stage], k_left);
      read_b.fetch(stages.b[stage], k_left);
    }
    commit_copies();  // an empty group too, so that counting groups counts steps
  };

  constexpr int kFragmentsM = Shape::kWarpM / 16, kFragmentsN = Shape::kWarpN / 8;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warp_m = warp / (Shape::kN / Shape::kWarpN) * Shape::kWarpM;
  const int warp_n = warp % (Shape::kN / Shape::kWarpN) * Shape::kWarpN;
  WarpSums<kFragmentsM, kFragmentsN, C> sums(p, tile, c, warp_m, warp_n);

  const int steps = static_cast<int>((tile.k + Shape::kDepth - 1) / Shape::kDepth);
  for (int step = 0; step < Shape::kStages - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<Shape::kStages - 2>();
    __syncthreads();  // the step's data is there for all, and the stage fetched into next has been read by all
    fetch(step + Shape::kStages - 1);
    const int stage = step % Shape::kStages;
    const auto& as = stages.a[stage];
    const auto& bs = stages.b[stage];
#pragma unroll
    for (int k = 0; k < Shape::kDepth; k += 16) {
      uint32_t af[kFragmentsM][4], bf[kFragmentsN / 2][4];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        const int m = warp_m + i * 16;
        if constexpr (kTransposeA) {  // stored [k, m]: matrices (k, m), (k, m + 8), (k + 8, m), (k + 8, m + 8)
          load_tiles_transposed(af[i], as.at(k + lane / 16 * 8 + lane % 8, m + lane / 8 % 2 * 8));
        } else {  // matrices (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8)
          load_tiles(af[i], as.at(m + lane / 8 % 2 * 8 + lane % 8, k + lane / 16 * 8));
        }
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN / 2; ++j) {  // two fragments of eight columns: (n, k), (n, k + 8), then n + 8
        const int n = warp_n + j * 16;
        if constexpr (kTransposeB) {
          load_tiles(bf[j], bs.at(n + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
        } else {  // stored [k, n]
          load_tiles_transposed(bf[j], bs.at(k + lane / 8 % 2 * 8 + lane % 8, n + lane / 16 * 8));
        }
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
          mma(sums.at[i][j], af[i], bf[j / 2][j % 2 * 2], bf[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  wait_for_copies();
  sums.store_all();
}

// --- Launches ---------------------------------------------------------------------------------------------------------

// Whether a matrix's rows are whole 16-byte pieces: its address, its strides and its rows' length are multiples of 8 values.
// The length too: rows of other lengths are copied between dense and strided tensors, and both must take the same form.
inline bool eights(const Tensor& t) {
  bool aligned = reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 && t.size(t.rank() - 1) % 8 == 0;
  for (int dim = 0; dim + 1 < t.rank(); ++dim) aligned = aligned && t.stride(dim) % 8 == 0;
  return aligned;
}

// rows: an upper bound of the rows per group where they are known on the device alone; tiles: of kRows rows, in all.
template <class Shape, bool kTransposeA, bool kTransposeB, class C>
void launch_tensor_product(const Product& p, int64_t tiles_m, int64_t tiles_z, Stream& stream) {
  using Stages = ProductStages<Shape, kTransposeA, kTransposeB>;
  const auto kernel = tensor_product<Shape, kTransposeA, kTransposeB, C>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Stages)), "product");
  const dim3 grid(static_cast<unsigned>(divide_up(p.n, Shape::kN)), static_cast<unsigned>(tiles_m),
                  static_cast<unsigned>(tiles_z));
  kernel<<<grid, Shape::kThreads, sizeof(Stages), cuda_stream(stream)>>>(p);
}

// Tiles along rows: of each product, or of all experts' rows together, each expert's rounded up.
inline int64_t row_tiles(const Product& p, int64_t tile) {
  return p.rows_grouped ? p.m / tile + p.batch : divide_up(p.m, tile);
}

template <class C>
void tensor_product_as(const Product& p, bool transpose_a, bool transpose_b, Stream& stream) {
  const int64_t rows = p.rows_grouped ? divide_up(p.m, p.batch) : p.m;  // an expert's, on average
  const int64_t z = p.rows_grouped ? 1 : p.batch;
  const auto launch_shape = [&](auto shape) {
    using Shape = decltype(shape);
    const int64_t tiles = row_tiles(p, Shape::kM);
    if (transpose_a) {
      if (transpose_b) return launch_tensor_product<Shape, true, true, C>(p, tiles, z, stream);
      return launch_tensor_product<Shape, true, false, C>(p, tiles, z, stream);
    }
    if (transpose_b) return launch_tensor_product<Shape, false, true, C>(p, tiles, z, stream);
    return launch_tensor_product<Shape, false, false, C>(p, tiles, z, stream);
  };
  // The bits are the same in both shapes: few rows, or a small result, want many small tiles.
  if (rows <= 64 || divide_up(p.m, 128) * divide_up(p.n, 128) * z < 64) {
    launch_shape(SmallTile());
  } else {
    launch_shape(LargeTile());
  }
}

inline void launch_scalar_product(const Product& p, bool transpose_a, bool transpose_b, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(p.n, kScalarTile)), static_cast<unsigned>(row_tiles(p, kScalarTile)),
                  static_cast<unsigned>(p.rows_grouped ? 1 : p.batch));
  scalar_product<<<grid, kScalarThreads, 0, cuda_stream(stream)>>>(p, transpose_a, transpose_b);
}

// Dtypes of the factors and the result.
void launch_product(const Product& p, DType a, DType b, DType c, bool transpose_a, bool transpose_b, Stream& stream);

}  // namespace slipstream::kernels
