#include "kernels/copy/copy.h"

#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// A thread takes four values of one head.
template <class X, class Y>
__global__ void copy_heads(Heads<const X> from, Heads<Y> to, int64_t heads, int64_t width, int64_t runs, bool whole) {
  const int64_t per_head = (width + 3) / 4;
  const int64_t run = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (run >= runs) return;
  const int64_t head = run / per_head, i = run % per_head * 4;
  const X* const source = from.at(head / heads, head % heads) + i;
  store_run(to.at(head / heads, head % heads) + i, load_run(source, width - i, whole), width - i, whole);
}

}  // namespace

template <>
void launch_cuda<Copy>(const Copy& args, Stream& stream) {
  const int64_t heads = args.from.size(1), width = args.from.size(2);
  const int64_t runs = args.from.size(0) * heads * divide_up(width, 4);
  if (runs == 0) return;
  const bool whole = fours(args.from) && fours(args.to);
  with_type(args.from.dtype(), [&](auto x) {
    with_type(args.to.dtype(), [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      copy_heads<X, Y><<<static_cast<unsigned>(divide_up(runs, 256)), 256, 0, cuda_stream(stream)>>>(
          heads_of<const X>(args.from), heads_of<Y>(args.to), heads, width, runs, whole);
    });
  });
  check_launch("copy");
}

}  // namespace slipstream::kernels
