/* SPDX-License-Identifier: MIT */
/*
 * nccl_queue.h - groups of NCCL on a queue: when they may start, what comes behind them, and the
 * comparison of check words. Part of transport_nccl.h. By who has the transport's turn.
 *
 * A group stands behind the last group of any communicator of this device, whatever their streams:
 * two kernels of NCCL at once may take each other's place on the device and wait for ever (fault
 * b4). Behind it a small kernel marks the queue as failed if the communicator was aborted, so that
 * nothing computes with what has not arrived. A communicator that does not block returns before it
 * has put anything into the stream: it is polled until it has, so that the queue's later work comes
 * behind it. Link flags: -lnccl -lcudart.
 */
#ifndef MFSDP_CUDA_NCCL_QUEUE_H
#define MFSDP_CUDA_NCCL_QUEUE_H

#include "nccl_state.h"

/* ---- waiting with the turn ---- */

typedef struct mfsdp__nccl_wait {
  int64_t start_us, deadline_us, sleep_us;
} mfsdp__nccl_wait;

MFSDP_API mfsdp__nccl_wait mfsdp__nccl_wait_begin(const mfsdp__nccl_transport *t) {
  mfsdp__nccl_wait wait;
  wait.start_us = mfsdp_clock_us();
  wait.deadline_us = mfsdp_clock_deadline_us(t->desc.deadline_us);
  wait.sleep_us = MFSDP__NCCL_FIRST_SLEEP_US;
  return wait;
}

/* Sleeps a little. E_POISONED if another thread has found an error, E_TIMEOUT after the deadline.
 * */
MFSDP_API mfsdp_status mfsdp__nccl_wait_turn(mfsdp__nccl_transport *t, mfsdp_context *context,
                                             mfsdp__nccl_wait *wait, const char *label,
                                             const uint8_t *peers) {
  mfsdp_error why;
  if (mfsdp__nccl_first_error(t, &why) != MFSDP_OK) return mfsdp__nccl_refuse(context, &why, label);
  if (mfsdp_clock_us() >= wait->deadline_us) {
    (void)mfsdp__nccl_time_out(t, label, mfsdp_clock_us() - wait->start_us, peers, 1, &why);
    return mfsdp_context_take_error(context, &why);
  }
  mfsdp_clock_sleep_until(mfsdp_clock_us() + wait->sleep_us);
  if (wait->sleep_us < MFSDP__NCCL_LAST_SLEEP_US) wait->sleep_us *= 2;
  return MFSDP_OK;
}

/* What `call` returned, once it is known. */
MFSDP_API mfsdp_status mfsdp__nccl_settle(mfsdp__nccl_transport *t, mfsdp_context *context,
                                          ncclResult_t result, const char *label, const char *call,
                                          const uint8_t *peers) {
  mfsdp__nccl_wait wait = mfsdp__nccl_wait_begin(t);
  while (result == ncclInProgress) {
    ncclResult_t state = ncclSuccess;
    result = ncclCommGetAsyncError(t->comm, &state);
    if (result == ncclSuccess) result = state;
    if (result == ncclInProgress) MFSDP_TRY(mfsdp__nccl_wait_turn(t, context, &wait, label, peers));
  }
  return mfsdp__nccl_check(t, context, result, label, call);
}

/* ---- order ---- */

MFSDP_API mfsdp_status mfsdp__nccl_order_begin(mfsdp__nccl_transport *t, mfsdp_context *context,
                                               cudaStream_t stream) {
  if (t->cuda->nccl_stream == NULL || t->cuda->nccl_stream == stream) return MFSDP_OK;
  return mfsdp__cuda_check(context, cudaStreamWaitEvent(stream, t->cuda->nccl_order, 0),
                           "cudaStreamWaitEvent");
}

MFSDP_API mfsdp_status mfsdp__nccl_order_end(mfsdp__nccl_transport *t, mfsdp_context *context,
                                             cudaStream_t stream) {
  MFSDP_TRY(
      mfsdp__cuda_check(context, cudaEventRecord(t->cuda->nccl_order, stream), "cudaEventRecord"));
  t->cuda->nccl_stream = stream;
  return MFSDP_OK;
}

/* ---- one group ---- */

/* Of the last group, also when it has ended. */
MFSDP_API mfsdp__nccl_track *mfsdp__nccl_newest(const mfsdp__nccl_transport *t) {
  const int32_t place = t->first_track + t->track_count + MFSDP__NCCL_TRACKED - 1;
  return &t->tracks[place % MFSDP__NCCL_TRACKED];
}

/* A place in the ring; if there is none, the group joins the newest one. */
MFSDP_API mfsdp_status mfsdp__nccl_group_begin(mfsdp__nccl_transport *t, mfsdp_context *context,
                                               cudaStream_t stream, const char *label,
                                               mfsdp__nccl_track **out) {
  mfsdp__nccl_track *track;
  (void)mfsdp__nccl_oldest(t);
  if (t->track_count == MFSDP__NCCL_TRACKED) {
    *out = mfsdp__nccl_newest(t);
    return MFSDP_OK;
  }
  track = &t->tracks[(t->first_track + t->track_count) % MFSDP__NCCL_TRACKED];
  MFSDP_TRY(mfsdp__cuda_check(context, cudaEventRecord(track->begin, stream), "cudaEventRecord"));
  track->label = label;
  track->since_us = 0;
  memset(track->peers, 0, (size_t)t->world);
  *out = track;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__nccl_group_end(mfsdp__nccl_transport *t, mfsdp_context *context,
                                             mfsdp__cuda_queue *queue, mfsdp__nccl_track *track) {
  MFSDP_TRY(mfsdp__cuda_check(
      context, (cudaError_t)t->cuda->kernels->pull(mfsdp__cuda_lane(queue), t->note, 1), "pull"));
  MFSDP_TRY(
      mfsdp__cuda_check(context, cudaEventRecord(track->end, queue->stream), "cudaEventRecord"));
  if (t->track_count < MFSDP__NCCL_TRACKED) ++t->track_count;
  return MFSDP_OK;
}

/* What goes into the group between its start and its end; notes the peers. */
typedef ncclResult_t (*mfsdp__nccl_fill)(mfsdp__nccl_transport *t, cudaStream_t stream, void *work,
                                         uint8_t *peers);

MFSDP_API mfsdp_status mfsdp__nccl_group(mfsdp__nccl_transport *t, mfsdp_context *context,
                                         mfsdp__cuda_queue *queue, const char *label,
                                         mfsdp__nccl_fill fill, void *work) {
  mfsdp__nccl_track *track;
  ncclResult_t filled, ended;
  MFSDP_TRY(mfsdp__nccl_group_begin(t, context, queue->stream, label, &track));
  filled = ncclGroupStart();
  MFSDP_TRY(mfsdp__nccl_check(t, context, filled, label, "ncclGroupStart"));
  filled = fill(t, queue->stream, work, track->peers);
  ended =
      ncclGroupEnd(); /* always: a group that stays open would swallow the thread's next calls */
  if (filled != ncclInProgress)
    MFSDP_TRY(mfsdp__nccl_check(t, context, filled, label, "NCCL refused an operation"));
  MFSDP_TRY(mfsdp__nccl_settle(t, context, ended, label, "ncclGroupEnd", track->peers));
  return mfsdp__nccl_group_end(t, context, queue, track);
}

/* ---- transfers ---- */

/* Bytes [first, first + chunk) of every transfer. Nothing is sent for what has none of them: both
 * sides know the same length, and skip it alike (fault b2). */
typedef struct mfsdp__nccl_round {
  const mfsdp_batch *batch;
  size_t first;
} mfsdp__nccl_round;

MFSDP_API ncclResult_t mfsdp__nccl_fill_round(mfsdp__nccl_transport *t, cudaStream_t stream,
                                              void *work, uint8_t *peers) {
  const mfsdp__nccl_round *round = (const mfsdp__nccl_round *)work;
  int32_t i;
  for (i = 0; i < round->batch->xfer_count; ++i) {
    const mfsdp_xfer *x = &round->batch->xfers[i];
    size_t nbytes;
    ncclResult_t result;
    if (x->nbytes <= round->first) continue;
    nbytes = x->nbytes - round->first;
    if (nbytes > t->desc.chunk_nbytes) nbytes = t->desc.chunk_nbytes;
    peers[x->peer] |= x->is_send ? MFSDP__NCCL_IT_RECEIVES : MFSDP__NCCL_IT_SENDS;
    result = x->is_send ? ncclSend((const unsigned char *)x->src + round->first, nbytes, ncclUint8,
                                   x->peer, t->comm, stream)
                        : ncclRecv((unsigned char *)x->dst + round->first, nbytes, ncclUint8,
                                   x->peer, t->comm, stream);
    if (result != ncclSuccess && result != ncclInProgress) return result;
  }
  return ncclSuccess;
}

MFSDP_API mfsdp_status mfsdp__nccl_rounds(mfsdp__nccl_transport *t, mfsdp_context *context,
                                          mfsdp__cuda_queue *queue, const mfsdp_batch *batch,
                                          const char *label) {
  mfsdp__nccl_round round;
  size_t longest = 0;
  int32_t i;
  for (i = 0; i < batch->xfer_count; ++i)
    if (batch->xfers[i].nbytes > longest) longest = batch->xfers[i].nbytes;
  round.batch = batch;
  for (round.first = 0; round.first < longest;) {
    MFSDP_TRY(mfsdp__nccl_group(t, context, queue, label, mfsdp__nccl_fill_round, &round));
    if (longest - round.first <= t->desc.chunk_nbytes) break;
    round.first += t->desc.chunk_nbytes;
  }
  return MFSDP_OK;
}

/* ---- heads ---- */

/* Heads that go to and come from the peers of a table of transfers. */
typedef struct mfsdp__nccl_heads {
  const mfsdp_xfer *xfers;
  int32_t count;
} mfsdp__nccl_heads;

/* Along the transfers first, then against them: in each direction both sides know the order. */
MFSDP_API ncclResult_t mfsdp__nccl_fill_heads(mfsdp__nccl_transport *t, cudaStream_t stream,
                                              void *work, uint8_t *peers) {
  const mfsdp__nccl_heads *heads = (const mfsdp__nccl_heads *)work;
  int32_t i, against;
  for (against = 0; against < 2; ++against)
    for (i = 0; i < heads->count; ++i) {
      const mfsdp_xfer *x = &heads->xfers[i];
      const int sends = x->is_send != against;
      const ncclResult_t result =
          sends ? ncclSend(&t->wire[i], sizeof(*t->wire), ncclUint8, x->peer, t->comm, stream)
                : ncclRecv(&t->wire[t->head_capacity + i], sizeof(*t->wire), ncclUint8, x->peer,
                           t->comm, stream);
      peers[x->peer] |= MFSDP__NCCL_IT_RECEIVES | MFSDP__NCCL_IT_SENDS;
      if (result != ncclSuccess && result != ncclInProgress) return result;
    }
  return ncclSuccess;
}

MFSDP_API void mfsdp__nccl_head_fill(mfsdp__nccl_head *head, uint64_t check, uint64_t nbytes,
                                     int32_t origin, const char *label) {
  memset(head, 0, sizeof(*head));
  head->check = check;
  head->nbytes = nbytes;
  head->origin = origin;
  (void)snprintf(head->label, sizeof(head->label), "%s", label);
}

/* Sends our heads and waits for theirs, which then stand behind ours. */
MFSDP_API mfsdp_status mfsdp__nccl_swap_heads(mfsdp__nccl_transport *t, mfsdp_context *context,
                                              mfsdp__cuda_queue *queue, const mfsdp_xfer *xfers,
                                              int32_t count, const char *label) {
  const size_t nbytes = (size_t)count * sizeof(*t->heads);
  const int32_t at = t->head_capacity;
  mfsdp__nccl_wait wait = mfsdp__nccl_wait_begin(t);
  mfsdp__nccl_heads heads;
  heads.xfers = xfers;
  heads.count = count;
  MFSDP_TRY(mfsdp__cuda_check(
      context, cudaMemcpyAsync(t->wire, t->heads, nbytes, cudaMemcpyHostToDevice, queue->stream),
      "cudaMemcpyAsync"));
  MFSDP_TRY(mfsdp__nccl_group(t, context, queue, label, mfsdp__nccl_fill_heads, &heads));
  MFSDP_TRY(mfsdp__cuda_check(
      context,
      cudaMemcpyAsync(t->heads + at, t->wire + at, nbytes, cudaMemcpyDeviceToHost, queue->stream),
      "cudaMemcpyAsync"));
  MFSDP_TRY(
      mfsdp__cuda_check(context, cudaEventRecord(t->heads_came, queue->stream), "cudaEventRecord"));
  for (;;) {
    const cudaError_t came = mfsdp__cuda_event_state(t->heads_came);
    mfsdp_error why;
    if (came == cudaSuccess) return MFSDP_OK;
    if (came != cudaErrorNotReady) return mfsdp__cuda_fail(context, came, "cudaEventQuery");
    if (mfsdp__nccl_look(t, 1, &why) != MFSDP_OK) return mfsdp_context_take_error(context, &why);
    MFSDP_TRY(mfsdp__nccl_wait_turn(t, context, &wait, label, mfsdp__nccl_newest(t)->peers));
  }
}

/* Compares the check words of a batch before anything of it moves. */
MFSDP_API mfsdp_status mfsdp__nccl_compare(mfsdp__nccl_transport *t, mfsdp_context *context,
                                           mfsdp__cuda_queue *queue, const mfsdp_batch *batch,
                                           const char *label) {
  int32_t i;
  for (i = 0; i < batch->xfer_count; ++i)
    mfsdp__nccl_head_fill(&t->heads[i], batch->check, batch->xfers[i].nbytes, t->rank, label);
  MFSDP_TRY(mfsdp__nccl_swap_heads(t, context, queue, batch->xfers, batch->xfer_count, label));
  for (i = 0; i < batch->xfer_count; ++i) {
    const mfsdp_xfer *x = &batch->xfers[i];
    const mfsdp__nccl_head *own = &t->heads[i], *other = &t->heads[t->head_capacity + i];
    const mfsdp__nccl_head *from = x->is_send ? own : other, *to = x->is_send ? other : own;
    if (own->check == other->check && own->nbytes == other->nbytes) continue;
    return MFSDP_FAIL(
        context, MFSDP_E_MISMATCH,
        "rank %d sends %llu bytes in \"%.44s\" (check %016llx), rank %d receives %llu bytes in "
        "\"%.44s\" (check %016llx): not the same operation",
        (int)(x->is_send ? t->rank : x->peer), (unsigned long long)from->nbytes, from->label,
        (unsigned long long)from->check, (int)(x->is_send ? x->peer : t->rank),
        (unsigned long long)to->nbytes, to->label, (unsigned long long)to->check);
  }
  return MFSDP_OK;
}

/* The same between all ranks: theirs come in rank order, without this rank's own. */
MFSDP_API mfsdp_status mfsdp__nccl_swap_with_all(mfsdp__nccl_transport *t, mfsdp_context *context,
                                                 mfsdp__cuda_queue *queue,
                                                 const mfsdp__nccl_head *own, const char *label) {
  int32_t i;
  for (i = 0; i < t->world - 1; ++i) {
    memset(&t->all[i], 0, sizeof(t->all[i]));
    t->all[i].peer = i < t->rank ? i : i + 1;
    t->all[i].is_send = t->all[i].peer > t->rank;
    t->heads[i] = *own;
  }
  return mfsdp__nccl_swap_heads(t, context, queue, t->all, t->world - 1, label);
}

#endif /* MFSDP_CUDA_NCCL_QUEUE_H */
