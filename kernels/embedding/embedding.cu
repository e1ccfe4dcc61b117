#include "kernels/embedding/embedding.h"

#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

template <class W, class X>
__global__ void embed_rows(const int32_t* ids, Rows<const W> table, int64_t vocab, Rows<X> y, int64_t width,
                           bool whole) {
  const int64_t row = blockIdx.x, id = ids[row];
  if (id < 0 || id >= vocab) __trap();
  for_fours(width, [&](int64_t i, int64_t count) {
    store_run(y[row] + i, load_run(table[id] + i, count, whole), count, whole);
  });
}

// The block of a token's first occurrence adds the rows of all of them, ascending; the others have nothing to do.
template <class X>
__global__ void embedding_backward(const int32_t* ids, Rows<const X> dy, Rows<float> dtable, int64_t tokens,
                                   int64_t vocab, int64_t width) {
  const int64_t first = blockIdx.x;
  const int32_t id = ids[first];
  if (id < 0 || id >= vocab) __trap();
  bool earlier = false;
  for (int64_t t = threadIdx.x; t < first; t += blockDim.x) earlier = earlier || ids[t] == id;
  if (__syncthreads_or(earlier)) return;
  __shared__ bool same[256];
  for (int64_t begin = first; begin < tokens; begin += blockDim.x) {
    const int64_t t = begin + threadIdx.x;
    same[threadIdx.x] = t < tokens && ids[t] == id;
    if (__syncthreads_or(same[threadIdx.x])) {
      for (int64_t j = 0; j < blockDim.x; ++j) {
        if (!same[j]) continue;
        for (int64_t i = threadIdx.x; i < width; i += blockDim.x) dtable[id][i] += load(dy[begin + j] + i);
      }
    }
    __syncthreads();  // `same` has been read
  }
}

}  // namespace

template <>
void launch_cuda<Embedding>(const Embedding& args, Stream& stream) {
  const int64_t rows = args.ids.size(0), width = args.table.size(1);
  if (rows == 0) return;
  const bool whole = fours(args.table) && fours(args.y);
  with_type(args.table.dtype(), [&](auto w) {
    with_type(args.y.dtype(), [&](auto x) {
      using W = decltype(w);
      using X = decltype(x);
      embed_rows<W, X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
          args.ids.i32(), rows_of<const W>(args.table), args.table.size(0), rows_of<X>(args.y), width, whole);
    });
  });
  check_launch("embedding");
}

template <>
void launch_cuda<EmbeddingBackward>(const EmbeddingBackward& args, Stream& stream) {
  const int64_t rows = args.ids.size(0);
  if (rows == 0) return;
  with_type(args.dy.dtype(), [&](auto x) {
    using X = decltype(x);
    embedding_backward<X><<<static_cast<unsigned>(rows), 256, 0, cuda_stream(stream)>>>(
        args.ids.i32(), rows_of<const X>(args.dy), rows_of<float>(args.dtable), rows, args.dtable.size(0),
        args.dy.size(1));
  });
  check_launch("embedding_backward");
}

}  // namespace slipstream::kernels
