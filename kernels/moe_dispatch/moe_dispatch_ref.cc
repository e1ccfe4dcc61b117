#include <limits>
#include <vector>

#include "kernels/moe_dispatch/moe_dispatch.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

int32_t index(const Tensor& t, int64_t row, int64_t column) { return t.i32()[row * t.stride(0) + column]; }

// What the two combining operators and their backward share: rows [R, H] and the slots [T, k] that point into
// them.
absl::Status expect_slots(const Operands& op, const char* name, const Tensor& rows, const Tensor& slot_row) {
  RETURN_IF_ERROR(expect_tensor(op, "slot_row", slot_row, DType::kI32, {-1, -1}));
  return expect_activation(op, name, rows, {slot_row.size(0) * slot_row.size(1), -1});
}

}  // namespace

absl::Status validate(const MoePlan& args) {
  const Operands op("moe_plan");
  RETURN_IF_ERROR(expect_tensor(op, "experts", args.experts, DType::kI32, {-1, -1}));
  const int64_t tokens = args.experts.size(0), slots = args.experts.size(1);
  RETURN_IF_ERROR(
      expect_that(op, tokens * slots <= std::numeric_limits<int32_t>::max(), "rows must fit in an i32"));
  RETURN_IF_ERROR(expect_tensor(op, "row_begin", args.row_begin, DType::kI32, {-1}));
  RETURN_IF_ERROR(
      expect_that(op, args.row_begin.size(0) >= 2, "row_begin must have one more element than experts"));
  RETURN_IF_ERROR(expect_tensor(op, "slot_row", args.slot_row, DType::kI32, {tokens, slots}));
  return expect_tensor(op, "row_token", args.row_token, DType::kI32, {tokens * slots});
}

absl::Status validate(const MoeGather& args) {
  const Operands op("moe_gather");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  RETURN_IF_ERROR(expect_tensor(op, "row_token", args.row_token, DType::kI32, {-1}));
  return expect_activation(op, "rows", args.rows, {args.row_token.size(0), args.x.size(1)});
}

absl::Status validate(const MoeCombine& args) {
  const Operands op("moe_combine");
  RETURN_IF_ERROR(expect_slots(op, "rows", args.rows, args.slot_row));
  const int64_t tokens = args.slot_row.size(0), slots = args.slot_row.size(1), hidden = args.rows.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "weights", args.weights, DType::kF32, {tokens, slots}));
  return expect_activation(op, "y", args.y, {tokens, hidden});
}

absl::Status validate(const MoeCombineBackward& args) {
  const Operands op("moe_combine_backward");
  RETURN_IF_ERROR(expect_slots(op, "rows", args.rows, args.slot_row));
  const int64_t tokens = args.slot_row.size(0), slots = args.slot_row.size(1), hidden = args.rows.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "weights", args.weights, DType::kF32, {tokens, slots}));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {tokens, hidden}));
  RETURN_IF_ERROR(expect_activation(op, "drows", args.drows, {tokens * slots, hidden}));
  return expect_tensor(op, "dweights", args.dweights, DType::kF32, {tokens, slots});
}

absl::Status validate(const MoeGatherBackward& args) {
  const Operands op("moe_gather_backward");
  RETURN_IF_ERROR(expect_slots(op, "drows", args.drows, args.slot_row));
  return expect_activation(op, "dx", args.dx, {args.slot_row.size(0), args.drows.size(1)});
}

void reference(const MoePlan& args) {
  CHECK_OK(validate(args));
  const int64_t num_experts = args.row_begin.size(0) - 1;
  int32_t row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    args.row_begin.i32()[e] = row;
    for (int64_t t = 0; t < args.experts.size(0); ++t) {
      for (int64_t k = 0; k < args.experts.size(1); ++k) {
        if (index(args.experts, t, k) != e) continue;
        args.slot_row.i32()[t * args.slot_row.stride(0) + k] = row;
        args.row_token.i32()[row++] = static_cast<int32_t>(t);
      }
    }
  }
  args.row_begin.i32()[num_experts] = row;
  CHECK_EQ(row, args.row_token.size(0));  // every expert is in range
}

void reference(const MoeGather& args) {
  CHECK_OK(validate(args));
  for (int64_t r = 0; r < args.rows.size(0); ++r) {
    const int32_t token = args.row_token.i32()[r];
    for (int64_t i = 0; i < args.x.size(1); ++i) args.rows.row(r)[i] = token < 0 ? 0.0f : args.x.row(token)[i];
  }
}

void reference(const MoeCombine& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.y.size(0); ++t) {
    for (int64_t i = 0; i < args.y.size(1); ++i) {
      double sum = 0.0;
      for (int64_t k = 0; k < args.slot_row.size(1); ++k) {
        sum += double{args.weights.row(t)[k]} * args.rows.row(index(args.slot_row, t, k))[i];
      }
      args.y.row(t)[i] = static_cast<float>(args.y.row(t)[i] + sum);
    }
  }
}

void reference(const MoeCombineBackward& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.dy.size(0); ++t) {
    for (int64_t k = 0; k < args.slot_row.size(1); ++k) {
      const int32_t row = index(args.slot_row, t, k);
      double dweight = 0.0;
      for (int64_t i = 0; i < args.dy.size(1); ++i) {
        dweight += double{args.dy.row(t)[i]} * args.rows.row(row)[i];
        args.drows.row(row)[i] = args.weights.row(t)[k] * args.dy.row(t)[i];
      }
      args.dweights.row(t)[k] = static_cast<float>(dweight);
    }
  }
}

void reference(const MoeGatherBackward& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.dx.size(0); ++t) {
    for (int64_t i = 0; i < args.dx.size(1); ++i) {
      double sum = 0.0;
      for (int64_t k = 0; k < args.slot_row.size(1); ++k)
        sum += args.drows.row(index(args.slot_row, t, k))[i];
      args.dx.row(t)[i] = static_cast<float>(args.dx.row(t)[i] + sum);
    }
  }
}

}  // namespace slipstream::kernels
