// Tensor: a typed, strided view of memory that something else owns (an Arena, a mapped file, a caller's vector).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "common/check.h"
#include "kernels/bf16.h"

namespace slipstream::kernels {

enum class DType : uint8_t { kF32, kBf16, kF8E4M3, kI32 };

int64_t size_of(DType dtype);           // bytes of one element
const char* name_of(DType dtype);       // "f32", "bf16", "f8_e4m3", "i32"

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

template <class T>
struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DType::kF32; };
template <> struct DTypeOf<bf16> { static constexpr DType value = DType::kBf16; };
template <> struct DTypeOf<int32_t> { static constexpr DType value = DType::kI32; };

// Up to four dimensions, strides in elements. The last dimension is always dense (stride 1); outer ones may be
// strided, so that a column range of a matrix is a view. A default Tensor is "absent": empty() is true.
class Tensor {
 public:
  static constexpr int kMaxRank = 4;

  Tensor() = default;
  // A dense view of `data`.
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {});
  Tensor(void* data, DType dtype, const int64_t* shape, int rank, Device device = {});

  bool empty() const { return rank_ == 0; }  // absent, as opposed to present with numel() == 0
  int rank() const { return rank_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int64_t size(int dim) const { CHECK(dim >= 0 && dim < rank_); return shape_[dim]; }
  int64_t stride(int dim) const { CHECK(dim >= 0 && dim < rank_); return stride_[dim]; }
  int64_t numel() const;
  int64_t bytes() const { return numel() * size_of(dtype_); }
  bool dense() const;                                     // no gaps between elements
  bool has_shape(std::initializer_list<int64_t> shape) const;
  bool same_shape(const Tensor& other) const;
  std::string describe() const;                           // "f32 [3, 64]"

  void* raw() const { return data_; }
  template <class T>
  T* data() const {
    CHECK(DTypeOf<std::remove_const_t<T>>::value == dtype_);
    return static_cast<T*>(data_);
  }
  float* f32() const { return data<float>(); }
  bf16* bf() const { return data<bf16>(); }
  int32_t* i32() const { return data<int32_t>(); }
  // Row i of a matrix (rank 2, f32), or of any tensor by its first dimension.
  float* row(int64_t i) const { return f32() + i * stride_[0]; }
  float* row(int64_t i, int64_t j) const { return f32() + i * stride_[0] + j * stride_[1]; }  // rank 3 or 4

  Tensor slice(int dim, int64_t begin, int64_t end) const;  // the sub-range of one dimension
  Tensor operator[](int64_t i) const;                       // drops the first dimension
  Tensor view(std::initializer_list<int64_t> shape) const;  // dense() only; same numel
  Tensor split_last(int64_t parts) const;                   // [..., parts * n] -> [..., parts, n]
  Tensor transpose01() const;                               // swaps the first two dimensions; rank 3 or 4

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Device device_;
  int rank_ = 0;
  std::array<int64_t, kMaxRank> shape_{};
  std::array<int64_t, kMaxRank> stride_{};
};

}  // namespace slipstream::kernels
