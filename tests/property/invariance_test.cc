// Goal: a token's log-prob has the same bits however its sequence reaches the model: in one prefill, in pieces, token by
// token, in a batch with others, as a training forward, with a forked cache, from panels of the weights or without, on one
// thread or two; for every family, in fp32 and bf16, and with linear layers or latent rows in fp8. On a CUDA device too, where there is one:
// then activations are bf16 with the weights.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/logprob/logprob.h"
#include "model/decode_graphs.h"
#include "model/host_values.h"
#include "tests/property/test_models.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using testing::make_test_model;
using testing::TestModel;

constexpr int64_t kLength = 300;

// Fp8: weights of linear layers. Latents: cached latent rows in fp8, and in a bf16 model these weights too.
enum class Where { kCpu, kCpuFp8, kCpuLatents, kCuda, kCudaFp8, kCudaLatents };

kernels::Stream* cuda_stream() {  // null without a device
  static const absl::StatusOr<std::unique_ptr<kernels::Stream>> stream = kernels::Stream::create_cuda(0);
  return stream.ok() ? stream->get() : nullptr;
}

kernels::Stream& stream_of(int threads) {
  static const std::unique_ptr<kernels::Stream> one = *kernels::Stream::create_cpu(1);
  static const std::unique_ptr<kernels::Stream> two = *kernels::Stream::create_cpu(2);
  return threads == 1 ? *one : *two;
}

struct Piece {
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;
  int64_t cached;  // cache sequence id
};

// Log-probs of each piece's targets, all pieces in one forward pass.
std::vector<std::vector<float>> run(TestModel& m, const std::vector<Piece>& pieces, Cache* cache, int threads,
                                    bool training = false, WeightPanels* panels = nullptr) {
  const kernels::ArenaScope scope(m.arena);
  Batch batch;
  std::vector<int32_t> targets;
  for (const Piece& piece : pieces) {
    batch.tokens.insert(batch.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    targets.insert(targets.end(), piece.targets.begin(), piece.targets.end());
    batch.lengths.push_back(static_cast<int64_t>(piece.tokens.size()));
    if (cache != nullptr) batch.cached.push_back(piece.cached);
  }
  const bool cuda = m.arena.device().kind == kernels::DeviceKind::kCuda;
  kernels::Stream& stream = cuda ? *cuda_stream() : stream_of(threads);
  const absl::StatusOr<PreparedBatch> prepared = prepare_batch(m.config(), batch, cache, m.arena, stream);
  CHECK_OK(prepared.status());
  Step step{stream, m.arena, *prepared, panels, cuda ? m.loaded.store.dtype() : DType::kF32, &m.loaded.store.scales()};
  SavedForward saved;
  const Tensor hidden = m.model->forward(m.weights(), step, training ? &saved : nullptr,
                                         {.fp8_latents = m.fp8_latents && cache == nullptr});
  const Tensor logprob = m.model->log_probs(m.weights(), hidden, step.upload(targets), 1.0f, false, step).logprob;
  std::vector<std::vector<float>> out;
  const std::vector<float> values = host_values<float>(logprob, stream);
  auto next = values.begin();
  for (const Piece& piece : pieces) {
    out.emplace_back(next, next + static_cast<int64_t>(piece.tokens.size()));
    next += static_cast<int64_t>(piece.tokens.size());
  }
  return out;
}

// tokens [begin, end) with the token after each as its target.
Piece piece_of(const std::vector<int32_t>& tokens, int64_t begin, int64_t end, int64_t cached = 0) {
  Piece piece{{tokens.begin() + begin, tokens.begin() + end}, {}, cached};
  for (int64_t i = begin; i < end; ++i) {
    piece.targets.push_back(i + 1 < static_cast<int64_t>(tokens.size()) ? tokens[static_cast<size_t>(i + 1)] : -1);
  }
  return piece;
}

std::unique_ptr<Cache> make_cache(const TestModel& m, int64_t tokens = 8192, int64_t sequences = 20) {
  const bool cuda = m.arena.device().kind == kernels::DeviceKind::kCuda;
  return *Cache::create(m.config(), {.tokens = tokens, .sequences = sequences, .dtype = m.loaded.store.dtype(),
                                    .fp8_latents = m.fp8_latents},
                        cuda ? cuda_stream() : nullptr);
}

void expect_same(const std::vector<float>& actual, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(std::isfinite(expected[i])) << what << ": token " << i;
    ASSERT_EQ(std::memcmp(&actual[i], &expected[i], sizeof(float)), 0)
        << what << ": token " << i << ": " << actual[i] << ", expected the bits of " << expected[i];
  }
}

class InvarianceTest : public ::testing::TestWithParam<std::tuple<std::string, DType, Where>> {
 protected:
  InvarianceTest() : m_(make_test_model(std::get<0>(GetParam()), std::get<1>(GetParam()))) {}

  Where where() const { return std::get<2>(GetParam()); }
  bool cuda() const { return where() >= Where::kCuda; }
  bool latents() const { return where() == Where::kCpuLatents || where() == Where::kCudaLatents; }
  bool fp8() const {
    return where() == Where::kCpuFp8 || where() == Where::kCudaFp8 || (latents() && std::get<1>(GetParam()) == DType::kBf16);
  }
  void SetUp() override {
    m_.fp8_latents = latents();
    if (cuda()) {
      if (cuda_stream() == nullptr) GTEST_SKIP() << kernels::Stream::create_cuda(0).status().message();
      m_.loaded.store = *m_.loaded.store.copy_to(m_.config(), *cuda_stream(), fp8());
      m_.arena = *kernels::Arena::create(cuda_stream()->device(), int64_t{1} << 30);
    } else if (fp8()) {
      m_.loaded.store = *m_.loaded.store.copy_to(m_.config(), stream_of(2), /*fp8=*/true);
    }
    tokens_ = testing::test_tokens(m_.config(), kLength, 5);
    whole_ = run(m_, {piece_of(tokens_, 0, kLength)}, nullptr, 2)[0];
  }

  // The sequence in pieces of these lengths, the last repeated to the end, through a cache.
  std::vector<float> in_pieces(const std::vector<int64_t>& lengths, int threads, WeightPanels* panels = nullptr) {
    const std::unique_ptr<Cache> cache = make_cache(m_);
    const int64_t id = *cache->open();
    std::vector<float> out;
    size_t n = 0;
    for (int64_t begin = 0; begin < kLength;) {
      const int64_t end = std::min(begin + lengths[std::min(n++, lengths.size() - 1)], kLength);
      const std::vector<float> part =
          run(m_, {piece_of(tokens_, begin, end, id)}, cache.get(), threads, /*training=*/false, panels)[0];
      out.insert(out.end(), part.begin(), part.end());
      begin = end;
    }
    return out;
  }

  TestModel m_;
  std::vector<int32_t> tokens_;
  std::vector<float> whole_;
};

TEST_P(InvarianceTest, Threads) {
  expect_same(run(m_, {piece_of(tokens_, 0, kLength)}, nullptr, 1)[0], whole_, "one thread");
}

TEST_P(InvarianceTest, TrainingForward) {
  if (latents()) GTEST_SKIP() << "training keeps latent rows as they are";
  expect_same(run(m_, {piece_of(tokens_, 0, kLength)}, nullptr, 2, /*training=*/true)[0], whole_, "training");
}

TEST_P(InvarianceTest, ChunkedPrefill) {
  for (const int64_t length : {kLength, int64_t{7}, int64_t{64}, int64_t{100}}) {
    expect_same(in_pieces({length}, 2), whole_, "pieces of " + std::to_string(length));
  }
  expect_same(in_pieces({63, 2, 130, 1, 5}, 1), whole_, "uneven pieces");
}

TEST_P(InvarianceTest, TokenByToken) { expect_same(in_pieces({1}, 1), whole_, "decode"); }

TEST_P(InvarianceTest, FromPanels) {
  if (cuda() || fp8()) GTEST_SKIP() << "panels of weights are the CPU's, and not of fp8";
  WeightPanels panels = *WeightPanels::create(m_.loaded.store);
  expect_same(run(m_, {piece_of(tokens_, 0, kLength)}, nullptr, 2, /*training=*/false, &panels)[0], whole_, "panels");
  expect_same(in_pieces({1}, 1, &panels), whole_, "decode from panels");
  expect_same(in_pieces({7, 40, 100}, 2, &panels), whole_, "pieces from panels");
  EXPECT_GT(panels.bytes(), 0);

  // Other weights, at other addresses: the same memory holds their panels.
  TestModel other = make_test_model(std::get<0>(GetParam()), std::get<1>(GetParam()), /*seed=*/2);
  const std::vector<float> expected = run(other, {piece_of(tokens_, 0, kLength)}, nullptr, 2)[0];
  const int64_t bytes = panels.bytes();
  panels.follow(other.loaded.store);
  expect_same(run(other, {piece_of(tokens_, 0, kLength)}, nullptr, 2, /*training=*/false, &panels)[0], expected,
              "panels of other weights");
  EXPECT_EQ(panels.bytes(), bytes);
}

TEST_P(InvarianceTest, InBatches) {
  for (const int64_t count : {3, 17}) {
    const std::unique_ptr<Cache> cache = make_cache(m_);
    std::vector<Piece> fresh, cached;
    for (int64_t b = 0; b < count; ++b) {
      const int64_t length = b == count / 2 ? kLength : 1 + (b * 53) % 140;
      const std::vector<int32_t> tokens =
          b == count / 2 ? tokens_ : testing::test_tokens(m_.config(), length, 100 + static_cast<uint64_t>(b));
      fresh.push_back(piece_of(tokens, 0, length));
      cached.push_back(piece_of(tokens, 0, length, *cache->open()));
    }
    const size_t ours = static_cast<size_t>(count / 2);
    expect_same(run(m_, fresh, nullptr, 2)[ours], whole_, "batch of " + std::to_string(count));
    expect_same(run(m_, cached, cache.get(), 2)[ours], whole_, "cached batch of " + std::to_string(count));
  }
}

// Decode steps of one sequence beside prefills of others, as continuous batching has them.
TEST_P(InvarianceTest, DecodeBesidePrefill) {
  const std::unique_ptr<Cache> cache = make_cache(m_);
  const int64_t id = *cache->open();
  std::vector<float> out = run(m_, {piece_of(tokens_, 0, 120, id)}, cache.get(), 2)[0];
  for (int64_t t = 120; t < 200; ++t) {
    const std::vector<int32_t> other = testing::test_tokens(m_.config(), 1 + t % 40, static_cast<uint64_t>(t));
    const int64_t other_id = *cache->open();
    const std::vector<Piece> pieces = {piece_of(other, 0, static_cast<int64_t>(other.size()), other_id),
                                       piece_of(tokens_, t, t + 1, id)};
    out.push_back(run(m_, pieces, cache.get(), 2)[1][0]);
    CHECK_OK(cache->free(other_id));
  }
  expect_same(out, {whole_.begin(), whole_.begin() + 200}, "decode beside prefill");
}

// Decode steps recorded once and replayed, of batches that grow and shrink.
TEST_P(InvarianceTest, ReplayedDecode) {
  if (!cuda()) GTEST_SKIP() << "launches are recorded on a GPU";
  kernels::Stream& stream = *cuda_stream();
  const std::unique_ptr<Cache> cache = make_cache(m_);
  const std::vector<int64_t> ids = {*cache->open(), *cache->open(), *cache->open()};
  std::vector<float> out;
  DecodeGraphs graphs;
  for (int64_t t = 0; t < kLength; ++t) {
    const kernels::ArenaScope scope(m_.arena);
    const size_t count = t / 40 % 2 == 0 ? 1 : 3;
    Batch batch{.tokens = std::vector<int32_t>(count, tokens_[static_cast<size_t>(t)]),
                .lengths = std::vector<int64_t>(count, 1),
                .cached = {ids.begin(), ids.begin() + static_cast<int64_t>(count)}};
    const absl::StatusOr<PreparedBatch> prepared = prepare_batch(m_.config(), batch, cache.get(), m_.arena, stream);
    CHECK_OK(prepared.status());
    Step step{stream, m_.arena, *prepared, nullptr, m_.loaded.store.dtype(), &m_.loaded.store.scales()};
    std::vector<int32_t> targets(count, t + 1 < kLength ? tokens_[static_cast<size_t>(t + 1)] : -1);
    const Tensor logits = graphs.run(*m_.model, m_.weights(), step, /*capture=*/t % 2 == 0).logits;
    const Tensor logprob = step.island({static_cast<int64_t>(count)}), lse = step.island({static_cast<int64_t>(count)});
    kernels::launch(kernels::LogProb{.logits = logits, .targets = step.upload(targets), .logprob = logprob, .lse = lse,
                                     .entropy = {}, .temperature = 1.0f},
                    stream);
    out.push_back(host_values<float>(logprob, stream)[0]);
  }
  expect_same(out, whole_, "replayed decode");
}

TEST_P(InvarianceTest, ForkedCache) {
  const std::unique_ptr<Cache> cache = make_cache(m_);
  const int64_t parent = *cache->open();
  run(m_, {piece_of(tokens_, 0, 150, parent)}, cache.get(), 2);
  const int64_t child = *cache->fork(parent);
  // The parent goes another way first; its writes must not reach the child.
  const std::vector<int32_t> other = testing::test_tokens(m_.config(), 90, 77);
  run(m_, {piece_of(other, 0, 90, parent)}, cache.get(), 2);
  const std::vector<float> rest = run(m_, {piece_of(tokens_, 150, kLength, child)}, cache.get(), 2)[0];
  expect_same(rest, {whole_.begin() + 150, whole_.end()}, "forked");
  CHECK_OK(cache->free(parent));
  CHECK_OK(cache->free(child));
  EXPECT_EQ(cache->usage().bytes_used, 0);
}

INSTANTIATE_TEST_SUITE_P(Families, InvarianceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::test_model_names()), ::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(Where::kCpu)));
INSTANTIATE_TEST_SUITE_P(Fp8Families, InvarianceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::test_model_names()), ::testing::Values(DType::kBf16),
                                            ::testing::Values(Where::kCpuFp8)));
std::vector<std::string> models_with_latents() {
  std::vector<std::string> out;
  for (const std::string& name : testing::test_model_names()) {
    if (testing::test_config(name).mla) out.push_back(name);
  }
  return out;
}
INSTANTIATE_TEST_SUITE_P(LatentsFamilies, InvarianceTest,
                         ::testing::Combine(::testing::ValuesIn(models_with_latents()), ::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(Where::kCpuLatents)));
#ifdef SLIPSTREAM_HAS_CUDA
INSTANTIATE_TEST_SUITE_P(CudaLatentsFamilies, InvarianceTest,
                         ::testing::Combine(::testing::ValuesIn(models_with_latents()), ::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(Where::kCudaLatents)));
INSTANTIATE_TEST_SUITE_P(CudaFamilies, InvarianceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::test_model_names()), ::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(Where::kCuda)));
INSTANTIATE_TEST_SUITE_P(CudaFp8Families, InvarianceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::test_model_names()), ::testing::Values(DType::kBf16),
                                            ::testing::Values(Where::kCudaFp8)));
#endif

}  // namespace
}  // namespace slipstream::model
