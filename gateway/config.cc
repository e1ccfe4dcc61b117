#include "gateway/config.h"

#include <algorithm>
#include <set>

#include "common/address.h"

namespace slipstream::gateway {
namespace {

TaskConfig read_task(ConfigNode node) {
  TaskConfig out;
  node.read_name("name", &out.name);
  if (out.name.empty()) node.fail("name", "missing, expected a task the environment describes");
  node.read("weight", &out.weight, 0.0, 1e9);
  node.read("groups_per_second", &out.groups_per_second, 0.0, 1e9);
  if (out.groups_per_second > 0 && out.groups_per_second < 1e-6) {
    node.fail("groups_per_second", absl::StrCat(out.groups_per_second, ", expected 0 (no limit) or a number >= 1e-6"));
  }
  node.read("instances", &out.instances);
  node.read("demonstrations", &out.demonstrations);
  return out;
}

EnvironmentConfig read_environment(ConfigNode node) {
  EnvironmentConfig out;
  node.read("name", &out.name);
  if (out.name.empty()) {
    node.fail("name", "missing, expected a name");
  } else if (const std::string problem = file_name_problem(out.name); !problem.empty()) {
    node.fail("name", problem);
  }
  node.read_address("address", &out.address, 1);
  node.read("command", &out.command);
  if (out.address.empty() && out.command.empty()) node.fail("address", "missing, expected host:port, or a command to start");
  const bool told = std::any_of(out.command.begin(), out.command.end(),
                                [](const std::string& word) { return word.find("{address}") != std::string::npos; });
  if (out.address.empty() && !told) node.fail("command", "expected {address} in one of its words, or an address beside it");
  node.read("start_timeout_ms", &out.start_timeout_ms, 1);
  node.read("reset_timeout_ms", &out.reset_timeout_ms, 1);
  node.read("step_timeout_ms", &out.step_timeout_ms, 1);
  node.read("max_concurrent", &out.max_concurrent, 1);
  node.read("quarantine_after", &out.quarantine_after, 1);
  node.read("quarantine_ms", &out.quarantine_ms, 1);
  std::set<std::string> names;
  for (ConfigNode& item : node.list("tasks")) {
    out.tasks.push_back(read_task(item));
    if (!names.insert(out.tasks.back().name).second) item.fail("name", absl::StrCat(out.tasks.back().name, ": named twice"));
  }
  return out;
}

// A prompt needs the format's own tokens, some text, and room for a reply.
constexpr int kSeqLenLeast = 16;

}  // namespace

GatewayConfig GatewayConfig::from(ConfigNode root) {
  GatewayConfig out;
  out.job = JobConfig::from(root);
  ConfigNode gateway = root.child("gateway");
  gateway.read_address("address", &out.address, 0);
  gateway.read("episode_threads", &out.episode_threads, 1, 65'536);
  gateway.read("heartbeat_ms", &out.heartbeat_ms, 10);
  gateway.read("heartbeat_misses", &out.heartbeat_misses, 1);
  gateway.read("generate_timeout_ms", &out.generate_timeout_ms, 1);
  gateway.read("max_seq_len", &out.max_seq_len, 0);
  if (out.max_seq_len > 0 && out.max_seq_len < kSeqLenLeast) {
    gateway.fail("max_seq_len", absl::StrCat(out.max_seq_len, ", expected 0 (no limit) or an integer >= ", kSeqLenLeast));
  }
  gateway.read("log_segment_bytes", &out.log_segment_bytes, 1 << 12);
  gateway.read("session_idle_ms", &out.session_idle_ms, 1);
  gateway.read("sessions_max", &out.sessions_max, 1);
  gateway.read("branching", &out.branching);
  gateway.read_choice("repair", &out.repair, {{"repeat", Repair::kRepeat}, {"refill", Repair::kRefill}});
  gateway.read("refills_max", &out.refills_max, 0, 1'000);
  gateway.read_choice("overlong", &out.overlong,
                      {{"keep", Overlong::kKeep}, {"mask", Overlong::kMask}, {"drop", Overlong::kDrop}});
  gateway.read("drop_zero_variance", &out.drop_zero_variance);
  gateway.read("capture_replay", &out.capture_replay);
  ConfigNode chat = root.child("chat");
  chat.read_choice("format", &out.chat_format, {{"glm47", "glm47"}, {"glm53", "glm53"}});
  chat.read("thinking", &out.thinking);
  chat.read_choice("reasoning_effort", &out.reasoning_effort, {{"low", "low"}, {"high", "high"}, {"max", "max"}});
  ConfigNode sampling = root.child("sampling");
  // What the engine refuses would abort every episode.
  sampling.read("temperature", &out.temperature, 0.0, 100.0);
  if (out.temperature > 0.0f && out.temperature < 1e-3f) {
    sampling.fail("temperature", absl::StrCat(out.temperature, ", expected 0 or a number from 0.001 to 100"));
  }
  sampling.read("top_k", &out.top_k, 0);
  sampling.read("top_p", &out.top_p, 0.0, 1.0);
  sampling.read("min_p", &out.min_p, 0.0, 0.999999);
  sampling.read("max_tokens", &out.max_tokens, 1);
  std::set<std::string> names;
  for (ConfigNode& item : root.list("environments")) {
    out.environments.push_back(read_environment(item));
    if (!names.insert(out.environments.back().name).second) {
      item.fail("name", "\"" + out.environments.back().name + "\" is given to two environments");
    }
  }
  // An environment without a list has tasks of weight 1.
  const bool any_weight = std::any_of(out.environments.begin(), out.environments.end(), [](const EnvironmentConfig& environment) {
    return environment.tasks.empty() || std::any_of(environment.tasks.begin(), environment.tasks.end(),
                                                    [](const TaskConfig& task) { return task.weight > 0; });
  });
  if (!out.environments.empty() && !any_weight) root.fail("environments", "the weights of all tasks are 0, expected one above");
  return out;
}

}  // namespace slipstream::gateway
