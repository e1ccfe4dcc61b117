#include "gateway/engine_client.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "gateway/background_calls.h"
#include "common/pause.h"
#include "proto/rpc.h"
#include "slipstream/v1/rollout.grpc.pb.h"

namespace slipstream::gateway {
namespace {

constexpr absl::Duration kAbortTimeout = absl::Seconds(2);

bool is_stop(const v1::GenerateRequest& request, int32_t id) {
  return std::find(request.stop_ids().begin(), request.stop_ids().end(), id) != request.stop_ids().end();
}

// Appends the event's columns to the reply, or refuses them.
absl::Status append(const v1::GenerateRequest& request, const v1::GenerateEvent& event, Reply& reply) {
  const int count = event.ids_size();
  const auto agrees = [&](const char* name, int size) {
    if (size == count) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(name, ": ", size, " values for ", count, " ids"));
  };
  RETURN_IF_ERROR(agrees("logprobs", event.logprobs_size()));
  RETURN_IF_ERROR(agrees("policy_versions", event.policy_versions_size()));
  RETURN_IF_ERROR(agrees("context_versions", event.context_versions_size()));
  if (event.truncated_size() != 0) RETURN_IF_ERROR(agrees("truncated", event.truncated_size()));
  for (const int32_t id : event.ids()) {
    if (!reply.ids.empty() && is_stop(request, reply.ids.back())) return absl::InternalError("ids: a token after a stop token");
    reply.ids.push_back(id);
  }
  if (static_cast<int64_t>(reply.ids.size()) > request.sampling().max_tokens()) {
    return absl::InternalError(absl::StrCat("ids: ", reply.ids.size(), " tokens, at most ", request.sampling().max_tokens(),
                                            " were asked for"));
  }
  reply.logprobs.insert(reply.logprobs.end(), event.logprobs().begin(), event.logprobs().end());
  reply.policy_versions.insert(reply.policy_versions.end(), event.policy_versions().begin(), event.policy_versions().end());
  reply.context_versions.insert(reply.context_versions.end(), event.context_versions().begin(),
                                event.context_versions().end());
  if (event.truncated_size() != 0 || !reply.truncated.empty()) {
    reply.truncated.resize(reply.ids.size() - count, false);  // "none" said by earlier events
    reply.truncated.insert(reply.truncated.end(), event.truncated().begin(), event.truncated().end());
    reply.truncated.resize(reply.ids.size(), false);
  }
  return absl::OkStatus();
}

absl::Status finish(const v1::GenerateRequest& request, const v1::Finished& finished, Reply& reply) {
  const bool stopped = !reply.ids.empty() && is_stop(request, reply.ids.back());
  if (finished.reason() == v1::FINISH_REASON_ABORTED) return absl::UnavailableError("the worker aborted the generation");
  if (finished.reason() != v1::FINISH_REASON_STOP && finished.reason() != v1::FINISH_REASON_LENGTH) {
    return absl::InternalError(absl::StrCat("finished.reason: ", finished.reason(), ", expected STOP, LENGTH or ABORTED"));
  }
  if (reply.ids.empty()) return absl::InternalError("finished: a reply without a token");
  if (stopped != (finished.reason() == v1::FINISH_REASON_STOP)) {
    return absl::InternalError(absl::StrCat("finished.reason: ", v1::FinishReason_Name(finished.reason()), ", but the last id ",
                                            reply.ids.back(), stopped ? " is" : " is not", " a stop token"));
  }
  reply.finish_reason = finished.reason();
  if (finished.replay().num_rows() > 0) reply.replay.push_back(finished.replay());
  return absl::OkStatus();
}

// What a worker that is not there any more makes of our call.
bool is_loss(const absl::Status& status) { return absl::IsUnavailable(status) || absl::IsCancelled(status); }

absl::Status named(const Worker& worker, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("worker ", worker.id, ": ", status.message()));
}

}  // namespace

class EngineClient::Connections {
 public:
  // A life of a worker has a channel of its own: a new one does not wait out the reconnect pauses of the old.
  std::shared_ptr<v1::Rollout::Stub> to(const std::shared_ptr<const Worker>& worker) {
    const absl::MutexLock lock(&mutex_);
    if (const auto known = stubs_.find(worker); known != stubs_.end()) return known->second;
    std::erase_if(stubs_, [](const auto& item) { return item.first->gone.stop_requested(); });
    return stubs_[worker] = v1::Rollout::NewStub(rpc::dial(worker->address));
  }
  BackgroundCalls aborts;

 private:
  absl::Mutex mutex_;
  std::map<std::shared_ptr<const Worker>, std::shared_ptr<v1::Rollout::Stub>> stubs_ ABSL_GUARDED_BY(mutex_);
};

EngineClient::EngineClient(WorkerPool& pool, Logger log)
    : pool_(pool), log_(std::move(log)), connections_(std::make_unique<Connections>()) {}

EngineClient::~EngineClient() = default;

absl::StatusOr<Generation> EngineClient::generate(const v1::GenerateRequest& request, absl::Time deadline,
                                                  std::stop_token cancel, const OnTokens& on_tokens) {
  Generation out;
  out.prompt_tokens = request.prompt_ids_size();
  Reply& reply = out.reply;
  v1::GenerateRequest attempt = request;
  Backoff backoff(absl::Milliseconds(10), absl::Seconds(1));
  while (true) {
    ASSIGN_OR_RETURN(const std::shared_ptr<const Worker> worker, pool_.route(request.session_id(), deadline, cancel));
    attempt.set_request_id(absl::StrCat(request.request_id(), "#", out.attempts++));
    const size_t before = reply.ids.size();
    const absl::Status status = run_once(worker, attempt, deadline, cancel, on_tokens, out);
    const size_t got = reply.ids.size() - before;
    if (got > 0 && !(reply.worker_id == worker->id || reply.worker_id.ends_with("," + worker->id))) {
      absl::StrAppend(&reply.worker_id, reply.worker_id.empty() ? "" : ",", worker->id);
    }
    if (status.ok()) return out;
    if (cancel.stop_requested()) return absl::CancelledError("the generation was cancelled");
    if (absl::IsDeadlineExceeded(status) || absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("worker ", worker->id, ": no whole reply in time, ", reply.ids.size(),
                                                      " tokens came"));
    }
    if (absl::IsResourceExhausted(status) && got == 0) {
      if (!pause(std::min(backoff.next(), deadline - absl::Now()), cancel)) return absl::CancelledError("the generation was cancelled");
      continue;
    }
    if (!is_loss(status)) return named(*worker, status);
    if (const std::optional<std::string> more = losses_.pass()) {
      log_->warn("session {}: worker {} was lost after {} tokens: {}; going on elsewhere{}", request.session_id(), worker->id,
                 reply.ids.size(), std::string(status.message()), *more);
    }
    pool_.suspect(*worker);
    if (got > 0) {
      // What it may have sent last completes the reply.
      if (is_stop(request, reply.ids.back()) || static_cast<int64_t>(reply.ids.size()) == request.sampling().max_tokens()) {
        reply.finish_reason = is_stop(request, reply.ids.back()) ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH;
        return out;
      }
      attempt.mutable_prompt_ids()->Add(reply.ids.begin() + static_cast<int64_t>(before), reply.ids.end());
      attempt.mutable_sampling()->set_max_tokens(request.sampling().max_tokens() - static_cast<int>(reply.ids.size()));
    }
  }
}

absl::Status EngineClient::run_once(const std::shared_ptr<const Worker>& worker, const v1::GenerateRequest& request,
                                    absl::Time deadline, std::stop_token cancel, const OnTokens& on_tokens,
                                    Generation& out) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  const std::shared_ptr<v1::Rollout::Stub> stub = connections_->to(worker);
  // `request.sampling.max_tokens` is what is left, append() counts the whole reply.
  v1::GenerateRequest bounds;
  *bounds.mutable_stop_ids() = request.stop_ids();
  bounds.mutable_sampling()->set_max_tokens(request.sampling().max_tokens() + static_cast<int>(out.reply.ids.size()));

  const std::unique_ptr<grpc::ClientReader<v1::GenerateEvent>> reader = stub->Generate(&context, request);
  absl::Status status;
  bool complete = false;
  {
    const std::stop_callback on_cancel(cancel, [&] { context.TryCancel(); });
    const std::stop_callback on_gone(worker->gone, [&] { context.TryCancel(); });
    v1::GenerateEvent event;
    // After `finished` the stream's end is read too: cancelling it could be taken for an abort.
    while (status.ok() && reader->Read(&event)) {
      status = complete ? absl::InternalError("an event after `finished`") : append(bounds, event, out.reply);
      if (!status.ok()) break;
      if (on_tokens && event.ids_size() > 0) on_tokens(event);
      if (!event.has_finished()) continue;
      status = finish(bounds, event.finished(), out.reply);
      complete = status.ok();
      if (out.attempts == 1) out.cached_tokens = event.finished().cached_tokens();
    }
    if (!status.ok()) context.TryCancel();
    const grpc::Status end = reader->Finish();
    if (complete || !status.ok()) return status;
    if (!end.ok()) return rpc::from_grpc(end);
  }
  return absl::InternalError("the stream ended without `finished`");
}

void EngineClient::end_session(const std::string& session_id) {
  const std::shared_ptr<const Worker> worker = pool_.release(session_id);
  if (worker == nullptr) return;
  struct Call {
    std::shared_ptr<v1::Rollout::Stub> stub;
    v1::AbortRequest request;
    v1::AbortResponse response;
  };
  const auto call = std::make_shared<Call>();
  call->stub = connections_->to(worker);
  call->request.set_session_id(session_id);
  connections_->aborts.start(kAbortTimeout, call,
                             [raw = call.get()](grpc::ClientContext* context, std::function<void(grpc::Status)> done) {
                               raw->stub->async()->Abort(context, &raw->request, &raw->response, std::move(done));
                             });
}

}  // namespace slipstream::gateway
