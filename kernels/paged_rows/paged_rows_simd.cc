#include "kernels/paged_rows/paged_rows.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/paged_rows/paged_rows_simd.cc"
#include <algorithm>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

template <class T>
void write_rows(const PagedWrite& args, int64_t begin, int64_t end) {
  const int64_t width = args.rows.size(1);
  const Sequences& sequences = args.sequences;
  const int32_t* row_begin = sequences.row_begin.i32();
  T* pool = args.store.pool.data<T>();
  // The sequence of row `begin`: the last one that starts at or before it and has rows.
  int64_t b = std::upper_bound(row_begin, row_begin + sequences.count() + 1, begin) - row_begin - 1;
  for (int64_t r = begin; r < end; ++r) {
    while (r >= sequences.end(b)) ++b;
    const float* from = args.rows.row(r);
    T* to = pool + args.store.offset(b, sequences.cached_tokens(b) + r - sequences.begin(b));
    for_lanes(width, [&](int64_t i, auto chunk) HWY_ATTR { chunk.store(chunk.load(from + i), to + i); });
  }
}

void paged_write_rows(const PagedWrite& args, int64_t begin, int64_t end) {
  if (args.store.pool.dtype() == DType::kF32) {
    write_rows<float>(args, begin, end);
  } else {
    write_rows<bf16>(args, begin, end);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(paged_write_rows);

namespace {
constexpr int64_t kCopiedValues = 32768;
}

void launch(const PagedWrite& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.rows.size(1), kCopiedValues);
  stream.parallel_for(args.rows.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(paged_write_rows)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
