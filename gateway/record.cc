#include "gateway/record.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/time/clock.h"

namespace slipstream::gateway {

v1::Sampling default_sampling(const GatewayConfig& config, uint64_t seed) {
  v1::Sampling out;
  out.set_temperature(config.temperature);
  out.set_top_k(config.top_k);
  out.set_top_p(config.top_p);
  out.set_min_p(config.min_p);
  out.set_max_tokens(config.max_tokens);
  out.set_seed(seed);
  return out;
}

absl::Status validate(const v1::Sampling& sampling) {
  const auto refuse = [](const char* field, auto value, const char* expected) {
    return absl::InvalidArgumentError(absl::StrCat("sampling.", field, ": ", value, ", expected ", expected));
  };
  if (!(sampling.temperature() >= 0 && std::isfinite(sampling.temperature()))) {
    return refuse("temperature", sampling.temperature(), "a number >= 0");
  }
  if (sampling.top_k() < 0) return refuse("top_k", sampling.top_k(), ">= 0");
  if (!(sampling.top_p() >= 0 && sampling.top_p() <= 1)) return refuse("top_p", sampling.top_p(), "0 to 1");
  if (!(sampling.min_p() >= 0 && sampling.min_p() < 1)) return refuse("min_p", sampling.min_p(), "0 to less than 1");
  if (sampling.max_tokens() <= 0) return refuse("max_tokens", sampling.max_tokens(), "> 0");
  return absl::OkStatus();
}

absl::StatusOr<v1::GenerateRequest> turn_request(const GatewayConfig& config, const EpisodePlan& plan,
                                                 const model::ChatFormat& format, const v1::Sampling& sampling,
                                                 const PendingTurn& turn) {
  v1::GenerateRequest request;
  request.set_session_id(plan.rollout_id);
  request.mutable_prompt_ids()->Add(turn.prompt_ids.begin(), turn.prompt_ids.end());
  *request.mutable_sampling() = sampling;
  if (config.max_seq_len > 0) {
    const int64_t room = config.max_seq_len - static_cast<int64_t>(turn.prompt_ids.size());
    if (room <= 0) {
      return absl::OutOfRangeError(absl::StrCat("the context has ", turn.prompt_ids.size(), " tokens, gateway.max_seq_len is ",
                                                config.max_seq_len));
    }
    request.mutable_sampling()->set_max_tokens(static_cast<int>(std::min<int64_t>(sampling.max_tokens(), room)));
  }
  request.mutable_stop_ids()->Add(format.stop_ids().begin(), format.stop_ids().end());
  request.set_min_policy_version(plan.min_policy_version);
  request.set_capture_experts(config.capture_replay);
  request.set_capture_selections(config.capture_replay);
  return request;
}

v1::Trajectory make_trajectory(const EpisodePlan& plan, const Session* session, const v1::Sampling& sampling,
                               const model::ChatFormat& format, int64_t start_time_us) {
  v1::Trajectory out;
  out.set_rollout_id(plan.rollout_id);
  out.set_group_id(plan.group_id);
  out.set_group_index(plan.group_index);
  out.set_kind(plan.kind);
  out.set_environment(plan.environment);
  out.set_task(plan.task);
  out.set_instance(plan.instance);
  *out.mutable_sampling() = sampling;
  out.set_template_fingerprint(format.fingerprint());
  out.set_start_time_us(start_time_us);
  out.set_end_time_us(now_us());
  std::optional<int> oldest;
  if (session != nullptr) {
    for (v1::Sample& sample : session->samples()) {
      for (const int version : sample.action_policy_versions()) oldest = std::min(oldest.value_or(version), version);
      *out.add_samples() = std::move(sample);
    }
    out.set_num_turns(static_cast<int>(session->num_turns()));
  }
  out.set_min_policy_version(oldest.value_or(plan.min_policy_version));
  return out;
}

int64_t now_us() { return absl::ToUnixMicros(absl::Now()); }

}  // namespace slipstream::gateway
