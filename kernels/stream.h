// Stream: where operators run. On the CPU it is a team of threads that computes before launch() returns; on CUDA a queue,
// whose work runs in the order it was launched in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "common/status.h"
#include "kernels/arena.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// "cpu", "cuda" (the first) or "cuda:N". InvalidArgument: `"gpu", expected cpu, cuda or cuda:N`.
absl::StatusOr<Device> parse_device(const std::string& word);
std::string device_word(Device device);

// One thread's share of a CPU stream: its index and memory for the duration of one task.
class Worker {
 public:
  Worker(int index, int64_t scratch_bytes);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  int index() const { return index_; }
  // `count` uninitialised elements, 64-byte aligned; valid until the task (one call of parallel_for's function) returns.
  template <class T>
  T* scratch(int64_t count) {
    return static_cast<T*>(allocate(count * static_cast<int64_t>(sizeof(T))));
  }
  void reset() { used_ = 0; }

 private:
  void* allocate(int64_t bytes);

  int index_;
  char* base_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
};

// Rows a task should take when a row is this many values to read, change and write: about 5 us, below which waking a
// thread costs more than it saves. Plain copies take twice as many values.
inline int64_t task_rows(int64_t row_values, int64_t task_values = 16384) { return task_values / (row_values + 1) + 1; }

// One thread drives a stream. Work split by parallel_for must not depend on the split: which thread runs which
// range is not fixed, and neither is the number of threads.
class Stream {
 public:
  // threads: 1..256, the calling thread included. InvalidArgument otherwise.
  static absl::StatusOr<std::unique_ptr<Stream>> create_cpu(int threads);
  // workspace_bytes: device memory for what an operator needs while it runs. Makes the device the calling thread's.
  // Unimplemented: built without CUDA. NotFound: no such device. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<Stream>> create_cuda(int32_t index, int64_t workspace_bytes = int64_t{1} << 28);
  // Either, by device; threads for the CPU.
  static absl::StatusOr<std::unique_ptr<Stream>> create(Device device, int threads);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device device() const { return device_; }
  bool on_cuda() const { return device_.kind == DeviceKind::kCuda; }
  // To be called by a thread other than the creator before it drives the stream.
  void adopt();
  void synchronize();  // returns when everything enqueued is done

  // Dense tensors between host memory and the stream's device, in the stream's order. upload: `from` may change once it
  // returns. download: returns when `to` is there.
  void upload(const void* from, const Tensor& to);
  void download(const Tensor& from, void* to);
  void zero(const Tensor& tensor);  // dense; enqueued

  // Of a CUDA stream. The workspace is for one launch at a time: take from it within an ArenaScope. As the queue keeps its
  // order, the next launch may have the same memory at once.
  void* cuda() const;  // the cudaStream_t
  Arena& workspace();
  // i32 [2] on the device, 0 whenever a launch begins: a launch that counts in them leaves them so.
  Tensor counters();

  // Of a CPU stream, as is parallel_for.
  int threads() const;

  using Task = absl::FunctionRef<void(int64_t begin, int64_t end, Worker& worker)>;
  // Calls task on disjoint ranges that cover [0, n), at most `grain` long each, and returns when all are done.
  // Not re-entrant: a task must not call parallel_for.
  void parallel_for(int64_t n, int64_t grain, Task task);

 private:
  struct Team;
  struct Queue;
  Stream(std::unique_ptr<Team> team, std::unique_ptr<Queue> queue, Device device);
  std::unique_ptr<Team> team_;    // on the CPU
  std::unique_ptr<Queue> queue_;  // on CUDA
  Device device_;
};

}  // namespace slipstream::kernels
