// Arena: memory for tensors, handed out in order and given back in reverse.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "common/status.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

class Stream;

// A bump allocator over one reserved range. On the CPU the range is address space: pages cost memory only once
// touched, and keep it until the arena dies; on CUDA the same, in steps of 128 MiB. One thread uses an arena.
class Arena {
 public:
  // bytes: the most that may ever be in use. ResourceExhausted when the range cannot be reserved.
  static absl::StatusOr<Arena> create_cpu(int64_t bytes);
  // Unimplemented: built without CUDA. NotFound: no such device.
  static absl::StatusOr<Arena> create_cuda(int32_t index, int64_t bytes);
  static absl::StatusOr<Arena> create(Device device, int64_t bytes);
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();

  Device device() const { return device_; }

  // A dense tensor, 64-byte aligned (256 on CUDA), uninitialised. Dies when the arena is full: sizes are checked at start-up.
  Tensor alloc(DType dtype, std::initializer_list<int64_t> shape);
  Tensor alloc(DType dtype, const std::vector<int64_t>& shape);
  Tensor zeros(DType dtype, std::initializer_list<int64_t> shape, Stream& stream);  // enqueued

  // Everything allocated after mark() is given back by release(mark).
  int64_t mark() const { return used_; }
  void release(int64_t mark);

  int64_t used() const { return used_; }
  int64_t capacity() const { return capacity_; }
  int64_t peak() const { return peak_; }  // the largest used() so far, in bytes

 private:
  Tensor take(Tensor tensor);
  Arena(char* base, int64_t capacity, Device device) : base_(base), capacity_(capacity), device_(device) {}
  char* base_ = nullptr;
  int64_t capacity_ = 0;
  int64_t backed_ = 0;  // on CUDA: bytes with memory behind them
  int64_t used_ = 0;
  int64_t peak_ = 0;
  Device device_;
};

// Gives back, at the end of a block, what was allocated in it.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  int64_t mark_;
};

}  // namespace slipstream::kernels
