#include <cstring>

#include "kernels/copy/copy.h"

#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {
constexpr int64_t kCopiedValues = 65536;
}

// memcpy is the fast form; it needs no SIMD of ours.
void launch(const Copy& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t heads = args.from.size(1), width = args.from.size(2);
  const int64_t grain = task_rows(heads * width, kCopiedValues);
  stream.parallel_for(args.from.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < heads; ++j) {
        std::memcpy(args.to.row(t) + j * args.to.stride(1), args.from.row(t) + j * args.from.stride(1),
                    static_cast<size_t>(width) * sizeof(float));
      }
    }
  });
}

}  // namespace slipstream::kernels
