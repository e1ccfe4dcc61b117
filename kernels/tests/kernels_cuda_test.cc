// Goal: what a CUDA stream promises: uploads and downloads in its order, larger than its staging memory; and errors with a
// reason. The operators' own tests are in the same binary.
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

class CudaStreamTest : public testing::CudaTest {};

TEST_F(CudaStreamTest, UploadsComeBack) {
  Stream& stream = testing::cuda_stream();
  const int64_t count = 20'000'000;  // 80 MB: more than two stagings
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i * 2654435761u);
  absl::StatusOr<Arena> arena = Arena::create(stream.device(), count * 4);
  ASSERT_TRUE(arena.ok()) << arena.status();
  const Tensor device = arena->alloc(DType::kI32, {count});
  stream.upload(values.data(), device);
  std::vector<int32_t> back(values.size());
  stream.download(device, back.data());
  EXPECT_EQ(values, back);
  stream.zero(device);
  stream.download(device, back.data());
  EXPECT_EQ(back, std::vector<int32_t>(values.size()));
}

TEST_F(CudaStreamTest, NamesTheDeviceItLacks) {
  EXPECT_EQ(Stream::create_cuda(99).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Arena::create_cuda(0, int64_t{1} << 50).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace slipstream::kernels
