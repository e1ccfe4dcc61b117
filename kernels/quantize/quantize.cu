#include "kernels/cuda/device.cuh"
#include "kernels/cuda/e4m3.cuh"
#include "kernels/launch_cuda.h"
#include "kernels/quantize/quantize.h"

namespace slipstream::kernels {
namespace {

constexpr int kLanes = 16;  // they have 128 columns of a row, two runs of four each

struct Arguments {
  const void* x;
  uint8_t* codes;
  float* scales;
  int64_t rows, columns;
  int64_t x_stride, codes_stride, scales_stride;  // of rows
  int64_t x_expert, codes_expert, scales_expert;  // of the leading dimension
  bool fast_x, fast_codes;                        // runs of four are aligned
};

// A thread block has one block of 128 x 128, several rows at once, or as many blocks of one row as sixteens
// of lanes.
template <class X, int kBlockRows, int kThreads>
__global__ void __launch_bounds__(kThreads) quantize(const Arguments args) {
  constexpr bool kOneBlock = kBlockRows > 1;
  constexpr int kRowsAtOnce = kOneBlock ? kThreads / kLanes : 1, kPasses = kBlockRows / kRowsAtOnce;
  const int part = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t i = blockIdx.x,
                j = kOneBlock ? blockIdx.y : blockIdx.y * (kThreads / kLanes) + part;  // of the scales
  const int64_t row0 = i * kBlockRows + (kOneBlock ? part : 0);
  const int64_t column = j * kScaleColumns + threadIdx.x % kLanes * 4, expert = blockIdx.z;
  const X* const x = static_cast<const X*>(args.x) + expert * args.x_expert;
  const auto count = [&](int pass, int run) {  // of the run's values, how many exist
    const int64_t left = args.columns - column - run * 64;
    return row0 + pass * kRowsAtOnce < args.rows ? max(int64_t{0}, min(int64_t{4}, left)) : 0;
  };
  float4 values[kPasses][2];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const int64_t exist = count(pass, run);
      const X* const from = x + (row0 + pass * kRowsAtOnce) * args.x_stride + column + run * 64;
      values[pass][run] = load_run(from, exist, args.fast_x && exist == 4);
    }
  }
  float largest = 0x1p-100f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass)
    largest = fmaxf(largest, fmaxf(largest_magnitude(values[pass][0]), largest_magnitude(values[pass][1])));
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  if constexpr (kOneBlock) largest = block_max(largest);

  const float inverse = kE4m3Largest / largest;
  if (threadIdx.x % (kOneBlock ? kThreads : kLanes) == 0 && column < args.columns)
    args.scales[expert * args.scales_expert + i * args.scales_stride + j] = largest / kE4m3Largest;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const int64_t exist = count(pass, run);
      uint8_t* const to = args.codes + expert * args.codes_expert +
                          (row0 + pass * kRowsAtOnce) * args.codes_stride + column + run * 64;
      const uint32_t codes = e4m3_codes(values[pass][run], inverse);
      if (args.fast_codes && exist == 4) {
        *reinterpret_cast<uint32_t*>(to) = codes;
      } else {
        for (int n = 0; n < exist; ++n) to[n] = static_cast<uint8_t>(codes >> 8 * n);
      }
    }
  }
}

}  // namespace

template <>
void launch_cuda<Quantize>(const Quantize& args, Stream& stream) {
  const int outer = args.x.rank() - 2;
  const int64_t experts = outer == 1 ? args.x.size(0) : 1;
  const int64_t blocks_down = args.scales.size(outer), blocks_across = args.scales.size(outer + 1);
  if (blocks_down == 0 || blocks_across == 0 || experts == 0) return;
  const auto stride = [&](const Tensor& t) { return outer == 1 ? t.stride(0) : 0; };
  const Arguments arguments{.x = args.x.raw(),
                            .codes = static_cast<uint8_t*>(args.codes.raw()),
                            .scales = args.scales.f32(),
                            .rows = args.x.size(outer),
                            .columns = args.x.size(outer + 1),
                            .x_stride = args.x.stride(outer),
                            .codes_stride = args.codes.stride(outer),
                            .scales_stride = args.scales.stride(outer),
                            .x_expert = stride(args.x),
                            .codes_expert = stride(args.codes),
                            .scales_expert = stride(args.scales),
                            .fast_x = fours(args.x),
                            .fast_codes = fours(args.codes)};
  const bool rows_alone = args.block_rows == 1;
  constexpr int kRowThreads = 256, kBlockThreads = 512;
  const dim3 grid(
      static_cast<unsigned>(blocks_down),
      static_cast<unsigned>(rows_alone ? divide_up(blocks_across, kRowThreads / kLanes) : blocks_across),
      static_cast<unsigned>(experts));
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    if (rows_alone) {
      quantize<X, 1, kRowThreads><<<grid, kRowThreads, 0, cuda_stream(stream)>>>(arguments);
    } else {
      quantize<X, 128, kBlockThreads><<<grid, kBlockThreads, 0, cuda_stream(stream)>>>(arguments);
    }
  });
  check_launch("quantize");
}

}  // namespace slipstream::kernels
