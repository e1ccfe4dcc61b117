// The `Workers` service: rollout workers come, tell they live, and go.
#pragma once

#include <memory>

#include "gateway/worker_pool.h"

namespace grpc {
class Service;
}

namespace slipstream::gateway {

// The pool outlives it.
std::unique_ptr<grpc::Service> make_workers_service(WorkerPool& pool);

}  // namespace slipstream::gateway
