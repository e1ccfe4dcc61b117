// Environment servers that a config file asks us to start.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/log.h"
#include "common/status.h"

namespace slipstream::cli {

// Runs a command until the object dies: started again with back-off when it ends, killed with its children when we do, even
// by SIGKILL. Its output goes to a file.
class ChildProcess {
 public:
  struct Options {
    std::string name;                  // in messages
    std::vector<std::string> command;  // found through PATH
    std::string output;                // file, appended
  };
  // NotFound: the program does not exist or cannot be run.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> start(Options options, Logger log);

 private:
  ChildProcess(Options options, Logger log) : options_(std::move(options)), log_(std::move(log)) {}
  void supervise(std::stop_token stop) noexcept;

  Options options_;
  Logger log_;
  std::jthread thread_;
};

// A TCP port of the loopback interface that nobody listens on, below the ephemeral range so that no outgoing connection
// takes it meanwhile. Unavailable: none found.
absl::StatusOr<int> unused_port();

}  // namespace slipstream::cli
