#include "gateway/groups.h"

#include <algorithm>
#include <cmath>

#include "proto/words.h"

namespace slipstream::gateway {

TrajectorySummary summarize(const v1::Trajectory& trajectory) {
  TrajectorySummary out{.reward = trajectory.reward(),
                        .finish_reason = trajectory.finish_reason(),
                        .min_policy_version = trajectory.min_policy_version(),
                        .max_policy_version = trajectory.min_policy_version()};
  bool first = true;
  for (const v1::Sample& sample : trajectory.samples()) {
    for (const v1::Span& span : sample.spans()) out.has_actions |= span.kind() == v1::SPAN_KIND_ACTION && span.length() > 0;
    for (const int32_t version : sample.action_policy_versions()) {
      out.min_policy_version = first ? version : std::min(out.min_policy_version, version);
      out.max_policy_version = first ? version : std::max(out.max_policy_version, version);
      first = false;
    }
  }
  return out;
}

std::optional<std::string> exclusion(const TrajectorySummary& trajectory) {
  if (rpc::is_failure(trajectory.finish_reason)) return rpc::word_of(trajectory.finish_reason);
  if (!is_reward(trajectory.reward)) return "bad_reward";
  if (!trajectory.has_actions) return "empty";
  return std::nullopt;
}

std::vector<int> repeat_rows(int n, int size) {
  std::vector<int> rows;
  if (2 * n <= size) return rows;
  for (int row = 0; row < std::max(n, size); ++row) rows.push_back(row % n);
  return rows;
}

GroupDecision decide(const GroupFilters& filters, absl::Span<const GroupMember> members, int learner_policy_version) {
  GroupDecision out;
  const int size = static_cast<int>(members.size());
  std::vector<int> valid;
  bool stale = false;
  for (int i = 0; i < size; ++i) {
    // What "overlong" removed before took part in repair and variance then, and does again.
    if (members[i].dropped.has_value() && *members[i].dropped != "overlong") {
      stale |= *members[i].dropped == "stale" || *members[i].dropped == "version_span";
      continue;
    }
    const TrajectorySummary& summary = members[i].summary;
    const char* reason = nullptr;
    // The learner publishes before it asks for the next batch, so one version ahead of what it said last is right.
    if (summary.max_policy_version > learner_policy_version + 1) {
      reason = "unknown_version";
    } else if (learner_policy_version - summary.min_policy_version > filters.max_staleness) {
      reason = "stale";
    } else if (filters.max_version_span >= 0 &&
               summary.max_policy_version - summary.min_policy_version > filters.max_version_span) {
      reason = "version_span";
    }
    if (reason == nullptr) {
      valid.push_back(i);
    } else {
      stale = true;
      if (!members[i].dropped.has_value()) out.drops.emplace_back(i, reason);
    }
  }
  const auto drop_rest = [&](const std::string& outcome, const std::string& reason) {
    for (const int i : valid) {
      if (!members[i].dropped.has_value()) out.drops.emplace_back(i, reason);
    }
    out.outcome = outcome;
    return out;
  };
  const std::vector<int> rows = repeat_rows(static_cast<int>(valid.size()), size);
  if (rows.empty()) return drop_rest(stale ? "stale" : "group_incomplete", "group_incomplete");
  // A group of one has no baseline to differ from: it is for objectives that need none.
  if (filters.drop_zero_variance && size > 1) {
    const auto [least, most] = std::minmax_element(valid.begin(), valid.end(), [&](int a, int b) {
      return members[a].summary.reward < members[b].summary.reward;
    });
    if (members[*least].summary.reward == members[*most].summary.reward) return drop_rest("zero_variance", "zero_variance");
  }
  std::vector<int> place(valid.size(), -1);  // in out.members
  for (size_t v = 0; v < valid.size(); ++v) {
    const int i = valid[v];
    const bool overlong = members[i].summary.finish_reason == v1::FINISH_REASON_LENGTH;
    if (members[i].dropped.has_value()) continue;
    if (overlong && filters.overlong == Overlong::kDrop) {
      out.drops.emplace_back(i, "overlong");
      continue;
    }
    if (overlong && filters.overlong == Overlong::kMask) out.masked.push_back(i);
    place[v] = static_cast<int>(out.members.size());
    out.members.push_back(i);
  }
  if (out.members.empty()) {
    out.outcome = "overlong";
    return out;
  }
  for (const int row : rows) {
    if (place[row] >= 0) out.rows.push_back(place[row]);
  }
  out.alive = true;
  out.outcome = static_cast<int>(valid.size()) < size ? "repaired" : "full";
  return out;
}

void mask_actions(v1::Trajectory* trajectory) {
  for (v1::Sample& sample : *trajectory->mutable_samples()) {
    int64_t actions = 0;
    for (const v1::Span& span : sample.spans()) actions += span.kind() == v1::SPAN_KIND_ACTION ? span.length() : 0;
    sample.clear_action_masked();
    sample.mutable_action_masked()->Resize(static_cast<int>(actions), true);
  }
}

}  // namespace slipstream::gateway
