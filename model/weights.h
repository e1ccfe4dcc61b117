// The tensors of a model: what they are called, what shape they have, where they live.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/status.h"
#include "kernels/arena.h"
#include "kernels/stream.h"
#include "model/config.h"

namespace slipstream::model {

using kernels::Tensor;

// One struct serves weights and their gradients; what a layer does not have, and the gradient of what is frozen, is an
// absent tensor. Shapes as [out x in]; H hidden, F intermediate, E experts.
struct IndexerWeights {
  Tensor wq_b;          // [Hi*Di x q_lora_rank]
  Tensor wk;            // [Di x H]
  Tensor k_norm_w;      // [Di]
  Tensor k_norm_b;      // [Di]
  Tensor weights_proj;  // [Hi x H]
  Tensor pool_gate;     // [Di x H]  pooled only
  Tensor pool_ape;      // [P x Di]  pooled only
};

struct MlaWeights {
  Tensor q_proj;                  // [h*qk x H], when there is no low-rank query
  Tensor q_a, q_a_bias;           // [q_lora_rank x H], [q_lora_rank]
  Tensor q_a_norm;                // [q_lora_rank]
  Tensor q_b;                     // [h*qk x q_lora_rank]
  Tensor kv_a, kv_a_bias;         // [kv_lora_rank + rope x H], [kv_lora_rank + rope]
  Tensor kv_a_norm;               // [kv_lora_rank]
  Tensor kv_b;                    // [h, nope + v, kv_lora_rank]: per head W_UK, then W_UV
  Tensor o, o_bias;               // [H x h*v], [H]
  IndexerWeights indexer;         // on full layers
};

struct GqaWeights {
  Tensor q, q_bias;  // [h*d x H], [h*d]
  Tensor k, k_bias;  // [kv*d x H]
  Tensor v, v_bias;  // [kv*d x H]
  Tensor q_norm;     // [d]
  Tensor k_norm;     // [d]
  Tensor o;          // [H x h*d]
};

struct KdaWeights {
  Tensor q, k, v;   // [h*d x H] each
  Tensor conv;      // [3*h*d x K]: the convolutions of q, k and v one below the other
  Tensor b;         // [h x H]
  Tensor f_a, f_b;  // [d x H], [h*d x d]
  Tensor a_log;     // [h]
  Tensor dt_bias;   // [h*d]
  Tensor g_a, g_b;  // [d x H], [h*d x d]
  Tensor o_norm;    // [d]
  Tensor o;         // [H x h*d]
};

struct MlpWeights {
  Tensor gate, up;  // [F x H]
  Tensor down;      // [H x F]
};

struct MoeWeights {
  Tensor router;         // [E x H]
  Tensor router_bias;    // [E], frozen
  Tensor gate, up;       // [E, F, H]
  Tensor down;           // [E, H, F]
  MlpWeights shared;     // absent without shared experts
};

struct HyperWeights {
  Tensor fn;     // [(2+n)n x nH]
  Tensor base;   // [(2+n)n]
  Tensor scale;  // [3]
};

struct LayerWeights {
  Tensor input_norm;  // [H]
  Tensor post_norm;   // [H]
  MlaWeights mla;
  GqaWeights gqa;
  KdaWeights kda;
  MlpWeights mlp;
  MoeWeights moe;
  HyperWeights attn_hyper, mlp_hyper;
};

// The multi-token-prediction block (model-spec 8). Its lm_head and embedding are the model's.
struct MtpWeights {
  Tensor enorm, hnorm;  // [H]
  Tensor eh_proj;       // [H x 2H]
  Tensor head_norm;     // [H]
  LayerWeights layer;
};

struct ModelWeights {
  Tensor embedding;  // [V x H]
  Tensor norm;       // [H]
  Tensor lm_head;    // [V x H]
  std::vector<LayerWeights> layers;
  MtpWeights mtp;    // tensors absent when the checkpoint has none
};

enum class ParameterGroup { kBackbone, kEmbedding, kLmHead, kMtp };

// Matrices are kept and computed in the model's dtype. Vectors, norms, convolutions and mHC weights are fp32 islands:
// they are kept in fp32 and written to files in the model's dtype, but for the router bias, which stays fp32.
enum class Storage { kMatrix, kIsland, kFp32 };

// A tensor of a checkpoint file: rows [row_begin, row_end) of the parameter seen as a matrix [rows x columns].
struct FilePart {
  std::string name;
  std::vector<int64_t> shape;
  int64_t row_begin = 0;
  int64_t row_end = 0;
};

enum class Init { kNormal, kOnes, kZeros, kDecay, kDecayBias };  // kDecay*: a_log and dt_bias of KDA

struct Parameter {
  std::string name;            // the checkpoint's name; for stacked ones with the expert number left out
  std::vector<int64_t> shape;  // in memory
  Storage storage = Storage::kMatrix;
  ParameterGroup group = ParameterGroup::kBackbone;
  int64_t layer = -1;          // -1: outside the layers; num_hidden_layers: the MTP block
  bool frozen = false;         // gets no gradient by default: the router bias and the indexer
  bool expert = false;         // one of E alike, of which a token uses a few
  bool linear = false;         // a large matrix that is nothing but the weight of a linear layer without bias: may be fp8
  Init init = Init::kNormal;
  std::vector<FilePart> parts;
  int64_t numel() const;
};

// Calls visit(parameter, slot) for every parameter of the architecture in a fixed order (embedding, layers, norm, head,
// MTP). `weights` has its layers sized here. The one place that knows checkpoint tensor names.
using ParameterVisitor = std::function<void(Parameter parameter, Tensor& slot)>;
void visit_parameters(const ModelConfig& config, ModelWeights& weights, bool with_mtp, const ParameterVisitor& visit);
// The list alone.
std::vector<Parameter> list_parameters(const ModelConfig& config, bool with_mtp);

// The scales of weights that are e4m3 (kernels/quantize/quantize.h), by the address of the weight.
using WeightScales = std::unordered_map<const void*, Tensor>;

// Owns the memory of a set of weights or gradients. Movable; tensors stay where they are.
class WeightStore {
 public:
  // Weights in `dtype` (f32 or bf16; islands always f32), uninitialised.
  static absl::StatusOr<WeightStore> create_weights(const ModelConfig& config, kernels::DType dtype, bool with_mtp,
                                                    kernels::Device device = {});
  // Gradients: f32, zero on the CPU, elsewhere uninitialised; absent for frozen parameters unless train_frozen.
  static absl::StatusOr<WeightStore> create_gradients(const ModelConfig& config, bool with_mtp,
                                                      bool train_frozen = false, kernels::Device device = {});

  // The same tensors on the stream's device, with their values. `this` is on the CPU. fp8: large matrices of linear layers
  // become e4m3 with scales of 128 x 128 blocks. (Weights that were such before get their codes back, where a block's largest
  // is 448.)
  absl::StatusOr<WeightStore> copy_to(const ModelConfig& config, kernels::Stream& stream, bool fp8 = false) const;
  // The values alone, to a store that copy_to() made, and back from one (not fp8).
  void upload_to(const WeightStore& device, kernels::Stream& stream) const;
  void download_from(const WeightStore& device, kernels::Stream& stream) const;

  ModelWeights& tensors() { return weights_; }
  const ModelWeights& tensors() const { return weights_; }
  // Every parameter with its tensor (absent where it has none), in visit_parameters' order.
  struct Entry {
    Parameter parameter;
    Tensor tensor;
  };
  const std::vector<Entry>& entries() const { return entries_; }
  const WeightScales& scales() const { return scales_; }  // empty without fp8
  bool with_mtp() const { return with_mtp_; }
  kernels::Device device() const { return arena_.device(); }
  kernels::DType dtype() const { return dtype_; }  // of matrices that are not fp8
  // Every tensor, for the next step's gradients; without a stream on the CPU.
  void zero() const;
  void zero(kernels::Stream& stream) const;

 private:
  explicit WeightStore(kernels::Arena arena) : arena_(std::move(arena)) {}
  // dtype_of: nullopt leaves the tensor absent.
  static absl::StatusOr<WeightStore> create(
      const ModelConfig& config, bool with_mtp,
      const std::function<std::optional<kernels::DType>(const Parameter&)>& dtype_of, kernels::Device device = {});
  kernels::Arena arena_;
  ModelWeights weights_;
  std::vector<Entry> entries_;
  WeightScales scales_;
  bool with_mtp_ = false;
  kernels::DType dtype_ = kernels::DType::kF32;
};

}  // namespace slipstream::model
