// Source: where batches come from. The learner's end of the ZeroMQ line to the gateway's ROUTER socket.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/functional/function_ref.h"
#include "common/log.h"
#include "common/status.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::learner {

// A request that waits for long is reported again and again, with the address: Hello and Commit, which a gateway answers at
// once, every 5 reply time-outs; a BatchRequest, whose episodes take their time, every 30.
struct SourceOptions {
  std::string address;               // tcp://host:port
  int reply_timeout_ms = 2'000;      // a request without an answer for this long is sent again
  int gateway_timeout_ms = 600'000;  // Hello and Commit give up
  int batch_timeout_ms = 3'600'000;  // a BatchRequest gives up: episodes may take their time
  // Called every 100 ms while an answer is awaited, on the same thread; may be empty. Its error ends the request.
  std::function<absl::Status()> while_waiting = nullptr;
};

// Every request is repeated until its answer comes: the gateway may restart, and messages may be lost,
// doubled or late. Each call ends with its answer, its time-out (DeadlineExceeded, naming address and
// request), the stop token (Cancelled), or the gateway's refusal (the code it gave; UNAVAILABLE ones are
// retried). FailedPrecondition: the gateway restarted and does not know this incarnation: say Hello again.
// One thread.
class Source {
 public:
  // InvalidArgument: not an address. Connecting is in the background: a gateway that is not there yet is
  // waited for.
  static absl::StatusOr<std::unique_ptr<Source>> connect(const SourceOptions& options, Logger log);
  ~Source();

  absl::StatusOr<v1::HelloReply> hello(const v1::Hello& hello, std::stop_token stop);
  // All parts of the batch, as one message.
  absl::StatusOr<v1::Batch> batch(const v1::BatchRequest& request, std::stop_token stop);
  absl::StatusOr<v1::CommitReply> commit(const v1::Commit& commit, std::stop_token stop);

 private:
  struct Socket;
  Source(const SourceOptions& options, Logger log, std::unique_ptr<Socket> socket);
  // Sends until `take`, which gets every answer that arrives, says that this was it.
  absl::Status exchange(const v1::LearnerMessage& request, const std::string& what, int timeout_ms,
                        std::stop_token stop, absl::FunctionRef<bool(v1::GatewayMessage&)> take);

  SourceOptions options_;
  Logger log_;
  std::unique_ptr<Socket> socket_;
};

}  // namespace slipstream::learner
