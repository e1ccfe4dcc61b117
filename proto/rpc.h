// gRPC as all roles use it: servers with health and reflection, channels that notice dead peers, statuses.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace slipstream::rpc {

constexpr int kMaxMessageBytes = 64 << 20;  // a million packed token ids with their columns fit

grpc::Status to_grpc(const absl::Status& status);
absl::Status from_grpc(const grpc::Status& status);
// What is neither printable ASCII nor a line's end becomes '?': a status message that is not UTF-8 would make the whole call
// fail, and a peer's control characters do not belong in our logs.
std::string printable(std::string_view text);

struct Server {
  std::unique_ptr<grpc::Server> server;
  int port = 0;             // the bound one
  std::string address;      // host:port
};

// Starts `services` on host:port (port 0: any free one) with health and reflection. `what` begins the error's text.
// InvalidArgument: not host:port. Unavailable: cannot be bound. The services outlive the server; whoever holds it
// calls server->Shutdown(deadline) before they die.
absl::StatusOr<Server> serve(const std::string& what, const std::string& address,
                             const std::vector<grpc::Service*>& services);

// A channel with keepalive for long silent streams, our message size, no proxies from the environment.
std::shared_ptr<grpc::Channel> dial(const std::string& address);

}  // namespace slipstream::rpc
