/* SPDX-License-Identifier: MIT */
/*
 * transport_device.h - the transport of ranks that are threads of one process and share one GPU:
 * device copies, ordered by events.
 *
 *   // world: device_world.h. In the thread of each rank, with its own backend_cuda.h:
 *   mfsdp_transport transport;
 *   MFSDP_TRY(mfsdp_device_transport_create(context, world, rank, cuda, &transport));
 *   MFSDP_TRY(transport.ops->reserve(transport.self, context, 2 * (world_size - 1)));   // optional
 *   MFSDP_TRY(mfsdp_transport_submit(context, &transport, queue, &batch));              // ENQUEUED
 *   ...
 *   MFSDP_TRY(transport.ops->destroy(transport.self, context));      // before its backend
 *
 * For trying several ranks on a machine with one GPU, and for testing; ranks with a GPU each need a
 * network. Tasks of CUDA's streams may not wait for each other, so the ranks meet before anything is
 * enqueued: `submit` posts this batch's sends, enqueues a copy for each receive as its sender comes,
 * and returns when all receives are enqueued and all sends have found their readers. So it blocks the
 * calling thread until its peers have come to the same batches, but never for the device. In stream
 * order: a copy starts behind what its sender had submitted before the batch, and what a rank submits
 * after the batch starts behind all copies from its buffers. Batches of two ranks need not line up.
 * Nothing is allocated after create and reserve, and nothing synchronizes unless a call of CUDA fails.
 *
 * Failure: a size or check word that differs, a peer that has left, a wait without progress for
 * deadline_us, a call of CUDA that failed, or `poison` end the world: every submit that waits returns
 * the first error (its `rank` is the one that noticed, its `culprit` the one that caused it), later
 * calls E_POISONED. What is enqueued then still runs, and a queue's later work starts behind it. What
 * fails in a queue is seen by those who wait for its events, and they poison (the runtime does); until
 * then peers copy what the queue left. The control plane is another object: it learns of a failure
 * when ranks leave.
 *
 * A stream that is captured into a graph is refused (E_UNSUPPORTED): a graph would meet nobody.
 * Does not: serve ranks on several devices or in several processes; offer native collectives, split or
 * registration; count traffic. For one thread at a time, on any queues of its backend.
 * Link: as backend_cuda.h, and -lpthread. POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_CUDA_TRANSPORT_DEVICE_H
#define MFSDP_CUDA_TRANSPORT_DEVICE_H

#include "backend_cuda.h"
#include "cuda_xfers.h"
#include "device_world.h"

/* What one rank owns. */
typedef struct mfsdp__device_transport {
  mfsdp_device_world *world;
  mfsdp_cuda_backend *cuda;
  int32_t rank, xfer_capacity;
  cudaEvent_t ready; /* what was submitted before the batch has run */
  cudaEvent_t *read; /* world: [r] is recorded by rank r behind its copies from this rank. They are
                      * ours, so that they live until our stream waits for them */
  uint8_t *sends_to; /* world: 1: bytes of the batch go there */
  mfsdp__device_xfer *xfers;             /* xfer_capacity: the batch */
  mfsdp__device_xfer **receives, **last; /* world: receives to serve, by sender */
  int32_t *senders, sender_count;        /* the ranks with such receives */
  int32_t *suspects;                     /* world: scratch of the time-out's explanation */
  uint8_t *visited;                      /* world */
} mfsdp__device_transport;

/* ---- the batch's tables, with the world's mutex held ---- */

/* Sorts the receives by sender and posts the sends. */
MFSDP_API void mfsdp__device_post(mfsdp__device_transport *t, const mfsdp_batch *batch) {
  mfsdp_device_world *world = t->world;
  int32_t i;
  t->sender_count = 0;
  world->slots[t->rank].send_count = 0;
  for (i = 0; i < batch->xfer_count; ++i) {
    mfsdp__device_xfer *xfer = &t->xfers[i];
    const mfsdp_xfer *x = &batch->xfers[i];
    mfsdp__device_pair *pair = x->is_send ? mfsdp__device_pair_of(world, t->rank, x->peer)
                                          : mfsdp__device_pair_of(world, x->peer, t->rank);
    xfer->x = x;
    xfer->next = NULL;
    if (x->is_send) {
      if (pair->head == NULL)
        pair->head = xfer;
      else
        pair->tail->next = xfer;
      pair->tail = xfer;
      ++world->slots[t->rank].send_count;
      mfsdp_cond_broadcast(&world->slots[x->peer].cond);
      continue;
    }
    if (pair->receive_count++ == 0) {
      t->senders[t->sender_count++] = x->peer;
      t->receives[x->peer] = xfer;
    } else {
      t->last[x->peer]->next = xfer;
    }
    t->last[x->peer] = xfer;
  }
}

/* Takes the sends of `peer` that have come, as many as this batch receives from there. */
MFSDP_API int32_t mfsdp__device_take(mfsdp__device_transport *t, int32_t peer,
                                     const mfsdp__device_xfer **sent,
                                     const mfsdp__device_xfer **received) {
  mfsdp__device_pair *pair = mfsdp__device_pair_of(t->world, peer, t->rank);
  int32_t count = 0;
  *sent = pair->head;
  *received = t->receives[peer];
  while (pair->head != NULL && t->receives[peer] != NULL) {
    pair->head = pair->head->next;
    t->receives[peer] = t->receives[peer]->next;
    --pair->receive_count;
    ++count;
  }
  return count;
}

/* Sends of this rank that nobody has taken yet; with `withdraw` they are taken back. */
MFSDP_API int32_t mfsdp__device_untaken(mfsdp__device_transport *t, int withdraw) {
  int32_t r, count = 0;
  for (r = 0; r < t->world->desc.world; ++r) {
    mfsdp__device_pair *pair = mfsdp__device_pair_of(t->world, t->rank, r);
    const mfsdp__device_xfer *xfer;
    for (xfer = pair->head; xfer != NULL; xfer = xfer->next)
      ++count;
    if (withdraw) pair->head = pair->tail = NULL;
  }
  return count;
}

/* After a failure: nothing of the batch stays behind, and nobody looks at its tables. */
MFSDP_API void mfsdp__device_withdraw(mfsdp__device_transport *t) {
  mfsdp_device_world *world = t->world;
  mfsdp__device_slot *slot = &world->slots[t->rank];
  int32_t r;
  slot->send_count -= mfsdp__device_untaken(t, 1);
  for (r = 0; r < world->desc.world; ++r)
    mfsdp__device_pair_of(world, r, t->rank)->receive_count = 0;
  while (slot->send_count > 0) /* being enqueued, which ends by itself: no deadline */
    (void)mfsdp_cond_wait_until(&slot->cond, &world->mutex, MFSDP_DEADLINE_NEVER_US);
}

/* ---- copies ---- */

MFSDP_API mfsdp_status mfsdp__device_match(const mfsdp_device_world *world, const mfsdp_xfer *sent,
                                           const mfsdp_xfer *received, mfsdp_error *why) {
  const int32_t sender = received->peer, receiver = sent->peer;
  const mfsdp__device_slot *from = &world->slots[sender], *to = &world->slots[receiver];
  if (sent->nbytes != received->nbytes)
    return MFSDP_ERROR_SET(
        why, MFSDP_E_MISMATCH, -1,
        "rank %d sends %zu bytes in \"%s\", rank %d receives %zu bytes in \"%s\"", (int)sender,
        sent->nbytes, from->label, (int)receiver, received->nbytes, to->label);
  if (from->check != 0 && to->check != 0 && from->check != to->check)
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                           "rank %d sends in \"%s\" (check %016llx), rank %d receives in \"%s\" "
                           "(check %016llx): not the same operation",
                           (int)sender, from->label, (unsigned long long)from->check, (int)receiver,
                           to->label, (unsigned long long)to->check);
  return MFSDP_OK;
}

/* `count` messages of `peer` into this rank's stream, behind what the peer had submitted.
 * *enqueued = 1 as soon as there is a copy. */
MFSDP_API mfsdp_status mfsdp__device_copy(mfsdp__device_transport *t, mfsdp_context *context,
                                          cudaStream_t stream, int32_t peer, int32_t count,
                                          const mfsdp__device_xfer *sent,
                                          const mfsdp__device_xfer *received, int *enqueued,
                                          mfsdp_error *why) {
  const mfsdp__device_transport *from = t->world->slots[peer].transport;
  int32_t i;
  *enqueued = 0;
  for (i = 0; i < count; ++i, sent = sent->next, received = received->next) {
    MFSDP_TRY(mfsdp__device_match(t->world, sent->x, received->x, why));
    if (sent->x->nbytes == 0) continue;
    if (!*enqueued)
      MFSDP_TRY(mfsdp__cuda_check(context, cudaStreamWaitEvent(stream, from->ready, 0),
                                  "cudaStreamWaitEvent"));
    MFSDP_TRY(mfsdp__cuda_check(context,
                                cudaMemcpyAsync(received->x->dst, sent->x->src, sent->x->nbytes,
                                                cudaMemcpyDeviceToDevice, stream),
                                "cudaMemcpyAsync"));
    *enqueued = 1;
  }
  return MFSDP_OK;
}

/* The same between the two events that order it with the peer's stream, whatever fails. The peer waits
 * meanwhile, so that its tables and events are there. */
MFSDP_API mfsdp_status mfsdp__device_receive(mfsdp__device_transport *t, mfsdp_context *context,
                                             cudaStream_t stream, int32_t peer, int32_t count,
                                             const mfsdp__device_xfer *sent,
                                             const mfsdp__device_xfer *received, mfsdp_error *why) {
  int enqueued;
  const mfsdp_status status =
      mfsdp__device_copy(t, context, stream, peer, count, sent, received, &enqueued, why);
  cudaError_t error;
  if (!enqueued) return status;
  error = cudaEventRecord(t->world->slots[peer].transport->read[t->rank], stream);
  if (error == cudaSuccess) return status;
  (void)cudaStreamSynchronize(stream); /* nobody else can tell the peer when its buffer is free */
  return status != MFSDP_OK ? status : mfsdp__cuda_fail(context, error, "cudaEventRecord");
}

/* Makes *why the world's error unless it has one: what another rank said first stays. */
MFSDP_API void mfsdp__device_end(mfsdp__device_transport *t, const mfsdp_context *context,
                                 mfsdp_status status, mfsdp_error *why) {
  if (status == MFSDP_E_POISONED) return;
  if (why->status == MFSDP_OK) /* a call of CUDA: the context has it */
    (void)MFSDP_ERROR_SET(why, status, t->rank, "%s: %.300s", t->world->slots[t->rank].label,
                          mfsdp_context_error(context)->message);
  why->rank = t->rank;
  mfsdp__device_poison_locked(t->world, why);
}

/* Serves every receive whose send is there, with the mutex held, but not while CUDA is called.
 * *served = 1 if there was one. After a failure the mutex stays held until it is the world's, so that the
 * sender does not take its message for delivered. */
MFSDP_API mfsdp_status mfsdp__device_serve(mfsdp__device_transport *t, mfsdp_context *context,
                                           cudaStream_t stream, int *served, mfsdp_error *why) {
  mfsdp_device_world *world = t->world;
  int32_t i = 0;
  *served = 0;
  while (i < t->sender_count) {
    const int32_t peer = t->senders[i];
    const mfsdp__device_xfer *sent, *received;
    const int32_t count = mfsdp__device_take(t, peer, &sent, &received);
    if (count > 0) {
      mfsdp_status status;
      mfsdp_mutex_unlock(&world->mutex);
      status = mfsdp__device_receive(t, context, stream, peer, count, sent, received, why);
      mfsdp_mutex_lock(&world->mutex);
      world->slots[peer].send_count -= count;
      mfsdp_cond_broadcast(&world->slots[peer].cond);
      MFSDP_TRY(status);
      *served = 1;
    }
    if (t->receives[peer] == NULL)
      t->senders[i] = t->senders[--t->sender_count];
    else
      ++i;
  }
  return MFSDP_OK;
}

/* ---- a batch ---- */

/* E_PEER if a rank that this one waits for has left; E_TIMEOUT if the deadline has passed. */
MFSDP_API mfsdp_status mfsdp__device_check_wait(mfsdp__device_transport *t, int64_t since_us,
                                                int expired, mfsdp_error *why) {
  mfsdp_device_world *world = t->world;
  const int32_t lost = mfsdp__device_lost(world, t->rank);
  if (lost >= 0)
    return MFSDP_ERROR_SET(
        why, MFSDP_E_PEER, lost, "%s: rank %d waits for rank %d to %s, but rank %d has left",
        world->slots[t->rank].label, (int)t->rank, (int)lost,
        mfsdp__device_waits_text(mfsdp__device_waits_for(world, t->rank, lost)), (int)lost);
  if (!expired) return MFSDP_OK;
  return mfsdp__device_explain(world, t->rank, mfsdp_clock_us() - since_us, t->suspects, t->visited,
                               why);
}

/* Until all receives are enqueued and all sends have found their readers, or until a failure. With
 * the mutex held. */
MFSDP_API mfsdp_status mfsdp__device_progress(mfsdp__device_transport *t, mfsdp_context *context,
                                              cudaStream_t stream, mfsdp_error *why) {
  mfsdp_device_world *world = t->world;
  mfsdp__device_slot *slot = &world->slots[t->rank];
  int64_t since_us = mfsdp_clock_us(),
          deadline_us = mfsdp_clock_deadline_us(world->desc.deadline_us);
  int32_t last_send_count = slot->send_count;
  int expired = 0;
  for (;;) {
    int served;
    MFSDP_TRY(mfsdp__device_serve(t, context, stream, &served, why));
    if (world->poisoned) return MFSDP_E_POISONED;
    if (t->sender_count == 0 && slot->send_count == 0) return MFSDP_OK;
    if (served || slot->send_count < last_send_count ||
        (expired && slot->send_count > mfsdp__device_untaken(t, 0))) { /* someone enqueues */
      since_us = mfsdp_clock_us();
      deadline_us = mfsdp_clock_deadline_us(world->desc.deadline_us);
      expired = 0;
    }
    last_send_count = slot->send_count;
    if (served) continue; /* more may have come meanwhile */
    MFSDP_TRY(mfsdp__device_check_wait(t, since_us, expired, why));
    expired = !mfsdp_cond_wait_until(&slot->cond, &world->mutex, deadline_us);
  }
}

/* What is submitted to `stream` from now on comes behind the copies from this batch's buffers; where
 * the stream cannot wait for them, the host does. */
MFSDP_API mfsdp_status mfsdp__device_settle(mfsdp__device_transport *t, mfsdp_context *context,
                                            cudaStream_t stream) {
  mfsdp_status status = MFSDP_OK;
  int32_t r;
  for (r = 0; r < t->world->desc.world; ++r) {
    cudaError_t error;
    if (!t->sends_to[r]) continue;
    error = cudaStreamWaitEvent(stream, t->read[r], 0);
    if (error == cudaSuccess) continue;
    while (mfsdp__cuda_event_state(t->read[r]) == cudaErrorNotReady)
      mfsdp_clock_sleep_until(mfsdp_clock_us() + MFSDP__CUDA_LAST_SLEEP_US);
    status = mfsdp__cuda_fail(context, error, "cudaStreamWaitEvent");
  }
  return status;
}

/* The batch of a rank that has entered it. A failure is the world's when this returns. */
MFSDP_API mfsdp_status mfsdp__device_run(mfsdp__device_transport *t, mfsdp_context *context,
                                         cudaStream_t stream, const mfsdp_batch *batch) {
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status = MFSDP_OK, settled;
  int32_t i;
  int sends = 0;
  memset(t->sends_to, 0, (size_t)t->world->desc.world);
  for (i = 0; i < batch->xfer_count; ++i)
    if (batch->xfers[i].is_send && batch->xfers[i].nbytes > 0)
      sends = t->sends_to[batch->xfers[i].peer] = 1;
  if (sends) /* before the first of them is posted */
    status = mfsdp__cuda_check(context, cudaEventRecord(t->ready, stream), "cudaEventRecord");
  mfsdp_mutex_lock(&t->world->mutex);
  if (status == MFSDP_OK) {
    mfsdp__device_post(t, batch);
    status = mfsdp__device_progress(t, context, stream, &why);
    if (status != MFSDP_OK) mfsdp__device_end(t, context, status, &why);
    if (status != MFSDP_OK) mfsdp__device_withdraw(t);
  } else {
    mfsdp__device_end(t, context, status, &why);
  }
  mfsdp_mutex_unlock(&t->world->mutex);
  settled = mfsdp__device_settle(t, context, stream);
  mfsdp_mutex_lock(&t->world->mutex);
  if (status == MFSDP_OK && settled != MFSDP_OK) mfsdp__device_end(t, context, settled, &why);
  t->world->slots[t->rank].in_batch = 0;
  mfsdp_mutex_unlock(&t->world->mutex);
  return status == MFSDP_OK ? settled : status;
}

/* ---- the table ---- */

/* What can be known to be wrong before anything is posted. */
MFSDP_API mfsdp_status mfsdp__device_check(const mfsdp__device_transport *t, mfsdp_context *context,
                                           const mfsdp__cuda_queue *queue, const mfsdp_batch *batch,
                                           const char *label) {
  enum cudaStreamCaptureStatus capture;
  if (queue == NULL || queue->cuda != t->cuda)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: the queue is %s", label,
                      queue == NULL ? "NULL" : "another backend's, not the transport's");
  MFSDP_TRY(mfsdp__cuda_check_device(t->cuda, context, label));
  MFSDP_TRY(mfsdp__cuda_check(context, cudaStreamIsCapturing(queue->stream, &capture),
                              "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: queue %s is captured into a graph; a batch meets its peers once", label,
                      queue->label);
  return mfsdp__cuda_check_xfers(t->cuda, context, batch, t->xfer_capacity, label);
}

MFSDP_API mfsdp_status mfsdp__device_enter(mfsdp__device_transport *t, mfsdp_context *context,
                                           const mfsdp_batch *batch, const char *label) {
  mfsdp__device_slot *slot = &t->world->slots[t->rank];
  mfsdp_error first = mfsdp_error_none();
  int32_t busy;
  mfsdp_mutex_lock(&t->world->mutex);
  if (t->world->poisoned) first = t->world->error;
  busy = slot->in_batch;
  if (!busy && first.status == MFSDP_OK) {
    slot->in_batch = 1;
    slot->label = label;
    slot->check = batch->check;
  }
  mfsdp_mutex_unlock(&t->world->mutex);
  if (first.status != MFSDP_OK) return mfsdp__device_refuse(context, &first, label);
  if (!busy) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_STATE,
                    "%s: rank %d is in another batch at the same time; a transport is for one "
                    "thread at a time",
                    label, (int)t->rank);
}

MFSDP_API mfsdp_status mfsdp__device_submit(void *self, mfsdp_context *context, mfsdp_queue *opaque,
                                            const mfsdp_batch *batch) {
  mfsdp__device_transport *t = (mfsdp__device_transport *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  const char *label = batch->label != NULL ? batch->label : "batch";
  mfsdp_error first;
  if (mfsdp__device_first_error(t->world, &first) != MFSDP_OK)
    return mfsdp__device_refuse(context, &first, label);
  MFSDP_TRY(mfsdp__device_check(t, context, queue, batch, label));
  MFSDP_TRY(mfsdp__device_enter(t, context, batch, label));
  ++queue->submitted;
  if (mfsdp__device_run(t, context, queue->stream, batch) == MFSDP_OK) return MFSDP_OK;
  (void)mfsdp__device_first_error(t->world, &first);
  return mfsdp_context_take_error(context, &first);
}

MFSDP_API void mfsdp__device_poison(void *self, const mfsdp_error *why) {
  const mfsdp__device_transport *t = (const mfsdp__device_transport *)self;
  mfsdp_error own = mfsdp_error_none();
  if (why != NULL) own = *why;
  if (own.rank < 0) own.rank = t->rank; /* it is this rank that has noticed */
  mfsdp_device_world_poison(t->world, why != NULL ? &own : NULL);
}

/* The first error itself, with its status and culprit. */
MFSDP_API mfsdp_status mfsdp__device_poll(void *self, mfsdp_context *context) {
  mfsdp_error why;
  if (mfsdp__device_first_error(((mfsdp__device_transport *)self)->world, &why) == MFSDP_OK)
    return MFSDP_OK;
  return mfsdp_context_take_error(context, &why);
}

MFSDP_API int32_t mfsdp__device_busy(mfsdp__device_transport *t) {
  int32_t busy;
  mfsdp_mutex_lock(&t->world->mutex);
  busy = t->world->slots[t->rank].in_batch;
  mfsdp_mutex_unlock(&t->world->mutex);
  return busy;
}

/* Never shrinks. E_STATE while another thread is in submit, E_ARGUMENT, E_OVERFLOW, E_MEMORY (then the
 * capacity is the old one). */
MFSDP_API mfsdp_status mfsdp__device_reserve(void *self, mfsdp_context *context,
                                             int32_t max_xfer_count) {
  mfsdp__device_transport *t = (mfsdp__device_transport *)self;
  void *table;
  if (max_xfer_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "device transport: reserve of %d transfers, needs at least 0",
                      (int)max_xfer_count);
  if (max_xfer_count <= t->xfer_capacity) return MFSDP_OK;
  if (mfsdp__device_busy(t))
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "device transport: reserve while rank %d is in a batch", (int)t->rank);
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)max_xfer_count, sizeof(*t->xfers),
                              "device transport: transfers", &table));
  mfsdp_table_free(context, t->xfers, (size_t)t->xfer_capacity, sizeof(*t->xfers));
  t->xfers = (mfsdp__device_xfer *)table;
  t->xfer_capacity = max_xfer_count;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__device_transport_free(mfsdp_context *context, mfsdp__device_transport *t) {
  const size_t count = (size_t)t->world->desc.world;
  size_t r;
  if (t->ready != NULL) (void)cudaEventDestroy(t->ready);
  for (r = 0; r < count && t->read != NULL; ++r)
    if (t->read[r] != NULL) (void)cudaEventDestroy(t->read[r]);
  mfsdp_table_free(context, t->visited, count, sizeof(*t->visited));
  mfsdp_table_free(context, t->suspects, count, sizeof(*t->suspects));
  mfsdp_table_free(context, t->senders, count, sizeof(*t->senders));
  mfsdp_table_free(context, (void *)t->last, count, sizeof(*t->last));
  mfsdp_table_free(context, (void *)t->receives, count, sizeof(*t->receives));
  mfsdp_table_free(context, t->sends_to, count, sizeof(*t->sends_to));
  mfsdp_table_free(context, (void *)t->read, count, sizeof(*t->read));
  mfsdp_table_free(context, t->xfers, (size_t)t->xfer_capacity, sizeof(*t->xfers));
  mfsdp_table_free(context, t, 1, sizeof(*t));
}

/* Leaves the world; copies that are enqueued still run. E_STATE while another thread is in submit. */
MFSDP_API mfsdp_status mfsdp__device_destroy(void *self, mfsdp_context *context) {
  mfsdp__device_transport *t = (mfsdp__device_transport *)self;
  mfsdp_device_world *world;
  mfsdp__device_slot *slot;
  if (t == NULL) return MFSDP_OK;
  if (mfsdp__device_busy(t))
    return MFSDP_FAIL(context, MFSDP_E_STATE, "device transport: rank %d is in a batch",
                      (int)t->rank);
  world = t->world;
  slot = &world->slots[t->rank];
  --t->cuda->event_count;
  mfsdp__device_transport_free(context, t);
  mfsdp_mutex_lock(&world->mutex);
  slot->transport = NULL;
  slot->role = MFSDP__DEVICE_LEFT;
  mfsdp__device_wake_all(world); /* those who wait for this rank see that it is gone */
  mfsdp_mutex_unlock(&world->mutex);
  return MFSDP_OK;
}

MFSDP_API const mfsdp_transport_ops *mfsdp__device_transport_ops(void) {
  static const mfsdp_transport_ops ops = {sizeof(mfsdp_transport_ops),
                                          "device",
                                          mfsdp__device_submit,
                                          mfsdp__device_reserve,
                                          mfsdp__device_poll,
                                          mfsdp__device_poison,
                                          mfsdp__device_destroy,
                                          NULL,
                                          NULL,
                                          NULL,
                                          NULL,
                                          NULL};
  return &ops;
}

MFSDP_API mfsdp_status mfsdp__device_table(mfsdp_context *context, const mfsdp__device_transport *t,
                                           size_t element_nbytes, const char *what, void **out) {
  return mfsdp_table_alloc(context, (size_t)t->world->desc.world, element_nbytes, what, out);
}

MFSDP_API mfsdp_status mfsdp__device_event(mfsdp_context *context, cudaEvent_t *out) {
  return mfsdp__cuda_check(context, cudaEventCreateWithFlags(out, cudaEventDisableTiming),
                           "cudaEventCreateWithFlags");
}

MFSDP_API mfsdp_status mfsdp__device_transport_fill(mfsdp_context *context,
                                                    mfsdp__device_transport *t) {
  int32_t r;
  void *table;
  MFSDP_TRY(mfsdp__device_table(context, t, sizeof(*t->read), "device transport: events", &table));
  t->read = (cudaEvent_t *)table;
  MFSDP_TRY(
      mfsdp__device_table(context, t, sizeof(*t->sends_to), "device transport: readers", &table));
  t->sends_to = (uint8_t *)table;
  MFSDP_TRY(
      mfsdp__device_table(context, t, sizeof(*t->receives), "device transport: receives", &table));
  t->receives = (mfsdp__device_xfer **)table;
  MFSDP_TRY(
      mfsdp__device_table(context, t, sizeof(*t->last), "device transport: last receives", &table));
  t->last = (mfsdp__device_xfer **)table;
  MFSDP_TRY(
      mfsdp__device_table(context, t, sizeof(*t->senders), "device transport: senders", &table));
  t->senders = (int32_t *)table;
  MFSDP_TRY(
      mfsdp__device_table(context, t, sizeof(*t->suspects), "device transport: suspects", &table));
  t->suspects = (int32_t *)table;
  MFSDP_TRY(
      mfsdp__device_table(context, t, sizeof(*t->visited), "device transport: visited", &table));
  t->visited = (uint8_t *)table;
  MFSDP_TRY(mfsdp__device_event(context, &t->ready));
  for (r = 0; r < t->world->desc.world; ++r)
    if (r != t->rank) MFSDP_TRY(mfsdp__device_event(context, &t->read[r]));
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)t->xfer_capacity, sizeof(*t->xfers),
                              "device transport: transfers", &table));
  t->xfers = (mfsdp__device_xfer *)table;
  return MFSDP_OK;
}

/* JOINED, unless it may not. */
MFSDP_API mfsdp_status mfsdp__device_join(mfsdp_device_world *world, mfsdp_context *context,
                                          int32_t rank) {
  mfsdp_error first = mfsdp_error_none();
  int32_t role;
  mfsdp_mutex_lock(&world->mutex);
  if (world->poisoned) first = world->error;
  role = world->slots[rank].role;
  if (first.status == MFSDP_OK && role == MFSDP__DEVICE_ABSENT)
    world->slots[rank].role = MFSDP__DEVICE_JOINED;
  mfsdp_mutex_unlock(&world->mutex);
  if (first.status != MFSDP_OK) return mfsdp__device_refuse(context, &first, "device transport");
  if (role == MFSDP__DEVICE_ABSENT) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_STATE,
                    "device transport: rank %d %s; each rank joins a world once", (int)rank,
                    role == MFSDP__DEVICE_JOINED ? "has joined already" : "has left already");
}

MFSDP_API mfsdp_status mfsdp__device_create_check(mfsdp_context *context,
                                                  const mfsdp_device_world *world, int32_t rank,
                                                  const mfsdp_cuda_backend *cuda) {
  if (world == NULL || cuda == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "device transport: %s is NULL",
                      world == NULL ? "world" : "cuda");
  if (rank < 0 || rank >= world->desc.world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "device transport: rank is %d, needs 0 to %d",
                      (int)rank, (int)world->desc.world - 1);
  if (cuda->device != world->desc.device)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "device transport: rank %d has device %d, this world is for ranks that share "
                      "device %d",
                      (int)rank, (int)cuda->device, (int)world->desc.device);
  return mfsdp__cuda_check_device(cuda, context, "device transport");
}

/*
 * Joins `world` as `rank`, on the calling thread's own context and backend. Peers may send before this
 * rank has joined; they wait for it. Memory comes from `context`; *out holds the table, to be ended
 * with ops->destroy(self, context) before the backend, after which peers that wait for this rank get
 * E_PEER. COMPLETE.
 * E_ARGUMENT (also: another device than the world's); E_STATE if this rank has joined before (names
 * it); E_POISONED; E_MEMORY or E_BACKEND, after which the rank may try again.
 */
MFSDP_API mfsdp_status mfsdp_device_transport_create(mfsdp_context *context,
                                                     mfsdp_device_world *world, int32_t rank,
                                                     mfsdp_cuda_backend *cuda,
                                                     mfsdp_transport *out) {
  mfsdp__device_transport *t = NULL;
  mfsdp_status status;
  void *table;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "device transport: out is NULL");
  memset(out, 0, sizeof(*out));
  MFSDP_TRY(mfsdp__device_create_check(context, world, rank, cuda));
  MFSDP_TRY(mfsdp__device_join(world, context, rank));
  status = mfsdp_table_alloc(context, 1, sizeof(*t), "device transport", &table);
  if (status == MFSDP_OK) {
    t = (mfsdp__device_transport *)table;
    t->world = world;
    t->cuda = cuda;
    t->rank = rank;
    t->xfer_capacity = world->desc.batch_xfer_count;
    status = mfsdp__device_transport_fill(context, t);
    if (status != MFSDP_OK) mfsdp__device_transport_free(context, t);
  }
  mfsdp_mutex_lock(&world->mutex);
  if (status == MFSDP_OK)
    world->slots[rank].transport = t;
  else
    world->slots[rank].role = MFSDP__DEVICE_ABSENT;
  mfsdp_mutex_unlock(&world->mutex);
  MFSDP_TRY(status);
  ++cuda->event_count; /* the backend goes last */
  out->struct_nbytes = sizeof(*out);
  out->ops = mfsdp__device_transport_ops();
  out->self = table;
  out->backend = mfsdp_cuda_backend_get(cuda);
  out->rank = rank;
  out->world = world->desc.world;
  out->deadline_us = world->desc.deadline_us;
  return MFSDP_OK;
}

#endif /* MFSDP_CUDA_TRANSPORT_DEVICE_H */
