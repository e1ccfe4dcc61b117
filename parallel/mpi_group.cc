#include "parallel/mpi_group.h"

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

namespace slipstream::parallel {
namespace {

// Elements summed at a time: bounds the copies, and MPI's counts are int.
constexpr int64_t kChunk = 1 << 20;
constexpr int64_t kBroadcastBytes = 1 << 28;

// MPI's own waits spin. Peers here may be seconds apart (rank 0 waits for data), and a spinning rank takes a
// core from the one that works: so look a while, then sleep in growing steps.
void wait(MPI_Request* request) {
  constexpr int kLooks = 200;
  auto pause = std::chrono::microseconds(10);
  for (int looks = 0;; ++looks) {
    int done = 0;
    MPI_Test(request, &done, MPI_STATUS_IGNORE);
    if (done != 0) return;
    if (looks < kLooks) continue;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(1000));
  }
}

class MpiGroup final : public Group {
 public:
  explicit MpiGroup(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce_sum(const kernels::Tensor& values, kernels::Stream&) override {
    CHECK(values.dense());
    float* const data = values.f32();
    for (int64_t begin = 0; begin < values.numel(); begin += kChunk) {
      sum_chunk(data + begin, std::min(kChunk, values.numel() - begin));
    }
  }

  int64_t all_reduce_max(int64_t value) override {
    int64_t most = value;
    MPI_Request request;
    MPI_Iallreduce(&value, &most, 1, MPI_INT64_T, MPI_MAX, comm_, &request);
    wait(&request);
    return most;
  }

  void broadcast(std::string& bytes, int root) override {
    int64_t size = static_cast<int64_t>(bytes.size());
    MPI_Request request;
    MPI_Ibcast(&size, 1, MPI_INT64_T, root, comm_, &request);
    wait(&request);
    bytes.resize(static_cast<size_t>(size));
    for (int64_t begin = 0; begin < size; begin += kBroadcastBytes) {
      const int count = static_cast<int>(std::min(kBroadcastBytes, size - begin));
      MPI_Ibcast(bytes.data() + begin, count, MPI_BYTE, root, comm_, &request);
      wait(&request);
    }
  }

  void barrier() override {
    MPI_Request request;
    MPI_Ibarrier(comm_, &request);
    wait(&request);
  }

 private:
  // Each rank gets its slice from everybody, adds in rank order and hands the sum round. MPI_Allreduce may
  // add in an order that depends on size and placement.
  void sum_chunk(float* data, int64_t n) {
    const size_t ranks = static_cast<size_t>(size_);
    std::vector<int> counts(ranks), offsets(ranks), mine_counts(ranks), mine_offsets(ranks);
    for (int64_t r = 0; r < size_; ++r) {
      const int64_t begin = n * r / size_, end = n * (r + 1) / size_;
      offsets[static_cast<size_t>(r)] = static_cast<int>(begin);
      counts[static_cast<size_t>(r)] = static_cast<int>(end - begin);
    }
    const int mine = counts[static_cast<size_t>(rank_)];
    for (size_t r = 0; r < ranks; ++r) {
      mine_counts[r] = mine;
      mine_offsets[r] = static_cast<int>(r) * mine;
    }
    parts_.resize(std::max<size_t>(1, ranks * static_cast<size_t>(mine)));
    MPI_Request request;
    MPI_Ialltoallv(data, counts.data(), offsets.data(), MPI_FLOAT, parts_.data(), mine_counts.data(),
                   mine_offsets.data(), MPI_FLOAT, comm_, &request);
    wait(&request);
    for (int i = 0; i < mine; ++i) {
      float sum = parts_[static_cast<size_t>(i)];
      for (size_t r = 1; r < ranks; ++r)
        sum += parts_[r * static_cast<size_t>(mine) + static_cast<size_t>(i)];
      parts_[static_cast<size_t>(i)] = sum;
    }
    MPI_Iallgatherv(parts_.data(), mine, MPI_FLOAT, data, counts.data(), offsets.data(), MPI_FLOAT, comm_,
                    &request);
    wait(&request);
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::vector<float> parts_;  // my slice as each rank has it
};

}  // namespace

absl::StatusOr<std::unique_ptr<MpiWorld>> MpiWorld::create() {
  int initialized = 0, provided = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0) return absl::FailedPreconditionError("MPI: already initialised in this process");
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  if (provided < MPI_THREAD_FUNNELED) {
    MPI_Finalize();
    return absl::FailedPreconditionError(
        absl::StrCat("MPI: thread support ", provided, ", expected MPI_THREAD_FUNNELED"));
  }
  return std::unique_ptr<MpiWorld>(new MpiWorld(std::make_unique<MpiGroup>(MPI_COMM_WORLD)));
}

MpiWorld::MpiWorld(std::unique_ptr<Group> group) : group_(std::move(group)) {}
MpiWorld::~MpiWorld() { MPI_Finalize(); }
Group& MpiWorld::group() { return *group_; }

void MpiWorld::abort(int exit_code) {
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::abort();
}

}  // namespace slipstream::parallel
