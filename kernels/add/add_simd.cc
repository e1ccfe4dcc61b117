#include "kernels/add/add.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/add/add_simd.cc"
#include <algorithm>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

void add_rows(const Add& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.a.size(1);
  for (int64_t t = begin; t < end; ++t) {
    const float* a = args.a.row(t);
    const float* b = args.b.row(t);
    float* y = args.y.row(t);
    for_lanes(hidden, [&](int64_t i, auto chunk)
                          HWY_ATTR { chunk.store(add(chunk.load(a + i), chunk.load(b + i)), y + i); });
  }
}

// y[h] += x[0, h] + x[1, h] + ... for the `columns` (at most 16 * Vectors) at x and y, the sums in registers.
template <int Vectors>
void sum_columns(const float* x, int64_t stride, int64_t tokens, int64_t columns, float* y) {
  Lanes sums[Vectors];
  const int64_t last = columns - (Vectors - 1) * kLanes;  // columns of the last vector
  const auto load_vector = [&](const float* from, int v) HWY_ATTR {
    return v == Vectors - 1 && last != kLanes ? load_first(from + v * kLanes, last) : load(from + v * kLanes);
  };
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) sums[v] = load_vector(y, v);
  for (int64_t t = 0; t < tokens; ++t, x += stride) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[v] = add(sums[v], load_vector(x, v));
  }
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) {
    if (v == Vectors - 1 && last != kLanes) {
      store_first(sums[v], y + v * kLanes, last);
    } else {
      store(sums[v], y + v * kLanes);
    }
  }
}

// Each thread owns columns and walks the tokens in order, so no sum is ever shared.
void column_sum(const ColumnSum& args, int64_t begin, int64_t end) {
  constexpr int kVectors = 4;
  const float* x = args.x.f32();
  float* y = args.y.f32();
  const int64_t tokens = args.x.size(0), stride = args.x.stride(0);
  int64_t h = begin;
  for (; h + kVectors * kLanes <= end; h += kVectors * kLanes) {
    sum_columns<kVectors>(x + h, stride, tokens, kVectors * kLanes, y + h);
  }
  for (; h < end; h += kLanes) sum_columns<1>(x + h, stride, tokens, std::min(kLanes, end - h), y + h);
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(add_rows);
HWY_EXPORT(column_sum);

namespace {
constexpr int64_t kGrainValues = 32768;  // about 5 us of work: below that, waking a thread costs more
}

void launch(const Add& args, Stream& stream) {
  CHECK_OK(validate(args));
  const int64_t grain = kGrainValues / (args.a.size(1) + 1) + 1;
  stream.parallel_for(args.a.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(add_rows)(args, begin, end);
  });
}

void launch(const ColumnSum& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (args.x.size(0) == 0) return;
  constexpr int64_t kStep = 64;  // columns that a thread sums side by side
  const int64_t grain = std::max<int64_t>(kGrainValues / args.x.size(0) / kStep, 1) * kStep;
  stream.parallel_for(args.x.size(1), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(column_sum)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
