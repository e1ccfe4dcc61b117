#include "kernels/paged_rows/paged_rows.h"

#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// One block a row.
template <class X, class P>
__global__ void write_rows(Rows<const X> rows, DeviceSequences sequences, DevicePages<P> store_pages, int64_t width,
                           bool whole) {
  const int64_t row = blockIdx.x;
  const int b = sequence_of(sequences.row_begin, sequences.count, row);
  P* const to = store_pages.row(b, sequences.cached[b] + row - sequences.row_begin[b]);
  for_fours(width, [&](int64_t i, int64_t count) {
    store_run(to + i, load_run(rows[row] + i, count, whole), count, whole);
  });
}

}  // namespace

template <>
void launch_cuda<PagedWrite>(const PagedWrite& args, Stream& stream) {
  const int64_t rows = args.rows.size(0), width = args.rows.size(1);
  if (rows == 0) return;
  const bool whole = fours(args.rows) && fours(args.store.pool);
  with_type(args.rows.dtype(), [&](auto x) {
    with_type(args.store.pool.dtype(), [&](auto p) {
      using X = decltype(x);
      using P = decltype(p);
      write_rows<X, P><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
          rows_of<const X>(args.rows), on_device(args.sequences), on_device<P>(args.store), width, whole);
    });
  });
  check_launch("paged_write");
}

}  // namespace slipstream::kernels
