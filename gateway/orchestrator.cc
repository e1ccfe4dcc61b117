#include "gateway/orchestrator.h"

#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/pause.h"
#include "gateway/record.h"
#include "proto/words.h"

namespace slipstream::gateway {
namespace {

constexpr absl::Duration kLastWrite = absl::Seconds(5);

}  // namespace

Orchestrator::Orchestrator(const GatewayConfig& config, EpisodeSource& source, EngineClient& engine,
                           Environments environments, const model::ChatFormat& format, Metrics& metrics, Logger log)
    : config_(config),
      source_(source),
      engine_(engine),
      environments_(std::move(environments)),
      format_(format),
      metrics_(metrics),
      log_(std::move(log)),
      life_(absl::StrFormat("%x", now_us())) {
  threads_.reserve(static_cast<size_t>(config_.episode_threads));
  try {
    for (int i = 0; i < config_.episode_threads; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the destructor of what is half made would wait for threads that nobody told to stop
    stop();
    throw;
  }
}

Orchestrator::~Orchestrator() { stop(); }

void Orchestrator::stop() {
  stop_.request_stop();
  threads_.clear();
}

void Orchestrator::work(int thread) noexcept {
  const std::stop_token stop = stop_.get_token();
  // Where everything fails at once, groups must not be burnt as fast as they can be planned.
  Backoff backoff(absl::Milliseconds(50), absl::Seconds(5));
  for (int64_t number = 0;; ++number) {
    const std::optional<EpisodePlan> plan = source_.next(stop);
    if (!plan.has_value()) return;
    bool good = false;
    try {
      good = run(*plan, absl::StrCat(plan->rollout_id, "@", life_, ".", thread, ".", number));
    } catch (const std::exception& error) {  // a bug of ours, or no memory: this episode's alone
      log_->error("episode {}: {}", plan->rollout_id, error.what());
      engine_.end_session(plan->rollout_id);
      hand_over(*plan, [&] {
        v1::Trajectory failed = make_trajectory(*plan, nullptr, default_sampling(config_, plan->sampling_seed), format_, now_us());
        failed.set_finish_reason(v1::FINISH_REASON_ABORTED);
        return failed;
      });
    }
    if (good) {
      backoff.reset();
    } else {
      pause(backoff.next(), stop);
    }
  }
}

// Whether the episode went as episodes should.
bool Orchestrator::run(const EpisodePlan& plan, const std::string& episode_id) {
  const auto environment = environments_.find(plan.environment);
  if (environment == environments_.end()) {
    log_->error("episode {}: there is no environment \"{}\"", plan.rollout_id, plan.environment);
    source_.cancel(plan);
    return false;
  }
  DrivenEpisode episode(config_, engine_, *environment->second, format_, plan, episode_id);
  const absl::Status status = episode.run(stop_.get_token());
  environment_time_us_ += episode.environment_time_us();
  engine_time_us_ += episode.engine_time_us();
  if (!status.ok()) {
    source_.cancel(plan);
    return false;
  }
  if (episode.non_finite_logprobs() > 0) {
    metrics_.add(metric::kNonFiniteLogprobs, static_cast<double>(episode.non_finite_logprobs()));
  }
  if (!episode.failure().ok()) {
    if (const std::optional<std::string> more = failures_.pass()) {
      log_->warn("episode {}: {}: {}{}", plan.rollout_id, rpc::word_of(episode.finish_reason()),
                 std::string(episode.failure().message()), *more);
    }
  }
  hand_over(plan, [&] { return episode.trajectory(); });
  return !rpc::is_failure(episode.finish_reason());
}

// Waits until the trajectory is on disk: a full disk must hold back the episodes that would need it too.
void Orchestrator::hand_over(const EpisodePlan& plan, const std::function<v1::Trajectory()>& trajectory) {
  struct Written {
    absl::Notification known;
    absl::Status status;
  };
  const std::stop_token stop = stop_.get_token();
  Backoff backoff(absl::Milliseconds(100), absl::Seconds(10));
  while (true) {
    const auto written = std::make_shared<Written>();  // the answer may come when nobody waits any more
    source_.finish(plan, trajectory(), [written](absl::StatusOr<uint64_t> offset) {
      written->status = offset.status();
      written->known.Notify();
    });
    absl::Time patience = absl::InfiniteFuture();
    while (!written->known.WaitForNotificationWithTimeout(absl::Milliseconds(100))) {
      if (!stop.stop_requested()) continue;
      if (patience == absl::InfiniteFuture()) patience = absl::Now() + kLastWrite;
      if (absl::Now() >= patience) return;
    }
    if (written->status.ok()) return;
    if (const std::optional<std::string> more = writes_.pass()) {
      log_->error("episode {}: its trajectory could not be written: {}{}", plan.rollout_id,
                  std::string(written->status.message()), *more);
    }
    if (!pause(backoff.next(), stop)) return source_.cancel(plan);
  }
}

}  // namespace slipstream::gateway
