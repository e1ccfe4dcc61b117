#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

float uniform_at(uint64_t seed, uint64_t counter) {
  const auto word = [](uint64_t value, int i) { return static_cast<uint32_t>(value >> (32 * i)); };
  const auto bits = philox4x32_10({word(counter, 0), word(counter, 1), 0, 0}, {word(seed, 0), word(seed, 1)});
  return static_cast<float>(bits[0] >> 8) * 0x1p-24f;
}

absl::Status validate(const Sampling& args) {
  const Operands op("sampling");
  RETURN_IF_ERROR(expect_tensor(op, "logits", args.logits, DType::kF32, {-1, -1}));
  const int64_t rows = args.logits.size(0), vocab = args.logits.size(1);
  RETURN_IF_ERROR(expect_that(op, vocab > 0 && vocab <= std::numeric_limits<int32_t>::max(),
                              "logits: the vocabulary is empty or its ids do not fit i32"));
  RETURN_IF_ERROR(expect_tensor(op, "tokens", args.tokens, DType::kI32, {rows}));
  RETURN_IF_ERROR(expect_tensor(op, "logprob", args.logprob, DType::kF32, {rows}));
  RETURN_IF_ERROR(expect_tensor(op, "truncated", args.truncated, DType::kI32, {rows}));
  RETURN_IF_ERROR(expect_that(op, rows == 0 || args.rows != nullptr, "rows: absent"));
  for (int64_t t = 0; t < rows; ++t) {
    const SamplingRow& row = args.rows[t];
    const auto refuse = [&](const char* field, double value, const char* expected) {
      return absl::InvalidArgumentError(
          absl::StrCat(op.op(), ": rows[", t, "].", field, ": ", value, ", expected ", expected));
    };
    const bool temperature_ok =
        row.temperature == 0.0f || (row.temperature > 0.0f && std::isnormal(row.temperature));
    if (!temperature_ok) return refuse("temperature", row.temperature, ">= 0");
    if (row.top_k < 0) return refuse("top_k", row.top_k, ">= 0");
    if (!(row.top_p > 0.0f && row.top_p <= 1.0f)) return refuse("top_p", row.top_p, "in (0, 1]");
    if (!(row.min_p >= 0.0f && row.min_p < 1.0f)) return refuse("min_p", row.min_p, "in [0, 1)");
  }
  return absl::OkStatus();
}

namespace {

// The tokens the draw is made from: a prefix of all tokens of finite logit, ranked by (logit, lower id).
std::vector<int64_t> kept_tokens(const std::vector<double>& p, const float* logits, const SamplingRow& row) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < static_cast<int64_t>(p.size()); ++i) {
    if (std::isfinite(logits[i])) ids.push_back(i);
  }
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  const auto probability = [&](int64_t id) { return p[static_cast<size_t>(id)]; };
  if (row.top_k > 0 && static_cast<size_t>(row.top_k) < ids.size())
    ids.resize(static_cast<size_t>(row.top_k));
  if (row.top_p < 1.0f) {
    double total = 0.0, sum = 0.0;
    for (int64_t id : ids) total += probability(id);
    size_t count = 0;
    while (count < ids.size() && sum < row.top_p * total) sum += probability(ids[count++]);
    ids.resize(count);
  }
  while (probability(ids.back()) < row.min_p * probability(ids.front())) ids.pop_back();
  return ids;
}

void sample(const Sampling& args, int64_t t) {
  const float* logits = args.logits.row(t);
  const int64_t vocab = args.logits.size(1);
  const SamplingRow& row = args.rows[t];
  const double temperature = row.temperature == 0.0f ? 1.0 : row.temperature;
  const double top = *std::max_element(logits, logits + vocab);
  std::vector<double> p(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < vocab; ++i) p[static_cast<size_t>(i)] = std::exp((logits[i] - top) / temperature);
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  args.tokens.i32()[t] = -1;
  args.logprob.f32()[t] = std::numeric_limits<float>::quiet_NaN();
  args.truncated.i32()[t] = 0;
  if (std::isnan(sum)) return;

  int64_t token = std::max_element(logits, logits + vocab) - logits;
  bool truncated = true;
  if (row.temperature != 0.0f) {
    std::vector<int64_t> kept = kept_tokens(p, logits, row);
    truncated = static_cast<int64_t>(kept.size()) <
                std::count_if(
                    logits, logits + vocab, [](float x) { return std::isfinite(x); });
    std::sort(kept.begin(), kept.end());
    double total = 0.0, passed = 0.0;
    for (int64_t id : kept) total += p[static_cast<size_t>(id)];
    const double target = uniform_at(row.seed, row.counter) * total;
    for (int64_t id : kept) {
      token = id;
      passed += p[static_cast<size_t>(id)];
      if (passed > target) break;
    }
  }
  args.tokens.i32()[t] = static_cast<int32_t>(token);
  args.logprob.f32()[t] = static_cast<float>((logits[token] - top) / temperature - std::log(sum));
  args.truncated.i32()[t] = truncated ? 1 : 0;
}

}  // namespace

void reference(const Sampling& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.logits.size(0); ++t) sample(args, t);
}

}  // namespace slipstream::kernels
