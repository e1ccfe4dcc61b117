// Serves the tasks of an environment over gRPC (slipstream.v1.Environment), with health and reflection.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "examples/episode_table.h"
#include "examples/faults.h"

namespace slipstream::examples {

struct EnvironmentProgram {
  std::string name;
  std::vector<TaskEntry> tasks;
  FaultSource faults;  // empty: behaves
  EpisodeTable::Config episodes;
};

class EnvironmentServer {
 public:
  virtual ~EnvironmentServer() = default;  // open calls end within two seconds
  virtual const std::string& address() const = 0;

  // host:port, port 0 for any free one. Unavailable: names the address when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<EnvironmentServer>> start(const std::string& address,
                                                                  EnvironmentProgram program);
};

// What main() of an environment does: serves until SIGTERM or SIGINT, after printing "listening on
// host:port". Returns the exit code. No thread may run before it.
int serve_until_signal(const std::string& address, EnvironmentProgram program);
// The same with a command line of just --address.
int environment_main(int argc, char** argv, EnvironmentProgram program);

}  // namespace slipstream::examples
