// The gateway role: everything between environments, workers and the learner.
#pragma once

#include <memory>
#include <string>

#include "common/log.h"
#include "common/metrics.h"
#include "common/status.h"
#include "gateway/config.h"
#include "slipstream/v1/gateway.pb.h"

namespace slipstream::gateway {

class Gateway {
 public:
  // Opens the run's trajectory log, binds both addresses and starts to run episodes as the learner, the workers and the
  // environments come; it waits for none of them. Metrics outlive it. Errors: Unavailable names an address that cannot be
  // bound; those of the tokenizer, the chat format and TrajectoryLog::open; InvalidArgument: an environment without address.
  static absl::StatusOr<std::unique_ptr<Gateway>> start(const GatewayConfig& config, Metrics& metrics, Logger log);
  // stop().
  ~Gateway();

  const std::string& address() const;           // host:port of the Gateway and Workers services
  const std::string& learner_endpoint() const;  // tcp://host:port
  v1::GetStatusResponse status() const;

  // Cancels running episodes, which will be run again by the next life, ends calls, and closes both addresses. Finished
  // episodes are on disk. Takes at most some seconds; a second call changes nothing.
  void stop();

 private:
  struct Parts;
  explicit Gateway(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace slipstream::gateway
