// The filters between a complete group and the learner, in the order of rl-spec 5: excluded, stale, repair, zero variance,
// over-long. Pure functions: the ledger asks when a group is complete and again when the learner takes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gateway/config.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::gateway {

// What the filters look at of a trajectory.
struct TrajectorySummary {
  double reward = 0;
  v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;
  int min_policy_version = 0;  // over action tokens; with none, at the start
  int max_policy_version = 0;
  bool has_actions = false;
};
TrajectorySummary summarize(const v1::Trajectory& trajectory);

// Why a trajectory can never be trained on: "env_crash", "timeout", "aborted", "empty" (no action token), "bad_reward"
// (is_reward). It is no evidence about the policy, so it is left out and never counted as reward 0.
std::optional<std::string> exclusion(const TrajectorySummary& trajectory);

// What a reward may be: anything larger is a mistake of an environment, and its square no longer a float.
inline bool is_reward(double value) { return value >= -1e9 && value <= 1e9; }

struct GroupFilters {
  int max_staleness = 0;
  int max_version_span = -1;  // -1: no bound
  Overlong overlong = Overlong::kKeep;
  bool drop_zero_variance = true;
};

// A member of a complete group: what is left of it when it was removed before.
struct GroupMember {
  TrajectorySummary summary;
  std::optional<std::string> dropped;  // the reason; none: still there
};

struct GroupDecision {
  // What becomes of the group: "full", "repaired", or why nothing of it is left: "group_incomplete", "stale",
  // "zero_variance", "overlong".
  std::string outcome;
  bool alive = false;
  std::vector<int> members;                           // alive: indices of the members to deliver, ascending
  std::vector<int> rows;                              // alive: indices into `members`
  std::vector<int> masked;                            // alive: members delivered without loss
  std::vector<std::pair<int, std::string>> drops;     // members to remove now, with the reason
};

// `members` in the order of their group index; a member that never existed has dropped = "missing".
// Deciding again about what a decision left gives the same batch, unless the learner's version has moved on.
GroupDecision decide(const GroupFilters& filters, absl::Span<const GroupMember> members, int learner_policy_version);

// Repair by repetition: n of G rows exist; round-robin up to G when n > G/2, else nothing.
std::vector<int> repeat_rows(int n, int size);

// Takes the loss off every action token.
void mask_actions(v1::Trajectory* trajectory);

}  // namespace slipstream::gateway
