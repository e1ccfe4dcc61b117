#include "kernels/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace slipstream::kernels {

absl::StatusOr<Arena> Arena::create_cpu(int64_t bytes) {
  if (bytes <= 0) return absl::InvalidArgumentError(absl::StrCat("arena bytes: ", bytes, ", expected > 0"));
  void* base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot reserve ", bytes, " bytes of address space"));
  }
  // Large pages where the system grants them: a pass touches hundreds of MiB once, and each small page is a fault and
  // a miss of the address cache. A refusal costs speed only.
  madvise(base, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return Arena(static_cast<char*>(base), bytes);
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(capacity_, other.capacity_);
  std::swap(used_, other.used_);
  std::swap(peak_, other.peak_);
  return *this;
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(capacity_));
}

Tensor Arena::alloc(DType dtype, std::initializer_list<int64_t> shape) {
  return take(Tensor(base_ + used_, dtype, shape));
}

Tensor Arena::alloc(DType dtype, const std::vector<int64_t>& shape) {
  return take(Tensor(base_ + used_, dtype, shape.data(), static_cast<int>(shape.size())));
}

Tensor Arena::take(Tensor tensor) {
  used_ += (tensor.bytes() + 63) / 64 * 64;
  CHECK_LE(used_, capacity_);
  peak_ = std::max(peak_, used_);
  return tensor;
}

Tensor Arena::zeros(DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor tensor = alloc(dtype, shape);
  std::memset(tensor.raw(), 0, static_cast<size_t>(tensor.bytes()));
  return tensor;
}

void Arena::release(int64_t mark) {
  CHECK(mark >= 0 && mark <= used_);
  used_ = mark;
}

}  // namespace slipstream::kernels
