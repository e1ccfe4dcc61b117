// Goal: a stream covers every index exactly once on any number of threads; tensors and arenas keep their word.
#include "kernels/stream.h"

#include <vector>

#include "kernels/arena.h"
#include "kernels/bf16.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

TEST(StreamTest, CoversEachIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    const std::unique_ptr<Stream> stream = *Stream::create_cpu(threads);
    for (const int64_t n : {0, 1, 7, 1000}) {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<int> hits(static_cast<size_t>(n));
        stream->parallel_for(n, 3, [&](int64_t begin, int64_t end, Worker& worker) {
          EXPECT_LE(end - begin, 3);
          float* scratch = worker.scratch<float>(64);
          for (int64_t i = begin; i < end; ++i) {
            scratch[i % 64] = 1.0f;
            ++hits[static_cast<size_t>(i)];
          }
        });
        for (int hit : hits) EXPECT_EQ(hit, 1);
      }
    }
  }
}

TEST(StreamTest, RefusesNoThreads) { EXPECT_FALSE(Stream::create_cpu(0).ok()); }

TEST(TensorTest, SlicesAndViews) {
  std::vector<float> data(24);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  const Tensor t(data.data(), DType::kF32, {4, 6});
  const Tensor columns = t.slice(1, 2, 5);
  EXPECT_EQ(columns.row(1)[0], 8.0f);
  EXPECT_FALSE(columns.dense());
  EXPECT_EQ(t.view({2, 2, 6})[1].row(1)[5], 23.0f);
  EXPECT_EQ(t.view({4, 2, 3}).transpose01()[1].row(2)[0], 15.0f);
  EXPECT_EQ(t.describe(), "f32 [4, 6]");
}

TEST(ArenaTest, GivesBackInReverse) {
  Arena arena = *Arena::create_cpu(1 << 20);
  const std::unique_ptr<Stream> stream = *Stream::create_cpu(1);
  const Tensor first = arena.zeros(DType::kF32, {3, 5}, *stream);
  const int64_t before = arena.used();
  void* inner = nullptr;
  {
    const ArenaScope scope(arena);
    inner = arena.alloc(DType::kBf16, {100}).raw();
  }
  EXPECT_EQ(arena.used(), before);
  EXPECT_GT(arena.peak(), before);
  EXPECT_EQ(arena.alloc(DType::kI32, {1}).raw(), inner);
  EXPECT_EQ(first.f32()[14], 0.0f);
}

TEST(StreamTest, RefusesADeviceThatIsNotThere) {
  const absl::StatusCode code = Stream::create_cuda(99).status().code();
  EXPECT_TRUE(code == absl::StatusCode::kNotFound || code == absl::StatusCode::kUnimplemented);
}

TEST(StreamTest, CopiesOnTheCpuToo) {
  const std::unique_ptr<Stream> stream = *Stream::create_cpu(1);
  int32_t values[3] = {1, 2, 3}, back[3] = {};
  int32_t memory[3] = {};
  const Tensor t(memory, DType::kI32, {3});
  stream->upload(values, t);
  stream->download(t, back);
  EXPECT_EQ(back[2], 3);
  stream->zero(t);
  EXPECT_EQ(memory[2], 0);
}

TEST(Bf16Test, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bf16(1.00390625f).bits, 0x3f80);   // half way, even below
  EXPECT_EQ(to_bf16(1.01171875f).bits, 0x3f82);   // half way, even above
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_EQ(to_f32(to_bf16(-std::numeric_limits<float>::infinity())), -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace slipstream::kernels
