// Goal: over random interleavings of episodes, failures, commits lost and restarts of either side, conservation holds at
// every step, nothing acknowledged is lost and nothing is trained twice; and with max_staleness 0 the batches do not depend
// on the order in which episodes end.
#include <map>
#include <random>
#include <set>

#include "gateway/testing/test_gateway.h"

namespace slipstream::gateway {
namespace {

using testing::Gateway;
using testing::GatewayOptions;

uint64_t dropped(const v1::Counts& counts) {
  uint64_t out = 0;
  for (const auto& [reason, count] : counts.dropped()) out += count;
  return out;
}

// What an episode comes to follows from its id, as it would from its seed.
struct Outcome {
  double reward;
  v1::FinishReason finish;
};
Outcome outcome_of(const EpisodePlan& plan) {
  const uint64_t hash = counter_hash(plan.sampling_seed, "outcome", {});
  if (hash % 10 == 0) return {0, v1::FINISH_REASON_ENV_CRASH};
  if (hash % 10 == 1) return {0, v1::FINISH_REASON_TIMEOUT};
  if (hash % 10 == 2) return {1, v1::FINISH_REASON_LENGTH};
  return {static_cast<double>(hash / 10 % 2), v1::FINISH_REASON_STOP};
}

// Runs `steps` steps with episodes ending in an order drawn from `order`; returns every batch's bytes.
std::vector<std::string> synchronous_run(const GatewayOptions& options, uint64_t order, int steps) {
  std::mt19937_64 random(order);
  Gateway gateway(options);
  gateway.hello(1);
  std::vector<std::string> batches;
  std::vector<EpisodePlan> running;
  for (int step = 0; step < steps; ++step) {
    const int version = step / options.publish_every;
    auto batch = gateway.request(1, step, version);
    while (batch.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      for (const EpisodePlan& plan : gateway.take_all()) running.push_back(plan);
      if (running.empty()) break;  // all it waits for has ended
      std::swap(running[random() % running.size()], running.back());
      const EpisodePlan plan = running.back();
      running.pop_back();
      if (random() % 16 == 0) {
        gateway.ledger().cancel(plan);
        continue;
      }
      const Outcome outcome = outcome_of(plan);
      EXPECT_EQ(plan.min_policy_version, version) << plan.rollout_id;
      EXPECT_TRUE(gateway.finish(plan, outcome.reward, outcome.finish, version).ok());
    }
    const v1::Batch got = testing::get(batch);
    batches.push_back(testing::bytes(got));
    if (random() % 4 == 0) {
      running.clear();  // their episodes die with the gateway, and are planned again
      gateway.reopen();
    }
    if (random() % 2 == 0) gateway.commit(1, step, testing::ids(got));
    if ((step + 1) % options.publish_every == 0) {
      EXPECT_TRUE(gateway.take_all().empty()) << "the episodes of the next step need its version";
    }
    if (::testing::Test::HasFailure()) break;
  }
  return batches;
}

TEST(LedgerProperty, SynchronousBatchesDoNotDependOnTheOrderOfEnds) {
  for (const GatewayOptions& options :
       {GatewayOptions{.group_size = 4, .groups_per_batch = 3},
        GatewayOptions{.group_size = 2, .groups_per_batch = 2, .publish_every = 3, .overlong = Overlong::kDrop},
        GatewayOptions{.group_size = 3, .groups_per_batch = 4, .publish_every = 2, .repair = Repair::kRefill,
                       .overlong = Overlong::kMask}}) {
    const std::vector<std::string> expected = synchronous_run(options, 0, 12);
    ASSERT_EQ(expected.size(), 12u);
    for (uint64_t order = 1; order < 5; ++order) {
      const std::vector<std::string> got = synchronous_run(options, order, 12);
      ASSERT_EQ(got.size(), 12u);
      for (size_t i = 0; i < 12; ++i) ASSERT_EQ(got[i], expected[i]) << "order " << order << ", step " << i;
    }
  }
}

// A learner that checkpoints each step, publishes it, then commits; and a gateway, both of which may die at any point.
class World {
 public:
  World(const GatewayOptions& options, uint64_t seed) : options_(options), random_(seed), gateway_(options) { start_learner(); }

  void run(int events) {
    for (int i = 0; i < events && !::testing::Test::HasFatalFailure(); ++i) {
      one_event();
      check_counts();
    }
    if (!::testing::Test::HasFatalFailure()) check_end();
  }
  int64_t steps() const { return checkpoint_step_; }
  int gateway_restarts() const { return gateway_restarts_; }
  int learner_restarts() const { return static_cast<int>(incarnation_) - 1; }

 private:
  void one_event() {
    const uint64_t dice = random_() % 100;
    if (dice < 30) {
      if (std::optional<EpisodePlan> plan = gateway_.ledger().try_next()) {
        EXPECT_FALSE(acknowledged_.contains(plan->rollout_id)) << plan->rollout_id << " is run again";
        EXPECT_TRUE(running_.emplace(plan->rollout_id, *plan).second) << plan->rollout_id << " runs already";
      }
    } else if (dice < 80) {
      end_episode();
    } else if (dice < 94) {
      learn();
    } else if (dice < 97) {
      start_learner();
    } else {
      restart_gateway();
    }
  }

  void end_episode() {
    if (running_.empty()) return;
    auto chosen = running_.begin();
    std::advance(chosen, static_cast<std::ptrdiff_t>(random_() % running_.size()));
    const EpisodePlan plan = chosen->second;
    running_.erase(chosen);
    if (random_() % 20 == 0) return gateway_.ledger().cancel(plan);
    const Outcome outcome = outcome_of(plan);
    const int versions = published() - plan.min_policy_version + 1;
    ASSERT_GT(versions, 0);
    const int version = plan.min_policy_version + static_cast<int>(random_() % static_cast<uint64_t>(versions));
    const absl::StatusOr<uint64_t> offset = gateway_.finish(plan, outcome.reward, outcome.finish, version);
    ASSERT_TRUE(offset.ok()) << offset.status();
    acknowledged_.insert(plan.rollout_id);
    if (random_() % 10 == 0) {
      const absl::StatusOr<uint64_t> again = gateway_.finish(plan, 9, v1::FINISH_REASON_STOP, version);
      EXPECT_TRUE(again.ok() && (*again == *offset || *again == 0)) << "0: the group was dropped at once and is forgotten";
    }
  }

  int published() const { return static_cast<int>(checkpoint_step_ / options_.publish_every); }

  void learn() {
    if (!batch_.has_value()) batch_ = gateway_.request(incarnation_, checkpoint_step_, published());
    if (batch_->wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) return;
    const absl::StatusOr<v1::Batch> batch = batch_->get();
    batch_.reset();
    ASSERT_TRUE(batch.ok()) << batch.status();
    ASSERT_EQ(batch->groups_size(), options_.groups_per_batch);
    for (int i = 0; i < batch->groups_size(); ++i) {
      const v1::Group& group = batch->groups(i);
      if (i > 0) {
        ASSERT_LT(batch->groups(i - 1).group_number(), group.group_number());
      }
      for (const v1::Trajectory& trajectory : group.trajectories()) {
        ASSERT_LE(published() - trajectory.samples(0).action_policy_versions(0), options_.max_staleness);
        ASSERT_TRUE(acknowledged_.contains(trajectory.rollout_id()));
      }
    }
    if (random_() % 8 == 0) return start_learner();  // killed while it trained
    // The checkpoint: what it holds and whether the gateway was told.
    ++checkpoint_step_;
    for (const std::string& id : testing::ids(*batch)) {
      ASSERT_TRUE(trained_.insert(id).second) << id << " is trained twice";
      untold_.push_back(id);
    }
    if (random_() % 8 == 0) return start_learner();  // killed before it said so
    if (random_() % 3 == 0) return;                  // says so later
    const v1::CommitReply reply = gateway_.commit(incarnation_, checkpoint_step_, untold_);
    if (random_() % 8 == 0) return start_learner();  // killed before it heard the reply
    untold_.clear();
    EXPECT_EQ(reply.counts().trained(), trained_.size());
  }

  void start_learner() {
    batch_.reset();
    gateway_.hello(++incarnation_, checkpoint_step_, untold_);
    untold_.clear();
    EXPECT_EQ(gateway_.ledger().counts().trained(), trained_.size());
  }

  void restart_gateway() {
    const v1::Counts before = gateway_.ledger().counts();
    batch_.reset();
    running_.clear();  // they die with it
    ++gateway_restarts_;
    gateway_.reopen();
    const v1::Counts after = gateway_.ledger().counts();
    EXPECT_EQ(after.produced(), before.produced());
    EXPECT_EQ(after.trained(), before.trained());
    EXPECT_GE(dropped(after), dropped(before));  // it looks at every group, also those behind the last batch
  }

  void check_counts() {
    const v1::Counts counts = gateway_.ledger().counts();
    ASSERT_EQ(counts.produced(), counts.trained() + dropped(counts) + counts.queued());
    ASSERT_EQ(counts.produced(), acknowledged_.size());
    ASSERT_EQ(counts.running(), running_.size());
    const int64_t limit = (options_.max_staleness + 1) * options_.publish_every * options_.group_size * options_.groups_per_batch;
    ASSERT_LE(running_.size(), static_cast<size_t>(limit));
  }

  // Every acknowledged trajectory is accounted for: what was not trained is dropped, or still there after a restart.
  void check_end() {
    gateway_.commit(incarnation_, checkpoint_step_, untold_);
    restart_gateway();
    const v1::Counts counts = gateway_.ledger().counts();
    ASSERT_EQ(counts.trained(), trained_.size());
    ASSERT_EQ(counts.produced(), acknowledged_.size());
    ASSERT_EQ(counts.produced(), counts.trained() + dropped(counts) + counts.queued());
  }

  const GatewayOptions options_;
  std::mt19937_64 random_;
  Gateway gateway_;
  int gateway_restarts_ = 0;

  std::map<std::string, EpisodePlan> running_;
  std::set<std::string> acknowledged_;

  // The learner: its disk ...
  int64_t checkpoint_step_ = 0;
  std::set<std::string> trained_;
  std::vector<std::string> untold_;  // trained, and not known to be committed
  // ... and its memory.
  int64_t incarnation_ = 0;
  std::optional<std::future<absl::StatusOr<v1::Batch>>> batch_;
};

TEST(LedgerProperty, NothingIsLostAndNothingIsTrainedTwice) {
  uint64_t seed = 0;
  for (const GatewayOptions& options :
       {GatewayOptions{.group_size = 4, .groups_per_batch = 2, .max_staleness = 2, .log_segment_bytes = 1 << 13},
        GatewayOptions{.group_size = 2, .groups_per_batch = 3, .max_staleness = 0, .log_segment_bytes = 1 << 12},
        GatewayOptions{.group_size = 3, .groups_per_batch = 2, .max_staleness = 1, .publish_every = 2,
                       .overlong = Overlong::kDrop, .log_segment_bytes = 1 << 12},
        GatewayOptions{.group_size = 4, .groups_per_batch = 1, .max_staleness = 4, .repair = Repair::kRefill,
                       .refills_max = 1, .overlong = Overlong::kMask, .log_segment_bytes = 1 << 14}}) {
    for (int run = 0; run < 3; ++run) {
      SCOPED_TRACE(absl::StrCat("seed ", ++seed));
      World world(options, seed);
      world.run(1200);
      if (::testing::Test::HasFailure()) return;
      EXPECT_GT(world.steps(), 5);
      EXPECT_GT(world.gateway_restarts(), 10);
      EXPECT_GT(world.learner_restarts(), 10);
    }
  }
}

}  // namespace
}  // namespace slipstream::gateway
