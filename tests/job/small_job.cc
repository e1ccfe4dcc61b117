#include "tests/job/small_job.h"

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace slipstream::testing {

const std::string& slipstream_binary() {
  static const std::string path = SLIPSTREAM_BINARY;
  return path;
}

const std::string& environment_binary(const std::string& name) {
  static std::map<std::string, std::string> paths;
  return paths.try_emplace(name, absl::StrCat(SLIPSTREAM_EXAMPLES, "/", name)).first->second;
}

SmallJob make_small_job(const std::string& directory, const std::vector<std::pair<std::string, std::string>>& more) {
  std::vector<std::pair<std::string, std::string>> sections = {
      {"run", absl::StrCat("  id: job\n  dir: ", directory, "/runs\n")},
      {"model", absl::StrCat("  path: ", directory, "/model\n  init: {config: flash-tiny, seed: 1}\n")},
      {"environments", absl::StrCat("- name: arithmetic\n  command: [", environment_binary("arithmetic_env"),
                                    ", --address, \"{address}\"]\n  tasks: [{name: add_small}]\n")},
      {"sampling", "  max_tokens: 4\n"},
      {"rl", "  group_size: 4\n  groups_per_batch: 4\n"},
      {"gateway", "  heartbeat_ms: 100\n"},
      {"rollout", "  threads: 1\n"},
      {"learner",
       "  threads: 1\n  log_rollouts: 1000000\n"
       "  warmup: {steps: 60, batch: 32, learning_rate: 3.0e-3, until_probability: 0.1}\n"
       "  optimizer: {learning_rate: 3.0e-4}\n"},
  };
  for (const auto& [section, text] : more) {
    bool known = false;
    for (auto& [name, body] : sections) {
      if (name != section) continue;
      body += "  " + text + "\n";
      known = true;
    }
    if (!known) sections.emplace_back(section, "  " + text + "\n");
  }
  SmallJob job{.directory = directory, .config = directory + "/job.yaml"};
  std::string yaml;
  for (const auto& [name, body] : sections) yaml += name + ":\n" + body;
  write_file(job.config, yaml);
  return job;
}

std::vector<nlohmann::json> SmallJob::metrics() const {
  std::vector<nlohmann::json> out;
  for (const std::string& line : read_lines(run() + "/metrics.jsonl")) {
    out.push_back(nlohmann::json::parse(line, nullptr, false));
  }
  return out;
}

int64_t SmallJob::step() const {
  const std::vector<nlohmann::json> lines = metrics();
  return lines.empty() || !lines.back().is_object() ? 0 : lines.back().value("step", int64_t{0});
}

namespace {

void check_lines(const std::vector<nlohmann::json>& lines, std::vector<std::string>* out) {
  if (lines.empty()) out->push_back("metrics.jsonl is empty");
  int64_t before = 0;
  for (const nlohmann::json& line : lines) {
    if (!line.is_object()) {
      out->push_back("metrics.jsonl holds a line that is no JSON object");
      continue;
    }
    const int64_t step = line["step"];
    if (step != before + 1) out->push_back(absl::StrCat("step ", step, " follows step ", before));
    before = step;
    const auto count = [&](const char* name) { return line[name].get<int64_t>(); };
    if (count("produced") != count("trained") + count("dropped") + count("queued")) {
      out->push_back(absl::StrCat("step ", step, ": trajectories are not conserved: ", line.dump()));
    }
    if (!line["mismatch_abs_max"].is_null() && line["mismatch_abs_max"] != 0.0) {
      out->push_back(absl::StrCat("step ", step, ": mismatch ", line["mismatch_abs_max"].dump()));
    }
  }
}

}  // namespace

std::vector<std::string> broken_invariants(const SmallJob& job) {
  std::vector<std::string> out;
  const std::vector<nlohmann::json> lines = job.metrics();
  check_lines(lines, &out);
  std::map<std::string, int64_t> step_of;
  for (const nlohmann::json& line : lines) {
    if (!line.is_object() || line["phase"] != "rl") continue;
    const int64_t step = line["step"];
    const std::vector<std::string> rollouts = read_lines(absl::StrFormat("%s/rollouts/step_%06d.jsonl", job.run(), step));
    if (rollouts.empty()) out.push_back(absl::StrCat("step ", step, " left no rollouts"));
    std::set<std::string> ids;
    for (const std::string& text : rollouts) {
      const nlohmann::json rollout = nlohmann::json::parse(text, nullptr, false);
      if (!rollout.is_object()) {
        out.push_back(absl::StrCat("the rollouts of step ", step, " hold a line that is no JSON object"));
        continue;
      }
      ids.insert(rollout.value("rollout_id", ""));
    }
    for (const std::string& id : ids) {
      const auto [place, fresh] = step_of.try_emplace(id, step);
      if (!fresh) out.push_back(absl::StrCat(id, " was trained in step ", place->second, " and in step ", step));
    }
  }
  return out;
}

}  // namespace slipstream::testing
