#include "kernels/testing/op_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "hwy/targets.h"
#include "kernels/e4m3.h"

namespace slipstream::kernels::testing {
namespace {

constexpr size_t kFenceBytes = 64;  // a cache line
constexpr std::byte kFence{0xA5};

// Calls f(offset) for every element, offsets in elements of the (possibly strided) tensor.
template <class F>
void for_each_element(const Tensor& t, F&& f) {
  int64_t index[Tensor::kMaxRank] = {};
  const int64_t count = t.numel();
  for (int64_t n = 0; n < count; ++n) {
    int64_t offset = 0;
    for (int dim = 0; dim < t.rank(); ++dim) offset += index[dim] * t.stride(dim);
    f(offset);
    for (int dim = t.rank() - 1; dim >= 0 && ++index[dim] == t.size(dim); --dim) index[dim] = 0;
  }
}

std::vector<double> values_of(const Tensor& t) {
  std::vector<double> out;
  out.reserve(static_cast<size_t>(t.numel()));
  for_each_element(t, [&](int64_t i) {
    switch (t.dtype()) {
      case DType::kF32: out.push_back(t.f32()[i]); break;
      case DType::kBf16: out.push_back(to_f32(t.bf()[i])); break;
      case DType::kI32: out.push_back(t.i32()[i]); break;
      case DType::kF8E4M3: out.push_back(to_f32(t.data<e4m3>()[i])); break;
    }
  });
  return out;
}

}  // namespace

Tensor TensorPool::allocate(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor tensor(nullptr, dtype, shape);
  const size_t size = static_cast<size_t>(tensor.bytes());
  Block block{std::make_unique<std::byte[]>(size + 3 * kFenceBytes), nullptr, size, tensor.describe()};
  const uintptr_t address = reinterpret_cast<uintptr_t>(block.memory.get());
  block.start = block.memory.get() + (kFenceBytes - address % kFenceBytes) % kFenceBytes;
  std::memset(block.start, static_cast<int>(kFence), size + 2 * kFenceBytes);
  tensor = Tensor(block.start + kFenceBytes, dtype, shape);
  blocks_.push_back(std::move(block));
  return tensor;
}

float TensorPool::uniform() {
  state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<float>(state_ >> 40) * 0x1p-24f;
}

Tensor TensorPool::random(DType dtype, std::initializer_list<int64_t> shape, float low, float high) {
  const Tensor t = allocate(dtype, shape);
  for (int64_t i = 0; i < t.numel(); ++i) {
    const float value = low + (high - low) * uniform();
    if (dtype == DType::kBf16) {
      t.bf()[i] = to_bf16(value);
    } else {
      t.f32()[i] = value;
    }
  }
  return t;
}

Tensor TensorPool::random_ints(std::initializer_list<int64_t> shape, int32_t low, int32_t high) {
  const Tensor t = allocate(DType::kI32, shape);
  for (int64_t i = 0; i < t.numel(); ++i) {
    t.i32()[i] = low + static_cast<int32_t>(uniform() * static_cast<float>(high - low));
  }
  return t;
}

Tensor TensorPool::ints(std::initializer_list<int64_t> shape, const std::vector<int32_t>& values) {
  const Tensor t = allocate(DType::kI32, shape);
  CHECK_EQ(t.numel(), static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), t.i32());
  return t;
}

Tensor TensorPool::output(DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor t = allocate(dtype, shape);
  for (int64_t i = 0; i < t.numel(); ++i) {
    if (dtype == DType::kF32) t.f32()[i] = std::numeric_limits<float>::quiet_NaN();
    if (dtype == DType::kBf16) t.bf()[i] = bf16{0x7fc0};
    if (dtype == DType::kI32) t.i32()[i] = std::numeric_limits<int32_t>::min();
  }
  return t;
}

Tensor TensorPool::zeros(DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor t = allocate(dtype, shape);
  if (t.numel() > 0) std::memset(t.raw(), 0, static_cast<size_t>(t.bytes()));
  return t;
}

Tensor TensorPool::copy(const Tensor& other) {
  Tensor out;
  switch (other.rank()) {
    case 0: return out;
    case 1: out = allocate(other.dtype(), {other.size(0)}); break;
    case 2: out = allocate(other.dtype(), {other.size(0), other.size(1)}); break;
    case 3: out = allocate(other.dtype(), {other.size(0), other.size(1), other.size(2)}); break;
    default: out = allocate(other.dtype(), {other.size(0), other.size(1), other.size(2), other.size(3)}); break;
  }
  const int64_t width = size_of(other.dtype());
  char* to = static_cast<char*>(out.raw());
  for_each_element(other, [&](int64_t i) {
    std::memcpy(to, static_cast<const char*>(other.raw()) + i * width, static_cast<size_t>(width));
    to += width;
  });
  return out;
}

void TensorPool::expect_fences_intact() const {
  for (const Block& block : blocks_) {
    const std::byte* memory = block.start;
    const auto intact = [](std::byte b) { return b == kFence; };
    EXPECT_TRUE(std::all_of(memory, memory + kFenceBytes, intact)) << "written before " << block.what;
    const std::byte* after = memory + kFenceBytes + block.size;
    EXPECT_TRUE(std::all_of(after, after + kFenceBytes, intact)) << "written after " << block.what;
  }
}

ScopedTarget::ScopedTarget(int64_t target) { hwy::SetSupportedTargetsForTest(target); }
ScopedTarget::~ScopedTarget() { hwy::SetSupportedTargetsForTest(0); }

Stream& test_stream() {
  static const std::unique_ptr<Stream> stream = *Stream::create_cpu(2);
  return *stream;
}

Stream& single_thread_stream() {
  static const std::unique_ptr<Stream> stream = *Stream::create_cpu(1);
  return *stream;
}

float tolerance(DType) { return 2e-6f; }

void expect_near(const Tensor& actual, const Tensor& expected, float tolerance) {
  ASSERT_TRUE(actual.same_shape(expected)) << actual.describe() << " against " << expected.describe();
  const std::vector<double> a = values_of(actual), b = values_of(expected);
  double scale = 1.0;
  for (double v : b) {
    if (std::isfinite(v)) scale = std::max(scale, 1.0 + std::abs(v));
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(a[i] == b[i] || std::abs(a[i] - b[i]) <= tolerance * scale)) {
      FAIL() << "element " << i << " of " << actual.describe() << ": " << a[i] << ", expected " << b[i];
    }
  }
}

void expect_same_bits(const Tensor& actual, const Tensor& expected) {
  ASSERT_TRUE(actual.same_shape(expected)) << actual.describe() << " against " << expected.describe();
  ASSERT_EQ(actual.dtype(), expected.dtype());
  const std::vector<double> a = values_of(actual), b = values_of(expected);
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(a[i] == b[i] && std::signbit(a[i]) == std::signbit(b[i]))) {  // 0 and -0 are equal, their bits are not
      FAIL() << "element " << i << " of " << actual.describe() << ": " << a[i] << ", expected the bits of " << b[i];
    }
  }
}

double relative_error(const Tensor& actual, const Tensor& expected) {
  const std::vector<double> a = values_of(actual), b = values_of(expected);
  CHECK_EQ(a.size(), b.size());
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (difference == 0.0) return 0.0;
  return norm > 0.0 ? std::sqrt(difference / norm) : std::numeric_limits<double>::infinity();
}

void expect_gradient(const std::function<double()>& loss, const Tensor& x, const Tensor& grad, double tolerance,
                     float step) {
  ASSERT_TRUE(x.same_shape(grad)) << x.describe() << " against " << grad.describe();
  const std::vector<double> actual = values_of(grad);
  double difference = 0.0, norm = 0.0;
  size_t n = 0;
  for_each_element(x, [&](int64_t i) {
    float& value = x.f32()[i];
    const float saved = value;
    value = saved + step;
    const double up_x = value, up = loss();
    value = saved - step;
    const double down_x = value, down = loss();
    value = saved;
    const double expected = (up - down) / (up_x - down_x);
    difference += (actual[n] - expected) * (actual[n] - expected);
    norm += expected * expected;
    ++n;
  });
  EXPECT_LE(std::sqrt(difference), tolerance * std::sqrt(norm) + 1e-6)
      << "gradient of " << x.describe() << " has relative error " << std::sqrt(difference / norm);
}

double dot(const Tensor& y, const Tensor& coefficient) {
  const std::vector<double> a = values_of(y), b = values_of(coefficient);
  CHECK_EQ(a.size(), b.size());
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace slipstream::kernels::testing
