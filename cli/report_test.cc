// Goal: the page is whole and well-formed whatever the run left behind: a full run, an empty one, one cut
// short, and one whose texts try to break out. With SLIPSTREAM_REPORT_DIR set the run and its page stay there
// to be looked at.
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "cli/report_advice.h"
#include "cli/report_chart.h"
#include "cli/report_data.h"
#include "cli/report_page.h"
#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"

namespace slipstream::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kWarmup = 40, kSteps = 240;

// One line of metrics.jsonl of a run that learns: format-true, values random.
json metrics_line(int step, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  const bool warmup = step <= kWarmup;
  const double t = std::max(0, step - kWarmup) / double{kSteps - kWarmup};
  const double reward =
      warmup ? 0.02 + 0.35 * step / kWarmup : 0.35 + 0.6 * (1 - std::exp(-4 * t)) + 0.04 * normal(random);
  json line = {{"step", step},
               {"phase", warmup ? "warmup" : "rl"},
               {"policy_version", std::max(0, step - kWarmup)},
               {"grad_norm", 0.8 + 0.2 * std::abs(normal(random))},
               {"loss", warmup ? 2.0 / step : 0.02 * normal(random)},
               {"learning_rate", step < 10 ? 3e-4 * step : 3e-3},
               {"trained_tokens", 3000 + step % 7 * 40},
               {"produced", std::max(0, step - kWarmup) * 140},
               {"trained", std::max(0, step - kWarmup) * 96},
               {"dropped", std::max(0, step - kWarmup) * 40},
               {"queued", std::max(0, step - kWarmup) * 4},
               {"wall_seconds", step * 1.25},
               {"wait_data_seconds", warmup ? 0.05 : 0.55 + 0.1 * std::abs(normal(random))},
               {"train_seconds", 0.4},
               {"checkpoint_seconds", warmup ? 0 : 0.08},
               {"publish_seconds", warmup ? 0 : 0.03},
               {"generated_tokens", std::max(0, step - kWarmup) * 4200},
               {"idle_seconds", {{"rollout", step * 0.2}, {"gateway", step * 0.9}}},
               {"demonstration_probability", warmup ? json(0.4 * step / kWarmup) : json(nullptr)}};
  for (const char* key : {"staleness_mean", "mismatch_abs_mean", "mismatch_abs_max", "drift_abs_mean",
                          "masked_low_fraction", "masked_high_fraction", "reward_mean"}) {
    line[key] = nullptr;
  }
  if (warmup) return line;
  line["reward_mean"] = reward;
  line["reward_by_task"] = {{"add", reward + 0.03}, {"sub", reward - 0.05}};
  line["staleness_mean"] = 1 + 0.3 * normal(random);
  line["mismatch_abs_mean"] = 0.0;
  line["mismatch_abs_max"] = 0.0;
  line["drift_abs_mean"] = 0.02 + 0.005 * normal(random);
  line["masked_low_fraction"] = 0.012 + 0.003 * normal(random);
  line["masked_high_fraction"] = 0.008 + 0.002 * normal(random);
  line["dropped_by_reason"] = {{"zero_variance", (step - kWarmup) * 37}, {"stale", (step - kWarmup) * 3}};
  return line;
}

// A trajectory of three spans whose action tokens are `words`.
json trajectory(int step, int index, double reward, const std::vector<std::string>& words,
                const std::string& question, std::mt19937_64& random) {
  json ids = json::array(), logprobs = json::array(), versions = json::array(), trained = json::array();
  for (size_t i = 0; i < question.size(); ++i) ids.push_back(static_cast<unsigned char>(question[i]));
  for (size_t i = 0; i < words.size(); ++i) {
    ids.push_back(300 + i);
    logprobs.push_back(-std::exponential_distribution<double>(1.2)(random));
    versions.push_back(step - kWarmup - 1);
    trained.push_back(i % 9 == 8 ? 0 : 1);
  }
  return {{"rollout_id", absl::StrFormat("quick-g%d-%d", step, index)},
          {"group_id", absl::StrFormat("quick-g%d", step)},
          {"task", "add"},
          {"instance", 17 * step % 400},
          {"reward", reward},
          {"advantage", reward - 0.5},
          {"finish_reason", "env_done"},
          {"staleness", 1},
          {"ids", ids},
          {"spans",
           {{{"kind", "prompt"}, {"length", question.size()}, {"text", question}},
            {{"kind", "action"}, {"length", words.size()}}}},
          {"action_texts", words},
          {"action_logprobs", logprobs},
          {"learner_logprobs", logprobs},
          {"action_policy_versions", versions},
          {"trained", trained}};
}

// Every element that is opened is closed, in order, and no text holds a stray "<". Attributes are quoted.
void expect_well_formed(const std::string& html) {
  std::vector<std::string> open;
  size_t at = html.find("<html");
  ASSERT_NE(at, std::string::npos);
  while (at < html.size()) {
    if (html[at] != '<') {
      ++at;
      continue;
    }
    size_t end = at + 1;
    bool quoted = false;
    while (end < html.size() && (quoted || html[end] != '>')) {
      if (html[end] == '"') quoted = !quoted;
      ASSERT_TRUE(quoted || html[end] != '<') << html.substr(at, 120);
      ++end;
    }
    ASSERT_LT(end, html.size()) << "a tag without an end: " << html.substr(at, 120);
    std::string tag = html.substr(at + 1, end - at - 1);
    at = end + 1;
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ(open.back(), tag.substr(1));
      open.pop_back();
      continue;
    }
    ASSERT_TRUE(std::isalpha(static_cast<unsigned char>(tag[0]))) << tag.substr(0, 120);
    if (tag.back() == '/') continue;
    open.push_back(tag.substr(0, tag.find_first_of(" \n")));
    if (open.back() == "script" || open.back() == "style") {
      at = html.find("</" + open.back(), at);
      ASSERT_NE(at, std::string::npos);
    }
  }
  EXPECT_TRUE(open.empty()) << open.back() << " is never closed";
}

// The page asks for nothing from anywhere.
void expect_self_contained(const std::string& html) {
  for (const char* reference : {"http:", "https:", "src=", "href=", "@import", "url("}) {
    EXPECT_FALSE(absl::StrContains(html, reference)) << reference;
  }
}

class ReportTest : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(run_ / "rollouts"); }
  void write(const std::string& name, const std::string& content) {
    std::ofstream(run_ / name, std::ios::binary) << content;
  }
  std::string page() {
    const auto run = load_run(run_.string());
    EXPECT_TRUE(run.ok()) << run.status();
    std::string html = render_page(*run);
    expect_well_formed(html);
    EXPECT_EQ(html, valid_utf8(html));
    return html;
  }
  void write_metrics(int steps) {
    std::mt19937_64 random(1);
    std::string lines;
    for (int step = 1; step <= steps; ++step) lines += metrics_line(step, random).dump() + "\n";
    write("metrics.jsonl", lines);
  }

  const testing::TemporaryDirectory root_;
  const fs::path run_ = fs::path(root_.path()) / "quick";
};

TEST_F(ReportTest, AFullRunIsShownWhole) {
  write_metrics(kSteps);
  write("config.yaml",
        "run: {id: quick, seed: 7}\nrl: {max_staleness: 2, group_size: 8, groups_per_batch: 12}\n");
  std::mt19937_64 random(2);
  for (const int step : {kWarmup + 1, 120, kSteps}) {
    std::string lines;
    lines += trajectory(step, 0, 1, {"2", "2", "<|user|>"}, "[gMASK]<sop><|user|>7+15=<|assistant|>", random)
                 .dump() +
             "\n";
    lines += trajectory(step, 1, 0, {"2", "3", "\n", "\n", "or", " maybe", " 24", "?", " yes", "<|user|>"},
                        "[gMASK]<sop><|user|>9+14=<|assistant|>", random)
                 .dump() +
             "\n";
    write(absl::StrFormat("rollouts/step_%06d.jsonl", step), lines);
  }
  json branched = trajectory(kSteps, 2, 0.5, {"7"}, "7+0=", random);
  branched["more_samples"] = {trajectory(kSteps, 3, 0, {" other", " end"}, "8+0=", random)};
  branched["importance_ratios"] = {1.25};
  std::ofstream(run_ / absl::StrFormat("rollouts/step_%06d.jsonl", kSteps), std::ios::app) << branched.dump() << "\n";
  const std::string html = page();
  expect_self_contained(html);
  for (const char* expected :
       {"<title>Run quick</title>", "max_staleness 2", "12 groups of 8", "<b>Reward</b>", "<b>Staleness</b>",
        "<b>Throughput</b>", "<b>Dropped trajectories</b>", "warm-up", "Who waits for whom",
        "rollout workers", "agree to the last bit", "Early: step 41", "Middle: step 120", "Late: step 240",
        "&lt;|user|&gt;", "branch 2 of 2", " other</span>", "importance ratio 1.25", "rollout log-prob -", "policy version 0", "by reinforcement learning",
        "zero_variance"}) {
    EXPECT_TRUE(absl::StrContains(html, expected)) << expected;
  }
  EXPECT_FALSE(absl::StrContains(html, "nan")) << html.substr(html.find("nan") - 80, 160);
  if (const char* keep = std::getenv("SLIPSTREAM_REPORT_DIR")) {
    fs::create_directories(keep);
    fs::copy(run_, keep, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    std::ofstream(fs::path(keep) / "report.html", std::ios::binary) << html;
  }
}

TEST_F(ReportTest, TextOfTheRunStaysText) {
  write_metrics(60);
  std::mt19937_64 random(3);
  const std::string hostile = "</script><script>alert(1)</script><!-- {{HOVER}} \" ' & ]]>";
  json line = trajectory(
      50, 0, 1, {"</span>", hostile, "\xe2\x80\xae", std::string("\x00\x1b", 2), "\"onmouseover=\"x"},
      hostile, random);
  line["task"] = hostile;
  line["rollout_id"] = hostile;
  line["finish_reason"] = 7;
  std::string text = line.dump();
  text.insert(text.find("alert"), "\xff\xfe\xc3");  // bytes that are no UTF-8, inside a JSON string
  write("rollouts/step_000050.jsonl", text + "\n");
  write("config.yaml", "run: {id: '" + hostile);
  json row = json::parse("{\"step\": 61, \"phase\": \"rl\"}");
  row["reward_by_task"] = {{hostile, 0.5}, {"add", 0.2}};
  row["dropped_by_reason"] = {{hostile, 3}};
  std::ofstream(run_ / "metrics.jsonl", std::ios::app) << row.dump() << "\n";
  const std::string html = page();
  EXPECT_FALSE(absl::StrContains(html, "<script>alert"));
  EXPECT_FALSE(absl::StrContains(html, "<!--"));
  EXPECT_FALSE(absl::StrContains(html, "\"onmouseover"));
  EXPECT_TRUE(absl::StrContains(html, "\\x00\\x1b"));
  EXPECT_TRUE(absl::StrContains(html, "\xef\xbf\xbd"));
  // What the script reads is JSON still.
  const std::string marker = "type=\"application/json\">";
  const size_t begin = html.find(marker) + marker.size();
  const json hover = json::parse(html.substr(begin, html.find("</script>", begin) - begin), nullptr, false);
  EXPECT_TRUE(hover.is_array() && !hover.empty());
}

TEST_F(ReportTest, AnEmptyRunGivesAPageThatSaysSo) {
  const std::string html = page();
  EXPECT_TRUE(absl::StrContains(html, "no step has finished"));
  EXPECT_FALSE(absl::StrContains(html, "<svg"));
}

TEST_F(ReportTest, TornAndStrangeLinesAreLeftOut) {
  write_metrics(30);
  std::string text;
  {
    std::ifstream in(run_ / "metrics.jsonl", std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(in), {});
  }
  text.resize(text.size() - 40);  // the last line is cut
  write("metrics.jsonl", "\n[1,2]\nnull\n{\"step\":\"x\"}\n{\"step\":1e99}\n" + text);
  write("rollouts/step_000030.jsonl",
        "{\"rollout_id\":\"a\",\"ids\":[1,2],\"spans\":[{\"kind\":\"action\",\"length\":5},{\"length\":-3},7,"
        "{\"kind\":\"action\",\"length\":99999999999}],\"action_logprobs\":[null,\"x\"]}\n{\"ids\":[");
  write("rollouts/step_x.jsonl", "{}");
  const auto run = load_run(run_.string());
  ASSERT_TRUE(run.ok());
  EXPECT_EQ(run->steps.size(), 29u);
  const std::string html = page();
  EXPECT_TRUE(absl::StrContains(html, "metrics.jsonl: 5 unreadable lines"));
  EXPECT_TRUE(absl::StrContains(html, "rollouts: 1 unreadable lines"));
  EXPECT_LT(html.size(), 1u << 20);
}

TEST_F(ReportTest, AMissingDirectoryIsNamed) {
  const auto run = load_run(root_.path() + "/nope");
  EXPECT_EQ(run.status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(run.status().message(), "nope: no such directory")) << run.status();
}

TEST_F(ReportTest, AStepDoneAgainCountsOnceAndTotalsMayBeginAgain) {
  write("metrics.jsonl",
        "{\"step\":1,\"generated_tokens\":100,\"loss\":1}\n{\"step\":2,\"generated_tokens\":250,\"loss\":2}\n"
        "{\"step\":2,\"generated_tokens\":30,\"loss\":3}\n{\"step\":3,\"generated_tokens\":80}\n");
  const auto run = load_run(run_.string());
  ASSERT_TRUE(run.ok());
  EXPECT_EQ(run->steps, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(run->column("loss")[1], 3.0);
  EXPECT_TRUE(std::isnan(run->column("loss")[2]));
  EXPECT_EQ(increments(run->column("generated_tokens")), (std::vector<double>{100, 30, 50}));
}

TEST_F(ReportTest, AdviceFollowsFromTheNumbers) {
  const auto advice_of = [&](const std::function<void(json*)>& change) {
    std::mt19937_64 random(1);
    std::string lines, out;
    for (int step = 1; step <= 100; ++step) {
      json line = metrics_line(step, random);
      change(&line);
      lines += line.dump() + "\n";
    }
    write("metrics.jsonl", lines);
    for (const Advice& advice : advise(*load_run(run_.string()))) out += advice.text + "\n";
    return out;
  };
  EXPECT_TRUE(absl::StrContains(advice_of([](json* l) { (*l)["wait_data_seconds"] = 0.9; }),
                                "add rollout workers or raise rl.max_staleness"));
  EXPECT_TRUE(absl::StrContains(advice_of([](json* l) {
                                  (*l)["wait_data_seconds"] = 0.1;
                                  (*l)["idle_seconds"]["rollout"] = (*l)["step"].get<double>() * 1.0;
                                }),
                                "while the learner trained"));
  EXPECT_TRUE(absl::StrContains(advice_of([](json* l) {
                                  (*l)["wait_data_seconds"] = 0.9;
                                  (*l)["idle_seconds"]["rollout"] = (*l)["step"].get<double>() * 1.0;
                                }),
                                "the time goes to the environments"));
  EXPECT_TRUE(absl::StrContains(advice_of([](json* l) { (*l)["mismatch_abs_max"] = 1e-3; }),
                                "This should be exactly 0"));
  EXPECT_TRUE(absl::StrContains(advice_of([](json* l) { (*l)["produced"] = 1e6; }), "unaccounted for"));
  EXPECT_TRUE(
      absl::StrContains(advice_of([](json* l) { (*l)["masked_low_fraction"] = 0.2; }), "carried no loss"));
  EXPECT_TRUE(absl::StrContains(advice_of([](json* l) { (*l)["reward_mean"] = 0.3; }), "did not rise"));
  EXPECT_TRUE(absl::StrContains(advice_of([](json* l) { (*l)["dropped_by_reason"]["env_crash"] = 4000; }),
                                "look at the environments' logs"));
}

// One value a hundred times the rest does not flatten them: it is cut off, and said.
TEST_F(ReportTest, PeaksAreCutOffAndSaid) {
  std::string lines;
  for (int step = 1; step <= 40; ++step) {
    lines += json({{"step", step}, {"grad_norm", step == 7 ? 150.0 : 1.0 + 0.01 * step}, {"phase", "rl"}}).dump() + "\n";
  }
  write("metrics.jsonl", lines);
  const std::string html = page();
  EXPECT_TRUE(absl::StrContains(html, "up to 150</span>"));
  EXPECT_FALSE(absl::StrContains(html, "%\">150</span>"));  // not a label of the axis
}

TEST(Durations, AreShort) {
  EXPECT_EQ(duration(0), "0 s");
  EXPECT_EQ(duration(3.14), "3.1 s");
  EXPECT_EQ(duration(20), "20 s");
  EXPECT_EQ(duration(60), "1 min");
  EXPECT_EQ(duration(252), "4 min 12 s");
  EXPECT_EQ(duration(4800), "1 h 20 min");
  EXPECT_EQ(duration(7200), "2 h");
}

TEST(Columns, LeaveOutWhatWasNotRecorded) {
  const double none = std::nan("");
  const Column values = {none, 4, none, 1, 3};
  EXPECT_EQ(sum_of(values, 0, 5), 8);
  EXPECT_EQ(mean_of(values, 0, 5), 8.0 / 3);
  EXPECT_EQ(last_of({1, 2, none}), 2);
  EXPECT_EQ(max_of(values), 4);
  EXPECT_EQ(quantile_of(values, 0.5), 3);
  const Column grown = increments({none, 5, none, 8, 2});
  EXPECT_TRUE(std::isnan(grown[0]) && std::isnan(grown[2]));
  EXPECT_EQ((Column{grown[1], grown[3], grown[4]}), (Column{5, 3, 2}));
  for (const double nothing : {sum_of({none}, 0, 1), mean_of({}, 0, 3), last_of({none}), max_of({}), quantile_of({none}, 0.5)}) {
    EXPECT_TRUE(std::isnan(nothing));
  }
}

TEST(Utf8, InvalidBytesAreReplacedAndValidOnesKept) {
  EXPECT_EQ(valid_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z"), "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z");
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(valid_utf8("\xff"), bad);
  EXPECT_EQ(valid_utf8("\xc0\x80"), bad + bad);            // overlong
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), bad + bad + bad);  // a surrogate
  EXPECT_EQ(valid_utf8("\xe2\x82"), bad + bad);            // cut
  EXPECT_EQ(valid_utf8("\xf5\x80\x80\x80"), bad + bad + bad + bad);
}

}  // namespace
}  // namespace slipstream::cli
