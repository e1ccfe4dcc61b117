// Replay: the discrete choices of a sequence's rows (which experts, which positions), packed for the wire by
// an engine and unpacked by a trainer, without loss.
//
// Experts: ids in slot order, row by row, layer by layer, 8 bits each for at most 256 experts, else as many
// as they need; the first id is in the low bits of the first byte. Selections: one range-coded stream, row by
// row and layer by layer. A row's set of pools (pool 1: positions) is coded against the previous row's: a bit
// for each pool of that one, a bit for each pool that is new, and the rest as gaps; adaptive probabilities
// learn how a model's selections move. While all pools are selected, and for the tail of a pooled layer,
// nothing is written: the position says it. Range coder: Martin 1979, as in LZMA.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "kernels/arena.h"
#include "model/config.h"
#include "model/model.h"

namespace slipstream::model {

// Which layers choose what.
struct ReplayLayout {
  std::vector<int64_t> moe_layers;
  int64_t experts = 0, per_token = 0;
  int expert_bits = 8;
  std::vector<int64_t> indexer_layers;  // the full ones
  int64_t topk = 0, pool = 1;
  bool tail = false;

  static ReplayLayout of(const ModelConfig& config);
};

// Rows first_row .. first_row + num_rows - 1 of a sequence. What was not captured is empty.
struct EncodedReplay {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  std::string experts;
  std::string selections;
  int64_t raw_bytes = 0;  // what int32 tensors of the same choices take
};

struct ReplayKinds {
  bool experts = false;
  bool selections = false;
  bool any() const { return experts || selections; }
};

// What a pass on the stream's device captured, in host memory: as it is on the CPU, else copied to `arena`, which is there.
Choices choices_on_host(const Choices& choices, kernels::Stream& stream, kernels::Arena& arena);

// Takes the rows of one sequence as passes compute them; a row's work depends on index_topk, not on its
// position.
class ReplayEncoder {
 public:
  ReplayEncoder(const ReplayLayout& layout, ReplayKinds kinds, int64_t first_row);
  ReplayEncoder(ReplayEncoder&&) noexcept;
  ReplayEncoder& operator=(ReplayEncoder&&) noexcept;
  ~ReplayEncoder();

  // Row `batch_row` of a pass's captured choices is the sequence's next row.
  void add(const Choices& choices, int64_t batch_row);
  int64_t next_row() const;
  // The encoder is spent.
  EncodedReplay finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct DecodedReplay {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  std::vector<int32_t> experts;  // [num_rows, MoE layers, per_token]; empty: not captured
  // By full-indexer layer: the rows' positions one after the other, and where each row's end. Empty: not
  // captured.
  struct Selections {
    std::vector<int32_t> positions;
    std::vector<int64_t> row_end;
  };
  std::vector<Selections> selections;
};

// The first num_rows rows of what was encoded: a sample that was cut lowers num_rows and leaves the bytes as they are.
// DataLoss: bytes that no encoder makes. rows_max bounds what a lying num_rows can cost.
absl::StatusOr<DecodedReplay> decode_replay(const ReplayLayout& layout, const EncodedReplay& encoded,
                                            int64_t rows_max);

// Tensors for the choices of `rows` rows in sequences of at most `longest` tokens, in `arena`: experts 0,
// nothing selected.
Choices allocate_choices(const ModelConfig& config, ReplayKinds kinds, int64_t rows, int64_t longest,
                         kernels::Arena& arena);

// Writes rows 0 .. rows-1 of a sequence from pieces in row order to rows batch_row .. of `choices`. Where
// pieces overlap the earlier one counts: its rows gave the tokens of its reply. DataLoss: a row that no piece
// has. InvalidArgument: choices too narrow.
absl::Status place_choices(const ReplayLayout& layout, ReplayKinds kinds,
                           const std::vector<DecodedReplay>& pieces, int64_t rows, int64_t batch_row,
                           Choices& choices);

}  // namespace slipstream::model
