// y[h] += sum over rows of a value: gradients of norms' weights and of biases, with no atomics. Rows are cut into pieces, a
// function of the numbers of rows and columns alone; within a piece eight lanes of rows are added ascending and then together,
// and the pieces' sums in the same way.
#pragma once

#include <algorithm>

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

constexpr int kColumnSumLanes = 8;
constexpr int64_t kColumnSumBlocks = 2048, kColumnSumPiecesMax = 512;  // few columns want many pieces to fill the device

// Rows [begin, end) of the block's 32 columns; the threads with threadIdx.y == 0 return the sum.
template <class F>
__device__ float column_sum(const F& value, int64_t begin, int64_t end, int64_t column, int64_t columns) {
  __shared__ float lanes[kColumnSumLanes][kWarp];
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kColumnSumLanes) sum += value(row, column);
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0) return 0.0f;
  for (int lane = 1; lane < kColumnSumLanes; ++lane) sum += lanes[lane][threadIdx.x];
  return sum;
}

template <class F>
__global__ void column_sum_pieces(F value, int64_t rows, int64_t columns, int64_t piece, float* partial) {
  const int64_t column = int64_t{blockIdx.x} * kWarp + threadIdx.x, begin = blockIdx.y * piece;
  const float sum = column_sum(value, begin, min(begin + piece, rows), column, columns);
  if (threadIdx.y == 0 && column < columns) partial[blockIdx.y * columns + column] = sum;
}

static __global__ void column_sum_total(const float* partial, int64_t pieces, int64_t columns, float* y) {
  const int64_t column = int64_t{blockIdx.x} * kWarp + threadIdx.x;
  const auto value = [=](int64_t piece, int64_t of) { return partial[piece * columns + of]; };
  const float sum = column_sum(value, 0, pieces, column, columns);
  if (threadIdx.y == 0 && column < columns) y[column] += sum;
}

// y[column] += the pieces' sums [pieces, columns].
static inline void add_pieces(const float* partial, int64_t pieces, int64_t columns, float* y, Stream& stream) {
  const unsigned blocks = static_cast<unsigned>(divide_up(columns, kWarp));
  column_sum_total<<<blocks, dim3(kWarp, kColumnSumLanes), 0, cuda_stream(stream)>>>(partial, pieces, columns, y);
}

// value(row, column) on the device. y [columns].
template <class F>
void add_column_sums(F value, int64_t rows, int64_t columns, float* y, Stream& stream) {
  if (rows == 0 || columns == 0) return;
  const ArenaScope scope(stream.workspace());
  const int64_t blocks = divide_up(columns, kWarp);
  const int64_t most = std::clamp<int64_t>(divide_up(kColumnSumBlocks, blocks), 64, kColumnSumPiecesMax);
  const int64_t piece = divide_up(divide_up(rows, most), kColumnSumLanes) * kColumnSumLanes;
  const int64_t pieces = divide_up(rows, piece);
  float* const partial = stream.workspace().alloc(DType::kF32, {pieces, columns}).f32();
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(pieces)), threads(kWarp, kColumnSumLanes);
  column_sum_pieces<<<grid, threads, 0, cuda_stream(stream)>>>(value, rows, columns, piece, partial);
  add_pieces(partial, pieces, columns, y, stream);
  check_launch("column sums");
}

}  // namespace slipstream::kernels
