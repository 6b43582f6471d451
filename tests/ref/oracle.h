/* SPDX-License-Identifier: MIT */
/*
 * oracle.h: one process that trains a synthetic model with full parameters and plain loops: what
 * the runtime must equal bit for bit, whatever its ranks, micro-batches, planner and transport.
 *
 *   ref::Model model;                                     // what tensors there are, and their
 * units model.tensors.push_back(ref::matrix("w", 0, 20, 30)); ref::Oracle oracle(model,
 * ref::OracleOptions(), mfsdp_host_math_loops()); ref::OracleVerdict v =
 * oracle.step(ref::OracleStep(8));          // eight sample blocks oracle.weight(0),
 * oracle.state(0, "momentum") ...
 *
 * "Backward" of a sample block is ref::synthetic_backward: terms of magnitudes from 2^-6 to 2^6, so
 * that two orders of adding them differ in bits, plus a share of the weight itself, so that a wrong
 * or late parameter shows.
 *
 * Written from the documents alone (orders: runtime.h, backend.h; blocks: plan/desc.h): it includes
 * no planner, collective, transport, optimizer or runtime. The one thing it borrows is
 * Newton-Schulz on a backend of its own, since its bits are those of the backend's products: the host
 * backend, or another (OracleDevice), whose sums of squares it then takes too.
 */
#ifndef MFSDP_TESTS_REF_ORACLE_H
#define MFSDP_TESTS_REF_ORACLE_H

#include "adamw_ref.h"

#include "mfsdp/host/backend_host.h"
#include "mfsdp/newton_schulz.h"

#include <functional>
#include <string>

namespace ref {

/* ---- the model ---- */

enum class Role { kMatrix, kElementwise, kFrozen };
enum class View { kWhole, kConv, kBatch, kRows, kHeads };

struct MatrixOf {
  int64_t first, rows, cols;
};

struct Tensor {
  std::string name;
  int32_t unit = 0, group = 0;
  Role role = Role::kElementwise;
  View view = View::kWhole;
  std::vector<int64_t> shape;
  std::vector<int64_t> part_rows; /* kRows, kBatch */
  int32_t heads = 0;              /* kHeads */
  mfsdp_dtype compute = MFSDP_F32, grad = MFSDP_F32, wire = MFSDP_F32;
  std::string tied_to; /* empty: has its own storage */
  /* What the view means, written down by hand: non-empty matrices in order. */
  std::vector<MatrixOf> matrices;

  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d : shape)
      n *= d;
    return n;
  }
};

inline Tensor make_tensor(const std::string &name, int32_t unit, Role role,
                          const std::vector<int64_t> &shape, int32_t group) {
  Tensor t;
  t.name = name;
  t.unit = unit;
  t.role = role;
  t.shape = shape;
  t.group = group;
  return t;
}

/* Group 0 is Muon, 1 is AdamW in the options below. */
inline Tensor matrix(const std::string &name, int32_t unit, int64_t rows, int64_t cols,
                     int32_t group = 0) {
  Tensor t = make_tensor(name, unit, Role::kMatrix, {rows, cols}, group);
  if (rows > 0 && cols > 0) t.matrices.push_back({0, rows, cols});
  return t;
}
inline Tensor elementwise(const std::string &name, int32_t unit, const std::vector<int64_t> &shape,
                          int32_t group = 1) {
  return make_tensor(name, unit, Role::kElementwise, shape, group);
}
inline Tensor frozen(const std::string &name, int32_t unit, const std::vector<int64_t> &shape) {
  return make_tensor(name, unit, Role::kFrozen, shape, 1);
}
/* (out, in, k, k) is one matrix out x in*k*k. */
inline Tensor conv(const std::string &name, int32_t unit, int64_t out, int64_t in, int64_t k,
                   int32_t group = 0) {
  Tensor t = make_tensor(name, unit, Role::kMatrix, {out, in, k, k}, group);
  t.view = View::kConv;
  t.matrices.push_back({0, out, in * k * k});
  return t;
}
/* (experts, rows, cols): a matrix each. */
inline Tensor experts(const std::string &name, int32_t unit, int64_t count, int64_t rows,
                      int64_t cols, int32_t group = 0) {
  Tensor t = make_tensor(name, unit, Role::kMatrix, {count, rows, cols}, group);
  t.view = View::kBatch;
  for (int64_t e = 0; e < count; ++e)
    t.matrices.push_back({e * rows * cols, rows, cols});
  return t;
}
/* The same with each expert cut by rows (fused gate and up). */
inline Tensor split_experts(const std::string &name, int32_t unit, int64_t count,
                            const std::vector<int64_t> &parts, int64_t cols, int32_t group = 0) {
  Tensor t = make_tensor(name, unit, Role::kMatrix, {count, 0, cols}, group);
  int64_t first = 0;
  t.view = View::kBatch;
  t.part_rows = parts;
  for (int64_t rows : parts)
    t.shape[1] += rows;
  for (int64_t e = 0; e < count; ++e)
    for (int64_t rows : parts) {
      if (rows > 0) t.matrices.push_back({first, rows, cols});
      first += rows * cols;
    }
  return t;
}
inline Tensor split_rows(const std::string &name, int32_t unit, const std::vector<int64_t> &parts,
                         int64_t cols, int32_t group = 0) {
  Tensor t = make_tensor(name, unit, Role::kMatrix, {0, cols}, group);
  t.view = View::kRows;
  t.part_rows = parts;
  for (int64_t rows : parts) {
    if (rows > 0) t.matrices.push_back({t.shape[0] * cols, rows, cols});
    t.shape[0] += rows;
  }
  return t;
}
inline Tensor split_heads(const std::string &name, int32_t unit, int64_t rows, int64_t cols,
                          int32_t heads, int32_t group = 0) {
  Tensor t = make_tensor(name, unit, Role::kMatrix, {rows, cols}, group);
  t.view = View::kHeads;
  t.heads = heads;
  for (int64_t h = 0; h < heads; ++h)
    t.matrices.push_back({h * (rows / heads) * cols, rows / heads, cols});
  return t;
}
inline Tensor tied(const std::string &name, int32_t unit, const Tensor &owner) {
  Tensor t = owner;
  t.name = name;
  t.unit = unit;
  t.tied_to = owner.name;
  return t;
}

struct Model {
  std::vector<Tensor> tensors;
  uint64_t seed = 20240711;

  int32_t count() const { return static_cast<int32_t>(tensors.size()); }
  const Tensor &at(int32_t i) const { return tensors[static_cast<std::size_t>(i)]; }
  /* The tensor that has the storage. */
  int32_t owner(int32_t i) const {
    if (at(i).tied_to.empty()) return i;
    for (int32_t k = 0; k < count(); ++k)
      if (at(k).name == at(i).tied_to) return k;
    throw std::logic_error("tied to an unknown tensor");
  }
  int32_t unit_count() const {
    int32_t n = 0;
    for (const Tensor &t : tensors)
      n = std::max(n, t.unit + 1);
    return n;
  }
  std::vector<int32_t> unit_tensors(int32_t unit) const {
    std::vector<int32_t> out;
    for (int32_t i = 0; i < count(); ++i)
      if (at(i).unit == unit) out.push_back(i);
    return out;
  }
};

/* ---- dtypes ---- */

/* To nearest, ties to even, by arithmetic alone: nothing here is shared with dtype.h. */
inline float round_to(mfsdp_dtype dtype, float value) {
  if (dtype == MFSDP_F32 || value == 0.0f || !std::isfinite(value)) return value;
  const bool bf16 = dtype == MFSDP_BF16;
  const int digits = bf16 ? 8 : 11, smallest = bf16 ? -126 : -14;
  const int exponent = std::max(std::ilogb(value), smallest);
  const double unit = std::ldexp(1.0, exponent - digits + 1);
  const double rounded = std::nearbyint(static_cast<double>(value) / unit) * unit;
  const double largest = std::ldexp(2.0 - std::ldexp(1.0, 1 - digits), bf16 ? 127 : 15);
  if (std::fabs(rounded) > largest) return value < 0 ? -HUGE_VALF : HUGE_VALF;
  return std::copysign(static_cast<float>(rounded), value);
}

inline void round_all(mfsdp_dtype dtype, std::vector<float> *values) {
  for (std::size_t i = 0; dtype != MFSDP_F32 && i < values->size(); ++i)
    (*values)[i] = round_to(dtype, (*values)[i]);
}

/* ---- the synthetic computation, shared with the programs under test ---- */

inline uint64_t mix(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

/* In [-1, 1) with 24 bits, times 2^-6 ... 2^6. */
inline float mixed_float(uint64_t bits) {
  const float unit =
      static_cast<float>(static_cast<int32_t>(bits & 0xffffffu) - 0x800000) * (1.0f / 0x800000);
  const int32_t exponent = static_cast<int32_t>((bits >> 32) % 13u) - 6;
  return exponent < 0 ? unit / static_cast<float>(1 << -exponent)
                      : unit * static_cast<float>(1 << exponent);
}

inline void synthetic_init(uint64_t seed, int32_t tensor, int64_t first, int64_t count,
                           float *dst) {
  const uint64_t key = mix(seed + 77u * static_cast<uint64_t>(tensor));
  for (int64_t i = 0; i < count; ++i)
    dst[i] = 0.05f * mixed_float(mix(key ^ static_cast<uint64_t>(first + i)));
}

/* What a sample block has of a tensor. */
enum class Sample { kPresent, kAbsent, kNan, kInf };

/* Adds the gradient that `block` of `step` gives to one use of a tensor, times the loss scale. */
inline void synthetic_backward(uint64_t seed, int64_t step, int64_t block, int32_t use,
                               Sample sample, const float *weight, int64_t numel, float *grad,
                               float scale = 1.0f) {
  if (sample == Sample::kAbsent) return;
  const uint64_t key =
      mix(mix(mix(seed + static_cast<uint64_t>(step)) + static_cast<uint64_t>(block)) +
          static_cast<uint64_t>(use));
  for (int64_t i = 0; i < numel; ++i) {
    const float share = 0.375f * weight[i];
    const float term = mixed_float(mix(key ^ static_cast<uint64_t>(i))) + share;
    const float scaled = scale * term;
    grad[i] = grad[i] + scaled;
  }
  if (numel > 0 && sample == Sample::kNan) grad[numel / 2] = std::nanf("");
  if (numel > 0 && sample == Sample::kInf) grad[numel - 1] = -HUGE_VALF;
}

inline double synthetic_value(uint64_t seed, int64_t step, int64_t block) {
  const uint64_t key = mix(mix(seed ^ static_cast<uint64_t>(step)) + static_cast<uint64_t>(block));
  return static_cast<double>(mixed_float(key)) * 0.1 + 3.0;
}

/* What is special about samples and steps; both sides ask it. */
struct Script {
  std::function<Sample(int64_t step, int64_t block, int32_t use)> sample;
  std::function<bool(int64_t step, int32_t unit)>
      unit_used; /* by all blocks of a step, or by none */
  std::function<double(int64_t step, int64_t block)> weight; /* set: the mean is over weights */

  Sample sample_of(int64_t step, int64_t block, int32_t use) const {
    return sample ? sample(step, block, use) : Sample::kPresent;
  }
  bool used(int64_t step, int32_t unit) const { return !unit_used || unit_used(step, unit); }
};

/* ---- options ---- */

struct OracleGroup {
  bool muon = false, clipped = true;
  double lr = 1e-2, weight_decay = 0.1;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;                              /* AdamW */
  double momentum = 0.95, grad_weight = 1 - 0.95, nesterov_weight = 1 - 0.95; /* Muon */
  bool nesterov = true, match_rms = false;
};

struct OracleLossScale {
  double initial = 0.0, growth = 2.0, backoff = 0.5, largest = 4294967296.0;
  int32_t growth_interval = 2000;
};

struct OracleOptions {
  std::vector<OracleGroup> groups;
  double clip_norm = 0.0;
  bool missing_is_zero = false;
  bool bands = false; /* the norm is summed over ceil(rows / 64) rows of a matrix at a time */
  OracleLossScale loss_scale;
  int64_t local_world = 0; /* > 0: each of so many ranks adds up its own blocks first */
  /* The sample blocks that reach a tensor's gradient. Each chain is summed by itself, from its
   * first term; then chain is added to chain. Not set: one chain of all blocks. With several groups
   * of ranks a model's tensors stand in the order in which the norm is folded. With local_world
   * it is asked for one block of each rank, which stands for the rank's sum. */
  std::function<std::vector<std::vector<int64_t>>(int32_t tensor, int64_t blocks)> chains;
  OracleOptions() : groups(2) {
    groups[0].muon = true;
    groups[0].clipped = false;
    groups[0].lr = 0.02;
  }
};

struct OracleStep {
  explicit OracleStep(int64_t block_count)
      : blocks(block_count), grad_weight(1.0 / static_cast<double>(block_count)) {}
  int64_t blocks;
  double grad_weight, lr_factor = 1.0;
};

struct OracleVerdict {
  int64_t step = 0, applied_steps = 0;
  double grad_norm = 0, clip_scale = 1, value_mean = 0, weight_sum = 0, loss_scale = 1;
  bool skipped = false;
};

/* Sum of squares as sumsq is documented to add: element i to lane i % 16, lanes folded in halves.
 */
inline double lane_sumsq(const float *x, int64_t count) {
  double lane[16] = {0};
  for (int64_t i = 0; i < count; ++i)
    lane[i % 16] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (int width = 8; width > 0; width /= 2)
    for (int k = 0; k < width; ++k)
      lane[k] += lane[k + width];
  return lane[0];
}

/* ---- the oracle ---- */

/* How a backend with memory of its own is made and destroyed. */
struct OracleDevice {
  mfsdp_status (*create)(mfsdp_context *context, void **out, const mfsdp_backend **backend);
  mfsdp_status (*destroy)(mfsdp_context *context, void *made);
};

class Oracle {
public:
  Oracle(const Model &model, const OracleOptions &options, const mfsdp_host_math *math,
         const Script &script = Script(), const OracleDevice *device = nullptr)
      : model_(model), options_(options), script_(script), device_(device) {
    mfsdp_context_desc context_desc = mfsdp_context_desc_default();
    mfsdp_host_backend_desc host_desc = mfsdp_host_backend_desc_default();
    host_desc.math = math;
    must(mfsdp_context_init(&context_, &context_desc));
    if (device != nullptr) {
      must(device->create(&context_, &made_, &backend_));
    } else {
      must(mfsdp_host_backend_create(&context_, &host_desc, &host_));
      backend_ = mfsdp_host_backend_get(host_);
    }
    must(backend_->ops->queue_create(backend_->self, &context_, "oracle", &queue_));
    must(backend_->ops->event_create(backend_->self, &context_, &event_));
    for (int32_t i = 0; i < model.count(); ++i) {
      const std::size_t n = static_cast<std::size_t>(model.at(i).numel());
      weights_.emplace_back(n);
      for (std::vector<std::vector<float>> *table : {&grads_, &state0_, &state1_})
        table->emplace_back(n, 0.0f);
      synthetic_init(model.seed, i, 0, model.at(i).numel(), weights_.back().data());
      if (model.at(i).role == Role::kFrozen) round_all(model.at(i).compute, &weights_.back());
    }
    if (options.loss_scale.initial > 0) loss_scale_ = options.loss_scale.initial;
  }
  Oracle(const Oracle &) = delete;
  Oracle &operator=(const Oracle &) = delete;
  ~Oracle() {
    backend_->ops->queue_destroy(backend_->self, &context_, queue_);
    backend_->ops->event_destroy(backend_->self, &context_, event_);
    (void)mfsdp_host_backend_destroy(&context_, host_);
    if (device_ != nullptr) (void)device_->destroy(&context_, made_);
    (void)mfsdp_context_destroy(&context_);
  }

  const std::vector<float> &weight(int32_t tensor) const {
    return at(weights_, model_.owner(tensor));
  }
  /* "momentum", "exp_avg" or "exp_avg_sq" of the whole tensor. */
  const std::vector<float> &state(int32_t tensor, const std::string &name) const {
    return name == "exp_avg_sq" ? at(state1_, tensor) : at(state0_, tensor);
  }
  const Model &model() const { return model_; }

  OracleVerdict step(const OracleStep &desc) {
    OracleVerdict v;
    std::vector<bool> present(weights_.size(), options_.missing_is_zero);
    accumulate(desc, &present);
    const double sum = norm_sum();
    v.step = step_++;
    v.loss_scale = loss_scale_;
    double scale = desc.grad_weight / loss_scale_;
    for (int64_t b = 0; b < desc.blocks && script_.weight; ++b)
      v.weight_sum += script_.weight(v.step, b);
    if (script_.weight) scale = scale / v.weight_sum;
    v.grad_norm = std::sqrt(sum) * std::fabs(scale);
    v.skipped = !std::isfinite(sum) || (script_.weight && v.weight_sum == 0.0) ||
                v.grad_norm > std::ldexp(1.0, 127) || std::fabs(scale) > std::ldexp(1.0, 127);
    if (options_.clip_norm > 0) {
      const double ratio = options_.clip_norm / (v.grad_norm + 1e-6);
      if (ratio < 1.0) v.clip_scale = ratio;
    }
    for (int64_t b = 0; b < desc.blocks; ++b)
      v.value_mean += (script_.weight ? script_.weight(v.step, b) : 1.0) *
                      synthetic_value(model_.seed, v.step, b);
    v.value_mean /= script_.weight ? v.weight_sum : static_cast<double>(desc.blocks);
    if (!v.skipped) {
      ++applied_;
      for (int32_t i = 0; i < model_.count(); ++i)
        if (trainable(i) && present[static_cast<std::size_t>(i)])
          update(i, desc, scale, v.clip_scale);
    }
    if (!script_.weight || v.weight_sum > 0.0) adapt_loss_scale(v.skipped);
    v.applied_steps = applied_;
    return v;
  }

private:
  template <class T> static T &at(std::vector<T> &v, int32_t i) {
    return v[static_cast<std::size_t>(i)];
  }
  template <class T> static const T &at(const std::vector<T> &v, int32_t i) {
    return v[static_cast<std::size_t>(i)];
  }
  void must(mfsdp_status status) {
    if (status != MFSDP_OK) throw std::runtime_error(mfsdp_context_error(&context_)->message);
  }
  bool trainable(int32_t i) const {
    return model_.at(i).role != Role::kFrozen && model_.owner(i) == i;
  }

  /* torch.amp.GradScaler's rule. */
  void adapt_loss_scale(bool overflow) {
    const OracleLossScale &rule = options_.loss_scale;
    if (rule.initial == 0) return;
    good_steps_ = overflow ? 0 : good_steps_ + 1;
    if (overflow) loss_scale_ *= rule.backoff;
    if (good_steps_ < rule.growth_interval) return;
    good_steps_ = 0;
    loss_scale_ = std::min(loss_scale_ * rule.growth, rule.largest);
  }

  /* One micro-batch's gradients: units last to first, uses of a tied tensor in that order. Added to
   * what is there in the gradient dtype. */
  void backward(int64_t block, std::vector<std::vector<float>> *terms, std::vector<bool> *present) {
    for (int32_t unit = model_.unit_count(); unit-- > 0;) {
      if (!script_.used(step_, unit)) continue;
      for (int32_t i : model_.unit_tensors(unit)) {
        const int32_t owner = model_.owner(i);
        const Sample sample = script_.sample_of(step_, block, i);
        if (model_.at(i).role == Role::kFrozen) continue;
        if (sample != Sample::kAbsent) (*present)[static_cast<std::size_t>(owner)] = true;
        synthetic_backward(model_.seed, step_, block, i, sample, at(seen_, owner).data(),
                           model_.at(i).numel(), at(*terms, owner).data(),
                           static_cast<float>(loss_scale_));
        round_all(model_.at(i).grad, &at(*terms, owner));
      }
    }
  }

  /* The fp32 chain over sample blocks, or over what ranks added up; it starts from the first term.
   */
  void accumulate(const OracleStep &desc, std::vector<bool> *present) {
    const int64_t terms_count = options_.local_world > 0 ? options_.local_world : desc.blocks;
    std::vector<std::vector<float>> terms(weights_.size());
    seen_ = weights_;
    for (int32_t i = 0; i < model_.count(); ++i)
      round_all(model_.at(i).compute, &at(seen_, i));
    if (options_.chains) return accumulate_chains(desc, present);
    for (int64_t first = 0; first < terms_count; ++first) {
      for (int32_t i = 0; i < model_.count(); ++i)
        at(terms, i).assign(at(weights_, i).size(), 0.0f);
      for (int64_t block = first; block < desc.blocks; block += terms_count)
        backward(block, &terms, present);
      for (int32_t i = 0; i < model_.count(); ++i) {
        std::vector<float> &sum = at(grads_, i);
        round_all(model_.at(i).wire, &at(terms, i));
        for (std::size_t k = 0; k < sum.size(); ++k)
          sum[k] = first == 0 ? at(terms, i)[k] : sum[k] + at(terms, i)[k];
      }
    }
  }

  /* The same with options_.chains: of sample blocks, or of what ranks added up. */
  void accumulate_chains(const OracleStep &desc, std::vector<bool> *present) {
    const int64_t count = options_.local_world > 0 ? options_.local_world : desc.blocks;
    std::vector<std::vector<std::vector<float>>> terms(static_cast<std::size_t>(count));
    std::vector<std::vector<bool>> here(terms.size(), std::vector<bool>(weights_.size(), false));
    for (std::size_t b = 0; b < terms.size(); ++b) {
      for (int32_t i = 0; i < model_.count(); ++i)
        terms[b].emplace_back(at(weights_, i).size(), 0.0f);
      for (int64_t block = static_cast<int64_t>(b); block < desc.blocks; block += count)
        backward(block, &terms[b], &here[b]);
      for (int32_t i = 0; i < model_.count(); ++i)
        round_all(model_.at(i).wire, &at(terms[b], i));
    }
    for (int32_t i = 0; i < model_.count(); ++i) {
      bool first_chain = true;
      for (const std::vector<int64_t> &chain : options_.chains(i, count)) {
        std::vector<float> part;
        for (int64_t block : chain) {
          const std::size_t b = static_cast<std::size_t>(block);
          if (here.at(b)[static_cast<std::size_t>(i)])
            (*present)[static_cast<std::size_t>(i)] = true;
          add(at(terms[b], i), block == chain.front(), &part);
        }
        add(part, first_chain, &at(grads_, i));
        first_chain = false;
      }
    }
  }

  static void add(const std::vector<float> &term, bool first, std::vector<float> *sum) {
    if (first)
      *sum = term;
    else
      for (std::size_t k = 0; k < sum->size(); ++k)
        (*sum)[k] = (*sum)[k] + term[k];
  }

  /* Blocks in tensor order: a matrix, or max(4096, power of two >= numel / 1024) elements. */
  double norm_sum() {
    double sum = 0.0;
    for (int32_t i = 0; i < model_.count(); ++i) {
      const Tensor &t = model_.at(i);
      const float *grad = at(grads_, i).data();
      int64_t block = 4096;
      if (!trainable(i)) continue;
      if (t.role == Role::kMatrix) {
        for (const MatrixOf &m : t.matrices) {
          const int64_t rows = options_.bands ? std::max<int64_t>((m.rows + 63) / 64, 1) : m.rows;
          for (int64_t r = 0; r < m.rows; r += rows)
            sum += sumsq(grad + m.first + r * m.cols, std::min(rows, m.rows - r) * m.cols);
        }
        continue;
      }
      while (block * 1024 < t.numel())
        block *= 2;
      for (int64_t first = 0; first < t.numel(); first += block)
        sum += sumsq(grad + first, std::min(block, t.numel() - first));
    }
    return sum;
  }

  void update(int32_t i, const OracleStep &desc, double grad_scale, double clip_scale) {
    const OracleGroup &g = options_.groups[static_cast<std::size_t>(model_.at(i).group)];
    const double scale = grad_scale * (g.clipped ? clip_scale : 1.0);
    if (g.muon) {
      for (const MatrixOf &m : model_.at(i).matrices)
        muon(g, i, m, static_cast<float>(scale), g.lr * desc.lr_factor);
      return;
    }
    AdamwOptions o;
    o.lr = g.lr * desc.lr_factor;
    o.beta1 = g.beta1;
    o.beta2 = g.beta2;
    o.eps = g.eps;
    o.weight_decay = g.weight_decay;
    o.grad_scale = scale;
    adamw_step_f32(o, applied_, at(grads_, i), &at(state0_, i), &at(state1_, i), &at(weights_, i));
  }

  void muon(const OracleGroup &g, int32_t i, const MatrixOf &m, float scale, double lr) {
    const std::size_t count = static_cast<std::size_t>(m.rows * m.cols);
    const float *grad = at(grads_, i).data() + m.first;
    float *momentum = at(state0_, i).data() + m.first, *w = at(weights_, i).data() + m.first;
    const float mu = static_cast<float>(g.momentum), weight = static_cast<float>(g.grad_weight);
    const float look = static_cast<float>(g.nesterov_weight);
    const double rows = static_cast<double>(m.rows), cols = static_cast<double>(m.cols);
    const double shape_scale =
        g.match_rms ? 0.2 * std::sqrt(std::max(rows, cols)) : std::sqrt(std::max(1.0, rows / cols));
    const float decay = static_cast<float>(1.0 - lr * g.weight_decay);
    const float step_size = static_cast<float>(lr * shape_scale);
    std::vector<float> direction(count);
    for (std::size_t k = 0; k < count; ++k) {
      const float gk = grad[k] * scale, old_share = mu * momentum[k], new_share = weight * gk;
      momentum[k] = old_share + new_share;
      const float ahead = look * gk, behind = mu * momentum[k];
      direction[k] = g.nesterov ? ahead + behind : momentum[k];
    }
    orthogonalize(m.rows, m.cols, &direction);
    for (std::size_t k = 0; k < count; ++k) {
      const float decayed = w[k] * decay, change = step_size * direction[k];
      w[k] = decayed - change;
    }
  }

  void orthogonalize(int64_t rows, int64_t cols, std::vector<float> *x) {
    const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
    std::size_t nbytes = 0;
    must(mfsdp_newton_schulz_workspace_nbytes(&context_, &desc, rows, cols, &nbytes));
    void *workspace = allocate(nbytes);
    float *data = device_ != nullptr ? static_cast<float *>(upload(*x)) : x->data();
    must(mfsdp_newton_schulz(&context_, backend_, queue_, &desc, rows, cols, data, data, workspace,
                             nbytes));
    if (device_ != nullptr) download(x->data(), data, x->size() * sizeof(float));
    if (device_ != nullptr) release(data, x->size() * sizeof(float));
    release(workspace, nbytes);
  }

  /* As the backend adds. */
  double sumsq(const float *x, int64_t count) {
    if (device_ == nullptr || count == 0) return lane_sumsq(x, count);
    const std::vector<float> values(x, x + count);
    const std::vector<mfsdp_block> block(1, mfsdp_block{0, count, 0, 0});
    double sum = 0;
    float *data = static_cast<float *>(upload(values));
    mfsdp_block *blocks = static_cast<mfsdp_block *>(upload(block));
    double *slot = static_cast<double *>(allocate(sizeof(double)));
    must(backend_->ops->sumsq(backend_->self, queue_, slot, data, blocks, 1));
    download(&sum, slot, sizeof(sum));
    release(slot, sizeof(double));
    release(blocks, sizeof(mfsdp_block));
    release(data, values.size() * sizeof(float));
    return sum;
  }

  /* ---- DEVICE memory ---- */

  void *allocate(std::size_t nbytes) {
    void *data = nullptr;
    must(backend_->ops->mem_alloc(backend_->self, &context_, nbytes, MFSDP_ALIGN_NBYTES,
                                  MFSDP_SPACE_DEVICE, &data));
    return data;
  }
  void release(void *data, std::size_t nbytes) {
    backend_->ops->mem_free(backend_->self, &context_, data, nbytes, MFSDP_SPACE_DEVICE);
  }
  /* `values` stay until the next download, which waits for the queue. */
  template <class T> void *upload(const std::vector<T> &values) {
    void *data = allocate(values.size() * sizeof(T));
    must(backend_->ops->copy(backend_->self, queue_, data, MFSDP_SPACE_DEVICE, values.data(),
                             MFSDP_SPACE_HOST, values.size() * sizeof(T)));
    return data;
  }
  void download(void *to, const void *data, std::size_t nbytes) {
    must(backend_->ops->copy(backend_->self, queue_, to, MFSDP_SPACE_HOST, data, MFSDP_SPACE_DEVICE,
                             nbytes));
    must(backend_->ops->event_record(backend_->self, queue_, event_));
    must(backend_->ops->event_wait(backend_->self, &context_, event_, INT64_C(60000000)));
  }

  Model model_;
  OracleOptions options_;
  Script script_;
  mfsdp_context context_;
  const OracleDevice *device_;
  mfsdp_host_backend *host_ = nullptr; /* or made_ */
  void *made_ = nullptr;
  const mfsdp_backend *backend_ = nullptr;
  mfsdp_queue *queue_ = nullptr;
  mfsdp_event *event_ = nullptr;
  std::vector<std::vector<float>> weights_, grads_, state0_, state1_;
  std::vector<std::vector<float>> seen_; /* weights in compute dtypes, as backward sees them */
  int64_t step_ = 0, applied_ = 0, good_steps_ = 0;
  double loss_scale_ = 1.0;
};

} // namespace ref

#endif
