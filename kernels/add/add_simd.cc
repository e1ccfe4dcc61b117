#include "kernels/add/add.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/add/add_simd.cc"
#include <algorithm>

#include "hwy/foreach_target.h"
#include "kernels/simd/column_sums-inl.h"

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

void column_sum(const ColumnSum& args, int64_t begin, int64_t end) {
  const float* x = args.x.f32();
  const int64_t stride = args.x.stride(0);
  add_column_sums(args.x.size(0), begin, end, args.y.f32(),
                  [&](const Lanes& sum, int64_t t, int64_t h, auto chunk)
                      HWY_ATTR { return add(sum, chunk.load(x + t * stride + h)); });
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(add_rows);
HWY_EXPORT(column_sum);

namespace {
constexpr int64_t kAddedValues = 32768;  // of a task: little more than copying
}

void launch(const Add& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.a.size(1), kAddedValues);
  stream.parallel_for(args.a.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(add_rows)(args, begin, end);
  });
}

void launch(const ColumnSum& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  if (args.x.size(0) == 0) return;
  constexpr int64_t kStep = 64;  // columns that a thread sums side by side
  const int64_t grain = std::max<int64_t>(kAddedValues / args.x.size(0) / kStep, 1) * kStep;
  stream.parallel_for(args.x.size(1), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(column_sum)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
