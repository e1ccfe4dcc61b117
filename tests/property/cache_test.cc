// Goal: a cache hands out pages and slots, counts them, gives them back, and says no when it is full, changing nothing.
#include "model/cache.h"

#include "gtest/gtest.h"
#include "tests/property/test_models.h"

namespace slipstream::model {
namespace {

std::unique_ptr<Cache> cache_of(const char* name, int64_t tokens, int64_t sequences) {
  return *Cache::create(testing::test_config(name), {.tokens = tokens, .sequences = sequences});
}

TEST(CacheTest, CountsPagesAndGivesThemBack) {
  const auto cache = cache_of("glm5_next", 640, 3);
  const int64_t id = *cache->open();
  EXPECT_EQ(cache->usage().pages_used, 0);
  CHECK_OK(cache->reserve(id, 65));
  cache->advance(id, 65);
  EXPECT_EQ(cache->usage().pages_used, 2);
  EXPECT_EQ(cache->usage().pool_pages_used, 1);  // 16 pools of 4 tokens
  const int64_t bytes = cache->usage().bytes_used;
  EXPECT_GT(bytes, 0);
  const int64_t child = *cache->fork(id);
  EXPECT_EQ(*cache->tokens(child), 65);
  EXPECT_EQ(cache->usage().pages_used, 3);  // the full page is shared, the partial one copied
  CHECK_OK(cache->free(id));
  EXPECT_EQ(cache->usage().pages_used, 2);  // the child still holds the shared page
  CHECK_OK(cache->free(child));
  EXPECT_EQ(cache->usage().bytes_used, 0);
  EXPECT_EQ(cache->free(child).code(), absl::StatusCode::kNotFound);
}

TEST(CacheTest, Fp8LatentsTakeLessAndNeedLatentAttention) {
  const auto bytes = [](bool fp8_latents) {
    const auto cache = *Cache::create(testing::test_config("glm_moe_dsa"),
                                      {.tokens = 640, .sequences = 2, .dtype = kernels::DType::kF32, .fp8_latents = fp8_latents});
    const int64_t id = *cache->open();
    CHECK_OK(cache->reserve(id, 640));
    cache->advance(id, 640);
    for (const LayerCache& layer : cache->layers()) {
      EXPECT_EQ(layer.keys.dtype(), fp8_latents ? kernels::DType::kF8E4M3 : kernels::DType::kF32);
    }
    return cache->usage().bytes_used;
  };
  EXPECT_LT(bytes(true), bytes(false));
  const absl::Status status =
      Cache::create(testing::test_config("glm4_moe"), {.tokens = 64, .sequences = 1, .fp8_latents = true}).status();
  EXPECT_EQ(status.message(), "cache fp8_latents: true, expected false for a model without latent attention");
}

TEST(CacheTest, SaysNoWhenFullAndChangesNothing) {
  const auto cache = cache_of("glm_moe_dsa", 128, 2);
  const int64_t a = *cache->open(), b = *cache->open();
  EXPECT_EQ(cache->open().status().code(), absl::StatusCode::kResourceExhausted);
  CHECK_OK(cache->reserve(a, 64));
  cache->advance(a, 64);
  EXPECT_EQ(cache->reserve(b, 65).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache->usage().pages_used, 1);
  CHECK_OK(cache->reserve(b, 64));
  EXPECT_EQ(cache->fork(a).status().code(), absl::StatusCode::kResourceExhausted);  // no slot
  EXPECT_EQ(cache->reserve(99, 1).code(), absl::StatusCode::kNotFound);
}

TEST(CacheTest, ABatchThatDoesNotFitIsRefused) {
  testing::TestModel m = testing::make_test_model("glm4_moe", kernels::DType::kF32);
  const std::unique_ptr<kernels::Stream> stream = *kernels::Stream::create_cpu(1);
  const auto cache = *Cache::create(m.config(), {.tokens = 64, .sequences = 2});
  const int64_t id = *cache->open();
  const auto prepare = [&](const Batch& batch) {
    return prepare_batch(m.config(), batch, cache.get(), m.arena, *stream).status();
  };
  EXPECT_EQ(prepare({.tokens = std::vector<int32_t>(65, 1), .lengths = {65}, .cached = {id}}).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(prepare({.tokens = {1}, .lengths = {2}, .cached = {id}}).message(),
            "batch: lengths add up to 2, expected 1 tokens");
  EXPECT_EQ(prepare({.tokens = {97}, .lengths = {1}, .cached = {id}}).message(), "batch: tokens[0]: 97, expected 0..96");
  EXPECT_EQ(prepare({.tokens = {1, 1}, .lengths = {1, 1}, .cached = {id, id}}).message(),
            "batch: cache sequence 0 named twice");
  EXPECT_EQ(prepare({.tokens = {1}, .lengths = {1}, .cached = {7}}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(prepare({.tokens = std::vector<int32_t>(4097, 1), .lengths = {4097}, .cached = {}}).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace slipstream::model
