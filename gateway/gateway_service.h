// The `Gateway` service: sessions of driving agents, and the state of a run.
#pragma once

#include <functional>
#include <memory>

#include "gateway/driving_sessions.h"
#include "slipstream/v1/gateway.pb.h"

namespace grpc {
class Service;
}

namespace slipstream::gateway {

// `status` does not block. What the arguments refer to outlives the service.
std::unique_ptr<grpc::Service> make_gateway_service(DrivingSessions& sessions,
                                                    std::function<v1::GetStatusResponse()> status);

}  // namespace slipstream::gateway
