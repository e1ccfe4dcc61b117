// What tests of CUDA kernels share: tensors on the device between fences, and comparisons with what the CPU's reference()
// computes from the same values.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "kernels/sequences.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels::testing {

// A stream on device 0, made once a process; dies without one.
Stream& cuda_stream();

// Skips the test, naming the reason, where no device is present.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

// Owns device tensors for one test. Every tensor stands between fences; outputs start as NaN.
class CudaPool {
 public:
  CudaPool() = default;
  ~CudaPool();
  CudaPool(const CudaPool&) = delete;
  CudaPool& operator=(const CudaPool&) = delete;

  // A dense copy of a host tensor: an f32 one as f32 or rounded to bf16, others as they are. Absent stays absent.
  Tensor copy(const Tensor& host, DType dtype = DType::kF32);
  Sequences copy(const Sequences& host);
  PagedRows copy(const PagedRows& host, DType dtype = DType::kF32);  // a bf16 pool stays bf16
  Tensor output(DType dtype, std::initializer_list<int64_t> shape);  // NaN / INT32_MIN
  Tensor zeros(DType dtype, std::initializer_list<int64_t> shape);
  void expect_fences_intact() const;

 private:
  Tensor allocate(DType dtype, const int64_t* shape, int rank);
  struct Block {
    void* memory;
    size_t size;
    std::string what;
  };
  std::vector<Block> blocks_;
};

// A dense host copy in `pool` of a possibly strided device tensor: bf16 becomes f32.
Tensor on_host(TensorPool& pool, const Tensor& device);
// The host copy with its own dtype, for comparing bits.
Tensor bits_on_host(TensorPool& pool, const Tensor& device);

// Random f32 values that a tensor of `dtype` holds exactly: the same inputs for kernel and reference.
Tensor random_as(TensorPool& pool, DType dtype, std::initializer_list<int64_t> shape, float low = -1.0f,
                 float high = 1.0f);

// The kernel's result against the reference's: ||actual - expected|| / ||expected|| and max |a - e| / (1 + max |e|), both at
// most the tolerance of the dtype (1e-5 for f32, 1e-2 for bf16) times `slack`.
void expect_close(const Tensor& device, const Tensor& expected, float slack = 1.0f);
void expect_same_bits_on_device(const Tensor& actual, const Tensor& expected);

}  // namespace slipstream::kernels::testing
