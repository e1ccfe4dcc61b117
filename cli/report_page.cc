#include "cli/report_page.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cli/report_advice.h"
#include "cli/report_chart.h"
#include "common/job.h"

namespace slipstream::cli {
namespace {

constexpr size_t kIntervals = 60;  // bars of a lane

std::string tile(const std::string& label, const std::string& value, const std::string& below) {
  return absl::StrCat("<div class=\"tile\"><span>", label, "</span><b>", value, "</b><small>", below,
                      "</small></div>\n");
}

std::string tiles(const RunData& run) {
  const size_t end = run.steps.size(), rl = first_rl_step(run), tail = tail_begin(run);
  const auto now = [&](const char* name) { return mean_of(run.column(name), tail, end); };
  const auto last = [&](const char* name) { return short_number(last_of(run.column(name))); };
  const RewardChange reward = reward_change(run);
  const Column seconds = step_seconds(run);
  const double wall = sum_of(seconds, rl, end);
  std::string out = "<div class=\"tiles\">\n";
  out += tile("Mean reward", short_number(reward.now),
              absl::StrCat(short_number(reward.before), rl > 0 ? " after the warm-up" : " at first"));
  out += tile("Steps", absl::StrCat(run.steps.back()),
              absl::StrCat(rl > 0 ? absl::StrCat(rl, " of warm-up, ") : "", "policy version ", last("policy_version")));
  out += tile("Wall time", duration(last_of(run.column("wall_seconds"))),
              absl::StrCat(duration(mean_of(seconds, rl, end)), " a step"));
  out += tile("Trajectories", last("produced"),
              absl::StrCat("= ", last("trained"), " trained + ", last("dropped"), " dropped + ", last("queued"), " queued"));
  out += tile("Staleness", short_number(now("staleness_mean")), "policy versions behind, mean");
  out += tile("Masked tokens", percent(now("masked_low_fraction") + now("masked_high_fraction")),
              "carried no loss: too far from the policy that sampled them");
  out += tile("Log-prob mismatch", short_number(max_of(run.column("mismatch_abs_max"))), "largest ever; 0: exact");
  out += tile("Tokens per second", short_number(sum_of(increments(run.column("generated_tokens")), rl, end) / wall),
              absl::StrCat("generated; ", short_number(sum_of(run.column("trained_tokens"), rl, end) / wall), " trained, prompts included"));
  return out + "</div>\n";
}

std::string charts(const RunData& run, nlohmann::json* hover) {
  const auto column = [&](const char* name) { return run.column(name); };
  const Column seconds = step_seconds(run);
  const size_t window = std::clamp<size_t>(run.steps.size() / 25, 1, 50);
  std::string out = "<div class=\"charts\">\n";
  const auto add = [&](LineChart chart) { out += render(chart, run.steps, run.warmup, hover); };

  LineChart reward = {
      .title = "Reward", .explanation = "What episodes earned; the line is a running mean.", .series = {}};
  reward.series.push_back({.name = "each step", .y = column("reward_mean"), .faint = true});
  reward.series.push_back({.name = "mean", .y = smoothed(column("reward_mean"), window)});
  const auto by_task = run.columns_under("reward_by_task");
  for (const auto& [task, values] : by_task) {
    if (by_task.size() > 1 && reward.series.size() < 7)
      reward.series.push_back({.name = task, .y = smoothed(values, window)});
  }
  add(std::move(reward));
  add({.title = "Staleness",
       .explanation = "How many policy versions behind the learner the trained episodes were.",
       .series = {{.name = "mean", .y = column("staleness_mean")}}});
  add({.title = "Tokens without loss",
       .explanation = "Share of tokens whose probability had changed too much since they were sampled.",
       .series = {{.name = "probability fell (low side)", .y = column("masked_low_fraction")},
                  {.name = "probability rose (high side)", .y = column("masked_high_fraction")}},
       .unit = Unit::kPercent});
  add({.title = "Log-prob difference",
       .explanation = "Learner against rollout. Mismatch (same weights) has to be exactly 0; drift (older "
                      "weights) grows with staleness.",
       .series = {{.name = "mismatch, mean", .y = column("mismatch_abs_mean")},
                  {.name = "mismatch, largest", .y = column("mismatch_abs_max"), .peak = true},
                  {.name = "drift, mean", .y = column("drift_abs_mean")}},
       .cut_peaks = true});
  add({.title = "Throughput",
       .explanation = "Tokens a second of wall time; the lines are running means.",
       .series = {{.name = "generated",
                   .y = smoothed(rate(increments(column("generated_tokens")), seconds), window)},
                  {.name = "trained", .y = smoothed(rate(column("trained_tokens"), seconds), window)}}});
  LineChart dropped = {.title = "Dropped trajectories",
                       .explanation = "Running totals of episodes that were not trained on, by reason (docs/run_directory.md explains each).",
                       .series = {}};
  for (const auto& [reason, totals] : run.columns_under("dropped_by_reason")) {
    if (dropped.series.size() < 6) dropped.series.push_back({.name = reason, .y = totals});
  }
  add(std::move(dropped));
  add({.title = "Gradient norm",
       .explanation = "Before clipping.",
       .series = {{.name = "norm", .y = column("grad_norm"), .peak = true}},
       .cut_peaks = true});
  add({.title = "Loss",
       .explanation = "Warm-up: of the demonstrations. Then: of the policy, which need not fall.",
       .series = {{.name = "each step", .y = column("loss"), .faint = true},
                  {.name = "loss", .y = smoothed(column("loss"), window)}}});
  add({.title = "Entropy",
       .explanation = "Of the policy, nats a token: what it still leaves to chance. 0: it always says the same.",
       .series = {{.name = "entropy", .y = smoothed(column("entropy"), window)}}});
  add({.title = "Expert load",
       .explanation = "Tokens of the busiest expert over the mean, in the worst layer. 1: even.",
       .series = {{.name = "imbalance", .y = column("expert_load_imbalance")}}});
  const Column probability = column("demonstration_probability");
  if (std::isfinite(last_of(probability))) {
    add({.title = "Demonstrations",
         .explanation = "Warm-up: the probability the model gives to a whole demonstrated answer.",
         .series = {{.name = "probability", .y = probability}},
         .unit = Unit::kPercent});
  }
  add({.title = "Learning rate",
       .explanation = "Of the optimiser's step.",
       .series = {{.name = "rate", .y = column("learning_rate")}}});
  return out + "</div>\n";
}

std::string waiting(const RunData& run) {
  LaneChart chart;
  Lane learner = {.name = "learner",
                  .parts = {"trains", "waits for data", "checkpoints", "publishes"},
                  .colours = {"c1", "c2", "c4", "c3"},
                  .shares = {}};
  Lane rollout = {
      .name = "rollout workers", .parts = {"busy", "idle"}, .colours = {"c1", "c2"}, .shares = {}};
  Lane gateway = {.name = "gateway", .parts = {"busy", "idle"}, .colours = {"c1", "c2"}, .shares = {}};
  const size_t per_interval = (run.steps.size() + kIntervals - 1) / kIntervals;
  const Column seconds = step_seconds(run);
  double wall = 0;
  for (size_t i = 0; i < run.steps.size(); i += per_interval) {
    const size_t end = std::min(run.steps.size(), i + per_interval);
    for (size_t j = i; j < end; ++j) wall += seconds[j] > 0 ? seconds[j] : 0;
    chart.wall_seconds.push_back(wall);
    const WaitShares s = wait_shares(run, i, end);
    learner.shares.push_back({s.train, s.wait_data, s.checkpoint, s.publish});
    rollout.shares.push_back({1 - s.rollout_idle, s.rollout_idle});
    gateway.shares.push_back({1 - s.gateway_idle, s.gateway_idle});
  }
  chart.lanes.push_back(std::move(learner));
  const auto recorded = [&](const char* role) {
    return run.columns.count(absl::StrCat("idle_seconds/", role)) > 0;
  };
  if (recorded("rollout")) chart.lanes.push_back(std::move(rollout));
  if (recorded("gateway")) chart.lanes.push_back(std::move(gateway));
  const WaitShares all = wait_shares(run, first_rl_step(run), run.steps.size());
  std::string out = absl::StrCat(
      "<h2>Who waits for whom</h2>\n<p>Each bar is a stretch of wall time, its height the share of it. Over "
      "the reinforcement-learning phase the learner trained ",
      percent(all.train), " of the time and waited for data ", percent(all.wait_data));
  if (std::isfinite(all.rollout_idle))
    absl::StrAppend(&out, "; the rollout workers had nothing to do ", percent(all.rollout_idle));
  return absl::StrCat(out, ".</p>\n<figure class=\"wide\">", render(chart), "</figure>\n");
}

std::string conversations(const RunData& run) {
  if (run.samples.empty()) return "";
  std::string out =
      "<h2>What the model said</h2>\n<p>Up to three episodes of an early, a middle and a late step: the "
      "best, one between, the worst. "
      "A sampled token is the more coloured, the less likely it was when it was sampled: <span class=\"tok a "
      "s0\">sure</span> "
      "<span class=\"tok a s2\">less</span> <span class=\"tok a s5\">surprising</span> <span class=\"tok a "
      "s8\">very</span>. "
      "<span class=\"tok off\">Dimmed</span> ones carry no loss. Point at one for its numbers.</p>\n";
  const char* when[] = {"Early", "Middle", "Late"};
  for (size_t i = 0; i < run.samples.size(); ++i) {
    const bool is_last = i + 1 == run.samples.size() && i > 0;
    absl::StrAppend(&out, "<h3>", is_last ? "Late" : when[i], ": step ", run.samples[i].step, "</h3>\n");
    for (const nlohmann::json& trajectory : run.samples[i].trajectories) out += render_trajectory(trajectory);
  }
  return out;
}

// The lines of the config that people ask for first.
std::string settings(const RunData& run) {
  auto config = ConfigNode::parse(run.config, "config.yaml");
  if (run.config.empty() || !config.ok()) return "";
  const JobConfig job = JobConfig::from(*config);
  return absl::StrCat("max_staleness ", job.max_staleness, " &#183; ", job.groups_per_batch, " groups of ",
                      job.group_size, " a step &#183; published every ",
                      job.publish_every == 1 ? "step" : absl::StrCat(job.publish_every, " steps"),
                      " &#183; seed ", job.seed);
}

}  // namespace

std::string render_page(const RunData& run) {
  std::string body = absl::StrCat("<h1>Run <em>", escape(run.name), "</em></h1>\n<p class=\"settings\">",
                                  settings(run), "</p>\n");
  nlohmann::json hover = nlohmann::json::array();
  if (!run.steps.empty()) body += tiles(run);
  body += "<ul class=\"advice\">\n";
  const char* classes[] = {"good", "hint", "warning"};
  for (const Advice& advice : advise(run))
    absl::StrAppend(&body, "<li class=\"", classes[advice.kind], "\">", escape(advice.text), "</li>\n");
  body += "</ul>\n";
  if (!run.steps.empty()) {
    body += charts(run, &hover);
    body += waiting(run);
  }
  body += conversations(run);
  if (!run.config.empty()) {
    absl::StrAppend(&body, "<h2>Configuration</h2>\n<details><summary>config.yaml</summary><pre>",
                    escape(run.config), "</pre></details>\n");
  }
  // Inside a script element only "<" could end it early.
  const std::string data = absl::StrReplaceAll(
      hover.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace), {{"<", "\\u003c"}});
  // One pass, so that text of the run that looks like a placeholder stays text.
  return absl::StrReplaceAll(kReportPage,
                             {{"{{TITLE}}", escape(run.name)}, {"{{BODY}}", body}, {"{{HOVER}}", data}});
}

}  // namespace slipstream::cli
