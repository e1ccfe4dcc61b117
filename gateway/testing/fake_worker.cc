#include "gateway/testing/fake_worker.h"

#include <chrono>

#include "common/check.h"
#include "gateway/hash_ring.h"
#include "proto/rpc.h"
#include "slipstream/v1/rollout.grpc.pb.h"

namespace slipstream::gateway::testing {

int32_t fake_token(uint64_t seed, int64_t position, int stop_in, int32_t stop_id) {
  const uint64_t draw = stable_hash(absl::StrCat(seed, "@", position));
  if (stop_in > 0 && draw % stop_in == 0) return stop_id;
  return static_cast<int32_t>('a' + (draw >> 8) % 26);
}

float fake_logprob(uint64_t seed, int64_t position) {
  return -static_cast<float>(stable_hash(absl::StrCat(seed, "p", position)) % 1000) / 256.0f;
}

struct FakeWorker::Impl final : v1::Rollout::Service {
  explicit Impl(Options given) : options(std::move(given)) {}

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateEvent>* writer) override {
    {
      const std::lock_guard lock(mutex);
      seen.push_back(*request);
    }
    const uint64_t seed = request->sampling().seed();
    int sent = 0;
    while (true) {
      if (options.before_event) {
        if (const absl::Status status = options.before_event(*request, sent); !status.ok()) return rpc::to_grpc(status);
      }
      if (context->IsCancelled()) return ++left, grpc::Status::CANCELLED;
      v1::GenerateEvent event;
      bool stopped = false;
      for (int i = 0; i < options.tokens_per_event && sent < request->sampling().max_tokens() && !stopped; ++i, ++sent) {
        const int64_t position = request->prompt_ids_size() + sent;
        event.add_ids(fake_token(seed, position, options.stop_in, request->stop_ids(0)));
        event.add_logprobs(fake_logprob(seed, position));
        event.add_policy_versions(options.policy_version);
        event.add_context_versions(options.policy_version);
        stopped = event.ids(event.ids_size() - 1) == request->stop_ids(0);
      }
      const bool last = stopped || sent == request->sampling().max_tokens();
      if (last) {
        v1::Finished& finished = *event.mutable_finished();
        finished.set_reason(stopped ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH);
        finished.set_prompt_tokens(request->prompt_ids_size());
        if (request->capture_experts()) {
          finished.mutable_replay()->set_num_rows(request->prompt_ids_size() + sent - 1);
          finished.mutable_replay()->set_experts(std::string(finished.replay().num_rows(), 'e'));
        }
      }
      if (options.edit) options.edit(event);
      if (!writer->Write(event)) return ++left, grpc::Status::CANCELLED;
      if (last) return grpc::Status::OK;
    }
  }
  grpc::Status Abort(grpc::ServerContext*, const v1::AbortRequest* request, v1::AbortResponse*) override {
    const std::lock_guard lock(mutex);
    aborts.push_back(request->session_id());
    return grpc::Status::OK;
  }

  const Options options;
  rpc::Server server;
  std::atomic<int> left = 0;
  mutable std::mutex mutex;
  std::vector<v1::GenerateRequest> seen;
  std::vector<std::string> aborts;
};

FakeWorker::FakeWorker(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {
  absl::StatusOr<rpc::Server> server = rpc::serve("fake worker", "127.0.0.1:0", {impl_.get()});
  CHECK_OK(server.status());
  impl_->server = *std::move(server);
}

FakeWorker::~FakeWorker() { kill(); }

void FakeWorker::kill() {
  if (impl_->server.server == nullptr) return;
  impl_->server.server->Shutdown(std::chrono::system_clock::now());
  impl_->server.server.reset();
}

absl::Status FakeWorker::join(WorkerPool& pool, int64_t max_context) {
  v1::RegisterRequest request;
  request.set_worker_id(impl_->options.id);
  request.set_address(impl_->server.address);
  request.set_policy_version(impl_->options.policy_version);
  request.set_max_concurrent(1024);
  request.set_max_context(static_cast<int>(max_context));
  request.set_start_time_us(impl_->options.start_time_us);
  return pool.add(request);
}

absl::Status FakeWorker::beat(WorkerPool& pool, bool draining) {
  v1::HeartbeatRequest request;
  request.set_worker_id(impl_->options.id);
  request.set_start_time_us(impl_->options.start_time_us);
  request.set_draining(draining);
  return pool.heartbeat(request);
}

std::vector<v1::GenerateRequest> FakeWorker::requests() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->seen;
}
std::vector<std::string> FakeWorker::aborted() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->aborts;
}
int FakeWorker::cancelled() const { return impl_->left; }
const std::string& FakeWorker::address() const { return impl_->server.address; }

}  // namespace slipstream::gateway::testing
