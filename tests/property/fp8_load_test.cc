// Goal: where weights are wanted in fp8, an FP8 checkpoint's codes and scales reach the products as the file has them, whatever
// else it holds and in whatever shapes; what cannot be kept is dequantised and quantised again; what is wrong is refused by name.
// On a CUDA device too, where there is one.
#include <cmath>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "kernels/quantize/quantize.h"
#include "kernels/scaled_gemm/scaled_gemm.h"
#include "kernels/testing/op_test.h"
#include "model/host_values.h"
#include "model/testing/small_model.h"
#include "tests/property/fp8_checkpoint.h"
#include "tests/property/test_models.h"

namespace slipstream::model {
namespace {

using kernels::DeviceKind;
using kernels::DType;
using testing::Fp8Stored;
using testing::Fp8Writing;
using testing::save_fp8;

using Stored = std::map<std::string, Fp8Stored>;

kernels::Stream& cpu() {
  static const std::unique_ptr<kernels::Stream> two = *kernels::Stream::create_cpu(2);
  return *two;
}

// Blocks that no shape divides: 208 is 128 and 80, an expert has 24 rows.
const LoadedWeights& weights() {
  static const LoadedWeights weights = [] {
    ModelConfig config = testing::small_model(100, 208, /*mtp=*/true);
    config.init_std = 0.1f;
    return *random_weights(config, DType::kF32, 3, cpu());
  }();
  return weights;
}

std::string fresh_directory() {
  static const slipstream::testing::TemporaryDirectory all;
  static int next = 0;
  return absl::StrCat(all.path(), "/", next++);
}

LoadedWeights load(const std::string& dir, std::optional<DeviceKind> keep_for, DType dtype = DType::kBf16) {
  absl::StatusOr<LoadedWeights> loaded = load_weights(dir, dtype, cpu(), {.keep_fp8_for = keep_for});
  CHECK_OK(loaded.status());
  return *std::move(loaded);
}

std::string refusal(const Fp8Writing& writing) {
  const std::string dir = fresh_directory();
  save_fp8(weights(), dir, writing);
  std::string message(load_weights(dir, DType::kBf16, cpu(), {.keep_fp8_for = DeviceKind::kCpu}).status().message());
  return absl::StartsWith(message, dir) ? message.substr(dir.size()) : message;
}

std::string bytes_of(const Tensor& t, kernels::Stream& stream) {
  std::string bytes(static_cast<size_t>(t.bytes()), '\0');
  stream.download(t, bytes.data());
  return bytes;
}

void expect_same_bytes(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  EXPECT_EQ(bytes_of(a, cpu()), bytes_of(b, cpu())) << what;
}

// Every tensor and scale of two stores on the CPU.
void expect_same_stores(const WeightStore& a, const WeightStore& b) {
  for (size_t i = 0; i < a.entries().size(); ++i) {
    const Tensor &x = a.entries()[i].tensor, &y = b.entries()[i].tensor;
    const std::string& name = a.entries()[i].parameter.name;
    expect_same_bytes(x, y, name);
    if (x.dtype() == DType::kF8E4M3) expect_same_bytes(a.scales().at(x.raw()), b.scales().at(y.raw()), name);
  }
}

// A kept weight has the codes of its tensors in the file one after the other, and so the scales.
void expect_files(const WeightStore& store, const WeightStore::Entry& entry, const Stored& stored, kernels::Stream& stream) {
  std::string codes, scales;
  for (const FilePart& part : entry.parameter.parts) {
    const Fp8Stored& file = stored.at(part.name);
    codes.append(file.codes.begin(), file.codes.end());
    scales.append(reinterpret_cast<const char*>(file.scales.data()), file.scales.size() * sizeof(float));
  }
  EXPECT_EQ(bytes_of(entry.tensor, stream), codes) << entry.parameter.name;
  EXPECT_EQ(bytes_of(store.scales().at(entry.tensor.raw()), stream), scales) << entry.parameter.name;
}

std::vector<float> logprobs(const ModelConfig& config, const WeightStore& store, kernels::Stream& stream) {
  kernels::Arena arena = *kernels::Arena::create(stream.device(), int64_t{1} << 30);
  const std::unique_ptr<Model> model = *Model::create(config);
  const std::vector<int32_t> ids = testing::test_tokens(config, 40, 5);
  const Batch batch{.tokens = ids, .lengths = {40}, .cached = {}};
  const PreparedBatch prepared = *prepare_batch(config, batch, nullptr, arena, stream);
  Step step{stream, arena, prepared, nullptr, activation_dtype(stream, store.dtype()), &store.scales()};
  const Tensor hidden = model->forward(store.tensors(), step, nullptr);
  return host_values<float>(model->log_probs(store.tensors(), hidden, step.upload(ids), 1.0f, false, step).logprob, stream);
}

class Fp8LoadTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::kCpu) return;
    absl::StatusOr<std::unique_ptr<kernels::Stream>> created = kernels::Stream::create_cuda(0);
    if (!created.ok()) GTEST_SKIP() << created.status().message();
    cuda_ = *std::move(created);
  }
  kernels::Stream& stream() { return cuda_ ? *cuda_ : cpu(); }

  std::unique_ptr<kernels::Stream> cuda_;
};

TEST_P(Fp8LoadTest, CodesAndScalesAreTheFiles) {
  const std::string dir = fresh_directory();
  const Stored stored = save_fp8(weights(), dir);
  const LoadedWeights kept = load(dir, GetParam()), plain = load(dir, std::nullopt);
  EXPECT_TRUE(plain.store.scales().empty());
  const WeightStore there = *kept.store.copy_to(kept.config, stream(), /*fp8=*/true);
  const WeightStore again = *plain.store.copy_to(plain.config, cpu(), /*fp8=*/true);
  int linear = 0, stacked = 0, others = 0, changed = 0;
  for (size_t i = 0; i < kept.store.entries().size(); ++i) {
    const WeightStore::Entry& entry = kept.store.entries()[i];
    if (may_be_fp8(entry.parameter, GetParam())) {
      ++(entry.parameter.expert ? stacked : linear);
      ASSERT_EQ(entry.tensor.dtype(), DType::kF8E4M3) << entry.parameter.name;
      expect_files(kept.store, entry, stored, cpu());
      expect_files(there, there.entries()[i], stored, stream());
      changed += bytes_of(entry.tensor, cpu()) != bytes_of(again.entries()[i].tensor, cpu());
    } else {  // whether fp8 in the file or not
      others += stored.contains(entry.parameter.parts[0].name);
      expect_same_bytes(entry.tensor, plain.store.entries()[i].tensor, entry.parameter.name);
    }
  }
  const bool cuda = GetParam() == DeviceKind::kCuda;
  EXPECT_EQ(linear, cuda ? 10 : 18);
  EXPECT_EQ(stacked, cuda ? 4 : 6);
  EXPECT_EQ(others, cuda ? 17 : 7);      // kv_a, kv_b, eh_proj; on CUDA what is 20 or 24 wide
  EXPECT_EQ(changed, linear + stacked);  // by dequantising and quantising again
  EXPECT_LT(kept.store.bytes(), plain.store.bytes());
}

TEST_P(Fp8LoadTest, LogprobsAreThoseOfTheCodes) {
  const std::string dir = fresh_directory();
  save_fp8(weights(), dir, {.exact = true});
  const LoadedWeights kept = load(dir, GetParam()), plain = load(dir, std::nullopt);
  // Quantising what bf16 holds exactly, with 448 in every block, gives the same codes and scales.
  const WeightStore there = *kept.store.copy_to(kept.config, stream(), /*fp8=*/true);
  const WeightStore again = *plain.store.copy_to(plain.config, stream(), /*fp8=*/true);
  const std::vector<float> expected = logprobs(plain.config, again, stream());
  const std::vector<float> got = logprobs(kept.config, there, stream());
  EXPECT_EQ(std::memcmp(got.data(), expected.data(), expected.size() * sizeof(float)), 0);
  // The dequantised weights give others, as rows are not quantised there, but nearly the same.
  const std::vector<float> exact = logprobs(plain.config, *plain.store.copy_to(plain.config, stream()), stream());
  EXPECT_NE(got, exact);
  float difference = 0;
  for (size_t i = 0; i < got.size(); ++i) difference += std::abs(got[i] - exact[i]) / static_cast<float>(got.size());
  EXPECT_LT(difference, 0.25f);
}

INSTANTIATE_TEST_SUITE_P(Cpu, Fp8LoadTest, ::testing::Values(DeviceKind::kCpu));
#ifdef SLIPSTREAM_HAS_CUDA
INSTANTIATE_TEST_SUITE_P(Cuda, Fp8LoadTest, ::testing::Values(DeviceKind::kCuda));
#endif

// For CUDA's products what is 20 or 24 wide is dequantised, wherever that is loaded.
TEST(Fp8LoadTest, WidthsThatProductsDoNotTake) {
  const std::string dir = fresh_directory();
  save_fp8(weights(), dir);
  const LoadedWeights kept = load(dir, DeviceKind::kCuda);
  int narrow = 0;
  for (const auto& [parameter, tensor] : kept.store.entries()) {
    if (!parameter.linear) continue;
    EXPECT_EQ(tensor.dtype(), parameter.shape.back() % 16 == 0 ? DType::kF8E4M3 : DType::kBf16) << parameter.name;
    narrow += tensor.dtype() == DType::kBf16;
  }
  EXPECT_EQ(narrow, 10);
}

// What layers compute from a kept weight is the scaled product, by its definition, of the file's codes.
TEST(Fp8LoadTest, ProductsAreThoseOfTheFilesCodes) {
  const std::string dir = fresh_directory();
  Stored stored = save_fp8(weights(), dir);
  const LoadedWeights kept = load(dir, DeviceKind::kCpu);
  kernels::testing::TensorPool pool(7);
  kernels::Arena arena = *kernels::Arena::create_cpu(int64_t{1} << 28);
  const Batch batch{.tokens = {1}, .lengths = {1}, .cached = {}};
  const PreparedBatch prepared = *prepare_batch(kept.config, batch, nullptr, arena, cpu());
  Step step{cpu(), arena, prepared, nullptr, DType::kF32, &kept.store.scales()};
  int compared = 0;
  for (const WeightStore::Entry& entry : kept.store.entries()) {
    if (!entry.parameter.linear) continue;
    const int64_t experts = static_cast<int64_t>(entry.parameter.parts.size()), columns = entry.parameter.shape.back();
    const Tensor x = pool.random(DType::kF32, {3 * experts, columns}, -2.0f, 2.0f);
    std::vector<int32_t> row_begin;
    for (int64_t e = 0; e <= experts; ++e) row_begin.push_back(static_cast<int32_t>(3 * e));
    const Tensor y = step.alloc({3 * experts, entry.parameter.shape[entry.parameter.shape.size() - 2]});
    linears_into(step, {{.x = x, .w = entry.tensor, .y = y, .row_begin = entry.parameter.expert ? step.upload(row_begin) : Tensor()}});
    for (int64_t e = 0; e < experts; ++e) {
      Fp8Stored& file = stored.at(entry.parameter.parts[static_cast<size_t>(e)].name);
      const kernels::Quantize rows{.x = x.slice(0, 3 * e, 3 * e + 3), .codes = pool.zeros(DType::kF8E4M3, {3, columns}),
                                   .scales = pool.output(DType::kF32, {3, file.scales_shape[1]})};
      kernels::reference(rows);
      const Tensor expected = pool.output(DType::kF32, {3, file.rows});
      const Tensor codes(file.codes.data(), DType::kF8E4M3, {file.rows, file.columns});
      const Tensor scales(file.scales.data(), DType::kF32, {file.scales_shape[0], file.scales_shape[1]});
      kernels::reference(
          kernels::ScaledGemm{.a = rows.codes, .a_scales = rows.scales, .b = codes, .b_scales = scales, .c = expected});
      EXPECT_EQ(std::memcmp(y.slice(0, 3 * e, 3 * e + 3).raw(), expected.raw(), static_cast<size_t>(expected.bytes())), 0)
          << entry.parameter.name << " " << e;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 18 + 6 * 6);
}

// modules_to_not_convert: a layer that the file keeps in bf16, and one expert of another's, with which all its like go.
TEST(Fp8LoadTest, WhatTheFileKeepsInBf16IsQuantised) {
  const std::string dir = fresh_directory();
  const std::string expert = "model.layers.1.mlp.experts.3.up_proj.weight";
  save_fp8(weights(), dir, {.in_fp8 = [&](const std::string& name) {
    return name.ends_with("_proj.weight") && !absl::StrContains(name, "layers.0.") && name != expert;
  }});
  const LoadedWeights kept = load(dir, DeviceKind::kCpu), plain = load(dir, std::nullopt);
  const WeightStore there = *kept.store.copy_to(kept.config, cpu(), /*fp8=*/true);
  const WeightStore again = *plain.store.copy_to(plain.config, cpu(), /*fp8=*/true);
  int quantised = 0;
  for (size_t i = 0; i < kept.store.entries().size(); ++i) {
    const auto& [parameter, tensor] = kept.store.entries()[i];
    const Tensor& to = there.entries()[i].tensor;
    if (!parameter.linear) continue;
    EXPECT_EQ(to.dtype(), DType::kF8E4M3);
    const bool in_bf16 = parameter.layer == 0 || parameter.name == "model.layers.1.mlp.experts.up_proj";
    EXPECT_EQ(tensor.dtype(), in_bf16 ? DType::kBf16 : DType::kF8E4M3) << parameter.name;
    if (!in_bf16) continue;
    expect_same_bytes(to, again.entries()[i].tensor, parameter.name);
    expect_same_bytes(there.scales().at(to.raw()), again.scales().at(again.entries()[i].tensor.raw()), parameter.name);
    ++quantised;
  }
  EXPECT_EQ(quantised, 7);
}

TEST(Fp8LoadTest, OtherBlocksAreQuantisedAgain) {
  const std::string dir = fresh_directory();
  save_fp8(weights(), dir, {.block = 64});
  const LoadedWeights kept = load(dir, DeviceKind::kCpu), plain = load(dir, std::nullopt);
  EXPECT_TRUE(kept.store.scales().empty());
  expect_same_stores(kept.store, plain.store);
  const WeightStore there = *kept.store.copy_to(kept.config, cpu(), /*fp8=*/true);
  for (const WeightStore::Entry& entry : there.entries()) {
    EXPECT_EQ(entry.tensor.dtype() == DType::kF8E4M3, entry.parameter.linear) << entry.parameter.name;
  }
}

// A store that began with the file's codes takes a later version's bf16 as any other would, and an e4m3 one as it is.
TEST(Fp8LoadTest, LaterVersionsReplaceTheCodes) {
  const std::string dir = fresh_directory(), other = fresh_directory();
  save_fp8(weights(), dir);
  save_fp8(*random_weights(weights().config, DType::kF32, 4, cpu()), other);
  const LoadedWeights kept = load(dir, DeviceKind::kCpu);
  const LoadedWeights later = load(other, std::nullopt), codes = load(other, DeviceKind::kCpu);
  const WeightStore there = *kept.store.copy_to(kept.config, cpu(), /*fp8=*/true);
  later.store.upload_to(there, cpu());
  expect_same_stores(there, *later.store.copy_to(later.config, cpu(), /*fp8=*/true));
  codes.store.upload_to(there, cpu());
  expect_same_stores(there, *codes.store.copy_to(codes.config, cpu(), /*fp8=*/true));
}

TEST(Fp8LoadTest, RefusesByName) {
  const std::string damaged = "model.layers.1.mlp.experts.4.down_proj.weight";
  const auto with = [&](const std::function<void(Fp8Stored&)>& damage) {
    return refusal({.damage = [&](const std::string& name, Fp8Stored& stored) {
      if (name == damaged) damage(stored);
    }});
  };
  EXPECT_EQ(with([](Fp8Stored& s) { s.scales.clear(); }),
            "/model.safetensors: " + damaged + ": F8_E4M3 without its scales: no tensor " + damaged + "_scale_inv");
  EXPECT_EQ(with([](Fp8Stored& s) { s.scales_shape = {1, 2}; }),
            "/model.safetensors: " + damaged + "_scale_inv: F32 [1, 2], expected F32 [2, 1]");
  EXPECT_EQ(with([](Fp8Stored& s) { s.scales[1] = std::nanf(""); }),
            "/model.safetensors: " + damaged +
                "_scale_inv: block [1, 0]: scale nan, expected a finite one, above 0 where the block is not all zeros");
  EXPECT_EQ(with([](Fp8Stored& s) {
              s.rows /= 2;
              s.codes.resize(s.codes.size() / 2);
              s.scales_shape = {1, 1};
              s.scales.resize(1);
            }),
            "/model.safetensors: " + damaged + ": shape [104, 24], expected [208, 24]");
}

}  // namespace
}  // namespace slipstream::model
