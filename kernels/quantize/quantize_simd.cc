#include <algorithm>

#include "kernels/launch_cuda.h"
#include "kernels/quantize/quantize.h"

namespace slipstream::kernels {

// On the CPU the definition, a thread some rows of blocks: nothing there computes with e4m3 but tests.
void launch(const Quantize& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int outer = args.x.rank() - 2;
  const int64_t rows = args.block_rows, total = args.x.size(outer);
  const int64_t grain = task_rows(rows * args.x.size(outer + 1));
  stream.parallel_for(args.scales.size(outer), grain, [&](int64_t begin, int64_t end, Worker&) {
    const int64_t first = begin * rows, last = std::min(end * rows, total);
    reference(Quantize{args.x.slice(outer, first, last), args.codes.slice(outer, first, last),
                       args.scales.slice(outer, begin, end), rows});
  });
}

}  // namespace slipstream::kernels
