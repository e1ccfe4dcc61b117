// y[h] += sum over rows of a value: gradients of norms' weights and of biases, with no atomics. Rows are cut into pieces, a
// function of their number alone; within a piece eight lanes of rows are added ascending and then together, pieces ascending.
#pragma once

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

constexpr int kColumnSumLanes = 8;
constexpr int64_t kColumnSumPieces = 64;

template <class F>
__global__ void column_sum_pieces(F value, int64_t rows, int64_t columns, int64_t piece, float* partial) {
  __shared__ float lanes[kColumnSumLanes][kWarp];
  const int64_t column = int64_t{blockIdx.x} * kWarp + threadIdx.x;
  const int64_t begin = blockIdx.y * piece, end = min(begin + piece, rows);
  float sum = 0.0f;
  if (column < columns) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kColumnSumLanes) sum += value(row, column);
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int lane = 1; lane < kColumnSumLanes; ++lane) sum += lanes[lane][threadIdx.x];
  partial[blockIdx.y * columns + column] = sum;
}

static __global__ void column_sum_total(const float* partial, int64_t pieces, int64_t columns, float* y) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0.0f;
  for (int64_t piece = 0; piece < pieces; ++piece) sum += partial[piece * columns + column];
  y[column] += sum;
}

// value(row, column) on the device. y [columns].
template <class F>
void add_column_sums(F value, int64_t rows, int64_t columns, float* y, Stream& stream) {
  if (rows == 0 || columns == 0) return;
  const ArenaScope scope(stream.workspace());
  const int64_t piece = divide_up(divide_up(rows, kColumnSumPieces), kColumnSumLanes) * kColumnSumLanes;
  const int64_t pieces = divide_up(rows, piece);
  float* const partial = stream.workspace().alloc(DType::kF32, {pieces, columns}).f32();
  const dim3 grid(static_cast<unsigned>(divide_up(columns, kWarp)), static_cast<unsigned>(pieces));
  column_sum_pieces<<<grid, dim3(kWarp, kColumnSumLanes), 0, cuda_stream(stream)>>>(value, rows, columns, piece, partial);
  column_sum_total<<<static_cast<unsigned>(divide_up(columns, 128)), 128, 0, cuda_stream(stream)>>>(partial, pieces,
                                                                                                  columns, y);
  check_launch("column sums");
}

}  // namespace slipstream::kernels
