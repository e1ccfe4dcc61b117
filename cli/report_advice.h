// What the numbers of a run say, in words.
#pragma once

#include <string>
#include <vector>

#include "cli/report_data.h"

namespace slipstream::cli {

struct Advice {
  enum Kind { kGood, kHint, kWarning } kind = kHint;
  std::string text;
};

// Shares of wall time over steps [begin, end); NaN: not recorded.
struct WaitShares {
  double wait_data, train, checkpoint, publish;
  double rollout_idle, gateway_idle;
};
WaitShares wait_shares(const RunData& run, size_t begin, size_t end);
// Wall seconds of every step: time since the one before.
Column step_seconds(const RunData& run);
// The first step after the warm-up; 0 when there is nothing but warm-up.
size_t first_rl_step(const RunData& run);
// Steps [tail_begin, end) are what "now" means: the last tenth of the RL phase, at least five steps.
size_t tail_begin(const RunData& run);
// Mean rewards of the first and the last steps of the RL phase.
constexpr int kRewardSteps = 10;
struct RewardChange {
  double before, now;
};
RewardChange reward_change(const RunData& run);

std::vector<Advice> advise(const RunData& run);

}  // namespace slipstream::cli
