// One episode that the gateway drives: Reset, then generate and Step until it is over.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "gateway/config.h"
#include "gateway/engine_client.h"
#include "gateway/environment_client.h"
#include "gateway/episode.h"
#include "gateway/session.h"

namespace slipstream::gateway {

// One thread. What the arguments refer to outlives it.
class DrivenEpisode {
 public:
  // episode_id names it to environment and engine: unlike the rollout id it is new for each attempt, so that what a service
  // remembers of an attempt that was lost does not answer this one.
  DrivenEpisode(const GatewayConfig& config, EngineClient& engine, EnvironmentClient& environment,
                const model::ChatFormat& format, EpisodePlan plan, std::string episode_id);

  // OK: it is over, well or badly, and trajectory() says how. Cancelled: stop was requested.
  absl::Status run(std::stop_token stop);
  v1::Trajectory trajectory() const;

  v1::FinishReason finish_reason() const { return finish_reason_; }
  const absl::Status& failure() const { return failure_; }  // what ended it badly
  int64_t environment_time_us() const { return environment_time_us_; }
  int64_t engine_time_us() const { return engine_time_us_; }
  int64_t non_finite_logprobs() const { return session_ ? session_->non_finite_logprobs() : 0; }

 private:
  absl::Status play(std::stop_token stop);
  absl::StatusOr<v1::ResetResponse> reset(std::stop_token stop);
  absl::StatusOr<v1::StepResponse> step(int turn, const Reply& reply, const model::ChatMessage& message,
                                        std::stop_token stop);
  // OutOfRange: there is no room for another token.
  absl::StatusOr<Reply> next_reply(int turn, const PendingTurn& pending, const v1::Message& solution, std::stop_token stop);
  absl::StatusOr<Reply> demonstrate(const v1::Message& solution) const;
  absl::Status end(v1::FinishReason reason);
  absl::Status end_badly(v1::FinishReason reason, const absl::Status& why);
  absl::Status end_by_environment(const absl::Status& why);

  const GatewayConfig& config_;
  EngineClient& engine_;
  EnvironmentClient& environment_;
  const model::ChatFormat& format_;
  const EpisodePlan plan_;
  const std::string episode_id_;
  const v1::Sampling sampling_;
  const int64_t start_time_us_;
  std::optional<Session> session_;
  double reward_ = 0;
  std::map<std::string, double> reward_parts_;
  v1::FinishReason finish_reason_ = v1::FINISH_REASON_ABORTED;
  absl::Status failure_;
  int64_t environment_time_us_ = 0, engine_time_us_ = 0;
};

}  // namespace slipstream::gateway
