/* SPDX-License-Identifier: MIT */
/*
 * runtime/tables.h - the runtime's tables and their small state machines. Private to runtime.h.
 *
 * Set-up (setup.h) fills everything here but the fields marked "state"; units.h and step.h replay
 * the tables and move the state.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_TABLES_H
#define MFSDP_RUNTIME_TABLES_H

#include "api.h"

/* 2^-126, the smallest normal float: a trainer multiplies with a float, and 0 would hide every
 * overflow. */
#define MFSDP__SMALLEST_LOSS_SCALE 1.17549435082228750797e-38

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
  MFSDP__GRAD_OPEN,
  MFSDP__GRAD_HELD /* local accumulation: closed for the caller, its sums are kept in the slot */
} mfsdp__grad_state;

/* A group as the runtime uses it. */
typedef struct mfsdp__group_entry {
  const mfsdp_plan *plan;
  const mfsdp_transport *transport, *replica;
  const mfsdp_control *control, *replica_control;
  int32_t rank, world, replica_rank, replica_world;
  int32_t param_first;    /* the runtime's number of the plan's parameter 0 */
  int32_t presence_first; /* the same in the presence words, which all instances of a group share */
  int64_t accumulator_first, accumulator_count; /* of all its units */
  mfsdp_coll *replica_reduce, *replica_gather;  /* NULL without replicas or elements */
  mfsdp_buffer replica_sum;                     /* DEVICE: this replica's part of the sums */
  int32_t replicated;   /* 1: every rank holds all masters, states and sums (resident.h) */
  int64_t export_count; /* floats of an export at a time: equal on all ranks of the group */
} mfsdp__group_entry;

/* A buffer that a transport has been told of. */
typedef struct mfsdp__registration {
  const mfsdp_transport *transport;
  void *handle;
} mfsdp__registration;

typedef struct mfsdp__unit {
  char gather_label[40], reduce_label[40], wait_label[40], refresh_label[40], sums_label[40];
  int32_t group;         /* -1: an unused number, legal and empty */
  const int32_t *params; /* the plan's numbers; add param_first */
  int32_t param_count, param_first;
  mfsdp_coll *gather, *reduce; /* NULL when the layout is empty */
  mfsdp_event *gathered;
  mfsdp_event *ready;       /* what an acquire waits for: `gathered`, or (replicated) the update */
  int32_t resident;         /* 1: full parameters stay in `full`, and no slot is taken */
  int32_t replicated;       /* 1: as the group's */
  int32_t in_place;         /* 1: what this rank gathers lies at its place in `full` */
  unsigned char *full;      /* NULL unless resident */
  size_t full_first_nbytes; /* in the resident storage */
  mfsdp_coll *refresh;      /* the gather after an update; NULL: none */
  mfsdp_coll *sums_gather;  /* replicated: of the accumulators into the sums; NULL: none */
  int64_t sums_first;       /* in the storage of sums */
  int32_t *owners;          /* units that own tensors this unit only aliases */
  int32_t owner_count;
  const int32_t *prefetch[4]; /* by mfsdp_use: prefetch_count units that are acquired next */
  int32_t prefetch_count[4];
  int32_t keeps[4]; /* by mfsdp_use: 1 = it stays in its slot until its backward */
  mfsdp_dtype compute, grad, wire;
  int64_t full_count, grad_count;     /* elements of the two full buffers */
  int64_t master_first, master_count; /* this rank's segment in the master storage */
  int32_t master_in_gather_layout;    /* 1: the master is what is gathered (and holds FROZEN) */
  size_t copy_first_nbytes;           /* else: the segment's compute copy in the copy storage */
  int64_t shard_count;                /* elements of the gathered segment */
  int64_t accumulator_first, accumulator_count;
  int32_t acquires;              /* state: 0 with a slot = gathered ahead or kept */
  int32_t own_acquires;          /* state: those by its own number, not along with an alias */
  int32_t param_slot;            /* state: -1 = SHARDED */
  int32_t stale;                 /* state: resident, and older than the masters */
  int32_t wanted;                /* state: used next, so it stays in its slot at the last release */
  int32_t kept;                  /* state: between forward and backward without resharding */
  int32_t grad_state, grad_slot; /* state */
  int32_t reduces;               /* state: micro-batches closed in this step */
  int32_t stage_first, stage_count; /* jobs of the step in backward; none without it */
  int32_t staged;                   /* state: they are enqueued for this step */
} mfsdp__unit;

typedef struct mfsdp__param_entry {
  int32_t group, index;        /* the plan's number */
  int32_t owner;               /* the parameter with the storage: itself unless an alias */
  int32_t presence;            /* bit of the owner in the presence words; -1: FROZEN */
  int32_t unit;                /* of the owner: whose buffers hold it */
  int32_t use_unit;            /* the unit it was declared in */
  int64_t offset, grad_offset; /* in the unit's full buffers; grad_offset -1: FROZEN */
  int32_t absent;              /* state: no gradient in the open micro-batch */
} mfsdp__param_entry;

/* The step's small tables in the backend's memory, each a buffer of its own. */
typedef struct mfsdp__verdict_tables {
  mfsdp_buffer messages; /* DEVICE: every rank's message, replica after replica */
  mfsdp_buffer header;   /* PINNED: this rank's words that the host writes */
  mfsdp_buffer rank_word, block_word, blocks, rates, present, scalars; /* DEVICE */
  mfsdp_buffer record;                                                 /* PINNED */
  mfsdp_coll *gather, *replica_gather; /* inside group 0; over its replicas */
  int64_t replica_word;                /* first word of this replica's messages */
  int64_t own_word;                    /* first word of this rank's message */
  int32_t value_capacity;              /* value words in a message, after the flags */
  int32_t weight_word;   /* in a message: where weights begin; 0: the mean is not weighted */
  int64_t presence_word; /* in a message: after flags, values and, if weighted, weights */
  int64_t header_words;  /* in a message: where block sums begin */
  int64_t block_count;   /* of all ranks, each block once */
  int32_t own_block_count, presence_count;
  int32_t ranks;           /* group 0's world times its replicas */
  mfsdp_verdict_args fold; /* complete but for what each step is told */
} mfsdp__verdict_tables;

/* Matrices of a unit that are orthogonalized together in backward. */
typedef struct mfsdp__stage_job {
  int32_t hyper_group, count;
  int64_t rows, cols, stride; /* elements from one direction to the next */
  float *direction;
} mfsdp__stage_job;

/* The step in backward (runtime/stage.h); empty without it. */
typedef struct mfsdp__stages {
  mfsdp_queue *queue;        /* NULL where nothing is staged */
  mfsdp__stage_job *jobs;    /* unit after unit */
  mfsdp_buffer directions;   /* DEVICE: of all staged matrices */
  mfsdp_buffer workspace;    /* DEVICE: of one job */
  mfsdp_buffer scalars;      /* DEVICE: what scales the gradients, known before the verdict */
  mfsdp_buffer host_scalars; /* PINNED: written by the host when a step begins */
  mfsdp_event *landed, *copied, *done;
  mfsdp_trace_mark begin, end;
  int32_t job_count, job_capacity;
} mfsdp__stages;

/* A stretch that lies in packed bands and in a batch of whole matrices: offsets in floats. */
typedef struct mfsdp__banded_copy {
  int64_t packed, whole, count;
} mfsdp__banded_copy;

/* One exchange of bands, and what this rank works on in it. */
typedef struct mfsdp__banded_round {
  mfsdp_coll *gather, *scatter;        /* scatter is NULL where every rank works on everything */
  int64_t direction_first, band_count; /* this rank's bands of the round, in the directions */
  int32_t opens_group;                 /* 1: the first round of a group */
  int32_t slot;
  int32_t hyper_group, matrix_count; /* this rank's batch; 0: none */
  int64_t rows, cols, stride;        /* from one matrix to the next where they are worked on */
  int32_t copy_first, copy_count;    /* between slot and matrices; none: the slot is the matrix */
  int32_t own_first, own_count;      /* from matrices to this rank's bands, instead of a scatter */
} mfsdp__banded_round;

/* The step of BANDED matrices (runtime/banded.h); empty without them. */
typedef struct mfsdp__banded {
  mfsdp__banded_round *rounds; /* group after group */
  mfsdp__banded_copy *copies;
  mfsdp_buffer directions;              /* DEVICE: of this rank's bands, in the order of rounds */
  mfsdp_buffer slots;                   /* DEVICE: bands as they arrive */
  mfsdp_buffer whole;                   /* DEVICE: a batch of several matrices */
  mfsdp_buffer workspace;               /* DEVICE: of Newton-Schulz */
  mfsdp_event *gathered[2], *worked[2]; /* by slot */
  mfsdp_trace_mark begin, end;
  int64_t slot_count; /* floats of a slot */
  int32_t round_count, round_capacity, copy_count, copy_capacity;
} mfsdp__banded;

struct mfsdp_runtime {
  mfsdp_context *context;
  const mfsdp_runtime_desc *desc; /* the caller's, in create only; NULL afterwards */
  const mfsdp_backend *backend;
  mfsdp__group_entry *groups;
  int32_t group_count, unit_count, param_count, hyper_count;

  mfsdp__unit *units;
  mfsdp__param_entry *params;
  int32_t *owner_units; /* storage of mfsdp__unit.owners */
  int32_t owner_unit_count;
  int32_t *prefetch_units; /* storage of mfsdp__unit.prefetch */
  int32_t prefetch_unit_count;
  mfsdp__ring param_ring, grad_ring;
  mfsdp_buffer master, copy, accumulator, staging, wire;
  mfsdp_buffer resident, sums;        /* of the units that are; of those that are replicated */
  int32_t has_copies;                 /* 1: some compute copies of this rank are not its masters */
  mfsdp__registration *registrations; /* NULL where no transport wants any */
  int32_t registration_count, registration_capacity;
  mfsdp_optimizer *optimizer;
  mfsdp__stages stages;
  mfsdp__banded banded;
  mfsdp__verdict_tables verdict;
  mfsdp_xfer *export_xfers; /* largest world, at least 1 */
  int32_t export_xfer_count;

  mfsdp_queue *communication; /* all transport work, in the order of calls */
  mfsdp_queue *compute;       /* desc.compute_queue, or one of our own */
  int32_t owns_compute;       /* 1: the caller computes on its own thread, which has to wait */
  int32_t holds_sums;         /* 1: micro-batches add up in the slot, the last one is reduced */
  mfsdp_space state_space;    /* of the masters */
  mfsdp_loss_scale scaling;
  mfsdp_schedule schedule;
  mfsdp_event *compute_done; /* last point of `compute` that `communication` waits for */
  mfsdp_event *reduced;      /* last point of `communication` that `compute` waits for */
  mfsdp_event *verdict_ready, *step_done;
  mfsdp_trace_mark optimizer_begin, optimizer_end;
  int64_t deadline_us; /* of waits for a queue: the shortest of all transports, and a margin */

  /* state */
  int32_t in_step, micro_batch_count, value_count, weight_count, verdict_pending;
  mfsdp_step_desc step;
  int64_t step_index, skipped_steps;
  double loss_scale;
  double lr_factor; /* of the open step, or the last one */
  int64_t steps_since_skip;
  mfsdp_verdict last_verdict;
  mfsdp_error failure; /* the first error that left ranks apart; MFSDP_OK while sound */
};

/* ---- failure: the first error is kept, the transport poisoned, and later calls refused ---- */

/* A transport that another thread or rank has poisoned refuses work with E_POISONED: what happened
 * first is what its poll says. */
MFSDP_API mfsdp_status mfsdp__runtime_first_error(mfsdp_runtime *rt, mfsdp_status status) {
  int32_t g;
  for (g = 0; g < rt->group_count && status == MFSDP_E_POISONED; ++g) {
    const mfsdp_transport *of_group[2];
    int32_t k;
    of_group[0] = rt->groups[g].transport;
    of_group[1] = rt->groups[g].replica;
    for (k = 0; k < 2 && status == MFSDP_E_POISONED; ++k)
      if (of_group[k] != NULL) {
        const mfsdp_status first = of_group[k]->ops->poll(of_group[k]->self, rt->context);
        if (first != MFSDP_OK) status = first;
      }
  }
  return status;
}

MFSDP_API mfsdp_status mfsdp__runtime_failed(mfsdp_runtime *rt, mfsdp_status status) {
  if (rt->failure.status == MFSDP_OK) {
    int32_t g;
    status = mfsdp__runtime_first_error(rt, status);
    rt->failure = rt->context->error;
    rt->failure.status = status;
    for (g = 0; g < rt->group_count; ++g) {
      const mfsdp__group_entry *group = &rt->groups[g];
      group->transport->ops->poison(group->transport->self, &rt->failure);
      if (group->replica != NULL) group->replica->ops->poison(group->replica->self, &rt->failure);
    }
  }
  return status;
}

/* Leaves the calling function through mfsdp__runtime_failed unless `call` succeeds: for everything
 * that touches queues and transports, after which ranks may differ. */
#define MFSDP__RUNTIME_TRY(rt, call)                                                        \
  do {                                                                                      \
    const mfsdp_status mfsdp__rt_status = (call);                                           \
    if (mfsdp__rt_status != MFSDP_OK) return mfsdp__runtime_failed((rt), mfsdp__rt_status); \
  } while (0)

MFSDP_API mfsdp_status mfsdp__runtime_usable(mfsdp_runtime *rt) {
  if (rt->failure.status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_FAIL_PEER(rt->context, MFSDP_E_POISONED, rt->failure.culprit,
                         "runtime: refused after the first error, %s: %.250s",
                         mfsdp_status_name(rt->failure.status), rt->failure.message);
}

MFSDP_API mfsdp_status mfsdp__unit_find(mfsdp_runtime *rt, int32_t unit, mfsdp__unit **out) {
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (unit < 0 || unit >= rt->unit_count)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT,
                      "runtime: unit %d does not exist, needs 0 to %d", (int)unit,
                      (int)rt->unit_count - 1);
  *out = &rt->units[unit];
  return MFSDP_OK;
}

MFSDP_API uint64_t mfsdp__hash_f64(uint64_t hash, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return mfsdp_hash_u64(hash, bits);
}

/* ---- queue order ---- */

/* Later work on `waiter` comes after everything on `queue` so far. */
MFSDP_API mfsdp_status mfsdp__runtime_order(mfsdp_runtime *rt, mfsdp_queue *queue,
                                            mfsdp_event *event, mfsdp_queue *waiter) {
  MFSDP_TRY(rt->backend->ops->event_record(rt->backend->self, queue, event));
  return rt->backend->ops->queue_wait(rt->backend->self, waiter, event);
}

/* The caller's computation comes after `event`: its queue waits, or, without one, its thread
 * does. */
MFSDP_API mfsdp_status mfsdp__runtime_settle(mfsdp_runtime *rt, mfsdp_event *event,
                                             const char *label) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp_status status;
  if (!rt->owns_compute) return ops->queue_wait(rt->backend->self, rt->compute, event);
  mfsdp_trace_begin(rt->context, "host", label);
  status = ops->event_wait(rt->backend->self, rt->context, event, rt->deadline_us);
  mfsdp_trace_end(rt->context, "host", label);
  return status;
}

/* The name of a parameter, by the runtime's number. */
MFSDP_API const char *mfsdp__runtime_param_name(const mfsdp_runtime *rt, int32_t param) {
  const mfsdp__param_entry *entry = &rt->params[param];
  return mfsdp_plan_param(rt->groups[entry->group].plan, entry->index)->name;
}

/* Memory that queues use is given back only when they are done with it: this waits until both have
 * run dry. After a failure the transport is poisoned, so they do; what has not ended by the
 * deadline is not waited for any longer. Keeps the context's error. */
MFSDP_API void mfsdp__runtime_drain(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  const int64_t deadline_us = rt->deadline_us;
  const mfsdp_error first = rt->context->error; /* the queues' own errors follow from it */
  if (rt->step_done == NULL) return;            /* made last: without it nothing was enqueued */
  if (ops->event_record(self, rt->communication, rt->reduced) == MFSDP_OK)
    (void)ops->event_wait(self, rt->context, rt->reduced, deadline_us);
  if (rt->stages.queue != NULL &&
      ops->event_record(self, rt->stages.queue, rt->stages.done) == MFSDP_OK)
    (void)ops->event_wait(self, rt->context, rt->stages.done, deadline_us);
  if (ops->event_record(self, rt->compute, rt->compute_done) == MFSDP_OK)
    (void)ops->event_wait(self, rt->context, rt->compute_done, deadline_us);
  rt->context->error = first;
}

/* ---- rings ---- */

MFSDP_API int32_t mfsdp__ring_free_count(const mfsdp__ring *ring) {
  int32_t i, free_count = 0;
  for (i = 0; i < ring->count; ++i)
    free_count += ring->slots[i].unit < 0;
  return free_count;
}

/* Takes the next free slot for `unit`; -1 if all are held. */
MFSDP_API int32_t mfsdp__ring_claim(mfsdp__ring *ring, int32_t unit) {
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
