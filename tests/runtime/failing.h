/* SPDX-License-Identifier: MIT */
/*
 * failing.h: a transport whose nth submit fails, and a backend whose nth operation does, at once or
 * when its queue comes to it.
 *
 *   test::FailingTransport failing(rank.transport, 3);     // use failing.table; failing.failed()
 *   test::FailingBackend backend(&rank, 10, true);         // use backend.table; backend.failed()
 *
 * The messages contain "injected: ". A backend is used by its rank's own thread, one at a time.
 */
#ifndef MFSDP_TESTS_RUNTIME_FAILING_H
#define MFSDP_TESTS_RUNTIME_FAILING_H

#include "../support/ranks.h"
#include "forwarding.h"

#include "mfsdp/transport.h"

namespace test {

/* ---- a transport whose nth submit fails ---- */

class FailingTransport : public ForwardingTransport {
public:
  FailingTransport(const mfsdp_transport &inner, int64_t fail_at)
      : ForwardingTransport(inner), fail_at_(fail_at) {}
  bool failed() const { return count_ > fail_at_; }

private:
  mfsdp_status submit(mfsdp_context *context, mfsdp_queue *queue,
                      const mfsdp_batch *batch) override {
    if (count_++ == fail_at_)
      return MFSDP_FAIL_PEER(context, MFSDP_E_PEER, 0, "injected: the cable was cut");
    return forward(context, queue, batch);
  }
  int64_t count_ = 0, fail_at_;
};

/* ---- a backend whose nth operation fails ---- */

class FailingBackend {
public:
  /* `later`: the work fails on its queue; else the call does. fail_at < 0: none. */
  FailingBackend(Rank *rank, int64_t fail_at, bool later) : table(*rank->backend) {
    ops_ = failing_ops(rank->backend->ops);
    table.ops = &ops_;
    Fault &f = fault();
    f = Fault();
    f.inner = rank->backend->ops;
    f.context = &rank->context;
    f.later = later;
    f.fail_at = fail_at;
  }
  FailingBackend(const FailingBackend &) = delete;
  FailingBackend &operator=(const FailingBackend &) = delete;
  mfsdp_backend table;
  static bool failed() { return fault().failed; }
  /* Counts anew, from here on; fails then as `later` says. */
  static void arm(int64_t fail_at, bool later) {
    fault().count = 0;
    fault().fail_at = fail_at;
    fault().later = later;
  }

private:
  struct Fault {
    const mfsdp_backend_ops *inner = nullptr;
    mfsdp_context *context = nullptr;
    int64_t count = 0, fail_at = -1;
    bool later = false, failed = false;
  };
  static Fault &fault() { /* a backend is called from its rank's own thread */
    static thread_local Fault of_this_rank;
    return of_this_rank;
  }
  static mfsdp_status fail_task(void *, mfsdp_error *error) {
    return MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1, "injected: the device fell off the bus");
  }
  /* True: this operation fails. `queue` NULL: it cannot fail later. */
  static bool strikes(void *self, mfsdp_queue *queue, mfsdp_status *status) {
    Fault &f = fault();
    *status = MFSDP_OK;
    if (f.later && queue == nullptr) return false;
    if (f.count++ != f.fail_at) return false;
    f.failed = true;
    if (f.later)
      *status = f.inner->queue_call(self, queue, fail_task, nullptr);
    else
      *status = MFSDP_FAIL(f.context, MFSDP_E_BACKEND, "injected: the device fell off the bus");
    return true;
  }

#define FAILING(entry, queue, parameters, arguments)                                \
  static mfsdp_status failing_##entry parameters {                                  \
    mfsdp_status status;                                                            \
    return strikes(self, queue, &status) ? status : fault().inner->entry arguments; \
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
  FAILING(cast, q,
          (void *self, mfsdp_queue *q, void *d, mfsdp_dtype dd, const void *s, mfsdp_dtype sd,
           int64_t n),
          (self, q, d, dd, s, sd, n))
#undef FAILING

  static mfsdp_backend_ops failing_ops(const mfsdp_backend_ops *inner) {
    mfsdp_backend_ops ops = *inner;
    ops.event_record = failing_event_record;
    ops.queue_wait = failing_queue_wait;
    ops.event_wait = failing_event_wait;
    ops.copy = failing_copy;
    ops.fill_bytes = failing_fill_bytes;
    ops.cast = failing_cast;
    ops.sum_terms = failing_sum_terms;
    ops.sumsq = failing_sumsq;
    ops.verdict_fold = failing_verdict_fold;
    ops.gemm = failing_gemm;
    ops.normalize = failing_normalize;
    ops.fused = failing_fused;
    return ops;
  }

  mfsdp_backend_ops ops_;
};

} // namespace test

#endif // MFSDP_TESTS_RUNTIME_FAILING_H
