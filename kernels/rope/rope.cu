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

// A thread turns four pairs of a head. Products and sums are rounded one by one, as in the published models' fp32 code.
template <class X>
__global__ void __launch_bounds__(256) rotate(Heads<X> heads, Rows<const float> cosines, Rows<const float> sines,
                                              unsigned num_heads, unsigned half, unsigned fours, bool interleaved, bool inverse,
                                              bool whole) {
  const unsigned index = blockIdx.x * 256 + threadIdx.x, per_head = (half + 3) / 4;
  if (index >= fours) return;
  const unsigned head_index = index / per_head, row = head_index / num_heads;
  const int i = static_cast<int>(4 * (index % per_head)), count = static_cast<int>(half) - i;
  X* const x = heads.at(row, head_index % num_heads);
  const float4 c = load_run(cosines[row] + i, count, whole);
  float4 s = load_run(sines[row] + i, count, whole);
  if (inverse) s = {-s.x, -s.y, -s.z, -s.w};
  const auto first = [](float a, float b, float cosine, float sine) { return a * cosine - b * sine; };
  const auto second = [](float a, float b, float cosine, float sine) { return b * cosine + a * sine; };
  if (interleaved) {
    X *const low = x + 2 * i, *const high = low + 4;
    const float4 p = load_run(low, 2 * count, whole), q = load_run(high, 2 * count - 4, whole);
    store_run(low, {first(p.x, p.y, c.x, s.x), second(p.x, p.y, c.x, s.x), first(p.z, p.w, c.y, s.y), second(p.z, p.w, c.y, s.y)},
              2 * count, whole);
    store_run(high,
              {first(q.x, q.y, c.z, s.z), second(q.x, q.y, c.z, s.z), first(q.z, q.w, c.w, s.w), second(q.z, q.w, c.w, s.w)},
              2 * count - 4, whole);
  } else {
    X *const low = x + i, *const high = low + half;
    const float4 a = load_run(low, count, whole), b = load_run(high, count, whole);
    store_run(low, {first(a.x, b.x, c.x, s.x), first(a.y, b.y, c.y, s.y), first(a.z, b.z, c.z, s.z), first(a.w, b.w, c.w, s.w)},
              count, whole);
    store_run(high,
              {second(a.x, b.x, c.x, s.x), second(a.y, b.y, c.y, s.y), second(a.z, b.z, c.z, s.z), second(a.w, b.w, c.w, s.w)},
              count, whole);
  }
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
  const int64_t half = args.cos.size(1), runs = args.x.size(0) * args.x.size(1) * divide_up(half, 4);
  if (runs == 0) return;
  CHECK_LT(runs, int64_t{1} << 31);
  const bool whole = half % 4 == 0 && fours(args.x) && fours(args.cos) && fours(args.sin);
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    rotate<X><<<static_cast<unsigned>(divide_up(runs, 256)), 256, 0, cuda_stream(stream)>>>(
        heads_of<X>(args.x), rows_of<const float>(args.cos), rows_of<const float>(args.sin),
        static_cast<unsigned>(args.x.size(1)), static_cast<unsigned>(half), static_cast<unsigned>(runs),
        args.layout == RopeLayout::kInterleaved, args.inverse, whole);
  });
  check_launch("rope");
}

}  // namespace slipstream::kernels
