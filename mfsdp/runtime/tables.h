/* SPDX-License-Identifier: MIT */
/*
 * runtime/tables.h - the runtime's tables and their small state machines. Private to runtime.h.
 *
 * Set-up (setup.h) fills everything here but the fields marked "state"; units.h and step.h replay the
 * tables and move the state.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_TABLES_H
#define MFSDP_RUNTIME_TABLES_H

#include "api.h"

/* A slot's memory is free for the next unit once `idle` has passed. */
typedef struct mfsdp__slot {
  unsigned char *data;
  mfsdp_event *idle;
  int32_t unit; /* state: the unit that holds it, -1 if none */
} mfsdp__slot;

/* Equal slots used in turn, so that a released slot rests as long as possible before its reuse. */
typedef struct mfsdp__ring {
  mfsdp_buffer buffer;
  mfsdp__slot *slots;
  size_t slot_nbytes;
  int32_t count;
  int32_t next; /* state */
} mfsdp__ring;

typedef enum mfsdp__grad_state {
  MFSDP__GRAD_CLOSED = 0,
  MFSDP__GRAD_BORROWED, /* open for a tied tensor of another unit; its own backward is still to come */
  MFSDP__GRAD_OPEN
} mfsdp__grad_state;

typedef struct mfsdp__unit {
  char gather_label[40], reduce_label[40];
  mfsdp_coll *gather, *reduce; /* NULL when the layout is empty */
  mfsdp_event *gathered;
  int32_t *owners;             /* units that own tensors this unit only aliases */
  int32_t owner_count;
  int64_t full_count, grad_count;   /* elements of the two full buffers */
  int64_t shard_first, shard_count; /* this rank's segment in the master storage */
  int64_t accumulator_first, accumulator_count;
  int32_t acquires, param_slot;     /* state: 0 = SHARDED, > 0 = FULL in param_slot */
  int32_t grad_state, grad_slot;    /* state */
  int32_t reduces;                  /* state: micro-batches reduced in this step */
} mfsdp__unit;

typedef struct mfsdp__param_entry {
  int32_t owner;       /* the parameter with the storage: itself unless an alias */
  int32_t unit;        /* of the owner: whose buffers hold it */
  int32_t use_unit;    /* the unit it was declared in */
  int64_t offset, grad_offset; /* in the unit's full buffers; grad_offset -1: FROZEN */
  int32_t absent;      /* state: no gradient in the open micro-batch */
} mfsdp__param_entry;

/* The step's small tables in the backend's memory, each a buffer of its own. */
typedef struct mfsdp__verdict_tables {
  mfsdp_buffer messages;    /* DEVICE: every rank's message */
  mfsdp_buffer header;      /* PINNED: this rank's words that the host writes */
  mfsdp_buffer rank_word, block_word, blocks, rates, present, scalars; /* DEVICE */
  mfsdp_buffer record;      /* PINNED */
  mfsdp_coll *gather;
  int64_t own_word;         /* first word of this rank's message */
  int64_t header_words;     /* flags, values, presence: where block sums begin */
  int64_t block_count;      /* of the plan */
  int32_t own_block_count;
} mfsdp__verdict_tables;

struct mfsdp_runtime {
  mfsdp_context *context;
  mfsdp_runtime_desc desc; /* groups and optimizer are read by set-up only */
  const mfsdp_backend *backend;
  const mfsdp_plan *plan;
  const mfsdp_transport *transport;
  const mfsdp_control *control;
  int32_t rank, world, unit_count, param_count, group_count;

  mfsdp__unit *units;
  mfsdp__param_entry *params;
  int32_t *owner_units;       /* storage of mfsdp__unit.owners */
  int32_t owner_unit_count;
  mfsdp__ring param_ring, grad_ring;
  mfsdp_buffer master, accumulator, staging;
  mfsdp_optimizer *optimizer;
  mfsdp__verdict_tables verdict;
  mfsdp_xfer *export_xfers;   /* world - 1 entries */

  mfsdp_queue *communication; /* all transport work, in the order of calls */
  mfsdp_queue *compute;       /* desc.compute_queue, or one of our own */
  int32_t owns_compute;
  mfsdp_event *compute_done;  /* last point of `compute` that `communication` waits for */
  mfsdp_event *reduced;       /* last point of `communication` that `compute` waits for */
  mfsdp_event *verdict_ready, *step_done;

  /* state */
  int32_t in_step, micro_batch_count, value_count, verdict_pending;
  mfsdp_step_desc step;
  int64_t step_index, skipped_steps;
  mfsdp_verdict last_verdict;
  mfsdp_error failure;        /* the first error that left ranks apart; MFSDP_OK while sound */
};

/* ---- failure: the first error is kept, the transport poisoned, and later calls refused ---- */

MFSDP_API mfsdp_status mfsdp__runtime_failed(mfsdp_runtime *rt, mfsdp_status status)
{
  if (rt->failure.status == MFSDP_OK) {
    rt->failure = rt->context->error;
    rt->failure.status = status;
    rt->transport->ops->poison(rt->transport->self, &rt->failure);
  }
  return status;
}

/* Leaves the calling function through mfsdp__runtime_failed unless `call` succeeds: for everything that
 * touches queues and transports, after which ranks may differ. */
#define MFSDP__RUNTIME_TRY(rt, call)                                                               \
  do {                                                                                             \
    const mfsdp_status mfsdp__rt_status = (call);                                                  \
    if (mfsdp__rt_status != MFSDP_OK) return mfsdp__runtime_failed((rt), mfsdp__rt_status);        \
  } while (0)

MFSDP_API mfsdp_status mfsdp__runtime_usable(mfsdp_runtime *rt)
{
  if (rt->failure.status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_FAIL_PEER(rt->context, MFSDP_E_POISONED, rt->failure.culprit,
                         "runtime: refused after the first error, %s: %.250s",
                         mfsdp_status_name(rt->failure.status), rt->failure.message);
}

MFSDP_API mfsdp_status mfsdp__unit_find(mfsdp_runtime *rt, int32_t unit, mfsdp__unit **out)
{
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (unit < 0 || unit >= rt->unit_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "runtime: unit %d does not exist, needs 0 to %d",
                      (int)unit, (int)rt->unit_count - 1);
  *out = &rt->units[unit];
  return MFSDP_OK;
}

/* ---- queue order ---- */

/* Later work on `waiter` comes after everything on `queue` so far. */
MFSDP_API mfsdp_status mfsdp__runtime_order(mfsdp_runtime *rt, mfsdp_queue *queue, mfsdp_event *event,
                                            mfsdp_queue *waiter)
{
  MFSDP_TRY(rt->backend->ops->event_record(rt->backend->self, queue, event));
  return rt->backend->ops->queue_wait(rt->backend->self, waiter, event);
}

/* The caller's computation comes after `event`: its queue waits, or, without one, its thread does. */
MFSDP_API mfsdp_status mfsdp__runtime_settle(mfsdp_runtime *rt, mfsdp_event *event)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  if (rt->desc.compute_queue == NULL)
    return ops->event_wait(rt->backend->self, rt->context, event, rt->transport->deadline_us);
  return ops->queue_wait(rt->backend->self, rt->compute, event);
}

/* Memory that queues use is given back only when they are done with it: this waits until both have run
 * dry. After a failure the transport is poisoned, so they do; what has not ended by the deadline is not
 * waited for any longer. Keeps the context's error. */
MFSDP_API void mfsdp__runtime_drain(mfsdp_runtime *rt)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  const int64_t deadline_us = rt->transport->deadline_us;
  const mfsdp_error first = rt->context->error; /* the queues' own errors follow from it */
  if (rt->step_done == NULL) return; /* made last: without it nothing was enqueued */
  if (ops->event_record(self, rt->communication, rt->reduced) == MFSDP_OK)
    (void)ops->event_wait(self, rt->context, rt->reduced, deadline_us);
  if (ops->event_record(self, rt->compute, rt->compute_done) == MFSDP_OK)
    (void)ops->event_wait(self, rt->context, rt->compute_done, deadline_us);
  rt->context->error = first;
}

/* ---- rings ---- */

MFSDP_API int32_t mfsdp__ring_free_count(const mfsdp__ring *ring)
{
  int32_t i, free_count = 0;
  for (i = 0; i < ring->count; ++i) free_count += ring->slots[i].unit < 0;
  return free_count;
}

/* Takes the next free slot for `unit`; -1 if all are held. */
MFSDP_API int32_t mfsdp__ring_claim(mfsdp__ring *ring, int32_t unit)
{
  int32_t tried;
  for (tried = 0; tried < ring->count; ++tried) {
    const int32_t index = (ring->next + tried) % ring->count;
    if (ring->slots[index].unit >= 0) continue;
    ring->slots[index].unit = unit;
    ring->next = (index + 1) % ring->count;
    return index;
  }
  return -1;
}

#endif /* MFSDP_RUNTIME_TABLES_H */
