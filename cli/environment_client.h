// Calls an environment server, each call with a deadline. The one file of check-env that knows gRPC.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/status.h"
#include "slipstream/v1/environment.pb.h"

namespace slipstream::cli {

// One Episodes stream; its deadline counts from opening. Used by one thread.
class EnvironmentStream {
 public:
  virtual ~EnvironmentStream() = default;  // cancels what is still open
  // Sends the requests and waits for as many responses, in the order they come.
  virtual absl::StatusOr<std::vector<v1::EpisodeResponse>> exchange(
      const std::vector<v1::EpisodeRequest>& requests) = 0;
  // Says that there is nothing more to send and waits for the server's end.
  virtual absl::Status finish() = 0;
};

// Statuses are the server's, with printable messages. Thread-safe.
class EnvironmentClient {
 public:
  virtual ~EnvironmentClient() = default;
  virtual absl::StatusOr<v1::DescribeResponse> describe(absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::ResetResponse> reset(const v1::ResetRequest& request,
                                                  absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::StepResponse> step(const v1::StepRequest& request, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::CloseResponse> close(const v1::CloseRequest& request,
                                                  absl::Duration timeout) = 0;
  virtual std::unique_ptr<EnvironmentStream> stream(absl::Duration timeout) = 0;

  static std::unique_ptr<EnvironmentClient> dial(const std::string& address);
};

}  // namespace slipstream::cli
