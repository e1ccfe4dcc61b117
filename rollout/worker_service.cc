#include "rollout/worker_service.h"

#include <atomic>
#include <optional>

#include "proto/rpc.h"
#include "slipstream/v1/rollout.grpc.pb.h"

namespace slipstream::rollout {

namespace v1 = slipstream::v1;

namespace {

Request decode(const v1::GenerateRequest& in, absl::Time deadline) {
  Request out;
  out.request_id = in.request_id();
  out.session_id = in.session_id();
  out.prompt_ids.assign(in.prompt_ids().begin(), in.prompt_ids().end());
  out.stop_ids.assign(in.stop_ids().begin(), in.stop_ids().end());
  const v1::Sampling& sampling = in.sampling();
  out.sampling = {.temperature = sampling.temperature(),
                  .top_k = sampling.top_k(),
                  .top_p = sampling.top_p() == 0.0f ? 1.0f : sampling.top_p(),
                  .min_p = sampling.min_p(),
                  .seed = sampling.seed(),
                  .max_tokens = sampling.max_tokens()};
  out.min_policy_version = in.min_policy_version();
  out.capture = {.experts = in.capture_experts(), .selections = in.capture_selections()};
  out.deadline = deadline;
  return out;
}

void encode(const SampledToken& token, v1::GenerateEvent* event) {
  event->add_ids(token.id);
  event->add_logprobs(token.logprob);
  event->add_policy_versions(token.policy_version);
  event->add_context_versions(token.context_version);
  // The column is there from the first truncated token on, false for those before it.
  if (token.truncated || event->truncated_size() > 0) {
    while (event->truncated_size() < event->ids_size() - 1) event->add_truncated(false);
    event->add_truncated(token.truncated);
  }
}

void encode(Finished finished, v1::Finished* out) {
  switch (finished.reason) {
    case FinishReason::kStop:
      out->set_reason(v1::FINISH_REASON_STOP);
      break;
    case FinishReason::kLength:
      out->set_reason(v1::FINISH_REASON_LENGTH);
      break;
    case FinishReason::kAborted:
      out->set_reason(v1::FINISH_REASON_ABORTED);
      break;
  }
  out->set_prompt_tokens(static_cast<int32_t>(finished.prompt_tokens));
  out->set_cached_tokens(static_cast<int32_t>(finished.cached_tokens));
  if (!finished.replay) return;
  v1::Replay* replay = out->mutable_replay();
  replay->set_first_row(finished.replay->first_row);
  replay->set_num_rows(finished.replay->num_rows);
  replay->set_experts(std::move(finished.replay->experts));
  replay->set_selections(std::move(finished.replay->selections));
  replay->set_raw_bytes(finished.replay->raw_bytes);
}

// One Generate call: gRPC's side.
class GenerateCall;

// The engine's side of it, which may outlive it. Tokens that come while a write is under way travel together
// in the next.
class GenerateStream : public Sink {
 public:
  explicit GenerateStream(GenerateCall* call) : call_(call) {}

  void token(const SampledToken& token) override {
    const absl::MutexLock lock(&mutex_);
    if (broken_) return;
    encode(token, &pending_);
    flush();
  }
  void finished(absl::StatusOr<Finished> result) override {
    const absl::MutexLock lock(&mutex_);
    if (result.ok() && !broken_) encode(*std::move(result), pending_.mutable_finished());
    final_ = result.status();
    flush();
  }
  void written(bool ok) {
    const absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) {
      broken_ = true;
      pending_.Clear();
    }
    flush();
  }

 private:
  void flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  GenerateCall* call_ ABSL_GUARDED_BY(mutex_);  // null after Finish
  v1::GenerateEvent pending_ ABSL_GUARDED_BY(mutex_), in_flight_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // the peer is gone; OnCancel ends the generation
  std::optional<absl::Status> final_ ABSL_GUARDED_BY(mutex_);
};

class GenerateCall final : public grpc::ServerWriteReactor<v1::GenerateEvent> {
 public:
  explicit GenerateCall(Engine& engine) : engine_(engine), stream_(std::make_shared<GenerateStream>(this)) {}

  void begin(Request request) {
    const absl::StatusOr<uint64_t> handle = engine_.submit(std::move(request), stream_);
    if (!handle.ok()) return stream_->finished(handle.status());
    handle_.store(*handle);
    if (cancelled_.load()) engine_.cancel(*handle);
  }
  void OnWriteDone(bool ok) override { stream_->written(ok); }
  void OnCancel() override {
    cancelled_.store(true);
    if (const uint64_t handle = handle_.load(); handle != 0) engine_.cancel(handle);
  }
  void OnDone() override { delete this; }

 private:
  Engine& engine_;
  const std::shared_ptr<GenerateStream> stream_;
  // Whichever of begin() and OnCancel() comes second sees what the other left.
  std::atomic<uint64_t> handle_ = 0;
  std::atomic<bool> cancelled_ = false;
};

void GenerateStream::flush() {
  if (call_ == nullptr || writing_) return;
  if (pending_.ids_size() > 0 || pending_.has_finished()) {
    in_flight_.Clear();
    in_flight_.Swap(&pending_);
    writing_ = true;
    call_->StartWrite(&in_flight_);
  } else if (final_) {
    std::exchange(call_, nullptr)->Finish(rpc::to_grpc(*final_));
  }
}

class RolloutService final : public v1::Rollout::CallbackService {
 public:
  RolloutService(Engine& engine, std::function<void()> drain) : engine_(engine), drain_(std::move(drain)) {}

  grpc::ServerWriteReactor<v1::GenerateEvent>* Generate(grpc::CallbackServerContext* context,
                                                        const v1::GenerateRequest* request) override {
    auto* call = new GenerateCall(engine_);  // gRPC owns it: OnDone deletes
    call->begin(decode(*request, absl::FromChrono(context->deadline())));
    return call;
  }
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context, const v1::AbortRequest* request,
                                  v1::AbortResponse*) override {
    engine_.abort_session(request->session_id());
    return done(context);
  }
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest*,
                                  v1::DrainResponse*) override {
    drain_();
    return done(context);
  }

 private:
  static grpc::ServerUnaryReactor* done(grpc::CallbackServerContext* context) {
    grpc::ServerUnaryReactor* call = context->DefaultReactor();
    call->Finish(grpc::Status::OK);
    return call;
  }
  Engine& engine_;
  const std::function<void()> drain_;
};

}  // namespace

struct WorkerService::Impl {
  Impl(Engine& engine_in, Logger log_in)
      : engine(engine_in), log(std::move(log_in)), service(engine_in, [this] { drain(); }) {}
  void drain() {
    log->info("draining: no new generations");
    engine.drain();
    draining.request_stop();
    const absl::MutexLock lock(&mutex);  // a call may come before serve() has returned
    if (server.server != nullptr) server.server->GetHealthCheckService()->SetServingStatus(false);
  }
  Engine& engine;
  Logger log;
  RolloutService service;
  absl::Mutex mutex;
  std::stop_source draining;
  rpc::Server server;
};

WorkerService::WorkerService(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<WorkerService>> WorkerService::start(const std::string& address,
                                                                    Engine& engine, Logger log) {
  auto impl = std::make_unique<Impl>(engine, std::move(log));
  ASSIGN_OR_RETURN(rpc::Server server, rpc::serve("rollout", address, {&impl->service}));
  {
    const absl::MutexLock lock(&impl->mutex);
    impl->server = std::move(server);
    if (impl->draining.stop_requested()) impl->server.server->GetHealthCheckService()->SetServingStatus(false);
  }
  return std::unique_ptr<WorkerService>(new WorkerService(std::move(impl)));
}

WorkerService::~WorkerService() { shutdown(absl::Now()); }

std::string WorkerService::address() const { return impl_->server.address; }
void WorkerService::drain() { impl_->drain(); }
std::stop_token WorkerService::draining() const { return impl_->draining.get_token(); }
void WorkerService::shutdown(absl::Time deadline) {
  impl_->server.server->Shutdown(absl::ToChronoTime(deadline));
  impl_->server.server->Wait();
}

}  // namespace slipstream::rollout
