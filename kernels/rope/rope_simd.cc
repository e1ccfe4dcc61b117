#include "kernels/rope/rope.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope/rope_simd.cc"
#include <algorithm>
#include <cmath>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// cos and sin of n fp32 angles, evaluated in double: the fp32 result is then the nearest one in all but rare
// cases, and no libm decides it. Arrays hold n rounded up to 8.
void cos_sin(const float* angles, int64_t n, float* cos, float* sin) {
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> narrow;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(wide))) {
    const auto angle = hn::PromoteTo(wide, hn::LoadU(narrow, angles + i));
    hn::StoreU(hn::DemoteTo(narrow, hn::Cos(wide, angle)), narrow, cos + i);
    hn::StoreU(hn::DemoteTo(narrow, hn::Sin(wide, angle)), narrow, sin + i);
  }
}

void rope_table_rows(const RopeTable& args, const float* inverse_frequency, float* scratch, int64_t begin,
                     int64_t end) {
  const int64_t half = args.cos.size(1), padded = (half + 7) / 8 * 8;
  float *angles = scratch, *cos = scratch + padded, *sin = scratch + 2 * padded;
  std::fill(angles, angles + padded, 0.0f);
  for (int64_t t = begin; t < end; ++t) {
    const float position = static_cast<float>(args.positions.i32()[t]);
    for (int64_t i = 0; i < half; ++i) angles[i] = position * inverse_frequency[i];
    cos_sin(angles, half, cos, sin);
    std::copy(cos, cos + half, args.cos.row(t));
    std::copy(sin, sin + half, args.sin.row(t));
  }
}

HWY_INLINE Lanes swap_pairs(const Lanes& x) {
  return map([&](int64_t i) HWY_ATTR { return hn::Shuffle2301(x.part[i]); });
}

// Products and sums are rounded one by one, as in the published models' fp32 code.
void rotate_interleaved(float* x, int64_t dims, const float* cos, const float* signed_sin) {
  for_lanes(dims, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes v = chunk.load(x + i);
    chunk.store(add(mul(v, chunk.load(cos + i)), mul(swap_pairs(v), chunk.load(signed_sin + i))), x + i);
  });
}

void rotate_half_split(float* x, int64_t half, const float* cos, const float* sin) {
  for_lanes(half, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes a = chunk.load(x + i), b = chunk.load(x + half + i);
    const Lanes c = chunk.load(cos + i), s = chunk.load(sin + i);
    chunk.store(sub(mul(a, c), mul(b, s)), x + i);
    chunk.store(add(mul(b, c), mul(a, s)), x + half + i);
  });
}

// scratch: 2 R values, the token's factors spread over the dimensions they multiply, shared by its heads.
void rope_rows(const Rope& args, float* scratch, int64_t begin, int64_t end) {
  const int64_t heads = args.x.size(1), dims = args.x.size(2), head_stride = args.x.stride(1),
                half = dims / 2;
  const float sign = args.inverse ? -1.0f : 1.0f;
  float *cos = scratch, *sin = scratch + dims;
  for (int64_t t = begin; t < end; ++t) {
    const float* cos_row = args.cos.row(t);
    const float* sin_row = args.sin.row(t);
    float* x = args.x.row(t);
    if (args.layout == RopeLayout::kInterleaved) {
      for (int64_t i = 0; i < half; ++i) {
        cos[2 * i] = cos[2 * i + 1] = cos_row[i];
        sin[2 * i + 1] = sign * sin_row[i];
        sin[2 * i] = -sin[2 * i + 1];
      }
      for (int64_t head = 0; head < heads; ++head) rotate_interleaved(x + head * head_stride, dims, cos, sin);
    } else {
      for (int64_t i = 0; i < half; ++i) sin[i] = sign * sin_row[i];
      for (int64_t head = 0; head < heads; ++head)
        rotate_half_split(x + head * head_stride, half, cos_row, sin);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(rope_table_rows);
HWY_EXPORT(rope_rows);

namespace {
constexpr int64_t kTableGrainTokens = 128;  // enough to forget the R/2 powers each range begins with
}  // namespace

void launch(const RopeTable& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t half = args.cos.size(1);
  stream.parallel_for(args.positions.size(0), kTableGrainTokens,
                      [&](int64_t begin, int64_t end, Worker& worker) {
                        float* inverse_frequency = worker.scratch<float>(half);
                        for (int64_t i = 0; i < half; ++i) {
                          const float exponent = static_cast<float>(2 * i) / static_cast<float>(2 * half);
                          const double base = static_cast<float>(args.theta);
                          inverse_frequency[i] = 1.0f / static_cast<float>(std::pow(base, double{exponent}));
                        }
                        float* scratch = worker.scratch<float>(3 * (half + 8));
                        HWY_DYNAMIC_DISPATCH(rope_table_rows)(args, inverse_frequency, scratch, begin, end);
                      });
}

void launch(const Rope& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.x.size(1) * args.x.size(2));
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(rope_rows)(args, worker.scratch<float>(2 * args.x.size(2)), begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
