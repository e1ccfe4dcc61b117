#include <string>

#include "kernels/embedding/embedding.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

absl::Status expect_ids(const char* op, const Tensor& ids, int64_t vocab) {
  for (int64_t t = 0; t < ids.size(0); ++t) {
    const int32_t id = ids.i32()[t];
    if (id < 0 || id >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": ids[", t, "]: ", id, ", expected 0..", vocab - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status validate(const Embedding& args) {
  constexpr const char* kOp = "embedding";
  RETURN_IF_ERROR(expect_tensor(kOp, "ids", args.ids, DType::kI32, {-1}));
  RETURN_IF_ERROR(expect_weight(kOp, "table", args.table, {-1, -1}));
  RETURN_IF_ERROR(expect_tensor(kOp, "y", args.y, DType::kF32, {args.ids.size(0), args.table.size(1)}));
  return expect_ids(kOp, args.ids, args.table.size(0));
}

absl::Status validate(const EmbeddingBackward& args) {
  constexpr const char* kOp = "embedding_backward";
  RETURN_IF_ERROR(expect_tensor(kOp, "ids", args.ids, DType::kI32, {-1}));
  RETURN_IF_ERROR(expect_tensor(kOp, "dy", args.dy, DType::kF32, {args.ids.size(0), -1}));
  RETURN_IF_ERROR(expect_tensor(kOp, "dtable", args.dtable, DType::kF32, {-1, args.dy.size(1)}));
  return expect_ids(kOp, args.ids, args.dtable.size(0));
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
