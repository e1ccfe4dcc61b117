#include "rollout/registration.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace slipstream::rollout {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kRetryMin = absl::Milliseconds(100), kRetryMax = absl::Seconds(2);

}  // namespace

Registration::Registration(const std::string& gateway_address, WorkerIdentity worker, Engine& engine,
                           Logger log)
    : worker_(std::move(worker)),
      engine_(engine),
      log_(std::move(log)),
      client_(gateway_address, kCallTimeout),
      thread_([this](std::stop_token stop) { run(stop); }) {}

Registration::~Registration() = default;

void Registration::leave() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
  if (!registered_) return;
  registered_ = false;
  if (const absl::Status status = client_.unregister(worker_); !status.ok()) {
    log_->warn("unregister: {}", status.ToString());
  }
}

void Registration::run(std::stop_token stop) noexcept {
  std::mutex mutex;
  std::condition_variable_any wake;
  absl::Duration retry = kRetryMin, period = kRetryMax;
  bool complained = false;
  while (!stop.stop_requested()) {
    const EngineStatus engine = engine_.status();
    if (engine.draining && engine.running + engine.waiting == 0 && registered_) {
      const absl::Status status = client_.unregister(worker_);
      log_->info("drained and idle; unregistered: {}", status.ToString());
      registered_ = !status.ok();
      if (status.ok()) return;
    }
    absl::Status status;
    if (registered_) {
      status = client_.heartbeat(worker_,
                                 {.policy_version = engine.policy_version,
                                  .running = engine.running,
                                  .waiting = engine.waiting,
                                  .generated_tokens = engine.generated_tokens,
                                  .idle_seconds = engine.idle_seconds},
                                 stop);
      if (absl::IsNotFound(status)) {
        log_->info("the gateway does not know this worker: registering again");
        registered_ = false;
        continue;
      }
    } else if (!engine.draining) {
      const absl::StatusOr<absl::Duration> wanted =
          client_.register_worker(worker_, engine.policy_version, stop);
      status = wanted.status();
      if (wanted.ok()) {
        registered_ = true;
        period = *wanted;
        log_->info("registered as {} at {}", worker_.worker_id, worker_.address);
      }
    }
    if (stop.stop_requested()) return;
    if (!status.ok() && !complained) log_->warn("gateway: {}; trying on", status.ToString());
    complained = !status.ok();
    retry = status.ok() ? kRetryMin : std::min(retry * 2, kRetryMax);
    std::unique_lock lock(mutex);
    wake.wait_for(lock, stop, absl::ToChronoMilliseconds(status.ok() ? period : retry), [] { return false; });
  }
}

}  // namespace slipstream::rollout
