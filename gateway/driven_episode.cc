#include "gateway/driven_episode.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "gateway/groups.h"
#include "gateway/messages.h"
#include "gateway/record.h"

namespace slipstream::gateway {
namespace {

// Adds the time until it dies.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t* sum_us) : sum_us_(sum_us), start_(absl::Now()) {}
  ~Stopwatch() { *sum_us_ += std::max<int64_t>(absl::ToInt64Microseconds(absl::Now() - start_), 0); }

 private:
  int64_t* sum_us_;
  absl::Time start_;
};

bool is_demonstration(const EpisodePlan& plan) { return plan.kind == v1::TRAJECTORY_KIND_DEMONSTRATION; }

}  // namespace

DrivenEpisode::DrivenEpisode(const GatewayConfig& config, EngineClient& engine, EnvironmentClient& environment,
                             const model::ChatFormat& format, EpisodePlan plan, std::string episode_id)
    : config_(config),
      engine_(engine),
      environment_(environment),
      format_(format),
      plan_(std::move(plan)),
      episode_id_(std::move(episode_id)),
      sampling_(default_sampling(config, plan_.sampling_seed)),
      start_time_us_(now_us()) {}

absl::Status DrivenEpisode::run(std::stop_token stop) {
  std::optional<EnvironmentClient::Place> place = environment_.take_place(stop);
  if (!place.has_value()) return absl::CancelledError("stopped before the episode began");
  const absl::Status status = play(stop);
  environment_.close(episode_id_, *std::move(place));
  engine_.end_session(plan_.rollout_id);
  return status;
}

absl::Status DrivenEpisode::play(std::stop_token stop) {
  const std::optional<v1::TaskDescription> task = environment_.task(plan_.task);
  if (!task.has_value()) return end_by_environment(absl::NotFoundError(absl::StrCat("task \"", plan_.task, "\" is not described")));
  absl::StatusOr<v1::ResetResponse> first = reset(stop);
  if (!first.ok()) return end_by_environment(first.status());
  const absl::StatusOr<std::vector<model::ChatTool>> tools = from_proto(first->tools());
  if (!tools.ok()) return end_by_environment(tools.status());
  session_.emplace(format_, Session::Options{.branching = false,
                                             .max_seq_len = config_.max_seq_len,
                                             .use_tools = true,
                                             .demonstration = is_demonstration(plan_),
                                             .tools = *tools});
  google::protobuf::RepeatedPtrField<v1::Message> messages = std::move(*first->mutable_messages());
  v1::Message solution = std::move(*first->mutable_solution());
  for (int turn = 0; turn < task->max_turns(); ++turn) {
    const absl::StatusOr<std::vector<model::ChatMessage>> added = from_proto(messages);
    if (!added.ok()) return end_by_environment(added.status());
    const absl::StatusOr<PendingTurn> pending = session_->extend(*added);
    if (!pending.ok()) return end_by_environment(pending.status());
    absl::StatusOr<Reply> reply = next_reply(turn, *pending, solution, stop);
    if (absl::IsOutOfRange(reply.status()) && turn > 0) return end(v1::FINISH_REASON_LENGTH);
    if (!reply.ok()) return end_badly(v1::FINISH_REASON_ABORTED, reply.status());
    const absl::StatusOr<model::ChatMessage> message = session_->commit(*pending, *reply);
    if (!message.ok()) return end_badly(v1::FINISH_REASON_ABORTED, message.status());

    absl::StatusOr<v1::StepResponse> answer = step(turn, *reply, *message, stop);
    if (!answer.ok()) return end_by_environment(answer.status());
    reward_ += answer->reward();
    for (const auto& [name, value] : answer->reward_parts()) reward_parts_[name] += value;
    if (!is_reward(reward_)) {
      return end_by_environment(absl::InternalError(absl::StrCat("reward: the sum is ", reward_, ", expected it within +-1e9")));
    }
    // Nothing can follow a reply that was cut, and to the filters it is the cut that counts, not what came of it.
    if (reply->finish_reason == v1::FINISH_REASON_LENGTH) return end(v1::FINISH_REASON_LENGTH);
    if (answer->done()) return end(v1::FINISH_REASON_ENV_DONE);
    messages = std::move(*answer->mutable_messages());
    solution = std::move(*answer->mutable_solution());
  }
  return end(v1::FINISH_REASON_LENGTH);  // the most turns the environment said
}

absl::StatusOr<v1::ResetResponse> DrivenEpisode::reset(std::stop_token stop) {
  v1::ResetRequest request;
  request.set_episode_id(episode_id_);
  request.set_task(plan_.task);
  request.set_instance(plan_.instance);
  request.set_want_solution(is_demonstration(plan_));
  const Stopwatch watch(&environment_time_us_);
  return environment_.reset(request, stop);
}

absl::StatusOr<v1::StepResponse> DrivenEpisode::step(int turn, const Reply& reply, const model::ChatMessage& message,
                                                     std::stop_token stop) {
  v1::StepRequest request;
  request.set_episode_id(episode_id_);
  request.set_turn(turn);
  *request.mutable_message() = to_proto(message);
  const bool stopped = reply.finish_reason == v1::FINISH_REASON_STOP && !reply.ids.empty();
  const absl::Span<const int32_t> said(reply.ids.data(), reply.ids.size() - (stopped ? 1 : 0));
  request.set_raw_text(format_.tokenizer().decode(said));
  request.set_finish_reason(reply.finish_reason);
  request.set_want_solution(is_demonstration(plan_));
  const Stopwatch watch(&environment_time_us_);
  return environment_.step(request, stop);
}

absl::StatusOr<Reply> DrivenEpisode::next_reply(int turn, const PendingTurn& pending, const v1::Message& solution,
                                                std::stop_token stop) {
  absl::StatusOr<v1::GenerateRequest> request = turn_request(config_, plan_, format_, sampling_, pending);
  if (!request.ok()) return request.status();
  if (is_demonstration(plan_)) return demonstrate(solution);
  request->set_request_id(absl::StrCat(episode_id_, "/", turn));
  const Stopwatch watch(&engine_time_us_);
  absl::StatusOr<Generation> generation =
      engine_.generate(*request, absl::Now() + absl::Milliseconds(config_.generate_timeout_ms), stop);
  if (!generation.ok()) return generation.status();
  return std::move(generation->reply);
}

absl::StatusOr<Reply> DrivenEpisode::demonstrate(const v1::Message& solution) const {
  ASSIGN_OR_RETURN(const model::ChatMessage message, from_proto(solution));
  return Reply{.ids = format_.render_reply(message), .finish_reason = v1::FINISH_REASON_STOP};
}

absl::Status DrivenEpisode::end(v1::FinishReason reason) {
  finish_reason_ = reason;
  return absl::OkStatus();
}

absl::Status DrivenEpisode::end_badly(v1::FinishReason reason, const absl::Status& why) {
  if (absl::IsCancelled(why)) return why;
  failure_ = why;
  return end(reason);
}

absl::Status DrivenEpisode::end_by_environment(const absl::Status& why) {
  return end_badly(absl::IsDeadlineExceeded(why) ? v1::FINISH_REASON_TIMEOUT : v1::FINISH_REASON_ENV_CRASH, why);
}

v1::Trajectory DrivenEpisode::trajectory() const {
  v1::Trajectory out =
      make_trajectory(plan_, session_ ? &*session_ : nullptr, sampling_, format_, start_time_us_);
  out.set_reward(reward_);
  out.mutable_reward_parts()->insert(reward_parts_.begin(), reward_parts_.end());
  out.set_finish_reason(finish_reason_);
  out.set_environment_time_us(environment_time_us_);
  out.set_engine_time_us(engine_time_us_);
  return out;
}

}  // namespace slipstream::gateway
