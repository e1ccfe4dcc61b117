// The durable log of trajectories: append-only segments 00000001.log, 00000002.log, ... in one directory. A segment is a
// sequence of records (common/records.h) of a type, u8, and a payload; payloads are the messages of log.proto. Its first record is a
// LogSnapshot of all that came before, so that the oldest segments can be deleted.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/log.h"
#include "common/status.h"
#include "slipstream/v1/log.pb.h"

namespace slipstream::gateway {

enum class RecordType : uint8_t { kSnapshot = 1, kGroup, kTrajectory, kSettled, kDelivered, kLearner };

struct Record {
  RecordType type;
  std::string payload;
};

// Adds one record (not a snapshot) to the state. InvalidArgument: the payload is no such message.
absl::Status apply(RecordType type, std::string_view payload, v1::LogSnapshot* state);

// Thread-safe.
class TrajectoryLog {
 public:
  struct Options {
    std::string directory;  // made when it is missing
    int64_t segment_bytes = 64 << 20;  // a segment is closed when it has grown to this; at most 1 GiB
    std::map<std::string, std::string> settings;  // a new log keeps them, beside an id of its own (state())
  };
  // Where a record is: segment number in the upper, byte offset in the lower 32 bits. Grows with every record.
  using Position = uint64_t;
  static uint32_t segment_of(Position position) { return static_cast<uint32_t>(position >> 32); }
  // Given the snapshot that the oldest segment begins with, if there is any, and then every other record, in order. An error
  // stops the replay and is returned by open().
  using Visitor = std::function<absl::Status(RecordType, std::string_view payload, Position)>;
  // Called once, by the writer's thread, in the order of the appends: when the records are on disk (their positions), or
  // none of them is.
  using Done = std::function<void(absl::StatusOr<std::vector<Position>>)>;

  // Replays what is there. A torn tail (of a process killed while it wrote) is cut off and logged. DataLoss: a record is
  // damaged, names file and offset. FailedPrecondition: another process has the log open. Else errors of the file system.
  static absl::StatusOr<std::unique_ptr<TrajectoryLog>> open(const Options& options, Logger logger, const Visitor& visitor);
  // Writes what was appended.
  ~TrajectoryLog();

  // Never blocks. Records of one call are acknowledged together (a crash may leave the first of them). When the disk fails (ENOSPC, EIO) `done` gets the
  // error and the log is as before: later appends may work. What waits is bounded by the callers, who wait for `done`.
  // Returns the segment that is the oldest the records can come to lie in.
  uint32_t append(std::vector<Record> records, Done done);
  // The payload at a position that append() or replay gave. NotFound: deleted since. DataLoss: damaged since.
  absl::StatusOr<std::string> read(Position position) const;
  // Nothing before this segment is needed: its predecessors are deleted soon, the one being written never.
  void forget_before(uint32_t segment);
  // What all durable records add up to.
  v1::LogSnapshot state() const;
  uint32_t active_segment() const;

 private:
  struct Pending {
    std::vector<Record> records;
    Done done;
    size_t bytes = 0;  // framed
  };
  class File;  // owns a descriptor

  TrajectoryLog(Options options, Logger logger);
  std::string path(uint32_t segment) const;
  absl::Status replay(const Visitor& visitor);
  absl::Status replay_segment(uint32_t segment, bool first, bool last, const Visitor& visitor);
  absl::Status replay_snapshot(uint32_t segment, bool first, std::string_view payload);
  absl::Status cut_tail(uint32_t segment, std::string_view data, int64_t offset, const std::string& problem);
  absl::Status start_segment(uint32_t segment);
  absl::Status write(std::string_view bytes);
  void run();
  void write_batch(std::vector<Pending> batch);
  void delete_forgotten(uint32_t below);

  const Options options_;
  const Logger logger_;
  std::unique_ptr<File> lock_, directory_;

  // Of the writer's thread once it runs.
  std::unique_ptr<File> file_;  // the segment being written
  int64_t size_ = 0;            // its durable bytes
  bool dirty_ = false;          // there may be bytes behind them
  uint32_t oldest_ = 1;

  mutable absl::Mutex mutex_;
  std::deque<Pending> queue_ ABSL_GUARDED_BY(mutex_);
  uint32_t segment_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t forget_before_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::LogSnapshot state_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;

  std::jthread writer_;
};

}  // namespace slipstream::gateway
