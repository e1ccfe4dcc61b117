#include "kernels/add/add.h"

#include "kernels/cuda/column_sums.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

template <class X>
__global__ void add_rows(Rows<const X> a, Rows<const X> b, Rows<X> y, int64_t width, bool whole) {
  const int64_t row = blockIdx.x;
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 u = load_run(a[row] + i, count, whole), v = load_run(b[row] + i, count, whole);
    store_run(y[row] + i, {u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w}, count, whole);
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
  if (rows == 0) return;
  const bool whole = fours(args.a) && fours(args.b) && fours(args.y);
  with_type(args.a.dtype(), [&](auto x) {
    using X = decltype(x);
    add_rows<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.a), rows_of<const X>(args.b), rows_of<X>(args.y), width, whole);
  });
  check_launch("add");
}

template <>
void launch_cuda<ColumnSum>(const ColumnSum& args, Stream& stream) {
  with_type(args.x.dtype(), [&](auto x) { sum_columns<decltype(x)>(args, stream); });
}

}  // namespace slipstream::kernels
