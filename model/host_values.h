// Values of a tensor on any device, in host memory.
#pragma once

#include <type_traits>
#include <vector>

#include "kernels/stream.h"

namespace slipstream::model {

// A dense tensor's values in row-major order: T is int32_t for i32, float for f32 and bf16. Waits for the stream.
template <class T>
std::vector<T> host_values(const kernels::Tensor& t, kernels::Stream& stream) {
  std::vector<T> out(static_cast<size_t>(t.numel()));
  if constexpr (std::is_same_v<T, float>) {
    if (t.dtype() == kernels::DType::kBf16) {
      std::vector<kernels::bf16> bits(out.size());
      stream.download(t, bits.data());
      for (size_t i = 0; i < bits.size(); ++i) out[i] = to_f32(bits[i]);
      return out;
    }
  }
  CHECK(t.dtype() == kernels::DTypeOf<T>::value);
  stream.download(t, out.data());
  return out;
}

}  // namespace slipstream::model
