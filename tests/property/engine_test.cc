// Goal: whatever the engine does with a request (batches, chunked prefill, reused prefixes, preemption, new
// weights half-way), a token's log-prob has the bits of an uncached training forward with the weights it
// names; what is asked that cannot be done is refused by name; what ends gives its memory back.
#include "rollout/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"
#include "tests/property/fp8_checkpoint.h"
#include "tests/property/recording_sink.h"

namespace slipstream::rollout {
namespace {

using kernels::DType;
using kernels::Tensor;
using testing::make_weights;
using testing::RecordingSink;

constexpr const char* kFlash = "glm5_next";

// A model with several versions of its weights, and engines on it.
class Bench {
 public:
  Bench(const std::string& name, DType dtype, int versions)
      : config(model::testing::test_config(name)), arena_(*kernels::Arena::create_cpu(int64_t{1} << 34)) {
    for (int v = 0; v < versions; ++v)
      weights.push_back(make_weights(name, dtype, 11 + static_cast<uint64_t>(v)));
  }
  std::unique_ptr<Engine> engine(const EngineConfig& engine_config, int32_t version = 0) {
    absl::StatusOr<std::unique_ptr<Engine>> out =
        Engine::create(engine_config, config, weights.at(0), version, metrics, quiet_logger());
    CHECK_OK(out.status());
    return *std::move(out);
  }
  // From now on weights are fp8 copies of what they were.
  void use_fp8() {
    for (Engine::Weights& w : weights) w = std::make_shared<model::WeightStore>(*w->copy_to(config, *stream_, /*fp8=*/true));
  }
  // Log-probs of ids[1..] in one training-style forward, with these choices when there are some.
  std::vector<float> logprobs(const std::vector<int32_t>& ids, const model::WeightStore& store,
                              float temperature, const std::vector<model::DecodedReplay>* replay = nullptr) {
    const kernels::ArenaScope scope(arena_);
    const int64_t rows = static_cast<int64_t>(ids.size()) - 1;
    const model::Batch batch{.tokens = {ids.begin(), ids.end() - 1}, .lengths = {rows}, .cached = {}};
    const absl::StatusOr<model::PreparedBatch> prepared =
        model::prepare_batch(config, batch, nullptr, arena_, *stream_);
    CHECK_OK(prepared.status());
    model::Step step{*stream_, arena_, *prepared};
    step.scales = &store.scales();
    model::SavedForward saved;
    model::ForwardOptions options{.fp8_latents = fp8_latents};
    model::Choices choices;
    if (replay != nullptr) {
      const model::ReplayKinds kinds{.experts = true, .selections = true};
      choices = model::allocate_choices(config, kinds, rows, rows, arena_);
      CHECK_OK(model::place_choices(model::ReplayLayout::of(config), kinds, *replay, rows, 0, choices));
      options.replay = &choices;
    }
    const Tensor hidden =
        model_->forward(store.tensors(), step, replay != nullptr || fp8_latents ? nullptr : &saved, options);
    const Tensor targets = step.ints({rows});
    std::copy(ids.begin() + 1, ids.end(), targets.i32());
    const Tensor out = model_->log_probs(store.tensors(), hidden, targets, temperature, false, step).logprob;
    return {out.f32(), out.f32() + rows};
  }

  model::ModelConfig config;
  std::vector<Engine::Weights> weights;
  bool fp8_latents = false;  // of logprobs()
  Metrics metrics;

 private:
  kernels::Arena arena_;
  std::unique_ptr<kernels::Stream> stream_ = *kernels::Stream::create_cpu(2);
  std::unique_ptr<model::Model> model_ = *model::Model::create(config);
};

Request request_of(const std::string& id, std::vector<int32_t> prompt, int64_t max_tokens,
                   uint64_t seed = 1) {
  Request request;
  request.request_id = id;
  request.session_id = "session of " + id;
  request.prompt_ids = std::move(prompt);
  request.sampling = {.temperature = 0.8f, .seed = seed, .max_tokens = max_tokens};
  return request;
}

std::shared_ptr<RecordingSink> submit(Engine& engine, Request request,
                                      std::function<void(size_t)> on_token = {}) {
  auto sink = std::make_shared<RecordingSink>(std::move(on_token));
  const absl::StatusOr<uint64_t> handle = engine.submit(std::move(request), sink);
  CHECK_OK(handle.status());
  return sink;
}

std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Each token's log-prob against the forward with the weights it names. Returns how many were compared.
int expect_trainers_bits(Bench& bench, const std::vector<int32_t>& prompt, const RecordingSink& sink,
                         float temperature) {
  const std::vector<int32_t> ids = joined(prompt, sink.ids());
  std::map<int32_t, std::vector<float>> by_version;
  int compared = 0;
  for (size_t i = 0; i < sink.tokens.size(); ++i) {
    const SampledToken& token = sink.tokens[i];
    if (token.context_version != token.policy_version) continue;
    std::vector<float>& expected = by_version[token.policy_version];
    if (expected.empty()) {
      expected =
          bench.logprobs(ids, *bench.weights.at(static_cast<size_t>(token.policy_version)), temperature);
    }
    const float value = expected[prompt.size() + i - 1];
    EXPECT_EQ(std::memcmp(&token.logprob, &value, sizeof(float)), 0)
        << "token " << i << " of version " << token.policy_version << ": " << token.logprob
        << ", the trainer has " << value;
    ++compared;
  }
  return compared;
}

class EngineExactnessTest : public ::testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  Bench bench_{std::get<0>(GetParam()), std::get<1>(GetParam()), 2};
};

// Twelve sessions of two turns on a cache too small for them, with new weights half-way.
TEST_P(EngineExactnessTest, LogprobsAreTheTrainers) {
  for (const OnUpdate on_update : {OnUpdate::kRecompute, OnUpdate::kKeep}) {
    const std::unique_ptr<Engine> engine = bench_.engine({.threads = 2,
                                                          .max_running = 6,
                                                          .step_tokens_max = 48,
                                                          .cache_tokens = 896,
                                                          .prefix_sessions_max = 5,
                                                          .on_update = on_update});
    struct Session {
      Request request;
      std::shared_ptr<RecordingSink> first, second;
    };
    std::vector<Session> sessions(12);
    for (size_t s = 0; s < sessions.size(); ++s) {
      const int64_t length = 3 + static_cast<int64_t>(s) * 37 % 190;
      sessions[s].request =
          request_of(absl::StrCat("r", s), model::testing::test_tokens(bench_.config, length, s), 40, s);
      std::function<void(size_t)> on_token;
      if (s == 4) {
        on_token = [&](size_t n) {
          if (n == 17) engine->offer_weights(bench_.weights[1], 1);
        };
      }
      sessions[s].first = submit(*engine, sessions[s].request, on_token);
    }
    int64_t cached = 0;
    int compared = 0, old_context = 0;
    for (Session& session : sessions) {
      ASSERT_TRUE(session.first->wait().ok()) << session.first->result.status();
      ASSERT_EQ(session.first->tokens.size(), 40u);
    }
    std::reverse(sessions.begin(),
                 sessions.end());  // the youngest ended last: their prefixes are still there
    for (Session& session : sessions) {
      Request next = session.request;
      next.request_id += " again";
      next.prompt_ids = joined(joined(session.request.prompt_ids, session.first->ids()), {5, 9, 2});
      next.sampling.max_tokens = 10;
      session.second = submit(*engine, next);
    }
    for (Session& session : sessions) {
      ASSERT_TRUE(session.second->wait().ok()) << session.second->result.status();
      cached += session.second->result->cached_tokens;
      compared += expect_trainers_bits(bench_, session.request.prompt_ids, *session.first, 0.8f);
      compared += expect_trainers_bits(
          bench_, joined(joined(session.request.prompt_ids, session.first->ids()), {5, 9, 2}),
          *session.second, 0.8f);
      for (const auto& sink : {session.first, session.second}) {
        for (const SampledToken& token : sink->tokens)
          old_context += token.context_version != token.policy_version;
      }
    }
    EXPECT_GT(cached, 0);
    EXPECT_GT(engine->status().preemptions, 0);
    EXPECT_EQ(engine->status().policy_version, 1);
    EXPECT_EQ(compared + old_context, 12 * 50);
    if (on_update == OnUpdate::kRecompute) {
      EXPECT_EQ(old_context, 0);
    } else {
      EXPECT_GT(old_context, 0);
    }
  }
}

TEST_P(EngineExactnessTest, NeighboursChangeNothing) {
  const std::vector<int32_t> prompt = model::testing::test_tokens(bench_.config, 70, 3);
  const std::unique_ptr<Engine> alone = bench_.engine({.threads = 1});
  const auto expected = submit(*alone, request_of("r", prompt, 60, 42));
  ASSERT_TRUE(expected->wait().ok());
  const std::unique_ptr<Engine> crowded =
      bench_.engine({.threads = 2, .max_running = 9, .step_tokens_max = 11});
  std::vector<std::shared_ptr<RecordingSink>> others;
  std::shared_ptr<RecordingSink> ours;
  for (uint64_t i = 0; i < 16; ++i) {
    if (i == 5) ours = submit(*crowded, request_of("r", prompt, 60, 42));
    const int64_t length = 1 + static_cast<int64_t>(i) * 29 % 90;
    others.push_back(
        submit(*crowded, request_of(absl::StrCat("other ", i),
                                    model::testing::test_tokens(bench_.config, length, 50 + i), 30, i)));
  }
  ASSERT_TRUE(ours->wait().ok());
  EXPECT_EQ(ours->ids(), expected->ids());
  for (size_t i = 0; i < ours->tokens.size(); ++i) {
    EXPECT_EQ(std::memcmp(&ours->tokens[i].logprob, &expected->tokens[i].logprob, sizeof(float)), 0)
        << "token " << i;
  }
  // A generation that stopped half-way goes on as if it had not.
  const std::vector<int32_t> ids = ours->ids();
  const auto resumed =
      submit(*alone, request_of("resumed", joined(prompt, {ids.begin(), ids.begin() + 25}), 35, 42));
  ASSERT_TRUE(resumed->wait().ok());
  EXPECT_EQ(resumed->ids(), std::vector<int32_t>(ids.begin() + 25, ids.end()));
}

// Two turns with captured choices, the second on the first's cache: replaying them gives the same log-probs.
TEST_P(EngineExactnessTest, CapturedChoicesReplay) {
  const std::unique_ptr<Engine> engine = bench_.engine({.max_running = 4, .step_tokens_max = 37});
  Request request = request_of("r", model::testing::test_tokens(bench_.config, 90, 8), 50, 7);
  request.capture = {.experts = true, .selections = true};
  submit(*engine, request_of("neighbour", model::testing::test_tokens(bench_.config, 60, 9), 80, 7));
  const auto first = submit(*engine, request);
  ASSERT_TRUE(first->wait().ok());
  Request next = request;
  next.request_id = "next";
  next.prompt_ids = joined(joined(request.prompt_ids, first->ids()), {3, 4, 5, 6});
  const auto second = submit(*engine, next);
  ASSERT_TRUE(second->wait().ok());
  const std::vector<int32_t> ids = joined(next.prompt_ids, second->ids());
  const int64_t rows = static_cast<int64_t>(ids.size()) - 1;
  const model::EncodedReplay &a = *first->result->replay, &b = *second->result->replay;
  EXPECT_EQ(a.first_row, 0);
  EXPECT_EQ(a.num_rows, 139);  // the last sampled token has no row
  EXPECT_EQ(b.first_row, 139);
  EXPECT_EQ(b.first_row + b.num_rows, rows);
  EXPECT_LT(a.experts.size() + a.selections.size(), static_cast<size_t>(a.raw_bytes));
  const model::ReplayLayout layout = model::ReplayLayout::of(bench_.config);
  std::vector<model::DecodedReplay> pieces;
  for (const model::EncodedReplay* encoded : {&a, &b}) {
    absl::StatusOr<model::DecodedReplay> decoded = model::decode_replay(layout, *encoded, rows);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    pieces.push_back(*std::move(decoded));
  }
  const std::vector<float> replayed = bench_.logprobs(ids, *bench_.weights[0], 0.8f, &pieces);
  const std::vector<float> plain = bench_.logprobs(ids, *bench_.weights[0], 0.8f);
  EXPECT_EQ(std::memcmp(replayed.data(), plain.data(), replayed.size() * sizeof(float)), 0);
  EXPECT_EQ(expect_trainers_bits(bench_, next.prompt_ids, *second, 0.8f), 50);
}

INSTANTIATE_TEST_SUITE_P(Families, EngineExactnessTest,
                         ::testing::Combine(::testing::Values("glm5_next", "glm5_next pool of three",
                                                              "glm_moe_dsa", "glm_moe_dsa indexshare groups",
                                                              "glm4_moe"),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

// Generations while weights of version 1 come in bf16: each log-prob has the bits of a forward with the fp8 copies of its
// version's weights; those of `trainers`, which are not in fp8, are others.
void expect_fp8_bits(Bench& bench, const model::WeightStore& trainers) {
  const std::unique_ptr<Engine> engine = bench.engine({.max_running = 3, .step_tokens_max = 16, .fp8_weights = true});
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int r = 0; r < 4; ++r) {
    prompts.push_back(model::testing::test_tokens(bench.config, 20, 40 + static_cast<uint64_t>(r)));
    sinks.push_back(submit(*engine, request_of(absl::StrCat("r", r), prompts.back(), 30), [&, r](size_t n) {
      if (r == 1 && n == 20) engine->offer_weights(bench.weights[1], 1);
    }));
  }
  for (const auto& sink : sinks) ASSERT_TRUE(sink->wait().ok());
  const std::vector<float> theirs = bench.logprobs(joined(prompts[0], sinks[0]->ids()), trainers, /*temperature=*/0.8f);
  EXPECT_NE(sinks[0]->tokens[0].logprob, theirs[prompts[0].size() - 1]);
  bench.use_fp8();
  int compared = 0;
  for (size_t r = 0; r < sinks.size(); ++r) compared += expect_trainers_bits(bench, prompts[r], *sinks[r], 0.8f);
  EXPECT_GT(compared, 60);
}

TEST(EngineTest, Fp8LogprobsAreThoseOfFp8Weights) {
  for (const char* name : {"glm5_next", "glm_moe_dsa", "glm4_moe"}) {
    SCOPED_TRACE(name);
    Bench bench(name, DType::kBf16, 2);
    expect_fp8_bits(bench, *bench.weights[0]);
  }
}

// From a checkpoint in FP8 the first version is the file's codes, which no bf16 copy gives.
TEST(EngineTest, StartsFromTheCodesOfAnFp8Checkpoint) {
  const std::unique_ptr<kernels::Stream> stream = *kernels::Stream::create_cpu(2);
  for (const char* name : {"glm5_next", "glm_moe_dsa", "glm4_moe"}) {
    SCOPED_TRACE(name);
    const slipstream::testing::TemporaryDirectory dir;
    model::testing::save_fp8(model::testing::make_test_model(name, DType::kF32, 11).loaded, dir.path());
    const model::LoadedWeights trainers = *model::load_weights(dir.path(), DType::kBf16, *stream);
    Bench bench(name, DType::kBf16, 2);
    bench.weights[0] = std::make_shared<model::WeightStore>(
        std::move(model::load_weights(dir.path(), DType::kBf16, *stream, {.keep_fp8_for = kernels::DeviceKind::kCpu})->store));
    ASSERT_FALSE(bench.weights[0]->scales().empty());
    expect_fp8_bits(bench, trainers.store);
  }
}

// With fp8_latents the bits are those of one forward with fp8 latent rows, whatever the batches, pieces and preemptions, with
// fp8 weights or without; the trainer's are others.
TEST(EngineTest, Fp8LatentsLogprobsAreThoseOfFp8Latents) {
  for (const auto& [name, dtype, fp8_weights] : {std::tuple("glm5_next", DType::kF32, false),
                                                 std::tuple("glm5_next", DType::kBf16, true),
                                                 std::tuple("glm_moe_dsa", DType::kBf16, false)}) {
    Bench bench(name, dtype, 1);
    const std::unique_ptr<Engine> engine =
        bench.engine({.threads = 2, .max_running = 4, .step_tokens_max = 16, .cache_tokens = 320,
                      .prefix_sessions_max = 0, .fp8_weights = fp8_weights, .fp8_latents = true});
    std::vector<std::vector<int32_t>> prompts;
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (int r = 0; r < 6; ++r) {
      prompts.push_back(model::testing::test_tokens(bench.config, 5 + r * 31 % 90, 40 + static_cast<uint64_t>(r)));
      sinks.push_back(submit(*engine, request_of(absl::StrCat("r", r), prompts.back(), 60)));
    }
    for (const auto& sink : sinks) ASSERT_TRUE(sink->wait().ok());
    EXPECT_GT(engine->status().preemptions, 0);
    if (fp8_weights) bench.use_fp8();
    const std::vector<float> trainers =
        bench.logprobs(joined(prompts[1], sinks[1]->ids()), *bench.weights[0], /*temperature=*/0.8f);
    EXPECT_NE(sinks[1]->tokens[9].logprob, trainers[prompts[1].size() + 8]) << name;
    bench.fp8_latents = true;
    for (size_t r = 0; r < sinks.size(); ++r) {
      EXPECT_EQ(expect_trainers_bits(bench, prompts[r], *sinks[r], 0.8f), 60) << name;
    }
  }
}

TEST(EngineTest, Fp8LatentsNeedLatentAttention) {
  Bench bench("glm4_moe", DType::kF32, 1);
  const absl::Status status = Engine::create({.fp8_latents = true}, bench.config, bench.weights[0], 0, bench.metrics,
                                             quiet_logger()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "rollout.fp8_latents: true, expected false for a model without latent attention");
}

// Case C9: the engine goes from 3 to 4 after 2 of 5 tokens.
TEST(EngineTest, VersionsFollowTheWeights) {
  Bench bench(kFlash, DType::kF32, 2);
  for (const OnUpdate on_update : {OnUpdate::kRecompute, OnUpdate::kKeep}) {
    const std::unique_ptr<Engine> engine = bench.engine({.on_update = on_update}, /*version=*/3);
    const auto sink = submit(*engine, request_of("r", {1, 2, 3}, 5), [&](size_t n) {
      if (n == 2) engine->offer_weights(bench.weights[1], 4);
    });
    ASSERT_TRUE(sink->wait().ok());
    std::vector<int32_t> policy, context;
    for (const SampledToken& token : sink->tokens) {
      policy.push_back(token.policy_version);
      context.push_back(token.context_version);
    }
    EXPECT_EQ(policy, (std::vector<int32_t>{3, 3, 4, 4, 4}));
    EXPECT_EQ(context, on_update == OnUpdate::kRecompute ? (std::vector<int32_t>{3, 3, 4, 4, 4})
                                                         : (std::vector<int32_t>{3, 3, 3, 3, 3}));
    // Older weights are not taken; kept prefixes outlive the update only with keep.
    engine->offer_weights(bench.weights[0], 4);
    Request next = request_of("next", joined(joined({1, 2, 3}, sink->ids()), {1}), 2);
    next.session_id = "session of r";
    const auto before = submit(*engine, next);
    ASSERT_TRUE(before->wait().ok());
    EXPECT_EQ(before->result->cached_tokens, 7);
    EXPECT_EQ(before->tokens[0].policy_version, 4);
    engine->offer_weights(bench.weights[0], 5);
    next.request_id = "after";
    next.prompt_ids = joined(joined(next.prompt_ids, before->ids()), {1});
    const auto after = submit(*engine, next);
    ASSERT_TRUE(after->wait().ok());
    EXPECT_EQ(after->result->cached_tokens, on_update == OnUpdate::kRecompute ? 0 : 10);
    EXPECT_EQ(after->tokens[0].policy_version, 5);
    EXPECT_EQ(after->tokens[0].context_version, on_update == OnUpdate::kRecompute ? 5 : 3);
  }
}

TEST(EngineTest, EndsByStopIdLengthAndContext) {
  Bench bench(kFlash, DType::kF32, 1);
  const std::unique_ptr<Engine> engine = bench.engine({.max_running = 2, .cache_tokens = 128});
  EXPECT_EQ(engine->max_context(), 128);
  const auto length = submit(*engine, request_of("length", {1, 2, 3}, 20));
  ASSERT_TRUE(length->wait().ok());
  EXPECT_EQ(length->result->reason, FinishReason::kLength);
  EXPECT_EQ(length->result->prompt_tokens, 3);
  EXPECT_EQ(length->tokens.size(), 20u);
  Request stop = request_of("stop", {1, 2, 3}, 20);
  stop.stop_ids = {length->ids()[6]};
  const auto stopped = submit(*engine, stop);
  ASSERT_TRUE(stopped->wait().ok());
  EXPECT_EQ(stopped->result->reason, FinishReason::kStop);
  EXPECT_EQ(stopped->ids().back(), stop.stop_ids[0]);
  EXPECT_LE(stopped->tokens.size(), 7u);
  const auto context =
      submit(*engine, request_of("context", model::testing::test_tokens(bench.config, 100, 1), 1000));
  ASSERT_TRUE(context->wait().ok());
  EXPECT_EQ(context->result->reason, FinishReason::kLength);
  EXPECT_EQ(context->tokens.size(), 28u);
}

TEST(EngineTest, TruncationAndGreedyAreFlagged) {
  Bench bench(kFlash, DType::kF32, 1);
  const std::unique_ptr<Engine> engine = bench.engine({});
  for (const bool greedy : {false, true}) {
    Request request = request_of("r", {1, 2, 3}, 5);
    if (greedy) request.sampling.temperature = 0.0f;
    if (!greedy) request.sampling.top_k = 2;
    const auto sink = submit(*engine, request);
    ASSERT_TRUE(sink->wait().ok());
    for (const SampledToken& token : sink->tokens) EXPECT_TRUE(token.truncated);
  }
}

TEST(EngineTest, AbortAndCancelGiveMemoryBack) {
  Bench bench(kFlash, DType::kF32, 1);
  const std::unique_ptr<Engine> engine = bench.engine({.max_running = 3});
  const auto kept = submit(*engine, request_of("kept", {1, 2, 3}, 4));
  ASSERT_TRUE(kept->wait().ok());
  const model::CacheUsage before = engine->status().cache;
  EXPECT_EQ(before.sequences, 1);
  const std::vector<int32_t> prompt = model::testing::test_tokens(bench.config, 150, 2);
  const auto aborted = submit(*engine, request_of("aborted", prompt, 3000), [&](size_t n) {
    if (n == 5) engine->abort_session("session of aborted");
  });
  uint64_t handle = 0;
  absl::Notification handle_known;
  const auto cancelled = std::make_shared<RecordingSink>([&](size_t n) {
    handle_known.WaitForNotification();
    if (n == 3) engine->cancel(handle);
  });
  handle = *engine->submit(request_of("cancelled", prompt, 3000), cancelled);
  handle_known.Notify();
  ASSERT_TRUE(aborted->wait().ok());
  EXPECT_EQ(aborted->result->reason, FinishReason::kAborted);
  EXPECT_EQ(aborted->tokens.size(), 5u);
  EXPECT_EQ(cancelled->wait().status().code(), absl::StatusCode::kCancelled);
  const model::CacheUsage after = engine->status().cache;
  EXPECT_EQ(after.pages_used, before.pages_used);
  EXPECT_EQ(after.bytes_used, before.bytes_used);
  engine->abort_session("session of kept");
  engine->abort_session("nobody's");
  ASSERT_TRUE(submit(*engine,
                     [] {
                       Request request = request_of("last", {1}, 1);
                       request.session_id.clear();
                       return request;
                     }())
                  ->wait()
                  .ok());
  EXPECT_EQ(engine->status().cache.bytes_used, 0);
}

TEST(EngineTest, WaitsForPolicyVersionWithoutBlocking) {
  Bench bench(kFlash, DType::kF32, 2);
  const std::unique_ptr<Engine> engine = bench.engine({});
  Request waits = request_of("waits", {1, 2}, 3);
  waits.min_policy_version = 1;
  const auto waiting = submit(*engine, waits);
  Request late = request_of("late", {1, 2}, 3);
  late.min_policy_version = 9;
  late.deadline = absl::Now() + absl::Milliseconds(200);
  const auto expired = submit(*engine, late);
  const auto others = submit(*engine, request_of("others", {1, 2}, 30));
  ASSERT_TRUE(others->wait().ok());
  EXPECT_EQ(expired->wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(expired->tokens.empty());
  engine->offer_weights(bench.weights[1], 1);
  ASSERT_TRUE(waiting->wait().ok());
  EXPECT_EQ(waiting->tokens[0].policy_version, 1);
  EXPECT_EQ(others->tokens[0].policy_version, 0);
}

TEST(EngineTest, RunningPastTheDeadlineEnds) {
  Bench bench(kFlash, DType::kF32, 1);
  const std::unique_ptr<Engine> engine = bench.engine({});
  Request request = request_of("r", {1, 2}, 4000);
  request.deadline = absl::Now() + absl::Milliseconds(50);
  EXPECT_EQ(submit(*engine, request)->wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine->status().cache.bytes_used, 0);
}

TEST(EngineTest, NotANumberEndsTheGenerationAlone) {
  Bench bench(kFlash, DType::kF32, 2);
  model::WeightStore broken = std::move(model::testing::make_test_model(kFlash, DType::kF32, 5).loaded.store);
  broken.tensors().lm_head.f32()[7] = std::numeric_limits<float>::quiet_NaN();
  const std::unique_ptr<Engine> engine = bench.engine({});
  engine->offer_weights(std::make_shared<const model::WeightStore>(std::move(broken)), 1);
  EXPECT_EQ(submit(*engine, request_of("r", {1, 2}, 5))->wait().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(engine->status().cache.bytes_used, 0);
  engine->offer_weights(bench.weights[1], 2);
  EXPECT_TRUE(submit(*engine, request_of("r", {1, 2}, 5))->wait().ok());
}

TEST(EngineTest, RefusesByName) {
  Bench bench(kFlash, DType::kF32, 1);
  const std::unique_ptr<Engine> engine =
      bench.engine({.max_running = 1, .waiting_max = 1, .step_tokens_max = 8});
  const auto refusal = [&](const std::function<void(Request&)>& change) {
    Request request = request_of("bad", {1, 2}, 5);
    change(request);
    return engine->submit(std::move(request), std::make_shared<RecordingSink>()).status();
  };
  const auto expect = [&](absl::StatusCode code, const std::string& text,
                          const std::function<void(Request&)>& change) {
    const absl::Status status = refusal(change);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status;
  };
  const absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  expect(kInvalid, "request_id", [](Request& r) { r.request_id.clear(); });
  expect(kInvalid, "prompt_ids: empty", [](Request& r) { r.prompt_ids.clear(); });
  expect(kInvalid, "prompt_ids[1]: 97, expected 0..96", [](Request& r) { r.prompt_ids[1] = 97; });
  expect(kInvalid, "prompt_ids[0]: -1", [](Request& r) { r.prompt_ids[0] = -1; });
  expect(kInvalid, "stop_ids[0]", [](Request& r) { r.stop_ids = {1000}; });
  expect(kInvalid, "temperature", [](Request& r) { r.sampling.temperature = -1.0f; });
  expect(kInvalid, "temperature", [](Request& r) { r.sampling.temperature = std::nanf(""); });
  expect(kInvalid, "top_k", [](Request& r) { r.sampling.top_k = -1; });
  expect(kInvalid, "top_p", [](Request& r) { r.sampling.top_p = 0.0f; });
  expect(kInvalid, "min_p", [](Request& r) { r.sampling.min_p = 1.0f; });
  expect(kInvalid, "max_tokens", [](Request& r) { r.sampling.max_tokens = 0; });
  expect(absl::StatusCode::kOutOfRange, "4096", [](Request& r) { r.prompt_ids.assign(4096, 1); });
  Request forever = request_of("one", {1}, 3000);
  forever.min_policy_version = 1;
  const auto sink = submit(*engine, forever);
  expect(absl::StatusCode::kAlreadyExists, "\"one\"", [](Request& r) { r.request_id = "one"; });
  forever.request_id = "two";
  const auto second = submit(*engine, forever);
  expect(absl::StatusCode::kResourceExhausted, "2 generations", [](Request&) {});
  EXPECT_FALSE(engine->wait_idle(absl::Now()));
  engine->drain();
  expect(absl::StatusCode::kUnavailable, "draining", [](Request&) {});
  engine->abort_session("session of one");
  ASSERT_TRUE(second->wait().ok());
  ASSERT_TRUE(sink->wait().ok());
  EXPECT_TRUE(engine->wait_idle(absl::Now() + absl::Minutes(1)));
  Metrics metrics;
  const auto bad_config = Engine::create({.max_running = 9, .step_tokens_max = 8}, bench.config,
                                         bench.weights[0], 0, metrics, quiet_logger());
  EXPECT_EQ(bad_config.status().code(), kInvalid);
}

TEST(EngineTest, ShutdownTellsWhatIsLive) {
  Bench bench(kFlash, DType::kF32, 1);
  std::unique_ptr<Engine> engine = bench.engine({.max_running = 1});
  absl::Notification running;
  const auto first = submit(*engine, request_of("a", {1}, 4000), [&](size_t n) {
    if (n == 1) running.Notify();
  });
  const auto second = submit(*engine, request_of("b", {1}, 4000));
  running.WaitForNotification();
  engine.reset();
  EXPECT_EQ(first->wait().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second->wait().status().code(), absl::StatusCode::kUnavailable);
}

// The least recently used prefix goes first, and a prompt that turns off computes everything.
TEST(EngineTest, PrefixesAreKeptByUse) {
  Bench bench(kFlash, DType::kF32, 1);
  const std::unique_ptr<Engine> engine = bench.engine({.max_running = 1, .prefix_sessions_max = 2});
  const auto turn = [&](const std::string& session, const std::vector<int32_t>& prompt) {
    Request request = request_of("r", prompt, 2);
    request.session_id = session;
    const auto sink = submit(*engine, request);
    CHECK(sink->wait().ok());
    return std::pair(sink->result->cached_tokens, joined(prompt, sink->ids()));
  };
  auto [none, a] = turn("a", {1, 2, 3, 4});
  auto [none_either, b] = turn("b", {1, 2, 3, 4});
  EXPECT_EQ(none + none_either, 0);
  auto [a_cached, a2] = turn("a", joined(a, {7}));
  EXPECT_EQ(a_cached, 5);
  turn("c", {9});                                 // b goes
  EXPECT_EQ(turn("b", joined(b, {7})).first, 0);  // a goes for it
  EXPECT_EQ(turn("b", {1, 2, 3, 5, 6, 7, 8, 9}).first, 0);
  EXPECT_EQ(engine->status().prefix_sessions, 2);
  EXPECT_EQ(bench.metrics.value(metric::kPrefixCacheHitTokens), 5);
  EXPECT_EQ(bench.metrics.value(metric::kGeneratedTokens, {"worker-0"}), 12);
}

}  // namespace
}  // namespace slipstream::rollout
