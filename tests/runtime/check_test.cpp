/* SPDX-License-Identifier: MIT */
/* The rules of a runtime's description, one test each, and the agreement of all ranks. */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

/* Everything a description shows, so that one thing in it can be spoiled. */
struct Parts {
  mfsdp_runtime_desc *desc;
  mfsdp_group *group;
  mfsdp_optimizer_desc *optimizer;
  mfsdp_hyper_group *hyper;
  mfsdp_backend backend;
  mfsdp_backend_ops backend_ops;
  mfsdp_transport transport, other;
  mfsdp_transport_ops transport_ops;
  mfsdp_control control;
  mfsdp_control_ops control_ops;
  mfsdp_plan *plan;
};

struct Rule {
  const char *name;
  mfsdp_status status;
  std::string text;
  std::function<void(Parts *)> spoil;
  bool poisons = false; /* no control plane fits the transport, which has several ranks */
};

const double kNan = std::nan("");

std::vector<Rule> option_rules() {
  std::vector<Rule> rules = {
      {"desc_size", MFSDP_E_ARGUMENT, "runtime: desc is NULL or its struct_nbytes is not",
       [](Parts *p) { p->desc->struct_nbytes += 8; }},
      {"no_groups", MFSDP_E_ARGUMENT, "needs a group made by mfsdp_group_default",
       [](Parts *p) { p->desc->groups = nullptr; }},
      {"group_count", MFSDP_E_ARGUMENT, "has 0 groups", [](Parts *p) { p->desc->group_count = 0; }},
      {"group_size", MFSDP_E_ARGUMENT, "needs a group made by mfsdp_group_default",
       [](Parts *p) { p->group->struct_nbytes = 3; }},
      {"active_units", MFSDP_E_ARGUMENT, "active_units is 0 and active_grads 1, need at least 1",
       [](Parts *p) { p->desc->active_units = 0; }},
      {"active_grads", MFSDP_E_ARGUMENT, "active_units is 1 and active_grads -1",
       [](Parts *p) { p->desc->active_grads = -1; }},
      {"micro_batches_low", MFSDP_E_ARGUMENT, "max_micro_batches is 0, needs 1 to 1048576",
       [](Parts *p) { p->desc->max_micro_batches = 0; }},
      {"micro_batches_high", MFSDP_E_ARGUMENT, "max_micro_batches is 1048577",
       [](Parts *p) { p->desc->max_micro_batches = 1048577; }},
      {"clip_negative", MFSDP_E_ARGUMENT, "clip_norm is -1, needs 0 (off) or more",
       [](Parts *p) { p->desc->clip_norm = -1.0; }},
      {"clip_nan", MFSDP_E_ARGUMENT, "clip_norm is ", [](Parts *p) { p->desc->clip_norm = kNan; }},
      {"clip_huge", MFSDP_E_ARGUMENT, "clip_norm is 1e+31",
       [](Parts *p) { p->desc->clip_norm = 1e31; }},
      {"missing", MFSDP_E_ARGUMENT, "unknown missing policy 0",
       [](Parts *p) { p->desc->missing = static_cast<mfsdp_missing>(0); }},
      {"schedule", MFSDP_E_ARGUMENT, "schedule: warmup_steps is -1",
       [](Parts *p) { p->desc->schedule.warmup_steps = -1; }},
      {"chunk", MFSDP_E_ARGUMENT, "chunk_nbytes is 1023, needs at least 1024",
       [](Parts *p) { p->desc->chunk_nbytes = 1023; }},
      {"replica_control", MFSDP_E_ARGUMENT, "control: needs allgather",
       [](Parts *p) { p->group->replica = p->group->transport; }},
      {"prefetch", MFSDP_E_ARGUMENT, "prefetch_depth is -1",
       [](Parts *p) { p->desc->prefetch_depth = -1; }},
      {"reduce_depth", MFSDP_E_ARGUMENT, "reduce_depth 1025",
       [](Parts *p) { p->desc->reduce_depth = 1025; }},
      {"state_space", MFSDP_E_ARGUMENT, "unknown state_space 0",
       [](Parts *p) { p->desc->state_space = static_cast<mfsdp_space>(0); }},
      {"loss_scale", MFSDP_E_ARGUMENT, "loss_scale.initial is -2",
       [](Parts *p) { p->desc->loss_scale.initial = -2.0; }},
      {"loss_scale_of_no_float", MFSDP_E_ARGUMENT, "2^-126 or more",
       [](Parts *p) { p->desc->loss_scale.initial = 1e-39; }},
      {"loss_scale_rule", MFSDP_E_ARGUMENT, "backoff in (0, 1) (1)",
       [](Parts *p) {
         p->desc->loss_scale.initial = 2.0;
         p->desc->loss_scale.backoff = 1.0;
       }},
      {"slot_bound", MFSDP_E_ARGUMENT, "max_slot_nbytes is 256",
       [](Parts *p) { p->desc->max_slot_nbytes = 256; }},
      {"step_in_backward", MFSDP_E_UNSUPPORTED, "step_in_backward and weighted",
       [](Parts *p) { p->desc->step_in_backward = p->desc->weighted = 1; }},
      {"verdict_lag", MFSDP_E_UNSUPPORTED, "verdict_lag above 0",
       [](Parts *p) { p->desc->verdict_lag = 1; }},
      {"auto_without_costs", MFSDP_E_ARGUMENT, "reduce_algorithm auto needs desc.wire",
       [](Parts *p) { p->desc->reduce_algorithm = MFSDP_ALGORITHM_AUTO; }},
      {"no_algorithm", MFSDP_E_ARGUMENT, "reduce_algorithm is 0, needs an mfsdp_algorithm",
       [](Parts *p) { p->desc->reduce_algorithm = static_cast<mfsdp_algorithm>(0); }},
  };
  return rules;
}

/* Each flag with a value beside both of its own. */
std::vector<Rule> flag_rules() {
  const struct {
    const char *name;
    int32_t mfsdp_runtime_desc::*field;
  } flags[] = {{"reshard_after_forward", &mfsdp_runtime_desc::reshard_after_forward},
               {"local_accumulation", &mfsdp_runtime_desc::local_accumulation},
               {"weighted", &mfsdp_runtime_desc::weighted},
               {"narrow_sums", &mfsdp_runtime_desc::narrow_sums},
               {"step_in_backward", &mfsdp_runtime_desc::step_in_backward}};
  std::vector<Rule> rules;
  for (const auto &flag : flags)
    for (const int32_t value : {2, -1}) {
      const auto field = flag.field;
      rules.push_back(
          {flag.name, MFSDP_E_ARGUMENT,
           std::string("runtime: ") + flag.name + " is " + std::to_string(value) + ", needs 0 or 1",
           [=](Parts *p) { p->desc->*field = value; }});
    }
  return rules;
}

std::vector<Rule> optimizer_rules() {
  return {
      {"no_optimizer", MFSDP_E_ARGUMENT, "optimizer: desc is NULL",
       [](Parts *p) { p->desc->optimizer = nullptr; }},
      {"optimizer_size", MFSDP_E_ARGUMENT, "use mfsdp_optimizer_desc_default",
       [](Parts *p) { p->optimizer->struct_nbytes = 1; }},
      {"no_hyper_groups", MFSDP_E_ARGUMENT, "needs at least one hyperparameter group, has 0",
       [](Parts *p) { p->optimizer->group_count = 0; }},
      {"hyper_size", MFSDP_E_ARGUMENT, "groups[1].struct_nbytes is 0",
       [](Parts *p) { p->hyper[1].struct_nbytes = 0; }},
      {"lr", MFSDP_E_ARGUMENT, "groups[0].lr is -0.5, needs 0 or more",
       [](Parts *p) { p->hyper[0].lr = -0.5; }},
      {"decay", MFSDP_E_ARGUMENT, "groups[1].weight_decay is ",
       [](Parts *p) { p->hyper[1].weight_decay = kNan; }},
      {"algorithm", MFSDP_E_ARGUMENT, "groups[1].algorithm 5 is unknown",
       [](Parts *p) { p->hyper[1].algorithm = static_cast<mfsdp_algorithm_kind>(5); }},
      {"momentum", MFSDP_E_ARGUMENT, "muon: momentum is 1, needs to be in [0, 1)",
       [](Parts *p) { p->hyper[0].muon.momentum = 1.0; }},
      {"betas", MFSDP_E_ARGUMENT, "adamw: betas are 0.9 and 1.5",
       [](Parts *p) { p->hyper[1].adamw.beta2 = 1.5; }},
      {"steps", MFSDP_E_ARGUMENT, "newton_schulz: step_count is -1",
       [](Parts *p) { p->hyper[0].muon.newton_schulz.step_count = -1; }},
      {"group_missing", MFSDP_E_ARGUMENT, "embed: hyper_group is 1, needs 0 to 0",
       [](Parts *p) { p->optimizer->group_count = 1; }},
      {"muon_for_vectors", MFSDP_E_ARGUMENT,
       "embed: group 1 is muon, which needs role matrix, but the role is elementwise",
       [](Parts *p) { p->hyper[1] = p->hyper[0]; }},
  };
}

std::vector<Rule> object_rules() {
  return {
      {"no_backend", MFSDP_E_ARGUMENT, "backend: NULL",
       [](Parts *p) { p->desc->backend = nullptr; }},
      {"backend_op", MFSDP_E_ARGUMENT, "the required operation sumsq is missing",
       [](Parts *p) {
         p->backend_ops.sumsq = nullptr;
         p->desc->backend = &p->backend;
       }},
      {"no_transport", MFSDP_E_ARGUMENT, "transport: NULL, or without operations",
       [](Parts *p) { p->group->transport = nullptr; }},
      {"transport_op", MFSDP_E_ARGUMENT, "needs submit, poll, poison and destroy",
       [](Parts *p) {
         p->transport_ops.poison = nullptr;
         p->group->transport = &p->transport;
       }},
      {"gather_algorithm", MFSDP_E_UNSUPPORTED,
       "gather_algorithm native: the transport of groups[0] has no native collectives",
       [](Parts *p) {
         p->desc->gather_algorithm = MFSDP_NATIVE;
         p->transport_ops.native = nullptr;
         p->group->transport = &p->transport;
       }},
      {"reduce_algorithm", MFSDP_E_UNSUPPORTED, "reduce_algorithm native: the transport of",
       [](Parts *p) {
         p->desc->reduce_algorithm = MFSDP_NATIVE;
         p->transport_ops.native = nullptr;
         p->group->transport = &p->transport;
       }},
      {"transport_rank", MFSDP_E_ARGUMENT, "transport: rank is 1, needs 0 to 0",
       [](Parts *p) {
         p->transport.rank = 1;
         p->group->transport = &p->transport;
       }},
      {"transport_deadline", MFSDP_E_ARGUMENT, "transport: deadline_us is 0",
       [](Parts *p) {
         p->transport.deadline_us = 0;
         p->group->transport = &p->transport;
       }},
      {"no_control", MFSDP_E_ARGUMENT, "control: needs allgather, probe and now_us",
       [](Parts *p) { p->group->control = nullptr; }},
      {"control_op", MFSDP_E_ARGUMENT, "control: needs allgather, probe and now_us",
       [](Parts *p) {
         p->control_ops.probe = nullptr;
         p->group->control = &p->control;
       }},
      {"no_plan", MFSDP_E_ARGUMENT, "groups[0].plan is NULL",
       [](Parts *p) { p->group->plan = nullptr; }},
      {"plan_world", MFSDP_E_ARGUMENT, "the plan is for world 1, the transport has 2",
       [](Parts *p) {
         p->transport.world = 2;
         p->group->transport = &p->transport;
       },
       true},
      {"blocks_overflow", MFSDP_E_OVERFLOW, "max_micro_batches 1048576 on 4096 ranks",
       [](Parts *p) {
         p->transport.world = 4096;
         p->group->transport = &p->transport;
         p->desc->max_micro_batches = 1 << 20;
       },
       true},
      {"control_world", MFSDP_E_ARGUMENT, "control is rank 1 of 2, the transport rank 0 of 1",
       [](Parts *p) {
         p->control.world = 2;
         p->control.rank = 1;
         p->group->control = &p->control;
       }},
      {"other_backend", MFSDP_E_ARGUMENT, "the transport was made for another backend",
       [](Parts *p) { p->desc->backend = &p->backend; }},
  };
}

int allgather_calls, poison_calls; /* one rank, one thread */

/* A spoiled transport stands for one of several ranks, which would be told so. */
void noting_poison(void *, const mfsdp_error *) {
  ++poison_calls;
}

mfsdp_status counting_allgather(void *self, mfsdp_context *context, const void *in, size_t nbytes,
                                void *out, int64_t timeout_us) {
  ++allgather_calls;
  return mfsdp__threads_control_ops()->allgather(self, context, in, nbytes, out, timeout_us);
}

/* A broken rule is found before anything is allocated or said, and a correct runtime follows. */
void expect_rule(const Rule &rule) {
  const Job job = test::small_job();
  const test::Expected expected(job, 1, 1);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 1), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    mfsdp_control_ops control_ops = *rank.control.ops;
    control_ops.allgather = counting_allgather;
    allgather_calls = poison_calls = 0;
    MFSDP_TRY(t.make_plan());
    rank.memory->fail_at(-1); /* counts from 0 */
    Parts parts;
    const mfsdp_status status =
        t.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *group,
                           mfsdp_optimizer_desc *optimizer, mfsdp_hyper_group *hyper) {
          parts = Parts();
          parts.desc = desc;
          parts.group = group;
          parts.optimizer = optimizer;
          parts.hyper = hyper;
          parts.backend = *rank.backend;
          parts.backend_ops = *rank.backend->ops;
          parts.backend.ops = &parts.backend_ops;
          parts.transport = parts.other = t.transport;
          parts.transport_ops = *t.transport.ops;
          parts.transport.ops = &parts.transport_ops;
          parts.transport_ops.poison = noting_poison;
          parts.control_ops = control_ops;
          parts.control = rank.control;
          parts.control.ops = &parts.control_ops;
          group->control = &parts.control;
          parts.plan = t.plan;
          rule.spoil(&parts);
        });
    must_fail(rank, status, rule.status, rule.text);
    require(t.runtime == nullptr, "*out must be NULL");
    require(rank.memory->alloc_count() == 0, "something was allocated before the check");
    require(allgather_calls == 0, "something was said before the check");
    require(poison_calls == rule.poisons, "poisoned for nobody, or not poisoned");
    MFSDP_TRY(t.make_runtime());
    MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
    MFSDP_TRY(t.step(0));
    t.compare(expected, 0);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << rule.name << ": " << result.text();
}

TEST(Rules, Options) {
  for (const Rule &rule : option_rules())
    expect_rule(rule);
}

TEST(Rules, Flags) {
  for (const Rule &rule : flag_rules())
    expect_rule(rule);
}

TEST(Rules, Optimizer) {
  for (const Rule &rule : optimizer_rules())
    expect_rule(rule);
}

TEST(Rules, Objects) {
  for (const Rule &rule : object_rules())
    expect_rule(rule);
}

TEST(Rules, DescriptionIsNull) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 1), [&](Rank &rank) {
    mfsdp_runtime *runtime = nullptr;
    must_fail(rank, mfsdp_runtime_create(&rank.context, nullptr, &runtime), MFSDP_E_ARGUMENT,
              "runtime: desc is NULL");
    require(runtime == nullptr, "*out");
    return mfsdp_runtime_destroy(nullptr);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Rules, OtherDtypesAreNotInThisVersion) {
  for (int which = 0; which < 4; ++which) {
    const test::RanksResult result = test::run_ranks(test::RanksOptions(1), [&](Rank &rank) {
      const Job job = test::small_job();
      std::vector<mfsdp_param> params;
      mfsdp_plan_desc desc = mfsdp_plan_desc_default();
      Trainer t(&rank, &job, 1);
      for (const ref::Tensor &tensor : job.model.tensors)
        params.push_back(test::param_of(tensor));
      for (mfsdp_param &p : params)
        (which == 0 ? p.compute : which == 1 ? p.master : which == 2 ? p.grad : p.wire) = MFSDP_F64;
      desc.params = params.data();
      desc.param_count = static_cast<int32_t>(params.size());
      desc.world = 1;
      MFSDP_TRY(mfsdp_plan_create(&rank.context, &desc, &t.plan));
      must_fail(rank, t.make_runtime(), MFSDP_E_UNSUPPORTED, "runtime: embed asks for ");
      must_fail(rank, MFSDP_E_UNSUPPORTED, MFSDP_E_UNSUPPORTED, "f64");
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Sums that would be rounded on their way are refused, but for NATIVE if the caller takes them. */
TEST(Rules, NarrowSums) {
  Job job = test::mixed_job();
  test::set_dtypes(&job.model, 1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  const test::RanksResult result = test::run_ranks(test::RanksOptions(2), [&](Rank &rank) {
    for (mfsdp_algorithm algorithm : {MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_NATIVE})
      for (int32_t narrow_sums : {0, 1}) {
        Trainer t(&rank, &job, 1);
        MFSDP_TRY(t.make_plan());
        const mfsdp_status status =
            t.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *,
                               mfsdp_hyper_group *) {
              desc->reduce_algorithm = algorithm;
              desc->narrow_sums = narrow_sums;
            });
        if (algorithm == MFSDP_NATIVE && narrow_sums == 1) {
          MFSDP_TRY(status);
          MFSDP_TRY(
              mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
          MFSDP_TRY(t.step(0));
          MFSDP_TRY(t.destroy());
          continue;
        }
        must_fail(rank, status, MFSDP_E_UNSUPPORTED,
                  std::string("reduce_algorithm ") + mfsdp_algorithm_name(algorithm));
      }
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Every rule that one rank of three breaks alone: told to all at once, and all may try again. */
TEST(Rules, BrokenByOneRank) {
  std::vector<Rule> rules;
  const std::vector<std::string> untold = {"desc_size", "no_groups", "group_count", "group_size",
                                           "replica_control"}; /* spoil what tells */
  for (const std::vector<Rule> &list : {option_rules(), optimizer_rules()})
    for (const Rule &rule : list)
      if (std::find(untold.begin(), untold.end(), rule.name) == untold.end()) rules.push_back(rule);
  for (const Rule &rule : object_rules())
    for (const char *name : {"no_backend", "backend_op", "no_plan", "other_backend"})
      if (std::string(rule.name) == name) rules.push_back(rule);
  const Job job = test::small_job();
  const test::Expected expected(job, 3, 1);
  int32_t culprit = 0;
  for (const Rule &rule : rules) {
    const int64_t start_us = mfsdp_clock_us();
    culprit = (culprit + 1) % 3;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      Parts parts;
      MFSDP_TRY(t.make_plan());
      const mfsdp_status status =
          t.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *group,
                             mfsdp_optimizer_desc *optimizer, mfsdp_hyper_group *hyper) {
            parts.desc = desc;
            parts.group = group;
            parts.optimizer = optimizer;
            parts.hyper = hyper;
            parts.backend = *rank.backend;
            parts.backend_ops = *rank.backend->ops;
            parts.backend.ops = &parts.backend_ops;
            if (rank.rank == culprit) rule.spoil(&parts);
          });
      must_fail(rank, status, rule.status, rule.text);
      if (rank.rank != culprit) {
        must_fail(rank, status, rule.status,
                  "rank " + std::to_string(culprit) + " cannot use its description: ");
        require(mfsdp_context_error(&rank.context)->culprit == culprit, "the culprit");
      }
      MFSDP_TRY(t.make_runtime());
      MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
      MFSDP_TRY(t.step(0));
      t.compare(expected, 0);
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << rule.name << ": " << result.text();
    EXPECT_LT(mfsdp_clock_us() - start_us, 10 * 1000000) << rule.name; /* the deadline: 20 s */
  }
  EXPECT_GT(rules.size(), 30u);
}

/* ---- agreement: what differs is an error on every rank, and a second, equal attempt works ---- */

void expect_disagreement(const std::function<void(Rank &, Job *)> &differ,
                         const std::vector<std::string> &texts, int32_t culprit) {
  const Job right = test::small_job();
  const test::Expected expected(right, 3, 1);
  const test::RanksResult result = test::run_ranks(test::ranks_of(right, 3), [&](Rank &rank) {
    Job own = right;
    differ(rank, &own);
    {
      Trainer t(&rank, &own, 1);
      MFSDP_TRY(t.make_plan());
      const mfsdp_status status = t.make_runtime();
      for (const std::string &text : texts)
        must_fail(rank, status, MFSDP_E_MISMATCH, text);
      require(mfsdp_context_error(&rank.context)->culprit == culprit, "the culprit");
      require(t.runtime == nullptr, "*out must be NULL");
    }
    Trainer t(&rank, &right, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    t.compare(expected, 0);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Agreement, ShuffledParametersNameTheFirstDifference) {
  for (int32_t liar = 0; liar < 3; ++liar)
    expect_disagreement(
        [liar](Rank &rank, Job *job) {
          if (rank.rank == liar) std::swap(job->model.tensors[1], job->model.tensors[2]);
        },
        {"the plans of ranks 0 and " + std::to_string(liar == 0 ? 1 : liar) + " differ",
         "first at parameter 1 (here: "},
        liar == 0 ? 1 : liar);
}

TEST(Agreement, TheNameIsTheRanksOwn) {
  expect_disagreement(
      [](Rank &rank, Job *job) {
        if (rank.rank == 2) job->model.tensors[3].name = "bias_of_another_name";
      },
      {"first at parameter 3 (here: bias"}, 2);
}

TEST(Agreement, ManyParametersBeforeTheDifference) { /* beyond the first message of hashes */
  const test::RanksResult result = test::run_ranks(test::RanksOptions(2), [](Rank &rank) {
    Job job = test::small_job();
    for (int i = 0; i < 100; ++i)
      job.model.tensors.push_back(
          ref::elementwise("v" + std::to_string(i), 3, {i == 77 && rank.rank == 1 ? 5 : 6}));
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.make_plan());
    must_fail(rank, t.make_runtime(), MFSDP_E_MISMATCH, "first at parameter 82 (here: v77)");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Agreement, AParameterMore) {
  /* An empty tensor moves nothing; a real one moves the pieces of others, which must not be blamed. */
  for (const int64_t rows : {0, 8})
    expect_disagreement(
        [rows](Rank &rank, Job *job) {
          if (rank.rank != 1) job->model.tensors.push_back(ref::matrix("extra", 2, rows, 8));
        },
        {"some rank's plan has 5 parameters and another's 6; the first 5 agree"}, -1);
}

/* Dtypes are of the plan: who computes gradients of another one is named. */
TEST(Agreement, AnotherDtype) {
  for (const int which : {0, 1, 2})
    expect_disagreement(
        [which](Rank &rank, Job *job) {
          for (ref::Tensor &t : job->model.tensors) {
            if (rank.rank != 1 || t.unit != 1) continue;
            if (which == 0) t.grad = t.wire = MFSDP_BF16;
            if (which == 1) t.wire = MFSDP_F16;
            if (which == 2) t.compute = MFSDP_BF16;
          }
        },
        {"the plans of ranks 0 and 1 differ, first at parameter 1 (here: a)"}, 1);
}

TEST(Agreement, AnotherPlanner) {
  expect_disagreement(
      [](Rank &rank, Job *job) {
        if (rank.rank == 2) job->planner = MFSDP_PLANNER_ROUND_ROBIN;
      },
      {"the plans of ranks 0 and 2 differ in planner"}, 2);
}

TEST(Agreement, EveryOption) {
  const std::vector<std::function<void(Job *)>> changes = {
      [](Job *j) { j->active_units = 2; },
      [](Job *j) { j->active_grads = 2; },
      [](Job *j) { j->max_micro_batches = 9; },
      [](Job *j) { j->options.clip_norm = 2.5; },
      [](Job *j) { j->options.missing_is_zero = true; },
      [](Job *j) { j->chunk_nbytes *= 2; },
      [](Job *j) { j->options.groups.push_back(ref::OracleGroup()); },
      [](Job *j) { j->options.groups[1].lr *= 1.0000001; },
      [](Job *j) { j->options.groups[0].weight_decay = 0.3; },
      [](Job *j) { j->options.groups[1].clipped = false; },
      [](Job *j) { j->options.groups[1].beta1 = 0.8; },
      [](Job *j) { j->options.groups[1].beta2 = 0.8; },
      [](Job *j) { j->options.groups[1].eps = 1e-6; },
      [](Job *j) { j->options.groups[0].momentum = 0.9; },
      [](Job *j) { j->options.groups[0].grad_weight = 1.0; },
      [](Job *j) { j->options.groups[0].nesterov_weight = 1.0; },
      [](Job *j) { j->options.groups[0].nesterov = false; },
      [](Job *j) { j->options.groups[0].match_rms = true; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->schedule.warmup_steps = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->schedule.total_steps = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->schedule.decay_steps = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->schedule.final_factor = 0.5; }; },
      [](Job *j) {
        j->tune = [](mfsdp_runtime_desc *d) {
          d->schedule.kind = MFSDP_SCHEDULE_LINEAR;
          d->schedule.total_steps = 9;
        };
      },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->prefetch_depth = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->reduce_depth = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->narrow_sums = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->gather_algorithm = MFSDP_NATIVE; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->reshard_after_forward = 0; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->local_accumulation = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->weighted = 1; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->loss_scale.initial = 2.0; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->loss_scale.growth = 3.0; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->loss_scale.backoff = 0.25; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->loss_scale.largest = 8.0; }; },
      [](Job *j) { j->tune = [](mfsdp_runtime_desc *d) { d->loss_scale.growth_interval = 9; }; },
  };
  for (const std::function<void(Job *)> &change : changes)
    expect_disagreement(
        [&](Rank &rank, Job *job) {
          if (rank.rank == 1) change(job);
        },
        {"the option hash of rank 1 is "}, 1);
}

/* Where a rank computes and holds its state, and how large its slots may be, is its own affair. */
TEST(Agreement, OptionsOfOneRankAlone) {
  Job job = test::mixed_job();
  test::set_dtypes(&job.model, 1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  const test::Expected expected(job, 2, 2);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Job own = job;
    own.on_queue = rank.rank == 1;
    if (rank.rank == 1)
      own.tune = [](mfsdp_runtime_desc *d) {
        d->state_space = MFSDP_SPACE_HOST;
        d->max_slot_nbytes = 1 << 30;
      };
    Trainer t(&rank, &own, 1);
    MFSDP_TRY(t.create());
    for (int64_t s = 0; s < 2; ++s) {
      MFSDP_TRY(t.step(s));
      t.compare(expected, s);
    }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Agreement, EveryNewtonSchulzAndRowOption) {
  static const double other[2][3] = {{3.0, -4.0, 2.0}, {3.4445, -4.7750, 2.0315}};
  const std::vector<std::function<void(mfsdp_muon_desc *)>> changes = {
      [](mfsdp_muon_desc *d) { d->newton_schulz.step_count = 4; },
      [](mfsdp_muon_desc *d) { d->newton_schulz.form = MFSDP_NS_PLAIN; },
      [](mfsdp_muon_desc *d) { d->newton_schulz.norm_rule = MFSDP_NORM_ADD_EPS; },
      [](mfsdp_muon_desc *d) { d->newton_schulz.eps = 1e-6; },
      [](mfsdp_muon_desc *d) { d->normalize_rows = 1; },
      [](mfsdp_muon_desc *d) { d->row_beta2 = 0.5; },
      [](mfsdp_muon_desc *d) { d->row_eps = 1e-3; },
      [](mfsdp_muon_desc *d) { d->newton_schulz.norm_factor = 1.01; },
      [](mfsdp_muon_desc *d) { d->newton_schulz.dtype = MFSDP_BF16; },
      [](mfsdp_muon_desc *d) { d->newton_schulz.restarts = MFSDP_NS_RESTARTS_NONE; },
      [](mfsdp_muon_desc *d) { d->newton_schulz.coefficients = other; },
      [](mfsdp_muon_desc *d) {
        d->newton_schulz.coefficients = other;
        d->newton_schulz.coefficient_count = 2;
      },
  };
  for (const std::function<void(mfsdp_muon_desc *)> &change : changes) {
    const test::RanksResult result = test::run_ranks(test::RanksOptions(2), [&](Rank &rank) {
      const Job job = test::small_job();
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(t.make_plan());
      const mfsdp_status status =
          t.make_runtime([&](mfsdp_runtime_desc *, mfsdp_group *, mfsdp_optimizer_desc *,
                             mfsdp_hyper_group *hyper) {
            if (rank.rank == 1) change(&hyper[0].muon);
          });
      must_fail(rank, status, MFSDP_E_MISMATCH, "the option hash of rank 1 is ");
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

} // namespace
