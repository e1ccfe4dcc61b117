#include "kernels/sampling/sampling.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sampling/sampling_simd.cc"
#include <algorithm>
#include <limits>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"
#include "kernels/simd/logsumexp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The logits of one row and their softmax.
struct Row {
  const float* logits;
  int64_t vocab;
  RowSoftmax softmax;

  HWY_INLINE Lanes exponent(const Lanes& x) const {
    return mul(sub(x, broadcast(softmax.max)), broadcast(softmax.inv_temperature));
  }
  // exp((logit - max) / temperature): the probability but for the division by softmax.sum.
  HWY_INLINE float mass(float logit) const {
    return scalar_exp((logit - softmax.max) * softmax.inv_temperature);
  }
};

// What truncation keeps: tokens that rank at or above (logit, id), and whose mass is at least mass_min.
struct Filter {
  float logit = kMinusInfinity;  // with id -1: every finite logit
  int64_t id = -1;
  float mass_min = 0.0f;
};

// The masses of the sixteen tokens from `first` on, 0 where the filter drops them. Sets drops when it drops a
// token of finite logit.
HWY_INLINE Lanes kept_mass(const Row& row, const Filter& filter, const Lanes& x, int64_t first, bool& drops) {
  const LanesTag d;
  const hn::RebindToSigned<LanesTag> ids;
  const Lanes mass = exp(row.exponent(x));
  const auto threshold = hn::Set(d, filter.logit);
  const auto after = hn::Set(ids, static_cast<int32_t>(filter.id + 1));
  return map([&](int64_t i) HWY_ATTR {
    const auto id = hn::Iota(ids, static_cast<int32_t>(first + i * kLanesPartSize));
    const auto tie = hn::And(hn::Eq(x.part[i], threshold), hn::RebindMask(d, hn::Lt(id, after)));
    const auto ranked = hn::Or(hn::Gt(x.part[i], threshold), tie);
    const auto kept = hn::And(ranked, hn::Ge(mass.part[i], hn::Set(d, filter.mass_min)));
    const auto finite = hn::Gt(x.part[i], hn::Set(d, kMinusInfinity));
    drops = drops || !hn::AllFalse(d, hn::AndNot(kept, finite));
    return hn::IfThenElseZero(kept, mass.part[i]);
  });
}

// Truncation finds its thresholds without sorting the vocabulary: tokens fall into buckets of (max - logit) /
// temperature, 64 to the nat; whole buckets are in or out, and only the bucket of a threshold is sorted.
constexpr float kBucketsPerNat = 64.0f;
constexpr int64_t kBuckets = 88 * 64 + 1;  // the last one: all of mass 0
constexpr int64_t kDropped = kBuckets;     // logits of minus infinity

struct Candidate {
  float logit;
  int32_t id;
};

struct Histogram {
  double* mass;      // [kBuckets + 1]
  int32_t* count;    // [kBuckets + 1]
  Candidate* found;  // [V], the tokens of the bucket looked at last, by rank
};

using Buckets = hn::Vec<hn::RebindToSigned<LanesTag>>;

// The buckets of part k of sixteen logits.
HWY_INLINE Buckets buckets_of(const Row& row, const Lanes& x, int64_t k) {
  const LanesTag d;
  const auto scaled = hn::Mul(row.exponent(x).part[k], hn::Set(d, -kBucketsPerNat));
  const auto bounded = hn::Min(scaled, hn::Set(d, static_cast<float>(kBuckets - 1)));
  const auto dropped = hn::Eq(x.part[k], hn::Set(d, kMinusInfinity));
  const auto bucket = hn::IfThenElse(dropped, hn::Set(d, static_cast<float>(kDropped)), bounded);
  return hn::ConvertTo(hn::RebindToSigned<LanesTag>(), bucket);
}

void fill_histogram(const Row& row, Histogram& histogram) {
  std::fill(histogram.mass, histogram.mass + kBuckets + 1, 0.0);
  std::fill(histogram.count, histogram.count + kBuckets + 1, 0);
  for_lanes(row.vocab, [&](int64_t i, auto chunk) HWY_ATTR {
    int32_t buckets[kLanes];
    float masses[kLanes];
    const Lanes x = chunk.load(row.logits + i, kMinusInfinity);
    for (int64_t k = 0; k < kLanesParts; ++k) {
      hn::StoreU(buckets_of(row, x, k), hn::RebindToSigned<LanesTag>(), buckets + k * kLanesPartSize);
    }
    store(exp(row.exponent(x)), masses);
    for (int64_t j = 0; j < kLanes; ++j) {
      histogram.mass[buckets[j]] += masses[j];
      ++histogram.count[buckets[j]];
    }
  });
}

// Puts the tokens of one bucket into histogram.found, best first.
void rank_bucket(const Row& row, int64_t bucket, Histogram& histogram) {
  const hn::RebindToSigned<LanesTag> integer;
  const auto wanted = hn::Set(integer, static_cast<int32_t>(bucket));
  int64_t count = 0;
  for_lanes(row.vocab, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes x = chunk.load(row.logits + i, kMinusInfinity);
    for (int64_t k = 0; k < kLanesParts; ++k) {
      const auto buckets = buckets_of(row, x, k);
      if (hn::AllFalse(integer, hn::Eq(buckets, wanted))) continue;
      int32_t values[kLanesPartSize];
      hn::StoreU(buckets, integer, values);
      for (int64_t j = 0; j < kLanesPartSize; ++j) {
        const int64_t id = i + k * kLanesPartSize + j;
        if (values[j] == bucket) {
          histogram.found[count++] = {.logit = row.logits[id], .id = static_cast<int32_t>(id)};
        }
      }
    }
  });
  std::sort(histogram.found, histogram.found + count, [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  });
}

// The filter of top-k, then of top-p on what is left.
Filter rank_filter(const Row& row, const SamplingRow& parameters, Histogram& histogram) {
  fill_histogram(row, histogram);
  int64_t finite = 0;
  for (int64_t b = 0; b < kBuckets; ++b) finite += histogram.count[b];

  Filter filter;
  int64_t last_bucket = kBuckets - 1;  // the lowest bucket with kept tokens
  if (parameters.top_k > 0 && parameters.top_k < finite) {
    int64_t wanted = parameters.top_k;
    int64_t b = 0;
    for (; histogram.count[b] < wanted; ++b) wanted -= histogram.count[b];
    rank_bucket(row, b, histogram);
    filter = {.logit = histogram.found[wanted - 1].logit, .id = histogram.found[wanted - 1].id};
    last_bucket = b;
    histogram.count[b] = static_cast<int32_t>(wanted);
    histogram.mass[b] = 0.0;
    for (int64_t j = 0; j < wanted; ++j) histogram.mass[b] += row.mass(histogram.found[j].logit);
  }
  if (parameters.top_p < 1.0f) {
    double total = 0.0;
    for (int64_t b = 0; b <= last_bucket; ++b) total += histogram.mass[b];
    const double wanted = parameters.top_p * total;
    double sum = 0.0;
    int64_t b = 0;
    for (; b < last_bucket && sum + histogram.mass[b] < wanted; ++b) sum += histogram.mass[b];
    rank_bucket(row, b, histogram);
    const int64_t kept = histogram.count[b];
    int64_t j = 0;
    for (; j < kept - 1; ++j) {
      sum += row.mass(histogram.found[j].logit);
      if (sum >= wanted) break;
    }
    filter = {.logit = histogram.found[j].logit, .id = histogram.found[j].id};
  }
  return filter;
}

// A block that is next to nothing beside the maximum is nothing: in the others some token has a mass above
// zero.
double unfiltered_block(const SoftmaxPart& part) {
  const float mass = part.weight * part.sum;
  return mass < 1e-30f ? 0.0 : mass;
}

// What the filter keeps of block b.
double filtered_block(const Row& row, const Filter& filter, int64_t b, bool& drops) {
  const int64_t begin = b * kSoftmaxBlock, n = std::min(kSoftmaxBlock, row.vocab - begin);
  Lanes sum = zero_lanes();
  for_lanes(n, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes x = chunk.load(row.logits + begin + i, kMinusInfinity);
    sum = add(sum, kept_mass(row, filter, x, begin + i, drops));
  });
  return sum_lanes(sum);
}

// The first token of block b at which `passed` plus the kept masses exceeds target. Sums of other roundings
// chose the block, so it may end below the target: the answer is then its last token that has any mass.
int32_t draw_in_block(const Row& row, const Filter& filter, int64_t b, double passed, double target) {
  const int64_t begin = b * kSoftmaxBlock, end = std::min(begin + kSoftmaxBlock, row.vocab);
  float masses[kLanes] = {};
  int64_t first = begin;   // of the chunk in masses
  double before = passed;  // that chunk
  bool drops = false;
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t n = std::min(kLanes, end - i);
    const Lanes x = n == kLanes ? load(row.logits + i) : load_first(row.logits + i, n, kMinusInfinity);
    const Lanes mass = kept_mass(row, filter, x, i, drops);
    const double chunk_mass = sum_lanes(mass);
    if (chunk_mass > 0.0) {
      store(mass, masses);
      first = i;
      before = passed;
      if (passed + chunk_mass > target) break;
    }
    passed += chunk_mass;
  }
  int64_t token = first;
  for (int64_t j = 0; j < kLanes; ++j) {
    if (masses[j] > 0.0f) token = first + j;
    before += masses[j];
    if (before > target) break;
  }
  return static_cast<int32_t>(token);
}

// masses: of the blocks, as the filter leaves them.
int32_t draw(const Row& row, const Filter& filter, const double* masses, double uniform) {
  const int64_t blocks = softmax_blocks(row.vocab);
  double total = 0.0;
  for (int64_t b = 0; b < blocks; ++b) total += masses[b];
  const double target = uniform * total;
  double passed = 0.0;
  int64_t chosen = 0;
  double passed_before_chosen = 0.0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (masses[b] > 0.0) {  // the last such block when rounding lets none reach the target
      chosen = b;
      passed_before_chosen = passed;
    }
    passed += masses[b];
    if (passed > target) break;
  }
  return draw_in_block(row, filter, chosen, passed_before_chosen, target);
}

// The first token with the largest logit.
int32_t argmax(const Row& row, const SoftmaxPart* parts) {
  int64_t b = 0;
  while (parts[b].max != row.softmax.max) ++b;
  int64_t i = b * kSoftmaxBlock;
  while (row.logits[i] != row.softmax.max) ++i;
  return static_cast<int32_t>(i);
}

HWY_INLINE float inverse_temperature(const SamplingRow& parameters) {
  return parameters.temperature == 0.0f ? 1.0f : 1.0f / parameters.temperature;
}

SoftmaxPart sampling_part(const Sampling& args, int64_t t, int64_t block) {
  const int64_t begin = block * kSoftmaxBlock, end = std::min(begin + kSoftmaxBlock, args.logits.size(1));
  return softmax_part(args.logits.row(t) + begin, end - begin, inverse_temperature(args.rows[t]),
                      /*entropy=*/false);
}

void sampling_finish(const Sampling& args, int64_t t, SoftmaxPart* parts, Worker& worker) {
  const SamplingRow& parameters = args.rows[t];
  const int64_t vocab = args.logits.size(1), blocks = softmax_blocks(vocab);
  const Row row{.logits = args.logits.row(t),
                .vocab = vocab,
                .softmax = merge_softmax(parts, blocks, inverse_temperature(parameters))};
  int32_t token = -1;
  bool truncated = false;
  if (row.softmax.log_sum != row.softmax.log_sum) {
    args.logprob.f32()[t] = row.softmax.log_sum;
  } else {
    if (parameters.temperature == 0.0f) {
      truncated = true;
      token = argmax(row, parts);
    } else {
      const bool ranked = parameters.top_k > 0 || parameters.top_p < 1.0f;
      double* masses = worker.scratch<double>(blocks);
      Filter filter;
      if (ranked) {
        Histogram histogram{.mass = worker.scratch<double>(kBuckets + 1),
                            .count = worker.scratch<int32_t>(kBuckets + 1),
                            .found = worker.scratch<Candidate>(vocab)};
        filter = rank_filter(row, parameters, histogram);
      }
      filter.mass_min = parameters.min_p;
      for (int64_t b = 0; b < blocks; ++b) {
        masses[b] = ranked || parameters.min_p > 0.0f ? filtered_block(row, filter, b, truncated)
                                                      : unfiltered_block(parts[b]);
      }
      token = draw(row, filter, masses, uniform_at(parameters.seed, parameters.counter));
    }
    args.logprob.f32()[t] = row.softmax.logprob(row.logits[token]);
  }
  args.tokens.i32()[t] = token;
  args.truncated.i32()[t] = truncated ? 1 : 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(sampling_part);
HWY_EXPORT(sampling_finish);

void launch(const Sampling& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t rows = args.logits.size(0), blocks = softmax_blocks(args.logits.size(1));
  for_softmax_rows(
      stream, rows, blocks, /*row_grain=*/1, /*finish_grain=*/1,
      [&](int64_t t, int64_t block) { return HWY_DYNAMIC_DISPATCH(sampling_part)(args, t, block); },
      [&](int64_t t, SoftmaxPart* parts, Worker& worker) {
        HWY_DYNAMIC_DISPATCH(sampling_finish)(args, t, parts, worker);
      });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
