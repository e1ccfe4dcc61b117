#include "cli/report_data.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "absl/strings/numbers.h"

namespace slipstream::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kColumnsMax = 256;
constexpr size_t kConfigMax = 200'000;  // bytes of config.yaml shown
constexpr size_t kLineMax = 64 << 20;
constexpr int kTrajectoriesOfAStep = 3;

// Length of the UTF-8 sequence at the front of `s`; 0: none is there.
size_t utf8_length(std::string_view s) {
  const auto byte = [&](size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  const auto continues = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return continues(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    if (!continues(1) || !continues(2)) return 0;
    const bool overlong = lead == 0xe0 && byte(1) < 0xa0, surrogate = lead == 0xed && byte(1) >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    const bool overlong = lead == 0xf0 && byte(1) < 0x90, beyond = lead == 0xf4 && byte(1) >= 0x90;
    return overlong || beyond ? 0 : 4;
  }
  return 0;
}

// Objects of a .jsonl file; what is no object is counted.
std::vector<json> read_lines(const fs::path& path, int* broken) {
  std::vector<json> out;
  std::ifstream in(path, std::ios::binary);
  for (std::string line; std::getline(in, line);) {
    if (line.empty()) continue;
    json parsed =
        line.size() > kLineMax ? json() : json::parse(valid_utf8(line), nullptr, /*allow_exceptions=*/false);
    if (parsed.is_object()) {
      out.push_back(std::move(parsed));
    } else {
      ++*broken;
    }
  }
  return out;
}

void flatten(const std::string& prefix, const json& object, int depth, std::map<std::string, double>* out) {
  for (const auto& [key, value] : object.items()) {
    if (out->size() >= kColumnsMax) return;
    if (value.is_number()) (*out)[prefix + key] = value.get<double>();
    if (value.is_object() && depth == 0) flatten(prefix + key + "/", value, 1, out);
  }
}

void load_metrics(const fs::path& path, RunData* run) {
  if (!fs::exists(path)) {
    run->notes.push_back("metrics.jsonl is not there yet: no step has finished.");
    return;
  }
  int broken = 0;
  std::map<int64_t, json> rows;  // a step done again after a restart counts once, as it was done last
  for (json& row : read_lines(path, &broken)) {
    const auto step = row.find("step");
    if (step == row.end() || !step->is_number_integer()) {
      ++broken;
      continue;
    }
    const auto number = step->get<int64_t>();
    rows[number] = std::move(row);
  }
  if (broken > 0)
    run->notes.push_back(absl::StrCat("metrics.jsonl: ", broken, " unreadable lines were left out."));
  for (const auto& [step, row] : rows) {
    std::map<std::string, double> values;
    flatten("", row, 0, &values);
    for (const auto& [name, value] : values) {
      auto& column = run->columns[name];
      column.resize(run->steps.size(), kMissing);
      column.push_back(value);
    }
    run->steps.push_back(step);
    const auto phase = row.find("phase");
    run->warmup.push_back(phase != row.end() && *phase == "warmup");
  }
  for (auto& [name, column] : run->columns) column.resize(run->steps.size(), kMissing);
}

double reward_of(const json& trajectory) {
  const auto reward = trajectory.find("reward");
  return reward != trajectory.end() && reward->is_number() ? reward->get<double>() : 0.0;
}

// The best, the worst and the one between them.
std::vector<json> pick(std::vector<json> trajectories) {
  std::stable_sort(trajectories.begin(), trajectories.end(),
                   [](const json& a, const json& b) { return reward_of(a) > reward_of(b); });
  if (trajectories.size() <= kTrajectoriesOfAStep) return trajectories;
  return {trajectories.front(), trajectories[trajectories.size() / 2], trajectories.back()};
}

void load_rollouts(const fs::path& directory, RunData* run) {
  std::map<int64_t, fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string stem = entry.path().stem().string();
    int64_t step = 0;
    if (entry.path().extension() == ".jsonl" && stem.rfind("step_", 0) == 0 &&
        absl::SimpleAtoi(stem.substr(5), &step)) {
      files[step] = entry.path();
    }
  }
  std::vector<int64_t> steps;
  for (const auto& [step, path] : files) steps.push_back(step);
  if (steps.empty()) return;
  int broken = 0;
  for (const size_t i : std::set<size_t>{0, steps.size() / 2, steps.size() - 1}) {
    RolloutSamples samples = {steps[i], pick(read_lines(files[steps[i]], &broken))};
    if (!samples.trajectories.empty()) run->samples.push_back(std::move(samples));
  }
  if (broken > 0)
    run->notes.push_back(absl::StrCat("rollouts: ", broken, " unreadable lines were left out."));
}

}  // namespace

std::string valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const size_t length = utf8_length(bytes);
    if (length == 0) {
      out += "\xef\xbf\xbd";
      bytes.remove_prefix(1);
    } else {
      out += bytes.substr(0, length);
      bytes.remove_prefix(length);
    }
  }
  return out;
}

Column RunData::column(const std::string& column_name) const {
  const auto found = columns.find(column_name);
  return found != columns.end() ? found->second : Column(steps.size(), kMissing);
}

std::map<std::string, Column> RunData::columns_under(const std::string& prefix) const {
  std::map<std::string, Column> out;
  for (const auto& [key, column] : columns) {
    if (key.rfind(prefix + "/", 0) == 0) out[key.substr(prefix.size() + 1)] = column;
  }
  return out;
}

absl::StatusOr<RunData> load_run(const std::string& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    return absl::NotFoundError(
        absl::StrCat(directory, ": no such directory, expected a run's, as runs/<id>"));
  }
  RunData run;
  run.name = fs::weakly_canonical(directory, error).filename().string();
  std::ifstream config(fs::path(directory) / "config.yaml", std::ios::binary);
  if (config) {
    run.config.assign(std::istreambuf_iterator<char>(config), {});
    if (run.config.size() > kConfigMax) run.config.resize(kConfigMax);
  } else {
    run.notes.push_back("config.yaml is not there.");
  }
  load_metrics(fs::path(directory) / "metrics.jsonl", &run);
  load_rollouts(fs::path(directory) / "rollouts", &run);
  return run;
}

}  // namespace slipstream::cli
