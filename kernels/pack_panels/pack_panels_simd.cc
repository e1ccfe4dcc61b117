#include <algorithm>

#include "kernels/pack_panels/pack_panels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/pack_panels/pack_panels_simd.cc"
#include "hwy/foreach_target.h"
#include "kernels/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

static_assert(kPanelColumns == kLanes);

// Panels [begin, end) of one matrix.
void pack(const Tensor& w, const Tensor& panels, int64_t begin, int64_t end, Worker& worker) {
  const int64_t n = w.size(0), k = w.size(1), ldw = w.stride(0);
  float* wide = w.dtype() == DType::kBf16 ? worker.scratch<float>(k * kLanes) : nullptr;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t columns = std::min(kLanes, n - p * kLanes), offset = p * kLanes * ldw;
    if (wide == nullptr) {
      pack_transposed(columns, k, w.f32() + offset, ldw, panels.f32() + p * k * kLanes, kLanes);
      continue;
    }
    pack_transposed(columns, k, w.bf() + offset, ldw, wide, kLanes);
    bf16* to = panels.bf() + p * k * kLanes;
    for (int64_t i = 0; i < k; ++i) store(load(wide + i * kLanes), to + i * kLanes);  // exact: they were bf16
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {
namespace {
constexpr int64_t kCopiedValues = 65536;
}

HWY_EXPORT(pack);

void launch(const PackPanels& args, Stream& stream) {
  CHECK_OK(validate(args));
  const bool stacked = args.w.rank() == 3;
  const int64_t matrices = stacked ? args.w.size(0) : 1, count = args.panels.size(stacked ? 1 : 0);
  const int64_t grain = task_rows(args.w.size(stacked ? 2 : 1) * kPanelColumns, kCopiedValues);
  stream.parallel_for(matrices * count, grain, [&](int64_t begin, int64_t end, Worker& worker) {
    for (int64_t i = begin; i < end;) {
      const int64_t matrix = i / count, first = i % count, last = std::min(count, first + end - i);
      worker.reset();
      HWY_DYNAMIC_DISPATCH(pack)
      (stacked ? args.w[matrix] : args.w, stacked ? args.panels[matrix] : args.panels, first, last, worker);
      i += last - first;
    }
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
