#include <algorithm>

#include "kernels/launch_cuda.h"
#include "kernels/scaled_gemm/scaled_gemm.h"

namespace slipstream::kernels {

// On the CPU the definition, a thread some rows: nothing there computes with e4m3 but tests.
void launch(const ScaledGemm& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const bool grouped = args.b.rank() == 3;
  const auto rows_of = [&](int64_t begin, int64_t end, const Tensor& b, const Tensor& b_scales) {
    reference(ScaledGemm{.a = args.a.slice(0, begin, end),
                         .a_scales = args.a_scales.slice(0, begin, end),
                         .b = b,
                         .b_scales = b_scales,
                         .c = args.c.slice(0, begin, end)});
  };
  if (!grouped) {
    stream.parallel_for(args.a.size(0), 1, [&](int64_t begin, int64_t end, Worker&) {
      rows_of(begin, end, args.b, args.b_scales);
    });
    return;
  }
  const int32_t* const first = args.row_begin.i32();
  stream.parallel_for(args.b.size(0), 1, [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t e = begin; e < end; ++e) rows_of(first[e], first[e + 1], args.b[e], args.b_scales[e]);
  });
}

}  // namespace slipstream::kernels
