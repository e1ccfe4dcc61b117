#include "kernels/latent_rows/latent_rows.cuh"
#include "kernels/latent_rows/latent_rows.h"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kLanes = 16;  // they have 128 columns of a row, two runs of four each
constexpr int kThreads = 128;

__device__ __forceinline__ bool has_nan(float4 v) { return isnan(v.x) || isnan(v.y) || isnan(v.z) || isnan(v.w); }

// One block a row.
template <class X>
__global__ void __launch_bounds__(kThreads)
    write_latents(Rows<const X> rows, DeviceSequences sequences, DevicePages<e4m3> pages, LatentRow layout, bool whole) {
  const int64_t row = blockIdx.x;
  const int b = sequence_of(sequences.row_begin, sequences.count, row);
  e4m3* const to = pages.row(b, sequences.cached[b] + row - sequences.row_begin[b]);
  const X* const from = rows[row];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int first = 0; first < layout.rank; first += kThreads / kLanes * static_cast<int>(kScaleColumns)) {
    const int column = first + static_cast<int>(threadIdx.x) / kLanes * static_cast<int>(kScaleColumns) + lane * 4;
    float4 values[2];
    float largest = 0x1p-100f;  // infinity where there is a NaN
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      // Of 64 bits: of 32, ptxas 13.0 takes what clamps for a comparison the wrong way round (VIMNMX.RELU's predicate).
      const int64_t count = max(int64_t{0}, min(int64_t{4}, int64_t{layout.rank} - column - run * 64));
      values[run] = load_run(from + column + run * 64, count, whole && count == 4);
      largest = fmaxf(largest, largest_magnitude(values[run]));
      if (has_nan(values[run])) largest = INFINITY;
    }
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    const float scale = rounded<bf16>(largest / kE4m3Largest), inverse = 1.0f / scale;
    if (lane == 0 && column < layout.rank) {
      reinterpret_cast<float*>(to + layout.scales)[column / static_cast<int>(kScaleColumns)] =
          largest < INFINITY ? scale : __uint_as_float(0x7fc00000);
    }
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const uint32_t codes = e4m3_codes(values[run], inverse);
      const int at = column + run * 64;
      if (at + 4 <= layout.rank) {
        *reinterpret_cast<uint32_t*>(to + at) = codes;
      } else {
        for (int n = 0; at + n < layout.rank; ++n) to[at + n].bits = static_cast<uint8_t>(codes >> 8 * n);
      }
    }
  }
  bf16* const ropes = reinterpret_cast<bf16*>(to + layout.ropes);
  for (int i = static_cast<int>(threadIdx.x); i < layout.rope; i += kThreads) {
    store(ropes + i, load(from + layout.rank + i));
  }
}

}  // namespace

template <>
void launch_cuda<LatentWrite>(const LatentWrite& args, Stream& stream) {
  const int64_t rows = args.rows.size(0);
  if (rows == 0) return;
  const LatentRow layout = latent_row(args.rank, args.rows.size(1) - args.rank);
  with_type(args.rows.dtype(), [&](auto x) {
    using X = decltype(x);
    write_latents<X><<<static_cast<unsigned>(rows), kThreads, 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.rows), on_device(args.sequences), on_device<e4m3>(args.store), layout,
        fours(args.rows.slice(1, 0, args.rank / 4 * 4)));
  });
  check_launch("latent_write");
}

}  // namespace slipstream::kernels
