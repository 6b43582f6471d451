/* SPDX-License-Identifier: MIT */
/*
 * transport.h - how bytes move between ranks: batches of sends and receives on a backend queue, and
 * the control plane for small messages.
 *
 *   mfsdp_xfer x[2] = {...};                      // one send to and one receive from peer 1
 *   mfsdp_batch batch = mfsdp_batch_default();
 *   batch.xfers = x; batch.xfer_count = 2; batch.traffic = MFSDP_TRAFFIC_EXPORT;
 *   MFSDP_TRY(mfsdp_transport_submit(context, transport, queue, &batch));   // ENQUEUED
 *
 * Rules of the wire: the transfers of a batch progress together, so a batch may send and receive in
 * any order; between two ranks messages are first in, first out, in the order of batches and,
 * inside a batch, of its table, and carry no tags (NCCL has none). A zero-length transfer is legal
 * and must appear on both sides. Both sides must agree on every length.
 *
 * Failure: every wait has the transport's deadline. After an error, a time-out or a dead peer the
 * transport is poisoned: later calls fail at once with E_POISONED and the first error's message;
 * receive buffers of unfinished batches are undefined.
 *
 * One communication queue per transport, used from one thread.
 * Does not: own the caller's communicator (constructors named _wrap), choose algorithms
 * (collective.h), or count traffic (collective.h counts what it submits).
 * Link flags: none (the implementation says its own).
 */
#ifndef MFSDP_TRANSPORT_H
#define MFSDP_TRANSPORT_H

#include "backend.h"

/* One message. Exactly one of src and dst is set; both may be NULL when nbytes is 0, and then
 * `is_send` decides. Buffers are in the backend's DEVICE space. */
typedef struct mfsdp_xfer {
  const void *src;
  void *dst;
  size_t nbytes;
  int32_t peer;    /* never the rank itself: local copies are the backend's */
  int32_t is_send; /* 1: src goes to peer; 0: dst comes from peer */
} mfsdp_xfer;

typedef struct mfsdp_batch {
  size_t struct_nbytes;
  const mfsdp_xfer *xfers; /* copied before submit returns */
  int32_t xfer_count;
  mfsdp_traffic traffic;
  uint64_t check;    /* debug_check: a hash of operation, unit, count, dtype, root and sequence that
                      * the receiver compares with its own; 0 when off */
  const char *label; /* "reduce blocks.7": for traces and time-out messages; outlives the batch */
} mfsdp_batch;

/* No transfers, no traffic class (it must be set), check word off. */
MFSDP_API mfsdp_batch mfsdp_batch_default(void) {
  mfsdp_batch batch;
  memset(&batch, 0, sizeof(batch));
  batch.struct_nbytes = sizeof(batch);
  batch.label = "batch";
  return batch;
}

/* ---- a collective of the transport's own: collective.h's NATIVE ---- */

typedef enum mfsdp_native_kind { MFSDP_NATIVE_GATHER = 1, MFSDP_NATIVE_REDUCE } mfsdp_native_kind;

/* `count` > 0 elements of the full buffer, and where they stand in their owner's segment. */
typedef struct mfsdp_native_part {
  int64_t unit_offset, shard_offset, count; /* elements */
  int32_t owner;
} mfsdp_native_part;

/*
 * GATHER: `dst` is the full buffer, which holds this rank's own parts already; the others' arrive at
 * their places. REDUCE: `src` is this rank's contribution to the full buffer, read only; the sums
 * over all ranks of this rank's own parts go to `dst`, its segment (NULL if it owns nothing), in
 * `dtype` and in whatever order of ranks. Elements outside all parts are left alone. Buffers are in
 * the backend's DEVICE space and do not overlap.
 */
typedef struct mfsdp_native_args {
  size_t struct_nbytes;
  mfsdp_native_kind kind;
  mfsdp_dtype dtype;
  const mfsdp_native_part *parts; /* part_count, owner after owner, the same on all ranks; lives
                                   * until the queue has run the collective */
  int32_t part_count;
  int32_t form; /* what native_prepare made of these parts; 0 without one */
  const void *src;
  void *dst;
  mfsdp_traffic traffic;
  uint64_t check;    /* as of a batch */
  const char *label; /* outlives the collective */
} mfsdp_native_args;

typedef struct mfsdp_transport mfsdp_transport;

/* R: required, O: optional (MFSDP_HAS). */
typedef struct mfsdp_transport_ops {
  size_t struct_nbytes;
  const char *name;
  /* R. ENQUEUED on `queue`. max_xfer_count of a batch is bounded by what `reserve` was told. */
  mfsdp_status (*submit)(void *self, mfsdp_context *context, mfsdp_queue *queue,
                         const mfsdp_batch *batch);
  /* O. COMPLETE. Set-up: no later batch has more transfers than this; submit allocates nothing. */
  mfsdp_status (*reserve)(void *self, mfsdp_context *context, int32_t max_xfer_count);
  /* R. Asynchronous errors; never blocks. */
  mfsdp_status (*poll)(void *self, mfsdp_context *context);
  /* R. Any thread; idempotent; wakes every wait of this rank, and of its peers where it can. */
  void (*poison)(void *self, const mfsdp_error *why);
  /* R. Frees what the transport owns, or says why it cannot (E_STATE: work is in flight). */
  mfsdp_status (*destroy)(void *self, mfsdp_context *context);
  /* O, both or none. COMPLETE. Registers memory that will be sent and received often. Deregister
   * before it is freed. The runtime does so with its own (runtime/setup_register.h). */
  mfsdp_status (*buffer_register)(void *self, mfsdp_context *context, void *ptr, size_t nbytes,
                                  void **handle);
  mfsdp_status (*buffer_deregister)(void *self, mfsdp_context *context, void *handle); /* O */
  /* O. The transport's own collective. ENQUEUED, in the order of batches. May allocate. */
  mfsdp_status (*native)(void *self, mfsdp_context *context, mfsdp_queue *queue,
                         const mfsdp_native_args *args);
  /* O, beside native. COMPLETE. Set-up: whether and how these parts can be moved: src, dst, form and
   * check are not looked at. *form comes back in the args of every run. Decides alike on every rank.
   * E_UNSUPPORTED says what the transport cannot express. */
  mfsdp_status (*native_prepare)(void *self, mfsdp_context *context, const mfsdp_native_args *args,
                                 int32_t *form);
  /* O. A transport over the ranks of one color, ordered by (key, rank). Collective, COMPLETE. */
  mfsdp_status (*split)(void *self, mfsdp_context *context, int32_t color, int32_t key,
                        mfsdp_transport *out);
} mfsdp_transport_ops;

struct mfsdp_transport {
  size_t struct_nbytes;
  const mfsdp_transport_ops *ops;
  void *self;
  const mfsdp_backend *backend; /* whose queues and memory submit takes */
  int32_t rank, world;
  const int32_t *node_of_rank; /* world entries; NULL: one node */
  int64_t deadline_us;         /* of every wait */
};

/*
 * The control plane: an object of its own, since NCCL has none. COMPLETE on return; barrier and
 * broadcast derive from allgather.
 */
typedef struct mfsdp_control_ops {
  size_t struct_nbytes;
  const char *name;
  /* R. out: world x nbytes, rank order. Every rank calls with the same nbytes; E_MISMATCH,
   * E_TIMEOUT, E_PEER. */
  mfsdp_status (*allgather)(void *self, mfsdp_context *context, const void *in, size_t nbytes,
                            void *out, int64_t timeout_us);
  /* R. alive[r] = 1 if rank r answers within the time-out. Called from the thread that timed
   * out. */
  mfsdp_status (*probe)(void *self, mfsdp_context *context, uint8_t *alive, int64_t timeout_us);
  /* R. Monotonic microseconds. */
  int64_t (*now_us)(void *self);
  /* O. Leaves, and frees what the control plane owns. COMPLETE. E_STATE if it cannot. */
  mfsdp_status (*destroy)(void *self, mfsdp_context *context);
} mfsdp_control_ops;

typedef struct mfsdp_control {
  size_t struct_nbytes;
  const mfsdp_control_ops *ops;
  void *self;
  int32_t rank, world;
  int64_t deadline_us;
} mfsdp_control;

/* E_ARGUMENT unless the transport is complete and its rank and world make sense. */
MFSDP_API mfsdp_status mfsdp_transport_check(mfsdp_context *context,
                                             const mfsdp_transport *transport) {
  const mfsdp_transport_ops *ops;
  if (transport == NULL || transport->ops == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "transport: NULL, or without operations");
  if (transport->struct_nbytes < sizeof(*transport))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "transport: struct_nbytes is %zu, needs %zu",
                      transport->struct_nbytes, sizeof(*transport));
  ops = transport->ops;
  if (!MFSDP_HAS(ops, submit) || !MFSDP_HAS(ops, poll) || !MFSDP_HAS(ops, poison) ||
      !MFSDP_HAS(ops, destroy))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "transport %s: needs submit, poll, poison and destroy",
                      ops->name ? ops->name : "(unnamed)");
  if (transport->world < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "transport: world is %d, needs at least 1",
                      (int)transport->world);
  if (transport->rank < 0 || transport->rank >= transport->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "transport: rank is %d, needs 0 to %d",
                      (int)transport->rank, (int)transport->world - 1);
  if (transport->deadline_us <= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "transport: deadline_us is %lld, needs to be positive",
                      (long long)transport->deadline_us);
  return mfsdp_backend_check(context, transport->backend);
}

/* E_ARGUMENT unless the control plane is complete and its rank and world make sense. */
MFSDP_API mfsdp_status mfsdp_control_check(mfsdp_context *context, const mfsdp_control *control) {
  if (control == NULL || control->ops == NULL || !MFSDP_HAS(control->ops, allgather) ||
      !MFSDP_HAS(control->ops, probe) || !MFSDP_HAS(control->ops, now_us))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "control: needs allgather, probe and now_us");
  if (control->struct_nbytes < sizeof(*control))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "control: struct_nbytes is %zu, needs %zu",
                      control->struct_nbytes, sizeof(*control));
  if (control->world < 1 || control->rank < 0 || control->rank >= control->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "control: rank is %d of world %d, needs 0 to world - 1", (int)control->rank,
                      (int)control->world);
  return MFSDP_OK;
}

/* The batch as a table: E_ARGUMENT before any of its transfers is looked at. */
MFSDP_API mfsdp_status mfsdp__batch_check(mfsdp_context *context, const mfsdp_batch *batch) {
  if (batch == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "submit: batch is NULL");
  if (batch->struct_nbytes != sizeof(*batch))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "submit: batch.struct_nbytes is %zu, needs %zu (use mfsdp_batch_default)",
                      batch->struct_nbytes, sizeof(*batch));
  if (batch->xfer_count < 0 || (batch->xfer_count > 0 && batch->xfers == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the batch has %d transfers%s, needs 0 or a table of more",
                      batch->label ? batch->label : "batch", (int)batch->xfer_count,
                      batch->xfers ? "" : " in xfers NULL");
  return MFSDP_OK;
}

/*
 * Submits a batch. ENQUEUED. E_ARGUMENT for a batch that is NULL, of another size or without its
 * table, a peer outside the world, the rank itself as a peer, a NULL buffer with bytes, or both or
 * neither direction; checked before anything is sent. The transport has passed
 * mfsdp_transport_check.
 */
MFSDP_API mfsdp_status mfsdp_transport_submit(mfsdp_context *context,
                                              const mfsdp_transport *transport, mfsdp_queue *queue,
                                              const mfsdp_batch *batch) {
  const char *label;
  int32_t i;
  MFSDP_TRY(mfsdp__batch_check(context, batch));
  label = batch->label ? batch->label : "batch";
  for (i = 0; i < batch->xfer_count; ++i) {
    const mfsdp_xfer *x = &batch->xfers[i];
    if (x->peer < 0 || x->peer >= transport->world || x->peer == transport->rank)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "%s: transfer %d names peer %d; needs another rank of 0 to %d", label,
                        (int)i, (int)x->peer, (int)transport->world - 1);
    if (x->is_send ? (x->dst != NULL || (x->nbytes > 0 && x->src == NULL))
                   : (x->src != NULL || (x->nbytes > 0 && x->dst == NULL)))
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "%s: transfer %d of %zu bytes needs %s and nothing else", label, (int)i,
                        x->nbytes, x->is_send ? "src" : "dst");
  }
  return transport->ops->submit(transport->self, context, queue, batch);
}

/*
 * Runs a native collective. ENQUEUED. E_ARGUMENT for args that are NULL, of another size, of no kind
 * or without their table; E_UNSUPPORTED if the transport has none. The transport has passed
 * mfsdp_transport_check, and its native_prepare, if it has one, has taken these parts.
 */
MFSDP_API mfsdp_status mfsdp_transport_native(mfsdp_context *context,
                                              const mfsdp_transport *transport, mfsdp_queue *queue,
                                              const mfsdp_native_args *args) {
  if (args == NULL || args->struct_nbytes != sizeof(*args) || args->label == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "native: args are NULL, have no label, or their struct_nbytes is not %zu",
                      sizeof(*args));
  if ((args->kind != MFSDP_NATIVE_GATHER && args->kind != MFSDP_NATIVE_REDUCE) ||
      args->part_count < 0 || (args->part_count > 0 && args->parts == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: needs a native kind (has %d) and a table of parts (has %d%s)",
                      args->label, (int)args->kind, (int)args->part_count,
                      args->parts ? "" : " in NULL");
  if (args->part_count > 0 &&
      (args->kind == MFSDP_NATIVE_GATHER ? args->dst == NULL : args->src == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: the full buffer is NULL but has parts",
                      args->label);
  if (!MFSDP_HAS(transport->ops, native))
    return MFSDP_FAIL(
        context, MFSDP_E_UNSUPPORTED,
        "%s: transport %s has no native collectives; use direct, ring, hierarchical or "
        "auto",
        args->label, transport->ops->name ? transport->ops->name : "(unnamed)");
  return transport->ops->native(transport->self, context, queue, args);
}

#endif /* MFSDP_TRANSPORT_H */
