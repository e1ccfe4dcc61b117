#include "rollout/worker.h"

#include "common/address.h"
#include "model/load.h"
#include "rollout/registration.h"
#include "rollout/weight_receiver.h"
#include "rollout/worker_service.h"

namespace slipstream::rollout {
namespace {

constexpr absl::Duration kLastWords = absl::Seconds(2);  // for answers under way at the end of a drain

// The checkpoint, in the form that the engine wants where the file has it.
absl::StatusOr<model::LoadedWeights> load_weights(const Worker::Config& config, const Logger& log) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(config.engine.threads));
  model::LoadOptions options;
  if (config.engine.fp8_weights) options.keep_fp8_for = config.engine.device.kind;
  ASSIGN_OR_RETURN(model::LoadedWeights loaded, model::load_weights(config.model.path, config.model.dtype, *stream, options));
  if (config.engine.fp8_weights && loaded.config.fp8 && loaded.store.scales().empty()) {
    log->info("{}: no linear layer in fp8 with blocks of 128 x 128 (weight_block_size is [{}, {}]): all are quantised again",
              config.model.path, loaded.config.fp8->block_rows, loaded.config.fp8->block_columns);
  }
  return loaded;
}

}  // namespace

// Torn down from the end: nothing calls an engine that is gone.
struct Worker::Impl {
  Config config;
  Logger log;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<WorkerService> service;
  std::unique_ptr<WeightReceiver> receiver;
  std::unique_ptr<Registration> registration;
};

Worker::Config Worker::Config::from(ConfigNode root) {
  Config c;
  c.model = model::ModelSection::from(root, "rollout");
  c.engine.device = c.model.device;
  ConfigNode rollout = root.child("rollout");
  rollout.read("worker_id", &c.engine.worker_id);
  if (const std::string problem = file_name_problem(c.engine.worker_id); !problem.empty()) rollout.fail("worker_id", problem);
  rollout.read_address("address", &c.address, 0);
  rollout.read("advertised_host", &c.advertised_host);
  if (!c.advertised_host.empty() && !address_problem(c.advertised_host + ":1", 1).empty()) {
    rollout.fail("advertised_host", absl::StrCat("\"", c.advertised_host, "\", expected a host name or address"));
  }
  rollout.read_address("gateway_address", &c.gateway_address, 1);
  rollout.read_address("learner_address", &c.learner_address, 1);
  rollout.read("threads", &c.engine.threads, 1, 256);
  rollout.read("max_running", &c.engine.max_running, 1, 4096);
  rollout.read("waiting_max", &c.engine.waiting_max, 0, 1'000'000);
  rollout.read("step_tokens_max", &c.engine.step_tokens_max, 1, 1 << 20);
  rollout.read("cache_tokens", &c.engine.cache_tokens, 2, int64_t{1} << 32);
  c.engine.prefix_sessions_max = c.engine.max_running;  // as many sessions between turns as in them
  rollout.read("prefix_sessions_max", &c.engine.prefix_sessions_max, 0, 1'000'000);
  rollout.read_choice("on_update", &c.engine.on_update,
                      {{"recompute", OnUpdate::kRecompute}, {"keep", OnUpdate::kKeep}});
  rollout.read("fp8_weights", &c.engine.fp8_weights);
  rollout.read("fp8_latents", &c.engine.fp8_latents);
  rollout.read("weight_panels", &c.engine.weight_panels);
  rollout.read_choice("share_weights", &c.share_weights,
                      {{"auto", ShareWeights::kAuto}, {"true", ShareWeights::kAlways}, {"false", ShareWeights::kNever}});
  rollout.read("drain_timeout_ms", &c.drain_timeout_ms, 0);
  rollout.read("weights_poll_ms", &c.weights_poll_ms, 100);
  if (c.engine.step_tokens_max < c.engine.max_running) {
    rollout.fail("step_tokens_max",
                 absl::StrCat(c.engine.step_tokens_max, ", expected >= max_running ", c.engine.max_running));
  }
  return c;
}

Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Worker::~Worker() = default;

absl::StatusOr<std::unique_ptr<Worker>> Worker::start(const Config& config, Metrics& metrics, Logger log,
                                                       std::function<void(absl::Status)> on_failure,
                                                       std::optional<Policy> policy) {
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  impl->log = log;
  const bool shares = policy.has_value();
  Engine::Weights weights;
  if (shares) {
    weights = Engine::Weights(Engine::Weights(), policy->weights);  // owned elsewhere
  } else {
    ASSIGN_OR_RETURN(model::LoadedWeights loaded, load_weights(config, log));
    weights = std::make_shared<const model::WeightStore>(std::move(loaded.store));
    policy = Policy{.config = std::move(loaded.config), .weights = weights.get(), .version = 0};
  }
  ASSIGN_OR_RETURN(impl->engine,
                   Engine::create(config.engine, policy->config, weights, policy->version, metrics, log, on_failure));
  ASSIGN_OR_RETURN(impl->service, WorkerService::start(config.address, *impl->engine, log));
  const auto foreign = [path = config.model.path, on_failure](const absl::Status& status) {
    if (!on_failure) return;
    on_failure(absl::Status(status.code(), absl::StrCat("model.path: ", path, ": ", status.message())));
  };
  if (!shares && !config.learner_address.empty()) {
    impl->receiver = std::make_unique<WeightReceiver>(
        WeightReceiverConfig{.worker_id = config.engine.worker_id,
                             .learner_address = config.learner_address,
                             .poll = absl::Milliseconds(config.weights_poll_ms),
                             .on_failure = foreign},
        policy->config, *weights, policy->version, *impl->engine, metrics, log);
  }
  const std::string bound = impl->service->address();
  if (!config.gateway_address.empty()) {
    const std::string advertised =
        config.advertised_host.empty() ? bound : config.advertised_host + bound.substr(bound.rfind(':'));
    impl->registration = std::make_unique<Registration>(
        config.gateway_address,
        WorkerIdentity{.worker_id = config.engine.worker_id,
                       .address = advertised,
                       .start_time_us = absl::ToUnixMicros(absl::Now()),
                       .max_concurrent = config.engine.max_running + config.engine.waiting_max,
                       .max_context = impl->engine->max_context()},
        *impl->engine, impl->service->draining(), log);
  }
  log->info("worker {}: {} on {}, context {}", config.engine.worker_id, shares ? "the learner's weights" : config.model.path,
            bound, impl->engine->max_context());
  return std::unique_ptr<Worker>(new Worker(std::move(impl)));
}

std::string Worker::address() const { return impl_->service->address(); }
Engine& Worker::engine() { return *impl_->engine; }
bool Worker::draining() const { return impl_->engine->status().draining; }

void Worker::drain(absl::Time deadline) {
  impl_->service->drain();
  if (!impl_->engine->wait_idle(deadline)) {
    impl_->log->warn("drain: {} generations are cut off", impl_->engine->status().running);
    impl_->engine->cut_off();
  }
  if (impl_->registration) impl_->registration->leave();
  impl_->receiver.reset();
  impl_->service->shutdown(absl::Now() + kLastWords);
}

}  // namespace slipstream::rollout
