// The gateway's part of the config file: `gateway`, `chat`, `sampling` and `environments`.
#pragma once

#include <string>
#include <vector>

#include "common/config.h"
#include "common/job.h"

namespace slipstream::gateway {

// One task of the mixture.
struct TaskConfig {
  std::string name;              // a task the environment's Describe lists
  double weight = 1.0;           // share of groups among all tasks
  double groups_per_second = 0;  // rate limit; 0: none
  uint64_t instances = 0;        // use instances 0 .. n-1 only; 0: all that Describe says exist
  bool demonstrations = true;    // may be used for the supervised warm-up
};

struct EnvironmentConfig {
  std::string name;                  // for metrics and messages; unique
  std::string address;               // host:port of its Environment service; empty: whoever starts `command` fills it in
  std::vector<std::string> command;  // started by `slipstream run` and `slipstream gateway`; {address} stands for host:port
  int start_timeout_ms = 60'000;     // until it first describes itself; then `slipstream run` ends
  int reset_timeout_ms = 30'000;
  int step_timeout_ms = 30'000;
  int max_concurrent = 1024;         // episodes open at once
  int quarantine_after = 5;          // calls failed in a row before the service is left alone
  int quarantine_ms = 1'000;         // first pause; doubles up to 30 s
  std::vector<TaskConfig> tasks;     // empty: every task that Describe lists, with weight 1
};

enum class Repair { kRepeat, kRefill };
enum class Overlong { kKeep, kMask, kDrop };

struct GatewayConfig {
  JobConfig job;
  // gateway:
  std::string address = "127.0.0.1:0";          // Gateway and Workers services
  int episode_threads = 64;                     // episodes driven at once; each waits in a thread of its own
  int heartbeat_ms = 2'000;                     // a worker is dead after heartbeat_misses of these
  int heartbeat_misses = 3;
  int generate_timeout_ms = 600'000;            // one turn, waiting for a worker included
  int max_seq_len = 0;                          // samples are cut here; 0: never
  int64_t log_segment_bytes = 64 << 20;
  int64_t session_idle_ms = 3'600'000;          // driving sessions expire
  int sessions_max = 4096;                      // driving sessions open at once
  bool branching = false;                       // a history that differs opens a branch instead of failing
  Repair repair = Repair::kRepeat;
  int refills_max = 3;                          // repair: refill: times one episode is run again before repeat takes over
  Overlong overlong = Overlong::kKeep;
  bool drop_zero_variance = true;
  bool capture_replay = false;                  // record routing and indexer replay
  // chat:
  std::string chat_format = "glm47";            // glm47 | glm53
  bool thinking = false;                        // open <think> in the generation prompt
  std::string reasoning_effort = "max";         // glm53: low | high | max
  // sampling: defaults of every turn
  float temperature = 1.0f;
  int top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int max_tokens = 256;
  // environments:
  std::vector<EnvironmentConfig> environments;

  static GatewayConfig from(ConfigNode root);  // errors are found by root.finish()
};

}  // namespace slipstream::gateway
