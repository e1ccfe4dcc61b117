// Programs under test: started, killed, waited for; never left behind.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "common/testing/temporary_directory.h"

namespace slipstream::testing {

// One process. Its output goes to a file. The destructor kills it (SIGKILL) with all it started and reaps it.
class Process {
 public:
  Process(const std::vector<std::string>& command, const std::string& output);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  void signal(int number);  // to the process alone
  void kill_now();          // SIGKILL to its whole group, and reaped
  // The exit code (128 + signal when killed by one), or nullopt when it still runs after `timeout`.
  std::optional<int> wait(std::chrono::milliseconds timeout);
  pid_t pid() const { return pid_; }
  bool running();

 private:
  void release();
  pid_t pid_ = -1;
  std::optional<int> code_;
};

// The first of `count` consecutive TCP ports of the loopback interface that nobody uses, below those that outgoing
// connections get: tests of several builds may run on one machine at once.
int unused_ports(int count);

// Polls until the condition holds; false when `timeout` passed first.
template <class Condition>
bool wait_until(const Condition& condition, std::chrono::milliseconds timeout);

std::string read_file(const std::string& path);              // "" when it cannot be read
std::vector<std::string> read_lines(const std::string& path);  // whole lines only
void write_file(const std::string& path, const std::string& text);
// What a pause between two looks is; the one place tests may pause.
void pause_briefly();

template <class Condition>
bool wait_until(const Condition& condition, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    pause_briefly();
  }
  return true;
}

}  // namespace slipstream::testing
