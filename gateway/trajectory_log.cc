#include "gateway/trajectory_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>

#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/records.h"

namespace slipstream::gateway {
namespace {

constexpr int64_t kSegmentBytesMax = int64_t{1} << 30;

absl::Status file_error(int error, const std::string& what) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC: case EDQUOT: case EFBIG: return absl::ResourceExhaustedError(message);
    case EACCES: case EPERM: case EROFS: return absl::PermissionDeniedError(message);
    case ENOENT: return absl::NotFoundError(message);
    default: return absl::UnavailableError(message);
  }
}

void frame(const Record& record, std::string* out) { append_record(static_cast<uint8_t>(record.type), record.payload, out); }

FramedRecord parse_frame(std::string_view data, int64_t offset) {
  return parse_record(data, offset, static_cast<uint8_t>(RecordType::kLearner));
}

// Whether an intact record starts anywhere from `offset` on. Gives up (nullopt) after reading 8 GiB for checksums: bytes
// that look like headers of long records are rare but cost a pass each.
std::optional<bool> has_record_after(std::string_view data, int64_t offset) {
  int64_t budget = int64_t{8} << 30;
  for (; offset + kRecordHeaderBytes < static_cast<int64_t>(data.size()); ++offset) {
    const FramedRecord framed = parse_frame(data, offset);
    if (framed.problem.empty()) return true;
    if (framed.problem == "checksum differs") budget -= record_length(data.substr(static_cast<size_t>(offset)));
    if (budget < 0) return std::nullopt;
  }
  return false;
}

void count_delivered(const v1::LogDelivered& delivered, v1::LogSnapshot* state) {
  constexpr int64_t kStepsMax = 4096;
  const int64_t oldest = std::max(state->first_step_at_version(), delivered.step() - kStepsMax + 1);
  auto* sizes = state->mutable_delivered_at_version();
  for (auto entry = sizes->begin(); entry != sizes->end();) {
    // Later steps: of an earlier life of the learner, which is at them again.
    const bool gone = entry->first < oldest || entry->first > delivered.step();
    entry = gone ? sizes->erase(entry) : std::next(entry);
  }
  (*sizes)[delivered.step()] = delivered.trajectories();
}

}  // namespace

absl::Status apply(RecordType type, std::string_view payload, v1::LogSnapshot* state) {
  const auto parse = [&](google::protobuf::Message* message) {
    return message->ParseFromArray(payload.data(), static_cast<int>(payload.size()))
               ? absl::OkStatus()
               : absl::InvalidArgumentError(absl::StrCat("payload of record type ", static_cast<int>(type), " is damaged"));
  };
  switch (type) {
    case RecordType::kSnapshot: return absl::InvalidArgumentError("a snapshot amid a segment");
    case RecordType::kGroup: {
      v1::LogGroup group;
      RETURN_IF_ERROR(parse(&group));
      auto* unopened = state->mutable_unopened_groups();
      if (group.group_number() < state->next_group_number()) {
        unopened->erase(std::remove(unopened->begin(), unopened->end(), group.group_number()), unopened->end());
        return absl::OkStatus();
      }
      for (uint64_t n = state->next_group_number(); n < group.group_number(); ++n) unopened->Add(n);
      state->set_next_group_number(group.group_number() + 1);
      return absl::OkStatus();
    }
    case RecordType::kTrajectory: state->set_produced(state->produced() + 1); return absl::OkStatus();
    case RecordType::kSettled: {
      v1::LogSettled settled;
      RETURN_IF_ERROR(parse(&settled));
      if (settled.reason().empty()) {
        state->set_trained(state->trained() + settled.rollout_ids_size());
      } else {
        (*state->mutable_dropped())[settled.reason()] += settled.rollout_ids_size();
      }
      return absl::OkStatus();
    }
    case RecordType::kDelivered: {
      v1::LogDelivered delivered;
      RETURN_IF_ERROR(parse(&delivered));
      if (!state->rollouts_begun() || state->policy_version() != delivered.policy_version() ||
          delivered.step() < state->first_step_at_version()) {
        state->set_first_step_at_version(delivered.step());
      }
      state->set_rollouts_begun(true);
      state->set_step(delivered.step());
      state->set_policy_version(delivered.policy_version());
      count_delivered(delivered, state);
      return absl::OkStatus();
    }
    case RecordType::kLearner: {
      v1::LogLearner learner;
      RETURN_IF_ERROR(parse(&learner));
      state->set_incarnation(learner.incarnation());
      state->set_committed_step(std::max(state->committed_step(), learner.committed_step()));
      state->set_final(learner.final());
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("record type ", static_cast<int>(type)));
}

class TrajectoryLog::File {
 public:
  static absl::StatusOr<std::unique_ptr<File>> open(const std::string& path, int flags) {
    const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
    if (fd < 0) return file_error(errno, path);
    return std::unique_ptr<File>(new File(fd, path));
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }
  absl::Status write(std::string_view bytes, int64_t offset) {
    while (!bytes.empty()) {
      const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), offset);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return file_error(written < 0 ? errno : EIO, path_);
      bytes.remove_prefix(written);
      offset += written;
    }
    return absl::OkStatus();
  }
  absl::Status read(char* out, int64_t size, int64_t offset) const {
    while (size > 0) {
      const ssize_t got = ::pread(fd_, out, size, offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return file_error(errno, path_);
      if (got == 0) return absl::DataLossError(absl::StrCat(path_, ": offset ", offset, ": the file ends here"));
      out += got;
      offset += got;
      size -= got;
    }
    return absl::OkStatus();
  }
  absl::StatusOr<int64_t> size() const {
    struct stat status;
    if (::fstat(fd_, &status) != 0) return file_error(errno, path_);
    return status.st_size;
  }
  absl::Status sync() { return ::fdatasync(fd_) == 0 ? absl::OkStatus() : file_error(errno, path_ + ": sync"); }
  absl::Status truncate(int64_t size) {
    return ::ftruncate(fd_, size) == 0 ? absl::OkStatus() : file_error(errno, path_ + ": truncate");
  }

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  const int fd_;
  const std::string path_;
};

TrajectoryLog::TrajectoryLog(Options options, Logger logger) : options_(std::move(options)), logger_(std::move(logger)) {}

std::string TrajectoryLog::path(uint32_t segment) const {
  return absl::StrFormat("%s/%08u.log", options_.directory, segment);
}

absl::StatusOr<std::unique_ptr<TrajectoryLog>> TrajectoryLog::open(const Options& options, Logger logger,
                                                                   const Visitor& visitor) {
  std::error_code error;
  std::filesystem::create_directories(options.directory, error);
  if (error) return file_error(error.value(), options.directory);
  Options bounded = options;
  bounded.segment_bytes = std::min(options.segment_bytes, kSegmentBytesMax);
  std::unique_ptr<TrajectoryLog> log(new TrajectoryLog(bounded, std::move(logger)));
  ASSIGN_OR_RETURN(log->directory_, File::open(options.directory, O_RDONLY | O_DIRECTORY));
  ASSIGN_OR_RETURN(log->lock_, File::open(options.directory + "/lock", O_RDWR | O_CREAT));
  if (::flock(log->lock_->fd(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(options.directory, ": another gateway has this log open"));
  }
  RETURN_IF_ERROR(log->replay(visitor));
  log->writer_ = std::jthread([raw = log.get()] { raw->run(); });
  return log;
}

TrajectoryLog::~TrajectoryLog() {
  {
    const absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  if (writer_.joinable()) writer_.join();
}

absl::Status TrajectoryLog::replay(const Visitor& visitor) {
  std::vector<uint32_t> segments;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(options_.directory, error)) {
    const std::string name = entry.path().filename();
    const bool ours = name.size() == 12 && name.ends_with(".log") &&
                      std::all_of(name.begin(), name.begin() + 8, [](char c) { return c >= '0' && c <= '9'; });
    if (ours) segments.push_back(static_cast<uint32_t>(std::stoul(name.substr(0, 8))));
  }
  if (error) return file_error(error.value(), options_.directory);
  std::sort(segments.begin(), segments.end());
  if (segments.empty()) return start_segment(1);
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i] != segments[0] + i) {
      return absl::DataLossError(absl::StrCat(path(segments[0] + i), ": missing, but ", path(segments[i]), " exists"));
    }
  }
  oldest_ = segments.front();
  for (const uint32_t segment : segments) {
    RETURN_IF_ERROR(replay_segment(segment, segment == segments.front(), segment == segments.back(), visitor));
  }
  return absl::OkStatus();
}

absl::Status TrajectoryLog::replay_segment(uint32_t segment, bool first, bool last, const Visitor& visitor) {
  ASSIGN_OR_RETURN(file_, File::open(path(segment), O_RDWR));
  ASSIGN_OR_RETURN(const int64_t size, file_->size());
  std::string data(size, '\0');
  RETURN_IF_ERROR(file_->read(data.data(), size, 0));
  size_ = 0;
  {
    const absl::MutexLock lock(&mutex_);
    segment_ = segment;
  }
  while (size_ < size) {
    const FramedRecord framed = parse_frame(data, size_);
    if (!framed.problem.empty()) {
      if (last) {
        RETURN_IF_ERROR(cut_tail(segment, data, size_, framed.problem));
        break;
      }
      return absl::DataLossError(absl::StrCat(path(segment), ": offset ", size_, ": ", framed.problem));
    }
    const auto type = static_cast<RecordType>(framed.type);
    const std::string_view payload = framed.payload;
    absl::Status status;
    if (size_ == 0) {
      status = type == RecordType::kSnapshot ? replay_snapshot(segment, first, payload)
                                             : absl::DataLossError("the segment does not start with a snapshot");
    } else {
      const absl::MutexLock lock(&mutex_);
      status = apply(type, payload, &state_);
    }
    if (status.ok() && (size_ > 0 || first)) status = visitor(type, payload, uint64_t{segment} << 32 | static_cast<uint64_t>(size_));
    if (!status.ok()) {
      return absl::DataLossError(absl::StrCat(path(segment), ": offset ", size_, ": ", std::string(status.message())));
    }
    size_ += framed.bytes();
  }
  if (size_ > 0) return absl::OkStatus();
  // Killed between making the file and writing its first record.
  if (first && segment > 1) return absl::DataLossError(absl::StrCat(path(segment), ": offset 0: empty, and nothing before it"));
  if (!last) return absl::DataLossError(absl::StrCat(path(segment), ": offset 0: empty, but there are newer segments"));
  return start_segment(segment);
}

absl::Status TrajectoryLog::replay_snapshot(uint32_t segment, bool first, std::string_view payload) {
  v1::LogSnapshot snapshot;
  if (!snapshot.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return absl::DataLossError("the snapshot is damaged");
  }
  const absl::MutexLock lock(&mutex_);
  if (first) {
    state_ = snapshot;
    return absl::OkStatus();
  }
  if (snapshot.produced() == state_.produced() && snapshot.trained() == state_.trained() &&
      snapshot.next_group_number() == state_.next_group_number()) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("the snapshot has ", snapshot.produced(), " trajectories, ", snapshot.trained(),
                                          " trained; the segments before ", segment, " have ", state_.produced(), ", ",
                                          state_.trained()));
}

// What a killed process or machine leaves is damaged up to the end: one intact record behind the damage, and it is another
// kind of damage, and cutting there would lose what was acknowledged.
absl::Status TrajectoryLog::cut_tail(uint32_t segment, std::string_view data, int64_t offset, const std::string& problem) {
  const std::string where = absl::StrCat(path(segment), ": offset ", offset, ": ", problem);
  const std::optional<bool> more = has_record_after(data, offset + 1);
  if (!more.has_value() || *more) {
    return absl::DataLossError(absl::StrCat(where, *more ? ", and intact records follow" : ", and intact records may follow"));
  }
  logger_->warn("{}: the last {} bytes were not written to the end; cut off", where, data.size() - offset);
  RETURN_IF_ERROR(file_->truncate(offset));
  return file_->sync();
}

absl::Status TrajectoryLog::start_segment(uint32_t segment) {
  if (segment == 1) {  // a new log
    std::random_device random;
    const absl::MutexLock lock(&mutex_);
    state_.set_log_id(absl::StrFormat("%08x%08x", random(), random()));
    state_.mutable_settings()->insert(options_.settings.begin(), options_.settings.end());
  }
  ASSIGN_OR_RETURN(std::unique_ptr<File> file, File::open(path(segment), O_RDWR | O_CREAT | O_TRUNC));
  std::string bytes;
  frame({RecordType::kSnapshot, state().SerializeAsString()}, &bytes);
  absl::Status status = file->write(bytes, 0);
  if (status.ok()) status = file->sync();
  if (status.ok()) status = directory_->sync();
  if (!status.ok()) {
    ::unlink(path(segment).c_str());
    return status;
  }
  file_ = std::move(file);
  size_ = static_cast<int64_t>(bytes.size());
  const absl::MutexLock lock(&mutex_);
  segment_ = segment;
  return absl::OkStatus();
}

uint32_t TrajectoryLog::append(std::vector<Record> records, Done done) {
  size_t bytes = 0;
  for (const Record& record : records) bytes += kRecordHeaderBytes + 1 + record.payload.size();
  const absl::MutexLock lock(&mutex_);
  queue_.push_back({std::move(records), std::move(done), bytes});
  return segment_;
}

void TrajectoryLog::forget_before(uint32_t segment) {
  const absl::MutexLock lock(&mutex_);
  forget_before_ = std::max(forget_before_, segment);
}

v1::LogSnapshot TrajectoryLog::state() const {
  const absl::MutexLock lock(&mutex_);
  return state_;
}

uint32_t TrajectoryLog::active_segment() const {
  const absl::MutexLock lock(&mutex_);
  return segment_;
}

void TrajectoryLog::run() {
  uint32_t forgotten = 0;
  while (true) {
    std::vector<Pending> batch;
    uint32_t below = 0;
    {
      const auto work = [this, &forgotten]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !queue_.empty() || stop_ || forget_before_ > forgotten;
      };
      const absl::MutexLock lock(&mutex_, absl::Condition(&work));
      // Everything that waits shares one sync, as far as it fits the segment.
      int64_t room = size_ < options_.segment_bytes ? options_.segment_bytes - size_ : options_.segment_bytes;
      while (!queue_.empty() && (batch.empty() || room > 0)) {
        room -= static_cast<int64_t>(queue_.front().bytes);
        batch.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
      if (batch.empty() && forget_before_ <= forgotten) return;  // told to stop, and nothing is left to do
      forgotten = std::max(forgotten, forget_before_);
      below = std::min(forget_before_, segment_);
    }
    if (!batch.empty()) write_batch(std::move(batch));
    delete_forgotten(below);
  }
}

void TrajectoryLog::write_batch(std::vector<Pending> batch) {
  absl::Status status;
  if (size_ >= options_.segment_bytes) {
    const uint32_t next = active_segment() + 1;
    status = dirty_ ? file_->truncate(size_) : absl::OkStatus();
    if (status.ok()) dirty_ = false;
    if (status.ok()) status = start_segment(next);
  }
  const auto too_long = [](const Pending& pending) {
    return std::any_of(pending.records.begin(), pending.records.end(), [](const Record& record) {
      return static_cast<int64_t>(record.payload.size()) >= kRecordBytesMax;
    });
  };
  std::string bytes;
  std::vector<std::vector<Position>> positions(batch.size());
  const uint64_t base = uint64_t{active_segment()} << 32;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (too_long(batch[i])) continue;
    for (const Record& record : batch[i].records) {
      positions[i].push_back(base | static_cast<uint64_t>(size_ + static_cast<int64_t>(bytes.size())));
      frame(record, &bytes);
    }
  }
  if (status.ok()) status = write(bytes);
  if (status.ok()) {
    v1::LogSnapshot next = state();
    for (const Pending& pending : batch) {
      if (too_long(pending)) continue;
      for (const Record& record : pending.records) CHECK_OK(apply(record.type, record.payload, &next));
    }
    const absl::MutexLock lock(&mutex_);
    state_ = std::move(next);
  } else {
    logger_->error("trajectory log: {}", std::string(status.message()));
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].done == nullptr) continue;
    if (too_long(batch[i])) {
      batch[i].done(absl::InvalidArgumentError(absl::StrCat("a record of more than ", kRecordBytesMax, " bytes")));
    } else if (status.ok()) {
      batch[i].done(std::move(positions[i]));
    } else {
      batch[i].done(status);
    }
  }
}

// A failed write leaves nothing behind: half a record amid the file would be damage to the next reader. Whatever a failed
// sync wrote is not trusted either and is written again by whoever repeats the append.
absl::Status TrajectoryLog::write(std::string_view bytes) {
  if (dirty_) RETURN_IF_ERROR(file_->truncate(size_));
  dirty_ = true;
  absl::Status status = file_->write(bytes, size_);
  if (status.ok()) status = file_->sync();
  if (status.ok()) {
    size_ += static_cast<int64_t>(bytes.size());
    dirty_ = false;
  } else if (file_->truncate(size_).ok()) {
    dirty_ = false;
  }
  return status;
}

void TrajectoryLog::delete_forgotten(uint32_t below) {
  if (oldest_ >= below) return;
  for (; oldest_ < below; ++oldest_) {
    if (::unlink(path(oldest_).c_str()) != 0 && errno != ENOENT) {
      logger_->warn("{}: cannot be deleted: {}", path(oldest_), std::strerror(errno));
      break;
    }
  }
  if (const absl::Status status = directory_->sync(); !status.ok()) {
    logger_->warn("trajectory log: {}", std::string(status.message()));
  }
}

absl::StatusOr<std::string> TrajectoryLog::read(Position position) const {
  const uint32_t segment = segment_of(position);
  const auto offset = static_cast<int64_t>(position & 0xffffffff);
  ASSIGN_OR_RETURN(const std::unique_ptr<File> file, File::open(path(segment), O_RDONLY));
  std::string bytes(kRecordHeaderBytes, '\0');
  RETURN_IF_ERROR(file->read(bytes.data(), kRecordHeaderBytes, offset));
  const int64_t length = record_length(bytes);
  if (length <= kRecordBytesMax) {
    bytes.resize(kRecordHeaderBytes + length);
    RETURN_IF_ERROR(file->read(bytes.data() + kRecordHeaderBytes, length, offset + kRecordHeaderBytes));
  }
  const FramedRecord framed = parse_frame(bytes, 0);
  if (!framed.problem.empty()) {
    return absl::DataLossError(absl::StrCat(path(segment), ": offset ", offset, ": ", framed.problem));
  }
  return std::string(framed.payload);
}

}  // namespace slipstream::gateway
