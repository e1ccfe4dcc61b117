// Environment servers that a config file asks us to start.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/log.h"
#include "common/status.h"

namespace slipstream::cli {

// Runs a command until the object dies: started again with back-off when it ends, killed with its children when we do, even
// by SIGKILL. Its output goes to a file, whose last lines are in the message when it ends.
class ChildProcess {
 public:
  static constexpr int kStartsMax = 3;  // that end at once, before the command is given up
  struct Options {
    std::string name;                  // in messages
    std::vector<std::string> command;  // found through PATH
    std::string output;                // file, appended
    // The command was given up: it never ran for 10 s. From another thread; outlives the object.
    std::function<void(absl::Status)> on_failure;
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
