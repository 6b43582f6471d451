/* SPDX-License-Identifier: MIT */
/*
 * RESIDENT (ZeRO-1) and REPLICATED (plain data parallel) on the oracle's bits; what is sent, held
 * and refreshed, by exact numbers; and failures during a refresh.
 * MFSDP_TEST_WRAP_MALLOC
 */
#include "failing.h"
#include "runtime_rig.h"

#include "../support/malloc_count.h"

#include <atomic>
#include <map>

namespace {

using test::Expected;
using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::run_job;
using test::Trainer;

#if MFSDP_TEST_SANITIZER
const int64_t kSteps = 2;
#else
const int64_t kSteps = 3;
#endif

Job zero1(Job job) {
  job.residency = MFSDP_RESIDENCY_RESIDENT;
  return job;
}
Job replicated(Job job) {
  job.residency = MFSDP_RESIDENCY_RESIDENT;
  job.placement = MFSDP_PLACEMENT_REPLICATED;
  return job;
}
std::vector<Job> both(const Job &job) {
  return {zero1(job), replicated(job)};
}
bool is_replicated(const Job &job) {
  return job.placement == MFSDP_PLACEMENT_REPLICATED;
}
std::string name_of(const Job &job) {
  return is_replicated(job) ? "replicated" : "zero1";
}

/* ---- the oracle's bits ---- */

struct Shape {
  int32_t world, micro_batches;
};

/* The oracle is asked about the model alone: it knows nothing of strategies. */
void expect_equal(const Job &job, const std::vector<Shape> &shapes, int64_t steps = kSteps) {
  const Expected expected(job, static_cast<int64_t>(shapes[0].world) * shapes[0].micro_batches,
                          steps);
  for (const Job &strategy : both(job))
    for (const Shape &s : shapes)
      EXPECT_EQ(run_job(strategy, s.world, s.micro_batches, expected), "") << name_of(strategy);
}

TEST(Oracle, EveryWorld) {
  for (const mfsdp_host_math *math : test::maths())
    for (const double clip : {0.0, 1.5}) {
      Job job = test::mixed_job();
      if (MFSDP_TEST_SANITIZER && clip == 0.0) continue;
      job.math = math;
      job.options.clip_norm = clip;
      expect_equal(job, {{1, 8}, {2, 4}, {4, 2}, {8, 1}});
      expect_equal(job, {{3, 1}, {1, 3}});
      expect_equal(job, {{7, 1}, {1, 7}});
    }
}

struct Option {
  std::string name;
  std::function<void(Job *)> change;
};

void tune(Job *job, const std::function<void(mfsdp_runtime_desc *)> &what) {
  job->tune = what;
}

void every_dtype(Job *job) { /* of the units without tied tensors: narrow gradients too */
  test::set_dtypes(&job->model, 0, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  test::set_dtypes(&job->model, 1, MFSDP_F16, MFSDP_F32, MFSDP_BF16);
  test::set_dtypes(&job->model, 2, MFSDP_BF16, MFSDP_F16, MFSDP_F16);
}

void with_algorithm(Job *job, mfsdp_algorithm algorithm) {
  tune(job, [algorithm](mfsdp_runtime_desc *d) {
    d->gather_algorithm = algorithm;
    d->wire.latency_ns = d->wire.between_latency_ns = 1000; /* for auto */
    d->wire.ns_per_mib = d->wire.between_ns_per_mib = 1000;
  });
}

std::vector<Option> options() {
  std::vector<Option> out;
  out.push_back({"bf16", [](Job *j) {
                   test::set_dtypes(&j->model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
                 }});
  out.push_back({"dtypes by unit", every_dtype});
  for (const mfsdp_space space : {MFSDP_SPACE_PINNED, MFSDP_SPACE_HOST}) {
    out.push_back({"offload", [space](Job *j) {
                     tune(j, [space](mfsdp_runtime_desc *d) { d->state_space = space; });
                   }});
    out.push_back({"offload of 16 bits", [space](Job *j) {
                     every_dtype(j);
                     tune(j, [space](mfsdp_runtime_desc *d) { d->state_space = space; });
                   }});
  }
  for (const mfsdp_algorithm algorithm :
       {MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_NATIVE, MFSDP_ALGORITHM_AUTO}) {
    out.push_back(
        {mfsdp_algorithm_name(algorithm), [algorithm](Job *j) { with_algorithm(j, algorithm); }});
    out.push_back(
        {std::string(mfsdp_algorithm_name(algorithm)) + " of 16 bits", [algorithm](Job *j) {
           every_dtype(j);
           with_algorithm(j, algorithm);
         }});
  }
  out.push_back({"keep, several active", [](Job *j) {
                   j->active_units = j->active_grads = 2;
                   tune(j, [](mfsdp_runtime_desc *d) { d->reshard_after_forward = 0; });
                 }});
  out.push_back({"poison and checks", [](Job *j) { j->debug_poison = j->debug_check = 1; }});
  out.push_back({"round robin", [](Job *j) { j->planner = MFSDP_PLANNER_ROUND_ROBIN; }});
  out.push_back({"balanced", [](Job *j) { j->planner = MFSDP_PLANNER_BALANCED; }});
  out.push_back({"loss scale and weights", [](Job *j) {
                   j->options.loss_scale.initial = 4;
                   j->script.weight = [](int64_t step, int64_t block) {
                     return 1.0 + static_cast<double>((step + block) % 3);
                   };
                 }});
  out.push_back({"step in backward", [](Job *j) {
                   j->options.groups[0].clipped = false;
                   tune(j, [](mfsdp_runtime_desc *d) { d->step_in_backward = 1; });
                 }});
  out.push_back({"step in backward, workers", [](Job *j) {
                   j->options.groups[0].clipped = false;
                   j->queue_kind = MFSDP_HOST_QUEUE_WORKER;
                   j->on_queue = true;
                   tune(j, [](mfsdp_runtime_desc *d) { d->step_in_backward = 1; });
                 }});
  for (const bool on_queue : {false, true})
    for (const int32_t prefetch : {0, 2})
      out.push_back({"workers", [on_queue, prefetch](Job *j) {
                       j->queue_kind = MFSDP_HOST_QUEUE_WORKER;
                       j->on_queue = on_queue;
                       j->debug_poison = 1;
                       tune(j, [prefetch](mfsdp_runtime_desc *d) {
                         d->prefetch_depth = prefetch;
                         d->reduce_depth = prefetch > 0;
                       });
                     }});
  out.push_back({"workers, 16 bits, offload", [](Job *j) {
                   every_dtype(j);
                   j->queue_kind = MFSDP_HOST_QUEUE_WORKER;
                   j->on_queue = true;
                   tune(j, [](mfsdp_runtime_desc *d) {
                     d->prefetch_depth = d->reduce_depth = 1;
                     d->state_space = MFSDP_SPACE_HOST;
                   });
                 }});
  return out;
}

TEST(Oracle, EveryOption) {
  for (const Option &option : options()) {
    Job job = test::mixed_job();
    option.change(&job);
    SCOPED_TRACE(option.name);
    if (MFSDP_TEST_TSAN && job.queue_kind != MFSDP_HOST_QUEUE_WORKER)
      continue; /* they differ in numbers, not in threads: the tests around this one have those */
    expect_equal(job, {{4, 2}});
    if (!MFSDP_TEST_SANITIZER) expect_equal(job, {{3, 1}});
  }
}

TEST(Oracle, LocalAccumulation) {
  Job job = test::mixed_job();
  job.options.local_world = 3;
  expect_equal(job, {{3, 2}});
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  job.on_queue = true;
  expect_equal(job, {{3, 2}});
}

/* ---- steps that are not like the others ---- */

/* A skipped step leaves everything as it was, on ranks that own the culprit and on those that do
 * not. */
TEST(Oracle, NonFiniteGradientsAreSkipped) {
  Job job = test::mixed_job();
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    const bool bad = step == 1 && block == 2 && use == 14;
    return bad ? ref::Sample::kInf : ref::Sample::kPresent;
  };
  expect_equal(job, {{4, 1}, {2, 2}}, 3);
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  job.on_queue = true;
  expect_equal(job, {{4, 1}}, 3);
}

TEST(Oracle, MissingGradientsAndUnusedUnits) {
  for (const bool zeros : {false, true}) {
    Job job = test::mixed_job();
    job.options.missing_is_zero = zeros;
    job.script.sample = [](int64_t step, int64_t block, int32_t use) {
      return step == 1 && (use == 2 || (use == 3 && block != 1)) ? ref::Sample::kAbsent
                                                                 : ref::Sample::kPresent;
    };
    expect_equal(job, {{4, 1}, {2, 2}}, 3);
    Job unused = test::mixed_job(); /* unit 2 in no micro-batch of step 1: its sums are zeros */
    unused.options.missing_is_zero = zeros;
    unused.script.unit_used = [](int64_t step, int32_t unit) { return step != 1 || unit != 2; };
    expect_equal(unused, {{4, 1}, {2, 2}}, 3);
  }
}

/* ---- what is sent ---- */

struct Bytes {
  uint64_t payload = 0, wire = 0;
  bool operator==(const Bytes &o) const { return payload == o.payload && wire == o.wire; }
  void add(uint64_t its_payload, uint64_t its_wire, uint64_t times) {
    payload += times * its_payload;
    wire += times * its_wire;
  }
};

std::ostream &operator<<(std::ostream &out, const Bytes &b) {
  return out << b.payload << " payload, " << b.wire << " wire";
}

Bytes sent_of(const Rank &rank, mfsdp_traffic traffic) {
  Bytes out;
  out.payload = rank.context.counters.sent[traffic].payload_nbytes;
  out.wire = rank.context.counters.sent[traffic].wire_nbytes;
  return out;
}

/* Elements of `owner`'s part of all units in one layout, as the plan's extents have them. */
Bytes part_of(const Rank &rank, const mfsdp_plan *plan, mfsdp_layout_kind kind, int32_t owner) {
  Bytes out;
  for (int32_t u = 0; u < mfsdp_plan_unit_count(plan); ++u) {
    std::vector<mfsdp_extent> extents(1000);
    mfsdp_context *context = const_cast<mfsdp_context *>(&rank.context);
    int32_t count = 0;
    require(mfsdp_plan_extents(context, plan, u, kind, extents.data(), 1000, &count) == MFSDP_OK &&
                count <= 1000,
            "extents");
    for (int32_t i = 0; i < count; ++i)
      if (extents[static_cast<std::size_t>(i)].owner == owner)
        out.add(static_cast<uint64_t>(extents[static_cast<std::size_t>(i)].payload_count),
                static_cast<uint64_t>(extents[static_cast<std::size_t>(i)].count), 1);
  }
  return out;
}

uint64_t elements(const ref::Model &model, bool frozen) {
  uint64_t sum = 0;
  for (int32_t i = 0; i < model.count(); ++i)
    if (model.owner(i) == i && (frozen || model.at(i).role != ref::Role::kFrozen))
      sum += static_cast<uint64_t>(model.at(i).numel());
  return sum;
}

const mfsdp_traffic kClasses[] = {MFSDP_TRAFFIC_MATERIALIZE, MFSDP_TRAFFIC_REDUCE,
                                  MFSDP_TRAFFIC_OPTIMIZER_MATRIX};

/* What this rank sends of one class in `steps` steps after an init. Element sizes in bytes. */
Bytes wanted(const Job &job, const Rank &rank, const mfsdp_plan *plan, mfsdp_traffic traffic,
             uint64_t steps, uint64_t micro_batches, uint64_t compute, uint64_t wire) {
  const uint64_t others = static_cast<uint64_t>(rank.world - 1);
  Bytes out;
  if (traffic != MFSDP_TRAFFIC_REDUCE) {
    const Bytes own = part_of(rank, plan, MFSDP_LAYOUT_GATHER, rank.rank);
    const uint64_t times = traffic == MFSDP_TRAFFIC_MATERIALIZE ? 1 : steps;
    if (!is_replicated(job)) out.add(own.payload, own.wire, times * others * compute);
    return out;
  }
  for (int32_t r = 0; r < rank.world; ++r) {
    const Bytes part = part_of(rank, plan, MFSDP_LAYOUT_REDUCE, r);
    if (r != rank.rank) out.add(part.payload, part.wire, steps * micro_batches * wire);
    if (r == rank.rank && is_replicated(job)) /* the sums, in f32, once a step */
      out.add(part.payload, part.wire, steps * others * 4);
  }
  return out;
}

void expect_traffic(const Job &job, int32_t world, int32_t micro_batches, uint64_t compute,
                    uint64_t wire) {
  const uint64_t steps = 3, others = static_cast<uint64_t>(world - 1);
  std::vector<std::map<mfsdp_traffic, Bytes>> sent(static_cast<std::size_t>(world)), want = sent;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Trainer t(&rank, &job, micro_batches);
    const std::size_t me = static_cast<std::size_t>(rank.rank);
    MFSDP_TRY(t.create());
    for (uint64_t s = 0; s < steps; ++s) {
      MFSDP_TRY(t.step(static_cast<int64_t>(s)));
      require(sent_of(rank, MFSDP_TRAFFIC_MATERIALIZE) ==
                  wanted(job, rank, t.plan, MFSDP_TRAFFIC_MATERIALIZE, 0, 0, compute, wire),
              "bytes of materialize after the start");
    }
    for (const mfsdp_traffic c : kClasses) {
      sent[me][c] = sent_of(rank, c);
      want[me][c] =
          wanted(job, rank, t.plan, c, steps, static_cast<uint64_t>(micro_batches), compute, wire);
    }
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  std::map<mfsdp_traffic, uint64_t> sum;
  for (std::size_t r = 0; r < sent.size(); ++r)
    for (const mfsdp_traffic c : kClasses) {
      EXPECT_EQ(sent[r][c], want[r][c])
          << name_of(job) << ": " << mfsdp_traffic_name(c) << " of rank " << r << " of " << world;
      sum[c] += sent[r][c].payload;
    }
  /* The same without a plan. */
  const uint64_t full = is_replicated(job) ? 0 : elements(job.model, true) * compute;
  const uint64_t grads = elements(job.model, false);
  EXPECT_EQ(sum[MFSDP_TRAFFIC_MATERIALIZE], full * others);
  EXPECT_EQ(sum[MFSDP_TRAFFIC_OPTIMIZER_MATRIX], full * others * steps);
  EXPECT_EQ(sum[MFSDP_TRAFFIC_REDUCE],
            grads * others * steps *
                (static_cast<uint64_t>(micro_batches) * wire + (is_replicated(job) ? 4 : 0)));
}

TEST(Traffic, EqualsTheAnalyticBytes) {
  for (const Job &job : both(test::mixed_job()))
    for (const int32_t world : {1, 2, 3, 4, 7, 8})
      expect_traffic(job, world, 2, 4, 4);
  Job narrow = test::mixed_job();
  test::set_dtypes(&narrow.model, -1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  for (const Job &job : both(narrow))
    expect_traffic(job, 4, 2, 2, 2);
}

/* ---- when it is sent ---- */

/* Counts batches by label; one label may be held up until it is let go. */
class WatchedTransport : public test::ForwardingTransport {
public:
  using test::ForwardingTransport::ForwardingTransport;
  std::map<std::string, int64_t> batches;
  std::vector<std::string> order;
  std::string held; /* WORKER queues only */
  std::atomic<bool> let_go{false};

private:
  static mfsdp_status hold(void *argument, mfsdp_error *error) {
    const int64_t end_us = mfsdp_clock_us() + 10 * 1000000;
    while (!static_cast<WatchedTransport *>(argument)->let_go)
      if (mfsdp_clock_us() > end_us)
        return MFSDP_ERROR_SET(error, MFSDP_E_TIMEOUT, -1, "nobody let the batch go");
      else
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 500);
    return MFSDP_OK;
  }
  mfsdp_status submit(mfsdp_context *context, mfsdp_queue *queue,
                      const mfsdp_batch *batch) override {
    ++batches[batch->label];
    order.push_back(batch->label);
    if (held == batch->label)
      MFSDP_TRY(backend()->ops->queue_call(backend()->self, queue, hold, this));
    return forward(context, queue, batch);
  }
};

/* Three units, no ties. */
Job plain_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
  job.model.tensors.push_back(ref::matrix("a", 1, 12, 10));
  job.model.tensors.push_back(ref::elementwise("bias", 1, {10}));
  job.model.tensors.push_back(ref::matrix("b", 2, 9, 20));
  job.options.clip_norm = 2.0;
  return job;
}

/* Every unit once after new values, by its first acquire, and once behind every step, in unit
 * order. */
TEST(Refresh, OncePerUnitAndStep) {
  for (const int32_t prefetch : {0, 1}) {
    Job job = zero1(plain_job());
    job.tune = [prefetch](mfsdp_runtime_desc *d) { d->prefetch_depth = prefetch; };
    const Expected expected(job, 6, 3);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      WatchedTransport watched(rank.transport);
      Trainer t(&rank, &job, 2);
      t.transport = watched.table;
      MFSDP_TRY(t.create());
      for (int64_t s = 0; s < 3; ++s) {
        MFSDP_TRY(t.step(s));
        for (int32_t u = 0; u < 3; ++u) {
          const std::string unit = std::to_string(u);
          require(watched.batches["gather unit " + unit] == 1, "gathers of unit " + unit);
          require(watched.batches["refresh unit " + unit] == s + 1, "refreshes of unit " + unit);
        }
        const std::size_t n = watched.order.size();
        require(watched.order[n - 4] == "gather verdict" &&
                    watched.order[n - 3] == "refresh unit 0" &&
                    watched.order[n - 2] == "refresh unit 1" &&
                    watched.order[n - 1] == "refresh unit 2",
                "a step does not end with its refresh in unit order");
        t.compare(expected, s);
      }
      MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
      for (int32_t k = 0; k < 2; ++k)
        for (int32_t u = 0; u < 3; ++u) {
          MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_EVALUATE));
          MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
        }
      for (int32_t u = 0; u < 3; ++u)
        require(watched.batches["gather unit " + std::to_string(u)] == 2, "gathers after init");
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Sums are gathered behind the last reduce of each unit, not at the end of the step. */
TEST(Refresh, SumsFollowTheLastReduce) {
  const Job job = replicated(plain_job());
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    WatchedTransport watched(rank.transport);
    Trainer t(&rank, &job, 2);
    t.transport = watched.table;
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    std::vector<std::string> want;
    for (int32_t micro = 0; micro < 2; ++micro)
      for (int32_t u = 3; u-- > 0;) {
        want.push_back("reduce unit " + std::to_string(u));
        if (micro == 1) want.push_back("gather sums of unit " + std::to_string(u));
      }
    want.push_back("gather verdict");
    require(watched.order == want, "another order of batches");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* A unit that is reduced in one of two micro-batches: its sums come at the end of the step. */
TEST(Refresh, SumsOfAUnitReducedOnce) {
  const Job job = replicated(plain_job());
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    std::vector<float> mine(200, 0.0f);
    WatchedTransport watched(rank.transport);
    Trainer t(&rank, &job, 2);
    t.transport = watched.table;
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0)); /* leaves sums that must not be seen again */
    watched.order.clear();
    MFSDP_TRY(t.begin(1));
    for (int32_t m = 0; m < 2; ++m)
      MFSDP_TRY(mfsdp_step_value(t.runtime, 1.0));
    MFSDP_TRY(t.backward(1, 0, rank.rank, 2));
    MFSDP_TRY(t.end());
    const std::vector<std::string> want = {"reduce unit 2", "gather sums of unit 2",
                                           "gather verdict"};
    require(watched.order == want, "another order of batches");
    /* All ranks updated b alike, from the same sums, and nothing else. */
    for (int32_t i = 0; i < 4; ++i) {
      std::vector<float> all(600, 0.0f), first;
      MFSDP_TRY(mfsdp_param_export(t.runtime, i, -1, all.data()));
      const uint64_t hash = mfsdp_hash_bytes(MFSDP_HASH_SEED, all.data(), 600 * sizeof(float));
      uint64_t hashes[3] = {0, 0, 0};
      MFSDP_TRY(rank.control.ops->allgather(rank.control.self, &rank.context, &hash, sizeof(hash),
                                            hashes, rank.control.deadline_us));
      require(hashes[0] == hashes[1] && hashes[1] == hashes[2], "ranks differ");
    }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* While the last unit's refresh is held up, the units before it are used. */
TEST(Refresh, RunsBesideTheNextForward) {
  for (const bool on_queue : {false, true}) {
    Job job = zero1(plain_job());
    job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    job.on_queue = on_queue;
    const Expected expected(job, 3, 1);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      WatchedTransport watched(rank.transport);
      Trainer t(&rank, &job, 1);
      t.transport = watched.table;
      MFSDP_TRY(t.create());
      watched.held = "refresh unit 2";
      MFSDP_TRY(t.step(0));
      for (int32_t u = 0; u < 2; ++u) {
        MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_FORWARD));
        MFSDP_TRY(rank.finish()); /* what the trainer's queue waits for as well */
        const int32_t param = u;
        std::vector<float> got;
        MFSDP_TRY(rank.read(mfsdp_unit_param(t.runtime, param),
                            static_cast<std::size_t>(job.model.at(param).numel()), &got));
        const std::string wrong =
            test::difference("unit " + std::to_string(u), got.data(),
                             expected.after(0).weights[static_cast<std::size_t>(param)].data(),
                             job.model.at(param).numel());
        require(wrong.empty(), wrong);
        MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
      }
      require(!watched.let_go, "the refresh was not held");
      watched.let_go = true;
      t.compare(expected, 0);
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Evaluation between steps: the oracle's bits at addresses that never change. */
TEST(Refresh, EvaluationBetweenSteps) {
  for (const Job &plain : both(test::mixed_job()))
    for (const bool on_queue : {false, true}) {
      Job job = plain;
      job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      job.on_queue = on_queue;
      job.debug_poison = 1;
      const Expected expected(job, 4, 2);
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
        Trainer t(&rank, &job, 1);
        std::map<int32_t, const void *> places;
        MFSDP_TRY(t.create());
        for (int64_t s = 0; s < 2; ++s) {
          MFSDP_TRY(t.step(s));
          for (int32_t u = job.model.unit_count(); u-- > 0;) {
            MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_EVALUATE));
            for (int32_t i : job.model.unit_tensors(u)) {
              const void *place = mfsdp_unit_param(t.runtime, i);
              std::vector<float> got;
              require(s == 0 || places[i] == place, "the address of a resident tensor");
              places[i] = place;
              MFSDP_TRY(rank.read(place, static_cast<std::size_t>(job.model.at(i).numel()), &got));
              const std::string wrong =
                  test::difference(job.model.at(i).name, got.data(),
                                   expected.after(s).weights[static_cast<std::size_t>(i)].data(),
                                   job.model.at(i).numel());
              require(wrong.empty(), wrong);
            }
            MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
            for (int32_t i : job.model.unit_tensors(u))
              require(mfsdp_unit_param(t.runtime, i) == nullptr, "an address after the release");
          }
        }
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << name_of(job) << ": " << result.text();
    }
}

/* Any number of units at once: there are no slots to run out of. */
TEST(Refresh, AcquiresWithoutLimit) {
  for (const Job &job : both(test::mixed_job())) {
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(t.create());
      for (int32_t u = 0; u < job.model.unit_count(); ++u)
        MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_FORWARD));
      must_fail(rank, mfsdp_runtime_init(t.runtime, Trainer::init, nullptr), MFSDP_E_STATE,
                "init: unit 0 is acquired");
      for (int32_t u = 0; u < job.model.unit_count(); ++u)
        MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
      must_fail(rank, mfsdp_unit_release(t.runtime, 1), MFSDP_E_STATE, "it is not acquired");
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << name_of(job) << ": " << result.text();
  }
}

/* ---- what is held ---- */

std::size_t aligned(int64_t count) {
  return static_cast<std::size_t>((count + 127) / 128 * 128);
}

/* From pieces and tensors alone. */
mfsdp_memory memory_wanted(const Job &job, const Rank &rank, const mfsdp_runtime_desc &d,
                           const mfsdp_plan *plan) {
  mfsdp_memory want = mfsdp_memory_default();
  std::size_t largest_grads = 256;
  int32_t count = 0, units = 0, tied = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  for (int32_t i = 0; i < count; ++i) {
    const ref::Tensor &t = job.model.at(pieces[i].param);
    const std::size_t n = aligned(pieces[i].count);
    const bool apart = t.compute != MFSDP_F32 || d.state_space != MFSDP_SPACE_DEVICE;
    const bool frozen = t.role == ref::Role::kFrozen, own = pieces[i].owner == rank.rank;
    const bool muon = job.options.groups[static_cast<std::size_t>(t.group)].muon;
    if (own && !frozen) want.grad_nbytes += n * 4;
    if (own && !is_replicated(job) && apart && !frozen) want.shard_nbytes += n * 4;
    if (own && d.gather_algorithm != MFSDP_DIRECT && !is_replicated(job)) /* packed segments */
      want.shard_nbytes += n * mfsdp_dtype_nbytes(t.compute);
    if ((own || is_replicated(job)) && !frozen) want.state_nbytes += (muon ? 4 : 8) * n;
  }
  for (int32_t u = 0; u < job.model.unit_count(); ++u) {
    std::size_t grads = 0, size = 4;
    bool shared = false;
    units += !job.model.unit_tensors(u).empty();
    for (int32_t i = 0; i < job.model.count(); ++i)
      shared = shared || (job.model.at(i).unit != u && job.model.at(job.model.owner(i)).unit == u);
    tied += shared;
    for (int32_t i : job.model.unit_tensors(u)) {
      const ref::Tensor &t = job.model.at(i);
      const std::size_t n = aligned(t.numel());
      const bool apart = t.compute != MFSDP_F32 || d.state_space != MFSDP_SPACE_DEVICE;
      if (job.model.owner(i) != i) continue;
      want.shard_nbytes += n * mfsdp_dtype_nbytes(t.compute);
      if (t.role == ref::Role::kFrozen) continue;
      grads += n;
      size = mfsdp_dtype_nbytes(t.grad);
      if (is_replicated(job)) want.grad_nbytes += n * 4;
      if (is_replicated(job) && apart) want.shard_nbytes += n * 4;
    }
    largest_grads = std::max(largest_grads, grads * size);
  }
  const int32_t slots = std::min(units, d.active_grads + tied + d.reduce_depth);
  want.slot_nbytes = largest_grads * static_cast<std::size_t>(d.local_accumulation ? units : slots);
  return want;
}

mfsdp_status check_memory(const Job &job, Rank &rank) {
  Trainer t(&rank, &job, 2);
  mfsdp_memory predicted = mfsdp_memory_default(), want = predicted;
  const std::size_t *now = rank.context.current_nbytes;
  MFSDP_TRY(t.make_plan());
  MFSDP_TRY(t.make_runtime(
      [&](mfsdp_runtime_desc *d, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
        rank.memory->fail_from(0);
        require(mfsdp_runtime_memory(&rank.context, d, &predicted) == MFSDP_OK, "the prediction");
        rank.memory->fail_at(-1);
        want = memory_wanted(job, rank, *d, t.plan);
      }));
  const auto same = [](const char *what, std::size_t a, std::size_t b) {
    require(a == b, std::string(what) + ": " + std::to_string(a) + ", not " + std::to_string(b));
  };
  const auto holds_what_was_predicted = [&] {
    same("shard held", now[MFSDP_MEMORY_SHARD], predicted.shard_nbytes);
    same("state held", now[MFSDP_MEMORY_STATE], predicted.state_nbytes);
    same("grad held", now[MFSDP_MEMORY_GRAD], predicted.grad_nbytes);
    same("slots held", now[MFSDP_MEMORY_SLOT], predicted.slot_nbytes);
    same("staging held", now[MFSDP_MEMORY_STAGING], predicted.staging_nbytes);
    same("workspace held", now[MFSDP_MEMORY_WORKSPACE], predicted.workspace_nbytes);
  };
  same("shard", predicted.shard_nbytes, want.shard_nbytes);
  same("state", predicted.state_nbytes, want.state_nbytes);
  same("grad", predicted.grad_nbytes, want.grad_nbytes);
  same("slots", predicted.slot_nbytes, want.slot_nbytes);
  holds_what_was_predicted();
  MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
  MFSDP_TRY(t.step(0));
  holds_what_was_predicted();
  return t.destroy();
}

TEST(Memory, PredictionIsWhatCreateHolds) {
  std::vector<Option> all = options();
  all.push_back({"as it comes", [](Job *) {}});
  all.push_back({"local accumulation", [](Job *j) { j->options.local_world = 3; }});
  for (const Option &option : all)
    for (const int32_t world : {1, 3, 8}) {
      if (MFSDP_TEST_SANITIZER && world != 3) continue;
      Job plain = test::mixed_job();
      option.change(&plain);
      if (plain.options.local_world > 0) plain.options.local_world = world;
      for (const Job &job : both(plain)) {
        const test::RanksResult result = test::run_ranks(
            test::ranks_of(job, world), [&](Rank &rank) { return check_memory(job, rank); });
        EXPECT_TRUE(result.ok()) << option.name << ", " << name_of(job) << ", world " << world
                                 << ": " << result.text();
      }
    }
}

TEST(Memory, NothingIsAllocatedInSteadyState) {
  for (const Job &plain : both(test::mixed_job()))
    for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
      Job job = plain;
      uint64_t count = 0;
      job.queue_kind = kind;
      job.on_queue = kind == MFSDP_HOST_QUEUE_WORKER;
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
        Trainer t(&rank, &job, 2);
        std::vector<float> dst(12000);
        MFSDP_TRY(t.create());
        MFSDP_TRY(t.step(0));
        MFSDP_TRY(rank.barrier());
        if (rank.rank == 0) test::malloc_count_begin();
        rank.memory->fail_at(-1); /* counts from 0 */
        MFSDP_TRY(rank.barrier());
        for (int64_t s = 1; s < 4; ++s)
          MFSDP_TRY(t.step(s));
        MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, dst.data()));
        MFSDP_TRY(rank.barrier());
        if (rank.rank == 0) count = test::malloc_count_end();
        require(rank.memory->alloc_count() == 0, "the context's allocator was asked");
        MFSDP_TRY(rank.barrier());
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << result.text();
      EXPECT_EQ(count, 0u) << name_of(job);
    }
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
}

/* Every allocation of one rank's set-up fails once: all ranks hear of it, and all is given back. */
TEST(Memory, EveryAllocationOfOneRankFails) {
  for (Job job : both(plain_job())) {
    const int64_t stride = MFSDP_TEST_SANITIZER ? 5 : 1;
    int64_t n = 0;
    test::set_dtypes(&job.model, 1, MFSDP_BF16, MFSDP_F32, MFSDP_F32);
    for (bool failed = true; failed && !::testing::Test::HasFailure(); n += stride) {
      const int64_t start_us = mfsdp_clock_us();
      failed = false;
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
        Trainer t(&rank, &job, 1);
        MFSDP_TRY(t.make_plan());
        if (rank.rank == 1) rank.memory->fail_at(n);
        const mfsdp_status status = t.make_runtime();
        if (rank.rank == 1) failed = rank.memory->failed();
        rank.memory->fail_at(-1);
        MFSDP_TRY(status);
        MFSDP_TRY(
            mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
        MFSDP_TRY(t.step(0)); /* the other rank may have come this far */
        return t.destroy();
      });
      EXPECT_TRUE(result.clean()) << "allocation " << n << ": " << result.text();
      EXPECT_LT(mfsdp_clock_us() - start_us, 10 * 1000000) << "allocation " << n;
      for (std::size_t r = 0; r < 2; ++r)
        EXPECT_EQ(result[r].status != MFSDP_OK, failed) << "allocation " << n << ", rank " << r;
    }
    EXPECT_GT(n, 40);
  }
}

/* ---- export ---- */

TEST(Export, EveryRootAndWhatIsSent) {
  for (const Job &job : both(test::mixed_job())) {
    const Expected expected(job, 3, 1);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(t.create());
      MFSDP_TRY(t.step(0));
      for (int32_t root = -1; root < 3; ++root)
        for (int32_t i = 0; i < job.model.count(); ++i) {
          const bool mine = root < 0 || root == rank.rank;
          std::vector<float> got(static_cast<std::size_t>(job.model.at(i).numel()));
          MFSDP_TRY(mfsdp_param_export(t.runtime, i, root, mine ? got.data() : nullptr));
          const std::string wrong =
              test::difference(job.model.at(i).name, got.data(),
                               expected.after(0).weights[static_cast<std::size_t>(i)].data(),
                               mine ? job.model.at(i).numel() : 0);
          require(wrong.empty(), wrong);
        }
      require((sent_of(rank, MFSDP_TRAFFIC_EXPORT).payload == 0) == is_replicated(job),
              "bytes of exports");
      /* Inside a step: as long as a gradient slot is free. */
      std::vector<float> dst(12000);
      MFSDP_TRY(t.begin(1));
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_BACKWARD));
      MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, dst.data()));
      MFSDP_TRY(mfsdp_unit_grads(t.runtime, 5)); /* and unit 0's, whose tensor it has */
      must_fail(rank, mfsdp_param_export(t.runtime, 0, -1, dst.data()), MFSDP_E_STATE,
                "export: all 2 gradient slots are open; reduce a unit first");
      MFSDP_TRY(mfsdp_unit_reduce(t.runtime, 5));
      MFSDP_TRY(mfsdp_unit_grads(t.runtime, 0));
      MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, dst.data()));
      MFSDP_TRY(mfsdp_unit_reduce(t.runtime, 0));
      MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, dst.data()));
      MFSDP_TRY(mfsdp_unit_release(t.runtime, 1));
      MFSDP_TRY(t.end());
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << name_of(job) << ": " << result.text();
  }
}

/* What a rank has, and which of several has to save it. */
TEST(Owned, EverythingIsSavedOnce) {
  for (const Job &job : both(test::mixed_job())) {
    std::vector<int64_t> held(3), saved(3);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      mfsdp_owned owned = mfsdp_owned_default();
      MFSDP_TRY(t.create());
      while (mfsdp_owned_next(t.runtime, &owned)) {
        held[static_cast<std::size_t>(rank.rank)] += owned.count;
        saved[static_cast<std::size_t>(rank.rank)] += owned.saves ? owned.count : 0;
      }
      return t.destroy();
    });
    const int64_t all = static_cast<int64_t>(elements(job.model, true));
    EXPECT_TRUE(result.ok()) << result.text();
    EXPECT_EQ(saved[0] + saved[1] + saved[2], all);
    EXPECT_EQ(held[0] + held[1] + held[2], is_replicated(job) ? 3 * all : all);
  }
}

/* ---- what does not fit together ---- */

TEST(Rules, ReplicatedTakesNoReplicas) {
  const Job job = replicated(test::small_job());
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 1), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.make_plan());
    must_fail(rank,
              t.make_runtime([&](mfsdp_runtime_desc *, mfsdp_group *group, mfsdp_optimizer_desc *,
                                 mfsdp_hyper_group *) {
                group->replica = &rank.transport;
                group->replica_control = &rank.control;
              }),
              MFSDP_E_UNSUPPORTED,
              "groups[0] has replicas and its plan is replicated; make one group of all its ranks");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Rules, StrategiesOfRanksDiffer) {
  const Job jobs[] = {test::small_job(), zero1(test::small_job()), replicated(test::small_job())};
  for (int a = 0; a < 3; ++a)
    for (int b = 0; b < 3; ++b) {
      if (a == b) continue;
      const test::RanksResult result = test::run_ranks(test::ranks_of(jobs[0], 3), [&](Rank &rank) {
        Trainer t(&rank, &jobs[rank.rank == 2 ? b : a], 1);
        MFSDP_TRY(t.make_plan());
        must_fail(rank, t.make_runtime(), MFSDP_E_MISMATCH,
                  a == 2 || b == 2
                      ? "the plans of ranks 0 and 2 differ, first at parameter 0 (here: embed)"
                      : "the plans of ranks 0 and 2 differ in residency");
        return MFSDP_OK;
      });
      EXPECT_TRUE(result.ok()) << a << " and " << b << ": " << result.text();
    }
}

/* ---- failures ---- */

/* Every submit of two steps and an export fails once: each rank hears of it and ends cleanly. */
TEST(Failure, OfEverySubmit) {
  for (const Job &plain : both(plain_job()))
    for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
      Job job = plain;
      const int64_t stride = MFSDP_TEST_SANITIZER ? 3 : 1;
      int64_t n = 0;
      job.queue_kind = kind;
      job.on_queue = kind == MFSDP_HOST_QUEUE_WORKER;
      for (bool failed = true; failed && !::testing::Test::HasFailure(); n += stride) {
        const int64_t start_us = mfsdp_clock_us();
        failed = false;
        const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
          test::FailingTransport failing(rank.transport, rank.rank == 1 ? n : INT64_MAX - 1);
          std::vector<float> dst(600);
          Trainer t(&rank, &job, 1);
          t.transport = failing.table;
          mfsdp_status status = t.create();
          for (int64_t s = 0; s < 2 && status == MFSDP_OK; ++s)
            status = t.step(s);
          if (status == MFSDP_OK) status = mfsdp_param_export(t.runtime, 0, -1, dst.data());
          if (rank.rank == 1) failed = failing.failed();
          if (status == MFSDP_OK) return t.destroy();
          must_fail(rank, t.begin(1), MFSDP_E_POISONED, "refused after the first error");
          return t.runtime != nullptr ? t.destroy() : MFSDP_OK;
        });
        EXPECT_TRUE(result.clean()) << "submit " << n << ": " << result.text();
        EXPECT_LT(mfsdp_clock_us() - start_us, 5 * 1000000) << "submit " << n;
      }
      EXPECT_GT(n, 8) << name_of(job);
    }
}

/* A rank that stalls at a batch, until somebody poisons the world. */
class StallingTransport {
public:
  StallingTransport(const mfsdp_transport &inner, const std::string &label)
      : inner_(inner), ops_(*inner.ops), label_(label) {
    ops_.submit = submit;
    ops_.reserve = reserve;
    ops_.poll = poll;
    ops_.poison = poison;
    ops_.native = nullptr;
    ops_.native_prepare = nullptr;
    table = inner;
    table.ops = &ops_;
    table.self = this;
  }
  mfsdp_transport table;

private:
  static StallingTransport *of(void *self) { return static_cast<StallingTransport *>(self); }
  static mfsdp_status submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                             const mfsdp_batch *batch) {
    while (of(self)->label_ == batch->label && poll(self, context) == MFSDP_OK)
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
    return of(self)->inner_.ops->submit(of(self)->inner_.self, context, queue, batch);
  }
  static mfsdp_status reserve(void *self, mfsdp_context *context, int32_t count) {
    return of(self)->inner_.ops->reserve(of(self)->inner_.self, context, count);
  }
  static mfsdp_status poll(void *self, mfsdp_context *context) {
    return of(self)->inner_.ops->poll(of(self)->inner_.self, context);
  }
  static void poison(void *self, const mfsdp_error *why) {
    of(self)->inner_.ops->poison(of(self)->inner_.self, why);
  }
  mfsdp_transport inner_;
  mfsdp_transport_ops ops_;
  std::string label_;
};

void stalls_at(const Job &plain, const std::string &label, mfsdp_host_queue_kind kind) {
  Job job = plain;
  const int64_t deadline_us = 300 * 1000, start_us = mfsdp_clock_us();
  job.queue_kind = kind;
  test::RanksOptions options = test::ranks_of(job, 3);
  options.world.deadline_us = deadline_us;
  const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
    StallingTransport stalling(rank.transport, label);
    Trainer t(&rank, &job, 1);
    if (rank.rank == 2) t.transport = stalling.table;
    mfsdp_status status = t.create();
    for (int64_t s = 0; s < 2 && status == MFSDP_OK; ++s)
      status = t.step(s);
    const mfsdp_error error = *mfsdp_context_error(&rank.context);
    require(status != MFSDP_OK, "two steps beside a rank that stalls");
    require(t.destroy() == MFSDP_OK, "destroy after a failure");
    if (rank.rank == 2) return MFSDP_OK;
    return mfsdp_context_take_error(&rank.context, &error);
  });
  EXPECT_TRUE(result.clean()) << label << ": " << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    const std::string message = result[r].error.message;
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << label << ": " << result.text();
    EXPECT_EQ(result[r].error.culprit, 2) << label << ": " << result.text();
    EXPECT_NE(message.find(label + ": rank "), std::string::npos) << message;
  }
  EXPECT_LT(mfsdp_clock_us() - start_us, 10 * 1000000) << label;
}

TEST(Failure, ARankStallsDuringARefresh) {
  Job job = test::small_job();
  job.model.tensors.push_back(ref::matrix("big", 1, 96, 96)); /* more than a peer takes ahead */
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
    stalls_at(zero1(job), "refresh unit 1", kind);
    stalls_at(replicated(job), "gather sums of unit 1", kind);
  }
}

} // namespace
