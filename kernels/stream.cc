#include "kernels/stream.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace slipstream::kernels {
namespace {

// Address space only: pages are committed when first touched, so a large bound costs nothing until it is used.
constexpr int64_t kScratchBytesMax = int64_t{1} << 34;
// A worker looks for new work this many times before it sleeps: kernels follow one another within microseconds.
constexpr int kSpins = 4000;

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

// Fork-join over an atomic counter. `generation` announces a job, `next` hands out ranges, `running` counts the
// helpers still inside it.
struct Stream::Team {
  std::vector<std::unique_ptr<Worker>> workers;  // [0] is the calling thread
  std::atomic<uint64_t> generation{0};
  std::atomic<int64_t> next{0};
  std::atomic<int> running{0};
  std::atomic<bool> stopping{false};
  int64_t n = 0;
  int64_t grain = 1;
  const Task* task = nullptr;
  std::vector<std::jthread> helpers;

  void work(Worker& worker) {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      worker.reset();
      (*task)(begin, std::min(begin + grain, n), worker);
    }
  }

  void help(Worker& worker) noexcept {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation.load(std::memory_order_acquire) == seen; ++spin) {
        __builtin_ia32_pause();
      }
      generation.wait(seen, std::memory_order_acquire);
      seen = generation.load(std::memory_order_acquire);
      if (stopping.load(std::memory_order_acquire)) return;
      work(worker);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
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
  return std::unique_ptr<Stream>(new Stream(std::move(team)));
}

Stream::Stream(std::unique_ptr<Team> team) : team_(std::move(team)) {}

Stream::~Stream() {
  team_->stopping.store(true, std::memory_order_release);
  team_->generation.fetch_add(1, std::memory_order_acq_rel);
  team_->generation.notify_all();
  team_->helpers.clear();  // joins
}

int Stream::threads() const { return static_cast<int>(team_->workers.size()); }

void Stream::parallel_for(int64_t n, int64_t grain, Task task) {
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
  team_->n = n;
  team_->grain = grain;
  team_->task = &task;
  team_->next.store(0, std::memory_order_relaxed);
  team_->running.store(static_cast<int>(team_->helpers.size()), std::memory_order_relaxed);
  team_->generation.fetch_add(1, std::memory_order_release);
  team_->generation.notify_all();
  team_->work(self);
  for (int spin = 0; spin < kSpins && team_->running.load(std::memory_order_acquire) != 0; ++spin) {
    __builtin_ia32_pause();
  }
  for (int left = team_->running.load(std::memory_order_acquire); left != 0;
       left = team_->running.load(std::memory_order_acquire)) {
    team_->running.wait(left, std::memory_order_acquire);
  }
}

}  // namespace slipstream::kernels
