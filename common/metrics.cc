#include "common/metrics.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/pause.h"
#include "prometheus/counter.h"
#include "prometheus/exposer.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

namespace slipstream {
namespace metric {
namespace {
constexpr MetricKind kC = MetricKind::kCounter, kG = MetricKind::kGauge, kH = MetricKind::kHistogram;
const std::vector<double> kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};
const std::vector<double> kVersions = {0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64};
const std::vector<double> kDifference = {0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3};
const std::vector<double> kRatio = {0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1, 1.01, 1.05, 1.1, 1.28, 1.5, 2, 4, 10};
const std::vector<double> kRewards = {-1, -0.5, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5, 10};
}  // namespace

const MetricDef kPolicyVersion{"slipstream_policy_version", kG, "Policy version a role holds", {"role"}, {}};
const MetricDef kStaleness{"slipstream_staleness_versions", kH, "Learner version less the oldest version among a trajectory's action tokens, at consumption", {}, kVersions};
const MetricDef kLogprobDiff{"slipstream_train_rollout_logprob_abs_diff", kG, "Mean absolute difference of learner and rollout log-prob over tokens of the learner's own version, last step that had any", {}, {}};
const MetricDef kLogprobDiffMax{"slipstream_train_rollout_logprob_abs_diff_max", kG, "Largest such difference, over all ranks, last step that had any", {}, {}};
const MetricDef kLogprobDiffHistogram{"slipstream_train_rollout_logprob_abs_diff_distribution", kH, "Such differences, per token", {}, kDifference};
const MetricDef kDrift{"slipstream_logprob_drift_abs", kG, "Mean absolute log-prob difference over tokens of older versions, last step", {}, {}};
const MetricDef kDriftByAge{"slipstream_logprob_drift_abs_by_age", kG, "The same by age in versions (8: 8 and more)", {"age"}, {}};
const MetricDef kImportanceRatio{"slipstream_importance_ratio", kH, "exp(learner log-prob - rollout log-prob), per action token", {}, kRatio};
const MetricDef kMaskedTokens{"slipstream_masked_tokens_total", kC, "Action tokens whose importance ratio left the trusted interval", {"side"}, {}};
const MetricDef kTrajectories{"slipstream_trajectories_total", kC, "Finished episodes", {"task", "finish_reason"}, {}};
const MetricDef kProducedTrajectories{"slipstream_produced_trajectories_total", kC, "Finished episodes on disk; equals trained + dropped + queued at every scrape", {}, {}};
const MetricDef kTrainedTrajectories{"slipstream_trained_trajectories_total", kC, "Trajectories consumed by committed steps", {}, {}};
const MetricDef kQueuedTrajectories{"slipstream_queued_trajectories", kG, "Trajectories produced, neither trained nor dropped yet", {}, {}};
const MetricDef kDroppedTrajectories{"slipstream_dropped_trajectories_total", kC, "Trajectories removed before training", {"reason"}, {}};
const MetricDef kGroups{"slipstream_groups_total", kC, "Groups by what became of them", {"outcome"}, {}};
const MetricDef kReward{"slipstream_reward", kH, "Rewards of finished episodes", {"task"}, kRewards};
const MetricDef kGeneratedTokens{"slipstream_generated_tokens_total", kC, "Tokens sampled", {"worker"}, {}};
const MetricDef kPrefixCacheHitTokens{"slipstream_prefix_cache_hit_tokens_total", kC, "Prompt tokens found in the prefix cache", {}, {}};
const MetricDef kTimeToFirstToken{"slipstream_time_to_first_token_seconds", kH, "From a generate request to its first token", {}, kSeconds};
const MetricDef kInterToken{"slipstream_inter_token_seconds", kH, "Between tokens of one reply", {}, kSeconds};
const MetricDef kQueueDepth{"slipstream_queue_depth", kG, "Things waiting", {"queue"}, {}};
const MetricDef kWeightSyncSeconds{"slipstream_weight_sync_seconds", kH, "From asking for new weights that exist to running on them", {}, kSeconds};
const MetricDef kWeightSyncBytes{"slipstream_weight_sync_bytes_total", kC, "Bytes of weights received", {}, {}};
const MetricDef kTrainStepSeconds{"slipstream_train_step_seconds", kH, "One learner step without waiting for data", {}, kSeconds};
const MetricDef kTrainTokens{"slipstream_train_tokens_total", kC, "Tokens the learner ran through forward and backward", {}, {}};
const MetricDef kGradNorm{"slipstream_grad_norm", kG, "Global gradient norm before clipping, last step", {}, {}};
const MetricDef kLoss{"slipstream_loss", kG, "Loss terms, last step", {"part"}, {}};
const MetricDef kLearningRate{"slipstream_learning_rate", kG, "Learning rate, last step", {}, {}};
const MetricDef kExpertLoadImbalance{"slipstream_expert_load_imbalance", kG, "Largest over mean number of tokens an expert got, worst MoE layer, last step", {}, {}};
const MetricDef kWorkerUp{"slipstream_worker_up", kG, "1 while a rollout worker's heartbeats arrive", {"worker"}, {}};
const MetricDef kHeartbeatAge{"slipstream_heartbeat_age_seconds", kG, "Since a worker's last heartbeat", {"worker"}, {}};
const MetricDef kReplayBytes{"slipstream_replay_bytes_total", kC, "Bytes of replay recorded", {"kind"}, {}};
const MetricDef kReplayRawBytes{"slipstream_replay_raw_bytes_total", kC, "Bytes the same replay would take uncompressed", {}, {}};
const MetricDef kIdleSeconds{"slipstream_idle_seconds_total", kC, "Time a role spent waiting for another", {"role"}, {}};
const MetricDef kEnvironmentUp{"slipstream_environment_up", kG, "1 while an environment service answers", {"environment"}, {}};
const MetricDef kEnvironmentCallSeconds{"slipstream_environment_call_seconds", kH, "Reset and Step calls to environments", {"environment"}, kSeconds};
const MetricDef kRunningEpisodes{"slipstream_running_episodes", kG, "Episodes not finished", {}, {}};
const MetricDef kMovedSessions{"slipstream_moved_sessions_total", kC, "Generations that went on at another worker", {}, {}};
const MetricDef kNonFiniteLogprobs{"slipstream_non_finite_logprobs_total", kC, "Sampled tokens with a non-finite log-prob (masked)", {}, {}};
const MetricDef kSkippedSteps{"slipstream_skipped_steps_total", kC, "Learner steps skipped for a non-finite gradient", {}, {}};
const MetricDef kLastStepTimestamp{"slipstream_last_step_timestamp_seconds", kG, "When the last learner step ended, since 1970", {}, {}};
const MetricDef kMilesLogprobDiff{"miles_metric_train_train_rollout_logprob_abs_diff", kG, "slipstream_train_rollout_logprob_abs_diff, for dashboards that know it by this name", {}, {}};
const MetricDef kMilesStaleness{"miles_metric_rollout_staleness_mean", kG, "Mean staleness of the last step's trajectories, for dashboards that know it by this name", {}, {}};
const MetricDef kMilesReward{"miles_metric_rollout_raw_reward", kG, "Mean reward of the last step's trajectories, for dashboards that know it by this name", {}, {}};
}  // namespace metric

namespace {
prometheus::Labels make_labels(const MetricDef& def, const std::vector<std::string>& values) {
  CHECK_EQ(def.labels.size(), values.size());
  prometheus::Labels labels;
  for (size_t i = 0; i < values.size(); ++i) labels[def.labels[i]] = values[i];
  return labels;
}

// Connects and goes.
void touch(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
  if (const int s = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); s >= 0) {
    static_cast<void>(connect(s, found->ai_addr, found->ai_addrlen));
    close(s);
  }
  freeaddrinfo(found);
}
}  // namespace

struct Metrics::Impl : prometheus::Collectable {
  struct Callback {
    std::mutex busy;  // held while it runs, so that its owner can end it
    std::function<void(Metrics&)> collect;
  };

  explicit Impl(Metrics& metrics) : owner(metrics) {}
  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<std::shared_ptr<Callback>> now;
    {
      const std::lock_guard lock(mutex);
      now = callbacks;
    }
    for (const auto& callback : now) {
      const std::lock_guard lock(callback->busy);
      if (callback->collect) callback->collect(owner);
    }
    return registry->Collect();
  }
  // Made at first use and found by definition and label values from then on: a family looked up by name each time would
  // cost more than what it counts, and engines count every token.
  template <class Metric>
  struct Table {
    std::mutex mutex;
    std::map<std::pair<const MetricDef*, std::vector<std::string>>, Metric*> metrics;
  };
  template <class Metric, class Make>
  Metric& find(Table<Metric>& table, const MetricDef& def, const std::vector<std::string>& labels, const Make& make) {
    const std::lock_guard lock(table.mutex);
    Metric*& known = table.metrics[{&def, labels}];
    if (known == nullptr) known = &make();
    return *known;
  }
  prometheus::Counter& counter(const MetricDef& def, const std::vector<std::string>& labels) {
    return find(counters, def, labels, [&]() -> prometheus::Counter& {
      return prometheus::BuildCounter().Name(def.name).Help(def.help).Register(*registry).Add(make_labels(def, labels));
    });
  }
  prometheus::Gauge& gauge(const MetricDef& def, const std::vector<std::string>& labels) {
    return find(gauges, def, labels, [&]() -> prometheus::Gauge& {
      return prometheus::BuildGauge().Name(def.name).Help(def.help).Register(*registry).Add(make_labels(def, labels));
    });
  }
  prometheus::Histogram& histogram(const MetricDef& def, const std::vector<std::string>& labels) {
    return find(histograms, def, labels, [&]() -> prometheus::Histogram& {
      return prometheus::BuildHistogram().Name(def.name).Help(def.help).Register(*registry).Add(
          make_labels(def, labels), prometheus::Histogram::BucketBoundaries(def.buckets));
    });
  }

  Metrics& owner;
  std::shared_ptr<prometheus::Registry> registry =
      std::make_shared<prometheus::Registry>(prometheus::Registry::InsertBehavior::Merge);
  Table<prometheus::Counter> counters;
  Table<prometheus::Gauge> gauges;
  Table<prometheus::Histogram> histograms;
  mutable std::mutex mutex;
  std::vector<std::shared_ptr<Callback>> callbacks;
  // What the exposer looks at, through a weak pointer: as long as this lives. It owns nothing.
  const std::shared_ptr<prometheus::Collectable> served{this, [](prometheus::Collectable*) {}};
  std::unique_ptr<prometheus::Exposer> exposer;
  std::string host;  // it listens on
};

Metrics::Metrics() : impl_(std::make_unique<Impl>(*this)) {}
Metrics::~Metrics() {
  if (impl_->exposer == nullptr) return;
  // The server's listening thread looks up every 2 s, or when somebody connects: then it notices its end.
  const std::jthread waker([host = impl_->host, port = impl_->exposer->GetListeningPorts().front()](std::stop_token ended) {
    while (pause(absl::Milliseconds(2), ended)) touch(host, port);
  });
  impl_->exposer.reset();
}

void Metrics::add(const MetricDef& def, double amount, const std::vector<std::string>& labels) {
  CHECK(def.kind == MetricKind::kCounter);
  impl_->counter(def, labels).Increment(amount);
}
void Metrics::set(const MetricDef& def, double value, const std::vector<std::string>& labels) {
  CHECK(def.kind == MetricKind::kGauge);
  impl_->gauge(def, labels).Set(value);
}
void Metrics::observe(const MetricDef& def, double value, const std::vector<std::string>& labels) {
  CHECK(def.kind == MetricKind::kHistogram);
  impl_->histogram(def, labels).Observe(value);
}
double Metrics::value(const MetricDef& def, const std::vector<std::string>& labels) const {
  return def.kind == MetricKind::kCounter ? impl_->counter(def, labels).Value() : impl_->gauge(def, labels).Value();
}

std::unique_ptr<Metrics::Collector> Metrics::on_scrape(std::function<void(Metrics&)> collect) {
  struct Handle : Collector {
    Handle(Impl& impl, std::shared_ptr<Impl::Callback> callback) : impl_(impl), callback_(std::move(callback)) {}
    ~Handle() override {
      {
        const std::lock_guard lock(impl_.mutex);
        std::erase(impl_.callbacks, callback_);
      }
      const std::lock_guard lock(callback_->busy);  // a scrape under way ends first
      callback_->collect = nullptr;
    }
    Impl& impl_;
    std::shared_ptr<Impl::Callback> callback_;
  };
  auto callback = std::make_shared<Impl::Callback>();
  callback->collect = std::move(collect);
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->callbacks.push_back(callback);
  }
  return std::make_unique<Handle>(*impl_, std::move(callback));
}

absl::StatusOr<int> Metrics::serve(const std::string& address) {
  try {  // the constructor throws when the port is taken
    impl_->exposer = std::make_unique<prometheus::Exposer>(address);
  } catch (const std::exception&) {
    return absl::UnavailableError(absl::StrCat("metrics address ", address, ": cannot be bound; is the port in use?"));
  }
  impl_->exposer->RegisterCollectable(impl_->served);
  impl_->host = address.substr(0, address.rfind(':'));
  return impl_->exposer->GetListeningPorts().front();
}

std::string Metrics::text() { return prometheus::TextSerializer().Serialize(impl_->Collect()); }

}  // namespace slipstream
