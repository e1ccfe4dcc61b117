#include "examples/faults.h"

#include <cmath>
#include <limits>

#include "examples/episodic_task.h"

namespace slipstream::examples {

Fault RandomFaults::draw() {
  Fault fault;
  double uniform = 0, normal = 0;
  {
    // Always the same number of draws a call, so that one probability does not shift the others' sequence.
    const absl::MutexLock lock(&mutex_);
    uniform = std::uniform_real_distribution<double>()(random_);
    normal = std::normal_distribution<double>()(random_);
    fault.garbage = random_();
  }
  if (config_.latency_p50_ms > 0) {
    constexpr double kZ99 = 2.3263478740408408;  // the standard normal's 99 % quantile
    const double ratio = config_.latency_p99_ms > 0 ? config_.latency_p99_ms / config_.latency_p50_ms : 1.0;
    fault.delay = absl::Milliseconds(config_.latency_p50_ms * std::exp(std::log(ratio) / kZ99 * normal));
  }
  const std::pair<double, FaultKind> kinds[] = {{config_.exit_probability, FaultKind::kExit},
                                                {config_.abort_probability, FaultKind::kAbort},
                                                {config_.stall_probability, FaultKind::kStall},
                                                {config_.garbage_probability, FaultKind::kGarbage}};
  for (const auto& [probability, kind] : kinds) {
    if (uniform < probability) {
      fault.kind = kind;
      break;
    }
    uniform -= probability;
  }
  return fault;
}

void make_garbage(uint64_t garbage, v1::ResetResponse* response) {
  response->clear_solution();
  switch (garbage % 3) {
    case 0:
      return response->clear_messages();
    case 1:
      return response->mutable_messages(0)->set_role(v1::ROLE_UNSPECIFIED);
    default: {
      v1::Tool& tool = *response->add_tools();
      tool.set_name(std::string("\xff\x00<", 3));
      tool.set_parameters("{\"type\":");
    }
  }
}

void make_garbage(uint64_t garbage, v1::StepResponse* response) {
  response->clear_solution();
  switch (garbage % 4) {
    case 0:
      return response->set_reward(std::numeric_limits<double>::quiet_NaN());
    case 1:
      return response->set_reward(std::numeric_limits<double>::infinity());
    case 2:  // not done, and nothing to go on with
      response->clear_messages();
      return response->set_done(false);
    default:
      response->set_done(false);
      *response->add_messages() = text_message(static_cast<v1::Role>(99), std::string("\xfe\xff\x00", 3));
  }
}

}  // namespace slipstream::examples
