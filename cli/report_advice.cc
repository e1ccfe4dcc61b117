#include "cli/report_advice.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cli/report_chart.h"

namespace slipstream::cli {
namespace {

// Workers report with their heartbeats, every few steps: what arrives at once happened over the seconds
// before.
Column spread(Column amounts, const Column& seconds) {
  constexpr double kReportedWithin = 4;  // seconds: two heartbeats
  size_t first = 0;                      // of the steps that nothing arrived in
  for (size_t i = 0; i < amounts.size(); ++i) {
    if (!(amounts[i] > 0)) continue;
    double wall = seconds[i];
    size_t from = i;
    while (from > first && wall + seconds[from - 1] <= kReportedWithin && amounts[from - 1] == 0)
      wall += seconds[--from];
    const double per_second = wall > 0 ? amounts[i] / wall : 0;
    for (size_t j = from; wall > 0 && j <= i; ++j) amounts[j] = per_second * seconds[j];
    first = i + 1;
  }
  return amounts;
}

void advise_on_waiting(const RunData& run, size_t rl, std::vector<Advice>* out) {
  constexpr double kMuch = 0.4;
  const WaitShares shares = wait_shares(run, rl, run.steps.size());
  const bool learner_waits = shares.wait_data > kMuch, rollout_waits = shares.rollout_idle > kMuch;
  if (learner_waits && rollout_waits) {
    out->push_back(
        {Advice::kHint,
         absl::StrCat("The learner waited for data ", percent(shares.wait_data),
                      " of the time and the rollout workers had nothing to do ", percent(shares.rollout_idle),
                      ": the time goes to the environments. Make them faster, or raise rl.max_staleness so "
                      "that more episodes run at once.")});
  } else if (learner_waits) {
    out->push_back(
        {Advice::kHint, absl::StrCat("The learner waited for data ", percent(shares.wait_data),
                                     " of the time: add rollout workers or raise rl.max_staleness.")});
  } else if (rollout_waits) {
    out->push_back(
        {Advice::kHint, absl::StrCat("The rollout workers had nothing to do ", percent(shares.rollout_idle),
                                     " of the time while the learner trained: add learner ranks, use fewer "
                                     "workers, or raise rl.max_staleness.")});
  } else if (std::isfinite(shares.wait_data)) {
    out->push_back({Advice::kGood,
                    absl::StrCat("Nobody waited much for anybody: the learner ", percent(shares.wait_data),
                                 " of the time",
                                 std::isfinite(shares.rollout_idle)
                                     ? absl::StrCat(", the rollout workers ", percent(shares.rollout_idle))
                                     : "",
                                 ".")});
  }
  if (shares.checkpoint > 0.15) {
    out->push_back(
        {Advice::kHint, absl::StrCat("Checkpoints took ", percent(shares.checkpoint),
                                     " of the time: raise learner.checkpoint_every, or use a faster disk.")});
  }
}

void advise_on_exactness(const RunData& run, std::vector<Advice>* out) {
  const double largest = max_of(run.column("mismatch_abs_max"));
  if (largest > 0) {
    out->push_back(
        {Advice::kWarning,
         absl::StrCat("Learner and rollout disagree about log-probs of tokens sampled by the very same "
                      "weights, by up to ",
                      short_number(largest),
                      ". This should be exactly 0, but for rollout.fp8_weights and fp8_latents, where importance ratios "
                      "make up for it: do both run the same model, dtype and version?")});
  } else if (largest == 0) {
    out->push_back(
        {Advice::kGood,
         "Learner and rollout agree to the last bit on every token sampled by the learner's own weights."});
  }
  const size_t tail = tail_begin(run);
  const double low = mean_of(run.column("masked_low_fraction"), tail, run.steps.size());
  const double high = mean_of(run.column("masked_high_fraction"), tail, run.steps.size());
  const double masked = (std::isfinite(low) ? low : 0) + (std::isfinite(high) ? high : 0);
  if (masked > 0.05) {
    out->push_back(
        {Advice::kHint, absl::StrCat(percent(masked),
                                     " of the tokens were too far from the policy that sampled them and "
                                     "carried no loss: lower rl.max_staleness or the learning rate.")});
  }
}

void advise_on_drops(const RunData& run, std::vector<Advice>* out) {
  const double produced = last_of(run.column("produced"));
  if (!(produced > 0)) return;
  const double counted =
      last_of(run.column("trained")) + last_of(run.column("dropped")) + last_of(run.column("queued"));
  if (std::isfinite(counted) && counted != produced) {
    out->push_back({Advice::kWarning, absl::StrCat("Trajectories are unaccounted for: ", produced,
                                                   " produced, ", counted, " trained, dropped or queued.")});
  }
  for (const auto& [reason, totals] : run.columns_under("dropped_by_reason")) {
    const double share = last_of(totals) / produced;
    const auto is = [&reason = reason](const char* word) { return reason.find(word) != std::string::npos; };
    if (is("stale") && share > 0.05) {
      out->push_back(
          {Advice::kHint, absl::StrCat(percent(share),
                                       " of the trajectories became too old before they were trained on: "
                                       "raise rl.max_staleness, or make episodes shorter.")});
    } else if (is("variance") && share > 0.5) {
      out->push_back(
          {Advice::kHint,
           absl::StrCat(percent(share),
                        " of the trajectories were in groups whose members all got the same reward, which "
                        "teaches nothing: the tasks are too easy or too hard for the model as it is.")});
    } else if ((is("crash") || is("timeout")) && share > 0.02) {
      out->push_back({Advice::kWarning, absl::StrCat(percent(share), " of the episodes ended in \"", reason,
                                                     "\": look at the environments' logs.")});
    }
  }
}

void advise_on_learning(const RunData& run, size_t rl, std::vector<Advice>* out) {
  const size_t end = run.steps.size();
  const auto [before, now] = reward_change(run);
  if (end - rl >= 10 && std::isfinite(before) && std::isfinite(now)) {
    if (now > before + 0.02) {
      out->push_back({Advice::kGood, absl::StrCat("The mean reward rose from ", short_number(before), " to ",
                                                  short_number(now), " by reinforcement learning.")});
    } else {
      out->push_back({Advice::kHint,
                      absl::StrCat("The mean reward did not rise (", short_number(before), " at first, ",
                                   short_number(now),
                                   " at last): more steps, another learning rate, or a longer warm-up?")});
    }
  }
  const double worst = max_of(run.column("grad_norm"));
  const double usual = mean_of(run.column("grad_norm"), rl, end);
  if (usual > 0 && worst > 50 * usual) {
    out->push_back({Advice::kHint, absl::StrCat("The gradient norm once reached ", short_number(worst),
                                                ", against ", short_number(usual), " on average.")});
  }
}

}  // namespace

Column step_seconds(const RunData& run) { return increments(run.column("wall_seconds")); }

size_t first_rl_step(const RunData& run) {
  const auto found = std::find(run.warmup.begin(), run.warmup.end(), false);
  return found == run.warmup.end() ? 0 : static_cast<size_t>(found - run.warmup.begin());
}

size_t tail_begin(const RunData& run) {
  const size_t end = run.steps.size(), rl = first_rl_step(run);
  const size_t count = std::max<size_t>(5, (end - rl) / 10);
  return std::max(rl, end > count ? end - count : 0);
}

RewardChange reward_change(const RunData& run) {
  const Column reward = run.column("reward_mean");
  const size_t end = run.steps.size(), rl = first_rl_step(run);
  const size_t count = std::min<size_t>(kRewardSteps, end - rl);
  return {.before = mean_of(reward, rl, rl + count), .now = mean_of(reward, end - count, end)};
}

WaitShares wait_shares(const RunData& run, size_t begin, size_t end) {
  const Column seconds = step_seconds(run);
  const double wall = sum_of(seconds, begin, end);
  const auto share = [&](const Column& values) {
    return wall > 0 ? std::clamp(sum_of(values, begin, end) / wall, 0.0, 1.0) : std::nan("");
  };
  return {.wait_data = share(run.column("wait_data_seconds")),
          .train = share(run.column("train_seconds")),
          .checkpoint = share(run.column("checkpoint_seconds")),
          .publish = share(run.column("publish_seconds")),
          .rollout_idle = share(spread(increments(run.column("idle_seconds/rollout")), seconds)),
          .gateway_idle = share(spread(increments(run.column("idle_seconds/gateway")), seconds))};
}

std::vector<Advice> advise(const RunData& run) {
  std::vector<Advice> out;
  for (const std::string& note : run.notes) out.push_back({Advice::kHint, note});
  if (run.steps.empty()) return out;
  const size_t rl = first_rl_step(run);
  advise_on_learning(run, rl, &out);
  advise_on_exactness(run, &out);
  advise_on_waiting(run, rl, &out);
  advise_on_drops(run, &out);
  return out;
}

}  // namespace slipstream::cli
