#include <string>

#include "kernels/embedding/embedding.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

absl::Status expect_ids(const Operands& op, const Tensor& ids, int64_t vocab) {
  for (int64_t t = 0; t < ids.size(0) && on_host(ids); ++t) {
    const int32_t id = ids.i32()[t];
    if (id < 0 || id >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat(op.op(), ": ids[", t, "]: ", id, ", expected 0..", vocab - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status validate(const Embedding& args) {
  const Operands op("embedding");
  RETURN_IF_ERROR(expect_tensor(op, "ids", args.ids, DType::kI32, {-1}));
  RETURN_IF_ERROR(expect_weight(op, "table", args.table, {-1, -1}));
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {args.ids.size(0), args.table.size(1)}));
  return expect_ids(op, args.ids, args.table.size(0));
}

absl::Status validate(const EmbeddingBackward& args) {
  const Operands op("embedding_backward");
  RETURN_IF_ERROR(expect_tensor(op, "ids", args.ids, DType::kI32, {-1}));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {args.ids.size(0), -1}));
  RETURN_IF_ERROR(expect_tensor(op, "dtable", args.dtable, DType::kF32, {-1, args.dy.size(1)}));
  return expect_ids(op, args.ids, args.dtable.size(0));
}

void reference(const Embedding& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.ids.size(0); ++t) {
    const int64_t from = args.ids.i32()[t] * args.table.stride(0);
    for (int64_t i = 0; i < args.table.size(1); ++i) {
      args.y.row(t)[i] =
          args.table.dtype() == DType::kF32 ? args.table.f32()[from + i] : to_f32(args.table.bf()[from + i]);
    }
  }
}

void reference(const EmbeddingBackward& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.ids.size(0); ++t) {
    float* to = args.dtable.row(args.ids.i32()[t]);
    for (int64_t i = 0; i < args.dy.size(1); ++i) to[i] += args.dy.row(t)[i];
  }
}

}  // namespace slipstream::kernels
