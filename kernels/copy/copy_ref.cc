#include "kernels/bf16.h"
#include "kernels/copy/copy.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const Copy& args) {
  const Operands op("copy");
  RETURN_IF_ERROR(expect_activation(op, "from", args.from, {-1, -1, -1}));
  return expect_weight(op, "to", args.to, {args.from.size(0), args.from.size(1), args.from.size(2)});
}

void reference(const Copy& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.from.size(0); ++t) {
    for (int64_t j = 0; j < args.from.size(1); ++j) {
      for (int64_t i = 0; i < args.from.size(2); ++i) {
        const float value = args.from.row(t)[j * args.from.stride(1) + i];
        const int64_t at = t * args.to.stride(0) + j * args.to.stride(1) + i;
        if (args.to.dtype() == DType::kBf16) {
          args.to.bf()[at] = to_bf16(value);
        } else {
          args.to.f32()[at] = value;
        }
      }
    }
  }
}

}  // namespace slipstream::kernels
