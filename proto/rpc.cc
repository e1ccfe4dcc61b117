#include "proto/rpc.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include "common/address.h"

namespace slipstream::rpc {
namespace {

// What gRPC would print on stderr comes to us as a status.
void ignore_log(gpr_log_func_args*) {}

}  // namespace

grpc::Status to_grpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.raw_code()), printable(std::string_view(status.message().data(), status.message().size()))};
}

absl::Status from_grpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text) out += (c >= ' ' && c < 127) || c == '\n' ? c : '?';
  return out;
}

absl::StatusOr<Server> serve(const std::string& what, const std::string& address,
                             const std::vector<grpc::Service*>& services) {
  if (const std::string problem = address_problem(address, /*least_port=*/0); !problem.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", problem));
  }
  static const bool plugins = [] {
    gpr_set_log_function(ignore_log);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  static_cast<void>(plugins);
  grpc::ServerBuilder builder;
  Server out;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &out.port);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second server on a port must fail, not share it
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  for (grpc::Service* service : services) builder.RegisterService(service);
  out.server = builder.BuildAndStart();
  if (out.server == nullptr || out.port == 0) {
    return absl::UnavailableError(absl::StrCat(what, ": address ", address, " cannot be bound; is the port in use?"));
  }
  out.address = absl::StrCat(address.substr(0, address.rfind(':')), ":", out.port);
  out.server->GetHealthCheckService()->SetServingStatus(true);
  return out;
}

std::shared_ptr<grpc::Channel> dial(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // one role's broken connection is not another's
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace slipstream::rpc
