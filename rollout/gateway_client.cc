#include "rollout/gateway_client.h"

#include <algorithm>

#include "proto/rpc.h"
#include "slipstream/v1/rollout.grpc.pb.h"

namespace slipstream::rollout {

namespace v1 = slipstream::v1;

struct GatewayClient::Impl {
  std::unique_ptr<v1::Workers::Stub> stub;
  absl::Duration timeout;

  absl::Status call(std::stop_token stop, const auto& rpc) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
    return rpc::from_grpc(rpc(&context));
  }
};

GatewayClient::GatewayClient(const std::string& address, absl::Duration timeout)
    : impl_(new Impl{v1::Workers::NewStub(rpc::dial(address)), timeout}) {}
GatewayClient::~GatewayClient() = default;

absl::StatusOr<absl::Duration> GatewayClient::register_worker(const WorkerIdentity& worker,
                                                              int32_t policy_version, std::stop_token stop) {
  v1::RegisterRequest request;
  request.set_worker_id(worker.worker_id);
  request.set_address(worker.address);
  request.set_policy_version(policy_version);
  request.set_max_concurrent(static_cast<int32_t>(worker.max_concurrent));
  request.set_max_context(static_cast<int32_t>(worker.max_context));
  request.set_start_time_us(worker.start_time_us);
  v1::RegisterResponse response;
  RETURN_IF_ERROR(
      impl_->call(stop, [&](auto* context) { return impl_->stub->Register(context, request, &response); }));
  return absl::Milliseconds(std::clamp(response.heartbeat_ms(), 10, 60'000));
}

absl::Status GatewayClient::heartbeat(const WorkerIdentity& worker, const Heartbeat& beat,
                                      std::stop_token stop) {
  v1::HeartbeatRequest request;
  request.set_worker_id(worker.worker_id);
  request.set_start_time_us(worker.start_time_us);
  request.set_policy_version(beat.policy_version);
  request.set_running(static_cast<int32_t>(beat.running));
  request.set_waiting(static_cast<int32_t>(beat.waiting));
  request.set_generated_tokens(beat.generated_tokens);
  request.set_idle_seconds(beat.idle_seconds);
  request.set_draining(beat.draining);
  v1::HeartbeatResponse response;
  return impl_->call(stop,
                     [&](auto* context) { return impl_->stub->Heartbeat(context, request, &response); });
}

absl::Status GatewayClient::unregister(const WorkerIdentity& worker) {
  v1::UnregisterRequest request;
  request.set_worker_id(worker.worker_id);
  request.set_start_time_us(worker.start_time_us);
  v1::UnregisterResponse response;
  return impl_->call({}, [&](auto* context) { return impl_->stub->Unregister(context, request, &response); });
}

}  // namespace slipstream::rollout
