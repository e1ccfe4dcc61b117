// What driven and driving episodes have in common: the request of a turn, and the trajectory of a session.
#pragma once

#include <cstdint>
#include <string>

#include "gateway/config.h"
#include "gateway/episode.h"
#include "gateway/session.h"
#include "slipstream/v1/rollout.pb.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::gateway {

v1::Sampling default_sampling(const GatewayConfig& config, uint64_t seed);

// InvalidArgument: names the field.
absl::Status validate(const v1::Sampling& sampling);

// The whole request but for the id. OutOfRange: the context has reached max_seq_len, further tokens would be cut off.
absl::StatusOr<v1::GenerateRequest> turn_request(const GatewayConfig& config, const EpisodePlan& plan,
                                                 const model::ChatFormat& format, const v1::Sampling& sampling,
                                                 const PendingTurn& turn);

// Identity, samples, versions and times; rewards, finish reason and the times spent waiting are the caller's.
v1::Trajectory make_trajectory(const EpisodePlan& plan, const Session* session, const v1::Sampling& sampling,
                               const model::ChatFormat& format, int64_t start_time_us);

int64_t now_us();

}  // namespace slipstream::gateway
