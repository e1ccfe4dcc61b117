#include "gateway/config.h"

#include <set>

namespace slipstream::gateway {
namespace {

EnvironmentConfig read_environment(ConfigNode node) {
  EnvironmentConfig out;
  node.read("name", &out.name);
  if (out.name.empty()) node.fail("name", "missing, expected a name");
  node.read("address", &out.address);
  node.read("command", &out.command);
  if (out.address.empty() && out.command.empty()) node.fail("address", "missing, expected host:port, or a command to start");
  node.read("reset_timeout_ms", &out.reset_timeout_ms, 1);
  node.read("step_timeout_ms", &out.step_timeout_ms, 1);
  node.read("max_concurrent", &out.max_concurrent, 1);
  node.read("quarantine_after", &out.quarantine_after, 1);
  node.read("quarantine_ms", &out.quarantine_ms, 1);
  for (ConfigNode& item : node.list("tasks")) {
    TaskConfig task;
    item.read("name", &task.name);
    if (task.name.empty()) item.fail("name", "missing, expected a task the environment describes");
    item.read("weight", &task.weight, 0.0);
    item.read("groups_per_second", &task.groups_per_second, 0.0);
    item.read("instances", &task.instances);
    item.read("demonstrations", &task.demonstrations);
    out.tasks.push_back(task);
  }
  return out;
}

}  // namespace

GatewayConfig GatewayConfig::from(ConfigNode root) {
  GatewayConfig out;
  out.job = JobConfig::from(root);
  ConfigNode gateway = root.child("gateway");
  gateway.read("address", &out.address);
  gateway.read("episode_threads", &out.episode_threads, 1, 65'536);
  gateway.read("heartbeat_ms", &out.heartbeat_ms, 10);
  gateway.read("heartbeat_misses", &out.heartbeat_misses, 1);
  gateway.read("generate_timeout_ms", &out.generate_timeout_ms, 1);
  gateway.read("max_seq_len", &out.max_seq_len, 0);
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
  chat.read("format", &out.chat_format);
  chat.read("thinking", &out.thinking);
  chat.read("reasoning_effort", &out.reasoning_effort);
  ConfigNode sampling = root.child("sampling");
  sampling.read("temperature", &out.temperature, 0.0, 100.0);
  sampling.read("top_k", &out.top_k, 0);
  sampling.read("top_p", &out.top_p, 0.0, 1.0);
  sampling.read("min_p", &out.min_p, 0.0, 1.0);
  sampling.read("max_tokens", &out.max_tokens, 1);
  std::set<std::string> names;
  for (ConfigNode& item : root.list("environments")) {
    out.environments.push_back(read_environment(item));
    if (!names.insert(out.environments.back().name).second) {
      item.fail("name", "\"" + out.environments.back().name + "\" is given to two environments");
    }
  }
  return out;
}

}  // namespace slipstream::gateway
