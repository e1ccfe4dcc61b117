#include "model/replay.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/indexer/indexer.h"
#include "model/selection_coder.h"

namespace slipstream::model {
namespace {

using kernels::DType;

std::vector<SelectionModel> selection_models(const ReplayLayout& layout) {
  return {layout.indexer_layers.size(), SelectionModel(layout.topk, layout.pool, layout.tail)};
}

int64_t experts_per_row(const ReplayLayout& layout) {
  return static_cast<int64_t>(layout.moe_layers.size()) * layout.per_token;
}

}  // namespace

ReplayLayout ReplayLayout::of(const ModelConfig& config) {
  ReplayLayout layout;
  for (size_t l = 0; l < config.layers.size(); ++l) {
    if (config.layers[l].moe) layout.moe_layers.push_back(static_cast<int64_t>(l));
    if (config.layers[l].indexer == IndexerMode::kFull)
      layout.indexer_layers.push_back(static_cast<int64_t>(l));
  }
  if (config.moe) {
    layout.experts = config.moe->experts;
    layout.per_token = config.moe->per_token;
    layout.expert_bits =
        std::max(8, static_cast<int>(std::bit_width(static_cast<uint64_t>(layout.experts - 1))));
  }
  if (!layout.indexer_layers.empty()) {
    const IndexerConfig& indexer = *config.mla->indexer;
    layout.topk = indexer.topk;
    layout.pool = indexer.pool;
    layout.tail = indexer.tail && indexer.pool > 1;
  }
  return layout;
}

struct ReplayEncoder::Impl {
  ReplayLayout layout;
  ReplayKinds kinds;
  int64_t first_row;
  int64_t num_rows = 0;
  std::string experts;
  uint64_t bits = 0;  // expert bits not yet a whole byte
  int num_bits = 0;
  RangeEncoder range;
  std::vector<SelectionModel> models;
  std::vector<int32_t> positions;

  void add_expert(int32_t id) {
    CHECK(id >= 0 && id < layout.experts);
    bits |= static_cast<uint64_t>(id) << num_bits;
    num_bits += layout.expert_bits;
    for (; num_bits >= 8; num_bits -= 8, bits >>= 8) experts.push_back(static_cast<char>(bits & 0xff));
  }
};

Choices choices_on_host(const Choices& choices, kernels::Stream& stream, kernels::Arena& arena) {
  if (!stream.on_cuda()) return choices;
  const auto copy = [&](const Tensor& from) {
    if (from.empty()) return Tensor();
    std::vector<int64_t> shape;
    for (int dim = 0; dim < from.rank(); ++dim) shape.push_back(from.size(dim));
    const Tensor to = arena.alloc(from.dtype(), shape);
    stream.download(from, to.raw());
    return to;
  };
  Choices out;
  for (const LayerReplay& layer : choices) {
    out.push_back({.experts = copy(layer.experts),
                   .selection = {.indices = copy(layer.selection.indices), .counts = copy(layer.selection.counts)}});
  }
  return out;
}

ReplayEncoder::ReplayEncoder(const ReplayLayout& layout, ReplayKinds kinds, int64_t first_row)
    : impl_(new Impl{.layout = layout,
                     .kinds = kinds,
                     .first_row = first_row,
                     .num_rows = 0,
                     .experts = {},
                     .bits = 0,
                     .num_bits = 0,
                     .range = {},
                     .models = selection_models(layout),
                     .positions = {}}) {}
ReplayEncoder::ReplayEncoder(ReplayEncoder&&) noexcept = default;
ReplayEncoder& ReplayEncoder::operator=(ReplayEncoder&&) noexcept = default;
ReplayEncoder::~ReplayEncoder() = default;

int64_t ReplayEncoder::next_row() const { return impl_->first_row + impl_->num_rows; }

void ReplayEncoder::add(const Choices& choices, int64_t batch_row) {
  Impl& m = *impl_;
  if (m.kinds.experts) {
    for (const int64_t l : m.layout.moe_layers) {
      const Tensor& experts = choices[static_cast<size_t>(l)].experts;
      const int32_t* ids = experts.i32() + batch_row * experts.stride(0);
      for (int64_t i = 0; i < m.layout.per_token; ++i) m.add_expert(ids[i]);
    }
  }
  if (m.kinds.selections) {
    SelectionWriter writer{m.range};
    for (size_t i = 0; i < m.models.size(); ++i) {
      const Selection& selection = choices[static_cast<size_t>(m.layout.indexer_layers[i])].selection;
      const int32_t* indices = selection.indices.i32() + batch_row * selection.indices.stride(0);
      m.positions.assign(indices, indices + selection.counts.i32()[batch_row]);
      m.models[i].row(writer, next_row(), m.positions);
    }
  }
  ++m.num_rows;
}

EncodedReplay ReplayEncoder::finish() {
  Impl& m = *impl_;
  EncodedReplay out{
      .first_row = m.first_row, .num_rows = m.num_rows, .experts = {}, .selections = {}, .raw_bytes = 0};
  if (m.num_bits > 0) m.experts.push_back(static_cast<char>(m.bits & 0xff));
  out.experts = std::move(m.experts);
  if (m.kinds.experts) out.raw_bytes += m.num_rows * experts_per_row(m.layout) * 4;
  if (m.kinds.selections && !m.models.empty()) {
    out.selections = m.range.finish();
    const int64_t width = kernels::selection_width(m.layout.topk, m.layout.pool, m.layout.tail, next_row());
    out.raw_bytes += m.num_rows * static_cast<int64_t>(m.models.size()) * width * 4;
  }
  impl_.reset();
  return out;
}

absl::StatusOr<DecodedReplay> decode_replay(const ReplayLayout& layout, const EncodedReplay& encoded,
                                            int64_t rows_max) {
  if (encoded.first_row < 0 || encoded.num_rows < 0 || encoded.first_row > rows_max ||
      encoded.num_rows > rows_max - encoded.first_row) {
    return absl::DataLossError(absl::StrCat("replay: rows ", encoded.first_row, " + ", encoded.num_rows,
                                            ", expected them in 0..", rows_max));
  }
  DecodedReplay out{
      .first_row = encoded.first_row, .num_rows = encoded.num_rows, .experts = {}, .selections = {}};
  if (!encoded.experts.empty()) {
    const int64_t count = encoded.num_rows * experts_per_row(layout),
                  bytes = (count * layout.expert_bits + 7) / 8;
    if (static_cast<int64_t>(encoded.experts.size()) < bytes) {
      return absl::DataLossError(
          absl::StrCat("replay: experts: ", encoded.experts.size(), " bytes, expected at least ", bytes));
    }
    uint64_t bits = 0;
    int num_bits = 0;
    size_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
      for (; num_bits < layout.expert_bits; num_bits += 8) {
        bits |= static_cast<uint64_t>(static_cast<uint8_t>(encoded.experts[next++])) << num_bits;
      }
      const int64_t id = static_cast<int64_t>(bits & ((uint64_t{1} << layout.expert_bits) - 1));
      bits >>= layout.expert_bits;
      num_bits -= layout.expert_bits;
      if (id >= layout.experts) {
        return absl::DataLossError(absl::StrCat("replay: expert ", id, ", expected 0..", layout.experts - 1));
      }
      out.experts.push_back(static_cast<int32_t>(id));
    }
  }
  if (!encoded.selections.empty()) {
    std::vector<SelectionModel> models = selection_models(layout);
    out.selections.resize(models.size());
    RangeDecoder range(encoded.selections);
    SelectionReader reader{range};
    std::vector<int32_t> positions;
    for (int64_t row = encoded.first_row; row < encoded.first_row + encoded.num_rows; ++row) {
      for (size_t i = 0; i < models.size(); ++i) {
        if (!models[i].row(reader, row, positions)) {
          return absl::DataLossError(
              absl::StrCat("replay: selections of row ", row, ": not what an encoder writes"));
        }
        DecodedReplay::Selections& layer = out.selections[i];
        layer.positions.insert(layer.positions.end(), positions.begin(), positions.end());
        layer.row_end.push_back(static_cast<int64_t>(layer.positions.size()));
      }
    }
  }
  return out;
}

Choices allocate_choices(const ModelConfig& config, ReplayKinds kinds, int64_t rows, int64_t longest,
                         kernels::Arena& arena) {
  const ReplayLayout layout = ReplayLayout::of(config);
  Choices choices(config.layers.size());
  const auto filled = [&](std::initializer_list<int64_t> shape, int32_t value) {
    const Tensor t = arena.alloc(DType::kI32, shape);
    std::fill_n(t.i32(), t.numel(), value);
    return t;
  };
  if (kinds.experts) {
    for (const int64_t l : layout.moe_layers) {
      choices[static_cast<size_t>(l)].experts = filled({rows, layout.per_token}, 0);
    }
  }
  if (kinds.selections) {
    const int64_t width = kernels::selection_width(layout.topk, layout.pool, layout.tail, longest);
    for (const int64_t l : layout.indexer_layers) {
      choices[static_cast<size_t>(l)].selection = {filled({rows, width}, -1), filled({rows}, 0)};
    }
  }
  return choices;
}

absl::Status place_choices(const ReplayLayout& layout, ReplayKinds kinds,
                           const std::vector<DecodedReplay>& pieces, int64_t rows, int64_t batch_row,
                           Choices& choices) {
  const int64_t per_row = experts_per_row(layout);
  int64_t row = 0;
  for (const DecodedReplay& piece : pieces) {
    if (piece.first_row > row) break;
    const bool lacks_experts = kinds.experts && per_row > 0 && piece.experts.empty() && piece.num_rows > 0;
    const bool lacks_selections =
        kinds.selections && !layout.indexer_layers.empty() && piece.selections.empty();
    if (lacks_experts || (lacks_selections && piece.num_rows > 0)) break;
    for (; row < std::min(rows, piece.first_row + piece.num_rows); ++row) {
      const int64_t r = row - piece.first_row;
      if (kinds.experts) {
        const int32_t* ids = piece.experts.data() + r * per_row;
        for (const int64_t l : layout.moe_layers) {
          const Tensor& experts = choices[static_cast<size_t>(l)].experts;
          std::copy(ids, ids + layout.per_token, experts.i32() + (batch_row + row) * experts.stride(0));
          ids += layout.per_token;
        }
      }
      for (size_t i = 0; kinds.selections && i < layout.indexer_layers.size(); ++i) {
        const DecodedReplay::Selections& layer = piece.selections[i];
        const int64_t begin = r == 0 ? 0 : layer.row_end[static_cast<size_t>(r - 1)];
        const int64_t end = layer.row_end[static_cast<size_t>(r)];
        const Selection& to = choices[static_cast<size_t>(layout.indexer_layers[i])].selection;
        if (end - begin > to.indices.size(1)) {
          return absl::InvalidArgumentError(
              absl::StrCat("replay: ", end - begin, " positions in a row, room for ", to.indices.size(1)));
        }
        std::copy(layer.positions.begin() + begin, layer.positions.begin() + end,
                  to.indices.i32() + (batch_row + row) * to.indices.stride(0));
        to.counts.i32()[batch_row + row] = static_cast<int32_t>(end - begin);
      }
    }
  }
  if (row < rows)
    return absl::DataLossError(absl::StrCat("replay: row ", row, " of ", rows, " is in no piece"));
  return absl::OkStatus();
}

}  // namespace slipstream::model
