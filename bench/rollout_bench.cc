// rollout_bench --config configs/models/flash-tiny.json ...: tokens a second of the generation engine with
// random weights, as one JSON object a line: for each number of concurrent requests, `turns` turns of a
// session each, `prompt` ids of prompt or observation before `tokens` sampled ones.
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/synchronization/mutex.h"
#include "bench/measuring.h"
#include "common/status.h"
#include "model/load.h"
#include "rollout/engine.h"

namespace slipstream::rollout {
namespace {

struct Flags {
  std::string config;
  std::string dtype = "fp32";
  int threads = 2;
  std::vector<int> concurrent = {1, 16, 64};
  int64_t prompt = 64;
  int64_t tokens = 128;
  int64_t turns = 2;
  bool capture = false;
};

// Sessions that go on to their next turn by themselves.
class Load {
 public:
  Load(Engine& engine, const Flags& flags, int64_t vocab) : engine_(engine), flags_(flags), vocab_(vocab) {}

  void run(int sessions) {
    for (int s = 0; s < sessions; ++s)
      submit(s, 0, bench::random_ids(flags_.prompt, vocab_, static_cast<uint64_t>(s)));
    const auto done = [this, sessions]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return finished_ == sessions; };
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done));
  }

 private:
  struct Turn : Sink {
    void token(const SampledToken& token) override { ids.push_back(token.id); }
    void finished(absl::StatusOr<Finished> result) override {
      CHECK_OK(result.status());
      load->next(session, turn, std::move(ids));
    }
    Load* load = nullptr;
    int session = 0;
    int64_t turn = 0;
    std::vector<int32_t> ids;
  };

  void submit(int session, int64_t turn, std::vector<int32_t> ids) {
    auto sink = std::make_shared<Turn>();
    sink->load = this;
    sink->session = session;
    sink->turn = turn;
    sink->ids = ids;
    Request request{.request_id = absl::StrCat(session, "/", turn),
                    .session_id = absl::StrCat(session),
                    .prompt_ids = std::move(ids),
                    .sampling = {},
                    .stop_ids = {},
                    .min_policy_version = 0,
                    .capture = {flags_.capture, flags_.capture}};
    request.sampling.seed = static_cast<uint64_t>(session);
    request.sampling.max_tokens = flags_.tokens;
    CHECK_OK(engine_.submit(std::move(request), sink).status());
  }
  void next(int session, int64_t turn, std::vector<int32_t> ids) {
    if (turn + 1 < flags_.turns) {
      const std::vector<int32_t> more =
          bench::random_ids(flags_.prompt, vocab_, static_cast<uint64_t>(session) + 1000);
      ids.insert(ids.end(), more.begin(), more.end());
      return submit(session, turn + 1, std::move(ids));
    }
    const absl::MutexLock lock(&mutex_);
    ++finished_;
  }

  Engine& engine_;
  const Flags& flags_;
  int64_t vocab_;
  absl::Mutex mutex_;
  int finished_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::Status run(const Flags& flags) {
  const kernels::DType dtype = flags.dtype == "bf16" ? kernels::DType::kBf16 : kernels::DType::kF32;
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::read_model_config(flags.config));
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(model::LoadedWeights loaded, model::random_weights(config, dtype, 1, *stream));
  const auto weights = std::make_shared<const model::WeightStore>(std::move(loaded.store));
  for (const int concurrent : flags.concurrent) {
    Metrics metrics;
    const EngineConfig engine_config{
        .threads = flags.threads,
        .max_running = concurrent,
        .cache_tokens = concurrent * (flags.turns * (flags.prompt + flags.tokens) + 64),
        .prefix_sessions_max = concurrent};
    ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                     Engine::create(engine_config, config, weights, 0, metrics, quiet_logger()));
    const auto start = bench::Clock::now();
    Load(*engine, flags, config.vocab).run(concurrent);
    const double seconds = bench::seconds_since(start);
    const EngineStatus status = engine->status();
    std::printf(
        "{\"concurrent\": %d, \"tokens_per_second\": %.0f, \"seconds\": %.3f, \"generated\": %lld, "
        "\"prefix_hit_tokens\": %.0f, \"replay_expert_bytes\": %.0f, \"replay_selection_bytes\": %.0f, "
        "\"replay_raw_bytes\": %.0f}\n",
        concurrent, static_cast<double>(status.generated_tokens) / seconds, seconds,
        static_cast<long long>(status.generated_tokens), metrics.value(metric::kPrefixCacheHitTokens),
        metrics.value(metric::kReplayBytes, {"experts"}), metrics.value(metric::kReplayBytes, {"selections"}),
        metrics.value(metric::kReplayRawBytes));
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace slipstream::rollout

int main(int argc, char** argv) {
  slipstream::rollout::Flags flags;
  CLI::App app("Tokens a second of the generation engine");
  app.add_option("--config", flags.config, "config.json of a model")->required();
  app.add_option("--dtype", flags.dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--threads", flags.threads)->check(CLI::Range(1, 256));
  app.add_option("--concurrent", flags.concurrent, "Numbers of concurrent sessions")->check(CLI::PositiveNumber);
  app.add_option("--prompt", flags.prompt, "Ids of a prompt or observation")->check(CLI::PositiveNumber);
  app.add_option("--tokens", flags.tokens, "Sampled ids of a turn")->check(CLI::PositiveNumber);
  app.add_option("--turns", flags.turns, "Turns of a session")->check(CLI::PositiveNumber);
  app.add_flag("--capture", flags.capture, "With experts and selections for replay");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = slipstream::rollout::run(flags);
  if (!status.ok()) std::fprintf(stderr, "rollout_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
