#include "rollout/engine.h"

#include <algorithm>
#include <cstring>

#include "absl/synchronization/notification.h"
#include "kernels/range.h"
#include "kernels/sampling/sampling.h"
#include "model/host_values.h"

namespace slipstream::rollout {
namespace {

using kernels::Tensor;

// Address space for one pass, touched as needed.
constexpr int64_t kArenaBytes = int64_t{1} << 36;
constexpr int64_t kHostArenaBytes = int64_t{1} << 34;
// How long the engine sleeps with nothing to do; each wake-up checks deadlines.
constexpr absl::Duration kNap = absl::Milliseconds(50);

absl::Status check_engine_config(const EngineConfig& config) {
  const auto refuse = [](const char* field, int64_t value, const std::string& expected) {
    return absl::InvalidArgumentError(absl::StrCat("rollout.", field, ": ", value, ", expected ", expected));
  };
  if (config.max_running < 1) return refuse("max_running", config.max_running, ">= 1");
  if (config.waiting_max < 0) return refuse("waiting_max", config.waiting_max, ">= 0");
  if (config.step_tokens_max < config.max_running) {
    return refuse("step_tokens_max", config.step_tokens_max,
                  absl::StrCat(">= max_running ", config.max_running));
  }
  if (config.prefix_sessions_max < 0)
    return refuse("prefix_sessions_max", config.prefix_sessions_max, ">= 0");
  if (config.cache_tokens < 2) return refuse("cache_tokens", config.cache_tokens, ">= 2");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::create(const EngineConfig& engine,
                                                       const model::ModelConfig& config, Weights weights,
                                                       int32_t policy_version, Metrics& metrics, Logger log,
                                                       std::function<void(absl::Status)> on_diverged) {
  RETURN_IF_ERROR(check_engine_config(engine));
  CHECK(engine.fp8_weights || weights->scales().empty());
  if (engine.fp8_latents && !config.mla) {
    return absl::InvalidArgumentError("rollout.fp8_latents: true, expected false for a model without latent attention");
  }
  const kernels::DType dtype = weights->dtype();
  std::unique_ptr<Engine> out(
      new Engine(engine, config, std::move(weights), policy_version, metrics, std::move(log)));
  out->on_diverged_ = std::move(on_diverged);
  ASSIGN_OR_RETURN(out->stream_, kernels::Stream::create(engine.device, engine.threads));
  ASSIGN_OR_RETURN(out->model_, model::Model::create(config));
  ASSIGN_OR_RETURN(out->cache_,
                   model::Cache::create(config, {.tokens = engine.cache_tokens,
                                                 .sequences = engine.max_running + engine.prefix_sessions_max,
                                                 .dtype = dtype,
                                                 .fp8_latents = engine.fp8_latents},
                                        out->stream_.get()));
  const SchedulerLimits limits{.max_running = engine.max_running,
                               .step_tokens_max = engine.step_tokens_max,
                               .prefix_sessions_max = engine.prefix_sessions_max};
  out->scheduler_ = std::make_unique<Scheduler>(limits, engine.on_update, *out->cache_);
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create(engine.device, kArenaBytes));
  out->arena_ = std::make_unique<kernels::Arena>(std::move(arena));
  ASSIGN_OR_RETURN(kernels::Arena host_arena, kernels::Arena::create_cpu(kHostArenaBytes));
  out->host_arena_ = std::make_unique<kernels::Arena>(std::move(host_arena));
  if (engine.fp8_weights && out->stream_->on_cuda() && dtype != kernels::DType::kBf16) {
    return absl::InvalidArgumentError("rollout.fp8_weights: true, expected false unless model.dtype is bf16");
  }
  if (out->weights_->device() != engine.device || engine.fp8_weights) {
    ASSIGN_OR_RETURN(out->on_device_, out->weights_->copy_to(config, *out->stream_, engine.fp8_weights));
  } else if (engine.weight_panels && !out->stream_->on_cuda()) {
    ASSIGN_OR_RETURN(out->panels_, model::WeightPanels::create(*out->weights_));
  }
  out->publish_status();
  out->thread_ = std::jthread([raw = out.get()] { raw->run(); });
  return out;
}

Engine::Engine(const EngineConfig& engine, const model::ModelConfig& config, Weights weights,
               int32_t policy_version, Metrics& metrics, Logger log)
    : config_(engine),
      model_config_(config),
      replay_layout_(model::ReplayLayout::of(config)),
      // The last id of a sequence is never stored; still the context counts it, so that a trainer can hold it
      // too.
      max_context_(
          std::min(config.max_positions, model::pages_for(engine.cache_tokens) * kernels::kPageRows)),
      metrics_(metrics),
      log_(std::move(log)),
      weights_(std::move(weights)),
      policy_version_(policy_version) {
  metrics_.set(metric::kPolicyVersion, policy_version, {"rollout"});
}

Engine::~Engine() {
  {
    const absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status Engine::check(const Request& request) const {
  const auto refuse = [](const std::string& field, auto value, const std::string& expected) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", value, ", expected ", expected));
  };
  if (request.request_id.empty()) return absl::InvalidArgumentError("request_id: empty");
  if (request.prompt_ids.empty())
    return absl::InvalidArgumentError("prompt_ids: empty, expected at least one id");
  const auto check_ids = [&](const char* field, const std::vector<int32_t>& ids) {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] >= model_config_.vocab) {
        return refuse(absl::StrCat(field, "[", i, "]"), ids[i], absl::StrCat("0..", model_config_.vocab - 1));
      }
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(check_ids("prompt_ids", request.prompt_ids));
  RETURN_IF_ERROR(check_ids("stop_ids", request.stop_ids));
  const Sampling& s = request.sampling;
  const bool temperature_ok = s.temperature == 0.0f || (s.temperature >= 1e-3f && s.temperature <= 100.0f);
  if (!temperature_ok) return refuse("sampling.temperature", s.temperature, "0 or 0.001..100");
  if (s.top_k < 0) return refuse("sampling.top_k", s.top_k, ">= 0");
  if (!(s.top_p > 0.0f && s.top_p <= 1.0f))
    return refuse("sampling.top_p", s.top_p, "more than 0, at most 1");
  if (!(s.min_p >= 0.0f && s.min_p < 1.0f))
    return refuse("sampling.min_p", s.min_p, "at least 0, less than 1");
  if (s.max_tokens < 1) return refuse("sampling.max_tokens", s.max_tokens, ">= 1");
  if (static_cast<int64_t>(request.prompt_ids.size()) >= max_context_) {
    return absl::OutOfRangeError(absl::StrCat("prompt_ids: ", request.prompt_ids.size(),
                                              " ids, expected fewer than the context of ", max_context_));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Engine::submit(Request request, std::shared_ptr<Sink> sink) {
  RETURN_IF_ERROR(check(request));
  auto generation = std::make_unique<Generation>();
  generation->arrived = absl::Now();
  generation->ids = request.prompt_ids;
  generation->request = std::move(request);
  generation->sink = std::move(sink);
  const absl::MutexLock lock(&mutex_);
  if (draining_ || stopping_) return absl::UnavailableError(absl::StrCat(config_.worker_id, ": draining"));
  const std::string& id = generation->request.request_id;
  if (live_.contains(id))
    return absl::AlreadyExistsError(absl::StrCat("request_id: \"", id, "\" is running"));
  if (static_cast<int64_t>(live_.size()) >= config_.max_running + config_.waiting_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(config_.worker_id, ": ", live_.size(), " generations are live"));
  }
  live_.insert(id);
  const uint64_t handle = generation->handle = next_handle_++;
  commands_.push_back(
      [this, generation = std::move(generation)]() mutable { scheduler_->add(std::move(generation)); });
  return handle;
}

void Engine::send(Command command) {
  const absl::MutexLock lock(&mutex_);
  commands_.push_back(std::move(command));
}

void Engine::cancel(uint64_t handle) {
  send([this, handle] { end(handle, absl::CancelledError("cancelled")); });
}

void Engine::abort_session(std::string session_id) {
  send([this, session_id = std::move(session_id)] {
    std::vector<uint64_t> handles;
    scheduler_->visit([&](const Generation& generation) {
      if (generation.request.session_id == session_id) handles.push_back(generation.handle);
    });
    for (const uint64_t handle : handles) end(handle, FinishReason::kAborted);
    scheduler_->erase_prefix(session_id);
  });
}

void Engine::offer_weights(Weights weights, int32_t policy_version, absl::Time since) {
  send([this, weights = std::move(weights), policy_version, since]() mutable {
    swap_weights(std::move(weights), policy_version, since);
  });
}

void Engine::drain() {
  const absl::MutexLock lock(&mutex_);
  draining_ = true;
}

void Engine::cut_off() {
  send([this] {
    end_all(absl::UnavailableError(absl::StrCat(config_.worker_id, ": draining took too long")));
  });
}

bool Engine::wait_idle(absl::Time deadline) const {
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return live_.empty(); };
  const absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(&idle), deadline);
}

EngineStatus Engine::status() const {
  const absl::MutexLock lock(&mutex_);
  EngineStatus status = published_;
  status.waiting = static_cast<int64_t>(live_.size()) - status.running;
  status.draining = draining_;
  return status;
}

void Engine::publish_status() {
  EngineStatus status{.running = scheduler_->running(),
                      .waiting = scheduler_->waiting(),
                      .policy_version = policy_version_,
                      .generated_tokens = generated_tokens_,
                      .preemptions = scheduler_->preemptions(),
                      .idle_seconds = idle_seconds_,
                      .draining = false,
                      .prefix_sessions = scheduler_->prefixes().sessions(),
                      .cache = cache_->usage()};
  metrics_.set(metric::kQueueDepth, static_cast<double>(status.waiting), {"rollout_waiting"});
  const absl::MutexLock lock(&mutex_);
  published_ = status;
}

// Waits for commands while there is nothing to run. False: the engine stops.
bool Engine::take_commands(bool busy, std::deque<Command>* commands) {
  const auto wake = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !commands_.empty() || stopping_; };
  const absl::MutexLock lock(&mutex_);
  if (!busy) mutex_.AwaitWithTimeout(absl::Condition(&wake), kNap);
  commands->swap(commands_);
  return !stopping_;
}

void Engine::run() noexcept {
  stream_->adopt();
  bool busy = false;
  std::deque<Command> commands;
  while (true) {
    const absl::Time before = absl::Now();
    const bool go_on = take_commands(busy, &commands);
    for (Command& command : commands) command();
    commands.clear();
    if (!go_on) break;
    const absl::Time now = absl::Now();
    if (!busy) {
      const double seconds = absl::ToDoubleSeconds(now - before);
      idle_seconds_ += seconds;
      metrics_.add(metric::kIdleSeconds, seconds, {"rollout"});
    }
    expire(now);
    const std::vector<Piece> pieces = scheduler_->plan(policy_version_);
    busy = !pieces.empty();
    if (busy) step(pieces);
    publish_status();
  }
  end_all(absl::UnavailableError(absl::StrCat(config_.worker_id, ": shutting down")));
}

void Engine::swap_weights(Weights weights, int32_t policy_version, absl::Time since) {
  if (policy_version <= policy_version_) {
    log_->warn("weights of version {} offered, {} is running: not taken", policy_version, policy_version_);
    return;
  }
  const kernels::Range range("swap weights");
  CHECK(weights->device() == kernels::Device{});
  CHECK(weights->dtype() == weights_->dtype() && weights->entries().size() == weights_->entries().size());
  weights_ = std::move(weights);
  if (on_device_) weights_->upload_to(*on_device_, *stream_);
  weights_changed(policy_version, since);
}

void Engine::rewrite_weights(int32_t policy_version, absl::FunctionRef<void()> write) {
  const absl::Time since = absl::Now();
  absl::Notification standing, written, going;
  send([&, this] {
    stream_->synchronize();
    standing.Notify();
    written.WaitForNotification();
    weights_changed(policy_version, since);
    going.Notify();
  });
  standing.WaitForNotification();
  write();
  written.Notify();
  going.WaitForNotification();
}

void Engine::weights_changed(int32_t policy_version, absl::Time since) {
  if (panels_) panels_->follow(*weights_);
  const bool newer = policy_version > policy_version_;
  policy_version_ = policy_version;
  scheduler_->weights_changed();
  if (!newer) return;  // a warm-up's steps are no versions
  const double seconds = absl::ToDoubleSeconds(absl::Now() - since);
  metrics_.set(metric::kPolicyVersion, policy_version, {"rollout"});
  metrics_.observe(metric::kWeightSyncSeconds, seconds);
  log_->info("policy version {} after {:.3f} s, {} generations go on", policy_version, seconds,
             scheduler_->running());
}

void Engine::expire(absl::Time now) {
  std::vector<std::pair<uint64_t, int32_t>> late;
  scheduler_->visit([&](const Generation& generation) {
    if (generation.request.deadline <= now)
      late.push_back({generation.handle, generation.request.min_policy_version});
  });
  for (const auto& [handle, version] : late) {
    end(handle, absl::DeadlineExceededError(version > policy_version_
                                                ? absl::StrCat("min_policy_version: ", version,
                                                               ", the engine is still at ", policy_version_)
                                                : std::string("the deadline passed")));
  }
}

void Engine::step(const std::vector<Piece>& pieces) {
  const kernels::Range range("engine step");
  const kernels::ArenaScope scope(*arena_), host_scope(*host_arena_);
  model::Batch batch;
  bool capture = false;
  for (const Piece& piece : pieces) {
    Generation& g = *piece.generation;
    batch.tokens.insert(batch.tokens.end(), g.ids.begin() + g.rows, g.ids.begin() + g.rows + piece.count);
    batch.lengths.push_back(piece.count);
    batch.cached.push_back(g.cache_id);
    if (!g.request.capture.any()) continue;
    capture = true;
    // Rows that are computed again, by other weights perhaps, replace those of before.
    if (!g.replay || g.replay->next_row() != g.rows)
      g.replay.emplace(replay_layout_, g.request.capture, g.rows);
  }
  const absl::StatusOr<model::PreparedBatch> prepared =
      model::prepare_batch(model_config_, batch, cache_.get(), *arena_, *stream_);
  CHECK_OK(prepared.status());  // requests were checked, room was reserved
  model::Step step{*stream_, *arena_, *prepared, panels_ ? &*panels_ : nullptr,
                   model::activation_dtype(*stream_, weights_->dtype()),
                   on_device_ ? &on_device_->scales() : nullptr};
  std::vector<Generation*> drawing;
  std::vector<int32_t> drawing_rows;
  for (int32_t row = -1; const Piece& piece : pieces) {
    row += static_cast<int32_t>(piece.count);
    if (!piece.samples()) continue;
    drawing.push_back(piece.generation);
    drawing_rows.push_back(row);
  }
  model::Choices choices;
  Tensor logits;
  if (stream_->on_cuda() && drawing.size() == batch.tokens.size()) {  // decode: every row draws
    model::DecodeGraphs::Pass pass = decode_graphs_.run(*model_, weights(), step, capture);
    logits = pass.logits;
    choices = std::move(pass.choices);
  } else {
    const Tensor hidden =
        model_->forward(weights(), step, nullptr, {.replay = nullptr, .capture = capture ? &choices : nullptr});
    if (!drawing.empty()) logits = model_->logits(weights(), gather_rows(step, hidden, drawing_rows), step);
  }
  choices = model::choices_on_host(choices, *stream_, *host_arena_);
  int64_t row = 0;
  for (const Piece& piece : pieces) {
    for (int64_t i = 0; i < piece.count; ++i, ++row) {
      if (piece.generation->request.capture.any()) piece.generation->replay->add(choices, row);
    }
    Scheduler::stored(piece, policy_version_);
  }
  if (!drawing.empty()) sample(drawing, logits, step);
}

void Engine::sample(const std::vector<Generation*>& drawing, const Tensor& logits, model::Step& step) {
  const kernels::Range range("sample");
  const int64_t count = static_cast<int64_t>(drawing.size());
  std::vector<kernels::SamplingRow> sampling;
  for (const Generation* g : drawing) {
    const Sampling& s = g->request.sampling;
    sampling.push_back({.temperature = s.temperature,
                        .top_k = s.top_k,
                        .top_p = s.top_p,
                        .min_p = s.min_p,
                        .seed = s.seed,
                        .counter = static_cast<uint64_t>(g->tokens())});
  }
  const Tensor tokens = step.ints({count}), token_logprobs = step.island({count}), truncations = step.ints({count});
  kernels::launch(kernels::Sampling{.logits = logits,
                                    .rows = sampling.data(),
                                    .tokens = tokens,
                                    .logprob = token_logprobs,
                                    .truncated = truncations},
                  *stream_);
  const auto ids = model::host_values<int32_t>(tokens, *stream_), truncated = model::host_values<int32_t>(truncations, *stream_);
  const auto logprobs = model::host_values<float>(token_logprobs, *stream_);
  const absl::Time now = absl::Now();
  metrics_.add(metric::kGeneratedTokens, static_cast<double>(count), {config_.worker_id});
  generated_tokens_ += count;
  for (size_t i = 0; i < drawing.size(); ++i) deliver(*drawing[i], ids[i], logprobs[i], truncated[i] != 0, now);
}

void Engine::deliver(Generation& g, int32_t id, float logprob, bool truncated, absl::Time now) {
  if (id < 0) {
    const absl::Status diverged = absl::DataLossError(
        absl::StrCat("policy version ", policy_version_, ": the logits of token ", g.tokens(), " are not finite numbers"));
    if (diverged_version_ != policy_version_) {  // once: every other sequence will say the same
      diverged_version_ = policy_version_;
      log_->error("request {}: {}", g.request.request_id, std::string(diverged.message()));
      if (on_diverged_) on_diverged_(diverged);
    }
    end(g.handle, diverged);
    return;
  }
  if (g.sampled() == 0) {
    metrics_.observe(metric::kTimeToFirstToken, absl::ToDoubleSeconds(now - g.arrived));
    if (g.cached_tokens > 0)
      metrics_.add(metric::kPrefixCacheHitTokens, static_cast<double>(g.cached_tokens));
  } else {
    metrics_.observe(metric::kInterToken, absl::ToDoubleSeconds(now - g.last_token));
  }
  g.last_token = now;
  g.ids.push_back(id);
  g.sink->token({.id = id,
                 .logprob = logprob,
                 .policy_version = policy_version_,
                 .context_version = g.oldest_version,
                 .truncated = truncated});
  const std::vector<int32_t>& stop = g.request.stop_ids;
  if (std::find(stop.begin(), stop.end(), id) != stop.end()) {
    end(g.handle, FinishReason::kStop);
  } else if (g.sampled() == g.request.sampling.max_tokens || g.tokens() == max_context_) {
    end(g.handle, FinishReason::kLength);
  }
}

void Engine::end(uint64_t handle, const absl::Status& error) {
  if (std::unique_ptr<Generation> generation = scheduler_->remove(handle, /*keep_prefix=*/false)) {
    tell(std::move(generation), error);
  }
}

void Engine::end(uint64_t handle, FinishReason reason) {
  std::unique_ptr<Generation> g =
      scheduler_->remove(handle, /*keep_prefix=*/reason != FinishReason::kAborted);
  if (g == nullptr) return;
  Finished finished{.reason = reason,
                    .prompt_tokens = static_cast<int64_t>(g->request.prompt_ids.size()),
                    .cached_tokens = g->cached_tokens,
                    .replay = std::nullopt};
  if (g->replay) {
    finished.replay = g->replay->finish();
    metrics_.add(metric::kReplayBytes, static_cast<double>(finished.replay->experts.size()), {"experts"});
    metrics_.add(metric::kReplayBytes, static_cast<double>(finished.replay->selections.size()),
                 {"selections"});
    metrics_.add(metric::kReplayRawBytes, static_cast<double>(finished.replay->raw_bytes));
  }
  tell(std::move(g), std::move(finished));
}

void Engine::end_all(const absl::Status& error) {
  std::vector<uint64_t> handles;
  scheduler_->visit([&](const Generation& generation) { handles.push_back(generation.handle); });
  for (const uint64_t handle : handles) end(handle, error);
}

void Engine::tell(std::unique_ptr<Generation> generation, absl::StatusOr<Finished> result) {
  publish_status();
  {
    const absl::MutexLock lock(&mutex_);
    live_.erase(generation->request.request_id);
  }
  generation->sink->finished(std::move(result));
}

}  // namespace slipstream::rollout
