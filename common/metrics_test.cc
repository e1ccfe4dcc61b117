#include "common/metrics.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

#include "common/check.h"
#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(Metrics, TextHoldsWhatWasRecorded) {
  Metrics metrics;
  metrics.add(metric::kMaskedTokens, 3, {"low"});
  metrics.add(metric::kMaskedTokens, 2, {"low"});
  metrics.set(metric::kGradNorm, 1.5);
  metrics.observe(metric::kStaleness, 2);
  const std::string text = metrics.text();
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

// What a scraper gets over HTTP.
std::string scrape(int port) {
  const int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK_EQ(connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const std::string request = "GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n";
  CHECK_EQ(write(connection, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(connection, buffer, sizeof buffer)) > 0;) answer.append(buffer, static_cast<size_t>(got));
  close(connection);
  return answer;
}

TEST(Metrics, AScrapeGetsWhatTextHas) {
  Metrics metrics;
  const auto handle = metrics.on_scrape([](Metrics& m) { m.set(metric::kQueuedTrajectories, 7); });
  metrics.add(metric::kMaskedTokens, 5, {"low"});
  const absl::StatusOr<int> port = metrics.serve("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  const std::string answer = scrape(*port);
  EXPECT_NE(answer.find("slipstream_masked_tokens_total{side=\"low\"} 5"), std::string::npos) << answer;
  EXPECT_NE(answer.find("slipstream_queued_trajectories 7"), std::string::npos) << answer;
}

TEST(Metrics, EndsAtOnce) {
  constexpr int kTimes = 5;  // of which each would take 2 s
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kTimes; ++i) ASSERT_TRUE(Metrics().serve("127.0.0.1:0").ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(kTimes));
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
