#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/e4m3.h"
#include "kernels/launch_cuda.h"
#include "kernels/scaled_gemm/scaled_gemm.h"

namespace slipstream::kernels {
namespace {

template <class Shape>
void launch_shape(const Product& p, bool, bool, Stream& stream) {
  launch_wgmma_product<Shape, false, true>(p, StoreSums<bf16>(), stream);
}

}  // namespace

template <>
void launch_cuda<ScaledGemm>(const ScaledGemm& args, Stream& stream) {
  const bool grouped = args.b.rank() == 3;
  const int side = grouped ? 1 : 0;  // the dimension of b that counts columns of c
  const Product p{.a = args.a.raw(),
                  .b = args.b.raw(),
                  .c = args.c.raw(),
                  .m = args.c.size(0),
                  .n = args.c.size(1),
                  .k = args.a.size(1),
                  .lda = args.a.stride(0),
                  .ldb = args.b.stride(side),
                  .ldc = args.c.stride(0),
                  .batch = grouped ? args.b.size(0) : 1,
                  .stride_b = grouped ? args.b.stride(0) : 0,
                  .row_begin = data_of<int32_t>(args.row_begin),
                  .rows_grouped = grouped,
                  .fast_c = eights(args.c),
                  .scales_a = args.a_scales.f32(),
                  .scales_b = args.b_scales.f32(),
                  .ld_scales_a = args.a_scales.stride(0),
                  .ld_scales_b = args.b_scales.stride(side),
                  .stride_scales_b = grouped ? args.b_scales.stride(0) : 0};
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  // From 1 to 4096 rows x 6144 x 6144.
  launch_best(p,
              {{128, 256, 256, launch_shape<WgmmaShape<e4m3, 2, 256, 4>>},
               {128, 128, 148, launch_shape<WgmmaShape<e4m3, 2, 128, 6>>},
               {64, 256, 168, launch_shape<WgmmaShape<e4m3, 1, 256, 5>>},
               {64, 128, 92, launch_shape<WgmmaShape<e4m3, 1, 128, 8>>},
               {64, 64, 78, launch_shape<WgmmaShape<e4m3, 1, 64, 12>>}},
              false, true, stream);
  check_launch("scaled_gemm");
}

}  // namespace slipstream::kernels
