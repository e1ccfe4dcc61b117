#include "rollout/weight_receiver.h"

#include <optional>
#include <vector>

#include "common/pause.h"
#include "model/model_section.h"
#include "model/weight_stream.h"

namespace slipstream::rollout {

// Stores whose weights are no longer in use are filled again instead of allocated again.
class WeightReceiver::Pool : public std::enable_shared_from_this<Pool> {
 public:
  Pool(const model::ModelConfig& config, kernels::DType dtype, bool with_mtp)
      : config_(config), dtype_(dtype), with_mtp_(with_mtp) {}

  // Comes back to the pool when the last owner lets go, on whichever thread.
  absl::StatusOr<std::shared_ptr<model::WeightStore>> take() {
    std::unique_ptr<model::WeightStore> store;
    {
      const absl::MutexLock lock(&mutex_);
      if (!spare_.empty()) {
        store = std::move(spare_.back());
        spare_.pop_back();
      }
    }
    if (store == nullptr) {
      ASSIGN_OR_RETURN(model::WeightStore created,
                       model::WeightStore::create_weights(config_, dtype_, with_mtp_));
      store = std::make_unique<model::WeightStore>(std::move(created));
    }
    return std::shared_ptr<model::WeightStore>(store.release(),
                                               [pool = shared_from_this()](model::WeightStore* back) {
                                                 const absl::MutexLock lock(&pool->mutex_);
                                                 pool->spare_.emplace_back(back);
                                               });
  }

 private:
  const model::ModelConfig config_;
  const kernels::DType dtype_;
  const bool with_mtp_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<model::WeightStore>> spare_ ABSL_GUARDED_BY(mutex_);
};

WeightReceiver::WeightReceiver(WeightReceiverConfig config, const model::ModelConfig& model_config,
                               const model::WeightStore& weights, int32_t policy_version, Engine& engine,
                               Metrics& metrics, Logger log)
    : config_(std::move(config)),
      pool_(std::make_shared<Pool>(model_config, weights.dtype(), weights.with_mtp())),
      dtype_(model::weight_dtype_word(weights.dtype())),
      policy_version_(policy_version),
      engine_(engine),
      metrics_(metrics),
      log_(std::move(log)),
      client_(config_.learner_address),
      thread_([this](std::stop_token stop) { run(stop); }) {}

WeightReceiver::~WeightReceiver() = default;  // jthread: requests the stop, which cancels the call, and joins

void WeightReceiver::run(std::stop_token stop) noexcept {
  Backoff retry(config_.retry_min, config_.retry_max);
  while (!stop.stop_requested()) {
    Progress progress;
    const absl::Status status = fetch(stop, &progress);
    if (status.ok() || (absl::IsDeadlineExceeded(status) && !progress.began)) {  // nothing newer: ask again
      retry.reset();
      continue;
    }
    if (stop.stop_requested()) return;
    if (progress.foreign) {
      log_->error("weights from {}: {}", config_.learner_address, std::string(status.message()));
      if (config_.on_failure) {
        config_.on_failure(absl::Status(
            status.code(), absl::StrCat("weights from ", config_.learner_address, ": ", status.message())));
      }
      return;
    }
    // A learner that is not there (yet) is told once for each wait, not once for each attempt of the channel.
    const absl::Duration wait = retry.next();
    log_->warn("weights from {}: {}; again in {} ms", config_.learner_address, status.ToString(),
               absl::ToInt64Milliseconds(wait));
    pause(wait, stop);
  }
}

absl::Status WeightReceiver::fetch(std::stop_token stop, Progress* progress) {
  std::shared_ptr<model::WeightStore> store;
  std::optional<model::WeightAssembler> assembler;
  int32_t policy_version = 0;
  absl::Time since;
  WeightsClient::Handler handler;
  std::string weights_id;
  handler.header = [&](const WeightsClient::Origin& origin, const model::WeightStreamHeader& header) -> absl::Status {
    progress->began = true;
    since = absl::Now();
    const int32_t version = origin.policy_version;
    if (origin.learner_dtype != dtype_) {
      progress->foreign = true;
      return absl::FailedPreconditionError(absl::StrCat("model.dtype: the learner computes in ", origin.learner_dtype,
                                                        ", this worker in ", dtype_, "; expected the same"));
    }
    weights_id = origin.weights_id;
    if (version <= policy_version_) {
      return absl::FailedPreconditionError(
          absl::StrCat("weight stream: policy_version: ", version, ", expected more than ", policy_version_));
    }
    policy_version = version;
    ASSIGN_OR_RETURN(store, pool_->take());
    absl::StatusOr<model::WeightAssembler> fresh = model::WeightAssembler::create(*store, header);
    progress->foreign = !fresh.ok();
    RETURN_IF_ERROR(fresh.status());
    assembler.emplace(*std::move(fresh));
    return absl::OkStatus();
  };
  handler.piece = [&](const model::WeightPiece& piece) {
    metrics_.add(metric::kWeightSyncBytes, static_cast<double>(piece.data.size()));
    return assembler->add(piece);
  };
  handler.trailer = [&](uint32_t crc32c) { return assembler->finish(crc32c); };
  const WeightsClient::Ask ask{.worker_id = config_.worker_id,
                               .have_version = policy_version_,
                               .dtype = dtype_,
                               .weights_id = weights_id_,
                               .deadline = absl::Now() + config_.poll};
  const absl::Status status = client_.fetch(ask, stop, handler);
  if (absl::IsFailedPrecondition(status) && !progress->began) progress->foreign = true;
  RETURN_IF_ERROR(status);
  weights_id_ = weights_id;
  engine_.offer_weights(std::move(store), policy_version, since);
  policy_version_ = policy_version;
  return absl::OkStatus();
}

}  // namespace slipstream::rollout
