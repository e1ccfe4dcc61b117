#include "model/weights.h"

#include <algorithm>
#include <cstring>

#include "kernels/quantize/quantize.h"

namespace slipstream::model {
namespace {

using kernels::DType;

constexpr int64_t kAlignment = 256;  // of an arena, at most
constexpr int64_t kUploadBytes = int64_t{64} << 20;  // of a weight at a time, on its way to fp8

// Of a matrix or of E of them.
std::vector<int64_t> scales_shape(std::vector<int64_t> shape) {
  for (size_t dim = shape.size() - 2; dim < shape.size(); ++dim) shape[dim] = (shape[dim] + kFp8Block - 1) / kFp8Block;
  return shape;
}

void upload_as_fp8(const Tensor& from, const Tensor& codes, const Tensor& scales, kernels::Stream& stream) {
  if (from.rank() == 3) {
    for (int64_t e = 0; e < from.size(0); ++e) upload_as_fp8(from[e], codes[e], scales[e], stream);
    return;
  }
  const int64_t rows = from.size(0), columns = from.size(1);
  const int64_t block_bytes = kFp8Block * columns * kernels::size_of(from.dtype());
  const int64_t rows_at_once = std::max<int64_t>(kUploadBytes / std::max<int64_t>(block_bytes, 1), 1) * kFp8Block;
  for (int64_t begin = 0; begin < rows; begin += rows_at_once) {
    const int64_t end = std::min(begin + rows_at_once, rows);
    kernels::Quantize part{.x = from.slice(0, begin, end), .codes = codes.slice(0, begin, end),
                           .scales = scales.slice(0, begin / kFp8Block, (end + kFp8Block - 1) / kFp8Block),
                           .block_rows = kFp8Block};
    if (!stream.on_cuda()) {
      kernels::launch(part, stream);
      continue;
    }
    const kernels::ArenaScope scope(stream.workspace());
    const Tensor there = stream.workspace().alloc(from.dtype(), {end - begin, columns});
    stream.upload(part.x.raw(), there);
    part.x = there;
    kernels::launch(part, stream);
  }
}

// Declares the parameters below one name prefix ("model.layers.3.").
class Declarer {
 public:
  Declarer(std::string prefix, ParameterGroup group, int64_t layer, const ParameterVisitor& visit)
      : prefix_(std::move(prefix)), group_(group), layer_(layer), visit_(visit) {}

  void matrix(Tensor& slot, const char* name, std::vector<int64_t> shape) {
    declare(slot, name, std::move(shape), Storage::kMatrix, Init::kNormal);
  }
  // The weight of a linear layer; with a bias it is a matrix like others.
  void linear(Tensor& slot, const char* name, std::vector<int64_t> shape, bool bias = false) {
    Parameter p = make(name, std::move(shape), Storage::kMatrix, Init::kNormal, false);
    p.linear = !bias;
    p.parts = {{p.name, p.shape, 0, p.shape[0]}};
    visit_(std::move(p), slot);
  }
  void frozen_matrix(Tensor& slot, const char* name, std::vector<int64_t> shape) {
    declare(slot, name, std::move(shape), Storage::kMatrix, Init::kNormal, /*frozen=*/true);
  }
  void island(Tensor& slot, const char* name, std::vector<int64_t> shape, Init init, bool frozen = false) {
    declare(slot, name, std::move(shape), Storage::kIsland, init, frozen);
  }
  void fp32(Tensor& slot, const char* name, std::vector<int64_t> shape) {
    declare(slot, name, std::move(shape), Storage::kFp32, Init::kZeros, /*frozen=*/true);
  }

  // One matrix [rows x columns] a head, kept as [heads, rows, columns]; one tensor in the file.
  void heads(Tensor& slot, const char* name, int64_t heads, int64_t rows, int64_t columns) {
    Parameter p = make(name, {heads, rows, columns}, Storage::kMatrix, Init::kNormal, false);
    p.parts = {{p.name, {heads * rows, columns}, 0, heads * rows}};
    visit_(std::move(p), slot);
  }

  // mlp.experts.N.<name>.weight for N in 0..E-1, stacked.
  void experts(Tensor& slot, const char* name, int64_t experts, int64_t rows, int64_t columns) {
    Parameter p = make(absl::StrCat("mlp.experts.", name).c_str(), {experts, rows, columns}, Storage::kMatrix,
                       Init::kNormal, false);
    p.expert = true;
    p.linear = true;
    for (int64_t e = 0; e < experts; ++e) {
      p.parts.push_back({absl::StrCat(prefix_, "mlp.experts.", e, ".", name, ".weight"), {rows, columns}, e * rows,
                         (e + 1) * rows});
    }
    visit_(std::move(p), slot);
  }

  // The depthwise convolutions of q, k and v, [channels, 1, K] each in the file.
  void convolutions(Tensor& slot, int64_t channels, int64_t width) {
    Parameter p = make("self_attn.conv1d.weight", {3 * channels, width}, Storage::kIsland, Init::kNormal, false);
    int64_t row = 0;
    for (const char* name : {"q_conv1d", "k_conv1d", "v_conv1d"}) {
      p.parts.push_back({absl::StrCat(prefix_, "self_attn.", name, ".weight"), {channels, 1, width}, row, row + channels});
      row += channels;
    }
    visit_(std::move(p), slot);
  }

 private:
  Parameter make(const char* name, std::vector<int64_t> shape, Storage storage, Init init, bool frozen) const {
    Parameter p;
    p.name = prefix_ + name;
    p.shape = std::move(shape);
    p.storage = storage;
    p.group = group_;
    p.layer = layer_;
    p.frozen = frozen;
    p.init = init;
    return p;
  }
  void declare(Tensor& slot, const char* name, std::vector<int64_t> shape, Storage storage, Init init,
               bool frozen = false) {
    Parameter p = make(name, std::move(shape), storage, init, frozen);
    p.parts = {{p.name, p.shape, 0, p.shape[0]}};
    visit_(std::move(p), slot);
  }

  std::string prefix_;
  ParameterGroup group_;
  int64_t layer_;
  const ParameterVisitor& visit_;
};

void declare_indexer(Declarer& d, const ModelConfig& config, IndexerWeights& w) {
  const MlaConfig& mla = *config.mla;
  const IndexerConfig& indexer = *mla.indexer;
  d.frozen_matrix(w.wq_b, "self_attn.indexer.wq_b.weight", {indexer.heads * indexer.head_dim, mla.q_lora_rank});
  d.frozen_matrix(w.wk, "self_attn.indexer.wk.weight", {indexer.head_dim, config.hidden});
  d.island(w.k_norm_w, "self_attn.indexer.k_norm.weight", {indexer.head_dim}, Init::kOnes, /*frozen=*/true);
  d.island(w.k_norm_b, "self_attn.indexer.k_norm.bias", {indexer.head_dim}, Init::kZeros, /*frozen=*/true);
  d.frozen_matrix(w.weights_proj, "self_attn.indexer.weights_proj.weight", {indexer.heads, config.hidden});
  if (config.kda) {  // the family with a pooled indexer has these even when a pool is one token
    d.frozen_matrix(w.pool_gate, "self_attn.indexer.index_kpool_compress_gate", {indexer.head_dim, config.hidden});
    d.island(w.pool_ape, "self_attn.indexer.index_kpool_compress_ape", {indexer.pool, indexer.head_dim}, Init::kNormal,
             /*frozen=*/true);
  }
}

void declare_mla(Declarer& d, const ModelConfig& config, const LayerConfig& layer, MlaWeights& w) {
  const MlaConfig& mla = *config.mla;
  if (mla.q_lora_rank == 0) {
    d.linear(w.q_proj, "self_attn.q_proj.weight", {mla.heads * mla.qk(), config.hidden});
  } else {
    d.linear(w.q_a, "self_attn.q_a_proj.weight", {mla.q_lora_rank, config.hidden}, mla.bias);
    if (mla.bias) d.island(w.q_a_bias, "self_attn.q_a_proj.bias", {mla.q_lora_rank}, Init::kZeros);
    d.island(w.q_a_norm, "self_attn.q_a_layernorm.weight", {mla.q_lora_rank}, Init::kOnes);
    d.linear(w.q_b, "self_attn.q_b_proj.weight", {mla.heads * mla.qk(), mla.q_lora_rank});
  }
  d.matrix(w.kv_a, "self_attn.kv_a_proj_with_mqa.weight", {mla.key_width(), config.hidden});
  if (mla.bias) d.island(w.kv_a_bias, "self_attn.kv_a_proj_with_mqa.bias", {mla.key_width()}, Init::kZeros);
  d.island(w.kv_a_norm, "self_attn.kv_a_layernorm.weight", {mla.kv_lora_rank}, Init::kOnes);
  d.heads(w.kv_b, "self_attn.kv_b_proj.weight", mla.heads, mla.nope + mla.v, mla.kv_lora_rank);
  d.linear(w.o, "self_attn.o_proj.weight", {config.hidden, mla.heads * mla.v}, mla.bias);
  if (mla.bias) d.island(w.o_bias, "self_attn.o_proj.bias", {config.hidden}, Init::kZeros);
  if (layer.indexer == IndexerMode::kFull) declare_indexer(d, config, w.indexer);
}

void declare_gqa(Declarer& d, const ModelConfig& config, GqaWeights& w) {
  const GqaConfig& gqa = *config.gqa;
  const int64_t q = gqa.heads * gqa.head_dim, kv = gqa.kv_heads * gqa.head_dim;
  d.linear(w.q, "self_attn.q_proj.weight", {q, config.hidden}, gqa.bias);
  d.linear(w.k, "self_attn.k_proj.weight", {kv, config.hidden}, gqa.bias);
  d.linear(w.v, "self_attn.v_proj.weight", {kv, config.hidden}, gqa.bias);
  if (gqa.bias) {
    d.island(w.q_bias, "self_attn.q_proj.bias", {q}, Init::kZeros);
    d.island(w.k_bias, "self_attn.k_proj.bias", {kv}, Init::kZeros);
    d.island(w.v_bias, "self_attn.v_proj.bias", {kv}, Init::kZeros);
  }
  if (gqa.qk_norm) {
    d.island(w.q_norm, "self_attn.q_norm.weight", {gqa.head_dim}, Init::kOnes);
    d.island(w.k_norm, "self_attn.k_norm.weight", {gqa.head_dim}, Init::kOnes);
  }
  d.linear(w.o, "self_attn.o_proj.weight", {config.hidden, q});
}

void declare_kda(Declarer& d, const ModelConfig& config, KdaWeights& w) {
  const KdaConfig& kda = *config.kda;
  const int64_t width = kda.heads * kda.head_dim;
  d.linear(w.q, "self_attn.q_proj.weight", {width, config.hidden});
  d.linear(w.k, "self_attn.k_proj.weight", {width, config.hidden});
  d.linear(w.v, "self_attn.v_proj.weight", {width, config.hidden});
  d.convolutions(w.conv, width, kda.conv_width);
  d.matrix(w.b, "self_attn.b_proj.weight", {kda.heads, config.hidden});
  d.matrix(w.f_a, "self_attn.f_a_proj.weight", {kda.head_dim, config.hidden});
  d.matrix(w.f_b, "self_attn.f_b_proj.weight", {width, kda.head_dim});
  d.island(w.a_log, "self_attn.A_log", {kda.heads}, Init::kDecay);
  d.island(w.dt_bias, "self_attn.dt_bias", {width}, Init::kDecayBias);
  d.matrix(w.g_a, "self_attn.g_a_proj.weight", {kda.head_dim, config.hidden});
  d.matrix(w.g_b, "self_attn.g_b_proj.weight", {width, kda.head_dim});
  d.island(w.o_norm, "self_attn.o_norm.weight", {kda.head_dim}, Init::kOnes);
  d.linear(w.o, "self_attn.o_proj.weight", {config.hidden, width});
}

void declare_mlp(Declarer& d, const char* prefix, int64_t hidden, int64_t intermediate, MlpWeights& w) {
  d.linear(w.gate, absl::StrCat(prefix, "gate_proj.weight").c_str(), {intermediate, hidden});
  d.linear(w.up, absl::StrCat(prefix, "up_proj.weight").c_str(), {intermediate, hidden});
  d.linear(w.down, absl::StrCat(prefix, "down_proj.weight").c_str(), {hidden, intermediate});
}

void declare_moe(Declarer& d, const ModelConfig& config, MoeWeights& w) {
  const MoeConfig& moe = *config.moe;
  d.matrix(w.router, "mlp.gate.weight", {moe.experts, config.hidden});
  d.fp32(w.router_bias, "mlp.gate.e_score_correction_bias", {moe.experts});
  d.experts(w.gate, "gate_proj", moe.experts, moe.intermediate, config.hidden);
  d.experts(w.up, "up_proj", moe.experts, moe.intermediate, config.hidden);
  d.experts(w.down, "down_proj", moe.experts, config.hidden, moe.intermediate);
  if (moe.shared > 0) declare_mlp(d, "mlp.shared_experts.", config.hidden, moe.intermediate * moe.shared, w.shared);
}

void declare_hyper(Declarer& d, const ModelConfig& config, const char* prefix, HyperWeights& w) {
  const HyperConfig& hyper = *config.hyper;
  d.island(w.fn, absl::StrCat(prefix, "fn").c_str(), {hyper.mixes(), hyper.streams * config.hidden}, Init::kNormal);
  d.island(w.base, absl::StrCat(prefix, "base").c_str(), {hyper.mixes()}, Init::kZeros);
  d.island(w.scale, absl::StrCat(prefix, "scale").c_str(), {3}, Init::kOnes);
}

void declare_layer(Declarer& d, const ModelConfig& config, const LayerConfig& layer, bool hyper, LayerWeights& w) {
  d.island(w.input_norm, "input_layernorm.weight", {config.hidden}, Init::kOnes);
  switch (layer.attention) {
    case AttentionKind::kMla: declare_mla(d, config, layer, w.mla); break;
    case AttentionKind::kGqa: declare_gqa(d, config, w.gqa); break;
    case AttentionKind::kKda: declare_kda(d, config, w.kda); break;
  }
  d.island(w.post_norm, "post_attention_layernorm.weight", {config.hidden}, Init::kOnes);
  if (layer.moe) {
    declare_moe(d, config, w.moe);
  } else {
    declare_mlp(d, "mlp.", config.hidden, config.intermediate, w.mlp);
  }
  if (hyper) {
    declare_hyper(d, config, "hc_attn_", w.attn_hyper);
    declare_hyper(d, config, "hc_ffn_", w.mlp_hyper);
  }
}

}  // namespace

int64_t Parameter::numel() const {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

void visit_parameters(const ModelConfig& config, ModelWeights& weights, bool with_mtp, const ParameterVisitor& visit) {
  Declarer embedding(config.prefix, ParameterGroup::kEmbedding, -1, visit);
  embedding.matrix(weights.embedding, "embed_tokens.weight", {config.vocab, config.hidden});
  weights.layers.resize(config.layers.size());
  for (size_t l = 0; l < config.layers.size(); ++l) {
    Declarer layer(absl::StrCat(config.prefix, "layers.", l, "."), ParameterGroup::kBackbone, static_cast<int64_t>(l),
                   visit);
    declare_layer(layer, config, config.layers[l], config.hyper.has_value(), weights.layers[l]);
  }
  Declarer norm(config.prefix, ParameterGroup::kBackbone, -1, visit);
  norm.island(weights.norm, "norm.weight", {config.hidden}, Init::kOnes);
  Declarer head("", ParameterGroup::kLmHead, -1, visit);
  head.matrix(weights.lm_head, "lm_head.weight", {config.vocab, config.hidden});
  if (!with_mtp) return;
  const int64_t index = static_cast<int64_t>(config.layers.size());
  Declarer mtp(absl::StrCat(config.prefix, "layers.", index, "."), ParameterGroup::kMtp, index, visit);
  mtp.island(weights.mtp.enorm, "enorm.weight", {config.hidden}, Init::kOnes);
  mtp.island(weights.mtp.hnorm, "hnorm.weight", {config.hidden}, Init::kOnes);
  mtp.matrix(weights.mtp.eh_proj, "eh_proj.weight", {config.hidden, 2 * config.hidden});
  declare_layer(mtp, config, config.mtp, /*hyper=*/false, weights.mtp.layer);
  mtp.island(weights.mtp.head_norm, "shared_head.norm.weight", {config.hidden}, Init::kOnes);
}

bool may_be_fp8(const Parameter& parameter, kernels::DeviceKind multiplied_on) {
  return parameter.linear && (multiplied_on == kernels::DeviceKind::kCpu || parameter.shape.back() % 16 == 0);
}

std::vector<Parameter> list_parameters(const ModelConfig& config, bool with_mtp) {
  std::vector<Parameter> out;
  ModelWeights unused;
  visit_parameters(config, unused, with_mtp, [&](Parameter parameter, Tensor&) { out.push_back(std::move(parameter)); });
  return out;
}

absl::StatusOr<WeightStore> WeightStore::create(
    const ModelConfig& config, bool with_mtp,
    const std::function<std::optional<DType>(const Parameter&)>& dtype_of, kernels::Device device) {
  int64_t bytes = kAlignment;
  for (const Parameter& p : list_parameters(config, with_mtp)) {
    const std::optional<DType> dtype = dtype_of(p);
    if (!dtype) continue;
    bytes += p.numel() * kernels::size_of(*dtype) + kAlignment;
    if (*dtype != DType::kF8E4M3) continue;
    const std::vector<int64_t> scales = scales_shape(p.shape);
    bytes += Tensor(nullptr, DType::kF32, scales.data(), static_cast<int>(scales.size())).bytes() + kAlignment;
  }
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create(device, bytes));
  WeightStore store(std::move(arena));
  store.with_mtp_ = with_mtp;
  visit_parameters(config, store.weights_, with_mtp, [&](Parameter parameter, Tensor& slot) {
    if (const std::optional<DType> dtype = dtype_of(parameter)) {
      slot = store.arena_.alloc(*dtype, parameter.shape);
      if (*dtype == DType::kF8E4M3)
        store.scales_[slot.raw()] = store.arena_.alloc(DType::kF32, scales_shape(parameter.shape));
    }
    store.entries_.push_back({std::move(parameter), slot});
  });
  return store;
}

absl::StatusOr<WeightStore> WeightStore::create_weights(const ModelConfig& config, DType dtype, bool with_mtp,
                                                        kernels::Device device,
                                                        const std::function<bool(const Parameter&)>& is_fp8) {
  if (dtype != DType::kF32 && dtype != DType::kBf16) {
    return absl::InvalidArgumentError(absl::StrCat("weights: ", kernels::name_of(dtype), ", expected f32 or bf16"));
  }
  ASSIGN_OR_RETURN(WeightStore store, create(config, with_mtp, [&](const Parameter& p) {
                     if (is_fp8 && is_fp8(p)) return DType::kF8E4M3;
                     return p.storage == Storage::kMatrix ? dtype : DType::kF32;
                   }, device));
  store.dtype_ = dtype;
  return store;
}

absl::StatusOr<WeightStore> WeightStore::create_gradients(const ModelConfig& config, bool with_mtp, bool train_frozen,
                                                          kernels::Device device) {
  return create(config, with_mtp, [&](const Parameter& p) {
    return p.frozen && !train_frozen ? std::nullopt : std::optional(DType::kF32);
  }, device);
}

absl::StatusOr<WeightStore> WeightStore::copy_to(const ModelConfig& config, kernels::Stream& stream, bool fp8) const {
  size_t next = 0;  // create() asks for every parameter twice, in the order of the entries
  const auto dtype_of = [&](const Parameter& p) -> std::optional<DType> {
    const Tensor& tensor = entries_[next++ % entries_.size()].tensor;
    if (tensor.empty()) return std::nullopt;
    return fp8 && may_be_fp8(p, stream.device().kind) ? DType::kF8E4M3 : tensor.dtype();
  };
  ASSIGN_OR_RETURN(WeightStore copy, create(config, with_mtp_, dtype_of, stream.device()));
  copy.dtype_ = dtype_;
  upload_to(copy, stream);
  return copy;
}

void WeightStore::upload_to(const WeightStore& device, kernels::Stream& stream) const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Tensor &from = entries_[i].tensor, &to = device.entries_[i].tensor;
    if (from.empty()) continue;
    if (from.dtype() == to.dtype()) {
      stream.upload(from.raw(), to);
      if (from.dtype() == DType::kF8E4M3) stream.upload(scales_.at(from.raw()).raw(), device.scales_.at(to.raw()));
    } else {
      upload_as_fp8(from, to, device.scales_.at(to.raw()), stream);
    }
  }
}

void WeightStore::download_from(const WeightStore& device, kernels::Stream& stream) const {
  CHECK(scales_.empty() && device.scales_.empty());
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].tensor.empty()) continue;
    CHECK(device.entries_[i].tensor.dtype() == entries_[i].tensor.dtype());
    stream.download(device.entries_[i].tensor, entries_[i].tensor.raw());
  }
}

int64_t WeightStore::bytes() const {
  int64_t bytes = 0;
  for (const Entry& entry : entries_) bytes += entry.tensor.empty() ? 0 : entry.tensor.bytes();
  for (const auto& [weight, scales] : scales_) bytes += scales.bytes();
  return bytes;
}

void WeightStore::zero() const {
  CHECK(arena_.device().kind == kernels::DeviceKind::kCpu);
  for (const Entry& entry : entries_) {
    if (!entry.tensor.empty()) std::memset(entry.tensor.raw(), 0, static_cast<size_t>(entry.tensor.bytes()));
  }
}

void WeightStore::zero(kernels::Stream& stream) const {
  for (const Entry& entry : entries_) {
    if (!entry.tensor.empty()) stream.zero(entry.tensor);
  }
}

}  // namespace slipstream::model
