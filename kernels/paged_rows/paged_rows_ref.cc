#include "kernels/paged_rows/paged_rows.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const PagedWrite& args) {
  const Operands op("paged_write");
  RETURN_IF_ERROR(expect_activation(op, "rows", args.rows, {-1, -1}));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, args.rows.size(0)));
  return expect_paged(op, "store", args.store, args.sequences, args.rows.size(1));
}

void reference(const PagedWrite& args) {
  CHECK_OK(validate(args));
  const Sequences& sequences = args.sequences;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    for (int64_t r = sequences.begin(b); r < sequences.end(b); ++r) {
      const int64_t to = args.store.offset(b, sequences.cached_tokens(b) + r - sequences.begin(b));
      for (int64_t i = 0; i < args.rows.size(1); ++i) {
        const float value = args.rows.row(r)[i];
        if (args.store.pool.dtype() == DType::kF32) {
          args.store.pool.f32()[to + i] = value;
        } else {
          args.store.pool.bf()[to + i] = to_bf16(value);
        }
      }
    }
  }
}

}  // namespace slipstream::kernels
