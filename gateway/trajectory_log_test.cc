// Goal: what append() acknowledged is there after any end of the process, and a damaged log is never read as a whole one.
#include "gateway/trajectory_log.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <random>
#include <set>

#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

class TrajectoryLogTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<TrajectoryLog>> open(int64_t segment_bytes = 1 << 20) {
    replayed_.clear();
    positions_.clear();
    return TrajectoryLog::open(
        {.directory = directory_, .segment_bytes = segment_bytes, .settings = {}}, quiet_logger(),
        [this](RecordType type, std::string_view payload, TrajectoryLog::Position position) {
          if (type == RecordType::kSnapshot) return absl::OkStatus();
          replayed_.emplace_back(type, std::string(payload));
          positions_.push_back(position);
          return absl::OkStatus();
        });
  }
  std::string file(int segment) const { return directory_ + "/0000000" + std::to_string(segment) + ".log"; }
  std::string contents(int segment) const {
    std::ifstream in(file(segment), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void overwrite(int segment, const std::string& bytes) const {
    std::ofstream(file(segment), std::ios::binary | std::ios::trunc) << bytes;
  }

  const slipstream::testing::TemporaryDirectory temporary_;
  const std::string directory_ = temporary_.path();
  std::vector<std::pair<RecordType, std::string>> replayed_;
  std::vector<TrajectoryLog::Position> positions_;
};

Record trajectory(const std::string& id, size_t padding = 0) {
  v1::LogTrajectory record;
  record.mutable_trajectory()->set_rollout_id(id);
  record.mutable_trajectory()->set_task(std::string(padding, 'x'));
  return {RecordType::kTrajectory, record.SerializeAsString()};
}

std::string id_of(const std::string& payload) {
  v1::LogTrajectory record;
  record.ParseFromString(payload);
  return record.trajectory().rollout_id();
}

absl::StatusOr<std::vector<TrajectoryLog::Position>> append(TrajectoryLog& log, std::vector<Record> records) {
  std::promise<absl::StatusOr<std::vector<TrajectoryLog::Position>>> done;
  log.append(std::move(records), [&](auto positions) { done.set_value(std::move(positions)); });
  return done.get_future().get();
}

TEST_F(TrajectoryLogTest, ReplayGivesWhatWasAppended) {
  TrajectoryLog::Position position;
  {
    auto log = open();
    ASSERT_TRUE(log.ok()) << log.status();
    auto positions = append(**log, {trajectory("a"), trajectory("b")});
    ASSERT_TRUE(positions.ok()) << positions.status();
    ASSERT_EQ(positions->size(), 2u);
    EXPECT_LT((*positions)[0], (*positions)[1]);
    position = (*positions)[1];
    EXPECT_EQ(id_of(*(*log)->read(position)), "b");
    v1::LogSettled settled;
    settled.add_rollout_ids("a");
    settled.set_reason("stale");
    ASSERT_TRUE(append(**log, {{RecordType::kSettled, settled.SerializeAsString()}}).ok());
  }
  auto log = open();
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_EQ(replayed_.size(), 3u);
  EXPECT_EQ(id_of(replayed_[0].second), "a");
  EXPECT_EQ(replayed_[2].first, RecordType::kSettled);
  EXPECT_EQ(positions_[1], position);
  EXPECT_EQ((*log)->state().produced(), 2u);
  EXPECT_EQ((*log)->state().dropped().at("stale"), 1u);
}

TEST_F(TrajectoryLogTest, TwoCannotOpenIt) {
  auto first = open();
  ASSERT_TRUE(first.ok());
  const absl::Status second = open().status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition) << second;
  EXPECT_NE(second.message().find(directory_), absl::string_view::npos);
}

// Whatever a crash cut off, or left as garbage or zeros, at the end of the last segment.
TEST_F(TrajectoryLogTest, TornTailIsCutAtEveryByte) {
  {
    auto log = open();
    ASSERT_TRUE(append(**log, {trajectory("kept", 40)}).ok());
    ASSERT_TRUE(append(**log, {trajectory("torn", 40)}).ok());
  }
  const std::string whole = contents(1);
  open().value().reset();
  const auto torn = static_cast<size_t>(positions_[1] & 0xffffffff);
  for (size_t end = torn + 1; end < whole.size(); ++end) {
    for (const std::string& tail : {std::string(), std::string(whole.size() - end, '\0'), std::string(100, '\xff')}) {
      overwrite(1, whole.substr(0, end) + tail);
      if (contents(1) == whole) continue;
      auto log = open();
      ASSERT_TRUE(log.ok()) << "cut at " << end << ": " << log.status();
      ASSERT_EQ(replayed_.size(), 1u) << end;
      EXPECT_EQ(id_of(replayed_[0].second), "kept");
    }
  }
  overwrite(1, whole.substr(0, torn + 5));
  auto log = open();
  ASSERT_TRUE(append(**log, {trajectory("again")}).ok());
  log->reset();
  ASSERT_TRUE(open().ok());
  ASSERT_EQ(replayed_.size(), 2u);
  EXPECT_EQ(id_of(replayed_[1].second), "again");
}

TEST_F(TrajectoryLogTest, DamageElsewhereIsAnErrorThatSaysWhere) {
  {
    auto log = open();
    for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(append(**log, {trajectory(id, 40)}).ok());
  }
  const std::string whole = contents(1);
  open().value().reset();
  const std::vector<TrajectoryLog::Position> positions = positions_;
  // Every byte of the second record: its length, checksum, type, payload.
  for (size_t at = positions[1] & 0xffffffff; at < (positions[2] & 0xffffffff); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x40);
    overwrite(1, damaged);
    const absl::Status status = open().status();
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << "byte " << at << ": " << status;
    const std::string where = absl::StrCat(file(1), ": offset ", positions[1] & 0xffffffff);
    EXPECT_NE(std::string(status.message()).find(where), std::string::npos) << status;
    ASSERT_EQ(contents(1), damaged) << "a damaged log is left as it is";
  }
}

TEST_F(TrajectoryLogTest, SegmentsRollAndAreForgottenWithTheirCountsKept) {
  {
    auto log = open(4096);
    for (int i = 0; i < 30; ++i) ASSERT_TRUE(append(**log, {trajectory(std::to_string(i), 1000)}).ok());
    EXPECT_GT((*log)->active_segment(), 5u);
    (*log)->forget_before(4);
  }
  EXPECT_FALSE(std::filesystem::exists(file(1)));
  EXPECT_FALSE(std::filesystem::exists(file(3)));
  EXPECT_TRUE(std::filesystem::exists(file(4)));
  auto log = open(4096);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_LT(replayed_.size(), 30u);
  EXPECT_EQ(id_of(replayed_.back().second), "29");
  EXPECT_EQ((*log)->state().produced(), 30u);
  EXPECT_EQ((*log)->read(uint64_t{1} << 32 | 100).status().code(), absl::StatusCode::kNotFound);
  log->reset();
  std::filesystem::remove(file(5));
  EXPECT_EQ(open().status().code(), absl::StatusCode::kDataLoss);
}

// A crash between making a segment's file and its first record.
TEST_F(TrajectoryLogTest, EmptyLastSegmentIsStartedAgain) {
  {
    auto log = open(4096);
    for (int i = 0; i < 6; ++i) ASSERT_TRUE(append(**log, {trajectory(std::to_string(i), 1000)}).ok());
    ASSERT_EQ((*log)->active_segment(), 2u);
  }
  for (const std::string& bytes : {std::string(), std::string("\x07\0\0", 3)}) {
    std::ofstream(file(3), std::ios::binary | std::ios::trunc) << bytes;
    auto log = open(4096);
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_EQ((*log)->active_segment(), 3u);
    EXPECT_EQ((*log)->state().produced(), 6u);
  }
}

// EFBIG stands for a full disk: write() takes part of the bytes, then fails.
TEST_F(TrajectoryLogTest, FullDiskFailsTheAppendAndNothingElse) {
  ASSERT_NE(signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit unlimited;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  {
    auto log = open();
    ASSERT_TRUE(append(**log, {trajectory("a", 1000)}).ok());
    rlimit limited = unlimited;
    limited.rlim_cur = 3000;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
    const absl::Status full = append(**log, {trajectory("too long", 4000)}).status();
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
    EXPECT_TRUE(append(**log, {trajectory("b", 100)}).ok());
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &unlimited), 0);
    EXPECT_TRUE(append(**log, {trajectory("c", 4000)}).ok());
    EXPECT_EQ((*log)->state().produced(), 3u);
  }
  ASSERT_TRUE(open().ok());
  ASSERT_EQ(replayed_.size(), 3u);
  EXPECT_EQ(id_of(replayed_[1].second), "b");
  EXPECT_EQ(id_of(replayed_[2].second), "c");
}

TEST_F(TrajectoryLogTest, AnUnwritableDirectoryIsAnErrorThatNamesIt) {
  std::ofstream(directory_ + "/file") << "x";
  const absl::Status status =
      TrajectoryLog::open({.directory = directory_ + "/file/log", .settings = {}}, quiet_logger(), nullptr)
          .status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("/file/log"), absl::string_view::npos) << status;
}

// A child appends with several threads and says which ids were acknowledged; it is killed at a random moment, twenty times
// over the same log.
TEST_F(TrajectoryLogTest, NothingAcknowledgedIsLostBySigkill) {
  std::mt19937 random(1);
  std::set<std::string> acknowledged;
  for (int life = 0; life < 20; ++life) {
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(pipe_ends[0]);
      auto log = open(16 << 10);
      if (!log.ok()) _exit(3);
      std::vector<std::jthread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
          for (int i = 0; true; ++i) {
            const std::string id = absl::StrCat(life, "-", t, "-", i);
            if (!append(**log, {trajectory(id, 300 + 50 * t)}).ok()) _exit(4);
            const std::string line = id + "\n";
            if (::write(pipe_ends[1], line.data(), line.size()) != static_cast<ssize_t>(line.size())) _exit(5);
          }
        });
      }
      for (std::jthread& thread : threads) thread.join();
    }
    ::close(pipe_ends[1]);
    // The moment: after a random number of acknowledgements, at whatever point the child has reached by then.
    FILE* acks = fdopen(pipe_ends[0], "r");
    char line[64];
    const int wanted = static_cast<int>(random() % 200) + 1;
    for (int i = 0; i < wanted && std::fgets(line, sizeof(line), acks) != nullptr; ++i) {
      acknowledged.insert(std::string(line, strcspn(line, "\n")));
    }
    ASSERT_EQ(kill(child, SIGKILL), 0);
    while (std::fgets(line, sizeof(line), acks) != nullptr) {
      if (strchr(line, '\n') != nullptr) acknowledged.insert(std::string(line, strcspn(line, "\n")));
    }
    std::fclose(acks);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "exit status " << WEXITSTATUS(status);
    auto log = open(16 << 10);
    ASSERT_TRUE(log.ok()) << log.status();
    std::set<std::string> found;
    for (const auto& [type, payload] : replayed_) EXPECT_TRUE(found.insert(id_of(payload)).second) << "twice";
    for (const std::string& id : acknowledged) ASSERT_TRUE(found.contains(id)) << id << ", life " << life;
  }
  EXPECT_GE(acknowledged.size(), 20u);
}

// Not a limit: a figure for the log, printed. 64 threads, each waiting for its append, records of 4 KB.
TEST_F(TrajectoryLogTest, ManyAppendsShareASync) {
  auto log = open(64 << 20);
  std::atomic<int> left = 12'800, failed = 0;
  const auto start = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 64; ++t) {
      threads.emplace_back([&] {
        while (left.fetch_sub(1) > 0) failed += !append(**log, {trajectory("id", 4096)}).ok();
      });
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ((*log)->state().produced(), 12'800u);
  std::printf("12800 appends of 4 KB by 64 threads: %.0f a second\n", 12'800 / seconds);
}

}  // namespace
}  // namespace slipstream::gateway
