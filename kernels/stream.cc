#include "kernels/stream.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "kernels/cuda/runtime.h"

namespace slipstream::kernels {
namespace {

// Address space only: pages are committed when first touched, so a large bound costs nothing until it is used.
constexpr int64_t kScratchBytesMax = int64_t{1} << 34;
// A worker looks for new work this many times before it sleeps: kernels follow one another within microseconds.
constexpr int kSpins = 4000;
// Pinned memory that uploads pass through. A step's integers are kilobytes: the queue is waited for once in many steps.
constexpr int64_t kStagingBytes = int64_t{1} << 25;
// Addresses: memory stands behind what was ever used. The backward of attention cuts queries into rounds by what it finds here.
constexpr int64_t kWorkspaceBytes = int64_t{1} << 31;

}  // namespace

Worker::Worker(int index, int64_t scratch_bytes) : index_(index), capacity_(scratch_bytes) {
  void* base = mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(base != MAP_FAILED);
  base_ = static_cast<char*>(base);
}

Worker::~Worker() { munmap(base_, static_cast<size_t>(capacity_)); }

void* Worker::allocate(int64_t bytes) {
  CHECK_GE(bytes, 0);
  void* result = base_ + used_;
  used_ += (bytes + 63) / 64 * 64;
  CHECK_LE(used_, capacity_);
  return result;
}

// Fork-join over an atomic counter. The calling thread works too, and waits only for helpers that have joined: one that is
// asleep or preempted costs nothing. `state` is all of it: bit 0 says the job is open, the next fifteen bits count the
// helpers inside it, the rest numbers the jobs.
struct Stream::Team {
  static constexpr uint64_t kOpen = 1, kHelper = 2, kJob = 1 << 16;

  std::vector<std::unique_ptr<Worker>> workers;  // [0] is the calling thread
  std::atomic<uint64_t> state{0};
  std::atomic<int64_t> next{0};
  std::atomic<bool> stopping{false};
  // Of the open job. Written while no helper is inside.
  int64_t n = 0;
  int64_t grain = 1;
  const Task* task = nullptr;
  std::vector<std::jthread> helpers;

  static bool busy(uint64_t state) { return (state & (kJob - 1)) >= kHelper; }

  void work(Worker& worker) {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      worker.reset();
      (*task)(begin, std::min(begin + grain, n), worker);
    }
  }

  void help(Worker& worker) noexcept {
    uint64_t done = 0;  // the last job this helper joined or came too late for
    for (;;) {
      uint64_t now = state.load(std::memory_order_acquire);
      for (int spin = 0; spin < kSpins && now / kJob == done; ++spin) {
        __builtin_ia32_pause();
        now = state.load(std::memory_order_acquire);
      }
      if (stopping.load(std::memory_order_acquire)) return;
      if (now / kJob == done) {
        state.wait(now, std::memory_order_acquire);
        continue;
      }
      if ((now & kOpen) == 0) {
        done = now / kJob;
        continue;
      }
      if (!state.compare_exchange_weak(now, now + kHelper, std::memory_order_acq_rel)) continue;
      done = now / kJob;
      work(worker);
      state.fetch_sub(kHelper, std::memory_order_acq_rel);
      state.notify_all();
    }
  }

  void run(int64_t count, int64_t length, const Task& job) {
    n = count;
    grain = length;
    task = &job;
    next.store(0, std::memory_order_relaxed);
    const uint64_t number = state.load(std::memory_order_relaxed) / kJob + 1;
    state.store(number * kJob + kOpen, std::memory_order_release);
    state.notify_all();
    work(*workers[0]);
    uint64_t now = state.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int spin = 0; busy(now); ++spin) {
      if (spin < kSpins) {
        __builtin_ia32_pause();
      } else {
        state.wait(now, std::memory_order_acquire);
      }
      now = state.load(std::memory_order_acquire);
    }
  }
};

absl::StatusOr<std::unique_ptr<Stream>> Stream::create_cpu(int threads) {
  if (threads < 1 || threads > 256) {
    return absl::InvalidArgumentError(absl::StrCat("threads: ", threads, ", expected 1..256"));
  }
  auto team = std::make_unique<Team>();
  for (int i = 0; i < threads; ++i) team->workers.push_back(std::make_unique<Worker>(i, kScratchBytesMax));
  Team* shared = team.get();
  for (int i = 1; i < threads; ++i) {
    team->helpers.emplace_back([shared, i] { shared->help(*shared->workers[static_cast<size_t>(i)]); });
  }
  return std::unique_ptr<Stream>(new Stream(std::move(team), nullptr, Device{}));
}

constexpr int64_t kCounters = 2;

struct Stream::Queue {
  void* stream = nullptr;
  char* staging = nullptr;
  int64_t staged = 0;  // bytes of `staging` that copies under way may still read
  Arena workspace;
  void* counters = nullptr;

  explicit Queue(Arena arena) : workspace(std::move(arena)) {}
  ~Queue() {
    if (stream != nullptr) cuda::destroy_stream(stream);
    if (staging != nullptr) cuda::release_pinned(staging);
    if (counters != nullptr) cuda::release(counters);
  }
};

absl::StatusOr<std::unique_ptr<Stream>> Stream::create_cuda(int32_t index, int64_t workspace_bytes) {
  ASSIGN_OR_RETURN(Arena workspace, Arena::create_cuda(index, workspace_bytes));
  auto queue = std::make_unique<Queue>(std::move(workspace));
  ASSIGN_OR_RETURN(queue->stream, cuda::create_stream());
  ASSIGN_OR_RETURN(void* const staging, cuda::allocate_pinned(kStagingBytes));
  queue->staging = static_cast<char*>(staging);
  ASSIGN_OR_RETURN(queue->counters, cuda::allocate(kCounters * size_of(DType::kI32)));
  cuda::zero(queue->counters, kCounters * size_of(DType::kI32), queue->stream);
  return std::unique_ptr<Stream>(new Stream(nullptr, std::move(queue), Device{DeviceKind::kCuda, index}));
}

absl::StatusOr<std::unique_ptr<Stream>> Stream::create(Device device, int threads) {
  return device.kind == DeviceKind::kCuda ? create_cuda(device.index, kWorkspaceBytes) : create_cpu(threads);
}

absl::StatusOr<Device> parse_device(const std::string& word) {
  if (word == "cpu") return Device{};
  if (word == "cuda") return Device{DeviceKind::kCuda, 0};
  int32_t index = 0;
  if (word.starts_with("cuda:") && absl::SimpleAtoi(word.substr(5), &index) && index >= 0) {
    return Device{DeviceKind::kCuda, index};
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", word, "\", expected cpu, cuda or cuda:N"));
}

std::string device_word(Device device) {
  return device.kind == DeviceKind::kCuda ? absl::StrCat("cuda:", device.index) : "cpu";
}

Stream::Stream(std::unique_ptr<Team> team, std::unique_ptr<Queue> queue, Device device)
    : team_(std::move(team)), queue_(std::move(queue)), device_(device) {}

void* Stream::cuda() const {
  CHECK(on_cuda());
  return queue_->stream;
}

Arena& Stream::workspace() {
  CHECK(on_cuda());
  return queue_->workspace;
}

Tensor Stream::counters() {
  CHECK(on_cuda());
  return Tensor(queue_->counters, DType::kI32, {kCounters}, device_);
}

void Stream::adopt() {
  if (on_cuda()) CHECK_OK(cuda::select_device(device_.index));
}

void Stream::synchronize() {
  if (!on_cuda()) return;
  cuda::synchronize(queue_->stream);
  queue_->staged = 0;
}

void Stream::upload(const void* from, const Tensor& to) {
  CHECK(to.dense() && to.device() == device_);
  if (to.numel() == 0) return;
  if (!on_cuda()) {
    std::memcpy(to.raw(), from, static_cast<size_t>(to.bytes()));
    return;
  }
  CHECK(!cuda::recording(queue_->stream));  // a replay would copy what staging memory holds by then
  for (int64_t done = 0; done < to.bytes();) {
    if (queue_->staged == kStagingBytes) synchronize();
    const int64_t count = std::min(to.bytes() - done, kStagingBytes - queue_->staged);
    char* const staging = queue_->staging + queue_->staged;
    std::memcpy(staging, static_cast<const char*>(from) + done, static_cast<size_t>(count));
    cuda::copy(static_cast<char*>(to.raw()) + done, staging, count, queue_->stream);
    queue_->staged += count;
    done += count;
  }
}

void Stream::download(const Tensor& from, void* to) {
  CHECK(from.dense() && from.device() == device_);
  if (from.numel() == 0) return;
  if (!on_cuda()) {
    std::memcpy(to, from.raw(), static_cast<size_t>(from.bytes()));
    return;
  }
  cuda::copy(to, from.raw(), from.bytes(), queue_->stream);
  synchronize();
}

void Stream::zero(const Tensor& tensor) {
  CHECK(tensor.dense() && tensor.device() == device_);
  if (tensor.numel() == 0) return;
  if (on_cuda()) {
    cuda::zero(tensor.raw(), tensor.bytes(), queue_->stream);
  } else {
    std::memset(tensor.raw(), 0, static_cast<size_t>(tensor.bytes()));
  }
}

Stream::~Stream() {
  if (on_cuda()) {
    synchronize();
    return;
  }
  team_->stopping.store(true, std::memory_order_release);
  team_->state.fetch_add(Team::kJob, std::memory_order_acq_rel);
  team_->state.notify_all();
  team_->helpers.clear();  // joins
}

int Stream::threads() const {
  CHECK(!on_cuda());
  return static_cast<int>(team_->workers.size());
}

void Stream::parallel_for(int64_t n, int64_t grain, Task task) {
  CHECK(!on_cuda());
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  Worker& self = *team_->workers[0];
  if (team_->helpers.empty() || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) {
      self.reset();
      task(begin, std::min(begin + grain, n), self);
    }
    return;
  }
  team_->run(n, grain, task);
}

}  // namespace slipstream::kernels
