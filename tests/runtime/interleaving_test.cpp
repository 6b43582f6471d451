/* SPDX-License-Identifier: MIT */
/*
 * The runtime on queues that a scheduler steps: every interleaving of small cases and random ones
 * of larger cases give the oracle's bits; no two accesses to a word lack an order (which says the
 * same of all schedules); and each kind of wait that the runtime asks for is needed: left out, it
 * shows. One thread runs at a time: not run under the thread sanitizer (MFSDP_TEST_ONE_QUEUE).
 */
#include "../support/fake_queue.h"
#include "groups_rig.h"

namespace {

using test::FakeBackend;
using test::FakeTransport;
using test::FakeWire;
using test::FakeWorld;
using test::GroupsJob;
using test::Job;
using test::Rank;
using test::require;
using test::Trainer;

struct Case {
  int32_t ranks = 1, prefetch = 0, reduce = 0, reshard = 1, micro_batches = 1;
  bool on_queue = false;
  mfsdp_space space = MFSDP_SPACE_DEVICE; /* of masters and state */
  const char *dtypes = "f32";
  bool wanders = false; /* acquires that nobody expects behind each backward */
  int64_t steps = 2,
          explored_from = 1; /* steps before it run hosts first, their updates may linger */
  Job job;

  std::string text() const {
    return std::to_string(ranks) + " ranks, prefetch " + std::to_string(prefetch) + ", reduce " +
           std::to_string(reduce) + ", reshard " + std::to_string(reshard) + ", micro-batches " +
           std::to_string(micro_batches) + (on_queue ? ", on a queue" : ", on the host") + ", " +
           dtypes + ", space " + std::to_string(space);
  }
};

/* Two units, both algorithms; a matrix a rank when there are two. */
Job two_units() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {7, 5}));
  job.model.tensors.push_back(ref::matrix("a", 0, 4, 3));
  job.model.tensors.push_back(ref::matrix("b", 1, 3, 5));
  job.model.tensors.push_back(ref::elementwise("bias", 1, {6}));
  job.options.clip_norm = 2.0;
  job.max_micro_batches = 2;
  job.chunk_nbytes = 1024;
  return job;
}

Job four_units() {
  Job job = two_units();
  job.model.tensors.push_back(ref::matrix("c", 2, 5, 5));
  job.model.tensors.push_back(ref::frozen("mask", 2, {9}));
  job.model.tensors.push_back(ref::elementwise("norm", 3, {11}));
  job.model.tensors.push_back(ref::tied("head", 3, job.model.tensors[0]));
  return job;
}

/* What the model computes in a unit: on the host, or as a task of the queue. */
struct Work {
  const Case *c;
  FakeWorld *world;
  const std::vector<float> *right; /* what the parameter must be */
  test::Backward backward;         /* grad NULL: forward */
  bool wrong = false;

  const ref::Tensor &tensor() const { return c->job.model.at(backward.use); }
  std::size_t nbytes(mfsdp_dtype dtype) const {
    return static_cast<std::size_t>(tensor().numel()) * mfsdp_dtype_nbytes(dtype);
  }
  std::size_t weight_nbytes() const { return nbytes(tensor().compute); }
  std::size_t grad_nbytes() const { return backward.grad == nullptr ? 0 : nbytes(tensor().grad); }
  void compute() {
    for (int64_t i = 0; i < tensor().numel(); ++i)
      wrong = wrong || !test::same_bits(mfsdp_element_get(backward.weight, tensor().compute, i),
                                        static_cast<double>((*right)[static_cast<std::size_t>(i)]));
    if (backward.grad != nullptr) (void)test::Backward::run(&backward, nullptr);
  }
  static mfsdp_status task(void *argument, mfsdp_error *) {
    Work *w = static_cast<Work *>(argument);
    w->world->reads(w->backward.weight, w->weight_nbytes());
    if (w->backward.grad != nullptr) w->world->writes(w->backward.grad, w->grad_nbytes());
    w->compute();
    return MFSDP_OK;
  }
};

class Steps {
public:
  Steps(const Case *c, Rank *rank, FakeWorld *world, Trainer *trainer,
        const std::vector<std::vector<std::vector<float>>> *weights)
      : c_(c), rank_(rank), world_(world), trainer_(trainer), weights_(weights) {}

  mfsdp_status run(int64_t step) {
    mfsdp_runtime *rt = trainer_->runtime;
    const int32_t units = c_->job.model.unit_count();
    MFSDP_TRY(trainer_->begin(step));
    for (int32_t m = 0; m < c_->micro_batches; ++m) {
      const int64_t block = static_cast<int64_t>(m) * c_->ranks + rank_->rank;
      for (int32_t u = 0; u < units; ++u) {
        MFSDP_TRY(mfsdp_unit_acquire(rt, u, MFSDP_USE_FORWARD));
        MFSDP_TRY(compute(step, block, u, false));
        MFSDP_TRY(mfsdp_unit_release(rt, u));
      }
      MFSDP_TRY(mfsdp_step_value(rt, ref::synthetic_value(c_->job.model.seed, step, block)));
      for (int32_t u = units; u-- > 0;) {
        MFSDP_TRY(mfsdp_unit_acquire(rt, u, MFSDP_USE_BACKWARD));
        MFSDP_TRY(mfsdp_unit_grads(rt, u));
        MFSDP_TRY(compute(step, block, u, true));
        MFSDP_TRY(mfsdp_unit_reduce(rt, u));
        MFSDP_TRY(mfsdp_unit_release(rt, u));
      }
      if (c_->wanders) MFSDP_TRY(wander(step, block, units));
    }
    MFSDP_TRY(trainer_->end());
    world_->host_writes(rank_->rank, "host", rt->verdict.record.data, rt->verdict.record.nbytes,
                        nullptr, 0);
    return MFSDP_OK;
  }
  void check() const {
    for (const std::unique_ptr<Work> &w : works_)
      require(!w->wrong, "a wrong parameter of " + w->tensor().name + " in step " +
                             std::to_string(w->backward.step) +
                             (w->backward.grad == nullptr ? ", forward" : ", backward"));
  }

private:
  /* The last unit stays for a backward that does not come, and two held at once evict it. */
  mfsdp_status wander(int64_t step, int64_t block, int32_t units) {
    mfsdp_runtime *rt = trainer_->runtime;
    MFSDP_TRY(mfsdp_unit_acquire(rt, units - 1, MFSDP_USE_FORWARD));
    MFSDP_TRY(compute(step, block, units - 1, false));
    MFSDP_TRY(mfsdp_unit_release(rt, units - 1));
    for (int32_t u : {1, 2})
      MFSDP_TRY(mfsdp_unit_acquire(rt, u, MFSDP_USE_EVALUATE));
    for (int32_t u : {1, 2}) {
      MFSDP_TRY(compute(step, block, u, false));
      MFSDP_TRY(mfsdp_unit_release(rt, u));
    }
    return MFSDP_OK;
  }
  mfsdp_status compute(int64_t step, int64_t block, int32_t unit, bool backward) {
    for (int32_t i : c_->job.model.unit_tensors(unit)) {
      std::unique_ptr<Work> w(new Work());
      w->c = c_;
      w->world = world_;
      w->right = &(*weights_)[static_cast<std::size_t>(step)][static_cast<std::size_t>(i)];
      w->backward.job = &c_->job;
      w->backward.rank = rank_->rank;
      w->backward.step = step;
      w->backward.block = block;
      w->backward.use = i;
      w->backward.weight = mfsdp_unit_param(trainer_->runtime, i);
      if (backward) w->backward.grad = mfsdp_unit_grad(trainer_->runtime, i);
      require(w->backward.weight != nullptr, "no address");
      works_.push_back(std::move(w));
      Work *work = works_.back().get();
      if (c_->on_queue) {
        MFSDP_TRY(
            rank_->backend->ops->queue_call(rank_->backend->self, rank_->queue, Work::task, work));
        continue;
      }
      world_->host_touches(rank_->rank, work->backward.weight, work->weight_nbytes(),
                           work->backward.grad, work->grad_nbytes());
      work->compute();
    }
    return MFSDP_OK;
  }

  const Case *c_;
  Rank *rank_;
  FakeWorld *world_;
  Trainer *trainer_;
  const std::vector<std::vector<std::vector<float>>> *weights_;
  std::vector<std::unique_ptr<Work>> works_;
};

/* What every schedule of a case must give. */
class Right {
public:
  explicit Right(const Case &c)
      : expected(c.job, static_cast<int64_t>(c.ranks) * c.micro_batches, c.steps) {
    weights.resize(static_cast<std::size_t>(c.steps));
    for (int32_t i = 0; i < c.job.model.count(); ++i) {
      std::vector<float> first(static_cast<std::size_t>(c.job.model.at(i).numel()));
      ref::synthetic_init(c.job.model.seed, c.job.model.owner(i), 0, c.job.model.at(i).numel(),
                          first.data());
      weights[0].push_back(first);
    }
    for (int64_t s = 1; s < c.steps; ++s)
      weights[static_cast<std::size_t>(s)] = expected.after(s - 1).weights;
    for (std::vector<std::vector<float>> &step : weights) /* as they are gathered */
      for (int32_t i = 0; i < c.job.model.count(); ++i)
        ref::round_all(c.job.model.at(i).compute, &step[static_cast<std::size_t>(i)]);
  }
  test::Expected expected;
  std::vector<std::vector<std::vector<float>>> weights; /* by step and tensor, before the step */
};

using Rt = const mfsdp_runtime *;
using Ev = const mfsdp_event *;
/* Leaves a wait of a rank's explored steps out: for the event, the nth of that rank. */
using Dropped = std::function<bool(int32_t rank, Rt, Ev, int64_t)>;

struct RunOptions {
  bool check_races = true;
  Dropped drop;
};

/* Runs a case once. Empty, or what is wrong. */
std::string run_case(const Case &c, const Right &right, const test::FakeChooser &choose,
                     const RunOptions &run) {
  test::FakeOptions options(c.ranks);
  std::vector<Rt> runtimes(static_cast<std::size_t>(c.ranks), nullptr); /* of explored steps */
  std::vector<int64_t> waits(runtimes.size(), 0);
  options.choose = choose;
  options.check_races = run.check_races;
  options.context.debug_poison = 1;
  return test::run_fake(options, [&](Rank &rank, FakeWorld &world) {
    const std::size_t me = static_cast<std::size_t>(rank.rank);
    Trainer trainer(&rank, &c.job, c.micro_batches);
    Steps steps(&c, &rank, &world, &trainer, &right.weights);
    if (run.drop)
      world.drop_wait = [&](int32_t r, Ev event) {
        const std::size_t at = static_cast<std::size_t>(r);
        return runtimes[at] != nullptr && run.drop(r, runtimes[at], event, waits[at]++);
      };
    MFSDP_TRY(trainer.make_plan());
    MFSDP_TRY(trainer.make_runtime(
        [&](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
          desc->compute_queue = c.on_queue ? rank.queue : nullptr;
          desc->prefetch_depth = c.prefetch;
          desc->reduce_depth = c.reduce;
          desc->reshard_after_forward = c.reshard;
          desc->state_space = c.space;
        }));
    MFSDP_TRY(
        mfsdp_runtime_init(trainer.runtime, Trainer::init, const_cast<ref::Model *>(&c.job.model)));
    for (int64_t s = 0; s < c.steps; ++s) {
      if (s == c.explored_from) {
        world.explore(true);
        runtimes[me] = trainer.runtime;
      }
      MFSDP_TRY(steps.run(s));
    }
    trainer.compare(right.expected, c.steps - 1);
    world.explore(false);
    runtimes[me] = nullptr;
    MFSDP_TRY(trainer.destroy());
    steps.check();
    return MFSDP_OK;
  });
}

RunOptions without_races() { /* faster: results alone */
  RunOptions run;
  run.check_races = false;
  return run;
}

std::vector<Case> cases(const Job &job, int32_t ranks, int32_t prefetch, int32_t reduce) {
  std::vector<Case> out;
  Case c;
  c.job = job;
  c.ranks = ranks;
  for (const bool on_queue : {false, true})
    for (c.prefetch = 0; c.prefetch <= prefetch; ++c.prefetch)
      for (c.reduce = 0; c.reduce <= reduce; ++c.reduce)
        for (c.reshard = 0; c.reshard <= 1; ++c.reshard) {
          c.on_queue = on_queue;
          /* The units whose gradients a tied tensor keeps open get a slot of their own. */
          out.push_back(c);
        }
  return out;
}

/* ---- every order is promised by an event ---- */

/* 16 bits on the wire, everywhere, and masters in another space: casts and copies of their own. */
std::vector<Case> variants(int32_t ranks) {
  std::vector<Case> out;
  for (const bool on_queue : {false, true})
    for (int variant = 0; variant < 4; ++variant) {
      Case c;
      if (MFSDP_TEST_SANITIZER && on_queue != (variant % 2 == 0)) continue; /* they take long */
      c.ranks = ranks;
      c.prefetch = c.reduce = 1;
      c.on_queue = on_queue;
      c.job = two_units();
      if (variant == 0) {
        c.dtypes = "bf16 wire";
        test::set_dtypes(&c.job.model, -1, MFSDP_F32, MFSDP_F32, MFSDP_BF16);
      } else if (variant < 3) {
        c.dtypes = variant == 1 ? "bf16" : "f16";
        const mfsdp_dtype dtype = variant == 1 ? MFSDP_BF16 : MFSDP_F16;
        test::set_dtypes(&c.job.model, -1, dtype, dtype, dtype);
      }
      if (variant == 2) c.space = MFSDP_SPACE_PINNED;
      if (variant == 3) c.space = MFSDP_SPACE_HOST;
      out.push_back(c);
    }
  return out;
}

/* Under sanitizers one thread computes at a time: they have little to find, and take long. */
bool skipped(const Case &c) {
  return MFSDP_TEST_SANITIZER && (c.prefetch != 1 || c.on_queue == (c.ranks == 1));
}

TEST(Races, NoneInAnyCase) {
  int64_t count = 0;
  for (const int32_t ranks : {1, 2})
    for (const Job &job : {two_units(), four_units()})
      for (Case c : cases(job, ranks, 2, 1)) {
        c.micro_batches = 2;
        c.steps = 3;
        c.explored_from = 0;
        c.wanders = job.model.unit_count() == 4 && c.prefetch > 0;
        if (skipped(c)) continue;
        const Right right(c);
        EXPECT_EQ(run_case(c, right, test::hosts_first(), RunOptions()), "") << c.text();
        EXPECT_EQ(run_case(c, right, test::random_schedule(1), RunOptions()), "") << c.text();
        ++count;
      }
  EXPECT_EQ(count, MFSDP_TEST_SANITIZER ? 2 * 2 * 4 : 2 * 2 * 24);
}

TEST(Races, NoneInOtherDtypesAndSpaces) {
  for (const int32_t ranks : {1, 2})
    for (Case c : variants(ranks)) {
      c.micro_batches = 2;
      c.steps = 3;
      c.explored_from = 0;
      const Right right(c);
      if (!MFSDP_TEST_SANITIZER) {
        EXPECT_EQ(run_case(c, right, test::hosts_first(), RunOptions()), "") << c.text();
      }
      EXPECT_EQ(run_case(c, right, test::random_schedule(1), RunOptions()), "") << c.text();
    }
}

/* ---- all interleavings ---- */

/* The second of two steps, while the first one's update may still be running.
 * MFSDP_TEST_ALL_PATHS=1 walks every case to its end (188,000 paths, a minute). */
TEST(Interleavings, AllOfSmallCases) {
  const int64_t limit = std::getenv("MFSDP_TEST_ALL_PATHS") != nullptr ? INT64_MAX
                        : MFSDP_TEST_SANITIZER                         ? 100
                                                                       : 1500;
  int64_t all = 0, whole = 0;
  for (const Case &c : cases(two_units(), 1, 2, 1)) {
    const Right right(c);
    test::Exhaustive paths;
    bool more = true;
    while (more && paths.count() < limit) {
      const std::string wrong = run_case(c, right, paths.chooser(), without_races());
      ASSERT_EQ(wrong, "") << c.text() << ", path " << paths.count();
      more = paths.next();
    }
    EXPECT_GT(paths.count(), 90) << c.text();
    all += paths.count();
    whole += !more;
  }
  std::printf("%lld paths; %lld of 24 cases to their end\n", static_cast<long long>(all),
              static_cast<long long>(whole));
  if (limit >= 1500) {
    EXPECT_GE(whole, 14);
  }
}

TEST(Interleavings, RandomOnesOfTwoRanks) {
  const uint64_t seeds = MFSDP_TEST_SANITIZER ? 2 : 20;
  for (const Job &job : {two_units(), four_units()})
    for (Case c : cases(job, 2, 2, 1)) {
      c.micro_batches = 2;
      c.explored_from = 0;
      c.wanders = job.model.unit_count() == 4 && c.prefetch > 0;
      const Right right(c);
      for (uint64_t seed = 0; seed < seeds; ++seed)
        ASSERT_EQ(run_case(c, right, test::random_schedule(seed), without_races()), "")
            << c.text() << ", seed " << seed;
    }
}

TEST(Interleavings, OfOtherDtypesAndSpaces) {
  const int64_t limit = MFSDP_TEST_SANITIZER ? 20 : 400;
  for (const Case &c : variants(1)) {
    const Right right(c);
    test::Exhaustive paths;
    bool more = true;
    while (more && paths.count() < limit) {
      const std::string wrong = run_case(c, right, paths.chooser(), without_races());
      ASSERT_EQ(wrong, "") << c.text() << ", path " << paths.count();
      more = paths.next();
    }
    EXPECT_GE(paths.count(), 20) << c.text();
  }
  for (Case c : variants(2)) {
    c.micro_batches = 2;
    c.explored_from = 0;
    const Right right(c);
    for (uint64_t seed = 0; seed < (MFSDP_TEST_SANITIZER ? 2 : 20); ++seed)
      ASSERT_EQ(run_case(c, right, test::random_schedule(seed), without_races()), "")
          << c.text() << ", seed " << seed;
  }
}

/* ---- units that stay, and those of which every rank has everything ---- */

std::vector<Case> residents(int32_t ranks) {
  std::vector<Case> out;
  for (Case c : variants(ranks))
    for (const int model : {0, 1})
      for (const bool replicated : {false, true}) {
        if (model == 1 && c.dtypes != Case().dtypes) continue; /* tied tensors add up in f32 */
        if (model == 1) c.job = four_units();
        c.job.residency = MFSDP_RESIDENCY_RESIDENT;
        if (replicated) c.job.placement = MFSDP_PLACEMENT_REPLICATED;
        c.micro_batches = 2;
        c.steps = 3;
        c.explored_from = 0;
        c.wanders = model == 1;
        out.push_back(c);
        c.job.placement = MFSDP_PLACEMENT_OWNED;
      }
  return out;
}

std::string strategy_of(const Case &c) {
  return (c.job.placement == MFSDP_PLACEMENT_REPLICATED ? "replicated, " : "zero1, ") + c.text();
}

TEST(Residents, NoRacesAndTheSameBits) {
  for (const int32_t ranks : {1, 2, 3})
    for (const Case &c : residents(ranks)) {
      const Right right(c);
      EXPECT_EQ(run_case(c, right, test::hosts_first(), RunOptions()), "") << strategy_of(c);
      for (uint64_t seed = 0; seed < (MFSDP_TEST_SANITIZER ? 1 : 4); ++seed)
        EXPECT_EQ(run_case(c, right, test::random_schedule(seed), RunOptions()), "")
            << strategy_of(c) << ", seed " << seed;
      for (uint64_t seed = 4; seed < (MFSDP_TEST_SANITIZER ? 5 : 14); ++seed)
        ASSERT_EQ(run_case(c, right, test::random_schedule(seed), without_races()), "")
            << strategy_of(c) << ", seed " << seed;
    }
}

/* Left out: what acquires wait for (of a replicated unit the update itself, which exports wait for as
 * well), and the update that a refresh waits for. */
TEST(Residents, TheirWaitsAreNeeded) {
  for (Case c : residents(2)) {
    const bool replicated = c.job.placement == MFSDP_PLACEMENT_REPLICATED;
    c.explored_from = 1; /* the first gathers are behind */
    const Right right(c);
    for (const bool update : {false, true}) {
      bool raced = false;
      RunOptions run;
      if (replicated && !update) continue;
      run.drop = [update](int32_t, Rt rt, Ev event, int64_t) {
        for (int32_t u = 0; u < rt->unit_count && !update; ++u)
          if (rt->units[u].gathered == event) return true;
        return update && rt->step_done == event;
      };
      for (uint64_t seed = 0; seed < 4 && !raced; ++seed)
        raced = run_case(c, right, test::random_schedule(seed), run).find("race: ") !=
                std::string::npos;
      EXPECT_TRUE(raced) << strategy_of(c) << (update ? ", the update" : ", the gather");
    }
  }
}

/* ---- the step in backward ---- */

/* Units of which each has a matrix for either rank, one that is used by one micro-batch of two, and
 * matrices that stay with their owners, or of which every rank has everything. */
std::vector<Case> stages(int32_t ranks) {
  std::vector<Case> out;
  for (const bool on_queue : {false, true})
    for (const mfsdp_placement placement : {MFSDP_PLACEMENT_OWNED, MFSDP_PLACEMENT_REPLICATED})
      for (const mfsdp_residency residency : {MFSDP_RESIDENCY_SHARDED, MFSDP_RESIDENCY_RESIDENT}) {
        Case c;
        if (placement == MFSDP_PLACEMENT_REPLICATED && residency == MFSDP_RESIDENCY_SHARDED)
          continue;
        c.ranks = ranks;
        c.prefetch = c.reduce = 1;
        c.on_queue = on_queue;
        c.micro_batches = 2;
        c.steps = 3;
        c.explored_from = 0;
        c.job = four_units();
        c.job.model.tensors.push_back(ref::experts("small", 3, 3, 4, 3));
        c.job.placement = placement;
        c.job.residency = residency;
        c.job.options.groups[0].clipped = false;
        c.job.tune = [](mfsdp_runtime_desc *desc) { desc->step_in_backward = 1; };
        out.push_back(c);
      }
  return out;
}

TEST(Stages, NoRacesAndTheSameBits) {
  for (const int32_t ranks : {1, 2, 3})
    for (const Case &c : stages(ranks)) {
      const Right right(c);
      EXPECT_EQ(run_case(c, right, test::hosts_first(), RunOptions()), "") << strategy_of(c);
      for (uint64_t seed = 0; seed < (MFSDP_TEST_SANITIZER ? 1 : 4); ++seed)
        EXPECT_EQ(run_case(c, right, test::random_schedule(seed), RunOptions()), "")
            << strategy_of(c) << ", seed " << seed;
      for (uint64_t seed = 4; seed < (MFSDP_TEST_SANITIZER ? 5 : 14); ++seed)
        ASSERT_EQ(run_case(c, right, test::random_schedule(seed), without_races()), "")
            << strategy_of(c) << ", seed " << seed;
    }
}

/* Left out: the sums that directions wait for, the directions that the commit waits for, and the
 * commit that the next step's directions wait for. */
TEST(Stages, TheirWaitsAreNeeded) {
  static const char *const names[] = {"landed", "done", "commit"};
  for (const Case &c : stages(2)) {
    const Right right(c);
    for (int which = 0; which < 3; ++which) {
      bool raced = false;
      RunOptions run;
      run.drop = [which](int32_t, Rt rt, Ev event, int64_t) {
        const Ev events[] = {rt->stages.landed, rt->stages.done, rt->step_done};
        return event == events[which];
      };
      for (uint64_t seed = 0; seed < 4 && !raced; ++seed)
        raced = run_case(c, right, test::random_schedule(seed), run).find("race: ") !=
                std::string::npos;
      EXPECT_TRUE(raced) << strategy_of(c) << ", " << names[which];
    }
  }
}

/* ---- matrices in bands ---- */

/* Several rounds: matrices one by one, and a batch of small ones. */
std::vector<Case> bands(int32_t ranks) {
  std::vector<Case> out;
  for (const bool on_queue : {false, true})
    for (const mfsdp_banded_update update : {MFSDP_BANDED_HOME, MFSDP_BANDED_EVERYWHERE}) {
      Case c;
      c.ranks = ranks;
      c.prefetch = c.reduce = 1;
      c.on_queue = on_queue;
      c.steps = 3;
      c.explored_from = 0;
      c.job = two_units();
      c.job.model.tensors.push_back(ref::experts("large", 2, 3, 13, 11)); /* 143 of 256 floats */
      c.job.model.tensors.push_back(ref::experts("small", 2, 4, 4, 3));
      c.job.placement = MFSDP_PLACEMENT_BANDED;
      c.job.options.bands = true;
      c.job.tune = [update](mfsdp_runtime_desc *desc) { desc->banded_update = update; };
      out.push_back(c);
    }
  return out;
}

TEST(Bands, NoRacesAndTheSameBits) {
  for (const int32_t ranks : {1, 2, 3})
    for (const Case &c : bands(ranks)) {
      const Right right(c);
      EXPECT_EQ(run_case(c, right, test::hosts_first(), RunOptions()), "") << c.text();
      for (uint64_t seed = 0; seed < (MFSDP_TEST_SANITIZER ? 1 : 4); ++seed)
        EXPECT_EQ(run_case(c, right, test::random_schedule(seed), RunOptions()), "")
            << c.text() << ", seed " << seed;
      for (uint64_t seed = 4; seed < (MFSDP_TEST_SANITIZER ? 5 : 24); ++seed)
        ASSERT_EQ(run_case(c, right, test::random_schedule(seed), without_races()), "")
            << c.text() << ", seed " << seed;
    }
}

/* Left out: what Newton-Schulz waits for, and what scatters and the next bands in a slot wait for. */
TEST(Bands, TheirWaitsAreNeeded) {
  for (const Case &c : bands(2)) {
    const Right right(c);
    for (const bool worked : {false, true}) {
      bool raced = false;
      RunOptions run;
      run.drop = [worked](int32_t, Rt rt, Ev event, int64_t) {
        for (int k = 0; k < 2; ++k)
          if (event == (worked ? rt->banded.worked[k] : rt->banded.gathered[k])) return true;
        return false;
      };
      for (uint64_t seed = 0; seed < 4 && !raced; ++seed)
        raced = run_case(c, right, test::random_schedule(seed), run).find("race: ") !=
                std::string::npos;
      EXPECT_TRUE(raced) << c.text() << (worked ? ", worked" : ", gathered");
    }
  }
}

/* ---- groups and replicas ---- */

/* Units 0 and 1 dense, 2 experts. */
std::vector<ref::Tensor> dense_units() {
  return two_units().model.tensors;
}
std::vector<ref::Tensor> expert_unit(const std::string &name) {
  return {ref::matrix(name + ".w", 2, 4, 5), ref::elementwise(name + ".b", 2, {9})};
}

struct GroupsCase {
  const char *name;
  GroupsJob job;
};

std::vector<GroupsCase> groups_cases() {
  std::vector<GroupsCase> out(4);
  const auto base = [](GroupsCase *c, const char *name) {
    c->name = name;
    c->job.options.clip_norm = 2.0;
    c->job.max_micro_batches = 2;
    c->job.chunk_nbytes = 1024;
    c->job.debug_poison = 1;
    /* Sums of a unit that a step does not use are cleared on the other queue. */
    c->job.script.unit_used = [](int64_t step, int32_t unit) { return step != 1 || unit != 1; };
  };
  base(&out[0], "two copies of one rank");
  out[0].job.add_group({{0}, {1}}, dense_units());
  base(&out[1], "experts of one rank");
  out[1].job.add_group({{0, 1}}, dense_units());
  out[1].job.add_instance(true, {{0}}, expert_unit("a"));
  out[1].job.add_instance(false, {{1}}, expert_unit("b"));
  base(&out[2], "experts with copies");
  out[2].job.add_group({{0, 1}}, dense_units());
  out[2].job.add_instance(true, {{0}, {1}}, expert_unit("a"));
  base(&out[3], "two copies of two, experts of one with copies");
  out[3].job.add_group({{0, 1}, {2, 3}}, dense_units());
  out[3].job.add_instance(true, {{0}, {2}}, expert_unit("a"));
  out[3].job.add_instance(false, {{1}, {3}}, expert_unit("b"));
  return out;
}

/* A rank's places on wires of one FakeWorld. */
class FakeLinks {
public:
  FakeLinks(Rank *rank, const GroupsJob &job) {
    FakeBackend *backend = static_cast<FakeBackend *>(rank->backend->self);
    for (std::size_t g = 0; g < job.groups.size(); ++g) {
      const test::Place place = job.place(rank->rank, g);
      const test::Instance &instance = job.groups[g][place.instance];
      const int32_t base =
          100 * (1 + static_cast<int32_t>(g)) + 20 * static_cast<int32_t>(place.instance);
      FakeWire inside, over;
      inside.wire = base + place.copy;
      inside.members = instance.copies[static_cast<std::size_t>(place.copy)];
      links.pairs.emplace_back(new test::Links::Pair());
      adopt(&links.pairs.back()->group, backend, inside);
      if (!instance.replicated) continue;
      over.wire = base + 10 + place.rank;
      for (const std::vector<int32_t> &copy : instance.copies)
        over.members.push_back(copy[static_cast<std::size_t>(place.rank)]);
      adopt(&links.pairs.back()->replica, backend, over);
    }
  }
  test::Links links;

private:
  void adopt(test::Link *link, FakeBackend *backend, const FakeWire &wire) {
    wires_.emplace_back(new FakeTransport(backend, wire));
    link->adopt(wires_.back()->transport, wires_.back()->control);
  }
  std::vector<std::unique_ptr<FakeTransport>> wires_;
};

std::string run_groups_case(const GroupsJob &base, const test::Expected &expected,
                            int32_t micro_batches, int64_t explored_from,
                            const test::FakeChooser &choose, bool check_races) {
  test::FakeOptions options(base.ranks());
  options.choose = choose;
  options.check_races = check_races;
  options.context.debug_poison = 1;
  return test::run_fake(options, [&](Rank &rank, FakeWorld &world) {
    GroupsJob job = base;
    job.touch = [&](int32_t me, const void *weight, std::size_t weight_nbytes, void *grad,
                    std::size_t grad_nbytes) {
      if (!job.on_queue) return world.host_touches(me, weight, weight_nbytes, grad, grad_nbytes);
      world.reads(weight, weight_nbytes);
      world.writes(grad, grad_nbytes);
    };
    FakeLinks fake(&rank, job);
    test::GroupsTrainer t(&rank, &fake.links, &job, micro_batches);
    MFSDP_TRY(t.create());
    for (int64_t s = 0; s < expected.count(); ++s) {
      if (s == explored_from) world.explore(true);
      MFSDP_TRY(t.step(s));
      world.host_writes(rank.rank, "host", t.runtime->verdict.record.data,
                        t.runtime->verdict.record.nbytes, nullptr, 0);
    }
    t.compare(expected, expected.count() - 1);
    world.explore(false);
    return t.destroy();
  });
}

TEST(Interleavings, GroupsAndReplicas) {
  for (const GroupsCase &c : groups_cases())
    for (const bool on_queue : {false, true})
      for (const int32_t depth : {0, 1}) {
        const bool large = c.job.ranks() > 2;
        GroupsJob job = c.job;
        job.on_queue = on_queue;
        job.prefetch_depth = job.reduce_depth = depth;
        if (MFSDP_TEST_SANITIZER && on_queue == (depth == 0)) continue;
        const test::Expected expected = job.expected(2, 3);
        if (!MFSDP_TEST_SANITIZER) {
          EXPECT_EQ(run_groups_case(job, expected, 2, 0, test::hosts_first(), true), "") << c.name;
        }
        EXPECT_EQ(run_groups_case(job, expected, 2, 0, test::random_schedule(1), true), "")
            << c.name;
        for (uint64_t seed = 0; seed < (MFSDP_TEST_SANITIZER ? 2 : large ? 6 : 20); ++seed)
          ASSERT_EQ(run_groups_case(job, expected, 2, 0, test::random_schedule(seed), false), "")
              << c.name << ", depth " << depth << ", queue " << on_queue << ", seed " << seed;
        if (large) continue;
        /* The first paths through the tree of choices of the second step. */
        const test::Expected short_run = job.expected(1, 2);
        test::Exhaustive paths;
        bool more = true;
        while (more && paths.count() < (MFSDP_TEST_SANITIZER ? 10 : 200)) {
          ASSERT_EQ(run_groups_case(job, short_run, 1, 1, paths.chooser(), false), "")
              << c.name << ", path " << paths.count();
          more = paths.next();
        }
      }
}

/* ---- each kind of wait is needed ---- */

struct Kind {
  const char *name;
  std::function<bool(const mfsdp_runtime *, const mfsdp_event *)> is;
};

bool is_idle(const mfsdp__ring &ring, const mfsdp_event *event) {
  for (int32_t i = 0; i < ring.count; ++i)
    if (ring.slots[i].idle == event) return true;
  return false;
}
bool is_gathered(const mfsdp_runtime *rt, const mfsdp_event *event) {
  for (int32_t u = 0; u < rt->unit_count; ++u)
    if (rt->units[u].gathered == event) return true;
  return false;
}

std::vector<Kind> kinds() {
  std::vector<Kind> out;
  out.push_back({"a unit is gathered", is_gathered});
  out.push_back(
      {"a parameter slot is idle", [](Rt rt, Ev e) { return is_idle(rt->param_ring, e); }});
  out.push_back({"a gradient slot is idle", [](Rt rt, Ev e) { return is_idle(rt->grad_ring, e); }});
  out.push_back({"compute is done", [](Rt rt, Ev e) { return e == rt->compute_done; }});
  out.push_back({"the last reduction", [](Rt rt, Ev e) { return e == rt->reduced; }});
  out.push_back({"the verdict is ready", [](Rt rt, Ev e) { return e == rt->verdict_ready; }});
  out.push_back({"the update is done", [](Rt rt, Ev e) { return e == rt->step_done; }});
  return out;
}

/* With one micro-batch and a gradient slot to spare none is used twice; and where every backward
 * waits for a gather of its own, that wait is behind the last reduction anyway. */
bool grad_slots_are_reused(const Case &c) {
  return c.reduce == 0 && (c.reshard == 0 || c.prefetch > 0);
}

TEST(Waits, EachKindIsMissed) {
  for (const Kind &kind : kinds()) {
    const bool of_grads = std::string(kind.name) == "a gradient slot is idle";
    int64_t races = 0;
    for (const Case &c : cases(two_units(), 2, 1, 1)) {
      if (skipped(c)) continue;
      const Right right(c);
      const bool needed = !of_grads || grad_slots_are_reused(c);
      bool raced = false, wrong = false;
      RunOptions run;
      run.drop = [&](int32_t, Rt rt, Ev event, int64_t) { return kind.is(rt, event); };
      for (uint64_t seed = 0; seed < 4 && !raced; ++seed)
        raced = run_case(c, right, test::random_schedule(seed), run).find("race: ") !=
                std::string::npos;
      EXPECT_EQ(raced, needed) << kind.name << ", " << c.text();
      races += raced;
      run.check_races = false; /* and by its results, in some schedule */
      for (uint64_t seed = 0; seed < 40 && !wrong; ++seed)
        wrong = !run_case(c, right, test::random_schedule(seed), run).empty();
      EXPECT_EQ(wrong, needed) << kind.name << ", " << c.text();
    }
    EXPECT_GT(races, 0) << kind.name;
  }
}

/* One wait at a time. Waits for slots and masters repeat what earlier ones of the same step
 * promise; those for computation, reductions and the verdict never do. */
TEST(Waits, EachOneOfAStep) {
  for (const Case &c : cases(two_units(), 2, 1, 1)) {
    if (!c.on_queue || skipped(c))
      continue; /* a host that waits makes waits of its queues unnecessary */
    const Right right(c);
    std::map<std::string, int> needed, spare;
    std::string name = "some";
    for (int64_t n = 0; !name.empty(); ++n) {
      RunOptions run;
      name = "";
      run.drop = [&](int32_t rank, Rt rt, Ev event, int64_t ordinal) {
        if (rank != 0 || ordinal != n) return false;
        for (const Kind &kind : kinds())
          if (kind.is(rt, event)) name = kind.name;
        return true;
      };
      const std::string wrong = run_case(c, right, test::hosts_first(), run);
      if (name.empty()) continue; /* beyond the last wait */
      ++(wrong.find("race: ") != std::string::npos ? needed : spare)[name];
    }
    EXPECT_EQ(needed["compute is done"], 3) << c.text(); /* two reductions, the message */
    EXPECT_EQ(needed["the last reduction"], 2)
        << c.text(); /* before the norm, before the verdict */
    EXPECT_EQ(needed["the verdict is ready"], 1) << c.text();
    EXPECT_EQ(needed["the update is done"], 2) << c.text(); /* the first gather, the export */
    EXPECT_GE(needed["a parameter slot is idle"], 3) << c.text();
    EXPECT_GE(needed["a unit is gathered"], 2) << c.text();
    EXPECT_EQ(needed["a gradient slot is idle"], grad_slots_are_reused(c) ? 1 : 0) << c.text();
    for (const char *never : {"compute is done", "the last reduction", "the verdict is ready"})
      EXPECT_EQ(spare[never], 0) << never << ", " << c.text();
  }
}

} // namespace
