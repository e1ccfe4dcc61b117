#include "kernels/add/add.h"

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/row_values.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kRuns = 2;

template <class X>
__global__ void __launch_bounds__(kPartThreads) add_rows(Rows<const X> a, Rows<const X> b, Rows<X> y, int width, bool whole) {
  const int64_t row = blockIdx.x;
  Four<X> u[kRuns], v[kRuns];  // all read before any is written: y may be a or b
  for_part<kRuns>(width, [&](int r, int i) {
    u[r] = load_four(a[row] + i, width - i, whole), v[r] = load_four(b[row] + i, width - i, whole);
  });
  for_part<kRuns>(width, [&](int r, int i) {
    const float4 p = u[r].values(), q = v[r].values();
    store_run(y[row] + i, {p.x + q.x, p.y + q.y, p.z + q.z, p.w + q.w}, width - i, whole);
  });
}

template <class X>
void sum_columns(const ColumnSum& args, Stream& stream) {
  const Rows<const X> x = rows_of<const X>(args.x);
  add_column_sums([=] __device__(int64_t t, int64_t i) { return load(x[t] + i); }, args.x.size(0), args.x.size(1),
                  args.y.f32(), stream);
}

}  // namespace

template <>
void launch_cuda<Add>(const Add& args, Stream& stream) {
  const int64_t rows = args.a.size(0), width = args.a.size(1);
  if (rows * width == 0) return;
  const bool whole = fours(args.a) && fours(args.b) && fours(args.y);
  with_type(args.a.dtype(), [&](auto x) {
    using X = decltype(x);
    add_rows<X><<<part_grid<kRuns>(rows, width), kPartThreads, 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.a), rows_of<const X>(args.b), rows_of<X>(args.y), static_cast<int>(width), whole);
  });
  check_launch("add");
}

template <>
void launch_cuda<ColumnSum>(const ColumnSum& args, Stream& stream) {
  with_type(args.x.dtype(), [&](auto x) { sum_columns<decltype(x)>(args, stream); });
}

}  // namespace slipstream::kernels
