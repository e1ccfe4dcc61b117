// The CUDA form of an operator: launch() of <op>_simd.cc hands over to it on a CUDA stream. Where a header says f32 and
// validate() asks for an activation, CUDA takes bf16 too, for all activations of the call; sums, and what is no activation,
// stay f32.
#pragma once

#include "kernels/stream.h"

namespace slipstream::kernels {

#ifdef SLIPSTREAM_CUDA_FORM  // of an operator's own files, when its .cu is compiled
// Enqueues. Specialised in the operator's .cu, which alone includes CUDA; the arguments are validated.
template <class Op>
void launch_cuda(const Op& args, Stream& stream);
#else
template <class Op>
void launch_cuda(const Op&, Stream&) {
  CHECK(false && "this operator has no CUDA form in this build");
}
#endif

}  // namespace slipstream::kernels
