// Ctrl-C and SIGTERM as a stop token.
#pragma once

#include <stop_token>
#include <thread>

namespace slipstream::cli {

// Made before any other thread starts, so that all inherit the blocked signals. The first SIGINT or SIGTERM requests a stop;
// the second ends the process at once.
class SignalStop {
 public:
  SignalStop();
  ~SignalStop();
  std::stop_token token() const { return source_.get_token(); }
  // Waits for a signal.
  void wait();

 private:
  std::stop_source source_;
  std::jthread thread_;
};

}  // namespace slipstream::cli
