// How a hostile environment misbehaves: what it draws for each call, and what garbage looks like.
#pragma once

#include <cstdint>
#include <functional>
#include <random>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "slipstream/v1/environment.pb.h"

namespace slipstream::examples {

enum class FaultKind {
  kNone,
  kAbort,    // the RPC fails
  kStall,    // no answer, ever
  kGarbage,  // an answer that breaks the rules of environment.proto
  kExit,     // the process is gone
};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  absl::Duration delay;  // before the answer
  uint64_t garbage = 0;  // which kind
};

// Drawn for every Reset and Step; empty: none.
using FaultSource = std::function<Fault()>;

// Draws are a sequence fixed by the seed, one for each call in order of arrival. Thread-safe.
class RandomFaults {
 public:
  struct Config {
    double abort_probability = 0;
    double stall_probability = 0;
    double garbage_probability = 0;
    double exit_probability = 0;
    double latency_p50_ms = 0;  // log-normal with these two quantiles
    double latency_p99_ms = 0;  // 0: always p50
    uint64_t seed = 1;
  };
  explicit RandomFaults(const Config& config) : config_(config), random_(config.seed) {}
  Fault draw();

 private:
  const Config config_;
  absl::Mutex mutex_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
};

void make_garbage(uint64_t garbage, v1::ResetResponse* response);
void make_garbage(uint64_t garbage, v1::StepResponse* response);

}  // namespace slipstream::examples
