#include "kernels/add/add.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const Add& args) {
  const Operands op("add");
  RETURN_IF_ERROR(expect_activation(op, "a", args.a, {-1, -1}));
  const int64_t tokens = args.a.size(0), hidden = args.a.size(1);
  RETURN_IF_ERROR(expect_activation(op, "b", args.b, {tokens, hidden}));
  return expect_activation(op, "y", args.y, {tokens, hidden});
}

absl::Status validate(const ColumnSum& args) {
  const Operands op("column_sum");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  return expect_tensor(op, "y", args.y, DType::kF32, {args.x.size(1)});
}

void reference(const Add& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.a.size(0); ++t) {
    for (int64_t h = 0; h < args.a.size(1); ++h) args.y.row(t)[h] = args.a.row(t)[h] + args.b.row(t)[h];
  }
}

void reference(const ColumnSum& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    for (int64_t h = 0; h < args.x.size(1); ++h) args.y.f32()[h] += args.x.row(t)[h];
  }
}

}  // namespace slipstream::kernels
