// Every metric of the project, declared here once (rl-spec 8), and the registry that serves them to Prometheus.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace slipstream {

enum class MetricKind { kCounter, kGauge, kHistogram };

struct MetricDef {
  const char* name;  // with its unit; counters end in _total
  MetricKind kind;
  const char* help;
  std::vector<const char*> labels;
  std::vector<double> buckets;  // histograms: upper bounds
};

namespace metric {
extern const MetricDef kPolicyVersion, kStaleness, kLogprobDiff, kLogprobDiffMax, kLogprobDiffHistogram, kDrift,
    kImportanceRatio, kMaskedTokens, kTrajectories, kDroppedTrajectories, kTrainedTrajectories, kProducedTrajectories,
    kQueuedTrajectories, kGroups, kReward, kGeneratedTokens, kPrefixCacheHitTokens, kTimeToFirstToken, kInterToken,
    kQueueDepth, kWeightSyncSeconds, kWeightSyncBytes, kTrainStepSeconds, kTrainTokens, kGradNorm, kLoss, kLearningRate,
    kExpertLoadImbalance, kWorkerUp, kHeartbeatAge, kReplayBytes, kReplayRawBytes, kIdleSeconds, kEnvironmentUp,
    kEnvironmentCallSeconds, kRunningEpisodes, kMovedSessions, kNonFiniteLogprobs, kSkippedSteps, kLastStepTimestamp,
    kDriftByAge, kMilesLogprobDiff, kMilesStaleness, kMilesReward;
}  // namespace metric

// A process has one registry; in the embedded form all roles share it. Thread-safe.
class Metrics {
 public:
  Metrics();
  ~Metrics();

  // Label values in the order of the definition's labels.
  void add(const MetricDef& def, double amount, const std::vector<std::string>& labels = {});      // counters
  void set(const MetricDef& def, double value, const std::vector<std::string>& labels = {});       // gauges
  void observe(const MetricDef& def, double value, const std::vector<std::string>& labels = {});   // histograms
  // The same for many values at once: finding the histogram costs more than an observation.
  void observe_all(const MetricDef& def, const std::vector<double>& values, const std::vector<std::string>& labels = {});
  // What a counter or gauge stands at (0 when never touched), for consoles and tests.
  double value(const MetricDef& def, const std::vector<std::string>& labels = {}) const;

  // Values that must be consistent with one another are read at the scrape: `collect` is called before each one and may
  // call set() and add(). It is called until the returned handle dies. It must not block.
  class Collector {
   public:
    virtual ~Collector() = default;
  };
  [[nodiscard]] std::unique_ptr<Collector> on_scrape(std::function<void(Metrics&)> collect);

  // Serves /metrics on host:port (port 0: any) and returns the port. UNAVAILABLE: names the address when it cannot be bound.
  absl::StatusOr<int> serve(const std::string& address);
  // What a scrape returns.
  std::string text();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace slipstream
