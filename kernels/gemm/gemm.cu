#include "kernels/gemm/gemm.h"

#include "kernels/cuda/few_rows.cuh"
#include "kernels/cuda/few_rows_across.cuh"
#include "kernels/cuda/products.cuh"
#include "kernels/cuda/split_products.cuh"
#include "kernels/cuda/thin_products.cuh"
#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {

void launch_product(const Product& p, DType a, DType b, DType c, bool transpose_a, bool transpose_b, Stream& stream) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  if (a == DType::kF32 && b == DType::kF32 && c == DType::kF32) {
    launch_scalar_product(p, transpose_a, transpose_b, stream);
  } else if (thin_takes(p, a, b, c, transpose_a, transpose_b)) {
    launch_thin(p, stream);
  } else if (few_rows_across_takes(p, a, b, c, transpose_a, transpose_b)) {
    launch_few_rows_across(p, stream);
  } else {
    with_type(c, [&](auto result) {
      using C = decltype(result);
      if (a == DType::kBf16 && b == DType::kBf16) {
        if (wgmma_takes(p, transpose_a, transpose_b)) return wgmma_product_as<C>(p, transpose_a, transpose_b, stream);
        return tensor_product_as<C>(p, transpose_a, transpose_b, stream);
      }
      with_type(a, [&](auto left) {
        using A = decltype(left);
        constexpr bool kLeftF32 = std::is_same_v<A, float>;
        if constexpr (kLeftF32) {
          if (b == DType::kBf16) return split_product_as<A, bf16, C>(p, transpose_a, transpose_b, stream);
        }
        if constexpr (!kLeftF32 || !std::is_same_v<C, float>) split_product_as<A, float, C>(p, transpose_a, transpose_b, stream);
      });
    });
  }
  check_launch("product");
}

namespace {

Product product_of(const Gemm& args) {
  const bool batched = args.c.rank() == 3;
  const int rows = batched ? 1 : 0;  // the dimension that counts rows
  return {.a = args.a.raw(), .b = args.b.raw(), .c = args.c.raw(), .bias = data_of<float>(args.bias),
          .m = args.c.size(rows), .n = args.c.size(rows + 1), .k = args.a.size(args.transpose_a ? rows : rows + 1),
          .lda = args.a.stride(rows), .ldb = args.b.stride(rows), .ldc = args.c.stride(rows), .batch = batched ? args.c.size(0) : 1,
          .stride_a = batched ? args.a.stride(0) : 0, .stride_b = batched ? args.b.stride(0) : 0,
          .stride_c = batched ? args.c.stride(0) : 0, .accumulate = args.accumulate,
          .fast_a = eights(args.a), .fast_b = eights(args.b), .fast_c = eights(args.c)};
}

}  // namespace

template <>
void launch_cuda<Gemms>(const Gemms& args, Stream& stream) {
  FewRows small;
  for (const Gemm& gemm : args.products) {
    const Product p = product_of(gemm);
    if (!few_rows_take(p, gemm.a.dtype(), gemm.b.dtype(), gemm.transpose_a, gemm.transpose_b)) {
      launch_product(p, gemm.a.dtype(), gemm.b.dtype(), gemm.c.dtype(), gemm.transpose_a, gemm.transpose_b, stream);
    } else if (!small.add(p, gemm.c.dtype())) {
      small.launch(stream);
      small = {};
      CHECK(small.add(p, gemm.c.dtype()));
    }
  }
  small.launch(stream);
}

template <>
void launch_cuda<Gemm>(const Gemm& args, Stream& stream) {
  launch_cuda(Gemms{{&args, 1}}, stream);
}

}  // namespace slipstream::kernels
