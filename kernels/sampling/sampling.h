// Sampling the next token: temperature, then top-k, top-p and min-p truncation, then a draw by a counter-based random
// number. The same (seed, counter) and logits give the same token in any batch, on any machine.
// Philox4x32-10: Salmon et al. 2011, doi:10.1145/2063384.2063405.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct SamplingRow {
  float temperature = 1.0f;  // >= 0; 0: the largest logit, ties to the lower id
  int32_t top_k = 0;         // keep the k most probable tokens; 0: all
  float top_p = 1.0f;        // keep the most probable tokens until their sum reaches top_p (that one included); (0, 1]
  float min_p = 0.0f;        // keep tokens with p >= min_p * max p; [0, 1)
  uint64_t seed = 0;         // of the request
  uint64_t counter = 0;      // position of the token to draw in its sequence
};

// The log-prob is that of the sampled token under softmax(logits / temperature) over the whole vocabulary (temperature 0:
// under softmax(logits)), in the arithmetic of LogProb, bit for bit. truncated is 1 when top-k, top-p or min-p removed any
// token of finite logit from the draw, or the temperature was 0: the draw then came from another distribution.
//
// Filters apply in the order top-k, top-p (on the distribution renormalised after top-k), min-p. Equal logits rank by
// ascending id. The token is the first, by id, at which the sum of the kept probabilities exceeds u times their total,
// u = uniform_at(seed, counter).
struct Sampling {
  Tensor logits;            // in   [T, V] f32
  const SamplingRow* rows;  // in   [T]
  Tensor tokens;            // out  [T] i32; -1 when the row has no finite logit, a NaN or a plus infinity
  Tensor logprob;           // out  [T] f32; NaN where the token is -1
  Tensor truncated;         // out  [T] i32, 0 or 1
};

// A uniform number in [0, 1) with 24 random bits, by Philox4x32-10 keyed with `seed` at block `counter`.
float uniform_at(uint64_t seed, uint64_t counter);

// InvalidArgument: shapes or dtypes disagree, or a row's parameter is out of range. Unimplemented: no code for this device.
absl::Status validate(const Sampling& args);

// The definition: plain loops over CPU tensors.
void reference(const Sampling& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Sampling& args, Stream& stream);

}  // namespace slipstream::kernels
