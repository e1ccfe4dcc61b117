// Goal: a pass holds single tokens before prefills and no more rows than allowed; admission follows arrival,
// apart from those that wait for weights; memory that runs out costs kept prefixes first and the youngest
// next, and nothing leaks.
#include "rollout/scheduler.h"

#include "gtest/gtest.h"

namespace slipstream::rollout {
namespace {

model::ModelConfig small_config() {
  model::ModelConfig config;
  config.layers = {{.attention = model::AttentionKind::kGqa}};
  config.gqa = model::GqaConfig{.heads = 1, .kv_heads = 1, .head_dim = 4};
  return config;
}

class SchedulerTest : public ::testing::Test {
 protected:
  void make(int64_t max_running, int64_t step_tokens_max, int64_t cache_tokens) {
    cache_ = *model::Cache::create(config_, {.tokens = cache_tokens, .sequences = max_running + 4});
    scheduler_ = std::make_unique<Scheduler>(
        SchedulerLimits{
            .max_running = max_running, .step_tokens_max = step_tokens_max, .prefix_sessions_max = 4},
        OnUpdate::kRecompute, *cache_);
  }
  void add(uint64_t handle, int64_t tokens, int32_t min_policy_version = 0) {
    auto generation = std::make_unique<Generation>();
    generation->handle = handle;
    generation->request.session_id = std::to_string(handle);
    generation->request.min_policy_version = min_policy_version;
    generation->ids.assign(static_cast<size_t>(tokens), 1);
    scheduler_->add(std::move(generation));
  }
  // Plans a pass and does what the engine does with it: rows are stored, a token is added where one is
  // sampled. Returns (handle, rows) of its pieces.
  std::vector<std::pair<uint64_t, int64_t>> pass(int32_t policy_version = 0) {
    std::vector<std::pair<uint64_t, int64_t>> out;
    for (const Piece& piece : scheduler_->plan(policy_version)) {
      out.push_back({piece.generation->handle, piece.count});
      const bool samples = piece.samples();
      Scheduler::stored(piece, policy_version);
      cache_->advance(piece.generation->cache_id, piece.count);
      if (samples) piece.generation->ids.push_back(2);
    }
    return out;
  }
  using Pieces = std::vector<std::pair<uint64_t, int64_t>>;

  const model::ModelConfig config_ = small_config();
  std::unique_ptr<model::Cache> cache_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(SchedulerTest, SingleTokensThenPrefillsWithinTheBudget) {
  make(4, 10, 1024);
  add(1, 3);
  add(2, 12);
  EXPECT_EQ(pass(), (Pieces{{1, 3}, {2, 7}}));
  add(3, 9);
  EXPECT_EQ(pass(), (Pieces{{1, 1}, {2, 5}, {3, 4}}));
  EXPECT_EQ(pass(), (Pieces{{1, 1}, {2, 1}, {3, 5}}));
  EXPECT_EQ(pass(), (Pieces{{1, 1}, {2, 1}, {3, 1}}));
}

TEST_F(SchedulerTest, NewerWeightsAreWaitedForAside) {
  make(2, 8, 1024);
  add(1, 2, /*min_policy_version=*/5);
  add(2, 2);
  EXPECT_EQ(pass(4), (Pieces{{2, 2}}));
  EXPECT_EQ(scheduler_->waiting(), 1);
  EXPECT_EQ(pass(5), (Pieces{{2, 1}, {1, 2}}));
}

TEST_F(SchedulerTest, TheYoungestMakesRoom) {
  make(3, 64, 4 * 64);
  for (const uint64_t handle : {1, 2, 3}) add(handle, 60);
  for (int i = 0; i < 3; ++i) pass();
  EXPECT_EQ(scheduler_->running(), 3);
  while (scheduler_->preemptions() == 0) pass();
  EXPECT_EQ(scheduler_->running(), 2);
  EXPECT_EQ(pass(), (Pieces{{1, 1}, {2, 1}}));  // 3 waits: it would not fit beside them
  scheduler_->remove(1, /*keep_prefix=*/false);
  const Pieces next = pass();
  ASSERT_EQ(next.size(), 2u);
  EXPECT_EQ(next[0], (std::pair<uint64_t, int64_t>{2, 1}));
  EXPECT_EQ(next[1].first, 3u);
  EXPECT_GT(next[1].second, 60);  // from its ids, what it had sampled included
  scheduler_->remove(2, false);
  scheduler_->remove(3, false);
  EXPECT_EQ(cache_->usage().bytes_used, 0);
}

TEST_F(SchedulerTest, PrefixesGoBeforeTheYoungest) {
  make(2, 64, 3 * 64);
  add(1, 60);
  pass();
  scheduler_->remove(1, /*keep_prefix=*/true);
  EXPECT_EQ(scheduler_->prefixes().sessions(), 1);
  add(2, 60);
  add(3, 60);
  pass();
  for (int i = 0; i < 5; ++i) pass();
  EXPECT_EQ(scheduler_->running(), 2);
  while (scheduler_->prefixes().sessions() > 0) pass();
  EXPECT_EQ(scheduler_->preemptions(), 0);
}

TEST_F(SchedulerTest, NewWeightsStartAgain) {
  make(2, 64, 1024);
  add(1, 10);
  pass(0);
  pass(0);
  scheduler_->weights_changed();
  EXPECT_EQ(pass(1), (Pieces{{1, 12}}));
  scheduler_->visit([](const Generation& generation) { EXPECT_EQ(generation.oldest_version, 1); });
}

}  // namespace
}  // namespace slipstream::rollout
