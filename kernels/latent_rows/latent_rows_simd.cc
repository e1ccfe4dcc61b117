#include <algorithm>

#include "kernels/latent_rows/latent_rows.h"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {

// On the CPU the definition, a thread some rows: they are few beside those that attention reads.
void launch(const LatentWrite& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const Sequences& sequences = args.sequences;
  const LatentRow layout = latent_row(args.rank, args.rows.size(1) - args.rank);
  const int32_t* const row_begin = sequences.row_begin.i32();
  stream.parallel_for(args.rows.size(0), task_rows(args.rows.size(1)), [&](int64_t begin, int64_t end, Worker&) {
    // The sequence of row `begin`: the last one that starts at or before it and has rows.
    int64_t b = std::upper_bound(row_begin, row_begin + sequences.count() + 1, begin) - row_begin - 1;
    for (int64_t r = begin; r < end; ++r) {
      while (r >= sequences.end(b)) ++b;
      const int64_t position = sequences.cached_tokens(b) + r - sequences.begin(b);
      write_latent_row(layout, args.rows.row(r), args.store.pool.data<e4m3>() + args.store.offset(b, position));
    }
  });
}

}  // namespace slipstream::kernels
