#include "kernels/tensor.h"

namespace slipstream::kernels {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 4;
    case DType::kBf16: return 2;
    case DType::kF8E4M3: return 1;
    case DType::kI32: return 4;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBf16: return "bf16";
    case DType::kF8E4M3: return "f8_e4m3";
    case DType::kI32: return "i32";
  }
  return "?";
}

Tensor::Tensor(void* data, DType dtype, const int64_t* shape, int rank, Device device)
    : data_(data), dtype_(dtype), device_(device), rank_(rank) {
  CHECK(rank >= 1 && rank <= kMaxRank);
  int64_t stride = 1;
  for (int dim = rank - 1; dim >= 0; --dim) {
    CHECK_GE(shape[dim], 0);
    shape_[dim] = shape[dim];
    stride_[dim] = stride;
    stride *= shape[dim];
  }
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device)
    : Tensor(data, dtype, shape.begin(), static_cast<int>(shape.size()), device) {}

int64_t Tensor::numel() const {
  if (rank_ == 0) return 0;
  int64_t n = 1;
  for (int dim = 0; dim < rank_; ++dim) n *= shape_[dim];
  return n;
}

bool Tensor::dense() const {
  int64_t expected = 1;
  for (int dim = rank_ - 1; dim >= 0; --dim) {
    if (shape_[dim] != 1 && stride_[dim] != expected) return false;
    expected *= shape_[dim];
  }
  return true;
}

bool Tensor::has_shape(std::initializer_list<int64_t> shape) const {
  if (static_cast<int>(shape.size()) != rank_) return false;
  int dim = 0;
  for (int64_t n : shape) {
    if (shape_[dim++] != n) return false;
  }
  return true;
}

bool Tensor::same_shape(const Tensor& other) const {
  if (rank_ != other.rank_) return false;
  for (int dim = 0; dim < rank_; ++dim) {
    if (shape_[dim] != other.shape_[dim]) return false;
  }
  return true;
}

std::string Tensor::describe() const {
  if (rank_ == 0) return "absent";
  std::string text = std::string(name_of(dtype_)) + " [";
  for (int dim = 0; dim < rank_; ++dim) {
    if (dim > 0) text += ", ";
    text += std::to_string(shape_[dim]);
  }
  return text + "]";
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t end) const {
  CHECK(dim >= 0 && dim < rank_);
  CHECK(0 <= begin && begin <= end && end <= shape_[dim]);
  Tensor out = *this;
  out.shape_[dim] = end - begin;
  out.data_ = static_cast<char*>(data_) + begin * stride_[dim] * size_of(dtype_);
  return out;
}

Tensor Tensor::operator[](int64_t i) const {
  CHECK_GE(rank_, 2);
  Tensor out = slice(0, i, i + 1);
  out.rank_ = rank_ - 1;
  for (int dim = 0; dim < out.rank_; ++dim) {
    out.shape_[dim] = shape_[dim + 1];
    out.stride_[dim] = stride_[dim + 1];
  }
  return out;
}

Tensor Tensor::view(std::initializer_list<int64_t> shape) const {
  CHECK(dense());
  Tensor out(data_, dtype_, shape, device_);
  CHECK_EQ(out.numel(), numel());
  return out;
}

Tensor Tensor::split_last(int64_t parts) const {
  CHECK(rank_ >= 1 && rank_ < kMaxRank && parts > 0);
  CHECK_EQ(shape_[rank_ - 1] % parts, 0);
  Tensor out = *this;
  out.rank_ = rank_ + 1;
  out.shape_[rank_ - 1] = parts;
  out.shape_[rank_] = shape_[rank_ - 1] / parts;
  out.stride_[rank_ - 1] = out.shape_[rank_];
  out.stride_[rank_] = 1;
  return out;
}

Tensor Tensor::transpose01() const {
  CHECK_GE(rank_, 3);
  Tensor out = *this;
  std::swap(out.shape_[0], out.shape_[1]);
  std::swap(out.stride_[0], out.stride_[1]);
  return out;
}

}  // namespace slipstream::kernels
