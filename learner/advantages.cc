#include "learner/advantages.h"

#include <cmath>
#include <limits>
#include <map>
#include <utility>

namespace slipstream::learner {
namespace {

// Rewards of one group, a rollout once.
struct GroupRewards {
  std::map<std::string_view, std::pair<double, int>>
      rollouts;  // reward, weight; by id: the sum's order is no accident

  double rows() const {
    double n = 0.0;
    for (const auto& [id, rollout] : rollouts) n += rollout.second;
    return n;
  }
  double mean() const {
    double sum = 0.0;
    for (const auto& [id, rollout] : rollouts) sum += rollout.first * rollout.second;
    return sum / rows();
  }
  // The sum of eight times 0.1 over eight is not 0.1: equality is asked of the rewards themselves.
  bool all_equal() const {
    for (const auto& [id, rollout] : rollouts) {
      if (rollout.first != rollouts.begin()->second.first) return false;
    }
    return true;
  }
  double deviation(double center) const {
    double sum = 0.0;
    for (const auto& [id, rollout] : rollouts)
      sum += (rollout.first - center) * (rollout.first - center) * rollout.second;
    return std::sqrt(sum / (rows() - 1.0));
  }
};

struct Baseline {
  double mean = 0.0;
  double scale = 0.0;  // 0: all rewards are equal
};

}  // namespace

std::vector<float> grpo_advantages(absl::Span<const RewardedSample> samples,
                                   const AdvantageOptions& options) {
  std::map<std::string_view, GroupRewards> groups;
  for (const RewardedSample& sample : samples) {
    groups[sample.group_id].rollouts[sample.rollout_id] = {sample.reward, sample.weight};
  }
  std::map<std::string_view, Baseline> baselines;
  for (const auto& [id, group] : groups) {
    Baseline& baseline = baselines[id];
    if (group.all_equal()) continue;
    baseline.mean = group.mean();
    baseline.scale = options.std ? 1.0 / (group.deviation(baseline.mean) + 1e-6) : 1.0;
  }
  std::vector<float> out;
  out.reserve(samples.size());
  for (const RewardedSample& sample : samples) {
    const Baseline& baseline = baselines[sample.group_id];
    out.push_back(
        baseline.scale == 0.0 ? 0.0f : static_cast<float>((sample.reward - baseline.mean) * baseline.scale));
  }
  return out;
}

}  // namespace slipstream::learner
