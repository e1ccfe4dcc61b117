// The gateway role: everything between environments, workers and the learner.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/log.h"
#include "common/metrics.h"
#include "common/status.h"
#include "gateway/config.h"
#include "slipstream/v1/gateway.pb.h"

namespace slipstream::gateway {

// What no waiting mends. Called from threads of the gateway, perhaps more than once; outlives it.
struct GatewayWatch {
  // An environment's answer to Describe will not do: a task that the config names is missing, say.
  std::function<void(absl::Status)> on_failure = nullptr;
  // Also that an environment is not up within its start_timeout_ms. Without, it is waited for.
  bool environments_must_start = false;
};

class Gateway {
 public:
  // Opens the run's trajectory log, binds both addresses and starts to run episodes as the learner, the workers and the
  // environments come; it waits for none of them. Metrics outlive it. Errors: Unavailable names an address that cannot be
  // bound; those of the tokenizer, the chat format and Ledger::open; InvalidArgument: an environment without address.
  static absl::StatusOr<std::unique_ptr<Gateway>> start(const GatewayConfig& config, Metrics& metrics, Logger log,
                                                        const GatewayWatch& watch = {});
  // stop().
  ~Gateway();

  const std::string& address() const;           // host:port of the Gateway and Workers services
  const std::string& learner_endpoint() const;  // tcp://host:port
  v1::GetStatusResponse status() const;

  // Cancels running episodes, which will be run again by the next life, ends calls, and closes both addresses. Finished
  // episodes are on disk. Takes at most some seconds; a second call changes nothing.
  void stop();
  // The first part of it: workers that leave next leave nothing unfinished.
  void stop_episodes();

 private:
  struct Parts;
  explicit Gateway(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace slipstream::gateway
