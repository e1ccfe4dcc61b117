#include "rollout/registration.h"

#include "common/pause.h"

namespace slipstream::rollout {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kComplainEvery = absl::Seconds(10);
constexpr absl::Duration kRetryFirst = absl::Milliseconds(200), kRetryMost = absl::Seconds(2);

}  // namespace

Registration::Registration(const std::string& gateway_address, WorkerIdentity worker, Engine& engine,
                           std::stop_token draining, Logger log)
    : gateway_address_(gateway_address),
      worker_(std::move(worker)),
      engine_(engine),
      draining_(std::move(draining)),
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

// Until the time is over, the stop, or the drain that run() has not seen yet.
void Registration::rest(absl::Duration length, std::stop_token stop) {
  if (drain_seen_) return void(pause(length, stop));
  std::stop_source either;
  const auto wake = [&either] { either.request_stop(); };
  const std::stop_callback on_stop(stop, wake), on_drain(draining_, wake);
  pause(length, either.get_token());
}

void Registration::run(std::stop_token stop) noexcept {
  Backoff retry(kRetryFirst, kRetryMost);
  absl::Duration period = kRetryMost;
  absl::Time complain = absl::InfinitePast();
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
                                  .idle_seconds = engine.idle_seconds,
                                  .draining = engine.draining},
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
    if (!status.ok() && absl::Now() >= complain) {
      log_->warn("gateway {}: {}; trying on", gateway_address_, status.ToString());
      complain = absl::Now() + kComplainEvery;
    }
    if (status.ok()) {
      retry.reset();
      complain = absl::InfinitePast();
    }
    drain_seen_ = engine.draining;
    rest(status.ok() ? period : retry.next(), stop);
  }
}

}  // namespace slipstream::rollout
