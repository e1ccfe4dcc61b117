#include "kernels/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "kernels/cuda/runtime.h"
#include "kernels/stream.h"

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
  return Arena(static_cast<char*>(base), bytes, Device{});
}

absl::StatusOr<Arena> Arena::create_cuda(int32_t index, int64_t bytes) {
  if (bytes <= 0) return absl::InvalidArgumentError(absl::StrCat("arena bytes: ", bytes, ", expected > 0"));
  RETURN_IF_ERROR(cuda::select_device(index));
  ASSIGN_OR_RETURN(const cuda::GrowingRange range, cuda::reserve_range(bytes));
  return Arena(range.base, bytes, Device{DeviceKind::kCuda, index});
}

absl::StatusOr<Arena> Arena::create(Device device, int64_t bytes) {
  return device.kind == DeviceKind::kCuda ? create_cuda(device.index, bytes) : create_cpu(bytes);
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(capacity_, other.capacity_);
  std::swap(backed_, other.backed_);
  std::swap(used_, other.used_);
  std::swap(peak_, other.peak_);
  std::swap(device_, other.device_);
  return *this;
}

Arena::~Arena() {
  if (base_ == nullptr) return;
  if (device_.kind == DeviceKind::kCuda) {
    cuda::GrowingRange range{base_, capacity_, backed_};
    cuda::release_range(&range);
  } else {
    munmap(base_, static_cast<size_t>(capacity_));
  }
}

Tensor Arena::alloc(DType dtype, std::initializer_list<int64_t> shape) {
  return take(Tensor(base_ + used_, dtype, shape, device_));
}

Tensor Arena::alloc(DType dtype, const std::vector<int64_t>& shape) {
  return take(Tensor(base_ + used_, dtype, shape.data(), static_cast<int>(shape.size()), device_));
}

Tensor Arena::take(Tensor tensor) {
  const int64_t alignment = device_.kind == DeviceKind::kCuda ? 256 : 64;
  used_ += (tensor.bytes() + alignment - 1) / alignment * alignment;
  CHECK_LE(used_, capacity_);
  peak_ = std::max(peak_, used_);
  if (device_.kind == DeviceKind::kCuda && used_ > backed_) {
    cuda::GrowingRange range{base_, capacity_, backed_};
    cuda::grow_range(&range, used_, device_.index);
    backed_ = range.backed;
  }
  return tensor;
}

Tensor Arena::zeros(DType dtype, std::initializer_list<int64_t> shape, Stream& stream) {
  const Tensor tensor = alloc(dtype, shape);
  stream.zero(tensor);
  return tensor;
}

void Arena::release(int64_t mark) {
  CHECK(mark >= 0 && mark <= used_);
  used_ = mark;
}

}  // namespace slipstream::kernels
