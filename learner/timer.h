// Seconds that do not jump, and what a scope took of them.
#pragma once

#include <chrono>

namespace slipstream::learner {

inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds the time from construction to destruction to a sum.
class Timer {
 public:
  explicit Timer(double* sum) : sum_(sum), begin_(steady_seconds()) {}
  ~Timer() { *sum_ += steady_seconds() - begin_; }

 private:
  double* sum_;
  double begin_;
};

}  // namespace slipstream::learner
