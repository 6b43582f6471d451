/* SPDX-License-Identifier: MIT */
/*
 * runtime_rig.h: a trainer of ref::Model on the runtime, one per rank, and its comparison with
 * ref::Oracle bit for bit.
 *
 *   test::Job job = test::mixed_job();
 *   test::Expected expected(job, 8, 4);                          // 8 sample blocks, 4 steps
 *   EXPECT_EQ(test::run_job(job, 4, 2, expected), "");           // 4 ranks, 2 micro-batches
 *
 * or by hand, inside test::run_ranks:
 *
 *   test::Trainer trainer(&rank, &job, micro_batches);
 *   MFSDP_TRY(trainer.create());
 *   MFSDP_TRY(trainer.step(0));
 *   trainer.compare(expected, 0);                                // throws what differs
 *   return trainer.destroy();
 */
#ifndef MFSDP_TESTS_RUNTIME_RUNTIME_RIG_H
#define MFSDP_TESTS_RUNTIME_RUNTIME_RIG_H

#include "../ref/oracle.h"
#include "../support/ranks.h"

#include "mfsdp/runtime.h"
#if MFSDP_EXAMPLE_CBLAS
#include "mfsdp/host/math_cblas.h"
#endif

#include <gtest/gtest.h>

namespace test {

/* ---- what is trained ---- */

struct Job {
  ref::Model model;
  ref::OracleOptions options;
  ref::Script script;
  mfsdp_planner planner = MFSDP_PLANNER_SCOPE_GREEDY;
  mfsdp_placement placement = MFSDP_PLACEMENT_OWNED; /* of all tensors; BANDED: of matrices */
  mfsdp_residency residency = MFSDP_RESIDENCY_SHARDED;
  const mfsdp_host_math *math = mfsdp_host_math_loops();
  mfsdp_host_queue_kind queue_kind = MFSDP_HOST_QUEUE_INLINE;
  bool cuda = false; /* ranks that share a device; math and queue_kind play no part */
  NcclOptions nccl;  /* on, beside cuda: ranks with a device each */
  bool on_queue =
      false; /* the trainer computes on a queue of its own, never on the rank's thread */
  int32_t active_units = 1, active_grads = 1, max_micro_batches = 8;
  std::size_t chunk_nbytes = 4096; /* several rounds for most units */
  int32_t debug_poison = 0, debug_check = 0;
  std::function<void(mfsdp_runtime_desc *)> tune; /* other options, set before create */
  std::function<double(int64_t step)> schedule;   /* what desc.schedule, set by tune, must give */
  /* What a rank's backward is about to touch, at once or in its queue (race detection). */
  std::function<void(int32_t rank, const void *weight, std::size_t weight_nbytes, void *grad,
                     std::size_t grad_nbytes)>
      touch;
};

inline std::vector<const mfsdp_host_math *> maths() {
  std::vector<const mfsdp_host_math *> out(1, mfsdp_host_math_loops());
#if MFSDP_EXAMPLE_CBLAS
  out.push_back(mfsdp_host_math_cblas());
#endif
  return out;
}

/* Every role and view; empty, 1xN and Nx1 tensors; a unit number without tensors, a unit without
 * matrices; weights tied across units and within one. */
inline ref::Model mixed_model() {
  ref::Model m;
  m.tensors.push_back(ref::elementwise("embed", 0, {300, 40})); /* three canonical blocks */
  m.tensors.push_back(ref::elementwise("position", 0, {16, 40}));
  m.tensors.push_back(ref::split_heads("qkv", 1, 36, 20, 3));
  m.tensors.push_back(ref::matrix("out", 1, 20, 12));
  m.tensors.push_back(ref::elementwise("norm", 1, {40}, 2));
  m.tensors.push_back(ref::conv("conv", 1, 32, 2, 2)); /* 32 x 8 */
  m.tensors.push_back(ref::experts("experts", 1, 3, 8, 24));
  m.tensors.push_back(ref::split_rows("gate_up", 1, {16, 0, 10}, 20));
  m.tensors.push_back(ref::matrix("row", 1, 1, 50));
  m.tensors.push_back(ref::matrix("column", 1, 33, 1));
  m.tensors.push_back(ref::matrix("no_rows", 1, 0, 8));
  m.tensors.push_back(ref::elementwise("no_columns", 1, {8, 0}));
  m.tensors.push_back(ref::elementwise("norm2", 2, {65}, 2));
  m.tensors.push_back(ref::elementwise("bias2", 2, {7}, 2));
  /* Unit 3 has nothing. */
  m.tensors.push_back(ref::matrix("wide", 4, 66, 80)); /* the symmetric form */
  m.tensors.push_back(ref::frozen("mask", 4, {90, 50}));
  m.tensors.push_back(ref::matrix("tall", 4, 80, 30, 1)); /* a matrix that AdamW updates */
  m.tensors.push_back(ref::tied("wide_again", 4, m.tensors[14]));
  m.tensors.push_back(ref::elementwise("norm5", 5, {40}, 2));
  m.tensors.push_back(ref::tied("head", 5, m.tensors[0]));
  return m;
}

inline ref::OracleOptions three_groups() {
  ref::OracleOptions o;
  o.groups.resize(3);
  o.groups[0].muon = true;
  o.groups[0].clipped = true; /* not the default, so that the option shows */
  o.groups[0].lr = 0.02;
  o.groups[0].weight_decay = 0.01;
  o.groups[1].lr = 3e-3;
  o.groups[1].weight_decay = 0.1;
  o.groups[2].lr = 7e-3;
  o.groups[2].weight_decay = 0.0;
  o.groups[2].clipped = false;
  return o;
}

inline Job mixed_job() {
  Job job;
  job.model = mixed_model();
  job.options = three_groups();
  job.options.clip_norm = 1.5;
  return job;
}

/* Two units, five tensors: for tests where the model does not matter. */
inline Job small_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
  job.model.tensors.push_back(ref::matrix("a", 1, 12, 10));
  job.model.tensors.push_back(ref::matrix("b", 1, 10, 14));
  job.model.tensors.push_back(ref::elementwise("bias", 1, {10}));
  job.model.tensors.push_back(ref::matrix("c", 2, 6, 20));
  job.options.clip_norm = 2.0;
  return job;
}

/* Dtypes of the tensors with storage in `unit` (-1: in any) and of those tied to them. A unit with a
 * tied tensor keeps f32 gradients: they add up there, and create insists on it. */
inline void set_dtypes(ref::Model *model, int32_t unit, mfsdp_dtype compute, mfsdp_dtype grad,
                       mfsdp_dtype wire) {
  std::vector<bool> sums(static_cast<std::size_t>(model->unit_count()), false);
  for (int32_t i = 0; i < model->count(); ++i)
    if (model->owner(i) != i)
      sums[static_cast<std::size_t>(model->at(model->owner(i)).unit)] = true;
  for (int32_t i = 0; i < model->count(); ++i) {
    const int32_t owner_unit = model->at(model->owner(i)).unit;
    ref::Tensor *t = &model->tensors[static_cast<std::size_t>(i)];
    if (unit >= 0 && owner_unit != unit) continue;
    t->compute = compute;
    t->grad = sums[static_cast<std::size_t>(owner_unit)] ? MFSDP_F32 : grad;
    t->wire = wire;
  }
}

/* ---- conversions to the library's descriptions ---- */

inline mfsdp_param param_of(const ref::Tensor &t) {
  static const mfsdp_view views[] = {MFSDP_VIEW_WHOLE, MFSDP_VIEW_CONV, MFSDP_VIEW_BATCH,
                                     MFSDP_VIEW_ROWS, MFSDP_VIEW_HEADS};
  mfsdp_param p = mfsdp_param_default();
  p.name = t.name.c_str();
  p.alias_of = t.tied_to.empty() ? nullptr : t.tied_to.c_str();
  p.ndim = static_cast<int32_t>(t.shape.size());
  for (std::size_t d = 0; d < t.shape.size(); ++d)
    p.shape[d] = t.shape[d];
  p.unit = t.unit;
  p.hyper_group = t.group;
  p.role = t.role == ref::Role::kMatrix        ? MFSDP_ROLE_MATRIX
           : t.role == ref::Role::kElementwise ? MFSDP_ROLE_ELEMENTWISE
                                               : MFSDP_ROLE_FROZEN;
  p.view = views[static_cast<int>(t.view)];
  p.part_rows = t.part_rows.empty() ? nullptr : t.part_rows.data();
  p.part_count = static_cast<int32_t>(t.part_rows.size());
  p.head_count = t.heads;
  p.compute = t.compute;
  p.grad = t.grad;
  p.wire = t.wire;
  return p;
}

inline mfsdp_hyper_group hyper_group_of(const ref::OracleGroup &g) {
  mfsdp_hyper_group h = g.muon ? mfsdp_hyper_group_muon(MFSDP_MUON_TORCH)
                               : mfsdp_hyper_group_adamw(g.lr, g.weight_decay);
  h.lr = g.lr;
  h.weight_decay = g.weight_decay;
  h.clipped = g.clipped;
  h.muon.momentum = g.momentum;
  h.muon.grad_weight = g.grad_weight;
  h.muon.nesterov_weight = g.nesterov_weight;
  h.muon.nesterov = g.nesterov;
  h.muon.scale = g.match_rms ? MFSDP_MUON_SCALE_MATCH_RMS_ADAMW : MFSDP_MUON_SCALE_ORIGINAL;
  h.adamw.beta1 = g.beta1;
  h.adamw.beta2 = g.beta2;
  h.adamw.eps = g.eps;
  return h;
}

inline mfsdp_status plan_of(mfsdp_context *context, const Job &job, int32_t world,
                            mfsdp_plan **out) {
  std::vector<mfsdp_param> params;
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  for (const ref::Tensor &t : job.model.tensors) {
    params.push_back(param_of(t));
    if (job.placement != MFSDP_PLACEMENT_BANDED || t.role == ref::Role::kMatrix)
      params.back().placement = job.placement;
  }
  desc.residency = job.residency;
  desc.params = params.data();
  desc.param_count = static_cast<int32_t>(params.size());
  desc.world = world;
  desc.planner = job.planner;
  return mfsdp_plan_create(context, &desc, out);
}

/* ---- what must come out ---- */

inline const ref::OracleDevice *cuda_oracle() {
  static const ref::OracleDevice device = {cuda_rig_create, cuda_rig_destroy};
  return &device;
}

/* The oracle's parameters, state and verdicts after each step. */
class Expected {
public:
  struct After {
    ref::OracleVerdict verdict;
    std::vector<std::vector<float>> weights, state0, state1;
  };
  Expected() = default;
  Expected(const Job &job, int64_t blocks, int64_t steps) {
    ref::Oracle oracle(job.model, job.options, job.math, job.script,
                       job.cuda ? cuda_oracle() : nullptr);
    for (int64_t s = 0; s < steps; ++s) {
      After after;
      ref::OracleStep desc = step_desc(blocks, s);
      if (job.schedule) desc.lr_factor *= job.schedule(s);
      after.verdict = oracle.step(desc);
      for (int32_t i = 0; i < job.model.count(); ++i) {
        after.weights.push_back(oracle.weight(i));
        after.state0.push_back(oracle.state(i, "exp_avg"));
        after.state1.push_back(oracle.state(i, "exp_avg_sq"));
      }
      steps_.push_back(after);
    }
  }
  /* Each step has another learning rate, and a gradient weight that is no power of two. */
  static ref::OracleStep step_desc(int64_t blocks, int64_t step) {
    ref::OracleStep desc(blocks);
    desc.lr_factor = 1.0 / (1.0 + 0.3 * static_cast<double>(step));
    desc.grad_weight = 1.0 / (static_cast<double>(blocks) + 0.1 * static_cast<double>(step));
    return desc;
  }
  const After &after(int64_t step) const { return steps_.at(static_cast<std::size_t>(step)); }
  int64_t count() const { return static_cast<int64_t>(steps_.size()); }

private:
  std::vector<After> steps_;
};

inline bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}
/* NaNs have signs and payloads that nobody promises. */
inline bool same_value(double a, double b) {
  return same_bits(a, b) || (std::isnan(a) && std::isnan(b));
}

/* Says where two runs of floats differ; empty: nowhere, bit for bit. */
inline std::string difference(const std::string &what, const float *got, const float *want,
                              int64_t count) {
  if (count == 0 || std::memcmp(got, want, static_cast<std::size_t>(count) * sizeof(float)) == 0)
    return "";
  for (int64_t i = 0; i < count; ++i)
    if (std::memcmp(got + i, want + i, sizeof(float)) != 0) {
      char text[200];
      std::snprintf(text, sizeof(text), "%s[%lld] is %.9g, the oracle has %.9g", what.c_str(),
                    static_cast<long long>(i), static_cast<double>(got[i]),
                    static_cast<double>(want[i]));
      return text;
    }
  return "";
}

inline void require(bool condition, const std::string &what) {
  if (!condition) throw std::runtime_error(what);
}

/* ---- what both trainers share ---- */

/* The options of a job; groups, backend and optimizer are the caller's. */
inline void set_options(const Job &job, const Rank &rank, mfsdp_runtime_desc *desc) {
  desc->compute_queue = job.on_queue ? rank.queue : nullptr;
  desc->active_units = job.active_units;
  desc->active_grads = job.active_grads;
  desc->max_micro_batches = job.max_micro_batches;
  desc->clip_norm = job.options.clip_norm;
  desc->missing = job.options.missing_is_zero ? MFSDP_MISSING_ZEROS : MFSDP_MISSING_SKIP;
  desc->chunk_nbytes = job.chunk_nbytes;
  desc->weighted = job.script.weight != nullptr;
  desc->local_accumulation = job.options.local_world > 0;
  desc->loss_scale.initial = job.options.loss_scale.initial;
  desc->loss_scale.growth = job.options.loss_scale.growth;
  desc->loss_scale.backoff = job.options.loss_scale.backoff;
  desc->loss_scale.largest = job.options.loss_scale.largest;
  desc->loss_scale.growth_interval = job.options.loss_scale.growth_interval;
  if (job.tune) job.tune(desc);
}

inline mfsdp_step_desc step_desc_of(int32_t micro_batches, int32_t ranks, int64_t step) {
  const ref::OracleStep want =
      Expected::step_desc(static_cast<int64_t>(micro_batches) * ranks, step);
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  desc.micro_batch_count = micro_batches;
  desc.grad_weight = want.grad_weight;
  desc.lr_factor = want.lr_factor;
  return desc;
}

/* One use of a tensor in one micro-batch; a task for queues, so it must stay where it is. */
struct Backward {
  const Job *job = nullptr;
  int32_t rank = 0;
  int64_t step = 0, block = 0;
  int32_t use = 0; /* of the model */
  ref::Sample sample = ref::Sample::kPresent;
  const void *weight = nullptr;
  void *grad = nullptr;
  float scale = 1.0f;

  static mfsdp_status run(void *argument, mfsdp_error *error) {
    const Backward *t = static_cast<const Backward *>(argument);
    const ref::Tensor &tensor = t->job->model.at(t->use);
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    (void)error;
    if (t->job->touch)
      t->job->touch(t->rank, t->weight, count * mfsdp_dtype_nbytes(tensor.compute), t->grad,
                    count * mfsdp_dtype_nbytes(tensor.grad));
    if (tensor.compute != MFSDP_F32 || tensor.grad != MFSDP_F32) return t->run_narrow(tensor);
    ref::synthetic_backward(t->job->model.seed, t->step, t->block, t->use, t->sample,
                            static_cast<const float *>(t->weight), tensor.numel(),
                            static_cast<float *>(t->grad), t->scale);
    return MFSDP_OK;
  }
  /* Looks its addresses up and computes: at once, or on the rank's queue. */
  mfsdp_status compute(mfsdp_runtime *runtime, int32_t param, const mfsdp_backend *backend,
                       Rank *owner) {
    weight = mfsdp_unit_param(runtime, param);
    grad = mfsdp_unit_grad(runtime, param);
    scale = static_cast<float>(mfsdp_runtime_loss_scale(runtime));
    require((weight != nullptr && grad != nullptr) || job->model.at(use).numel() == 0,
            "no address for a tensor in use");
    if (job->cuda) return compute_beside(backend, owner);
    if (!job->on_queue) return run(this, nullptr);
    return backend->ops->queue_call(backend->self, owner->queue, run, this);
  }

private:
  /* Neither the thread nor a task may touch DEVICE memory: what would be a kernel works on copies. */
  mfsdp_status compute_beside(const mfsdp_backend *backend, Rank *owner) {
    const ref::Tensor &tensor = job->model.at(use);
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    const std::size_t weight_nbytes = count * mfsdp_dtype_nbytes(tensor.compute);
    const std::size_t grad_nbytes = count * mfsdp_dtype_nbytes(tensor.grad);
    const mfsdp_backend_ops *ops = backend->ops;
    void *self = backend->self, *device_grad = grad;
    weight_copy_.resize(weight_nbytes);
    grad_copy_.resize(grad_nbytes);
    MFSDP_TRY(ops->copy(self, owner->queue, weight_copy_.data(), MFSDP_SPACE_HOST, weight,
                        MFSDP_SPACE_DEVICE, weight_nbytes));
    MFSDP_TRY(ops->copy(self, owner->queue, grad_copy_.data(), MFSDP_SPACE_HOST, grad,
                        MFSDP_SPACE_DEVICE, grad_nbytes));
    weight = weight_copy_.data();
    grad = grad_copy_.data();
    MFSDP_TRY(ops->queue_call(self, owner->queue, run, this));
    MFSDP_TRY(ops->copy(self, owner->queue, device_grad, MFSDP_SPACE_DEVICE, grad_copy_.data(),
                        MFSDP_SPACE_HOST, grad_nbytes));
    return job->on_queue ? MFSDP_OK : owner->finish();
  }

  /* The same by way of fp32 copies. */
  mfsdp_status run_narrow(const ref::Tensor &tensor) const {
    std::vector<float> full, sum;
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      full.push_back(static_cast<float>(mfsdp_element_get(weight, tensor.compute, i)));
      sum.push_back(static_cast<float>(mfsdp_element_get(grad, tensor.grad, i)));
    }
    ref::synthetic_backward(job->model.seed, step, block, use, sample, full.data(), tensor.numel(),
                            sum.data(), scale);
    for (int64_t i = 0; i < tensor.numel(); ++i)
      mfsdp_element_set(grad, tensor.grad, i,
                        static_cast<double>(sum[static_cast<std::size_t>(i)]));
    return MFSDP_OK;
  }

  std::vector<unsigned char> weight_copy_, grad_copy_;
};

inline void compare_verdict(const mfsdp_verdict &verdict, const ref::OracleVerdict &want) {
  char text[500];
  std::snprintf(
      text, sizeof(text),
      "verdict: step %lld applied %lld norm %.17g clip %.17g mean %.17g skipped %d weights "
      "%.17g loss scale %.17g; the oracle: %lld %lld %.17g %.17g %.17g %d %.17g %.17g",
      static_cast<long long>(verdict.step), static_cast<long long>(verdict.applied_steps),
      verdict.grad_norm, verdict.clip_scale, verdict.value_mean, verdict.skipped,
      verdict.weight_sum, verdict.loss_scale, static_cast<long long>(want.step),
      static_cast<long long>(want.applied_steps), want.grad_norm, want.clip_scale, want.value_mean,
      want.skipped ? 1 : 0, want.weight_sum, want.loss_scale);
  /* A skipped step's norm is a NaN or infinity, whose sign and payload nobody promises. */
  require(verdict.step == want.step && verdict.applied_steps == want.applied_steps &&
              (verdict.skipped != 0) == want.skipped &&
              same_value(verdict.value_mean, want.value_mean) &&
              same_bits(verdict.weight_sum, want.weight_sum) &&
              same_bits(verdict.loss_scale, want.loss_scale) &&
              (want.skipped ? !std::isfinite(verdict.grad_norm)
                            : same_bits(verdict.grad_norm, want.grad_norm) &&
                                  same_bits(verdict.clip_scale, want.clip_scale)),
          text);
}

/* Exports parameter `param`, tensor `tensor` of the model, to all. Collective. */
inline void compare_weight(mfsdp_runtime *runtime, const Rank &rank, const Job &job, int32_t param,
                           int32_t tensor, const Expected::After &after, int64_t step) {
  const ref::Tensor &t = job.model.at(tensor);
  std::vector<float> got(static_cast<std::size_t>(t.numel()));
  require(mfsdp_param_export(runtime, param, -1, got.data()) == MFSDP_OK,
          std::string("export: ") + mfsdp_context_error(&rank.context)->message);
  const std::string wrong =
      difference(t.name + " after step " + std::to_string(step), got.data(),
                 after.weights[static_cast<std::size_t>(tensor)].data(), t.numel());
  require(wrong.empty(), wrong);
}

/* A piece of this rank that has states, and its tensor of the model. */
struct OwnPiece {
  const mfsdp_piece *piece;
  int32_t tensor;
};

/* The state table against whole-tensor state; every trainable piece of this rank must be there. */
inline void compare_states(const mfsdp_runtime *runtime, Rank *rank, const Job &job,
                           const std::vector<OwnPiece> &own, const Expected::After &after) {
  int32_t state_count = 0, expected_count = 0;
  const mfsdp_optimizer_state *states =
      mfsdp_optimizer_states(mfsdp_runtime_optimizer(runtime), &state_count);
  const auto is_muon = [&](const OwnPiece &p) {
    return job.options.groups[static_cast<std::size_t>(job.model.at(p.tensor).group)].muon;
  };
  for (const OwnPiece &p : own)
    expected_count += is_muon(p) ? 1 : 2;
  require(state_count == expected_count, "the state table has " + std::to_string(state_count) +
                                             " entries, needs " + std::to_string(expected_count));
  for (int32_t i = 0; i < state_count; ++i) {
    const OwnPiece &p = own.at(static_cast<std::size_t>(states[i].tensor));
    const std::size_t tensor = static_cast<std::size_t>(p.tensor);
    const std::string name = states[i].name;
    require(name == "momentum" ? is_muon(p)
                               : !is_muon(p) && (name == "exp_avg" || name == "exp_avg_sq"),
            "state " + name + " of a tensor of the other algorithm");
    require(states[i].count == p.piece->count, "the count of a state");
    const std::vector<float> &want =
        name == "exp_avg_sq" ? after.state1[tensor] : after.state0[tensor];
    std::vector<float> copy;
    const float *got = static_cast<const float *>(states[i].data);
    if (job.cuda) {
      require(rank->read(got, static_cast<std::size_t>(p.piece->count), &copy) == MFSDP_OK,
              std::string("state: ") + mfsdp_context_error(&rank->context)->message);
      got = copy.data();
    }
    const std::string wrong = difference(name + " of " + job.model.at(p.tensor).name, got,
                                         want.data() + p.piece->first, p.piece->count);
    require(wrong.empty(), wrong);
  }
}

/* ---- one rank ---- */

class Trainer {
public:
  Trainer(Rank *rank, const Job *job, int32_t micro_batches)
      : backend(rank->backend), transport(rank->transport), rank_(rank), job_(job),
        micro_batches_(micro_batches) {
    for (int32_t u = 0; u < job->model.unit_count(); ++u)
      unit_tensors_.push_back(job->model.unit_tensors(u));
    tasks_.resize(static_cast<std::size_t>(micro_batches * job->model.count()));
  }
  Trainer(const Trainer &) = delete;
  Trainer &operator=(const Trainer &) = delete;
  ~Trainer() { /* only after a failure is there something left: peers must not wait for this rank */
    if (runtime != nullptr) {
      rank_->transport.ops->poison(rank_->transport.self, mfsdp_context_error(&rank_->context));
      (void)mfsdp_runtime_destroy(runtime);
    }
    mfsdp_plan_destroy(&rank_->context, plan);
  }

  /* Public, so that tests may replace them before create and call the runtime themselves. */
  const mfsdp_backend *backend;
  mfsdp_transport transport;
  mfsdp_plan *plan = nullptr;
  mfsdp_runtime *runtime = nullptr;
  bool forward = true; /* units are acquired for forward as well */

  mfsdp_status create() {
    MFSDP_TRY(make_plan());
    MFSDP_TRY(make_runtime());
    return mfsdp_runtime_init(runtime, init, const_cast<ref::Model *>(&job_->model));
  }
  mfsdp_status make_plan() { return plan_of(&rank_->context, *job_, rank_->world, &plan); }
  /* `change` may spoil the description. */
  mfsdp_status make_runtime(
      const std::function<void(mfsdp_runtime_desc *, mfsdp_group *, mfsdp_optimizer_desc *,
                               mfsdp_hyper_group *)> &change = nullptr) {
    std::vector<mfsdp_hyper_group> groups;
    mfsdp_optimizer_desc optimizer = mfsdp_optimizer_desc_default();
    mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
    mfsdp_group group = mfsdp_group_default();
    for (const ref::OracleGroup &g : job_->options.groups)
      groups.push_back(hyper_group_of(g));
    optimizer.groups = groups.data();
    optimizer.group_count = static_cast<int32_t>(groups.size());
    group.plan = plan;
    group.transport = &transport;
    group.control = &rank_->control;
    desc.backend = backend;
    desc.groups = &group;
    desc.group_count = 1;
    desc.optimizer = &optimizer;
    set_options(*job_, *rank_, &desc);
    if (change) change(&desc, &group, &optimizer, groups.data());
    return mfsdp_runtime_create(&rank_->context, &desc, &runtime);
  }

  static void init(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
    ref::synthetic_init(static_cast<const ref::Model *>(user)->seed, param, first, count, dst);
  }

  mfsdp_step_desc step_desc(int64_t step) const {
    return step_desc_of(micro_batches_, rank_->world, step);
  }
  mfsdp_status begin(int64_t step) {
    const mfsdp_step_desc desc = step_desc(step);
    return mfsdp_step_begin(runtime, &desc);
  }
  mfsdp_status micro_batch(int64_t step, int32_t micro) {
    const int64_t block = static_cast<int64_t>(micro) * rank_->world + rank_->rank;
    const int32_t units = static_cast<int32_t>(unit_tensors_.size());
    for (int32_t u = 0; u < units && forward; ++u) {
      if (!job_->script.used(step, u)) continue;
      MFSDP_TRY(mfsdp_unit_acquire(runtime, u, MFSDP_USE_FORWARD));
      MFSDP_TRY(mfsdp_unit_release(runtime, u));
    }
    MFSDP_TRY(mfsdp_step_value(runtime, ref::synthetic_value(job_->model.seed, step, block)));
    if (job_->script.weight)
      MFSDP_TRY(mfsdp_step_weight(runtime, job_->script.weight(step, block)));
    for (int32_t u = units; u-- > 0;)
      if (job_->script.used(step, u)) MFSDP_TRY(backward(step, micro, block, u));
    return MFSDP_OK;
  }
  mfsdp_status backward(int64_t step, int32_t micro, int64_t block, int32_t unit) {
    MFSDP_TRY(mfsdp_unit_acquire(runtime, unit, MFSDP_USE_BACKWARD));
    MFSDP_TRY(mfsdp_unit_grads(runtime, unit));
    for (int32_t i : unit_tensors_[static_cast<std::size_t>(unit)])
      MFSDP_TRY(compute(step, micro, block, i));
    MFSDP_TRY(mfsdp_unit_reduce(runtime, unit));
    return mfsdp_unit_release(runtime, unit);
  }
  mfsdp_status end(bool stop = false) {
    verdict = mfsdp_verdict_default();
    MFSDP_TRY(mfsdp_step_end(runtime, stop));
    return mfsdp_step_verdict(runtime, &verdict);
  }
  mfsdp_status step(int64_t step, bool stop = false) {
    MFSDP_TRY(begin(step));
    for (int32_t m = 0; m < micro_batches_; ++m)
      MFSDP_TRY(micro_batch(step, m));
    return end(stop);
  }
  mfsdp_verdict verdict; /* of the last step */

  /* Collective: exports everything. Throws what is not the oracle's. */
  void compare(const Expected &expected, int64_t step) {
    const Expected::After &after = expected.after(step);
    std::vector<OwnPiece> own;
    int32_t count = 0;
    const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
    compare_verdict(verdict, after.verdict);
    for (int32_t i = 0; i < job_->model.count(); ++i)
      compare_weight(runtime, *rank_, *job_, i, i, after, step);
    for (int32_t i = 0; i < count; ++i)
      if ((pieces[i].owner == rank_->rank || job_->placement == MFSDP_PLACEMENT_REPLICATED) &&
          job_->model.at(pieces[i].param).role != ref::Role::kFrozen)
        own.push_back({&pieces[i], pieces[i].param});
    compare_states(runtime, rank_, *job_, own, after);
  }

  /* Of all parameters as every rank sees them. Collective. */
  mfsdp_status hash(uint64_t *out) {
    *out = MFSDP_HASH_SEED;
    for (int32_t i = 0; i < job_->model.count(); ++i) {
      std::vector<float> got(static_cast<std::size_t>(job_->model.at(i).numel()));
      MFSDP_TRY(mfsdp_param_export(runtime, i, -1, got.data()));
      *out = mfsdp_hash_bytes(*out, got.data(), got.size() * sizeof(float));
    }
    return MFSDP_OK;
  }

  mfsdp_status destroy() {
    const mfsdp_status status = mfsdp_runtime_destroy(runtime);
    runtime = nullptr;
    return status;
  }

  /* Backward of one tensor of an acquired unit whose gradients are open. */
  mfsdp_status compute(int64_t step, int32_t micro, int64_t block, int32_t use) {
    const ref::Sample sample = job_->script.sample_of(step, block, use);
    Backward *task = &tasks_[static_cast<std::size_t>(micro * job_->model.count() + use)];
    if (job_->model.at(use).role == ref::Role::kFrozen) {
      require(mfsdp_unit_grad(runtime, use) == nullptr, "a frozen tensor has a gradient");
      return MFSDP_OK;
    }
    if (sample == ref::Sample::kAbsent) return mfsdp_grad_absent(runtime, use);
    task->job = job_;
    task->rank = rank_->rank;
    task->step = step;
    task->block = block;
    task->use = use;
    task->sample = sample;
    return task->compute(runtime, use, backend, rank_);
  }

private:
  Rank *rank_;
  const Job *job_;
  int32_t micro_batches_;
  std::vector<std::vector<int32_t>> unit_tensors_;
  std::vector<Backward> tasks_;
};

inline RanksOptions ranks_of(const Job &job, int32_t world) {
  RanksOptions options(world);
  options.host.math = job.math;
  options.host.queue_kind = job.queue_kind;
  options.cuda = job.cuda;
  options.nccl = job.nccl;
  options.context.debug_poison = job.debug_poison;
  options.context.debug_check = job.debug_check;
  return options;
}

/* Trains as many steps as expected has, compares after each. Empty, or what went wrong. */
inline std::string run_job(const Job &job, int32_t world, int32_t micro_batches,
                           const Expected &expected) {
  const RanksResult result = run_ranks(ranks_of(job, world), [&](Rank &rank) {
    Trainer trainer(&rank, &job, micro_batches);
    MFSDP_TRY(trainer.create());
    for (int64_t s = 0; s < expected.count(); ++s) {
      MFSDP_TRY(trainer.step(s));
      trainer.compare(expected, s);
    }
    return trainer.destroy();
  });
  if (result.ok()) return "";
  return "world " + std::to_string(world) + ", " + std::to_string(micro_batches) +
         " micro-batches, " + mfsdp_planner_name(job.planner) + ", " +
         (job.nccl.on ? "nccl"
          : job.cuda  ? "cuda"
                      : job.math->name) +
         ":\n" + result.text();
}

/* ---- wrong calls ---- */

/* The status, and a part of the message that helps the user. */
inline void must_fail(const Rank &rank, mfsdp_status got, mfsdp_status want,
                      const std::string &text) {
  const std::string message = mfsdp_context_error(&rank.context)->message;
  require(got == want, std::string("got ") + mfsdp_status_name(got) + ", wanted " +
                           mfsdp_status_name(want) + " '" + text + "'");
  require(message.find(text) != std::string::npos,
          "the message '" + message + "' does not say '" + text + "'");
}

using WrongCalls = std::function<mfsdp_status(Rank &, Trainer &)>;

/* A correct step, wrong calls between two steps, then `inside` an open step, and the rest of that
 * step: everything must equal the oracle as if the wrong calls had not been made. */
inline std::string survives(const Job &job, int32_t world, int32_t micro_batches,
                            const WrongCalls &outside, const WrongCalls &inside = nullptr) {
  const Expected expected(job, static_cast<int64_t>(world) * micro_batches, 2);
  const RanksResult result = run_ranks(ranks_of(job, world), [&](Rank &rank) {
    Trainer trainer(&rank, &job, micro_batches);
    MFSDP_TRY(trainer.create());
    MFSDP_TRY(trainer.step(0));
    trainer.compare(expected, 0);
    if (outside) MFSDP_TRY(outside(rank, trainer));
    MFSDP_TRY(trainer.begin(1));
    if (inside) MFSDP_TRY(inside(rank, trainer));
    for (int32_t m = 0; m < micro_batches; ++m)
      MFSDP_TRY(trainer.micro_batch(1, m));
    MFSDP_TRY(trainer.end());
    trainer.compare(expected, 1);
    return trainer.destroy();
  });
  return result.ok() ? "" : result.text();
}

} // namespace test

#endif // MFSDP_TESTS_RUNTIME_RUNTIME_RIG_H
