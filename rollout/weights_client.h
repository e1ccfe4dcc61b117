// The wire side of a weight transfer: one call of the learner's Weights service.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/time/time.h"
#include "common/status.h"
#include "model/weight_stream.h"

namespace slipstream::rollout {

class WeightsClient {
 public:
  explicit WeightsClient(const std::string& address);
  ~WeightsClient();

  // What the weights are: the fields of weights.proto's header.
  struct Origin {
    int32_t policy_version = 0;
    std::string weights_id;
    std::string learner_dtype;
  };
  // What a stream brings, in this order. An error ends the call and is returned.
  struct Handler {
    std::function<absl::Status(const Origin& origin, const model::WeightStreamHeader& header)> header;
    std::function<absl::Status(const model::WeightPiece& piece)> piece;
    std::function<absl::Status(uint32_t crc32c)> trailer;
  };
  struct Ask {
    std::string worker_id;
    int32_t have_version = 0;
    std::string dtype;
    std::string weights_id;
    absl::Time deadline;
  };
  // Blocks until the stream ends, the deadline passes (DEADLINE_EXCEEDED) or stop is requested (CANCELLED).
  // DATA_LOSS: not one header, pieces, one trailer.
  absl::Status fetch(const Ask& ask, std::stop_token stop, const Handler& handler);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace slipstream::rollout
