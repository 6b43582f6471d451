/* SPDX-License-Identifier: MIT */
/*
 * What the runtime does after a failure in steady state: it reports, keeps the first error, refuses
 * further use with it on every rank, and is destroyed cleanly.
 */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

/* ---- a transport whose nth submit fails ---- */

class FailingTransport {
public:
  FailingTransport(const mfsdp_transport &inner, int64_t fail_at)
      : inner_(inner), fail_at_(fail_at) {
    ops_ = *inner.ops;
    ops_.submit = submit;
    ops_.reserve = reserve;
    ops_.poll = poll;
    ops_.poison = poison;
    ops_.destroy = destroy;
    table = inner;
    table.ops = &ops_;
    table.self = this;
  }
  mfsdp_transport table;
  bool failed() const { return count_ > fail_at_; }

private:
  static FailingTransport *of(void *self) { return static_cast<FailingTransport *>(self); }
  static mfsdp_status submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                             const mfsdp_batch *batch) {
    FailingTransport *t = of(self);
    if (t->count_++ == t->fail_at_)
      return MFSDP_FAIL_PEER(context, MFSDP_E_PEER, 0, "injected: the cable was cut");
    return t->inner_.ops->submit(t->inner_.self, context, queue, batch);
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
  mfsdp_transport inner_;
  mfsdp_transport_ops ops_;
  int64_t count_ = 0, fail_at_;
};

/* ---- a backend whose nth operation fails: refused at once, or later on its queue ---- */

struct BackendFault {
  const mfsdp_backend_ops *inner = nullptr;
  mfsdp_context *context = nullptr;
  int64_t count = 0, fail_at = -1;
  bool later = false, failed = false;
};
thread_local BackendFault fault; /* a backend is called from its rank's own thread */

mfsdp_status fail_task(void *, mfsdp_error *error) {
  return MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1, "injected: the device fell off the bus");
}

/* 1: this operation fails. `queue` NULL: it cannot fail later. */
int strikes(void *self, mfsdp_queue *queue, mfsdp_status *status) {
  *status = MFSDP_OK;
  if (fault.later && queue == nullptr) return 0;
  if (fault.count++ != fault.fail_at) return 0;
  fault.failed = true;
  if (fault.later)
    *status = fault.inner->queue_call(self, queue, fail_task, nullptr);
  else
    *status = MFSDP_FAIL(fault.context, MFSDP_E_BACKEND, "injected: the device fell off the bus");
  return 1;
}

#define FAILING(entry, queue, parameters, arguments)                              \
  mfsdp_status failing_##entry parameters {                                       \
    mfsdp_status status;                                                          \
    return strikes(self, queue, &status) ? status : fault.inner->entry arguments; \
  }
FAILING(event_record, nullptr, (void *self, mfsdp_queue *q, mfsdp_event *e), (self, q, e))
FAILING(queue_wait, nullptr, (void *self, mfsdp_queue *q, mfsdp_event *e), (self, q, e))
FAILING(event_wait, nullptr, (void *self, mfsdp_context *c, mfsdp_event *e, int64_t t),
        (self, c, e, t))
FAILING(copy, q,
        (void *self, mfsdp_queue *q, void *d, mfsdp_space ds, const void *s, mfsdp_space ss,
         size_t n),
        (self, q, d, ds, s, ss, n))
FAILING(fill_bytes, q, (void *self, mfsdp_queue *q, void *d, int32_t b, size_t n),
        (self, q, d, b, n))
FAILING(sum_terms, q,
        (void *self, mfsdp_queue *q, float *acc, int32_t first, const void *const *terms,
         mfsdp_dtype dtype, int32_t term_count, int64_t n),
        (self, q, acc, first, terms, dtype, term_count, n))
FAILING(sumsq, q,
        (void *self, mfsdp_queue *q, double *slots, const float *acc, const mfsdp_block *blocks,
         int32_t n),
        (self, q, slots, acc, blocks, n))
FAILING(verdict_fold, q, (void *self, mfsdp_queue *q, const mfsdp_verdict_args *a), (self, q, a))
FAILING(gemm, q, (void *self, mfsdp_queue *q, const mfsdp_gemm_args *a), (self, q, a))
FAILING(normalize, q, (void *self, mfsdp_queue *q, const mfsdp_normalize_args *a), (self, q, a))
FAILING(fused, q, (void *self, mfsdp_queue *q, const mfsdp_fused_args *a), (self, q, a))
#undef FAILING

mfsdp_backend_ops failing_ops(const mfsdp_backend_ops *inner) {
  mfsdp_backend_ops ops = *inner;
  ops.event_record = failing_event_record;
  ops.queue_wait = failing_queue_wait;
  ops.event_wait = failing_event_wait;
  ops.copy = failing_copy;
  ops.fill_bytes = failing_fill_bytes;
  ops.sum_terms = failing_sum_terms;
  ops.sumsq = failing_sumsq;
  ops.verdict_fold = failing_verdict_fold;
  ops.gemm = failing_gemm;
  ops.normalize = failing_normalize;
  ops.fused = failing_fused;
  return ops;
}

/* ---- what must hold then ---- */

/* Every entry refuses, with the first message, and sends nothing. */
void expect_refused(Rank &rank, Trainer &t) {
  const std::string first = "runtime: refused after the first error, MFSDP_E_";
  const mfsdp_step_desc desc = t.step_desc(0);
  mfsdp_verdict verdict = mfsdp_verdict_default();
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
  };
  for (const std::function<mfsdp_status()> &call : calls) {
    must_fail(rank, call(), MFSDP_E_POISONED, first);
    must_fail(rank, MFSDP_E_POISONED, MFSDP_E_POISONED, "injected: ");
  }
  require(std::memcmp(&before, &rank.context.counters, sizeof(before)) == 0, "something was sent");
}

/* Two steps and an export of everything. */
mfsdp_status work(const Job &job, Trainer *t) {
  std::vector<float> dst(5000);
  for (int64_t s = 0; s < 2; ++s)
    MFSDP_TRY(t->step(s));
  for (int32_t i = 0; i < job.model.count(); ++i)
    MFSDP_TRY(mfsdp_param_export(t->runtime, i, -1, dst.data()));
  return MFSDP_OK;
}

/* Returns the status of the work itself; what must hold after it is checked here. */
mfsdp_status work_and_end(const Job &job, Rank &rank, Trainer *t) {
  const mfsdp_status status = work(job, t);
  const bool failed = fault.failed; /* before destroy, whose own calls may fail as well */
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

TEST(Failure, OfEverySubmit) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
    const Job job = failing_job(kind);
    int64_t n = 0;
    for (bool failed = true; failed && !HasFailure(); ++n) {
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
}

void fail_every_operation(mfsdp_host_queue_kind kind, bool later) {
  const Job job = failing_job(kind);
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
      const mfsdp_backend_ops ops = failing_ops(rank.backend->ops);
      mfsdp_backend backend = *rank.backend;
      backend.ops = &ops;
      fault = BackendFault();
      fault.inner = rank.backend->ops;
      fault.context = &rank.context;
      fault.later = later;
      fault.fail_at = rank.rank == 1 ? n : -1;
      Trainer t(&rank, &job, 1);
      t.backend = &backend;
      t.transport.backend = &backend;
      mfsdp_status status = t.create();
      if (status == MFSDP_OK)
        status = work_and_end(job, rank, &t);
      else if (t.runtime != nullptr) /* init failed: the runtime is as refused as after a step */
        expect_refused(rank, t);
      seen[rank.rank] = status;
      if (rank.rank == 1) failed = fault.failed;
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
  fail_every_operation(MFSDP_HOST_QUEUE_INLINE, false);
}
TEST(Failure, OfEveryBackendCallWithWorkers) {
  fail_every_operation(MFSDP_HOST_QUEUE_WORKER, false);
}
TEST(Failure, OfEveryPieceOfQueuedWork) {
  fail_every_operation(MFSDP_HOST_QUEUE_INLINE, true);
}
TEST(Failure, OfEveryPieceOfQueuedWorkWithWorkers) {
  fail_every_operation(MFSDP_HOST_QUEUE_WORKER, true);
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
