#include "kernels/testing/cuda_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cuda/runtime.h"

namespace slipstream::kernels::testing {
namespace {

constexpr int64_t kFenceBytes = 256;  // alignment of an arena's tensors on the device
constexpr unsigned char kFence = 0xA5;

std::vector<int64_t> shape_of(const Tensor& t) {
  std::vector<int64_t> shape;
  for (int dim = 0; dim < t.rank(); ++dim) shape.push_back(t.size(dim));
  return shape;
}

Tensor host_tensor(TensorPool& pool, DType dtype, const Tensor& like) {
  switch (like.rank()) {
    case 1: return pool.zeros(dtype, {like.size(0)});
    case 2: return pool.zeros(dtype, {like.size(0), like.size(1)});
    case 3: return pool.zeros(dtype, {like.size(0), like.size(1), like.size(2)});
    default: return pool.zeros(dtype, {like.size(0), like.size(1), like.size(2), like.size(3)});
  }
}

}  // namespace

Stream& cuda_stream() {
  static const std::unique_ptr<Stream> stream = *Stream::create_cuda(0);
  return *stream;
}

void CudaTest::SetUp() {
  if (const absl::Status status = cuda::select_device(0); !status.ok()) GTEST_SKIP() << status.message();
}

CudaPool::~CudaPool() {
  cuda_stream().synchronize();
  for (const Block& block : blocks_) cuda::release(block.memory);
}

Tensor CudaPool::allocate(DType dtype, const int64_t* shape, int rank) {
  const Device device = cuda_stream().device();
  Tensor tensor(nullptr, dtype, shape, rank, device);
  const int64_t size = tensor.bytes(), total = size + 2 * kFenceBytes;
  void* const memory = *cuda::allocate(total);
  const std::vector<unsigned char> fences(static_cast<size_t>(total), kFence);
  cuda_stream().upload(fences.data(), Tensor(memory, DType::kF8E4M3, {total}, device));
  blocks_.push_back({memory, static_cast<size_t>(size), tensor.describe()});
  return Tensor(static_cast<char*>(memory) + kFenceBytes, dtype, shape, rank, device);
}

Tensor CudaPool::copy(const Tensor& host, DType dtype) {
  if (host.empty()) return {};
  TensorPool scratch(1);
  Tensor dense = scratch.copy(host);
  if (host.dtype() == DType::kF32 && dtype == DType::kBf16) {
    const Tensor rounded = host_tensor(scratch, DType::kBf16, host);
    for (int64_t i = 0; i < dense.numel(); ++i) rounded.bf()[i] = to_bf16(dense.f32()[i]);
    dense = rounded;
  }
  const std::vector<int64_t> shape = shape_of(dense);
  const Tensor device = allocate(dense.dtype(), shape.data(), dense.rank());
  cuda_stream().upload(dense.raw(), device);
  return device;
}

Sequences CudaPool::copy(const Sequences& host) {
  return {.row_begin = copy(host.row_begin), .cached = copy(host.cached), .host_row_begin = host.row_begin,
          .host_cached = host.cached};
}

PagedRows CudaPool::copy(const PagedRows& host, DType dtype) {
  return {.pool = copy(host.pool, dtype), .page_table = copy(host.page_table)};
}

Tensor CudaPool::output(DType dtype, std::initializer_list<int64_t> shape) {
  TensorPool scratch(1);
  return copy(scratch.output(dtype, shape));
}

Tensor CudaPool::zeros(DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor device = allocate(dtype, shape.begin(), static_cast<int>(shape.size()));
  cuda_stream().zero(device);
  return device;
}

void CudaPool::expect_fences_intact() const {
  const auto intact = [](unsigned char b) { return b == kFence; };
  for (const Block& block : blocks_) {
    std::vector<unsigned char> fence(static_cast<size_t>(kFenceBytes));
    char* const memory = static_cast<char*>(block.memory);
    const Device device = cuda_stream().device();
    cuda_stream().download(Tensor(memory, DType::kF8E4M3, {kFenceBytes}, device), fence.data());
    EXPECT_TRUE(std::all_of(fence.begin(), fence.end(), intact)) << "written before " << block.what;
    cuda_stream().download(Tensor(memory + kFenceBytes + block.size, DType::kF8E4M3, {kFenceBytes}, device),
                           fence.data());
    EXPECT_TRUE(std::all_of(fence.begin(), fence.end(), intact)) << "written after " << block.what;
  }
}

Tensor bits_on_host(TensorPool& pool, const Tensor& device) {
  const Tensor host = host_tensor(pool, device.dtype(), device);
  if (device.numel() == 0) return host;
  if (device.dense()) {
    cuda_stream().download(device, host.raw());
    return host;
  }
  // The span of memory that the elements lie in, then element by element.
  int64_t span = 1;
  for (int dim = 0; dim < device.rank(); ++dim) span += (device.size(dim) - 1) * device.stride(dim);
  const int64_t width = size_of(device.dtype());
  std::vector<char> memory(static_cast<size_t>(span * width));
  cuda_stream().download(Tensor(device.raw(), device.dtype(), {span}, device.device()), memory.data());
  int64_t index[Tensor::kMaxRank] = {};
  for (int64_t n = 0; n < host.numel(); ++n) {
    int64_t offset = 0;
    for (int dim = 0; dim < device.rank(); ++dim) offset += index[dim] * device.stride(dim);
    std::memcpy(static_cast<char*>(host.raw()) + n * width, memory.data() + offset * width, static_cast<size_t>(width));
    for (int dim = device.rank() - 1; dim >= 0 && ++index[dim] == device.size(dim); --dim) index[dim] = 0;
  }
  return host;
}

Tensor on_host(TensorPool& pool, const Tensor& device) {
  const Tensor bits = bits_on_host(pool, device);
  if (bits.dtype() != DType::kBf16) return bits;
  const Tensor host = host_tensor(pool, DType::kF32, bits);
  for (int64_t i = 0; i < bits.numel(); ++i) host.f32()[i] = to_f32(bits.bf()[i]);
  return host;
}

Tensor random_as(TensorPool& pool, DType dtype, std::initializer_list<int64_t> shape, float low, float high) {
  const Tensor t = pool.random(DType::kF32, shape, low, high);
  if (dtype == DType::kBf16) {
    for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = to_f32(to_bf16(t.f32()[i]));
  }
  return t;
}

void expect_close(const Tensor& device, const Tensor& expected, float slack) {
  TensorPool pool(1);
  const Tensor actual = on_host(pool, device), reference = pool.copy(expected);
  ASSERT_TRUE(actual.same_shape(reference)) << actual.describe() << " against " << reference.describe();
  if (actual.dtype() == DType::kI32) return expect_same_bits(actual, reference);
  const float tolerance = (device.dtype() == DType::kBf16 ? 1e-2f : 1e-5f) * slack;
  expect_near(actual, reference, tolerance);
  // Tests' values are of the order of 1: a tensor of next to nothing is compared by its largest difference alone.
  double square_sum = 0.0;
  for (int64_t i = 0; i < reference.numel(); ++i) square_sum += double{reference.f32()[i]} * reference.f32()[i];
  if (square_sum > 1e-4 * static_cast<double>(reference.numel())) {
    EXPECT_LE(relative_error(actual, reference), tolerance) << device.describe();
  }
}

void expect_same_bits_on_device(const Tensor& actual, const Tensor& expected) {
  TensorPool pool(1);
  expect_same_bits(bits_on_host(pool, actual), bits_on_host(pool, expected));
}

}  // namespace slipstream::kernels::testing
