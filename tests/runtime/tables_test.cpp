/* SPDX-License-Identifier: MIT */
/*
 * What the runtime does after a failure in steady state: it reports, keeps the first error, refuses
 * further use with it on every rank, and is destroyed cleanly.
 */
#include "failing.h"
#include "runtime_rig.h"

namespace {

using test::FailingBackend;
using test::FailingTransport;
using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

/* ---- what must hold then ---- */

/* Every entry refuses, with the first message, and sends nothing. */
void expect_refused(Rank &rank, Trainer &t) {
  const std::string first = "runtime: refused after the first error, MFSDP_E_";
  const mfsdp_step_desc desc = t.step_desc(0);
  mfsdp_verdict verdict = mfsdp_verdict_default();
  mfsdp_progress progress = mfsdp_progress_default();
  std::vector<float> dst(5000);
  const mfsdp_counters before = rank.context.counters;
  const std::vector<std::function<mfsdp_status()>> calls = {
      [&] { return mfsdp_unit_acquire(t.runtime, 0, MFSDP_USE_FORWARD); },
      [&] { return mfsdp_unit_release(t.runtime, 0); },
      [&] { return mfsdp_unit_grads(t.runtime, 0); },
      [&] { return mfsdp_unit_reduce(t.runtime, 0); },
      [&] { return mfsdp_grad_absent(t.runtime, 0); },
      [&] { return mfsdp_step_begin(t.runtime, &desc); },
      [&] { return mfsdp_step_value(t.runtime, 0.0); },
      [&] { return mfsdp_step_end(t.runtime, 0); },
      [&] { return mfsdp_step_verdict(t.runtime, &verdict); },
      [&] { return mfsdp_runtime_init(t.runtime, Trainer::init, nullptr); },
      [&] { return mfsdp_param_export(t.runtime, 0, -1, dst.data()); },
      [&] { return mfsdp_runtime_progress(t.runtime, &progress); },
      [&] { return mfsdp_runtime_resume(t.runtime, &progress); },
  };
  for (const std::function<mfsdp_status()> &call : calls) {
    must_fail(rank, call(), MFSDP_E_POISONED, first);
    must_fail(rank, MFSDP_E_POISONED, MFSDP_E_POISONED, "injected: ");
  }
  require(std::memcmp(&before, &rank.context.counters, sizeof(before)) == 0, "something was sent");
}

/* Two steps, counts that are taken and given back, and an export of everything. */
mfsdp_status work(const Job &job, Trainer *t) {
  mfsdp_progress progress = mfsdp_progress_default();
  std::vector<float> dst(5000);
  for (int64_t s = 0; s < 2; ++s)
    MFSDP_TRY(t->step(s));
  MFSDP_TRY(mfsdp_runtime_progress(t->runtime, &progress));
  MFSDP_TRY(mfsdp_runtime_resume(t->runtime, &progress));
  for (int32_t i = 0; i < job.model.count(); ++i)
    MFSDP_TRY(mfsdp_param_export(t->runtime, i, -1, dst.data()));
  return MFSDP_OK;
}

/* Returns the status of the work itself; what must hold after it is checked here. */
mfsdp_status work_and_end(const Job &job, Rank &rank, Trainer *t) {
  const mfsdp_status status = work(job, t);
  const bool failed =
      FailingBackend::failed(); /* before destroy, whose own calls may fail as well */
  if (status != MFSDP_OK) {
    must_fail(rank, status, status, "injected: ");
    expect_refused(rank, *t);
    MFSDP_TRY(t->destroy()); /* after a failure it has nothing to report */
  } else {
    const mfsdp_status last = t->destroy();
    require(last != MFSDP_OK || !failed, "a failure that nobody heard of");
    if (last != MFSDP_OK) must_fail(rank, last, last, "injected: ");
  }
  return status;
}

Job failing_job(mfsdp_host_queue_kind kind) {
  Job job = test::small_job();
  job.queue_kind = kind;
  job.model.tensors.push_back(ref::matrix("big", 2, 48, 48));
  job.chunk_nbytes = 1024; /* more batches in one reduction than the transport's ring holds */
  return job;
}

const int64_t kEnoughUs = 5 * 1000000; /* far below the deadline of 20 s, far above the work */

/* The same with everything that runs ahead or behind, 16 bits in every unit, masters in another
 * space, and a trainer that computes on a queue. */
Job narrow_job(mfsdp_host_queue_kind kind) {
  Job job = failing_job(kind);
  test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  test::set_dtypes(&job.model, 2, MFSDP_F16, MFSDP_F16, MFSDP_F16);
  job.on_queue = kind == MFSDP_HOST_QUEUE_WORKER;
  job.tune = [](mfsdp_runtime_desc *desc) {
    desc->prefetch_depth = 2;
    desc->reduce_depth = 1;
    desc->state_space = MFSDP_SPACE_PINNED;
  };
  return job;
}

void fail_every_submit(const Job &job) {
  const int64_t stride = MFSDP_TEST_TSAN ? 4 : 1;
  int64_t n = 0;
  for (bool failed = true; failed && !::testing::Test::HasFailure(); n += stride) {
    mfsdp_status seen[3] = {MFSDP_OK, MFSDP_OK, MFSDP_OK};
    failed = false;
    const int64_t start_us = mfsdp_clock_us();
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      FailingTransport transport(rank.transport, rank.rank == 1 ? n : INT64_MAX - 1);
      Trainer t(&rank, &job, 1);
      t.transport = transport.table;
      MFSDP_TRY(t.create());
      seen[rank.rank] = work_and_end(job, rank, &t);
      if (rank.rank == 1) failed = transport.failed();
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << "submit " << n << ": " << result.text();
    EXPECT_EQ(seen[1], failed ? MFSDP_E_PEER : MFSDP_OK) << "submit " << n;
    EXPECT_LT(mfsdp_clock_us() - start_us, kEnoughUs) << "submit " << n;
    if (failed) continue;
    EXPECT_EQ(seen[0], MFSDP_OK);
    EXPECT_EQ(seen[2], MFSDP_OK);
  }
  EXPECT_GT(n, 20);
}

TEST(Failure, OfEverySubmit) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
    fail_every_submit(failing_job(kind));
    fail_every_submit(narrow_job(kind));
  }
}

void fail_every_operation(const Job &job, bool later) {
#if MFSDP_TEST_SANITIZER
  const int64_t stride = 11;
#else
  const int64_t stride = 1;
#endif
  int64_t n = 0;
  for (bool failed = true; failed && !::testing::Test::HasFailure(); n += stride) {
    mfsdp_status seen[2] = {MFSDP_OK, MFSDP_OK};
    failed = false;
    const int64_t start_us = mfsdp_clock_us();
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      FailingBackend backend(&rank, rank.rank == 1 ? n : -1, later);
      Trainer t(&rank, &job, 1);
      t.backend = &backend.table;
      t.transport.backend = &backend.table;
      mfsdp_status status = t.create();
      if (status == MFSDP_OK)
        status = work_and_end(job, rank, &t);
      else if (t.runtime != nullptr) /* init failed: the runtime is as refused as after a step */
        expect_refused(rank, t);
      seen[rank.rank] = status;
      if (rank.rank == 1) failed = FailingBackend::failed();
      return status; /* if not OK, the rig poisons for us: a failed set-up leaves that to the
                        program */
    });
    EXPECT_TRUE(result.clean()) << "operation " << n << ": " << result.text();
    EXPECT_LT(mfsdp_clock_us() - start_us, kEnoughUs) << "operation " << n;
    if (!failed) {
      EXPECT_TRUE(result.ok()) << "operation " << n << ": " << result.text();
      continue;
    }
    /* Rank 1 reports what it met itself, unless only destroy met it. */
    EXPECT_TRUE(seen[1] == MFSDP_E_BACKEND || seen[1] == MFSDP_OK) << result.text();
    for (std::size_t r = 0; r < 2; ++r) { /* rank 0 may have been through with its work */
      const std::string message = result[r].error.message;
      EXPECT_TRUE(seen[r] == MFSDP_OK || message.find("injected: ") != std::string::npos)
          << "operation " << n << " rank " << r << ": " << message;
    }
  }
  EXPECT_GT(n, 100);
}

TEST(Failure, OfEveryBackendCall) {
  fail_every_operation(failing_job(MFSDP_HOST_QUEUE_INLINE), false);
  fail_every_operation(narrow_job(MFSDP_HOST_QUEUE_INLINE), false);
}
TEST(Failure, OfEveryBackendCallWithWorkers) {
  fail_every_operation(failing_job(MFSDP_HOST_QUEUE_WORKER), false);
  fail_every_operation(narrow_job(MFSDP_HOST_QUEUE_WORKER), false);
}
TEST(Failure, OfEveryPieceOfQueuedWork) {
  fail_every_operation(failing_job(MFSDP_HOST_QUEUE_INLINE), true);
  fail_every_operation(narrow_job(MFSDP_HOST_QUEUE_INLINE), true);
}
TEST(Failure, OfEveryPieceOfQueuedWorkWithWorkers) {
  fail_every_operation(failing_job(MFSDP_HOST_QUEUE_WORKER), true);
  fail_every_operation(narrow_job(MFSDP_HOST_QUEUE_WORKER), true);
}

/* Parameters that stay, refreshed behind every step; sums that all ranks gather. */
TEST(Failure, OfEveryCallWithResidents) {
  const mfsdp_placement placements[] = {MFSDP_PLACEMENT_OWNED, MFSDP_PLACEMENT_REPLICATED};
  for (const mfsdp_placement placement : placements)
    for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
      const bool workers = kind == MFSDP_HOST_QUEUE_WORKER;
      Job job = workers ? narrow_job(kind) : failing_job(kind);
      job.residency = MFSDP_RESIDENCY_RESIDENT;
      job.placement = placement;
      fail_every_submit(job);
      fail_every_operation(job, workers);
    }
}

/* A transport whose rank, at its first batch with this label, stalls until the world has an error, or
 * leaves the world without a word. */
class QuittingTransport {
public:
  QuittingTransport(const mfsdp_transport &inner, const std::string &label, bool leaves)
      : inner_(inner), ops_(*inner.ops), label_(label), leaves_(leaves) {
    ops_.submit = submit;
    ops_.reserve = reserve;
    ops_.poll = poll;
    ops_.poison = poison;
    ops_.destroy = destroy;
    ops_.native = nullptr;
    ops_.native_prepare = nullptr;
    table = inner;
    table.ops = &ops_;
    table.self = this;
  }
  mfsdp_transport table;
  int64_t quit_us = 0; /* when it did */

private:
  static QuittingTransport *of(void *self) { return static_cast<QuittingTransport *>(self); }
  static mfsdp_status submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                             const mfsdp_batch *batch) {
    QuittingTransport *t = of(self);
    if (t->quit_us == 0 && batch->label == t->label_) {
      t->quit_us = mfsdp_clock_us();
      if (t->leaves_) {
        MFSDP_TRY(t->inner_.ops->destroy(t->inner_.self, context));
        t->inner_.self = nullptr;
        return MFSDP_FAIL(context, MFSDP_E_IO, "this rank has quit");
      }
      while (poll(self, context) == MFSDP_OK)
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
    }
    return t->inner_.ops->submit(t->inner_.self, context, queue, batch);
  }
  static mfsdp_status reserve(void *self, mfsdp_context *context, int32_t count) {
    return of(self)->inner_.ops->reserve(of(self)->inner_.self, context, count);
  }
  static mfsdp_status poll(void *self, mfsdp_context *context) {
    if (of(self)->inner_.self == nullptr) return MFSDP_OK;
    return of(self)->inner_.ops->poll(of(self)->inner_.self, context);
  }
  static void poison(void *self, const mfsdp_error *why) {
    if (of(self)->inner_.self != nullptr) of(self)->inner_.ops->poison(of(self)->inner_.self, why);
  }
  static mfsdp_status destroy(void *self, mfsdp_context *context) {
    (void)self, (void)context; /* the rig's own, or gone */
    return MFSDP_OK;
  }

  mfsdp_transport inner_;
  mfsdp_transport_ops ops_;
  std::string label_;
  bool leaves_;
};

/* What a survivor says, of a rank 2 that quits at `phase`. `on_queue`: the trainers compute on queues of
 * their own, so that submits run ahead of transfers, until the ring of `batches` is full. */
void quits_at(const std::string &phase, bool leaves, mfsdp_host_queue_kind kind,
              bool on_queue = false, int32_t batches = 4) {
  Job job = failing_job(kind);
  const int64_t deadline_us = 300 * 1000;
  job.on_queue = on_queue;
  test::RanksOptions options = test::ranks_of(job, 3);
  options.world.batch_count = batches;
  std::atomic<int64_t> quit_us{0};
  int64_t after_us[3] = {0, 0, 0};
  options.world.deadline_us = deadline_us;
  const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
    QuittingTransport quitting(rank.transport, phase, leaves);
    Trainer t(&rank, &job, 1);
    mfsdp_status status;
    if (rank.rank == 2) t.transport = quitting.table;
    if (rank.rank == 2 && phase == "control allgather") {
      quit_us = mfsdp_clock_us();
      if (!leaves) mfsdp_clock_sleep_until(quit_us + 3 * deadline_us);
      return leaves ? MFSDP_OK : rank.transport.ops->poll(rank.transport.self, &rank.context);
    }
    status = t.create();
    for (int64_t s = 0; s < 2 && status == MFSDP_OK; ++s)
      status = t.step(s);
    const mfsdp_error error = *mfsdp_context_error(&rank.context);
    after_us[rank.rank] = mfsdp_clock_us();
    if (rank.rank == 2) quit_us = quitting.quit_us;
    require(t.runtime == nullptr || t.destroy() == MFSDP_OK, "destroy after a failure");
    if (rank.rank == 2 && leaves) rank.transport.self = nullptr; /* for the rig: it is gone */
    if (rank.rank == 2) return MFSDP_OK;
    return mfsdp_context_take_error(&rank.context, &error);
  });
  EXPECT_TRUE(result.clean()) << phase << ": " << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    const std::string message = result[r].error.message;
    /* The control plane, called by the trainer itself, refuses whoever comes after the first. */
    const bool refused = phase == "control allgather" && result[r].status == MFSDP_E_POISONED;
    EXPECT_TRUE(refused || result[r].status == (leaves ? MFSDP_E_PEER : MFSDP_E_TIMEOUT))
        << phase << ": " << result.text();
    EXPECT_EQ(result[r].error.culprit, 2) << phase << ": " << result.text();
    EXPECT_NE(message.find(phase + ": rank "), std::string::npos) << phase << ": " << message;
    EXPECT_NE(message.find(leaves ? "has left" : "rank 2 "), std::string::npos) << message;
    EXPECT_LT(after_us[r] - quit_us, (leaves ? 0 : deadline_us) + 2 * 1000000) << phase;
  }
}

/* In each phase: materialize, reduce, scalar, control. */
TEST(Failure, ARankStallsOrLeavesInEachPhase) {
  for (const char *phase :
       {"gather unit 1", "reduce unit 1", "gather verdict", "control allgather"})
    for (const bool leaves : {false, true})
      quits_at(phase, leaves, leaves ? MFSDP_HOST_QUEUE_INLINE : MFSDP_HOST_QUEUE_WORKER);
}

/* The others' submits wait as well, each behind a queue that waits: none of them is to blame. */
TEST(Failure, ARankStallsInASubmitWhileOthersRunAhead) {
  for (const char *phase : {"gather unit 1", "reduce unit 1", "gather verdict"})
    for (const int32_t batches : {1, 4})
      quits_at(phase, false, MFSDP_HOST_QUEUE_WORKER, true, batches);
}

/* A kernel on the compute queue of rank 2 that does not end while the others wait: its transfers are
 * submitted, and stand behind it. */
TEST(Failure, ARankStallsInAKernelOfItsComputeQueue) {
  for (const int32_t batches : {1, 4}) {
    Job job = failing_job(MFSDP_HOST_QUEUE_WORKER);
    std::atomic<int32_t> waiting{2};
    job.on_queue = true;
    job.touch = [&](int32_t rank, const void *, std::size_t, void *, std::size_t) {
      while (rank == 2 && waiting > 0)
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
    };
    test::RanksOptions options = test::ranks_of(job, 3);
    options.world.deadline_us = 300 * 1000;
    options.world.batch_count = batches;
    const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      mfsdp_status status = t.create();
      for (int64_t s = 0; s < 2 && status == MFSDP_OK; ++s)
        status = t.step(s);
      const mfsdp_error error = *mfsdp_context_error(&rank.context);
      if (rank.rank != 2) --waiting;
      require(t.runtime == nullptr || t.destroy() == MFSDP_OK, "destroy after a failure");
      return mfsdp_context_take_error(&rank.context, &error);
    });
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
      EXPECT_EQ(result[r].error.culprit, 2) << result.text();
    }
  }
}

/* A rank that goes away in the middle of a step: the others hear of it by the deadline. */
TEST(Failure, ARankLeaves) {
  const Job job = failing_job(MFSDP_HOST_QUEUE_INLINE);
  test::RanksOptions options = test::ranks_of(job, 3);
  options.world.deadline_us = 2 * 1000000;
  const int64_t start_us = mfsdp_clock_us();
  const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    if (rank.rank == 2) return t.destroy();
    const mfsdp_status status = t.step(1);
    require(status != MFSDP_OK, "a step without rank 2");
    require(t.destroy() == MFSDP_OK, "destroy after a failure");
    return status;
  });
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, 8 * 1000000);
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_NE(result[r].status, MFSDP_OK);
    EXPECT_NE(std::string(result[r].error.message).find("rank 2"), std::string::npos)
        << result[r].error.message;
  }
}

} // namespace
