#include "kernels/kda/kda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/kda/kda_simd.cc"
#include <algorithm>

#include "hwy/foreach_target.h"
#include "kernels/kda/kda_backward-inl.h"
#include "kernels/kda/kda_forward-inl.h"
#include "kernels/launch_cuda.h"

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(kda_forward_items);
HWY_EXPORT(kda_recurrent_items);
HWY_EXPORT(kda_backward_items);

namespace {

// Heads a thread takes at once: a head of one row is about a microsecond, and waking a thread takes a few.
int64_t item_grain(int64_t rows, int64_t sequences) { return rows <= 2 * sequences ? 4 : 1; }

}  // namespace

void launch(const Kda& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t sequences = args.sequences.count();
  const int64_t grain = item_grain(args.q.size(0), sequences);
  stream.parallel_for(sequences * args.q.size(1), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(kda_forward_items)(args, begin, end, worker);
  });
}

void launch(const KdaBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.sequences.count() * args.q.size(1), 1,
                      [&](int64_t begin, int64_t end, Worker& worker) {
                        HWY_DYNAMIC_DISPATCH(kda_backward_items)(args, begin, end, worker);
                      });
}

void launch(const KdaRecurrent& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t sequences = args.sequences.count();
  const int64_t grain = item_grain(args.q.size(0), sequences);
  stream.parallel_for(sequences * args.q.size(1), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(kda_recurrent_items)(args, begin, end, worker);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
