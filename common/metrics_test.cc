#include "common/metrics.h"

#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(Metrics, TextHoldsWhatWasRecorded) {
  Metrics metrics;
  metrics.add(metric::kMaskedTokens, 3, {"low"});
  metrics.add(metric::kMaskedTokens, 2, {"low"});
  metrics.set(metric::kGradNorm, 1.5);
  metrics.observe(metric::kStaleness, 2);
  metrics.observe_all(metric::kImportanceRatio, {0.2, 1.0, 1.2});
  metrics.observe_all(metric::kLogprobDiffHistogram, {});
  const std::string text = metrics.text();
  EXPECT_NE(text.find("slipstream_importance_ratio_bucket{le=\"1\"} 2"), std::string::npos) << text;
  EXPECT_NE(text.find("slipstream_masked_tokens_total{side=\"low\"} 5"), std::string::npos) << text;
  EXPECT_NE(text.find("slipstream_grad_norm 1.5"), std::string::npos) << text;
  EXPECT_NE(text.find("slipstream_staleness_versions_bucket{le=\"2\"} 1"), std::string::npos) << text;
  EXPECT_EQ(metrics.value(metric::kMaskedTokens, {"low"}), 5);
}

TEST(Metrics, CollectorRunsAtEachScrapeUntilItsHandleDies) {
  Metrics metrics;
  int calls = 0;
  auto handle = metrics.on_scrape([&](Metrics& m) { m.set(metric::kQueuedTrajectories, ++calls); });
  metrics.text();
  EXPECT_NE(metrics.text().find("slipstream_queued_trajectories 2"), std::string::npos);
  handle.reset();
  metrics.text();
  EXPECT_EQ(calls, 2);
}

TEST(Metrics, BusyPortIsAnErrorThatNamesIt) {
  Metrics first, second;
  const absl::StatusOr<int> port = first.serve("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  const std::string address = absl::StrCat("127.0.0.1:", *port);
  const absl::Status status = second.serve(address).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find(address), absl::string_view::npos);
}

}  // namespace
}  // namespace slipstream
