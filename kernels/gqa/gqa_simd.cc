#include "kernels/gqa/gqa.h"
#include "kernels/sparse_mla/attention.h"

namespace slipstream::kernels {

void launch(const Gqa& args, Stream& stream) {
  CHECK_OK(validate(args));
  attend({.q = args.q,
          .keys = args.k,
          .values = args.v,
          .sequences = args.sequences,
          .kv_heads = args.kv_heads,
          .indices = {},
          .counts = {},
          .scale = args.scale,
          .o = args.o,
          .lse = args.lse},
         stream);
}

void launch(const GqaBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  attend_backward({.forward = {.q = args.q,
                               .keys = args.k,
                               .values = args.v,
                               .sequences = args.sequences,
                               .kv_heads = args.kv_heads,
                               .indices = {},
                               .counts = {},
                               .scale = args.scale,
                               .o = args.o,
                               .lse = args.lse},
                   .d_o = args.d_o,
                   .dq = args.dq,
                   .dkeys = args.dk,
                   .dvalues = args.dv},
                  stream);
}

}  // namespace slipstream::kernels
