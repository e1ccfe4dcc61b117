#include "kernels/grouped_gemm/grouped_gemm.h"

#include "kernels/cuda/few_rows.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {

template <>
void launch_cuda<GroupedGemm>(const GroupedGemm& args, Stream& stream) {
  const Product p{.a = args.x.raw(), .b = args.w.raw(), .c = args.y.raw(), .m = args.x.size(0), .n = args.y.size(1),
                  .k = args.x.size(1), .lda = args.x.stride(0), .ldb = args.w.stride(1), .ldc = args.y.stride(0),
                  .batch = args.w.size(0), .stride_b = args.w.stride(0), .row_begin = args.row_begin.i32(),
                  .rows_grouped = true, .fast_a = eights(args.x), .fast_b = eights(args.w), .fast_c = eights(args.y)};
  FewRows small;
  if (few_rows_take(p, args.x.dtype(), args.w.dtype(), false, args.transpose_w) && small.add(p, args.y.dtype())) return small.launch(stream);
  launch_product(p, args.x.dtype(), args.w.dtype(), args.y.dtype(), false, args.transpose_w, stream);
}

// dw[e] [N, K] += dyᵀ x: the sum runs over the expert's rows.
template <>
void launch_cuda<GroupedWeightGrad>(const GroupedWeightGrad& args, Stream& stream) {
  const Product p{.a = args.dy.raw(), .b = args.x.raw(), .c = args.dw.raw(), .m = args.dy.size(1), .n = args.x.size(1),
                  .k = args.x.size(0), .lda = args.dy.stride(0), .ldb = args.x.stride(0), .ldc = args.dw.stride(1),
                  .batch = args.dw.size(0), .stride_c = args.dw.stride(0), .row_begin = args.row_begin.i32(),
                  .depth_grouped = true, .accumulate = true, .fast_a = eights(args.dy), .fast_b = eights(args.x),
                  .fast_c = eights(args.dw)};
  launch_product(p, args.dy.dtype(), args.x.dtype(), args.dw.dtype(), true, false, stream);
}

}  // namespace slipstream::kernels
