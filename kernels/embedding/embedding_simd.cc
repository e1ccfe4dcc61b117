#include "kernels/embedding/embedding.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/embedding/embedding_simd.cc"
#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

template <class T>
void gather_rows(const Embedding& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.table.size(1), stride = args.table.stride(0);
  const T* table = args.table.data<T>();
  const int32_t* ids = args.ids.i32();
  for (int64_t t = begin; t < end; ++t) {
    const T* from = table + ids[t] * stride;
    float* to = args.y.row(t);
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR { chunk.store(chunk.load(from + i), to + i); });
  }
}

void embedding_rows(const Embedding& args, int64_t begin, int64_t end) {
  if (args.table.dtype() == DType::kF32) {
    gather_rows<float>(args, begin, end);
  } else {
    gather_rows<bf16>(args, begin, end);
  }
}

// Columns [begin, end) of all tokens, in order: a thread owns columns, so two tokens of one id never race.
void embedding_grad_columns(const EmbeddingBackward& args, int64_t begin, int64_t end) {
  const int64_t tokens = args.ids.size(0), stride = args.dtable.stride(0);
  const int32_t* ids = args.ids.i32();
  float* table = args.dtable.f32() + begin;
  for (int64_t t = 0; t < tokens; ++t) {
    const float* dy = args.dy.row(t) + begin;
    float* to = table + ids[t] * stride;
    for_lanes(end - begin, [&](int64_t i, auto chunk) HWY_ATTR {
      chunk.store(add(chunk.load(to + i), chunk.load(dy + i)), to + i);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(embedding_rows);
HWY_EXPORT(embedding_grad_columns);

namespace {
constexpr int64_t kCopiedValues = 32768;
constexpr int64_t kGradColumns = 256;    // whole cache lines, and long enough to stream
}  // namespace

void launch(const Embedding& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.table.size(1), kCopiedValues);
  stream.parallel_for(args.ids.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(embedding_rows)(args, begin, end);
  });
}

void launch(const EmbeddingBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.dy.size(1), kGradColumns, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(embedding_grad_columns)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
