#include "gateway/driving_sessions.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "common/address.h"
#include "common/pause.h"
#include "gateway/groups.h"
#include "gateway/messages.h"
#include "gateway/record.h"
#include "proto/words.h"

namespace slipstream::gateway {
namespace {

constexpr absl::Duration kLastWrite = absl::Seconds(5);

const absl::Status kStopping = absl::UnavailableError("the gateway stops");

// A message's fields over those of `base`: absent numbers keep it. Temperature and the filters are taken as they are.
v1::Sampling over(const v1::Sampling& base, const v1::Sampling& sampling) {
  v1::Sampling out = sampling;
  if (out.seed() == 0) out.set_seed(base.seed());
  if (out.max_tokens() == 0) out.set_max_tokens(base.max_tokens());
  return out;
}

absl::Status validate(const v1::FinishRequest& request) {
  const v1::FinishReason failure = request.failure();
  if (failure != v1::FINISH_REASON_UNSPECIFIED) {
    if (rpc::is_failure(failure)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("failure: ", failure, ", expected ENV_CRASH, TIMEOUT or ABORTED"));
  }
  if (!is_reward(request.reward())) {
    return absl::InvalidArgumentError(absl::StrCat("reward: ", request.reward(), ", expected a number within +-1e9"));
  }
  for (const auto& [name, value] : request.reward_parts()) {
    if (!is_reward(value)) {
      return absl::InvalidArgumentError(absl::StrCat("reward_parts[\"", name, "\"]: ", value, ", expected a number within +-1e9"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

DrivingSessions::DrivingSessions(const GatewayConfig& config, EpisodeSource& source, EngineClient& engine,
                                 const model::ChatFormat& format, Metrics& metrics, Logger log)
    : config_(config),
      source_(source),
      engine_(engine),
      format_(format),
      metrics_(metrics),
      log_(std::move(log)),
      opened_(4 * static_cast<size_t>(config.sessions_max), kAnswerBytesMax),
      chats_(4 * static_cast<size_t>(config.sessions_max), kAnswerBytesMax),
      finishes_(4 * static_cast<size_t>(config.sessions_max), kAnswerBytesMax),
      turns_(std::min(config.sessions_max, kTurnsMax), static_cast<size_t>(config.sessions_max)),
      writes_(2, static_cast<size_t>(config.sessions_max)),
      expirer_([this](std::stop_token stop) { expire(stop); }) {}

DrivingSessions::~DrivingSessions() {
  stop();
  const absl::MutexLock lock(&mutex_);
  while (num_writing_ > 0) written_.Wait(&mutex_);  // the source will call back
}

absl::StatusOr<v1::OpenSessionResponse> DrivingSessions::open(const v1::OpenSessionRequest& request) {
  const std::string body = request.SerializeAsString();
  ASSIGN_OR_RETURN(std::vector<model::ChatTool> tools, from_proto(request.tools()));
  if (const std::string problem = name_problem(request.task()); !problem.empty()) {
    return absl::InvalidArgumentError("task: " + problem);
  }
  if (const std::string problem = name_problem(request.group_id()); !request.group_id().empty() && !problem.empty()) {
    return absl::InvalidArgumentError("group_id: " + problem);
  }
  v1::Sampling sampling = default_sampling(config_, 0);
  if (request.has_sampling()) sampling = over(sampling, request.sampling());
  RETURN_IF_ERROR(validate(sampling));

  const absl::MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<v1::OpenSessionResponse> earlier, opened_.find(request.idempotency_key(), body));
  if (earlier != nullptr) return *earlier;
  if (stop_.stop_requested()) return kStopping;
  if (num_open_ >= config_.sessions_max) {
    return absl::ResourceExhaustedError(absl::StrCat(num_open_, " sessions are open, gateway.sessions_max allows no more"));
  }
  ASSIGN_OR_RETURN(EpisodePlan plan, source_.admit(request.task(), request.group_id(), request.group_size()));
  auto entry = std::make_shared<Entry>();
  entry->plan = std::move(plan);
  if (sampling.seed() == 0) sampling.set_seed(entry->plan.sampling_seed);
  entry->sampling = sampling;
  entry->start_time_us = now_us();
  entry->session = std::make_unique<Session>(format_, Session::Options{.branching = config_.branching,
                                                                       .max_seq_len = config_.max_seq_len,
                                                                       .use_tools = true,
                                                                       .demonstration = false,
                                                                       .tools = std::move(tools)});
  entry->last_used = absl::Now();
  auto response = std::make_shared<v1::OpenSessionResponse>();
  response->set_session_id(entry->plan.rollout_id);
  sessions_[entry->plan.rollout_id] = std::move(entry);
  ++num_open_;
  opened_.begin(request.idempotency_key(), body, response);
  opened_.complete(request.idempotency_key(), static_cast<int64_t>(response->SpaceUsedLong()));
  return *response;
}

// The open session, for its caller alone until he clears `busy`.
absl::StatusOr<std::shared_ptr<DrivingSessions::Entry>> DrivingSessions::take(const std::string& session_id) {
  if (stop_.stop_requested()) return kStopping;
  const auto known = sessions_.find(session_id);
  if (known == sessions_.end()) return absl::NotFoundError(absl::StrCat("session_id: \"", session_id, "\" is not a session"));
  Entry& entry = *known->second;
  if (entry.state != State::kOpen) return absl::FailedPreconditionError("session_id: the session is over");
  if (entry.busy) return absl::FailedPreconditionError("session_id: a call to the session is under way");
  entry.busy = true;
  return known->second;
}

absl::StatusOr<std::shared_ptr<ChatStream>> DrivingSessions::chat(const v1::ChatRequest& request) {
  const std::string body = request.SerializeAsString();
  const absl::MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<ChatStream> earlier, chats_.find(request.idempotency_key(), body));
  if (earlier != nullptr) return earlier;
  ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, take(request.session_id()));
  const auto stream = std::make_shared<ChatStream>();
  if (!turns_.submit([this, request, entry, stream] { run_turn(request, *entry, *stream); })) {
    entry->busy = false;
    return absl::ResourceExhaustedError("too many turns wait");
  }
  chats_.begin(request.idempotency_key(), body, stream);
  return stream;
}

void DrivingSessions::run_turn(const v1::ChatRequest& request, Entry& entry, ChatStream& stream) {
  const absl::Time start = absl::Now();
  absl::StatusOr<v1::ChatEvent> last = absl::InternalError("the turn failed");
  try {
    last = sample_turn(request, entry, stream);
  } catch (const std::exception& error) {  // a bug of ours, or no memory: this turn's alone
    log_->error("session {}: {}", entry.plan.rollout_id, error.what());
  }
  const absl::Status status = absl::IsCancelled(last.status()) ? kStopping : last.status();
  if (last.ok()) stream.add(*std::move(last));
  {
    const absl::MutexLock lock(&mutex_);
    entry.busy = false;
    entry.last_used = absl::Now();
    entry.num_turns = entry.session->num_turns();
    entry.num_tokens = entry.session->num_tokens();
    const int64_t took = absl::ToInt64Microseconds(entry.last_used - start);
    entry.engine_time_us += took;
    engine_time_us_ += took;
    if (status.ok()) {
      chats_.complete(request.idempotency_key(), stream.bytes());
    } else {
      chats_.forget(request.idempotency_key());
    }
  }
  stream.end(status);
}

absl::StatusOr<v1::ChatEvent> DrivingSessions::sample_turn(const v1::ChatRequest& request, Entry& entry, ChatStream& stream) {
  ASSIGN_OR_RETURN(const std::vector<model::ChatMessage> conversation, from_proto(request.messages()));
  const v1::Sampling sampling = request.has_sampling() ? over(entry.sampling, request.sampling()) : entry.sampling;
  RETURN_IF_ERROR(validate(sampling));
  ASSIGN_OR_RETURN(const PendingTurn pending, entry.session->begin(conversation));
  ASSIGN_OR_RETURN(v1::GenerateRequest generate, turn_request(config_, entry.plan, format_, sampling, pending));
  generate.set_request_id(absl::StrCat(entry.plan.rollout_id, "@", entry.start_time_us, "/", now_us()));

  const std::vector<int32_t>& stops = format_.stop_ids();
  const auto forward = [&](const v1::GenerateEvent& event) {
    v1::ChatEvent out;
    const bool stopped = std::find(stops.begin(), stops.end(), event.ids(event.ids_size() - 1)) != stops.end();
    out.set_text(format_.tokenizer().decode({event.ids().data(), static_cast<size_t>(event.ids_size() - (stopped ? 1 : 0))}));
    *out.mutable_ids() = event.ids();
    *out.mutable_logprobs() = event.logprobs();
    *out.mutable_policy_versions() = event.policy_versions();
    stream.add(std::move(out));
  };
  const absl::Time deadline = absl::Now() + absl::Milliseconds(config_.generate_timeout_ms);
  ASSIGN_OR_RETURN(Generation generation, engine_.generate(generate, deadline, stop_.get_token(), forward));
  v1::ChatEvent last;
  v1::ChatFinished& finished = *last.mutable_finished();
  finished.set_finish_reason(generation.reply.finish_reason);
  finished.set_prompt_tokens(generation.prompt_tokens);
  finished.set_cached_tokens(generation.cached_tokens);
  finished.set_completion_tokens(static_cast<int>(generation.reply.ids.size()));
  const int64_t non_finite = entry.session->non_finite_logprobs();
  ASSIGN_OR_RETURN(const model::ChatMessage message, entry.session->commit(pending, std::move(generation.reply)));
  *finished.mutable_message() = to_proto(message);
  if (const int64_t more = entry.session->non_finite_logprobs() - non_finite; more > 0) {
    metrics_.add(metric::kNonFiniteLogprobs, static_cast<double>(more));
  }
  return last;
}

void DrivingSessions::finish(const v1::FinishRequest& request, FinishDone done) {
  std::optional<absl::StatusOr<v1::FinishResponse>> now;
  {
    // A map's entries have no order on the wire: equal requests must give equal bytes.
    std::string body = absl::StrCat(request.session_id(), "|", request.reward(), "|", request.failure());
    const std::map<std::string, double> parts(request.reward_parts().begin(), request.reward_parts().end());
    for (const auto& [name, value] : parts) absl::StrAppend(&body, "|", name, "=", value);
    const absl::MutexLock lock(&mutex_);
    const auto earlier = finishes_.find(request.idempotency_key(), body);
    if (!earlier.ok()) {
      now = earlier.status();
    } else if (*earlier != nullptr) {
      if ((*earlier)->result.has_value()) {
        now = *(*earlier)->result;
      } else {
        (*earlier)->waiting.push_back(std::move(done));
      }
    } else if (const absl::Status valid = validate(request); !valid.ok()) {
      now = valid;
    } else if (absl::StatusOr<std::shared_ptr<Entry>> entry = take(request.session_id()); !entry.ok()) {
      now = entry.status();
    } else if (request.failure() == v1::FINISH_REASON_UNSPECIFIED && (*entry)->num_turns == 0) {
      (*entry)->busy = false;
      now = absl::FailedPreconditionError("the session has no turn that a reward could be for; finish it with a failure");
    } else if (!writes_.submit([this, request, taken = *entry] { run_finish(request, taken); })) {
      (*entry)->busy = false;
      now = absl::ResourceExhaustedError("too many sessions are being finished");
    } else {
      auto finishing = std::make_shared<Finishing>();
      finishing->waiting.push_back(std::move(done));
      finishes_.begin(request.idempotency_key(), body, std::move(finishing));
      ++num_writing_;
    }
  }
  if (now.has_value()) done(*std::move(now));
}

void DrivingSessions::run_finish(const v1::FinishRequest& request, std::shared_ptr<Entry> entry) {
  const bool failed = request.failure() != v1::FINISH_REASON_UNSPECIFIED;
  v1::Trajectory out;
  try {
    // The agent said that it is over, as an environment would.
    out = trajectory(*entry, failed ? request.failure() : v1::FINISH_REASON_ENV_DONE);
  } catch (const std::exception& error) {  // a bug of ours, or no memory: this session's alone
    return finished(request, *entry, absl::InternalError(error.what()));
  }
  if (!failed) {
    out.set_reward(request.reward());
    *out.mutable_reward_parts() = request.reward_parts();
  }
  source_.finish(entry->plan, std::move(out),
                 [this, request, entry](absl::StatusOr<uint64_t> offset) { finished(request, *entry, std::move(offset)); });
}

void DrivingSessions::finished(const v1::FinishRequest& request, Entry& entry, absl::StatusOr<uint64_t> offset) {
  absl::StatusOr<v1::FinishResponse> result = v1::FinishResponse();
  if (offset.ok()) {
    result->set_log_offset(*offset);
  } else {
    result = offset.status();
  }
  std::vector<FinishDone> waiting;
  {
    const absl::MutexLock lock(&mutex_);
    entry.busy = false;
    if (const std::shared_ptr<Finishing> finishing = finishes_.answer(request.idempotency_key()); finishing != nullptr) {
      waiting.swap(finishing->waiting);
      finishing->result = result;
    }
    if (result.ok()) {
      close(entry, request.failure() == v1::FINISH_REASON_UNSPECIFIED ? State::kFinished : State::kFailed);
      finishes_.complete(request.idempotency_key(), 64);
    } else {
      entry.last_used = absl::Now();
      finishes_.forget(request.idempotency_key());
    }
  }
  if (result.ok()) engine_.end_session(entry.plan.rollout_id);
  for (const FinishDone& done : waiting) done(result);
  // Last: whoever waits for it in stop() lets this object die.
  const absl::MutexLock lock(&mutex_);
  --num_writing_;
  written_.SignalAll();
}

v1::Trajectory DrivingSessions::trajectory(const Entry& entry, v1::FinishReason reason) const {
  v1::Trajectory out = make_trajectory(entry.plan, entry.session.get(), entry.sampling, format_, entry.start_time_us);
  out.set_finish_reason(reason);
  out.set_engine_time_us(entry.engine_time_us);
  // An agent's own work is between its turns.
  out.set_environment_time_us(std::max<int64_t>(out.end_time_us() - out.start_time_us() - entry.engine_time_us, 0));
  return out;
}

void DrivingSessions::close(Entry& entry, State state) {
  entry.state = state;
  entry.session.reset();
  --num_open_;
  closed_.push_back(entry.plan.rollout_id);
  if (closed_.size() <= 4 * static_cast<size_t>(config_.sessions_max)) return;
  sessions_.erase(closed_.front());
  closed_.pop_front();
}

absl::StatusOr<v1::GetSessionResponse> DrivingSessions::get(const v1::GetSessionRequest& request) const {
  const absl::MutexLock lock(&mutex_);
  const auto known = sessions_.find(request.session_id());
  if (known == sessions_.end()) {
    return absl::NotFoundError(absl::StrCat("session_id: \"", request.session_id(), "\" is not a session"));
  }
  v1::GetSessionResponse out;
  static constexpr const char* kNames[] = {"open", "finished", "failed", "expired"};
  out.set_state(kNames[static_cast<int>(known->second->state)]);
  out.set_num_turns(static_cast<int>(known->second->num_turns));
  out.set_num_tokens(known->second->num_tokens);
  return out;
}

void DrivingSessions::expire(std::stop_token stop) {
  const absl::Duration idle = absl::Milliseconds(config_.session_idle_ms);
  while (pause(std::clamp(idle / 4, absl::Milliseconds(10), absl::Seconds(10)), stop)) {
    const absl::MutexLock lock(&mutex_);
    const absl::Time now = absl::Now();
    for (const auto& [id, entry] : sessions_) {
      if (entry->state != State::kOpen || entry->busy || entry->last_used + idle > now) continue;
      entry->busy = true;
      ++num_writing_;
      if (writes_.submit([this, taken = entry] { expire_one(taken); })) continue;
      entry->busy = false;
      --num_writing_;
    }
  }
}

void DrivingSessions::expire_one(std::shared_ptr<Entry> entry) {
  log_->warn("session {}: expired, its agent was not heard of for {} ms", entry->plan.rollout_id, config_.session_idle_ms);
  source_.finish(entry->plan, trajectory(*entry, v1::FINISH_REASON_ABORTED), [this, entry](absl::StatusOr<uint64_t> offset) {
    if (offset.ok()) engine_.end_session(entry->plan.rollout_id);
    const absl::MutexLock lock(&mutex_);
    entry->busy = false;  // not written: tried again at the next round
    if (offset.ok()) close(*entry, State::kExpired);
    --num_writing_;
    written_.SignalAll();
  });
}

void DrivingSessions::stop() {
  stop_.request_stop();
  expirer_.request_stop();
  if (expirer_.joinable()) expirer_.join();
  turns_.stop();
  writes_.stop();
  std::vector<EpisodePlan> open;
  {
    const absl::MutexLock lock(&mutex_);
    const absl::Time deadline = absl::Now() + kLastWrite;
    while (num_writing_ > 0 && !written_.WaitWithDeadline(&mutex_, deadline)) {
    }
    for (const auto& [id, entry] : sessions_) {
      if (entry->state == State::kOpen && !entry->busy) open.push_back(entry->plan);
    }
    sessions_.clear();
    num_open_ = 0;
  }
  for (const EpisodePlan& plan : open) source_.cancel(plan);
}

double DrivingSessions::engine_seconds() const {
  const absl::MutexLock lock(&mutex_);
  return 1e-6 * static_cast<double>(engine_time_us_);
}

}  // namespace slipstream::gateway
