#include <cstring>

#include "kernels/bf16.h"
#include "kernels/copy/copy.h"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kCopiedValues = 65536;

// memcpy is the fast form, and compilers make vectors of the rounding: it needs no SIMD of ours.
void copy_row(const float* from, float* to, int64_t width) { std::memcpy(to, from, static_cast<size_t>(width) * sizeof(float)); }
void copy_row(const float* from, bf16* to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(from[i]);
}

template <class Y>
void copy(const Copy& args, Stream& stream) {
  const int64_t heads = args.from.size(1), width = args.from.size(2);
  Y* const to = args.to.data<Y>();
  stream.parallel_for(args.from.size(0), task_rows(heads * width, kCopiedValues), [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < heads; ++j) {
        copy_row(args.from.row(t) + j * args.from.stride(1), to + t * args.to.stride(0) + j * args.to.stride(1), width);
      }
    }
  });
}

}  // namespace

void launch(const Copy& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  if (args.to.empty()) return;
  if (args.to.dtype() == DType::kBf16) return copy<bf16>(args, stream);
  copy<float>(args, stream);
}

}  // namespace slipstream::kernels
