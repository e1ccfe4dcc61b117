// Graph: launches on a CUDA stream recorded once and replayed as one, for passes of many small kernels.
#pragma once

#include "absl/functional/function_ref.h"
#include "kernels/stream.h"

namespace slipstream::kernels {

class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  // Records what `launches` enqueues on the stream, without running it. The same must have run on this stream before, so that
  // arenas and kernels have what they need, and must neither upload, download nor wait. Addresses and host values stay what
  // they are at this moment; what lies in device memory is read anew by each replay.
  static Graph record(Stream& stream, absl::FunctionRef<void()> launches);

  void replay(Stream& stream) const;

 private:
  explicit Graph(void* handle) : handle_(handle) {}
  void* handle_ = nullptr;
};

}  // namespace slipstream::kernels
