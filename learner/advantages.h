// GRPO advantages: what a rollout earned against the mean of its group. Shao et al. 2024, arXiv:2402.03300;
// without the division by the deviation unless asked for (rl-spec 4).
#pragma once

#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace slipstream::learner {

// One training sample. Samples of one rollout carry the same ids, reward and weight.
struct RewardedSample {
  std::string_view group_id;  // who is compared with whom; prompts play no part
  std::string_view rollout_id;
  double reward = 0.0;  // finite
  int weight = 1;       // rows of the padded group that the rollout stands for; >= 1
};

struct AdvantageOptions {
  bool std = false;  // divide by (sample standard deviation + 1e-6)
};

// The advantage of each sample, whatever the order of arrival. A rollout counts `weight` times in its group's
// mean, however many samples it has, and they share its advantage. Exactly 0 where all rewards of a group are
// equal.
std::vector<float> grpo_advantages(absl::Span<const RewardedSample> samples, const AdvantageOptions& options);

}  // namespace slipstream::learner
