/* SPDX-License-Identifier: MIT */
/*
 * Prefetch, reductions in the background and keeping through backward on WORKER queues with thread
 * ranks: the oracle's bits for every depth, orders that defeat the prefetch lists, what is
 * gathered, how much memory slots take, poison for 500 steps, and failures inside the workers.
 */
#include "runtime_rig.h"

#include <chrono>
#include <deque>
#include <random>

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

/* ---- a transport that is late, or fails, or is counted ---- */

class ShakyTransport {
public:
  explicit ShakyTransport(const mfsdp_transport &inner) : inner_(inner), table_(inner) {
    static const mfsdp_transport_ops ops = {sizeof(mfsdp_transport_ops),
                                            "shaky",
                                            submit,
                                            reserve,
                                            poll,
                                            poison,
                                            destroy,
                                            nullptr,
                                            nullptr,
                                            native,
                                            native_prepare,
                                            nullptr};
    table_.ops = &ops;
    table_.self = this;
  }
  ShakyTransport(const ShakyTransport &) = delete;
  ShakyTransport &operator=(const ShakyTransport &) = delete;

  const mfsdp_transport &table() const { return table_; }
  /* Each batch starts up to this much later. */
  void delay(uint64_t seed, int64_t longest_us) {
    random_.seed(seed);
    longest_us_ = longest_us;
  }
  int64_t fail_submit = -1, fail_batch = -1; /* that number of batch from now on; negative: none */
  std::map<std::string, int64_t> batches;    /* by label */

private:
  static ShakyTransport *of(void *self) { return static_cast<ShakyTransport *>(self); }
  static mfsdp_status late(void *argument, mfsdp_error *) {
    std::this_thread::sleep_for(std::chrono::microseconds(*static_cast<const int64_t *>(argument)));
    return MFSDP_OK;
  }
  static mfsdp_status broken(void *, mfsdp_error *error) {
    return MFSDP_ERROR_SET(error, MFSDP_E_PEER, -1, "injected into a batch that runs");
  }
  static mfsdp_status submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                             const mfsdp_batch *batch) {
    ShakyTransport *t = of(self);
    const mfsdp_backend *backend = t->inner_.backend;
    ++t->batches[batch->label];
    if (t->fail_submit-- == 0)
      return MFSDP_FAIL(context, MFSDP_E_PEER, "injected into a submit of %s", batch->label);
    if (t->fail_batch-- == 0)
      MFSDP_TRY(backend->ops->queue_call(backend->self, queue, broken, nullptr));
    if (t->longest_us_ > 0) {
      t->delays_.push_back(
          static_cast<int64_t>(t->random_() % static_cast<uint64_t>(t->longest_us_)));
      MFSDP_TRY(backend->ops->queue_call(backend->self, queue, late, &t->delays_.back()));
    }
    return t->inner_.ops->submit(t->inner_.self, context, queue, batch);
  }
  static mfsdp_status native(void *self, mfsdp_context *context, mfsdp_queue *queue,
                             const mfsdp_native_args *args) {
    return of(self)->inner_.ops->native(of(self)->inner_.self, context, queue, args);
  }
  static mfsdp_status native_prepare(void *self, mfsdp_context *context,
                                     const mfsdp_native_args *args, int32_t *form) {
    return of(self)->inner_.ops->native_prepare(of(self)->inner_.self, context, args, form);
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
  static mfsdp_status destroy(void *self, mfsdp_context *context) {
    return of(self)->inner_.ops->destroy(of(self)->inner_.self, context);
  }

  mfsdp_transport inner_, table_;
  std::mt19937_64 random_;
  int64_t longest_us_ = 0;
  std::deque<int64_t> delays_; /* addresses stay */
};

/* ---- what is varied ---- */

struct Depths {
  int32_t prefetch = 0, reduce = 0, reshard = 1;
  bool on_queue = false;
  std::string text() const {
    return "prefetch " + std::to_string(prefetch) + ", reduce " + std::to_string(reduce) +
           ", reshard " + std::to_string(reshard) + (on_queue ? ", on a queue" : ", on the host");
  }
};

std::vector<Depths> all_depths(int32_t prefetch, int32_t reduce) {
  std::vector<Depths> out;
  Depths d;
  for (d.prefetch = 0; d.prefetch <= prefetch; ++d.prefetch)
    for (d.reduce = 0; d.reduce <= reduce; ++d.reduce)
      for (d.reshard = 0; d.reshard <= 1; ++d.reshard)
        for (const bool on_queue : {false, true}) {
          d.on_queue = on_queue;
          out.push_back(d);
        }
  return out;
}

/* Five units without ties, both algorithms. */
Job plain_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {50, 9}));
  for (int32_t u = 1; u < 4; ++u) {
    job.model.tensors.push_back(ref::matrix("a" + std::to_string(u), u, 12, 10 + u));
    job.model.tensors.push_back(ref::matrix("b" + std::to_string(u), u, 7, 9));
    job.model.tensors.push_back(ref::elementwise("bias" + std::to_string(u), u, {10}));
  }
  job.model.tensors.push_back(ref::matrix("head", 4, 9, 20));
  job.options.clip_norm = 2.0;
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  return job;
}

Job worker_job(Job job) {
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  return job;
}

mfsdp_status create(Trainer *t, const Job &job, const Depths &d) {
  MFSDP_TRY(t->make_plan());
  MFSDP_TRY(t->make_runtime(
      [&](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
        desc->prefetch_depth = d.prefetch;
        desc->reduce_depth = d.reduce;
        desc->reshard_after_forward = d.reshard;
      }));
  return mfsdp_runtime_init(t->runtime, Trainer::init, const_cast<ref::Model *>(&job.model));
}

/* ---- equality ---- */

/* `longest_us`: batches start late by random times, on each rank by its own. */
std::string trains(Job job, const Depths &d, int32_t world, int32_t micro_batches,
                   const test::Expected &expected, int64_t longest_us) {
  job.on_queue = d.on_queue;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    ShakyTransport shaky(rank.transport);
    Trainer t(&rank, &job, micro_batches);
    shaky.delay(static_cast<uint64_t>(rank.rank), longest_us);
    t.transport = shaky.table();
    MFSDP_TRY(create(&t, job, d));
    for (int64_t s = 0; s < expected.count(); ++s) {
      MFSDP_TRY(t.step(s));
      if (s + 1 == expected.count() || s == 0) t.compare(expected, s);
    }
    return t.destroy();
  });
  return result.ok() ? ""
                     : "world " + std::to_string(world) + ", " + std::to_string(micro_batches) +
                           " micro-batches, " + d.text() + ":\n" + result.text();
}

TEST(Overlap, EveryDepthEqualsTheOracle) {
  Job job = worker_job(test::mixed_job());
  const test::Expected expected(job, 4, 3);
  const std::pair<int32_t, int32_t> shapes[] = {{1, 4}, {2, 2}, {4, 1}};
  for (const Depths &d : all_depths(3, 2))
    for (const auto &shape : shapes) {
      if (MFSDP_TEST_SANITIZER && (d.reduce == 2 || d.prefetch == 2 || shape.first == 1 ||
                                   (shape.first == 2) == d.on_queue))
        continue;
      ASSERT_EQ(trains(job, d, shape.first, shape.second, expected, 0), "");
    }
}

/* The other algorithms copy parameters as DIRECT does: with sums by DIRECT the oracle's bits stay. */
TEST(Overlap, EveryGatherAlgorithmEqualsTheOracle) {
  Job job = worker_job(test::mixed_job());
  const test::Expected expected(job, 8, 2);
  for (const mfsdp_algorithm algorithm : {MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_NATIVE}) {
    job.tune = [algorithm](mfsdp_runtime_desc *desc) { desc->gather_algorithm = algorithm; };
    for (const Depths &d : {Depths{0, 0, 1, false}, Depths{2, 1, 1, false}})
      EXPECT_EQ(trains(job, d, 4, 2, expected, 0), "");
  }
}

/* Their sums are exact where numbers are: here they only must end, agree on every rank (the verdict
 * says so) and need the workspace that was predicted. */
TEST(Overlap, EveryReduceAlgorithmTrains) {
  for (const mfsdp_algorithm algorithm :
       {MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_NATIVE, MFSDP_ALGORITHM_AUTO})
    for (const int32_t world : {1, 2, 5}) {
      Job job = worker_job(test::mixed_job());
      job.tune = [algorithm](mfsdp_runtime_desc *desc) {
        desc->gather_algorithm = desc->reduce_algorithm = algorithm;
        desc->wire = {10, 1048576000, 10, 1048576000};
      };
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
        Trainer t(&rank, &job, 2);
        mfsdp_memory predicted = mfsdp_memory_default();
        MFSDP_TRY(t.make_plan());
        MFSDP_TRY(t.make_runtime(
            [&](mfsdp_runtime_desc *d, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
              job.tune(d);
              require(mfsdp_runtime_memory(&rank.context, d, &predicted) == MFSDP_OK, "prediction");
            }));
        require(predicted.staging_nbytes == rank.context.current_nbytes[MFSDP_MEMORY_STAGING],
                "the staging memory is not what was predicted");
        MFSDP_TRY(
            mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
        for (int64_t s = 0; s < 3; ++s)
          MFSDP_TRY(t.step(s));
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << mfsdp_algorithm_name(algorithm) << ", world " << world << "\n"
                               << result.text();
    }
}

TEST(Overlap, LateBatchesChangeNothing) {
  for (Job job : {worker_job(test::mixed_job()), plain_job()}) {
    job.debug_poison = job.debug_check = 1;
    const test::Expected expected(job, 6, 3);
    for (const Depths &d : all_depths(MFSDP_TEST_SANITIZER ? 1 : 2, 1))
      for (const int32_t world : {2, 3}) {
        if (MFSDP_TEST_SANITIZER && (world == 2) == d.on_queue) continue;
        ASSERT_EQ(trains(job, d, world, 6 / world, expected, 150), "");
      }
  }
}

/* ---- any order of acquires ---- */

/* What a rank has acquired, with what must stay true of it. */
class Holder {
public:
  Holder(Rank *rank, Trainer *t, const Job *job, const std::vector<std::vector<float>> *weights)
      : rank_(rank), t_(t), job_(job), weights_(weights),
        held_(static_cast<std::size_t>(job->model.unit_count())) {}

  mfsdp_status acquire(int32_t unit, mfsdp_use use) {
    MFSDP_TRY(mfsdp_unit_acquire(t_->runtime, unit, use));
    Held *h = &held_[static_cast<std::size_t>(unit)];
    if (h->count++ == 0)
      for (int32_t i : job_->model.unit_tensors(unit))
        h->addresses.push_back(mfsdp_unit_param(t_->runtime, i));
    return check();
  }
  mfsdp_status release(int32_t unit) {
    Held *h = &held_[static_cast<std::size_t>(unit)];
    MFSDP_TRY(check());
    MFSDP_TRY(mfsdp_unit_release(t_->runtime, unit));
    if (--h->count == 0) h->addresses.clear();
    return check();
  }
  int32_t count(int32_t unit) const { return held_[static_cast<std::size_t>(unit)].count; }
  int32_t units() const {
    int32_t n = 0;
    for (const Held &h : held_)
      n += h.count > 0;
    return n;
  }
  /* Addresses have not moved, and hold the parameters. */
  mfsdp_status check() {
    if (job_->on_queue) MFSDP_TRY(rank_->finish());
    for (int32_t u = 0; u < job_->model.unit_count(); ++u) {
      const Held &h = held_[static_cast<std::size_t>(u)];
      std::size_t at = 0;
      if (h.count == 0) continue;
      for (int32_t i : job_->model.unit_tensors(u)) {
        const void *now = mfsdp_unit_param(t_->runtime, i);
        require(now == h.addresses[at++], "a parameter moved while it was acquired");
        const std::string wrong = test::difference(
            job_->model.at(i).name, static_cast<const float *>(now),
            (*weights_)[static_cast<std::size_t>(i)].data(), job_->model.at(i).numel());
        require(wrong.empty(), wrong);
      }
    }
    return MFSDP_OK;
  }

private:
  struct Held {
    int32_t count = 0;
    std::vector<const void *> addresses;
  };
  Rank *rank_;
  Trainer *t_;
  const Job *job_;
  const std::vector<std::vector<float>> *weights_;
  std::vector<Held> held_;
};

/* Random acquires and releases, the same on every rank; no more units at once than `most`. */
mfsdp_status wander(Holder *holder, const Job &job, uint64_t seed, int32_t most, int count) {
  std::mt19937_64 random(seed);
  const uint64_t units = static_cast<uint64_t>(job.model.unit_count());
  for (int k = 0; k < count; ++k) {
    const int32_t unit = static_cast<int32_t>(random() % units);
    const mfsdp_use use = static_cast<mfsdp_use>(1 + random() % 3);
    const bool more = random() % 5 < 3;
    if (more && holder->count(unit) < 3 && (holder->count(unit) > 0 || holder->units() < most))
      MFSDP_TRY(holder->acquire(unit, use));
    else if (holder->count(unit) > 0)
      MFSDP_TRY(holder->release(unit));
  }
  for (int32_t u = 0; u < job.model.unit_count(); ++u)
    while (holder->count(u) > 0)
      MFSDP_TRY(holder->release(u));
  return MFSDP_OK;
}

std::vector<std::vector<float>> first_weights(const Job &job) {
  std::vector<std::vector<float>> out;
  for (int32_t i = 0; i < job.model.count(); ++i) {
    out.emplace_back(static_cast<std::size_t>(job.model.at(i).numel()));
    ref::synthetic_init(job.model.seed, job.model.owner(i), 0, job.model.at(i).numel(),
                        out.back().data());
  }
  return out;
}

/* Between steps and inside them, before and after a step's backward: evaluation, recomputation,
 * nested and out of order. Training must not notice. */
TEST(Acquire, AnyOrderBetweenAndInsideSteps) {
  for (Job job : {worker_job(test::mixed_job()), plain_job()}) {
    job.active_units = 2;
    job.debug_poison = 1;
    const test::Expected expected(job, 2, 2);
    const std::vector<std::vector<float>> first = first_weights(job);
    for (Depths d : all_depths(2, 0)) {
      job.on_queue = d.on_queue;
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
        Trainer t(&rank, &job, 1);
        MFSDP_TRY(create(&t, job, d));
        for (int64_t s = 0; s < 2; ++s) {
          Holder holder(&rank, &t, &job, s == 0 ? &first : &expected.after(s - 1).weights);
          const uint64_t seed = static_cast<uint64_t>(s * 10 + d.prefetch);
          MFSDP_TRY(wander(&holder, job, seed, 2, 40));
          MFSDP_TRY(t.begin(s));
          MFSDP_TRY(wander(&holder, job, seed + 3, 2, 40));
          MFSDP_TRY(t.micro_batch(s, 0));
          MFSDP_TRY(wander(&holder, job, seed + 6, 2, 40));
          MFSDP_TRY(t.end());
          t.compare(expected, s);
        }
        return t.destroy();
      });
      ASSERT_TRUE(result.ok()) << d.text() << ":\n" << result.text();
    }
  }
}

/* A unit is acquired again, for recomputation, while its backward holds it. */
TEST(Acquire, RecomputationInsideBackward) {
  const Job job = plain_job();
  const test::Expected expected(job, 2, 2);
  const std::vector<std::vector<float>> first = first_weights(job);
  for (const Depths &d : all_depths(2, 1)) {
    if (d.on_queue) continue;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(create(&t, job, d));
      for (int64_t s = 0; s < 2; ++s) {
        Holder holder(&rank, &t, &job, s == 0 ? &first : &expected.after(s - 1).weights);
        MFSDP_TRY(t.begin(s));
        for (int32_t u = 0; u < 5; ++u) {
          MFSDP_TRY(holder.acquire(u, MFSDP_USE_FORWARD));
          MFSDP_TRY(holder.release(u));
        }
        MFSDP_TRY(mfsdp_step_value(t.runtime, ref::synthetic_value(job.model.seed, s, rank.rank)));
        for (int32_t u = 5; u-- > 0;) {
          MFSDP_TRY(holder.acquire(u, MFSDP_USE_BACKWARD));
          MFSDP_TRY(holder.acquire(u, MFSDP_USE_FORWARD)); /* forward once more */
          MFSDP_TRY(holder.release(u));
          MFSDP_TRY(t.backward(s, 0, rank.rank, u)); /* acquires it once more itself */
          MFSDP_TRY(holder.release(u));
        }
        MFSDP_TRY(t.end());
        t.compare(expected, s);
      }
      return t.destroy();
    });
    ASSERT_TRUE(result.ok()) << d.text() << ":\n" << result.text();
  }
}

/* Kept units stay where they are from forward to backward, also when evaluated in between. */
TEST(Acquire, KeptUnitsDoNotMove) {
  const Job job = plain_job();
  for (const int32_t prefetch : {0, 2}) {
    Depths d;
    d.prefetch = prefetch;
    d.reshard = 0;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      std::vector<const void *> at;
      MFSDP_TRY(create(&t, job, d));
      for (int64_t s = 0; s < 2; ++s) {
        at.clear();
        MFSDP_TRY(t.begin(s));
        for (int32_t u = 0; u < 5; ++u) {
          MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_FORWARD));
          for (int32_t i : job.model.unit_tensors(u))
            at.push_back(mfsdp_unit_param(t.runtime, i));
          MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
        }
        for (const int32_t u : {3, 1}) {
          MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_EVALUATE));
          MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
        }
        for (int32_t u = 5; u-- > 0;) {
          MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_BACKWARD));
          for (int32_t i : job.model.unit_tensors(u))
            require(mfsdp_unit_param(t.runtime, i) == at[static_cast<std::size_t>(i)],
                    "a kept parameter moved");
          MFSDP_TRY(t.backward(s, 0, rank.rank, u));
          MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
        }
        MFSDP_TRY(t.end());
      }
      return t.destroy();
    });
    ASSERT_TRUE(result.ok()) << d.text() << ":\n" << result.text();
  }
}

/* ---- what is gathered ---- */

/* Gathers of a unit in one micro-batch of plain forward and backward order, worked out from what
 * prefetch promises: a unit that comes again within `prefetch` acquires stays. From its forward to
 * its backward lie the later units' forward and backward. */
int64_t gathers_of(const Depths &d, int32_t unit, int32_t units) {
  const int32_t again = 2 * (units - 1 - unit) + 1;
  return d.reshard == 0 || again <= d.prefetch ? 1 : 2;
}

TEST(Gathers, NoneTooManyInPlainOrder) {
  const Job base = plain_job();
  const int32_t world = 2, micro_batches = 2, units = 5;
  for (const Depths &d : all_depths(6, 0)) {
    Job job = base;
    job.on_queue = d.on_queue;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
      ShakyTransport counted(rank.transport);
      Trainer t(&rank, &job, micro_batches);
      t.transport = counted.table();
      MFSDP_TRY(create(&t, job, d));
      for (int64_t s = 0; s < 2; ++s)
        MFSDP_TRY(t.step(s));
      uint64_t payload = 0;
      for (int32_t u = 0; u < units; ++u) {
        const int64_t want = 2 * micro_batches * gathers_of(d, u, units);
        const int64_t got = counted.batches["gather unit " + std::to_string(u)];
        require(got == want, "unit " + std::to_string(u) + " was gathered " + std::to_string(got) +
                                 " times, needs " + std::to_string(want));
        int32_t count = 0;
        const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plan, u, &count);
        for (int32_t i = 0; i < count; ++i)
          if (pieces[i].owner == rank.rank)
            payload += static_cast<uint64_t>(want * pieces[i].count) * 4 * (world - 1);
      }
      require(rank.context.counters.sent[MFSDP_TRAFFIC_MATERIALIZE].payload_nbytes == payload,
              "materialize bytes");
      return t.destroy();
    });
    ASSERT_TRUE(result.ok()) << d.text() << ":\n" << result.text();
  }
}

/* The last unit uses a tensor of the first, as a tied head does: both stay between its forward and
 * its backward, and the owner is gathered ahead with the unit that needs it. */
TEST(Gathers, OwnersOfTiedTensorsComeAndStayWithTheirUsers) {
  Job job = plain_job();
  job.model.tensors.push_back(ref::tied("tied", 4, job.model.tensors[0]));
  const test::Expected expected(job, 2, 2);
  for (const Depths &d : all_depths(2, 0)) {
    job.on_queue = d.on_queue;
    const int64_t of_user = gathers_of(d, 4, 5); /* 1 if it stays */
    const int64_t of_owner = d.reshard == 0 ? 1 : 2 + of_user;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      ShakyTransport counted(rank.transport);
      Trainer t(&rank, &job, 1);
      t.transport = counted.table();
      MFSDP_TRY(create(&t, job, d));
      for (int64_t s = 0; s < 2; ++s) {
        MFSDP_TRY(t.step(s));
        t.compare(expected, s);
      }
      const int64_t user = counted.batches["gather unit 4"],
                    owner = counted.batches["gather unit 0"];
      require(user == 2 * of_user && owner == 2 * of_owner,
              "the user was gathered " + std::to_string(user) + " times, the owner " +
                  std::to_string(owner) + "; need " + std::to_string(2 * of_user) + ", " +
                  std::to_string(2 * of_owner));
      if (d.prefetch > 0 && d.reshard == 1) { /* when unit 3 is acquired, unit 4 is all there */
        MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 3, MFSDP_USE_EVALUATE));
        const std::map<std::string, int64_t> before = counted.batches;
        MFSDP_TRY(mfsdp_unit_release(t.runtime, 3));
        MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 4, MFSDP_USE_EVALUATE));
        require(before == counted.batches, "something was not gathered ahead");
        MFSDP_TRY(mfsdp_unit_release(t.runtime, 4));
      }
      return t.destroy();
    });
    ASSERT_TRUE(result.ok()) << d.text() << ":\n" << result.text();
  }
}

/* An order that the lists do not expect: nothing gathered ahead is of use, and is given up. */
TEST(Gathers, EvictionsWhenTheOrderDefeatsTheLists) {
  const Job job = plain_job();
  const std::vector<std::vector<float>> first = first_weights(job);
  Depths d;
  d.prefetch = 1;
  const int32_t order[] = {0, 3, 1, 0, 2, 4, 2, 0, 4, 1, 3, 0};
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    ShakyTransport counted(rank.transport);
    Trainer t(&rank, &job, 1);
    Holder holder(&rank, &t, &job, &first);
    int64_t gathers = 0;
    t.transport = counted.table();
    MFSDP_TRY(create(&t, job, d));
    for (const int32_t unit : order) {
      MFSDP_TRY(holder.acquire(unit, MFSDP_USE_EVALUATE));
      MFSDP_TRY(holder.release(unit));
    }
    for (const auto &entry : counted.batches)
      if (entry.first.find("gather unit") == 0) gathers += entry.second;
    /* One for each acquire that finds nothing, one ahead for each that has a next unit. */
    require(gathers > 12 && gathers <= 24, std::to_string(gathers) + " gathers");
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
}

/* ---- memory ---- */

TEST(Slots, TakeWhatWasPredicted) {
  const Job plain = plain_job();
  Job tied = plain_job();
  tied.model.tensors.push_back(ref::tied("tied", 4, tied.model.tensors[0]));
  for (const Job &job : {plain, tied})
    for (const Depths &d : all_depths(4, 2)) {
      if (d.on_queue) continue;
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
        Trainer t(&rank, &job, 1);
        mfsdp_memory predicted = mfsdp_memory_default();
        MFSDP_TRY(t.make_plan());
        MFSDP_TRY(t.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *,
                                     mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
          desc->prefetch_depth = d.prefetch;
          desc->reduce_depth = d.reduce;
          desc->reshard_after_forward = d.reshard;
          require(mfsdp_runtime_memory(&rank.context, desc, &predicted) == MFSDP_OK,
                  "no prediction");
        }));
        MFSDP_TRY(
            mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
        for (int64_t s = 0; s < 2; ++s)
          MFSDP_TRY(t.step(s));
        /* The largest unit is 450 elements, in 4 x 128 of 4 bytes; ties hold one more. */
        const int32_t held = 1 + (job.model.count() > plain.model.count() ? 1 : 0);
        const int32_t params = d.reshard == 0 ? 5 : std::min(held + d.prefetch, 5);
        const int32_t grads = std::min(held + d.reduce, 5);
        require(predicted.slot_nbytes == static_cast<std::size_t>(params + grads) * 512 * 4,
                "predicted " + std::to_string(predicted.slot_nbytes));
        require(rank.context.peak_nbytes[MFSDP_MEMORY_SLOT] == predicted.slot_nbytes, "the peak");
        return t.destroy();
      });
      ASSERT_TRUE(result.ok()) << d.text() << ":\n" << result.text();
    }
}

/* ---- poison ---- */

/* b9: buffers freed or used again too early. */
TEST(Poison, FiveHundredSteps) {
  Job job = worker_job(test::small_job());
  const int64_t steps = 500;
  const int32_t world = 3;
  const test::Expected expected(job, world, steps);
  job.debug_poison = 1;
  for (const bool on_queue : {false, true}) {
    std::vector<std::vector<uint64_t>> hashes(static_cast<std::size_t>(world));
    Depths d;
    d.prefetch = 2;
    d.reduce = 1;
    job.on_queue = on_queue;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(create(&t, job, d));
      for (int64_t s = 0; s < steps; ++s) {
        uint64_t hash = 0;
        MFSDP_TRY(t.step(s));
        if (s % 20 != 19) continue;
        MFSDP_TRY(t.hash(&hash));
        hashes[static_cast<std::size_t>(rank.rank)].push_back(hash);
      }
      t.compare(expected, steps - 1);
      return t.destroy();
    });
    ASSERT_TRUE(result.ok()) << result.text();
    EXPECT_EQ(hashes[0].size(), static_cast<std::size_t>(steps / 20));
    EXPECT_EQ(hashes[1], hashes[0]);
    EXPECT_EQ(hashes[2], hashes[0]);
  }
}

/* ---- failures in the background ---- */

struct Failure {
  int64_t submit = -1, batch = -1, task = -1;
};

mfsdp_status broken_task(void *, mfsdp_error *error) {
  return MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1, "injected into a task");
}

/* Two steps with a failure on rank 1. Everything must come back: the first error on every rank,
 * refusals after it, nothing left. *failed: the failure was met. */
void fail_once(const Job &job, const Depths &d, const Failure &failure, bool *failed) {
  const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::vector<int> met(3, 0);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    ShakyTransport shaky(rank.transport);
    Trainer t(&rank, &job, 1);
    mfsdp_status status = MFSDP_OK;
    mfsdp_error first;
    t.transport = shaky.table();
    MFSDP_TRY(create(&t, job, d));
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 1) {
      shaky.fail_submit = failure.submit;
      shaky.fail_batch = failure.batch;
    }
    for (int64_t s = 0; s < 2 && status == MFSDP_OK; ++s) {
      if (rank.rank == 1 && failure.task == s)
        MFSDP_TRY(
            rank.backend->ops->queue_call(rank.backend->self, rank.queue, broken_task, nullptr));
      status = t.step(s);
    }
    if (status == MFSDP_OK) return t.destroy();
    met[static_cast<std::size_t>(rank.rank)] = 1;
    first = *mfsdp_context_error(&rank.context);
    require(std::string(first.message).find("injected") != std::string::npos,
            std::string("not the first error: ") + mfsdp_status_name(status) + ": " +
                first.message);
    must_fail(rank, mfsdp_unit_acquire(t.runtime, 0, MFSDP_USE_FORWARD), MFSDP_E_POISONED,
              "injected");
    must_fail(rank, mfsdp_unit_reduce(t.runtime, 0), MFSDP_E_POISONED, "injected");
    must_fail(rank, t.begin(5), MFSDP_E_POISONED, "injected");
    must_fail(rank, t.end(), MFSDP_E_POISONED, "injected");
    must_fail(rank, mfsdp_param_export(t.runtime, 0, 0, nullptr), MFSDP_E_POISONED, "injected");
    require(t.destroy() == MFSDP_OK, "destroy after a failure");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(met[0] + met[1] + met[2], met[1] * 3) << "ranks differ about the failure";
  *failed = met[1] != 0;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_LT(seconds, 15.0) << "it took a deadline to end"; /* which is 20 s */
}

/* Every nth call fails: the sanitizers take long. */
constexpr int64_t kStride = MFSDP_TEST_TSAN ? 31 : MFSDP_TEST_SANITIZER ? 13 : 1;

void expect_failures(const Job &base, const Depths &d, int64_t Failure::*what) {
  Job job = base;
  int64_t n = 0;
  bool failed = true;
  job.on_queue = d.on_queue;
  for (; failed && !::testing::Test::HasFailure(); n += kStride) {
    Failure failure;
    failure.*what = n;
    fail_once(job, d, failure, &failed);
    ASSERT_FALSE(::testing::Test::HasFailure()) << d.text() << ", number " << n;
  }
  EXPECT_GT(n, 20) << d.text();             /* some were met */
  const test::Expected expected(job, 3, 2); /* and a new world works */
  EXPECT_EQ(trains(job, d, 3, 1, expected, 0), "");
}

TEST(Failures, EverySubmit) {
  for (const Depths &d : all_depths(1, 1))
    if (d.prefetch == d.reduce && d.reshard == 1) expect_failures(plain_job(), d, &Failure::submit);
}

TEST(Failures, EveryBatchInsideTheWorker) {
  for (const Depths &d : all_depths(1, 1))
    if (d.prefetch == d.reduce && d.reshard == 1) expect_failures(plain_job(), d, &Failure::batch);
}

TEST(Failures, ATaskOfTheTrainer) {
  for (Depths d : all_depths(2, 1)) {
    if (!d.on_queue) continue;
    for (const int64_t step : {0, 1}) {
      Job job = plain_job();
      Failure failure;
      bool failed = false;
      failure.task = step;
      job.on_queue = true;
      fail_once(job, d, failure, &failed);
      EXPECT_TRUE(failed) << d.text();
    }
  }
}

/* Runtimes one after another on one world, and nothing stays of the one before. */
TEST(Failures, NoneFromMakingItAgain) {
  const Job job = plain_job();
  const test::Expected expected(job, 2, 2);
  Depths d;
  d.prefetch = d.reduce = 1;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    std::size_t blocks = 0;
    for (int k = 0; k < 3; ++k) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(create(&t, job, d));
      for (int64_t s = 0; s < 2; ++s) {
        MFSDP_TRY(t.step(s));
        t.compare(expected, s);
      }
      MFSDP_TRY(t.destroy());
      mfsdp_plan_destroy(&rank.context, t.plan);
      t.plan = nullptr;
      if (k > 0) require(rank.memory->live_count() == blocks, "something is left");
      blocks = rank.memory->live_count();
    }
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* What was gathered ahead for a unit that nobody comes to is still read while new values are set. */
TEST(Overlap, NewValuesAfterGathersAhead) {
  test::Job job = test::small_job();
  job.active_units = 3;
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  job.tune = [](mfsdp_runtime_desc *desc) { desc->prefetch_depth = 2; };
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](test::Rank &rank) {
    test::Trainer t(&rank, &job, 1);
    uint64_t first = 0, again = 0;
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.hash(&first));
    for (int32_t round = 0; round < 20; ++round) {
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 0, MFSDP_USE_EVALUATE));
      MFSDP_TRY(mfsdp_unit_release(t.runtime, 0));
      MFSDP_TRY(mfsdp_runtime_init(t.runtime, test::Trainer::init, &job.model));
    }
    MFSDP_TRY(t.hash(&again));
    test::require(first == again, "other values");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

} // namespace
