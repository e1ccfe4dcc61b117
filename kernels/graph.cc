#include "kernels/graph.h"

#include <utility>

#include "common/check.h"
#include "kernels/cuda/runtime.h"

namespace slipstream::kernels {

Graph::~Graph() {
  if (handle_ != nullptr) cuda::destroy_graph(handle_);
}

Graph::Graph(Graph&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

Graph Graph::record(Stream& stream, absl::FunctionRef<void()> launches) {
  cuda::begin_recording(stream.cuda());
  launches();
  return Graph(cuda::end_recording(stream.cuda()));
}

void Graph::replay(Stream& stream) const {
  CHECK(handle_ != nullptr);
  cuda::launch_graph(handle_, stream.cuda());
}

}  // namespace slipstream::kernels
