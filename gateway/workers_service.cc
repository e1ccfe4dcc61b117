#include "gateway/workers_service.h"

#include "proto/rpc.h"
#include "slipstream/v1/rollout.grpc.pb.h"

namespace slipstream::gateway {
namespace {

class WorkersService final : public v1::Workers::CallbackService {
 public:
  explicit WorkersService(WorkerPool& pool) : pool_(pool) {}

  grpc::ServerUnaryReactor* Register(grpc::CallbackServerContext* context, const v1::RegisterRequest* request,
                                     v1::RegisterResponse* response) override {
    response->set_heartbeat_ms(pool_.heartbeat_ms());
    return answer(context, pool_.add(*request));
  }
  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context, const v1::HeartbeatRequest* request,
                                      v1::HeartbeatResponse*) override {
    return answer(context, pool_.heartbeat(*request));
  }
  grpc::ServerUnaryReactor* Unregister(grpc::CallbackServerContext* context, const v1::UnregisterRequest* request,
                                       v1::UnregisterResponse*) override {
    pool_.remove(*request);
    return answer(context, absl::OkStatus());
  }

 private:
  static grpc::ServerUnaryReactor* answer(grpc::CallbackServerContext* context, const absl::Status& status) {
    grpc::ServerUnaryReactor* call = context->DefaultReactor();
    call->Finish(rpc::to_grpc(status));
    return call;
  }
  WorkerPool& pool_;
};

}  // namespace

std::unique_ptr<grpc::Service> make_workers_service(WorkerPool& pool) { return std::make_unique<WorkersService>(pool); }

}  // namespace slipstream::gateway
