/* SPDX-License-Identifier: MIT */
/*
 * transport_mpi.h - the transport of MPI processes.
 *
 *   // world: mpi_world.h. In each process:
 *   mfsdp_transport transport;
 *   MFSDP_TRY(mfsdp_mpi_transport_create(context, world, backend, &transport));
 *   MFSDP_TRY(mfsdp_transport_submit(context, &transport, queue, &batch));     // ENQUEUED
 *   ...
 *   MFSDP_TRY(transport.ops->destroy(transport.self, context));
 *
 * A batch posts all its receives and sends with MPI_Irecv and MPI_Isend and polls them on the
 * queue's thread, so batches that send to each other never deadlock. Messages carry one tag for
 * ever; transfers longer than the world's message_nbytes are cut the same way on both sides. With a
 * check word (debug_check) every transfer is preceded by a message of its check word and length.
 * Native collectives are MPI's non-blocking ones (native_mpi.h), polled in the same way.
 *
 * Failure: an error of MPI, a length or check word that differs, a peer that has left, a wait
 * without progress for the deadline, or `poison` end the world (mpi_world.h). Receives that MPI does
 * not give back after a failure stay in its hands: destroy then says E_STATE and frees nothing, and
 * their buffers must not be freed either; the process leaves by MPI_Abort.
 * Does not: offer split (wrap a communicator of the group instead) or
 * registration; choose algorithms; count traffic.
 * Link flags: -lmpi -lpthread. POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_MPI_TRANSPORT_MPI_H
#define MFSDP_MPI_TRANSPORT_MPI_H

#include "control_mpi.h"
#include "mpi_world.h"
#include "native_mpi.h"

enum { MFSDP__MPI_FREE = 0, MFSDP__MPI_QUEUED, MFSDP__MPI_RUNNING };

/* What a request moves. */
typedef struct mfsdp__mpi_part {
  int32_t xfer, is_head;
  int nbytes;
} mfsdp__mpi_part;

struct mfsdp__mpi_batch;

/* What a batch is made of: transfers, or one native collective. */
typedef struct mfsdp__mpi_work {
  mfsdp_status (*post)(struct mfsdp__mpi_batch *batch, mfsdp_error *why);
  mfsdp_status (*poll)(struct mfsdp__mpi_batch *batch, int *ended, mfsdp_error *why);
  int (*waits_for)(const struct mfsdp__mpi_batch *batch, int32_t peer); /* MFSDP__MPI_TO_... */
  void (*cancel)(struct mfsdp__mpi_batch *batch);    /* with the lock, as the next */
  int (*still_open)(struct mfsdp__mpi_batch *batch); /* requests */
} mfsdp__mpi_work;

/* What a peer is waited for to do: bits. */
enum { MFSDP__MPI_TO_SEND = 1, MFSDP__MPI_TO_RECEIVE = 2, MFSDP__MPI_TO_TAKE_PART = 4 };

/* A batch from submit until it has run. */
typedef struct mfsdp__mpi_batch {
  struct mfsdp__mpi_transport *transport;
  mfsdp_xfer *xfers;         /* xfer_capacity */
  mfsdp__mpi_head *heads;    /* xfer_capacity: what is sent, or received */
  int32_t xfer_count, state; /* state: with the transport's mutex */
  mfsdp_event *submitted;    /* passes when the queue has run the batch, or skipped it */
  uint64_t check;
  const char *label;
  MPI_Request *requests; /* request_capacity, as the next three */
  mfsdp__mpi_part *parts;
  MPI_Status *statuses;
  int *indices;
  int request_capacity, request_count, open_count;
  const mfsdp__mpi_work *work;
  mfsdp__mpi_native native;
} mfsdp__mpi_batch;

typedef struct mfsdp__mpi_transport {
  mfsdp_mpi_world *world;
  const mfsdp_backend *backend;
  mfsdp_mutex mutex;
  int32_t mutex_ready, busy; /* busy: with the mutex */
  mfsdp__mpi_batch *batches; /* a ring of desc.batch_count */
  int32_t xfer_capacity, next_batch;
  int32_t abandoned; /* requests of a failed batch that MPI still holds; atomic */
  uint8_t *alive;    /* world: scratch of the time-out's explanation */
  mfsdp__mpi_native_tables tables;
} mfsdp__mpi_transport;

/* ---- the requests of a batch ---- */

/* Requests that a transfer needs: its head, and its parts (one for a transfer of nothing). */
MFSDP_API size_t mfsdp__mpi_part_count(const mfsdp_mpi_world *world, const mfsdp_xfer *x,
                                       uint64_t check) {
  const size_t limit = world->desc.message_nbytes;
  return (x->nbytes == 0 ? 1 : (x->nbytes - 1) / limit + 1) + (check != 0);
}

MFSDP_API int mfsdp__mpi_post_part(mfsdp__mpi_batch *batch, int32_t xfer, void *data, size_t nbytes,
                                   int32_t is_head) {
  const mfsdp_xfer *x = &batch->xfers[xfer];
  const MPI_Comm comm = batch->transport->world->data;
  const int i = batch->request_count++;
  batch->parts[i].xfer = xfer;
  batch->parts[i].is_head = is_head;
  batch->parts[i].nbytes = (int)nbytes;
  batch->requests[i] = MPI_REQUEST_NULL;
  ++batch->open_count;
  return x->is_send ? MPI_Isend(data, (int)nbytes, MPI_BYTE, x->peer, MFSDP__MPI_TAG_DATA, comm,
                                &batch->requests[i])
                    : MPI_Irecv(data, (int)nbytes, MPI_BYTE, x->peer, MFSDP__MPI_TAG_DATA, comm,
                                &batch->requests[i]);
}

MFSDP_API int mfsdp__mpi_post_xfer(mfsdp__mpi_batch *batch, int32_t xfer) {
  const mfsdp_xfer *x = &batch->xfers[xfer];
  const size_t limit = batch->transport->world->desc.message_nbytes;
  /* MPI-3 takes what it sends by a pointer that is not const in some implementations. */
  unsigned char *data = (unsigned char *)(x->is_send ? (uintptr_t)x->src : (uintptr_t)x->dst);
  size_t done = 0;
  int code = MPI_SUCCESS;
  if (batch->check != 0) {
    batch->heads[xfer].check = batch->check;
    batch->heads[xfer].nbytes = x->nbytes;
    code = mfsdp__mpi_post_part(batch, xfer, &batch->heads[xfer], sizeof(mfsdp__mpi_head), 1);
  }
  do {
    const size_t nbytes = x->nbytes - done < limit ? x->nbytes - done : limit;
    if (code == MPI_SUCCESS)
      code = mfsdp__mpi_post_part(batch, xfer, data == NULL ? NULL : data + done, nbytes, 0);
    done += nbytes;
  } while (done < x->nbytes && code == MPI_SUCCESS);
  return code;
}

/* Receives first, so that what arrives has a place to go. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_post(mfsdp__mpi_batch *batch, mfsdp_error *why) {
  int32_t i, sends, culprit = -1;
  int code = MPI_SUCCESS;
  batch->request_count = batch->open_count = 0;
  mfsdp__mpi_lock(batch->transport->world);
  for (sends = 0; sends < 2; ++sends)
    for (i = 0; i < batch->xfer_count && code == MPI_SUCCESS; ++i) {
      if (batch->xfers[i].is_send != sends) continue;
      code = mfsdp__mpi_post_xfer(batch, i);
      culprit = batch->xfers[i].peer;
    }
  mfsdp__mpi_unlock(batch->transport->world);
  return code == MPI_SUCCESS ? MFSDP_OK : mfsdp__mpi_explain(code, culprit, batch->label, why);
}

/* Looks at a request that has ended. */
MFSDP_API mfsdp_status mfsdp__mpi_part_check(const mfsdp__mpi_batch *batch,
                                             const mfsdp__mpi_part *part, MPI_Status *status,
                                             mfsdp_error *why) {
  const mfsdp_xfer *x = &batch->xfers[part->xfer];
  const mfsdp__mpi_head *head = &batch->heads[part->xfer];
  const int rank = (int)batch->transport->world->rank;
  int nbytes = 0;
  if (x->is_send) return MFSDP_OK;
  (void)MPI_Get_count(status, MPI_BYTE, &nbytes);
  if (nbytes != part->nbytes)
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                           "%s: rank %d sends a message of %d bytes, rank %d receives %d",
                           batch->label, (int)x->peer, nbytes, rank, part->nbytes);
  if (part->is_head && (head->check != batch->check || head->nbytes != x->nbytes))
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                           "%s: rank %d sends %llu bytes of operation %016llx, rank %d receives "
                           "%zu of %016llx: not the same operation",
                           batch->label, (int)x->peer, (unsigned long long)head->nbytes,
                           (unsigned long long)head->check, rank, x->nbytes,
                           (unsigned long long)batch->check);
  return MFSDP_OK;
}

/* MPI's error of one request, in our words where we know better. */
MFSDP_API mfsdp_status mfsdp__mpi_part_failed(const mfsdp__mpi_batch *batch,
                                              const mfsdp__mpi_part *part, int code,
                                              mfsdp_error *why) {
  const int32_t peer = batch->xfers[part->xfer].peer;
  int error_class = MPI_ERR_OTHER;
  (void)MPI_Error_class(code, &error_class);
  if (error_class != MPI_ERR_TRUNCATE) return mfsdp__mpi_explain(code, peer, batch->label, why);
  return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                         "%s: rank %d sends a longer message than the %d bytes that rank %d "
                         "receives",
                         batch->label, (int)peer, part->nbytes, (int)batch->transport->world->rank);
}

/* One poll. *ended: how many requests did. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_poll(mfsdp__mpi_batch *batch, int *ended,
                                             mfsdp_error *why) {
  mfsdp_mpi_world *world = batch->transport->world;
  mfsdp_status status = MFSDP_OK;
  int count = 0, code, i;
  mfsdp__mpi_lock(world);
  code =
      MPI_Testsome(batch->request_count, batch->requests, &count, batch->indices, batch->statuses);
  mfsdp__mpi_unlock(world);
  *ended = count == MPI_UNDEFINED ? 0 : count;
  for (i = 0; i < *ended && status == MFSDP_OK; ++i) {
    const mfsdp__mpi_part *part = &batch->parts[batch->indices[i]];
    const int own = code == MPI_ERR_IN_STATUS ? batch->statuses[i].MPI_ERROR : MPI_SUCCESS;
    if (own != MPI_SUCCESS && own != MPI_ERR_PENDING)
      status = mfsdp__mpi_part_failed(batch, part, own, why);
    else
      status = mfsdp__mpi_part_check(batch, part, &batch->statuses[i], why);
  }
  batch->open_count -= *ended;
  if (status == MFSDP_OK && code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS)
    status = mfsdp__mpi_explain(code, -1, batch->label, why);
  return status;
}

MFSDP_API int mfsdp__mpi_batch_waits_for(const mfsdp__mpi_batch *batch, int32_t peer) {
  int i, waits = 0;
  for (i = 0; i < batch->request_count; ++i) {
    const mfsdp_xfer *x = &batch->xfers[batch->parts[i].xfer];
    if (x->peer == peer && batch->requests[i] != MPI_REQUEST_NULL)
      waits |= x->is_send ? MFSDP__MPI_TO_RECEIVE : MFSDP__MPI_TO_SEND;
  }
  return waits;
}

MFSDP_API void mfsdp__mpi_batch_cancel(mfsdp__mpi_batch *batch) {
  int i;
  for (i = 0; i < batch->request_count; ++i)
    if (batch->requests[i] != MPI_REQUEST_NULL && !batch->xfers[batch->parts[i].xfer].is_send)
      (void)MPI_Cancel(&batch->requests[i]);
}

MFSDP_API int mfsdp__mpi_batch_still_open(mfsdp__mpi_batch *batch) {
  int i, open = 0;
  for (i = 0; i < batch->request_count; ++i) {
    int flag = 1;
    if (batch->requests[i] != MPI_REQUEST_NULL)
      (void)MPI_Test(&batch->requests[i], &flag, MPI_STATUS_IGNORE);
    open += !flag;
  }
  return open;
}

MFSDP_API const mfsdp__mpi_work *mfsdp__mpi_transfers(void) {
  static const mfsdp__mpi_work work = {mfsdp__mpi_batch_post, mfsdp__mpi_batch_poll,
                                       mfsdp__mpi_batch_waits_for, mfsdp__mpi_batch_cancel,
                                       mfsdp__mpi_batch_still_open};
  return &work;
}

/* ---- a native collective as a batch ---- */

MFSDP_API mfsdp_status mfsdp__mpi_collective_post(mfsdp__mpi_batch *batch, mfsdp_error *why) {
  (void)why; /* polling posts */
  mfsdp__mpi_native_begin(&batch->native, batch->transport->world);
  batch->open_count = 1;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__mpi_collective_poll(mfsdp__mpi_batch *batch, int *ended,
                                                  mfsdp_error *why) {
  mfsdp__mpi_transport *t = batch->transport;
  MFSDP_TRY(mfsdp__mpi_native_poll(&batch->native, t->world, &t->tables, ended, why));
  batch->open_count = !mfsdp__mpi_native_ended(&batch->native);
  return MFSDP_OK;
}

MFSDP_API int mfsdp__mpi_collective_waits_for(const mfsdp__mpi_batch *batch, int32_t peer) {
  return mfsdp__mpi_native_waits_for(&batch->native, batch->transport->world, peer)
             ? MFSDP__MPI_TO_TAKE_PART
             : 0;
}

MFSDP_API void mfsdp__mpi_collective_cancel(mfsdp__mpi_batch *batch) {
  (void)batch; /* MPI cannot */
}

MFSDP_API int mfsdp__mpi_collective_still_open(mfsdp__mpi_batch *batch) {
  return mfsdp__mpi_native_still_open(&batch->native);
}

MFSDP_API const mfsdp__mpi_work *mfsdp__mpi_collective(void) {
  static const mfsdp__mpi_work work = {
      mfsdp__mpi_collective_post, mfsdp__mpi_collective_poll, mfsdp__mpi_collective_waits_for,
      mfsdp__mpi_collective_cancel, mfsdp__mpi_collective_still_open};
  return &work;
}

/* ---- waits that fail ---- */

MFSDP_API const char *mfsdp__mpi_waits_text(int waits) {
  return waits == MFSDP__MPI_TO_TAKE_PART ? "take part"
         : waits == MFSDP__MPI_TO_SEND    ? "send"
         : waits == MFSDP__MPI_TO_RECEIVE ? "receive"
                                          : "send and to receive";
}

/* E_PEER if a rank that this one waits for has left, and long enough ago. */
MFSDP_API mfsdp_status mfsdp__mpi_check_left(const mfsdp__mpi_batch *batch, mfsdp_error *why) {
  mfsdp_mpi_world *world = batch->transport->world;
  int32_t r;
  for (r = 0; r < world->world; ++r) {
    const int64_t left_us = mfsdp__mpi_left_us(world, r);
    int waits;
    if (left_us == 0 || mfsdp_clock_us() - left_us < MFSDP__MPI_LEFT_GRACE_US) continue;
    waits = batch->work->waits_for(batch, r);
    if (waits != 0)
      return MFSDP_ERROR_SET(
          why, MFSDP_E_PEER, r, "%s: rank %d waits for rank %d to %s, but rank %d has left",
          batch->label, (int)world->rank, (int)r, mfsdp__mpi_waits_text(waits), (int)r);
  }
  return MFSDP_OK;
}

/* Names the silent ranks that this one waits for (direct 1), or all others; the first is the
 * culprit. How many there were. */
MFSDP_API int mfsdp__mpi_name_silent(const mfsdp__mpi_batch *batch, int direct, mfsdp_error *why) {
  mfsdp__mpi_transport *t = batch->transport;
  int32_t r;
  int count = 0;
  for (r = 0; r < t->world->world; ++r) {
    if (t->alive[r] || (batch->work->waits_for(batch, r) != 0) != direct) continue;
    mfsdp__mpi_append(why->message, sizeof(why->message), "; rank %d does not answer", (int)r);
    if (why->culprit < 0) why->culprit = r;
    ++count;
  }
  return count;
}

/* In a ring the silent neighbour is often not the culprit: every rank that waits answers a probe, so
 * if all that this rank waits for answer, the silent ones behind them are named. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_explain(const mfsdp__mpi_batch *batch, int64_t waited_us,
                                                mfsdp_error *why) {
  mfsdp__mpi_transport *t = batch->transport;
  mfsdp_mpi_world *world = t->world;
  const char *separator = " for ";
  int32_t r;
  (void)MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, -1, "%s: rank %d waited %lld ms", batch->label,
                        (int)world->rank, (long long)(waited_us / 1000));
  for (r = 0; r < world->world; ++r) {
    const int waits = batch->work->waits_for(batch, r);
    if (waits == 0) continue;
    if (waits == MFSDP__MPI_TO_TAKE_PART) { /* all of them: nobody knows for whom */
      mfsdp__mpi_append(why->message, sizeof(why->message), " in a native collective");
      break;
    }
    mfsdp__mpi_append(why->message, sizeof(why->message), "%srank %d to %s", separator, (int)r,
                      mfsdp__mpi_waits_text(waits));
    separator = ", ";
  }
  mfsdp__mpi_probe(world, t->alive, MFSDP__MPI_PROBE_US);
  if (mfsdp__mpi_poisoned(world)) return MFSDP_E_POISONED; /* a peer has found out more */
  if (mfsdp__mpi_name_silent(batch, 1, why) == 0 && mfsdp__mpi_name_silent(batch, 0, why) == 0)
    mfsdp__mpi_append(why->message, sizeof(why->message),
                      "; all ranks answer: they disagree about the order of transfers, or the "
                      "network is slower than the deadline");
  return why->status;
}

/* Until the batch is complete, or failed. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_progress(mfsdp__mpi_batch *batch, mfsdp_error *why) {
  mfsdp_mpi_world *world = batch->transport->world;
  int64_t since_us = mfsdp_clock_us(), idle = 0;
  while (batch->open_count > 0) {
    int ended = 0;
    MFSDP_TRY(batch->work->poll(batch, &ended, why));
    if (mfsdp__mpi_poisoned(world)) return MFSDP_E_POISONED;
    if (ended > 0) {
      since_us = mfsdp_clock_us();
      idle = 0;
      continue;
    }
    mfsdp__mpi_pause(world, idle++);
    if (idle % 64 != 0) continue;
    MFSDP_TRY(mfsdp__mpi_check_left(batch, why));
    if (mfsdp_clock_us() - since_us >= world->desc.deadline_us)
      return mfsdp__mpi_batch_explain(batch, mfsdp_clock_us() - since_us, why);
  }
  return MFSDP_OK;
}

/* After a failure: receives are cancelled, and what MPI then gives back is given up to a tenth of a
 * second; the rest stays with it. */
MFSDP_API void mfsdp__mpi_batch_abandon(mfsdp__mpi_batch *batch) {
  mfsdp_mpi_world *world = batch->transport->world;
  const int64_t deadline_us = mfsdp_clock_us() + 100000;
  int open;
  mfsdp__mpi_lock(world);
  batch->work->cancel(batch);
  mfsdp__mpi_unlock(world);
  do {
    mfsdp__mpi_lock(world);
    open = batch->work->still_open(batch);
    mfsdp__mpi_unlock(world);
  } while (open > 0 && mfsdp_clock_us() < deadline_us);
  (void)__atomic_add_fetch(&batch->transport->abandoned, open, __ATOMIC_ACQ_REL);
}

/* ---- the life of a batch, on the queue's thread ---- */

MFSDP_API void mfsdp__mpi_batch_state(mfsdp__mpi_batch *batch, int32_t state) {
  mfsdp_mutex_lock(&batch->transport->mutex);
  batch->state = state;
  mfsdp_mutex_unlock(&batch->transport->mutex);
}

/* Claims the transport; E_STATE if another thread runs a batch, E_UNSUPPORTED if this thread may not
 * call MPI. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_open(mfsdp__mpi_batch *batch, mfsdp_error *why) {
  mfsdp__mpi_transport *t = batch->transport;
  int32_t busy;
  if (!mfsdp__mpi_thread_allowed(t->world)) {
    const char *reason = NULL;
    (void)mfsdp_mpi_world_threads(t->world, &reason);
    return MFSDP_ERROR_SET(why, MFSDP_E_UNSUPPORTED, t->world->rank,
                           "%s: the queue has a thread of its own, but %s", batch->label,
                           reason != NULL ? reason : "only one thread may call MPI");
  }
  mfsdp_mutex_lock(&t->mutex);
  busy = t->busy;
  t->busy = 1;
  mfsdp_mutex_unlock(&t->mutex);
  if (!busy) return MFSDP_OK;
  return MFSDP_ERROR_SET(why, MFSDP_E_STATE, t->world->rank,
                         "%s: rank %d runs another batch at the same time; a transport serves one "
                         "communication queue",
                         batch->label, (int)t->world->rank);
}

MFSDP_API mfsdp_status mfsdp__mpi_batch_move(mfsdp__mpi_batch *batch, mfsdp_error *why) {
  mfsdp__mpi_transport *t = batch->transport;
  mfsdp_status status = batch->work->post(batch, why);
  if (status == MFSDP_OK) status = mfsdp__mpi_batch_progress(batch, why);
  if (status != MFSDP_OK && status != MFSDP_E_POISONED) {
    why->rank = t->world->rank;
    mfsdp_mpi_world_poison(t->world, why);
  }
  if (status != MFSDP_OK) mfsdp__mpi_batch_abandon(batch);
  mfsdp_mutex_lock(&t->mutex);
  t->busy = 0;
  mfsdp_mutex_unlock(&t->mutex);
  return status;
}

/* The task of a batch. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_run(void *argument, mfsdp_error *error) {
  mfsdp__mpi_batch *batch = (mfsdp__mpi_batch *)argument;
  mfsdp_mpi_world *world = batch->transport->world;
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status;
  mfsdp__mpi_batch_state(batch, MFSDP__MPI_RUNNING);
  if (mfsdp__mpi_poisoned(world)) {
    status = MFSDP_E_POISONED;
  } else {
    status = mfsdp__mpi_batch_open(batch, &why);
    if (status != MFSDP_OK)
      mfsdp_mpi_world_poison(world, &why);
    else
      status = mfsdp__mpi_batch_move(batch, &why);
  }
  mfsdp__mpi_batch_state(batch, MFSDP__MPI_FREE);
  if (status == MFSDP_OK) return MFSDP_OK;
  status = mfsdp__mpi_first_error(world, &why);
  if (error != NULL) *error = why;
  return status;
}

/* ---- the table ---- */

MFSDP_API void mfsdp__mpi_batch_free(mfsdp_context *context, mfsdp__mpi_batch *batch) {
  const size_t count = (size_t)batch->request_capacity;
  mfsdp_table_free(context, batch->indices, count, sizeof(int));
  mfsdp_table_free(context, batch->statuses, count, sizeof(MPI_Status));
  mfsdp_table_free(context, batch->parts, count, sizeof(mfsdp__mpi_part));
  mfsdp_table_free(context, batch->requests, count, sizeof(MPI_Request));
  batch->indices = NULL;
  batch->statuses = NULL;
  batch->parts = NULL;
  batch->requests = NULL;
  batch->request_capacity = 0;
}

/* Room for `count` requests in a batch that is FREE; what it had is given back. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_reserve(mfsdp_context *context, mfsdp__mpi_batch *batch,
                                                size_t count) {
  void *table;
  if (count <= (size_t)batch->request_capacity) return MFSDP_OK;
  if (count > INT_MAX)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "mpi transport: %zu messages in one batch", count);
  mfsdp__mpi_batch_free(context, batch);
  batch->request_capacity = (int)count; /* what free gives back, allocated or not */
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(MPI_Request), "mpi transport: requests", &table));
  batch->requests = (MPI_Request *)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(mfsdp__mpi_part), "mpi transport: parts", &table));
  batch->parts = (mfsdp__mpi_part *)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(MPI_Status), "mpi transport: statuses", &table));
  batch->statuses = (MPI_Status *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(int), "mpi transport: indices", &table));
  batch->indices = (int *)table;
  return MFSDP_OK;
}

MFSDP_API int mfsdp__mpi_batch_runs(const mfsdp__mpi_batch *batch) {
  int32_t state;
  mfsdp_mutex_lock(&batch->transport->mutex);
  state = batch->state;
  mfsdp_mutex_unlock(&batch->transport->mutex);
  return state == MFSDP__MPI_RUNNING;
}

/* Until the queue is done with a batch. A queue that failed skips its batches: its own error comes
 * out, and is the first of this world. While the batch runs, the time-out is left to it: it counts from
 * its last message, and asks who does not answer. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_wait(mfsdp__mpi_transport *t, mfsdp_context *context,
                                             const mfsdp__mpi_batch *batch, const char *label) {
  const int64_t longest_us = INT64_MAX - (int64_t)2 * MFSDP__MPI_PROBE_US;
  const int64_t deadline_us =
      (t->world->desc.deadline_us < longest_us ? t->world->desc.deadline_us : longest_us) +
      MFSDP__MPI_PROBE_US + MFSDP__MPI_PROBE_US / 4;
  mfsdp_context quiet = *context; /* a wait that goes on is no error, and not logged */
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status;
  quiet.desc.log = NULL;
  do
    status = t->backend->ops->event_wait(t->backend->self, &quiet, batch->submitted, deadline_us);
  while (status == MFSDP_E_TIMEOUT && mfsdp__mpi_batch_runs(batch));
  if (status == MFSDP_OK) return MFSDP_OK;
  if (status != MFSDP_E_TIMEOUT)
    why = *mfsdp_context_error(&quiet);
  else
    (void)MFSDP_ERROR_SET(
        &why, MFSDP_E_TIMEOUT, t->world->rank,
        "%s: the queue of rank %d has run none of %d submitted batches for %lld ms", label,
        (int)t->world->rank, (int)t->world->desc.batch_count, (long long)(deadline_us / 1000));
  mfsdp_mpi_world_poison(t->world, &why);
  (void)mfsdp__mpi_first_error(t->world, &why);
  return mfsdp_context_take_error(context, &why);
}

/* The next record of the ring with room for the batch, marked QUEUED. */
MFSDP_API mfsdp_status mfsdp__mpi_batch_acquire(mfsdp__mpi_transport *t, mfsdp_context *context,
                                                const mfsdp_batch *wanted, const char *label,
                                                mfsdp__mpi_batch **out) {
  mfsdp__mpi_batch *batch = &t->batches[t->next_batch];
  size_t count = 0;
  int32_t i;
  MFSDP_TRY(mfsdp__mpi_batch_wait(t, context, batch, label));
  for (i = 0; i < wanted->xfer_count; ++i)
    if (!mfsdp_size_add(count, mfsdp__mpi_part_count(t->world, &wanted->xfers[i], wanted->check),
                        &count))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: the batch is too large", label);
  MFSDP_TRY(mfsdp__mpi_batch_reserve(context, batch, count));
  mfsdp__mpi_batch_state(batch, MFSDP__MPI_QUEUED);
  t->next_batch = (t->next_batch + 1) % t->world->desc.batch_count;
  *out = batch;
  return MFSDP_OK;
}

/* Hands a filled record to the queue. */
MFSDP_API mfsdp_status mfsdp__mpi_enqueue(mfsdp__mpi_transport *t, mfsdp_context *context,
                                          mfsdp_queue *queue, mfsdp__mpi_batch *record) {
  mfsdp_error why;
  const mfsdp_status status =
      t->backend->ops->queue_call(t->backend->self, queue, mfsdp__mpi_batch_run, record);
  if (status == MFSDP_OK)
    return t->backend->ops->event_record(t->backend->self, queue, record->submitted);
  mfsdp__mpi_batch_state(record, MFSDP__MPI_FREE);
  if (!mfsdp__mpi_poisoned(t->world))
    return MFSDP_FAIL(context, status, "%s: the queue of rank %d refused the batch", record->label,
                      (int)t->world->rank);
  (void)mfsdp__mpi_first_error(t->world, &why);
  return mfsdp_context_take_error(context, &why);
}

/* Allocates only for a batch with more messages than any before it in its place of the ring. */
MFSDP_API mfsdp_status mfsdp__mpi_submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                                         const mfsdp_batch *batch) {
  mfsdp__mpi_transport *t = (mfsdp__mpi_transport *)self;
  const char *label;
  mfsdp__mpi_batch *record = NULL;
  if (batch->struct_nbytes != sizeof(*batch))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "mpi transport: batch.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_batch_default)",
                      batch->struct_nbytes, sizeof(*batch));
  label = batch->label != NULL ? batch->label : "batch";
  if (batch->xfer_count < 0 || batch->xfer_count > t->xfer_capacity)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the batch has %d transfers, needs 0 to %d (see reserve)", label,
                      (int)batch->xfer_count, (int)t->xfer_capacity);
  if (mfsdp__mpi_poisoned(t->world)) return mfsdp__mpi_refuse(t->world, context, label);
  MFSDP_TRY(mfsdp__mpi_batch_acquire(t, context, batch, label, &record));
  record->xfer_count = batch->xfer_count;
  record->check = batch->check;
  record->label = label;
  record->work = mfsdp__mpi_transfers();
  if (batch->xfer_count > 0)
    memcpy(record->xfers, batch->xfers, (size_t)batch->xfer_count * sizeof(*batch->xfers));
  return mfsdp__mpi_enqueue(t, context, queue, record);
}

MFSDP_API mfsdp_status mfsdp__mpi_native_submit(void *self, mfsdp_context *context,
                                                mfsdp_queue *queue, const mfsdp_native_args *args) {
  mfsdp__mpi_transport *t = (mfsdp__mpi_transport *)self;
  mfsdp_batch none = mfsdp_batch_default();
  mfsdp__mpi_batch *record = NULL;
  if (mfsdp__mpi_poisoned(t->world)) return mfsdp__mpi_refuse(t->world, context, args->label);
  MFSDP_TRY(mfsdp__mpi_batch_acquire(t, context, &none, args->label, &record));
  record->xfer_count = 0;
  record->check = args->check;
  record->label = args->label;
  record->work = mfsdp__mpi_collective();
  record->native.args = *args;
  return mfsdp__mpi_enqueue(t, context, queue, record);
}

/* Any parts of elements that fit in a message. Sums of bf16 and f16 get an MPI operation. */
MFSDP_API mfsdp_status mfsdp__mpi_native_prepare(void *self, mfsdp_context *context,
                                                 const mfsdp_native_args *args, int32_t *form) {
  mfsdp__mpi_transport *t = (mfsdp__mpi_transport *)self;
  int code = MPI_SUCCESS;
  if (t->world->desc.message_nbytes < mfsdp_dtype_nbytes(args->dtype))
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "%s: native collectives over MPI move whole elements, of %zu bytes; the "
                      "world's message_nbytes is %zu",
                      args->label, mfsdp_dtype_nbytes(args->dtype), t->world->desc.message_nbytes);
  *form = mfsdp__mpi_native_form(args, t->world->desc.message_nbytes);
  if (args->kind != MFSDP_NATIVE_REDUCE) return MFSDP_OK;
  mfsdp__mpi_lock(t->world);
  code = mfsdp__mpi_native_make_op(&t->tables, args->dtype);
  mfsdp__mpi_unlock(t->world);
  return mfsdp__mpi_try(context, code, args->label);
}

MFSDP_API void mfsdp__mpi_poison(void *self, const mfsdp_error *why) {
  mfsdp_mpi_world_poison(((mfsdp__mpi_transport *)self)->world, why);
}

/* The first error itself, with its status and culprit. Also does what peers wait for (notices,
 * probes), where this thread may. */
MFSDP_API mfsdp_status mfsdp__mpi_poll(void *self, mfsdp_context *context) {
  mfsdp_mpi_world *world = ((mfsdp__mpi_transport *)self)->world;
  mfsdp_error why;
  if (mfsdp__mpi_thread_allowed(world)) mfsdp__mpi_serve(world);
  if (!mfsdp__mpi_poisoned(world)) return MFSDP_OK;
  (void)mfsdp__mpi_first_error(world, &why);
  return mfsdp_context_take_error(context, &why);
}

/* How many batches of the ring are in `state`. */
MFSDP_API int32_t mfsdp__mpi_count_batches(mfsdp__mpi_transport *t, int32_t state) {
  int32_t i, count = 0;
  if (t->batches == NULL || !t->mutex_ready) return 0;
  mfsdp_mutex_lock(&t->mutex);
  for (i = 0; i < t->world->desc.batch_count; ++i)
    count += t->batches[i].state == state;
  mfsdp_mutex_unlock(&t->mutex);
  return count;
}

MFSDP_API void mfsdp__mpi_free_xfers(mfsdp_context *context, mfsdp__mpi_transport *t) {
  const size_t count = (size_t)t->world->desc.batch_count * (size_t)t->xfer_capacity;
  mfsdp_table_free(context, t->batches[0].heads, count, sizeof(mfsdp__mpi_head));
  mfsdp_table_free(context, t->batches[0].xfers, count, sizeof(mfsdp_xfer));
}

/* Never shrinks. E_STATE while a batch is queued or running, E_ARGUMENT, E_OVERFLOW, E_MEMORY (then
 * the capacity is the old one). */
MFSDP_API mfsdp_status mfsdp__mpi_reserve(void *self, mfsdp_context *context,
                                          int32_t max_xfer_count) {
  mfsdp__mpi_transport *t = (mfsdp__mpi_transport *)self;
  const size_t batch_count = (size_t)t->world->desc.batch_count;
  size_t count, i;
  void *xfers, *heads;
  mfsdp_status status;
  if (max_xfer_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "mpi transport: reserve of %d transfers, needs at least 0",
                      (int)max_xfer_count);
  if (max_xfer_count <= t->xfer_capacity) return MFSDP_OK;
  if (mfsdp__mpi_count_batches(t, MFSDP__MPI_FREE) != t->world->desc.batch_count)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "mpi transport: reserve while batches of rank %d are queued or running",
                      (int)t->world->rank);
  if (!mfsdp_size_mul(batch_count, (size_t)max_xfer_count, &count))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                      "mpi transport: %zu batches of %d transfers overflow size_t", batch_count,
                      (int)max_xfer_count);
  for (i = 0; i < batch_count; ++i) /* a head and a message each; longer ones grow it at submit */
    MFSDP_TRY(mfsdp__mpi_batch_reserve(context, &t->batches[i], 2 * (size_t)max_xfer_count));
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(mfsdp_xfer), "mpi transport: transfers", &xfers));
  status =
      mfsdp_table_alloc(context, count, sizeof(mfsdp__mpi_head), "mpi transport: heads", &heads);
  if (status != MFSDP_OK) {
    mfsdp_table_free(context, xfers, count, sizeof(mfsdp_xfer));
    return status;
  }
  mfsdp__mpi_free_xfers(context, t);
  t->xfer_capacity = max_xfer_count;
  for (i = 0; i < batch_count; ++i) {
    t->batches[i].xfers = (mfsdp_xfer *)xfers + i * (size_t)max_xfer_count;
    t->batches[i].heads = (mfsdp__mpi_head *)heads + i * (size_t)max_xfer_count;
  }
  return MFSDP_OK;
}

MFSDP_API void mfsdp__mpi_transport_free(mfsdp_context *context, mfsdp__mpi_transport *t) {
  const size_t batch_count = (size_t)t->world->desc.batch_count;
  size_t i;
  if (t->mutex_ready) mfsdp_mutex_destroy(&t->mutex);
  for (i = 0; i < batch_count && t->batches != NULL; ++i) {
    mfsdp__mpi_batch_free(context, &t->batches[i]);
    if (t->batches[i].submitted != NULL)
      t->backend->ops->event_destroy(t->backend->self, context, t->batches[i].submitted);
  }
  if (t->batches != NULL) mfsdp__mpi_free_xfers(context, t);
  mfsdp_table_free(context, t->batches, batch_count, sizeof(mfsdp__mpi_batch));
  mfsdp__mpi_native_tables_free(context, &t->tables, t->world->world);
  mfsdp_table_free(context, t->alive, (size_t)t->world->world, sizeof(uint8_t));
  mfsdp_table_free(context, t, 1, sizeof(*t));
}

/* Leaves the world. E_STATE while a batch runs, while one is queued (unless the world is poisoned),
 * and while MPI still holds messages of a failed batch. */
MFSDP_API mfsdp_status mfsdp__mpi_destroy(void *self, mfsdp_context *context) {
  mfsdp__mpi_transport *t = (mfsdp__mpi_transport *)self;
  int32_t abandoned;
  if (t == NULL) return MFSDP_OK;
  if (mfsdp__mpi_count_batches(t, MFSDP__MPI_RUNNING) > 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE, "mpi transport: a batch of rank %d is running",
                      (int)t->world->rank);
  if (!mfsdp__mpi_poisoned(t->world) && mfsdp__mpi_count_batches(t, MFSDP__MPI_QUEUED) > 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "mpi transport: a batch of rank %d is queued and has not run; wait for its "
                      "queue, or poison the transport if the queue failed",
                      (int)t->world->rank);
  abandoned = __atomic_load_n(&t->abandoned, __ATOMIC_ACQUIRE);
  if (abandoned > 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "mpi transport: %d messages of a failed batch of rank %d are still in MPI's "
                      "hands; their buffers must stay until the process has left (MPI_Abort)",
                      (int)abandoned, (int)t->world->rank);
  if (!mfsdp__mpi_poisoned(t->world)) mfsdp__mpi_say_left(t->world);
  mfsdp__mpi_transport_free(context, t);
  return MFSDP_OK;
}

MFSDP_API const mfsdp_transport_ops *mfsdp__mpi_transport_ops(void) {
  static const mfsdp_transport_ops ops = {sizeof(mfsdp_transport_ops),
                                          "mpi",
                                          mfsdp__mpi_submit,
                                          mfsdp__mpi_reserve,
                                          mfsdp__mpi_poll,
                                          mfsdp__mpi_poison,
                                          mfsdp__mpi_destroy,
                                          NULL,
                                          NULL,
                                          mfsdp__mpi_native_submit,
                                          mfsdp__mpi_native_prepare,
                                          NULL};
  return &ops;
}

MFSDP_API mfsdp_status mfsdp__mpi_transport_fill(mfsdp_context *context, mfsdp__mpi_transport *t) {
  const size_t batch_count = (size_t)t->world->desc.batch_count;
  size_t i;
  void *table;
  MFSDP_TRY(mfsdp_table_alloc(context, batch_count, sizeof(mfsdp__mpi_batch),
                              "mpi transport: batches", &table));
  t->batches = (mfsdp__mpi_batch *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)t->world->world, sizeof(uint8_t),
                              "mpi transport: answers", &table));
  t->alive = (uint8_t *)table;
  MFSDP_TRY(mfsdp__mpi_native_tables_alloc(context, &t->tables, t->world->world));
  if (mfsdp_mutex_init(&t->mutex) != MFSDP_OK)
    return MFSDP_FAIL(context, MFSDP_E_MEMORY, "mpi transport: the system refused a mutex");
  t->mutex_ready = 1;
  for (i = 0; i < batch_count; ++i) {
    t->batches[i].transport = t;
    MFSDP_TRY(t->backend->ops->event_create(t->backend->self, context, &t->batches[i].submitted));
  }
  return mfsdp__mpi_reserve(t, context, t->world->desc.batch_xfer_count);
}

/*
 * The transport of `world` for this rank's context and backend, whose DEVICE memory MPI must be able
 * to read (host memory always; device memory if MPI is built for it). One for each world. *out holds
 * the table, to be ended with ops->destroy(self, context), after which peers that wait for this rank
 * get E_PEER. COMPLETE. E_ARGUMENT, E_MEMORY, E_OVERFLOW, E_POISONED, errors of the backend;
 * E_UNSUPPORTED for a backend without the trait TASKS_MAY_WAIT (a GPU's).
 */
MFSDP_API mfsdp_status mfsdp_mpi_transport_create(mfsdp_context *context, mfsdp_mpi_world *world,
                                                  const mfsdp_backend *backend,
                                                  mfsdp_transport *out) {
  mfsdp__mpi_transport *t;
  mfsdp_status status;
  void *table;
  if (world == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mpi transport: %s is NULL",
                      world == NULL ? "world" : "out");
  memset(out, 0, sizeof(*out));
  MFSDP_TRY(mfsdp_backend_check(context, backend));
  if ((backend->traits & MFSDP_BACKEND_TASKS_MAY_WAIT) == 0)
    return MFSDP_FAIL(
        context, MFSDP_E_UNSUPPORTED,
        "mpi transport: the tasks of backend %s may not wait for peers "
        "(mfsdp_backend.traits); use the host backend, or, for ranks that are threads "
        "and share a GPU, mfsdp_device_transport_create (cuda/transport_device.h)",
        backend->ops->name ? backend->ops->name : "(unnamed)");
  if (mfsdp__mpi_poisoned(world)) return mfsdp__mpi_refuse(world, context, "mpi transport");
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*t), "mpi transport", &table));
  t = (mfsdp__mpi_transport *)table;
  t->world = world;
  t->backend = backend;
  status = mfsdp__mpi_transport_fill(context, t);
  if (status != MFSDP_OK) {
    mfsdp__mpi_transport_free(context, t);
    return status;
  }
  out->struct_nbytes = sizeof(*out);
  out->ops = mfsdp__mpi_transport_ops();
  out->self = t;
  out->backend = backend;
  out->rank = world->rank;
  out->world = world->world;
  out->node_of_rank = world->node_of_rank;
  out->deadline_us = world->desc.deadline_us;
  return MFSDP_OK;
}

#endif /* MFSDP_MPI_TRANSPORT_MPI_H */
