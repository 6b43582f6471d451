/* SPDX-License-Identifier: MIT */
/*
 * transport_threads.h - the transport of ranks that are threads of one process.
 *
 *   // world: threads_world.h. In the thread of each rank:
 *   mfsdp_transport transport;
 *   MFSDP_TRY(mfsdp_threads_transport_create(context, world, rank, backend, &transport));
 *   MFSDP_TRY(transport.ops->reserve(transport.self, context, 2 * (world_size - 1)));   // optional
 *   MFSDP_TRY(mfsdp_transport_submit(context, &transport, queue, &batch));              // ENQUEUED
 *   ...
 *   MFSDP_TRY(transport.ops->destroy(transport.self, context));
 *
 * Rendezvous: a receiver copies straight from the sender's buffer (one copy, none in between), and
 * a batch is complete when its receives are filled and its sends have been read. A batch posts all
 * of its sends, then serves its receives as their senders arrive, then waits for its readers; so
 * batches that send to each other never deadlock. Copies happen outside all locks. The world may
 * slow messages down like a network (latency_us, bytes_per_us of its description).
 * Native collectives work straight on the buffers of all ranks (native_threads.h).
 *
 * Failure: a size or check word that differs, a peer that has left, a wait without progress for
 * deadline_us, or `poison` end the world: every running batch of every rank returns the first error
 * (its `rank` is the one that noticed, its `culprit` the one that caused it), later calls
 * E_POISONED. A failed batch returns only after nobody reads its buffers any more.
 *
 * destroy: E_STATE while a batch is queued or running. If a queue failed and skipped its batches,
 * poison the transport (peers wait for those batches), destroy the queue, then the transport.
 * Does not: offer split or registration; choose algorithms; count traffic.
 * Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_HOST_TRANSPORT_THREADS_H
#define MFSDP_HOST_TRANSPORT_THREADS_H

#include "native_threads.h"
#include "threads_control.h"
#include "threads_world.h"

enum { MFSDP__THREADS_FREE = 0, MFSDP__THREADS_QUEUED, MFSDP__THREADS_RUNNING };

/* A batch from submit until it has run. */
typedef struct mfsdp__threads_batch {
  struct mfsdp__threads_transport *transport;
  mfsdp__threads_xfer *xfers; /* xfer_capacity entries */
  int32_t xfer_count;
  int32_t state;          /* with ring_mutex */
  mfsdp_event *submitted; /* passes when the queue has run the batch, or skipped it */
  uint64_t check;
  const char *label;
  mfsdp_status (*move)(struct mfsdp__threads_batch *batch, mfsdp_error *why);
  mfsdp_native_args native; /* of a native collective */
} mfsdp__threads_batch;

/* What one rank owns. Only the batch that runs touches the fields of the second part. */
typedef struct mfsdp__threads_transport {
  mfsdp_threads_world *world;
  mfsdp__threads_slot *slot;
  const mfsdp_backend *backend;
  mfsdp_mutex ring_mutex;
  int32_t ring_mutex_ready;
  mfsdp__threads_batch *batches; /* a ring of desc.batch_count */
  mfsdp__threads_xfer *xfers;    /* batch_count x xfer_capacity */
  int32_t xfer_capacity;
  int32_t next_batch; /* of the submitting thread */

  mfsdp__threads_xfer **receives; /* world: the next receive to serve, by sender */
  mfsdp__threads_xfer **last;     /* world: the last one */
  int32_t *senders;               /* the ranks with receives to serve, or that a native collective
                                   * waits for */
  int32_t sender_count;
  int64_t next_arrival_us;     /* of a message on its artificial link; NEVER: there is none */
  int32_t *suspects;           /* world: scratch of the time-out's explanation */
  uint8_t *visited;            /* world */
  const void **terms;          /* world: of a native reduction's sum */
  const unsigned char **fulls; /* world: the buffers it adds */
} mfsdp__threads_transport;

/* ---- the life of a batch, on the queue's thread ---- */

/* Sorts the receives by sender and opens the mailbox for them. */
MFSDP_API mfsdp_status mfsdp__threads_batch_open(mfsdp__threads_batch *batch, mfsdp_error *why) {
  mfsdp__threads_transport *t = batch->transport;
  mfsdp__threads_slot *slot = t->slot;
  int32_t i, busy, send_count = 0;
  mfsdp_mutex_lock(&slot->mutex);
  busy = slot->in_batch;
  slot->in_batch = 1;
  if (!busy) t->sender_count = 0;
  for (i = 0; i < batch->xfer_count && !busy; ++i) {
    mfsdp__threads_xfer *xfer = &batch->xfers[i];
    const int32_t peer = xfer->x.peer;
    mfsdp__threads_pair *pair = mfsdp__threads_pair_of(t->world, peer, slot->rank);
    xfer->next = NULL;
    if (xfer->x.is_send) {
      ++send_count;
      continue;
    }
    if (pair->receive_count++ == 0) {
      t->senders[t->sender_count++] = peer;
      t->receives[peer] = xfer;
    } else {
      t->last[peer]->next = xfer;
    }
    t->last[peer] = xfer;
  }
  if (!busy) slot->send_count = send_count;
  mfsdp_mutex_unlock(&slot->mutex);
  if (!busy) return MFSDP_OK;
  return MFSDP_ERROR_SET(why, MFSDP_E_STATE, slot->rank,
                         "%s: rank %d runs another batch at the same time; a transport serves one "
                         "communication queue",
                         batch->label, (int)slot->rank);
}

/* Puts a message on its artificial link. With the receiver's mutex held. */
MFSDP_API void mfsdp__threads_depart(const mfsdp_threads_world_desc *desc,
                                     mfsdp__threads_pair *pair, mfsdp__threads_xfer *xfer) {
  const int64_t now_us = mfsdp_clock_us();
  const double exact_us =
      desc->bytes_per_us > 0.0 ? (double)xfer->x.nbytes / desc->bytes_per_us : 0;
  const int64_t wire_us = (int64_t)(exact_us < 1e15 ? exact_us : 1e15);
  const int64_t start_us = pair->busy_until_us > now_us ? pair->busy_until_us : now_us;
  pair->busy_until_us = start_us + wire_us + ((double)wire_us < exact_us); /* rounded up */
  xfer->arrives_us = pair->busy_until_us + desc->latency_us;
}

MFSDP_API void mfsdp__threads_post(mfsdp__threads_batch *batch, mfsdp__threads_xfer *xfer) {
  mfsdp_threads_world *world = batch->transport->world;
  const int32_t rank = batch->transport->slot->rank, peer = xfer->x.peer;
  mfsdp__threads_slot *mailbox = &world->slots[peer];
  mfsdp__threads_pair *pair = mfsdp__threads_pair_of(world, rank, peer);
  mfsdp_mutex_lock(&mailbox->mutex);
  if (world->has_links) mfsdp__threads_depart(&world->desc, pair, xfer);
  if (pair->head == NULL)
    __atomic_store_n(&pair->head, xfer, __ATOMIC_RELEASE);
  else
    pair->tail->next = xfer;
  pair->tail = xfer;
  mfsdp__threads_notify_locked(mailbox, mailbox->waits_for == MFSDP__THREADS_A_POST &&
                                            pair->receive_count > 0);
  mfsdp_mutex_unlock(&mailbox->mutex);
}

/* 1 if the message has come over its artificial link; else notes when it will. */
MFSDP_API int mfsdp__threads_arrived(mfsdp__threads_transport *t, const mfsdp__threads_xfer *sent) {
  if (!t->world->has_links || sent->arrives_us <= mfsdp_clock_us()) return 1;
  if (sent->arrives_us < t->next_arrival_us) t->next_arrival_us = sent->arrives_us;
  return 0;
}

/* The oldest send of `peer` to this rank, now this rank's to read; NULL: none that has arrived. */
MFSDP_API mfsdp__threads_xfer *mfsdp__threads_take(mfsdp__threads_transport *t, int32_t peer) {
  mfsdp__threads_pair *pair = mfsdp__threads_pair_of(t->world, peer, t->slot->rank);
  mfsdp__threads_xfer *sent;
  if (__atomic_load_n(&pair->head, __ATOMIC_ACQUIRE) == NULL) return NULL;
  mfsdp_mutex_lock(&t->slot->mutex);
  sent = pair->head;
  if (sent != NULL && !mfsdp__threads_arrived(t, sent)) sent = NULL;
  if (sent != NULL) {
    __atomic_store_n(&pair->head, sent->next, __ATOMIC_RELEASE);
    --pair->receive_count;
  }
  mfsdp_mutex_unlock(&t->slot->mutex);
  return sent;
}

/* After this the sender may reuse its buffer and its record. */
MFSDP_API void mfsdp__threads_release(mfsdp__threads_slot *sender) {
  mfsdp_mutex_lock(&sender->mutex);
  --sender->send_count;
  mfsdp__threads_notify_locked(sender, sender->waits_for == MFSDP__THREADS_ITS_SENDS &&
                                           sender->send_count == 0);
  mfsdp_mutex_unlock(&sender->mutex);
}

MFSDP_API mfsdp_status mfsdp__threads_match(const mfsdp__threads_xfer *sent,
                                            const mfsdp__threads_xfer *received, mfsdp_error *why) {
  const mfsdp__threads_batch *from = sent->batch, *to = received->batch;
  const int sender = (int)received->x.peer, receiver = (int)sent->x.peer;
  if (sent->x.nbytes != received->x.nbytes)
    return MFSDP_ERROR_SET(
        why, MFSDP_E_MISMATCH, -1,
        "rank %d sends %zu bytes in \"%s\", rank %d receives %zu bytes in \"%s\"", sender,
        sent->x.nbytes, from->label, receiver, received->x.nbytes, to->label);
  if (from->check != 0 && to->check != 0 && from->check != to->check)
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                           "rank %d sends in \"%s\" (check %016llx), rank %d receives in \"%s\" "
                           "(check %016llx): not the same operation",
                           sender, from->label, (unsigned long long)from->check, receiver,
                           to->label, (unsigned long long)to->check);
  if (sent->x.nbytes > 0) memcpy(received->x.dst, sent->x.src, sent->x.nbytes);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__threads_end(mfsdp__threads_transport *t, mfsdp_error *why) {
  why->rank = t->slot->rank;
  mfsdp_threads_world_poison(t->world, why);
}

/* Serves every receive whose send is there. *progress = 1 if there was one. */
MFSDP_API mfsdp_status mfsdp__threads_serve(mfsdp__threads_batch *batch, int *progress,
                                            mfsdp_error *why) {
  mfsdp__threads_transport *t = batch->transport;
  int32_t i = 0;
  t->next_arrival_us = MFSDP_DEADLINE_NEVER_US;
  while (i < t->sender_count) {
    const int32_t peer = t->senders[i];
    mfsdp__threads_xfer *sent;
    while (t->receives[peer] != NULL && (sent = mfsdp__threads_take(t, peer)) != NULL) {
      const mfsdp_status status = mfsdp__threads_match(sent, t->receives[peer], why);
      if (status != MFSDP_OK) mfsdp__threads_end(t, why); /* before the sender thinks it is done */
      mfsdp__threads_release(&t->world->slots[peer]);
      if (status != MFSDP_OK) return status;
      t->receives[peer] = t->receives[peer]->next;
      *progress = 1;
    }
    if (t->receives[peer] == NULL)
      t->senders[i] = t->senders[--t->sender_count];
    else
      ++i;
  }
  return MFSDP_OK;
}

/* ---- waits that fail ---- */

/* Does rank a, in its running batch, wait for rank b to send (1) or to receive (2), 3: for both, or
 * to come to a native collective (4)? */
MFSDP_API int mfsdp__threads_waits_for(mfsdp_threads_world *world, int32_t a, int32_t b) {
  const mfsdp__threads_pair *incoming = mfsdp__threads_pair_of(world, b, a);
  const mfsdp__threads_pair *outgoing = mfsdp__threads_pair_of(world, a, b);
  int waits = 0;
  mfsdp_mutex_lock(&world->slots[a].mutex);
  if (incoming->receive_count > 0 && incoming->head == NULL) waits |= 1;
  mfsdp_mutex_unlock(&world->slots[a].mutex);
  mfsdp_mutex_lock(&world->slots[b].mutex);
  if (outgoing->head != NULL) waits |= 2;
  mfsdp_mutex_unlock(&world->slots[b].mutex);
  return mfsdp__threads_native_lacks(world, a, b) ? 4 : waits;
}

MFSDP_API const char *mfsdp__threads_waits_text(int waits) {
  return waits == 4   ? "take part"
         : waits == 3 ? "send and to receive"
         : waits == 1 ? "send"
                      : "receive";
}

/* E_PEER if a rank that this one waits for has left. */
MFSDP_API mfsdp_status mfsdp__threads_check_left(const mfsdp__threads_batch *batch,
                                                 mfsdp_error *why) {
  mfsdp_threads_world *world = batch->transport->world;
  const int32_t rank = batch->transport->slot->rank;
  int32_t r;
  if (__atomic_load_n(&world->left_count, __ATOMIC_ACQUIRE) == 0) return MFSDP_OK;
  for (r = 0; r < world->desc.world; ++r) {
    int waits;
    if (mfsdp__threads_role(&world->slots[r].transport_role) != MFSDP__THREADS_LEFT) continue;
    waits = mfsdp__threads_waits_for(world, rank, r);
    if (waits != 0)
      return MFSDP_ERROR_SET(
          why, MFSDP_E_PEER, r, "%s: rank %d waits for rank %d to %s, but rank %d has left",
          batch->label, (int)rank, (int)r, mfsdp__threads_waits_text(waits), (int)r);
  }
  return MFSDP_OK;
}

/* Follows who waits for whom from this rank to the ranks that are in no transfer at all: in a ring
 * the silent neighbour is often not the culprit. */
MFSDP_API void mfsdp__threads_find_culprits(mfsdp__threads_transport *t, mfsdp_error *why) {
  mfsdp_threads_world *world = t->world;
  int32_t suspect_count = 1, r;
  t->suspects[0] = t->slot->rank;
  memset(t->visited, 0, (size_t)world->desc.world);
  t->visited[t->slot->rank] = 1;
  while (suspect_count > 0) {
    const int32_t suspect = t->suspects[--suspect_count];
    for (r = 0; r < world->desc.world; ++r) {
      int in_batch;
      if (t->visited[r] || mfsdp__threads_waits_for(world, suspect, r) == 0) continue;
      t->visited[r] = 1;
      mfsdp_mutex_lock(&world->slots[r].mutex);
      in_batch = world->slots[r].in_batch;
      mfsdp_mutex_unlock(&world->slots[r].mutex);
      if (in_batch) {
        t->suspects[suspect_count++] = r;
        continue;
      }
      mfsdp__threads_append(why->message, sizeof(why->message), "; rank %d %s", (int)r,
                            mfsdp__threads_whereabouts(world, r));
      if (why->culprit < 0) why->culprit = r;
    }
  }
  if (why->culprit < 0)
    mfsdp__threads_append(
        why->message, sizeof(why->message),
        "; they are in transfers themselves: the ranks disagree about the order of "
        "transfers, or %s for longer than the deadline",
        world->has_links ? "the artificial links carry a message" : "copy");
}

MFSDP_API mfsdp_status mfsdp__threads_explain(const mfsdp__threads_batch *batch, int64_t waited_us,
                                              mfsdp_error *why) {
  mfsdp__threads_transport *t = batch->transport;
  const char *separator = " for ";
  int32_t r;
  (void)MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, -1, "%s: rank %d waited %lld ms", batch->label,
                        (int)t->slot->rank, (long long)(waited_us / 1000));
  for (r = 0; r < t->world->desc.world; ++r) {
    const int waits = mfsdp__threads_waits_for(t->world, t->slot->rank, r);
    if (waits == 0) continue;
    mfsdp__threads_append(why->message, sizeof(why->message), "%srank %d to %s", separator, (int)r,
                          mfsdp__threads_waits_text(waits));
    separator = ", ";
  }
  mfsdp__threads_find_culprits(t, why);
  return why->status;
}

/* Sends of this rank that nobody has taken yet; with `withdraw` they are taken back. */
MFSDP_API int32_t mfsdp__threads_untaken(mfsdp__threads_transport *t, int withdraw) {
  mfsdp_threads_world *world = t->world;
  int32_t r, count = 0;
  for (r = 0; r < world->desc.world; ++r) {
    mfsdp__threads_pair *pair = mfsdp__threads_pair_of(world, t->slot->rank, r);
    const mfsdp__threads_xfer *xfer;
    if (r == t->slot->rank) continue;
    mfsdp_mutex_lock(&world->slots[r].mutex);
    for (xfer = pair->head; xfer != NULL; xfer = xfer->next)
      ++count;
    if (withdraw) {
      __atomic_store_n(&pair->head, (mfsdp__threads_xfer *)NULL, __ATOMIC_RELEASE);
      pair->tail = NULL;
    }
    mfsdp_mutex_unlock(&world->slots[r].mutex);
  }
  return count;
}

MFSDP_API int32_t mfsdp__threads_send_count(mfsdp__threads_slot *slot) {
  int32_t count;
  mfsdp_mutex_lock(&slot->mutex);
  count = slot->send_count;
  mfsdp_mutex_unlock(&slot->mutex);
  return count;
}

MFSDP_API int64_t mfsdp__threads_deadline(int64_t since_us, int64_t timeout_us) {
  return timeout_us > INT64_MAX - since_us ? MFSDP_DEADLINE_NEVER_US : since_us + timeout_us;
}

/* Until the batch is complete, or failed. */
MFSDP_API mfsdp_status mfsdp__threads_batch_progress(mfsdp__threads_batch *batch,
                                                     mfsdp_error *why) {
  mfsdp__threads_transport *t = batch->transport;
  mfsdp__threads_slot *slot = t->slot;
  int64_t since_us = mfsdp_clock_us();
  int32_t last_send_count = INT32_MAX;
  for (;;) {
    const uint32_t seen = mfsdp__threads_events(slot);
    int progress = 0;
    int32_t send_count;
    int64_t deadline_us;
    MFSDP_TRY(mfsdp__threads_serve(batch, &progress, why));
    send_count = mfsdp__threads_send_count(slot);
    if (mfsdp__threads_poisoned(t->world)) return MFSDP_E_POISONED;
    if (t->sender_count == 0 && send_count == 0) return MFSDP_OK;
    if (progress || send_count < last_send_count) since_us = mfsdp_clock_us();
    last_send_count = send_count;
    MFSDP_TRY(mfsdp__threads_check_left(batch, why));
    deadline_us = mfsdp__threads_deadline(since_us, t->world->desc.deadline_us);
    if (mfsdp__threads_wait(
            slot, t->sender_count > 0 ? MFSDP__THREADS_A_POST : MFSDP__THREADS_ITS_SENDS, seen,
            deadline_us < t->next_arrival_us ? deadline_us : t->next_arrival_us))
      continue;
    if (t->next_arrival_us < deadline_us) continue;
    if (mfsdp__threads_send_count(slot) > mfsdp__threads_untaken(t, 0))
      since_us = mfsdp_clock_us(); /* someone is reading from us: that is progress */
    else
      return mfsdp__threads_explain(batch, mfsdp_clock_us() - since_us, why);
  }
}

/* After a failure: nothing of this batch stays in a mailbox, and nobody reads its buffers. */
MFSDP_API void mfsdp__threads_batch_withdraw(mfsdp__threads_transport *t) {
  mfsdp__threads_slot *slot = t->slot;
  const int32_t withdrawn = mfsdp__threads_untaken(t, 1);
  int32_t r;
  mfsdp_mutex_lock(&slot->mutex);
  for (r = 0; r < t->world->desc.world; ++r)
    mfsdp__threads_pair_of(t->world, r, slot->rank)->receive_count = 0;
  slot->send_count -= withdrawn;
  slot->waits_for = MFSDP__THREADS_ITS_SENDS;
  while (slot->send_count > 0) /* a copy that has begun ends by itself: no deadline */
    (void)mfsdp_cond_wait_until(&slot->cond, &slot->mutex, MFSDP_DEADLINE_NEVER_US);
  slot->waits_for = MFSDP__THREADS_NOTHING;
  mfsdp_mutex_unlock(&slot->mutex);
}

MFSDP_API void mfsdp__threads_batch_state(mfsdp__threads_batch *batch, int32_t state) {
  mfsdp__threads_transport *t = batch->transport;
  mfsdp_mutex_lock(&t->ring_mutex);
  batch->state = state;
  mfsdp_mutex_unlock(&t->ring_mutex);
}

/* What a batch of transfers does. */
MFSDP_API mfsdp_status mfsdp__threads_batch_move(mfsdp__threads_batch *batch, mfsdp_error *why) {
  int32_t i;
  for (i = 0; i < batch->xfer_count; ++i)
    if (batch->xfers[i].x.is_send) mfsdp__threads_post(batch, &batch->xfers[i]);
  return mfsdp__threads_batch_progress(batch, why);
}

/* The task of a batch. */
MFSDP_API mfsdp_status mfsdp__threads_batch_run(void *argument, mfsdp_error *error) {
  mfsdp__threads_batch *batch = (mfsdp__threads_batch *)argument;
  mfsdp__threads_transport *t = batch->transport;
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status;
  mfsdp__threads_batch_state(batch, MFSDP__THREADS_RUNNING);
  status = mfsdp__threads_batch_open(batch, &why);
  if (status != MFSDP_OK) {
    mfsdp__threads_end(t, &why); /* the other batch is not ours to close */
  } else {
    status = batch->move(batch, &why);
    if (status != MFSDP_OK && status != MFSDP_E_POISONED) mfsdp__threads_end(t, &why);
    if (status != MFSDP_OK) {
      mfsdp__threads_batch_withdraw(t);
      mfsdp__threads_native_withdraw(t->slot);
    }
    mfsdp_mutex_lock(&t->slot->mutex);
    t->slot->in_batch = 0;
    mfsdp_mutex_unlock(&t->slot->mutex);
  }
  mfsdp__threads_batch_state(batch, MFSDP__THREADS_FREE);
  if (status == MFSDP_OK) return MFSDP_OK;
  status = mfsdp__threads_first_error(t->world, &why);
  if (error != NULL) *error = why;
  return status;
}

/* ---- native collectives ---- */

/* All others are to be waited for, the next rank first. */
MFSDP_API void mfsdp__threads_native_expect(mfsdp__threads_transport *t) {
  const int32_t world = t->world->desc.world;
  t->sender_count = 0;
  while (t->sender_count < world - 1) {
    t->senders[t->sender_count] = (t->slot->rank + 1 + t->sender_count) % world;
    ++t->sender_count;
  }
}

/* Meets those who have come: a gather takes their parts, a reduction notes where their buffers are. */
MFSDP_API mfsdp_status mfsdp__threads_native_meet(mfsdp__threads_batch *batch, uint64_t number,
                                                  int *progress, mfsdp_error *why) {
  mfsdp__threads_transport *t = batch->transport;
  int32_t i = 0;
  while (i < t->sender_count) {
    const int32_t peer = t->senders[i];
    mfsdp__threads_slot *other = &t->world->slots[peer];
    mfsdp__threads_native seen;
    mfsdp_status status;
    if (!mfsdp__threads_native_hold(other, number, &seen)) {
      ++i;
      continue;
    }
    status = mfsdp__threads_native_match(&batch->native, t->slot->rank, peer, &seen, why);
    if (status == MFSDP_OK && batch->native.kind == MFSDP_NATIVE_GATHER)
      mfsdp__threads_native_copy(&batch->native, peer, seen.full);
    t->fulls[peer] = seen.full;
    mfsdp__threads_native_release(other);
    if (status != MFSDP_OK) return status;
    t->senders[i] = t->senders[--t->sender_count];
    *progress = 1;
  }
  return MFSDP_OK;
}

MFSDP_API void mfsdp__threads_native_see_done(mfsdp__threads_transport *t, uint64_t number) {
  int32_t i = 0;
  while (i < t->sender_count)
    if (mfsdp__threads_native_is_done(&t->world->slots[t->senders[i]], number))
      t->senders[i] = t->senders[--t->sender_count];
    else
      ++i;
}

/* Until all others have come (met 0), or have what they need (met 1): then they are copying or
 * adding, which ends by itself, so that the deadline is for the first. */
MFSDP_API mfsdp_status mfsdp__threads_native_wait(mfsdp__threads_batch *batch, uint64_t number,
                                                  int met, mfsdp_error *why) {
  mfsdp__threads_transport *t = batch->transport;
  int64_t since_us = mfsdp_clock_us();
  mfsdp__threads_native_expect(t);
  for (;;) {
    const uint32_t seen = mfsdp__threads_events(t->slot);
    int progress = 0;
    if (met)
      mfsdp__threads_native_see_done(t, number);
    else
      MFSDP_TRY(mfsdp__threads_native_meet(batch, number, &progress, why));
    if (mfsdp__threads_poisoned(t->world)) return MFSDP_E_POISONED;
    if (t->sender_count == 0) return MFSDP_OK;
    if (progress) since_us = mfsdp_clock_us();
    MFSDP_TRY(mfsdp__threads_check_left(batch, why));
    if (mfsdp__threads_wait(t->slot, MFSDP__THREADS_THE_OTHERS, seen,
                            mfsdp__threads_deadline(since_us, t->world->desc.deadline_us)))
      continue;
    if (!met) return mfsdp__threads_explain(batch, mfsdp_clock_us() - since_us, why);
    since_us = mfsdp_clock_us();
  }
}

/* REDUCE, when all have come: none of them takes its buffer away meanwhile. */
MFSDP_API mfsdp_status mfsdp__threads_native_add(mfsdp__threads_batch *batch, uint64_t number) {
  mfsdp__threads_transport *t = batch->transport;
  const int32_t world = t->world->desc.world, rank = t->slot->rank;
  mfsdp__threads_native seen;
  int32_t held, r;
  t->fulls[rank] = (const unsigned char *)batch->native.src;
  for (held = 0; held < world; ++held)
    if (held != rank && !mfsdp__threads_native_hold(&t->world->slots[held], number, &seen)) break;
  if (held == world) mfsdp__threads_native_reduce(&batch->native, rank, t->fulls, t->terms, world);
  for (r = 0; r < held; ++r)
    if (r != rank) mfsdp__threads_native_release(&t->world->slots[r]);
  return held == world ? MFSDP_OK : MFSDP_E_POISONED; /* nobody withdraws without an error */
}

/* What a native collective does. */
MFSDP_API mfsdp_status mfsdp__threads_native_move(mfsdp__threads_batch *batch, mfsdp_error *why) {
  mfsdp__threads_transport *t = batch->transport;
  const uint64_t number = mfsdp__threads_native_begin(t->slot, &batch->native);
  mfsdp__threads_native_tell(t->slot);
  MFSDP_TRY(mfsdp__threads_native_wait(batch, number, 0, why));
  if (batch->native.kind == MFSDP_NATIVE_REDUCE)
    MFSDP_TRY(mfsdp__threads_native_add(batch, number));
  mfsdp__threads_native_done(t->slot);
  mfsdp__threads_native_tell(t->slot);
  return mfsdp__threads_native_wait(batch, number, 1, why);
}

/* ---- the table ---- */

MFSDP_API int mfsdp__threads_batch_runs(mfsdp__threads_transport *t,
                                        const mfsdp__threads_batch *batch) {
  int32_t state;
  mfsdp_mutex_lock(&t->ring_mutex);
  state = batch->state;
  mfsdp_mutex_unlock(&t->ring_mutex);
  return state == MFSDP__THREADS_RUNNING;
}

/* Until the queue is done with a batch. A queue that failed skips its batches and says so only to
 * those who wait for one of its events: its own error comes out at once, and is the first of this
 * world. While the batch runs, the time-out is left to it: it counts from its last transfer, and knows
 * whom it waits for; this rank is the culprit only if its queue does not come to the batch. */
MFSDP_API mfsdp_status mfsdp__threads_batch_wait(mfsdp__threads_transport *t,
                                                 mfsdp_context *context,
                                                 const mfsdp__threads_batch *batch,
                                                 const char *label) {
  const int64_t deadline_us = t->world->desc.deadline_us;
  mfsdp_context quiet = *context; /* a wait that goes on is no error, and not logged */
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status;
  quiet.desc.log = NULL;
  do
    status = t->backend->ops->event_wait(t->backend->self, &quiet, batch->submitted, deadline_us);
  while (status == MFSDP_E_TIMEOUT && mfsdp__threads_batch_runs(t, batch));
  if (status == MFSDP_OK) return MFSDP_OK;
  if (status != MFSDP_E_TIMEOUT)
    why = *mfsdp_context_error(&quiet);
  else
    (void)MFSDP_ERROR_SET(
        &why, MFSDP_E_TIMEOUT, t->slot->rank,
        "%s: the queue of rank %d has run none of %d submitted batches for %lld ms", label,
        (int)t->slot->rank, (int)t->world->desc.batch_count, (long long)(deadline_us / 1000));
  mfsdp__threads_end(t, &why);
  (void)mfsdp__threads_first_error(t->world, &why);
  return mfsdp_context_take_error(context, &why);
}

/* The next record of the ring, marked QUEUED; waits until the queue has run it. */
MFSDP_API mfsdp_status mfsdp__threads_batch_acquire(mfsdp__threads_transport *t,
                                                    mfsdp_context *context, const char *label,
                                                    mfsdp__threads_batch **out) {
  mfsdp__threads_batch *batch = &t->batches[t->next_batch];
  MFSDP_TRY(mfsdp__threads_batch_wait(t, context, batch, label));
  mfsdp__threads_batch_state(batch, MFSDP__THREADS_QUEUED);
  t->next_batch = (t->next_batch + 1) % t->world->desc.batch_count;
  *out = batch;
  return MFSDP_OK;
}

/* Hands a filled record to the queue. */
MFSDP_API mfsdp_status mfsdp__threads_enqueue(mfsdp__threads_transport *t, mfsdp_context *context,
                                              mfsdp_queue *queue, mfsdp__threads_batch *record) {
  mfsdp_error why;
  const mfsdp_status status =
      t->backend->ops->queue_call(t->backend->self, queue, mfsdp__threads_batch_run, record);
  if (status == MFSDP_OK)
    return t->backend->ops->event_record(t->backend->self, queue, record->submitted);
  mfsdp__threads_batch_state(record, MFSDP__THREADS_FREE);
  if (!mfsdp__threads_poisoned(t->world))
    return MFSDP_FAIL(context, status, "%s: the queue of rank %d refused the batch", record->label,
                      (int)t->slot->rank);
  (void)mfsdp__threads_first_error(t->world, &why);
  return mfsdp_context_take_error(context, &why);
}

MFSDP_API mfsdp_status mfsdp__threads_submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                                             const mfsdp_batch *batch) {
  mfsdp__threads_transport *t = (mfsdp__threads_transport *)self;
  const char *label = batch->label != NULL ? batch->label : "batch";
  mfsdp__threads_batch *record = NULL;
  int32_t i;
  if (batch->xfer_count > t->xfer_capacity)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the batch has %d transfers, needs 0 to %d (see reserve)", label,
                      (int)batch->xfer_count, (int)t->xfer_capacity);
  if (mfsdp__threads_poisoned(t->world)) return mfsdp__threads_refuse(t->world, context, label);
  MFSDP_TRY(mfsdp__threads_batch_acquire(t, context, label, &record));
  record->xfer_count = batch->xfer_count;
  record->check = batch->check;
  record->label = label;
  record->move = mfsdp__threads_batch_move;
  for (i = 0; i < batch->xfer_count; ++i) {
    record->xfers[i].x = batch->xfers[i];
    record->xfers[i].batch = record;
  }
  return mfsdp__threads_enqueue(t, context, queue, record);
}

MFSDP_API mfsdp_status mfsdp__threads_native_submit(void *self, mfsdp_context *context,
                                                    mfsdp_queue *queue,
                                                    const mfsdp_native_args *args) {
  mfsdp__threads_transport *t = (mfsdp__threads_transport *)self;
  mfsdp__threads_batch *record = NULL;
  if (mfsdp__threads_poisoned(t->world))
    return mfsdp__threads_refuse(t->world, context, args->label);
  MFSDP_TRY(mfsdp__threads_batch_acquire(t, context, args->label, &record));
  record->xfer_count = 0;
  record->check = args->check;
  record->label = args->label;
  record->move = mfsdp__threads_native_move;
  record->native = *args;
  return mfsdp__threads_enqueue(t, context, queue, record);
}

/* Any parts, but E_UNSUPPORTED in a world with artificial links, which native collectives pass by. */
MFSDP_API mfsdp_status mfsdp__threads_native_prepare(void *self, mfsdp_context *context,
                                                     const mfsdp_native_args *args, int32_t *form) {
  const mfsdp__threads_transport *t = (const mfsdp__threads_transport *)self;
  if (t->world->has_links)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: native collectives of threads copy past this world's artificial links; "
                      "use another algorithm, or no latency_us and bytes_per_us",
                      args->label);
  *form = mfsdp__threads_native_form(args);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__threads_poison(void *self, const mfsdp_error *why) {
  const mfsdp__threads_transport *t = (const mfsdp__threads_transport *)self;
  mfsdp_error own = mfsdp_error_none();
  if (why != NULL) own = *why;
  if (own.rank < 0) own.rank = t->slot->rank; /* it is this rank that has noticed */
  mfsdp_threads_world_poison(t->world, why != NULL ? &own : NULL);
}

/* The first error itself, with its status and culprit. */
MFSDP_API mfsdp_status mfsdp__threads_poll(void *self, mfsdp_context *context) {
  const mfsdp__threads_transport *t = (const mfsdp__threads_transport *)self;
  mfsdp_error why;
  if (!mfsdp__threads_poisoned(t->world)) return MFSDP_OK;
  (void)mfsdp__threads_first_error(t->world, &why);
  return mfsdp_context_take_error(context, &why);
}

/* How many batches of the ring are in `state`. */
MFSDP_API int32_t mfsdp__threads_count_batches(mfsdp__threads_transport *t, int32_t state) {
  int32_t i, count = 0;
  if (t->batches == NULL) return 0;
  mfsdp_mutex_lock(&t->ring_mutex);
  for (i = 0; i < t->world->desc.batch_count; ++i)
    if (t->batches[i].state == state) ++count;
  mfsdp_mutex_unlock(&t->ring_mutex);
  return count;
}

/* Never shrinks. E_STATE while a batch is queued or running, E_ARGUMENT, E_OVERFLOW, E_MEMORY (then
 * the capacity is the old one). */
MFSDP_API mfsdp_status mfsdp__threads_reserve(void *self, mfsdp_context *context,
                                              int32_t max_xfer_count) {
  mfsdp__threads_transport *t = (mfsdp__threads_transport *)self;
  const size_t batch_count = (size_t)t->world->desc.batch_count;
  size_t xfer_count, i;
  void *table;
  if (max_xfer_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads transport: reserve of %d transfers, needs at least 0",
                      (int)max_xfer_count);
  if (max_xfer_count <= t->xfer_capacity) return MFSDP_OK;
  if (mfsdp__threads_count_batches(t, MFSDP__THREADS_FREE) != t->world->desc.batch_count)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "threads transport: reserve while batches of rank %d are queued or running",
                      (int)t->slot->rank);
  if (!mfsdp_size_mul(batch_count, (size_t)max_xfer_count, &xfer_count))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                      "threads transport: %zu batches of %d transfers overflow size_t", batch_count,
                      (int)max_xfer_count);
  MFSDP_TRY(mfsdp_table_alloc(context, xfer_count, sizeof(mfsdp__threads_xfer),
                              "threads transport: transfers", &table));
  mfsdp_table_free(context, t->xfers, batch_count * (size_t)t->xfer_capacity,
                   sizeof(mfsdp__threads_xfer));
  t->xfers = (mfsdp__threads_xfer *)table;
  t->xfer_capacity = max_xfer_count;
  for (i = 0; i < batch_count; ++i)
    t->batches[i].xfers = t->xfers + i * (size_t)max_xfer_count;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__threads_transport_free(mfsdp_context *context, mfsdp__threads_transport *t) {
  const size_t count = (size_t)t->world->desc.world;
  const size_t batch_count = (size_t)t->world->desc.batch_count;
  size_t i;
  if (t->ring_mutex_ready) mfsdp_mutex_destroy(&t->ring_mutex);
  mfsdp_table_free(context, (void *)t->fulls, count, sizeof(*t->fulls));
  mfsdp_table_free(context, (void *)t->terms, count, sizeof(*t->terms));
  mfsdp_table_free(context, t->visited, count, sizeof(uint8_t));
  mfsdp_table_free(context, t->suspects, count, sizeof(int32_t));
  mfsdp_table_free(context, t->senders, count, sizeof(int32_t));
  mfsdp_table_free(context, t->last, count, sizeof(mfsdp__threads_xfer *));
  mfsdp_table_free(context, t->receives, count, sizeof(mfsdp__threads_xfer *));
  mfsdp_table_free(context, t->xfers, batch_count * (size_t)t->xfer_capacity,
                   sizeof(mfsdp__threads_xfer));
  for (i = 0; i < batch_count && t->batches != NULL; ++i)
    if (t->batches[i].submitted != NULL)
      t->backend->ops->event_destroy(t->backend->self, context, t->batches[i].submitted);
  mfsdp_table_free(context, t->batches, batch_count, sizeof(mfsdp__threads_batch));
  mfsdp_table_free(context, t, 1, sizeof(*t));
}

/* Leaves the world. E_STATE while a batch runs; while one is queued, unless the world is poisoned.
 */
MFSDP_API mfsdp_status mfsdp__threads_destroy(void *self, mfsdp_context *context) {
  mfsdp__threads_transport *t = (mfsdp__threads_transport *)self;
  mfsdp_threads_world *world;
  mfsdp__threads_slot *slot;
  if (t == NULL) return MFSDP_OK;
  world = t->world;
  slot = t->slot;
  if (mfsdp__threads_count_batches(t, MFSDP__THREADS_RUNNING) > 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE, "threads transport: a batch of rank %d is running",
                      (int)slot->rank);
  if (!mfsdp__threads_poisoned(world) && mfsdp__threads_count_batches(t, MFSDP__THREADS_QUEUED) > 0)
    return MFSDP_FAIL(
        context, MFSDP_E_STATE,
        "threads transport: a batch of rank %d is queued and has not run; wait for its "
        "queue, or poison the transport if the queue failed",
        (int)slot->rank);
  mfsdp__threads_transport_free(context, t);
  mfsdp__threads_leave(world, &slot->transport_role);
  return MFSDP_OK;
}

MFSDP_API const mfsdp_transport_ops *mfsdp__threads_transport_ops(void) {
  static const mfsdp_transport_ops ops = {sizeof(mfsdp_transport_ops),
                                          "threads",
                                          mfsdp__threads_submit,
                                          mfsdp__threads_reserve,
                                          mfsdp__threads_poll,
                                          mfsdp__threads_poison,
                                          mfsdp__threads_destroy,
                                          NULL,
                                          NULL,
                                          mfsdp__threads_native_submit,
                                          mfsdp__threads_native_prepare,
                                          NULL};
  return &ops;
}

MFSDP_API mfsdp_status mfsdp__threads_transport_alloc(mfsdp_context *context,
                                                      mfsdp__threads_transport *t) {
  const size_t count = (size_t)t->world->desc.world;
  const size_t batch_count = (size_t)t->world->desc.batch_count;
  mfsdp_status status;
  size_t i;
  void *table;
  MFSDP_TRY(mfsdp_table_alloc(context, batch_count, sizeof(mfsdp__threads_batch),
                              "threads transport: batches", &table));
  t->batches = (mfsdp__threads_batch *)table;
  for (i = 0; i < batch_count; ++i)
    t->batches[i].transport = t;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(mfsdp__threads_xfer *),
                              "threads transport: receives", &table));
  t->receives = (mfsdp__threads_xfer **)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(mfsdp__threads_xfer *),
                              "threads transport: last receives", &table));
  t->last = (mfsdp__threads_xfer **)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(int32_t), "threads transport: senders", &table));
  t->senders = (int32_t *)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(int32_t), "threads transport: suspects", &table));
  t->suspects = (int32_t *)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(uint8_t), "threads transport: visited", &table));
  t->visited = (uint8_t *)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(*t->terms), "threads transport: terms", &table));
  t->terms = (const void **)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(*t->fulls), "threads transport: buffers", &table));
  t->fulls = (const unsigned char **)table;
  status = mfsdp_mutex_init(&t->ring_mutex);
  t->ring_mutex_ready = status == MFSDP_OK;
  if (status != MFSDP_OK)
    return MFSDP_FAIL(context, status, "threads transport: the system refused a mutex");
  for (i = 0; i < batch_count; ++i)
    MFSDP_TRY(t->backend->ops->event_create(t->backend->self, context, &t->batches[i].submitted));
  return mfsdp__threads_reserve(t, context, t->world->desc.batch_xfer_count);
}

/* Batches are tasks that copy between the ranks' buffers and wait for each other. */
MFSDP_API mfsdp_status mfsdp__threads_check_backend(mfsdp_context *context,
                                                    const mfsdp_backend *backend) {
  const uint32_t needed = MFSDP_BACKEND_HOST_MEMORY | MFSDP_BACKEND_TASKS_MAY_WAIT;
  MFSDP_TRY(mfsdp_backend_check(context, backend));
  if ((backend->traits & needed) == needed) return MFSDP_OK;
  return MFSDP_FAIL(
      context, MFSDP_E_UNSUPPORTED,
      "threads transport: backend %s has memory that tasks cannot touch, or tasks that "
      "may not wait (mfsdp_backend.traits); ranks that are threads and share a GPU use "
      "mfsdp_device_transport_create (cuda/transport_device.h)",
      backend->ops->name ? backend->ops->name : "(unnamed)");
}

/*
 * Joins `world` as `rank`: the calling thread's own context and backend. Peers may send before this
 * rank has joined; they wait for it. Memory comes from `context`; *out holds the table, to be ended
 * with ops->destroy(self, context), after which peers that wait for this rank get E_PEER. COMPLETE.
 * E_ARGUMENT; E_UNSUPPORTED for a backend without the traits HOST_MEMORY and TASKS_MAY_WAIT (a GPU's);
 * E_STATE if this rank has joined before (names it); E_POISONED; E_OVERFLOW; E_MEMORY or E_IO, after
 * which the rank may try again.
 */
MFSDP_API mfsdp_status mfsdp_threads_transport_create(mfsdp_context *context,
                                                      mfsdp_threads_world *world, int32_t rank,
                                                      const mfsdp_backend *backend,
                                                      mfsdp_transport *out) {
  mfsdp__threads_slot *slot;
  mfsdp__threads_transport *t;
  mfsdp_status status;
  void *table;
  if (world == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "threads transport: %s is NULL",
                      world == NULL ? "world" : "out");
  memset(out, 0, sizeof(*out));
  if (rank < 0 || rank >= world->desc.world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "threads transport: rank is %d, needs 0 to %d",
                      (int)rank, (int)world->desc.world - 1);
  MFSDP_TRY(mfsdp__threads_check_backend(context, backend));
  slot = &world->slots[rank];
  MFSDP_TRY(mfsdp__threads_join(world, context, rank, &slot->transport_role, "threads transport"));
  status = mfsdp_table_alloc(context, 1, sizeof(*t), "threads transport", &table);
  if (status == MFSDP_OK) {
    t = (mfsdp__threads_transport *)table;
    t->world = world;
    t->slot = slot;
    t->backend = backend;
    status = mfsdp__threads_transport_alloc(context, t);
    if (status != MFSDP_OK) mfsdp__threads_transport_free(context, t);
  }
  if (status != MFSDP_OK) {
    __atomic_store_n(&slot->transport_role, (int32_t)MFSDP__THREADS_ABSENT, __ATOMIC_RELEASE);
    return status;
  }
  out->struct_nbytes = sizeof(*out);
  out->ops = mfsdp__threads_transport_ops();
  out->self = table;
  out->backend = backend;
  out->rank = rank;
  out->world = world->desc.world;
  out->node_of_rank = world->node_of_rank;
  out->deadline_us = world->desc.deadline_us;
  return MFSDP_OK;
}

#endif /* MFSDP_HOST_TRANSPORT_THREADS_H */
