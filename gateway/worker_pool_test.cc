#include "gateway/worker_pool.h"

#include <gtest/gtest.h>

#include <set>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace slipstream::gateway {
namespace {

v1::RegisterRequest worker(const std::string& id, int64_t start = 1) {
  v1::RegisterRequest request;
  request.set_worker_id(id);
  request.set_address("127.0.0.1:1");
  request.set_max_concurrent(8);
  request.set_max_context(1024);
  request.set_start_time_us(start);
  return request;
}

v1::HeartbeatRequest beat(const std::string& id, int64_t start = 1) {
  v1::HeartbeatRequest request;
  request.set_worker_id(id);
  request.set_start_time_us(start);
  return request;
}

class WorkerPoolTest : public ::testing::Test {
 protected:
  std::string route(const std::string& session) {
    const auto worker = pool_.route(session, absl::Now() + absl::Seconds(10), {});
    return worker.ok() ? (*worker)->id : std::string(worker.status().ToString());
  }
  Metrics metrics_;
  WorkerPool pool_{{.heartbeat_ms = 60'000, .heartbeat_misses = 3}, metrics_, quiet_logger()};
};

// Goal: through joins, leaves and new lives, a session changes its worker only when that one is gone or to one that just
// joined, a join moves about its share, and no worker holds more than 1.25 times the mean.
TEST_F(WorkerPoolTest, MovesOnlyTheShare) {
  constexpr int kSessions = 1000;
  const auto session = [](int i) { return absl::StrCat("run-g", i); };
  std::map<std::string, std::string> at;
  const auto settle = [&](const std::string& joined, const std::string& left) {
    int moved = 0;
    for (int i = 0; i < kSessions; ++i) {
      const std::string now = route(session(i));
      if (std::string& before = at[session(i)]; before != now) {
        EXPECT_TRUE(before.empty() || before == left || now == joined) << session(i) << ": " << before << " to " << now;
        ++moved;
        before = now;
      }
    }
    std::map<std::string, int64_t> loads;
    for (const auto& [name, id] : at) ++loads[id];
    for (const auto& [id, load] : loads) EXPECT_LE(load, bounded_load(kSessions, static_cast<int64_t>(loads.size()))) << id;
    for (int i = 0; i < kSessions; ++i) EXPECT_EQ(route(session(i)), at[session(i)]);  // and it stays
    return moved;
  };
  for (const char* id : {"a", "b", "c", "d"}) ASSERT_TRUE(pool_.add(worker(id)).ok());
  EXPECT_EQ(settle("", ""), kSessions);
  EXPECT_EQ(metrics_.value(metric::kMovedSessions), 0);
  ASSERT_TRUE(pool_.add(worker("e")).ok());
  const int share = settle("e", "");
  EXPECT_GT(share, 0.5 * kSessions / 5);
  EXPECT_LE(share, 1.25 * kSessions / 5);
  EXPECT_EQ(metrics_.value(metric::kMovedSessions), share);
  v1::UnregisterRequest gone;
  gone.set_worker_id("b");
  gone.set_start_time_us(1);
  const int64_t held = std::count_if(at.begin(), at.end(), [](const auto& item) { return item.second == "b"; });
  pool_.remove(gone);
  EXPECT_EQ(settle("", "b"), held);
}

TEST_F(WorkerPoolTest, ANewLifeEndsTheOld) {
  ASSERT_TRUE(pool_.add(worker("w", 5)).ok());
  const auto before = pool_.route("s", absl::Now() + absl::Seconds(1), {});
  ASSERT_TRUE(before.ok());
  ASSERT_TRUE(pool_.add(worker("w", 5)).ok());  // repeated: the same life
  EXPECT_FALSE((*before)->gone.stop_requested());
  EXPECT_EQ(pool_.add(worker("w", 4)).code(), absl::StatusCode::kAlreadyExists);
  v1::HeartbeatRequest counted = beat("w", 5);
  counted.set_generated_tokens(100);
  counted.set_idle_seconds(3);
  ASSERT_TRUE(pool_.heartbeat(counted).ok());
  ASSERT_TRUE(pool_.add(worker("w", 6)).ok());
  EXPECT_TRUE((*before)->gone.stop_requested());
  EXPECT_TRUE(absl::IsNotFound(pool_.heartbeat(beat("w", 5))));
  counted = beat("w", 6);
  counted.set_generated_tokens(11);
  counted.set_idle_seconds(2);
  ASSERT_TRUE(pool_.heartbeat(counted).ok());
  EXPECT_EQ(pool_.generated_tokens(), 111u);
  EXPECT_EQ(pool_.idle_seconds(), 5);
  EXPECT_EQ((*pool_.route("s", absl::Now() + absl::Seconds(1), {}))->start_time_us, 6);
  EXPECT_TRUE(absl::IsNotFound(pool_.heartbeat(beat("unknown"))));
}

TEST_F(WorkerPoolTest, SuspectedAndDrainingWorkersGetNothing) {
  ASSERT_TRUE(pool_.add(worker("a")).ok());
  const auto a = pool_.route("s", absl::Now() + absl::Seconds(1), {});
  pool_.suspect(**a);
  EXPECT_TRUE(absl::IsDeadlineExceeded(pool_.route("s", absl::Now() + absl::Milliseconds(5), {}).status()));
  ASSERT_TRUE(pool_.heartbeat(beat("a")).ok());
  EXPECT_EQ(route("s"), "a");
  v1::HeartbeatRequest draining = beat("a");
  draining.set_draining(true);
  ASSERT_TRUE(pool_.heartbeat(draining).ok());
  EXPECT_FALSE((*a)->gone.stop_requested());  // what runs there goes on
  ASSERT_TRUE(pool_.add(worker("b")).ok());
  EXPECT_EQ(route("s"), "b");
  EXPECT_EQ(route("t"), "b");
  EXPECT_EQ(pool_.release("s")->id, "b");
  EXPECT_EQ(pool_.release("s"), nullptr);
}

TEST_F(WorkerPoolTest, WaitsForAWorkerAndCanBeCancelled) {
  absl::Notification routed;
  std::string id;
  std::jthread waiting([&] {
    id = route("s");
    routed.Notify();
  });
  ASSERT_TRUE(pool_.add(worker("late")).ok());
  ASSERT_TRUE(routed.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_EQ(id, "late");
  WorkerPool empty({}, metrics_, quiet_logger());
  std::stop_source cancel;
  absl::Status status;
  std::jthread cancelled([&] { status = empty.route("s", absl::InfiniteFuture(), cancel.get_token()).status(); });
  cancel.request_stop();
  cancelled.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST_F(WorkerPoolTest, DeadAfterMissedHeartbeats) {
  WorkerPool pool({.heartbeat_ms = 10, .heartbeat_misses = 3}, metrics_, quiet_logger());
  ASSERT_TRUE(pool.add(worker("mortal")).ok());
  EXPECT_EQ(metrics_.value(metric::kWorkerUp, {"mortal"}), 1);
  const auto life = pool.route("s", absl::Now() + absl::Seconds(1), {});
  ASSERT_TRUE(life.ok());
  absl::Notification dead;
  const std::stop_callback gone((*life)->gone, [&] { dead.Notify(); });
  ASSERT_TRUE(dead.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_TRUE(absl::IsNotFound(pool.heartbeat(beat("mortal"))));
  EXPECT_EQ(metrics_.value(metric::kWorkerUp, {"mortal"}), 0);
  EXPECT_FALSE(pool.status()[0].up());
  ASSERT_TRUE(pool.add(worker("mortal")).ok());  // the same life, seen again
  EXPECT_NE(metrics_.text().find("slipstream_heartbeat_age_seconds{worker=\"mortal\"}"), std::string::npos);
}

TEST_F(WorkerPoolTest, RefusesWhatIsNoWorker) {
  const auto refused = [&](auto change, const char* field) {
    v1::RegisterRequest request = worker("w");
    change(request);
    const absl::Status status = pool_.add(request);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << field;
    EXPECT_NE(status.ToString().find(field), std::string::npos) << status;
  };
  refused([](auto& request) { request.set_worker_id(""); }, "worker_id");
  refused([](auto& request) { request.set_worker_id(std::string(129, 'w')); }, "worker_id: 129 bytes, expected 1 to 128");
  refused([](auto& request) { request.set_worker_id("w\n"); }, "worker_id: \"w\\n\", expected printable ASCII");
  refused([](auto& request) { request.set_worker_id("../w"); }, "worker_id: \"../w\", expected letters, digits");
  refused([](auto& request) { request.set_address("nowhere"); }, "address");
  refused([](auto& request) { request.set_address("localhost:99999999"); }, "address");
  refused([](auto& request) { request.set_address("localhost:0"); }, "address");
  refused([](auto& request) { request.set_address(":80"); }, "address");
  refused([](auto& request) { request.set_max_concurrent(0); }, "max_concurrent");
  refused([](auto& request) { request.set_max_context(-1); }, "max_context");
  refused([](auto& request) { request.set_start_time_us(0); }, "start_time_us");
  refused([](auto& request) { request.set_policy_version(-1); }, "policy_version");
  EXPECT_TRUE(pool_.status().empty());
  EXPECT_EQ(pool_.heartbeat(beat(std::string(1 << 20, '\xff'))),
            absl::InvalidArgumentError("heartbeat: worker_id: 1048576 bytes, expected 1 to 128"));
}

}  // namespace
}  // namespace slipstream::gateway
