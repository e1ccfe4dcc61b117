// Goal: the life of trajectories as rl-spec 3 and 5 have it, admission as C9 has it, and what survives whose restart.
#include "gateway/ledger.h"

#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>

#include "gateway/testing/test_gateway.h"
#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

using testing::Gateway;

TEST(Ledger, AdmissionAfterRecovery) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 2, .max_staleness = 2});
  EXPECT_TRUE(gateway.take_all().empty()) << "nothing starts before the learner asks for rollouts";
  gateway.hello(1, 50);
  auto batch = gateway.request(1, 50, 50);
  const std::vector<EpisodePlan> plans = gateway.take_all();
  EXPECT_EQ(plans.size(), 12u);
  EXPECT_EQ(plans[0].min_policy_version, 48);
  EXPECT_EQ(gateway.ledger().counts().running(), 12u);
  EXPECT_EQ(gateway.ledger().learner_policy_version(), 50);
}

TEST(Ledger, GroupsAreHandedOutMemberByMember) {
  Gateway gateway({.group_size = 3, .groups_per_batch = 2});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  const std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_EQ(plans.size(), 6u);
  std::set<uint64_t> seeds;
  for (size_t i = 0; i < plans.size(); ++i) {
    EXPECT_EQ(plans[i].rollout_id, absl::StrCat("run-g", i / 3, "-", i % 3));
    EXPECT_EQ(plans[i].group_id, absl::StrCat("run-g", i / 3));
    EXPECT_EQ(plans[i].group_index, static_cast<int>(i % 3));
    EXPECT_EQ(plans[i].instance, plans[i / 3 * 3].instance);
    EXPECT_EQ(plans[i].environment, "arithmetic");
    seeds.insert(plans[i].sampling_seed);
  }
  EXPECT_EQ(seeds.size(), 6u);
}

TEST(Ledger, BatchComesSortedIsRepeatableAndEndsWithItsCommit) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 2});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_EQ(plans.size(), 4u);
  for (auto plan = plans.rbegin(); plan != plans.rend(); ++plan) ASSERT_TRUE(gateway.finish(*plan, plan->group_index).ok());
  const v1::Batch first = testing::get(batch);
  ASSERT_EQ(first.groups_size(), 2);
  EXPECT_EQ(first.groups(0).group_number(), 0u);
  EXPECT_EQ(first.groups(1).group_number(), 1u);
  EXPECT_EQ(first.groups(1).trajectories(1).rollout_id(), "run-g1-1");
  EXPECT_EQ(first.groups(1).trajectories(1).reward(), 1.0);
  EXPECT_EQ(first.counts().queued(), 4u);
  auto again = gateway.request(1, 0, 0);
  EXPECT_EQ(testing::bytes(testing::get(again)), testing::bytes(first));
  EXPECT_TRUE(gateway.take_all().empty()) << "a delivered batch holds back admission until the next is asked for";

  auto next = gateway.request(1, 1, 1);
  EXPECT_EQ(gateway.take_all().size(), 4u);
  const v1::CommitReply reply = gateway.commit(1, 1, testing::ids(first));
  EXPECT_EQ(reply.counts().trained(), 4u);
  EXPECT_EQ(reply.counts().queued(), 0u);
  EXPECT_EQ(gateway.commit(1, 1, testing::ids(first)).counts().trained(), 4u);
  EXPECT_EQ(gateway.try_request(1, 0, 0).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Ledger, FailedEpisodesAreExcludedAndTheGroupRepaired) {
  Gateway gateway({.group_size = 4, .groups_per_batch = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_TRUE(gateway.finish(plans[0], 1).ok());
  ASSERT_TRUE(gateway.finish(plans[1], 0, v1::FINISH_REASON_ENV_CRASH).ok());
  ASSERT_TRUE(gateway.finish(plans[2], 0).ok());
  EXPECT_EQ(gateway.ledger().counts().dropped().at("env_crash"), 1u);
  ASSERT_TRUE(gateway.finish(plans[3], 1).ok());
  const v1::Group group = testing::get(batch).groups(0);
  EXPECT_EQ(group.trajectories_size(), 3);
  EXPECT_EQ(std::vector<int>(group.rows().begin(), group.rows().end()), (std::vector<int>{0, 1, 2, 0}));
  EXPECT_EQ(gateway.metrics().value(metric::kGroups, {"repaired"}), 1);
  EXPECT_EQ(gateway.metrics().value(metric::kTrajectories, {"add", "env_crash"}), 1);
}

TEST(Ledger, DeadGroupsMakeRoomForOthers) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 2});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_TRUE(gateway.finish(plans[0], 1).ok());
  ASSERT_TRUE(gateway.finish(plans[1], 0, v1::FINISH_REASON_TIMEOUT).ok());  // one of two is not more than half
  for (const EpisodePlan& plan : {plans[2], plans[3]}) ASSERT_TRUE(gateway.finish(plan, 1).ok());
  const v1::Counts counts = gateway.ledger().counts();
  EXPECT_EQ(counts.dropped().at("timeout"), 1u);
  EXPECT_EQ(counts.dropped().at("group_incomplete"), 1u);
  EXPECT_EQ(counts.dropped().at("zero_variance"), 2u);
  plans = gateway.take_all();
  ASSERT_EQ(plans.size(), 4u);
  EXPECT_EQ(plans[0].group_number, 2u);
  for (const EpisodePlan& plan : plans) ASSERT_TRUE(gateway.finish(plan, plan.group_index).ok());
  EXPECT_EQ(testing::get(batch).groups(0).group_number(), 2u);
}

TEST(Ledger, ADroughtIsToldWithItsReasons) {
  const slipstream::testing::TemporaryDirectory logs;
  Gateway gateway({.group_size = 2, .groups_per_batch = 2, .logger = *make_logger("gateway", logs.path())});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  const auto warnings = [&] {
    std::ifstream file(logs.path() + "/gateway.log");
    int count = 0;
    for (std::string line; std::getline(file, line);) count += line.find("left the learner nothing") != std::string::npos;
    return count;
  };
  for (int group = 0; group < 32;) {
    EXPECT_EQ(warnings(), 0) << group;
    for (const EpisodePlan& plan : gateway.take_all()) {
      const bool late = plan.group_number == 5;
      ASSERT_TRUE(gateway.finish(plan, 1, late ? v1::FINISH_REASON_TIMEOUT : v1::FINISH_REASON_STOP).ok());
      group += plan.group_index;
      if (group == 32) break;
    }
  }
  EXPECT_EQ(warnings(), 1);
  std::ifstream file(logs.path() + "/gateway.log");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(text.find("the last 32 groups left the learner nothing; their trajectories were dropped: 2 timeout, 62 zero_variance"),
            std::string::npos)
      << text;
}

TEST(Ledger, RefillRunsTheMissingEpisodesAgainAFewTimes) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1, .repair = Repair::kRefill, .refills_max = 2});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_TRUE(gateway.finish(plans[0], 1).ok());
  ASSERT_TRUE(gateway.finish(plans[1], 0, v1::FINISH_REASON_ENV_CRASH).ok());
  std::vector<EpisodePlan> refill = gateway.take_all();
  ASSERT_EQ(refill.size(), 1u);
  EXPECT_EQ(refill[0].rollout_id, "run-g0-1-r1");
  EXPECT_EQ(refill[0].instance, plans[1].instance);
  EXPECT_NE(refill[0].sampling_seed, plans[1].sampling_seed);
  gateway.reopen();
  auto after = gateway.request(1, 0, 0);
  refill = gateway.take_all();
  ASSERT_EQ(refill.size(), 1u);
  EXPECT_EQ(refill[0].rollout_id, "run-g0-1-r1");
  ASSERT_TRUE(gateway.finish(refill[0], 0).ok());
  const v1::Batch delivered = testing::get(after);
  EXPECT_EQ(testing::ids(delivered), (std::vector<std::string>{"run-g0-0", "run-g0-1-r1"}));
  gateway.commit(1, 1, testing::ids(delivered));
  // The next group fails until the refills are used up.
  auto next = gateway.request(1, 1, 1);
  plans = gateway.take_all();
  ASSERT_TRUE(gateway.finish(plans[0], 1, v1::FINISH_REASON_STOP, 1).ok());
  std::vector<std::string> ids;
  for (EpisodePlan plan = plans[1]; plan.group_number == 1; plan = gateway.take_all().at(0)) {
    ids.push_back(plan.rollout_id);
    ASSERT_TRUE(gateway.finish(plan, 0, v1::FINISH_REASON_ABORTED).ok());
  }
  EXPECT_EQ(ids, (std::vector<std::string>{"run-g1-1", "run-g1-1-r1", "run-g1-1-r2"}));
  EXPECT_EQ(gateway.ledger().counts().dropped().at("group_incomplete"), 1u);
}

TEST(Ledger, StaleInTheQueueIsDroppedOnce) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1, .max_staleness = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_EQ(plans.size(), 4u);
  for (const EpisodePlan& plan : plans) ASSERT_TRUE(gateway.finish(plan, plan.group_index).ok());  // all at version 0
  const v1::Batch first = testing::get(batch);
  gateway.commit(1, 1, testing::ids(first));
  batch = gateway.request(1, 2, 2);  // version 2: what waited is two versions old
  EXPECT_EQ(gateway.ledger().counts().dropped().at("stale"), 2u);
  EXPECT_EQ(gateway.ledger().counts().queued(), 0u);
  EXPECT_EQ(gateway.take_all().size(), 4u);
  EXPECT_EQ(gateway.metrics().value(metric::kGroups, {"stale"}), 1);
}

TEST(Ledger, FinishingTwiceGivesTheFirstOffset) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  std::vector<EpisodePlan> plans = gateway.take_all();
  auto first = gateway.finish_later(plans[0], 1);
  auto second = gateway.finish_later(plans[0], 0);
  const absl::StatusOr<uint64_t> offset = first.get();
  ASSERT_TRUE(offset.ok());
  EXPECT_EQ(*second.get(), *offset);
  EXPECT_EQ(*gateway.finish(plans[0], 0), *offset);
  EXPECT_EQ(gateway.ledger().counts().produced(), 1u);
  EXPECT_EQ(gateway.ledger().counts().running(), 1u);
  gateway.reopen();
  EXPECT_EQ(*gateway.finish(plans[0], 0), *offset);
  EXPECT_EQ(gateway.ledger().counts().produced(), 1u);
}

TEST(Ledger, ACancelledEpisodeIsPlannedAgain) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  const std::vector<EpisodePlan> plans = gateway.take_all();
  gateway.ledger().cancel(plans[1]);
  gateway.ledger().cancel(plans[1]);
  const std::vector<EpisodePlan> again = gateway.take_all();
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].rollout_id, plans[1].rollout_id);
  EXPECT_EQ(again[0].sampling_seed, plans[1].sampling_seed);
  EXPECT_EQ(gateway.ledger().counts().running(), 2u);
}

TEST(Ledger, ARestartedGatewayKnowsWhatWasFinishedAndWhatWasDelivered) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1, .max_staleness = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_EQ(plans.size(), 4u);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(gateway.finish(plans[i], plans[i].group_index).ok());
  const v1::Batch first = testing::get(batch);
  gateway.reopen();
  EXPECT_EQ(gateway.ledger().counts().produced(), 3u);
  std::vector<EpisodePlan> again = gateway.take_all();
  ASSERT_EQ(again.size(), 1u) << "the lost member, at once; nothing new, since the learner is at step 0 still";
  EXPECT_EQ(again[0].rollout_id, "run-g1-1");
  EXPECT_EQ(again[0].sampling_seed, plans[3].sampling_seed);
  auto repeated = gateway.request(1, 0, 0);
  EXPECT_EQ(testing::bytes(testing::get(repeated)), testing::bytes(first));
  auto second = gateway.request(1, 1, 1);
  ASSERT_TRUE(gateway.finish(again[0], 1).ok());
  EXPECT_EQ(testing::ids(testing::get(second)), (std::vector<std::string>{"run-g1-0", "run-g1-1"}));
}

TEST(Ledger, ANewLearnerGetsTheSameBatchesAgain) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1, .max_staleness = 2, .overlong = Overlong::kDrop});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  for (const EpisodePlan& plan : gateway.take_all()) {
    const bool overlong = plan.group_number == 1 && plan.group_index == 1;
    ASSERT_TRUE(gateway.finish(plan, plan.group_index, overlong ? v1::FINISH_REASON_LENGTH : v1::FINISH_REASON_STOP).ok());
  }
  const std::string first = testing::bytes(testing::get(batch));
  batch = gateway.request(1, 1, 1);
  const std::string second = testing::bytes(testing::get(batch));
  EXPECT_EQ(gateway.ledger().counts().dropped().at("overlong"), 1u);
  for (int life = 2; life < 4; ++life) {
    if (life == 3) gateway.reopen();
    gateway.hello(life);
    EXPECT_EQ(gateway.try_request(life - 1, 0, 0).code(), absl::StatusCode::kFailedPrecondition);
    batch = gateway.request(life, 0, 0);
    EXPECT_EQ(testing::bytes_but_life(testing::get(batch)), testing::bytes_but_life(testing::parse(first)));
    batch = gateway.request(life, 1, 1);
    EXPECT_EQ(testing::bytes_but_life(testing::get(batch)), testing::bytes_but_life(testing::parse(second)));
  }
}

TEST(Ledger, HelloSettlesALostCommitAndRefusesAStaleCheckpoint) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  for (const EpisodePlan& plan : gateway.take_all()) ASSERT_TRUE(gateway.finish(plan, plan.group_index).ok());
  const v1::Batch first = testing::get(batch);
  gateway.hello(2, 1, testing::ids(first));  // trained, checkpointed and killed before the commit arrived
  EXPECT_EQ(gateway.ledger().counts().trained(), 2u);
  EXPECT_EQ(gateway.ledger().counts().queued(), 0u);
  const absl::Status stale = gateway.try_hello(3, 0);
  EXPECT_EQ(stale.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(stale.message().find("stale checkpoint"), absl::string_view::npos) << stale;
  EXPECT_EQ(gateway.try_hello(1, 1).code(), absl::StatusCode::kFailedPrecondition);
  v1::Hello other;
  other.set_run_id("other");
  other.set_incarnation(9);
  EXPECT_EQ(gateway.say(other).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(gateway.try_commit(1, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(gateway.try_commit(7, 1).code(), absl::StatusCode::kFailedPrecondition);
  gateway.hello(2, 1);  // a repetition
  batch = gateway.request(2, 1, 1);
  EXPECT_EQ(gateway.take_all()[0].group_number, 1u);
}

TEST(Ledger, WhatACommitLeavesOutIsDroppedWithTheNext) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  gateway.hello(1);
  for (int step = 0; step < 2; ++step) {
    auto batch = gateway.request(1, step, step);
    for (const EpisodePlan& plan : gateway.take_all()) {
      ASSERT_TRUE(gateway.finish(plan, plan.group_index, v1::FINISH_REASON_STOP, step).ok());
    }
    const v1::Batch delivered = testing::get(batch);
    v1::Commit commit;
    commit.set_incarnation(1);
    commit.set_step(step + 1);
    commit.add_trained_rollout_ids(delivered.groups(0).trajectories(0).rollout_id());
    if (step == 1) (*commit.mutable_dropped())["non_finite"].add_rollout_ids(testing::ids(delivered)[1]);
    ASSERT_TRUE(gateway.say(commit).ok());
  }
  const v1::Counts counts = gateway.ledger().counts();
  EXPECT_EQ(counts.trained(), 2u);
  EXPECT_EQ(counts.dropped().at("not_trained"), 1u);
  EXPECT_EQ(counts.dropped().at("non_finite"), 1u);
  EXPECT_EQ(counts.queued(), 0u);
}

TEST(Ledger, AFinalCommitEndsAdmissionForGood) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  v1::Commit commit;
  commit.set_incarnation(1);
  commit.set_step(1);
  commit.set_final(true);
  ASSERT_TRUE(gateway.say(commit).ok());
  EXPECT_TRUE(gateway.ledger().run_complete());
  EXPECT_TRUE(gateway.take_all().empty());
  EXPECT_EQ(gateway.ledger().admit("t", "", 0).status().code(), absl::StatusCode::kResourceExhausted);
  gateway.reopen();
  EXPECT_TRUE(gateway.ledger().run_complete());
}

TEST(Ledger, AgentsJoinGroupsOfTheirOwn) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 2, .environments = false});
  EXPECT_EQ(gateway.ledger().admit("chat", "g", 2).status().code(), absl::StatusCode::kResourceExhausted);
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  EXPECT_TRUE(gateway.take_all().empty());
  const auto first = gateway.ledger().admit("chat", "g", 2), second = gateway.ledger().admit("chat", "g", 2);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->group_number, second->group_number);
  EXPECT_EQ(second->group_index, 1);
  EXPECT_EQ(gateway.ledger().admit("chat", "g", 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(gateway.ledger().admit("chat", "g", 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(gateway.ledger().admit("chat", "h", 3).status().code(), absl::StatusCode::kInvalidArgument);
  const auto alone = gateway.ledger().admit("chat", "", 0);
  ASSERT_TRUE(alone.ok());
  EXPECT_EQ(gateway.ledger().admit("chat", "k", 2).status().code(), absl::StatusCode::kResourceExhausted);
  gateway.ledger().cancel(*second);
  const auto replaced = gateway.ledger().admit("chat", "g", 2);
  ASSERT_TRUE(replaced.ok());
  EXPECT_EQ(replaced->rollout_id, "run-g0-1-r1");
  EXPECT_EQ(gateway.finish(*second, 1).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(gateway.finish(*first, 1).ok());
  ASSERT_TRUE(gateway.finish(*replaced, 0).ok());
  ASSERT_TRUE(gateway.finish(*alone, 1).ok());
  const v1::Batch delivered = testing::get(batch);
  EXPECT_EQ(delivered.groups(0).group_id(), "g");
  EXPECT_EQ(delivered.groups(1).rows_size(), 1);
  EXPECT_EQ(gateway.metrics().value(metric::kTrajectories, {"external", "stop"}), 3);
}

TEST(Ledger, AGroupWhoseAgentsStayAwayIsClosed) {
  Gateway gateway({.group_size = 3, .groups_per_batch = 1, .environments = false, .session_idle_ms = 0});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  const auto first = gateway.ledger().admit("chat", "g", 3);
  ASSERT_TRUE(gateway.finish(*first, 1).ok());
  const auto next = gateway.ledger().admit("chat", "h", 3);  // there is room: "g" was given up
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(gateway.ledger().counts().dropped().at("group_incomplete"), 1u);
}

TEST(Ledger, DemonstrationsAreMadeOnRequestAndNotCounted) {
  std::vector<std::string> batches;
  for (const bool reversed : {false, true}) {
    Gateway gateway({.group_size = 2, .groups_per_batch = 1});
    gateway.hello(1);
    auto batch = gateway.request(1, 0, 0, v1::TRAJECTORY_KIND_DEMONSTRATION, 4);
    std::vector<EpisodePlan> plans = gateway.take_all();
    ASSERT_EQ(plans.size(), 8u) << "the next step's are made ahead";
    EXPECT_EQ(plans[0].rollout_id, "run-demo0-0");
    EXPECT_EQ(plans[4].rollout_id, "run-demo1-0");
    if (reversed) std::reverse(plans.begin(), plans.end());
    for (const EpisodePlan& plan : plans) {
      ASSERT_TRUE(gateway.finish(plan, 1, plan.rollout_id == "run-demo0-2" ? v1::FINISH_REASON_ENV_CRASH
                                                                            : v1::FINISH_REASON_ENV_DONE).ok());
    }
    plans = gateway.take_all();
    ASSERT_EQ(plans.size(), 1u);
    EXPECT_EQ(plans[0].rollout_id, "run-demo0-2-r1");
    EXPECT_EQ(plans[0].kind, v1::TRAJECTORY_KIND_DEMONSTRATION);
    gateway.ledger().cancel(plans[0]);
    plans = gateway.take_all();
    ASSERT_EQ(plans.size(), 1u);
    ASSERT_TRUE(gateway.finish(plans[0], 1).ok());
    const v1::Batch first = testing::get(batch);
    ASSERT_EQ(first.groups_size(), 4);
    EXPECT_EQ(first.groups(2).trajectories(0).rollout_id(), "run-demo0-2-r1");
    EXPECT_EQ(first.counts().produced(), 0u);
    batch = gateway.request(1, 1, 0, v1::TRAJECTORY_KIND_DEMONSTRATION, 4);
    batches.push_back(testing::bytes(first) + testing::bytes(testing::get(batch)));
    batch = gateway.request(1, 2, 1);
    plans = gateway.take_all();
    ASSERT_GE(plans.size(), 2u);
    for (const EpisodePlan& plan : plans) {
      EXPECT_EQ(plan.kind, v1::TRAJECTORY_KIND_ROLLOUT) << "no more demonstrations";
      EXPECT_EQ(plan.min_policy_version, 1) << "the model before its warm-up is not one version behind";
    }
  }
  EXPECT_EQ(batches[0], batches[1]);
}

TEST(Ledger, BadRequestsNameTheField) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 2});
  EXPECT_EQ(gateway.try_request(1, 0, 0).code(), absl::StatusCode::kFailedPrecondition) << "no hello";
  EXPECT_EQ(gateway.try_hello(0).code(), absl::StatusCode::kInvalidArgument);
  gateway.hello(1);
  v1::BatchRequest request;
  request.set_incarnation(1);
  request.set_kind(v1::TRAJECTORY_KIND_ROLLOUT);
  request.set_num_groups(3);
  EXPECT_EQ(gateway.say(request).message(), "num_groups 3, expected 1 .. 2 (rl.groups_per_batch)");
  request.set_num_groups(2);
  request.clear_kind();
  EXPECT_EQ(gateway.say(request).code(), absl::StatusCode::kInvalidArgument);
}

// The episode goes on being ours when the disk is full, and the ledger works again when it is not.
TEST(Ledger, AFullDiskIsToldAndOvercome) {
  ASSERT_NE(signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit unlimited;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  const std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_TRUE(gateway.finish(plans[0], 1).ok());
  rlimit limited = unlimited;
  limited.rlim_cur = 16;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
  EXPECT_EQ(gateway.finish(plans[1], 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(gateway.ledger().counts().produced(), 1u);
  EXPECT_EQ(gateway.ledger().counts().running(), 1u);
  EXPECT_EQ(gateway.try_hello(2).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &unlimited), 0);
  gateway.hello(2);
  batch = gateway.request(2, 0, 0);
  ASSERT_TRUE(gateway.finish(plans[1], 0).ok());
  EXPECT_EQ(testing::ids(testing::get(batch)).size(), 2u);
  gateway.reopen();
  EXPECT_EQ(gateway.ledger().counts().produced(), 2u);
}

TEST(Ledger, NextWaitsForAdmissionAndForStop) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  std::vector<std::future<std::optional<EpisodePlan>>> waiting;
  std::stop_source stop;
  for (int i = 0; i < 5; ++i) {
    waiting.push_back(std::async(std::launch::async, [&] { return gateway.ledger().next(stop.get_token()); }));
  }
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  while (gateway.ledger().counts().running() < 2) std::this_thread::yield();
  stop.request_stop();
  int got = 0;
  for (auto& future : waiting) got += future.get().has_value();
  EXPECT_EQ(got, 2);
  gateway.ledger().stop();
  EXPECT_EQ(gateway.ledger().next({}), std::nullopt);
}

TEST(Ledger, ScrapesAddUpAcrossARestart) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  gateway.hello(1);
  auto batch = gateway.request(1, 0, 0);
  const std::vector<EpisodePlan> plans = gateway.take_all();
  ASSERT_TRUE(gateway.finish(plans[0], 1).ok());
  ASSERT_TRUE(gateway.finish(plans[1], 0, v1::FINISH_REASON_ENV_CRASH).ok());
  for (int i = 0; i < 2; ++i) {
    const std::string text = gateway.metrics().text();
    EXPECT_NE(text.find("slipstream_produced_trajectories_total 2"), std::string::npos) << text;
    EXPECT_NE(text.find("slipstream_dropped_trajectories_total{reason=\"env_crash\"} 1"), std::string::npos) << text;
    EXPECT_NE(text.find("slipstream_dropped_trajectories_total{reason=\"group_incomplete\"} 1"), std::string::npos) << text;
    EXPECT_NE(text.find("slipstream_queued_trajectories 0"), std::string::npos) << text;
    gateway.reopen();
  }
}

// Disk space is given back as steps are committed, and nothing of the counts with it.
TEST(Ledger, OldSegmentsGo) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1, .log_segment_bytes = 4096});
  gateway.hello(1);
  for (int step = 0; step < 40; ++step) {
    auto batch = gateway.request(1, step, step);
    for (const EpisodePlan& plan : gateway.take_all()) {
      ASSERT_TRUE(gateway.finish(plan, plan.group_index, v1::FINISH_REASON_STOP, step).ok());
    }
    gateway.commit(1, step + 1, testing::ids(testing::get(batch)));
  }
  gateway.reopen();
  EXPECT_EQ(gateway.ledger().counts().trained(), 80u);
  EXPECT_EQ(gateway.try_hello(2, 39).code(), absl::StatusCode::kFailedPrecondition);
  int files = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(gateway.log_directory())) ++files;
  EXPECT_LE(files, 3) << "the lock, the segment being written and at most one more";
  auto batch = gateway.request(1, 40, 40);
  EXPECT_EQ(gateway.take_all()[0].group_number, 40u);
}

// A learner's Hello from a checkpoint that was trained from the log `id` up to group `groups_end`.
v1::Hello from_checkpoint(int64_t incarnation, int64_t step, const std::string& id, uint64_t groups_end) {
  v1::Hello out;
  out.set_run_id("run");
  out.set_incarnation(incarnation);
  out.set_committed_step(step);
  out.set_log_id(id);
  out.set_groups_end(groups_end);
  return out;
}

// Goal: rollout ids are never given out twice: a log that was deleted, emptied or set back beside a learner's checkpoints is
// refused, naming both, and the log that belongs to them is not.
TEST(Ledger, ALogThatTheCheckpointWasNotTrainedFromIsRefused) {
  Gateway gateway({});
  const absl::StatusOr<v1::HelloReply> reply = gateway.hello(from_checkpoint(1, 0, "", 0));
  ASSERT_TRUE(reply.ok()) << reply.status();
  const std::string id = reply->log_id();
  EXPECT_FALSE(id.empty());
  auto batch = gateway.request(1, 1, 0);
  for (const EpisodePlan& plan : gateway.take_all()) ASSERT_TRUE(gateway.finish(plan, plan.group_index).ok());
  gateway.commit(1, 1, testing::ids(testing::get(batch)));

  const auto refused = [&](const v1::Hello& hello, const std::string& text) {
    const absl::Status status = gateway.say(hello);
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_NE(status.message().find("the checkpoint of step"), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find(gateway.log_directory()), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
  };
  gateway.reopen();
  EXPECT_EQ(gateway.hello(from_checkpoint(2, 1, id, 1))->log_id(), id);
  refused(from_checkpoint(3, 1, id, 9), "trained on group 8");  // the log is older than the checkpoint
  refused(from_checkpoint(3, 1, "another", 1), "instead of another");

  gateway.lose_log();
  refused(from_checkpoint(3, 1, id, 1), "instead of " + id);
  ASSERT_TRUE(gateway.say(from_checkpoint(3, 0, "", 0)).ok());
}

TEST(Ledger, WhatMustBeAlikeIs) {
  Gateway gateway({.group_size = 4});
  v1::Hello hello = from_checkpoint(1, 0, "", 0);
  for (const auto& [key, value] : gateway.config().job.settings()) (*hello.mutable_settings())[key] = value;
  ASSERT_TRUE(gateway.say(hello).ok());
  hello.set_incarnation(2);
  (*hello.mutable_settings())["rl.group_size"] = "8";
  EXPECT_EQ(gateway.say(hello), absl::InvalidArgumentError("rl.group_size: the learner has 8, this gateway 4; expected the same"));
  (*hello.mutable_settings())["rl.group_size"] = "4";
  EXPECT_TRUE(gateway.say(hello).ok());

  // And over restarts, what the meaning of a rollout id hangs on.
  const auto refused = [&](const std::string& tokenizer, const std::string& text) {
    const absl::Status status = gateway.try_reopen(tokenizer);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find(gateway.log_directory()), absl::string_view::npos) << status;
  };
  gateway.config().job.group_size = 8;
  refused("tokenizer", "rl.group_size: 8, but the run began with 4");
  gateway.config().job.group_size = 4;
  gateway.config().job.seed = 2;
  refused("tokenizer", "run.seed: 2, but the run began with 1");
  gateway.config().job.seed = 1;
  refused("other", "chat.tokenizer: other, but the run began with tokenizer");
  gateway.config().job.max_staleness = 3;  // others may change
  gateway.reopen();
}

}  // namespace
}  // namespace slipstream::gateway
