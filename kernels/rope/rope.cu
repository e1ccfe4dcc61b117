#include "kernels/rope/rope.h"

#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// fp32 step by step, each function rounded once from double: at position 10^6 an angle rounded otherwise is another rotation.
__global__ void rope_table(const int32_t* positions, Rows<float> cosines, Rows<float> sines, int64_t half,
                           double theta) {
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(2 * half);
    const float power = static_cast<float>(pow(static_cast<double>(static_cast<float>(theta)), static_cast<double>(exponent)));
    const float angle = static_cast<float>(positions[row]) * (1.0f / power);
    cosines[row][i] = static_cast<float>(cos(static_cast<double>(angle)));
    sines[row][i] = static_cast<float>(sin(static_cast<double>(angle)));
  }
}

// A thread turns one pair. Products and sums are rounded one by one, as in the published models' fp32 code.
template <class X>
__global__ void rotate(Heads<X> heads, Rows<const float> cosines, Rows<const float> sines, int64_t num_heads,
                       int64_t half, int64_t pairs, bool interleaved, bool inverse) {
  const int64_t pair = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (pair >= pairs) return;
  const int64_t i = pair % half, head = pair / half % num_heads, row = pair / half / num_heads;
  X* const x = heads.at(row, head);
  X* const first = x + (interleaved ? 2 * i : i);
  X* const second = x + (interleaved ? 2 * i + 1 : i + half);
  const float a = load(first), b = load(second), c = cosines[row][i], s = inverse ? -sines[row][i] : sines[row][i];
  store(first, a * c - b * s);
  store(second, b * c + a * s);
}

}  // namespace

template <>
void launch_cuda<RopeTable>(const RopeTable& args, Stream& stream) {
  const int64_t rows = args.positions.size(0);
  if (rows == 0) return;
  rope_table<<<static_cast<unsigned>(rows), 32, 0, cuda_stream(stream)>>>(
      args.positions.i32(), rows_of<float>(args.cos), rows_of<float>(args.sin), args.cos.size(1), args.theta);
  check_launch("rope_table");
}

template <>
void launch_cuda<Rope>(const Rope& args, Stream& stream) {
  const int64_t half = args.cos.size(1), pairs = args.x.size(0) * args.x.size(1) * half;
  if (pairs == 0) return;
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    rotate<X><<<static_cast<unsigned>(divide_up(pairs, 256)), 256, 0, cuda_stream(stream)>>>(
        heads_of<X>(args.x), rows_of<const float>(args.cos), rows_of<const float>(args.sin), args.x.size(1), half, pairs,
        args.layout == RopeLayout::kInterleaved, args.inverse);
  });
  check_launch("rope");
}

}  // namespace slipstream::kernels
