#include "kernels/cuda/runtime.h"

#include "common/check.h"
#include "kernels/range.h"

namespace slipstream::kernels::cuda {
namespace {

absl::Status none() { return absl::UnimplementedError("this build has no CUDA: configure it with the preset cuda"); }

}  // namespace

absl::Status select_device(int32_t) { return none(); }
absl::StatusOr<void*> allocate(int64_t) { return none(); }
absl::StatusOr<void*> allocate_pinned(int64_t) { return none(); }
absl::StatusOr<GrowingRange> reserve_range(int64_t) { return none(); }
absl::StatusOr<void*> create_stream() { return none(); }
// Nothing was ever handed out.
void release(void*) { CHECK(false); }
int64_t free_memory() {
  CHECK(false);
  return 0;
}
void release_pinned(void*) { CHECK(false); }
void grow_range(GrowingRange*, int64_t, int32_t) { CHECK(false); }
void release_range(GrowingRange*) { CHECK(false); }
void destroy_stream(void*) { CHECK(false); }
void synchronize(void*) { CHECK(false); }
void copy(void*, const void*, int64_t, void*) { CHECK(false); }
void zero(void*, int64_t, void*) { CHECK(false); }
void begin_recording(void*) { CHECK(false); }
void* end_recording(void*) {
  CHECK(false);
  return nullptr;
}
bool recording(void*) { return false; }
void launch_graph(void*, void*) { CHECK(false); }
void destroy_graph(void*) { CHECK(false); }

}  // namespace slipstream::kernels::cuda

namespace slipstream::kernels {

Range::Range(const char*) {}
Range::~Range() {}

}  // namespace slipstream::kernels
