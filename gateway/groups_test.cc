// Goal: cases C7 (repair) and C9 (staleness), and the order of the filters.
#include "gateway/groups.h"

#include <limits>

#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

using testing::Test;
using Indices = std::vector<int>;
using Drops = std::vector<std::pair<int, std::string>>;

GroupMember member(double reward, int version = 0, v1::FinishReason finish = v1::FINISH_REASON_STOP) {
  return {.summary = {.reward = reward, .finish_reason = finish, .min_policy_version = version,
                      .max_policy_version = version, .has_actions = true},
          .dropped = std::nullopt};
}
GroupMember gone(const std::string& reason) { return {.summary = {}, .dropped = reason}; }

TEST(Groups, RepairRepeatsTheValidOnesInTurn) {
  const std::vector<GroupMember> members = {member(1), gone("env_crash"), member(0), member(0), gone("timeout"),
                                            member(1), member(0), gone("aborted")};
  const GroupDecision decision = decide({}, members, 0);
  EXPECT_TRUE(decision.alive);
  EXPECT_EQ(decision.outcome, "repaired");
  EXPECT_EQ(decision.members, (Indices{0, 2, 3, 5, 6}));
  EXPECT_EQ(decision.rows, (Indices{0, 1, 2, 3, 4, 0, 1, 2}));
  EXPECT_TRUE(decision.drops.empty());
}

TEST(Groups, HalfIsNotEnough) {
  std::vector<GroupMember> members = {member(1), member(0), member(1), member(0)};
  members.resize(8, gone("env_crash"));
  const GroupDecision decision = decide({}, members, 0);
  EXPECT_FALSE(decision.alive);
  EXPECT_EQ(decision.outcome, "group_incomplete");
  EXPECT_EQ(decision.drops, (Drops{{0, "group_incomplete"}, {1, "group_incomplete"}, {2, "group_incomplete"},
                                   {3, "group_incomplete"}}));
}

TEST(Groups, EqualRewardsAreDroppedExactlyWhenEqual) {
  std::vector<GroupMember> members(8, member(0.1));
  GroupDecision decision = decide({}, members, 0);
  EXPECT_FALSE(decision.alive);
  EXPECT_EQ(decision.outcome, "zero_variance");
  EXPECT_EQ(decision.drops.size(), 8u);
  EXPECT_TRUE(decide({.drop_zero_variance = false}, members, 0).alive);
  members[3].summary.reward = std::nextafter(0.1, 1.0);
  EXPECT_TRUE(decide({}, members, 0).alive);
  // A group of one has nothing to differ from.
  EXPECT_TRUE(decide({}, std::vector<GroupMember>{member(1)}, 0).alive);
}

TEST(Groups, StalenessIsCountedWhenTheLearnerTakesIt) {
  const std::vector<GroupMember> members = {member(0, 3), member(1, 3)};
  EXPECT_TRUE(decide({.max_staleness = 8}, members, 11).alive);
  const GroupDecision decision = decide({.max_staleness = 8}, members, 12);
  EXPECT_FALSE(decision.alive);
  EXPECT_EQ(decision.outcome, "stale");
  EXPECT_EQ(decision.drops, (Drops{{0, "stale"}, {1, "stale"}}));
  EXPECT_FALSE(decide({.max_staleness = 8}, std::vector<GroupMember>{member(0, 2), member(1, 2)}, 11).alive);
  EXPECT_TRUE(decide({.max_staleness = 8}, std::vector<GroupMember>{member(0, 9), member(1, 10)}, 9).alive);
}

TEST(Groups, VersionsThatTheLearnerHasNotMadeAreDropped) {
  const std::vector<GroupMember> members = {member(0, 10), member(1, 11), member(0, 10)};
  const GroupDecision decision = decide({.drop_zero_variance = false}, members, 9);
  EXPECT_TRUE(decision.alive);
  EXPECT_EQ(decision.drops, (Drops{{1, "unknown_version"}}));
}

TEST(Groups, StaleComesBeforeRepairAndVariance) {
  // The stale member is the only one whose reward differs: without it nothing varies.
  const std::vector<GroupMember> members = {member(1, 1), member(0, 5), member(0, 5), member(0, 5)};
  const GroupDecision decision = decide({.max_staleness = 2}, members, 5);
  EXPECT_EQ(decision.outcome, "zero_variance");
  EXPECT_EQ(decision.drops, (Drops{{0, "stale"}, {1, "zero_variance"}, {2, "zero_variance"}, {3, "zero_variance"}}));
}

TEST(Groups, VersionSpanIsBounded) {
  std::vector<GroupMember> members = {member(0, 5), member(1, 5), member(0, 5)};
  members[0].summary.max_policy_version = 8;
  EXPECT_EQ(decide({.max_staleness = 9}, members, 8).members, (Indices{0, 1, 2}));
  const GroupDecision decision = decide({.max_staleness = 9, .max_version_span = 2}, members, 8);
  EXPECT_EQ(decision.drops, (Drops{{0, "version_span"}}));
  EXPECT_EQ(decision.rows, (Indices{0, 1, 0}));
}

TEST(Groups, OverlongIsKeptMaskedOrDropped) {
  const std::vector<GroupMember> members = {member(1), member(0, 0, v1::FINISH_REASON_LENGTH), member(0), gone("timeout")};
  EXPECT_EQ(decide({}, members, 0).rows, (Indices{0, 1, 2, 0}));
  const GroupDecision masked = decide({.overlong = Overlong::kMask}, members, 0);
  EXPECT_EQ(masked.masked, Indices{1});
  EXPECT_EQ(masked.rows, (Indices{0, 1, 2, 0}));
  const GroupDecision dropped = decide({.overlong = Overlong::kDrop}, members, 0);
  EXPECT_EQ(dropped.drops, (Drops{{1, "overlong"}}));
  EXPECT_EQ(dropped.members, (Indices{0, 2}));
  EXPECT_EQ(dropped.rows, (Indices{0, 1, 0}));
  // Delivered again after a restart: the same batch.
  std::vector<GroupMember> after = members;
  after[1].dropped = "overlong";
  const GroupDecision again = decide({.overlong = Overlong::kDrop}, after, 0);
  EXPECT_EQ(again.rows, dropped.rows);
  EXPECT_EQ(again.members, dropped.members);
  EXPECT_TRUE(again.drops.empty());
  // Nothing is left.
  const std::vector<GroupMember> all(4, member(0, 0, v1::FINISH_REASON_LENGTH));
  EXPECT_EQ(decide({.overlong = Overlong::kDrop, .drop_zero_variance = false}, all, 0).outcome, "overlong");
}

TEST(Groups, SummaryTakesVersionsFromTheTokens) {
  v1::Trajectory trajectory;
  trajectory.set_min_policy_version(7);
  EXPECT_EQ(summarize(trajectory).min_policy_version, 7);
  EXPECT_EQ(exclusion(summarize(trajectory)), "empty");
  v1::Sample* sample = trajectory.add_samples();
  v1::Span* span = sample->add_spans();
  span->set_kind(v1::SPAN_KIND_ACTION);
  span->set_length(5);
  for (const int version : {3, 3, 4, 4, 4}) sample->add_action_policy_versions(version);
  EXPECT_EQ(summarize(trajectory).min_policy_version, 3);
  EXPECT_EQ(summarize(trajectory).max_policy_version, 4);
  EXPECT_EQ(exclusion(summarize(trajectory)), std::nullopt);
  trajectory.set_reward(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(exclusion(summarize(trajectory)), "bad_reward");
  mask_actions(&trajectory);
  EXPECT_EQ(sample->action_masked_size(), 5);
  EXPECT_TRUE(sample->action_masked(4));
}

}  // namespace
}  // namespace slipstream::gateway
