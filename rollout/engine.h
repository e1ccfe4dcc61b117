// The generation engine: one thread that owns model, cache and memory, and samples for many requests at once.
// Weights change between forward passes; what is running goes on.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "common/log.h"
#include "common/metrics.h"
#include "kernels/arena.h"
#include "kernels/stream.h"
#include "model/decode_graphs.h"
#include "model/model.h"
#include "rollout/request.h"
#include "rollout/scheduler.h"

namespace slipstream::rollout {

struct EngineConfig {
  std::string worker_id = "worker-0";  // the label of its metrics
  kernels::Device device = {};       // where it computes
  int threads = 2;                   // on the CPU
  int64_t max_running = 64;          // sequences in a forward pass
  int64_t waiting_max = 1024;        // requests beyond those
  int64_t step_tokens_max = 512;     // rows of a forward pass, >= max_running
  int64_t cache_tokens = 65536;      // rows of the cache, over all sequences
  int64_t prefix_sessions_max = 64;  // sequences kept for their session; the config file: as max_running
  OnUpdate on_update = OnUpdate::kRecompute;
  bool fp8_weights = false;  // linear layers in e4m3 (WeightStore::copy_to); log-probs are then not the learner's bits
  bool fp8_latents = false;  // the cache's latent rows in e4m3 (model/cache.h); likewise
  bool weight_panels = true;  // CPU: a second copy of the matrices that makes passes of few rows faster (model/weight_panels.h)
};

struct EngineStatus {
  int64_t running = 0;
  int64_t waiting = 0;
  int32_t policy_version = 0;
  int64_t generated_tokens = 0;
  int64_t preemptions = 0;
  double idle_seconds = 0.0;  // with nothing to run
  bool draining = false;
  int64_t prefix_sessions = 0;
  model::CacheUsage cache;
};

// Thread-safe. The destructor ends what is live with UNAVAILABLE and joins.
class Engine {
 public:
  using Weights = std::shared_ptr<const model::WeightStore>;

  // weights are those of `config`, in host memory or on engine.device, without e4m3 unless fp8_weights; there, passes read them
  // where they are unless fp8_weights asks for another form. InvalidArgument names the field of EngineConfig. on_diverged
  // (may be null; from the engine's thread): the logits of a version were not finite numbers for the first time, DATA_LOSS with
  // its number.
  static absl::StatusOr<std::unique_ptr<Engine>> create(const EngineConfig& engine,
                                                        const model::ModelConfig& config, Weights weights,
                                                        int32_t policy_version, Metrics& metrics, Logger log,
                                                        std::function<void(absl::Status)> on_diverged = nullptr);
  ~Engine();

  // Takes a request and returns its handle; from then on the sink will be told. On an error it is not:
  // INVALID_ARGUMENT (names the field), OUT_OF_RANGE (the prompt leaves no room: max_context()),
  // ALREADY_EXISTS (request_id is live), RESOURCE_EXHAUSTED (max_running + waiting_max are live), UNAVAILABLE
  // (draining).
  absl::StatusOr<uint64_t> submit(Request request, std::shared_ptr<Sink> sink);
  // Ends it with CANCELLED and frees its memory; nothing when it is over.
  void cancel(uint64_t handle);
  // Ends a session's generations with kAborted and forgets its prefix.
  void abort_session(std::string session_id);

  // Runs on these weights from the next pass on, unless policy_version is not newer. since: when they were
  // asked for, for slipstream_weight_sync_seconds. The engine drops the pointer once newer ones come.
  void offer_weights(Weights weights, int32_t policy_version, absl::Time since = absl::Now());

  // The weights that the engine reads where they are become those of policy_version: `write` changes them on the calling
  // thread, between two passes, with nothing under way on the engine's device. Returns once passes may go on. Not while or
  // after the engine is destroyed.
  void rewrite_weights(int32_t policy_version, absl::FunctionRef<void()> write);

  // No new requests from now on.
  void drain();
  // Ends what is live with UNAVAILABLE: its clients go on elsewhere.
  void cut_off();
  // Waits until nothing is live. False: the deadline came first.
  bool wait_idle(absl::Time deadline) const;
  EngineStatus status() const;

  int64_t max_context() const { return max_context_; }  // ids of a sequence, prompt and reply
  const EngineConfig& config() const { return config_; }

 private:
  using Command = absl::AnyInvocable<void()>;  // runs on the engine's thread
  Engine(const EngineConfig& engine, const model::ModelConfig& config, Weights weights,
         int32_t policy_version, Metrics& metrics, Logger log);
  absl::Status check(const Request& request) const;
  void send(Command command) ABSL_LOCKS_EXCLUDED(mutex_);
  void run() noexcept;
  bool take_commands(bool busy, std::deque<Command>* commands) ABSL_LOCKS_EXCLUDED(mutex_);
  void swap_weights(Weights weights, int32_t policy_version, absl::Time since);
  void weights_changed(int32_t policy_version, absl::Time since);
  void expire(absl::Time now);
  const model::ModelWeights& weights() const { return on_device_ ? on_device_->tensors() : weights_->tensors(); }
  void step(const std::vector<Piece>& pieces);
  // Draws a token for each of these from its row of logits.
  void sample(const std::vector<Generation*>& drawing, const kernels::Tensor& logits, model::Step& step);
  void deliver(Generation& generation, int32_t id, float logprob, bool truncated, absl::Time now);
  // Ends a generation: takes it out of the scheduler, then tells its sink.
  void end(uint64_t handle, const absl::Status& error);
  void end(uint64_t handle, FinishReason reason);
  void end_all(const absl::Status& error);
  void tell(std::unique_ptr<Generation> generation, absl::StatusOr<Finished> result);
  void publish_status() ABSL_LOCKS_EXCLUDED(mutex_);

  const EngineConfig config_;
  const model::ModelConfig model_config_;
  const model::ReplayLayout replay_layout_;
  int64_t max_context_ = 0;
  Metrics& metrics_;
  Logger log_;

  // The engine thread's own.
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<model::Model> model_;
  std::unique_ptr<model::Cache> cache_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<kernels::Arena> arena_;       // of a pass, on the device
  std::unique_ptr<kernels::Arena> host_arena_;  // what is fetched from it
  Weights weights_;                              // as given
  std::optional<model::WeightStore> on_device_;  // the same on a GPU or in fp8, if they were not: passes then read these
  std::optional<model::WeightPanels> panels_;  // of weights_
  model::DecodeGraphs decode_graphs_;          // of passes over on_device_
  int32_t policy_version_ = 0;
  int32_t diverged_version_ = -1;  // the last one that gave logits that are no numbers
  std::function<void(absl::Status)> on_diverged_;
  int64_t generated_tokens_ = 0;
  double idle_seconds_ = 0.0;

  mutable absl::Mutex mutex_;
  std::deque<Command> commands_ ABSL_GUARDED_BY(mutex_);
  std::unordered_set<std::string> live_ ABSL_GUARDED_BY(mutex_);  // request ids
  uint64_t next_handle_ ABSL_GUARDED_BY(mutex_) = 1;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  EngineStatus published_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;  // last: joined before the rest goes
};

}  // namespace slipstream::rollout
