/* SPDX-License-Identifier: MIT */
/*
 * nccl_state.h - what the parts of the NCCL transport share: its objects, the first error, who may
 * call NCCL, and the thread that watches and aborts. Part of transport_nccl.h.
 *
 * Calls of NCCL on one communicator must not run at once, and an abort must not meet any: whoever
 * calls holds the transport's turn. A submit keeps it for as long as it lasts, everybody else for
 * one call. Nobody holds the mutex while it calls CUDA or NCCL.
 *
 * ncclCommAbort waits until the streams have got rid of the communicator's kernels, which may stand
 * behind those of another communicator that is to be aborted as well. So each transport has a
 * thread of its own to wait there (fault b5). Link flags: -lnccl -lcudart -lpthread.
 */
#ifndef MFSDP_CUDA_NCCL_STATE_H
#define MFSDP_CUDA_NCCL_STATE_H

#include "../posix/thread.h"
#include "../transport.h"
#include "backend_cuda.h"

#include <nccl.h>

#if !defined(NCCL_VERSION_CODE) || NCCL_VERSION_CODE < 21903
#error "matrixfsdp: transport_nccl.h needs NCCL 2.19.3 or later"
#endif

typedef struct mfsdp_nccl_transport_desc {
  size_t struct_nbytes;
  int32_t rank, world; /* what the communicator must say; -1: whatever it says */
  int32_t
      nonblocking;   /* 1: the communicator was made with config.blocking = 0. NCCL cannot be asked,
                        * and cannot change it later */
  int32_t may_abort; /* 1: after a failure the communicator is aborted (ncclCommAbort), and is not
                        * yours any more; needs nonblocking */
  int64_t deadline_us; /* of every wait, counted from the last progress; positive */
  int64_t watchdog_us; /* a thread looks for errors and late peers so often; 0: nobody does but
                        * mfsdp_transport's poll */
  size_t chunk_nbytes; /* what a transfer moves in one group of NCCL; equal on all ranks, at least
                        * 256 */
  int32_t batch_xfer_count;    /* transfers of a batch until `reserve` asks for more; at least 1 */
  int32_t register_buffers;    /* 0: buffer_register does nothing */
  const int32_t *node_of_rank; /* world entries that outlive the transport; NULL: one node */
  int32_t *aborted; /* becomes 1 before destroy or a failing wrap returns if the communicator was
                     * aborted, and so is gone; NULL: nobody wants to know */
  const mfsdp_control *control; /* asked at a time-out who is still there, from the watching thread;
                                 * of the same ranks, outlives the transport; NULL: nobody is asked
                                 * */
} mfsdp_nccl_transport_desc;

/* Any rank and world, blocking, 60 s, a look every 20 ms, chunks of 64 MiB, batches of 64
 * transfers, buffers registered. */
MFSDP_API mfsdp_nccl_transport_desc mfsdp_nccl_transport_desc_default(void) {
  mfsdp_nccl_transport_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.rank = desc.world = -1;
  desc.deadline_us = 60000000;
  desc.watchdog_us = 20000;
  desc.chunk_nbytes = (size_t)64 << 20;
  desc.batch_xfer_count = 64;
  desc.register_buffers = 1;
  return desc;
}

/* Groups whose time is taken. */
#define MFSDP__NCCL_TRACKED 64
/* Sleeps between looks at what does not block, longer and longer. */
#define MFSDP__NCCL_FIRST_SLEEP_US 10
#define MFSDP__NCCL_LAST_SLEEP_US 500

/* What a peer of a group is to do for it: bits. */
enum { MFSDP__NCCL_IT_SENDS = 1, MFSDP__NCCL_IT_RECEIVES = 2 };

/* A group on its way. */
typedef struct mfsdp__nccl_track {
  cudaEvent_t begin, end;
  const char *label;
  int64_t since_us; /* it was first seen to run; 0: not yet */
  uint8_t *peers;   /* world: bits */
} mfsdp__nccl_track;

/* Ahead of a batch that carries a check word, from each side of a transfer to the other. */
#define MFSDP__NCCL_LABEL_NBYTES 44
typedef struct mfsdp__nccl_head {
  uint64_t check, nbytes;
  int32_t origin; /* the rank's number in the communicator that this one was split from */
  char label[MFSDP__NCCL_LABEL_NBYTES];
} mfsdp__nccl_head;

/* Whose turn it is to call NCCL. */
enum { MFSDP__NCCL_NOBODY = 0, MFSDP__NCCL_A_CALL, MFSDP__NCCL_A_BATCH };

typedef struct mfsdp__nccl_transport {
  mfsdp_nccl_transport_desc desc;
  mfsdp_cuda_backend *cuda;
  ncclComm_t comm; /* NULL: aborted */
  int32_t rank, world, owns_comm, abortable, registration_count;
  int32_t *node_of_rank;     /* ours, of a transport that was split off; else NULL */
  mfsdp_cuda_note *note;     /* failed: kernels behind our groups do nothing */
  mfsdp__nccl_track *tracks; /* a ring of MFSDP__NCCL_TRACKED */
  uint8_t *peers;            /* of all tracks */
  int32_t first_track, track_count;
  uint8_t *alive;  /* world: answers of the control plane */
  mfsdp_xfer *all; /* world - 1: every other rank, for heads */
  int32_t xfer_capacity, head_capacity;
  mfsdp__nccl_head *heads; /* PINNED: 2 x head_capacity, ours and theirs */
  mfsdp__nccl_head *wire;  /* DEVICE: the same */
  cudaEvent_t heads_came;

  mfsdp_mutex mutex; /* of everything below */
  mfsdp_cond cond;
  int32_t mutex_ready, cond_ready, thread_ready;
  int32_t turn;     /* MFSDP__NCCL_NOBODY ... */
  int32_t poisoned; /* `error` is set and will not change */
  int32_t stopping, thread_ended;
  mfsdp_error error;
  mfsdp_thread thread;
} mfsdp__nccl_transport;

/* ---- errors ---- */

/* Appends to a message under construction; what does not fit is cut. */
MFSDP_API MFSDP_FORMAT(2, 3) void mfsdp__nccl_append(mfsdp_error *error, const char *format, ...) {
  const size_t used = strlen(error->message);
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(error->message + used, sizeof(error->message) - used, format, arguments);
  va_end(arguments);
}

/* What becomes of kernels that hang. */
MFSDP_API const char *mfsdp__nccl_fate(const mfsdp__nccl_transport *t) {
  if (t->abortable) return "";
  if (t->desc.nonblocking)
    return "; may_abort is 0: call ncclCommAbort, or its kernels stay in their stream";
  return "; the communicator blocks and cannot be aborted safely: its kernels stay in their stream "
         "until the peers come, so leave the process";
}

MFSDP_API mfsdp_status mfsdp__nccl_status(ncclResult_t result) {
  switch (result) {
  case ncclSuccess: return MFSDP_OK;
  case ncclRemoteError: return MFSDP_E_PEER;
  case ncclInvalidArgument: return MFSDP_E_ARGUMENT;
  default: return MFSDP_E_BACKEND;
  }
}

/* Records what NCCL said about `call`. */
MFSDP_API mfsdp_status mfsdp__nccl_explain(const mfsdp__nccl_transport *t, ncclResult_t result,
                                           const char *label, const char *call, mfsdp_error *why) {
  const char *last = t->comm == NULL ? NULL : ncclGetLastError(t->comm);
  return MFSDP_ERROR_SET(why, mfsdp__nccl_status(result), -1, "%s: rank %d: %s: %s%s%.120s%s",
                         label, (int)t->rank, call, ncclGetErrorString(result),
                         last != NULL && last[0] != '\0' ? ": " : "", last != NULL ? last : "",
                         mfsdp__nccl_fate(t));
}

MFSDP_API mfsdp_status mfsdp__nccl_check(const mfsdp__nccl_transport *t, mfsdp_context *context,
                                         ncclResult_t result, const char *label, const char *call) {
  mfsdp_error why = mfsdp_error_none();
  if (result == ncclSuccess) return MFSDP_OK;
  (void)mfsdp__nccl_explain(t, result, label, call, &why);
  why.rank = t->rank;
  return mfsdp_context_take_error(context, &why);
}

/* Any thread. The first error stays; the thread aborts, if that is allowed. NULL: without a reason.
 * */
MFSDP_API void mfsdp__nccl_poison(void *self, const mfsdp_error *why) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)self;
  mfsdp_mutex_lock(&t->mutex);
  if (!t->poisoned) {
    if (why != NULL && why->status != MFSDP_OK)
      t->error = *why;
    else
      (void)MFSDP_ERROR_SET(&t->error, MFSDP_E_POISONED, -1,
                            "nccl transport: poisoned from outside, no reason given");
    if (t->error.rank < 0) t->error.rank = t->rank;
    t->poisoned = 1;
    mfsdp_cond_broadcast(&t->cond);
  }
  mfsdp_mutex_unlock(&t->mutex);
}

/* Copies the first error; its status, MFSDP_OK if there is none. */
MFSDP_API mfsdp_status mfsdp__nccl_first_error(mfsdp__nccl_transport *t, mfsdp_error *error) {
  mfsdp_error_clear(error);
  mfsdp_mutex_lock(&t->mutex);
  if (t->poisoned) *error = t->error;
  mfsdp_mutex_unlock(&t->mutex);
  return error->status;
}

MFSDP_API mfsdp_status mfsdp__nccl_refuse(mfsdp_context *context, const mfsdp_error *first,
                                          const char *label) {
  return MFSDP_FAIL_PEER(context, MFSDP_E_POISONED, first->culprit,
                         "%s: refused after the first error (%s, noticed by rank %d): %.250s",
                         label, mfsdp_status_name(first->status), (int)first->rank, first->message);
}

/* ---- turns ---- */

/* Waits for others' single calls. E_POISONED; E_STATE while another thread is in a batch. */
MFSDP_API mfsdp_status mfsdp__nccl_enter(mfsdp__nccl_transport *t, mfsdp_context *context,
                                         const char *label) {
  mfsdp_error first = mfsdp_error_none();
  int32_t busy;
  mfsdp_mutex_lock(&t->mutex);
  while (t->turn == MFSDP__NCCL_A_CALL && !t->poisoned)
    (void)mfsdp_cond_wait_until(&t->cond, &t->mutex, MFSDP_DEADLINE_NEVER_US);
  if (t->poisoned) first = t->error;
  busy = t->turn == MFSDP__NCCL_A_BATCH;
  if (!busy && first.status == MFSDP_OK) t->turn = MFSDP__NCCL_A_BATCH;
  mfsdp_mutex_unlock(&t->mutex);
  if (first.status != MFSDP_OK) return mfsdp__nccl_refuse(context, &first, label);
  if (!busy) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_STATE,
                    "%s: rank %d is in another batch at the same time; a transport is for one "
                    "thread at a time",
                    label, (int)t->rank);
}

/* For one call that does not wait: 0 if somebody else is at it, or it is too late. */
MFSDP_API int mfsdp__nccl_try_turn(mfsdp__nccl_transport *t) {
  int taken;
  mfsdp_mutex_lock(&t->mutex);
  taken = t->turn == MFSDP__NCCL_NOBODY && !t->poisoned;
  if (taken) t->turn = MFSDP__NCCL_A_CALL;
  mfsdp_mutex_unlock(&t->mutex);
  return taken;
}

MFSDP_API void mfsdp__nccl_leave(mfsdp__nccl_transport *t) {
  mfsdp_mutex_lock(&t->mutex);
  t->turn = MFSDP__NCCL_NOBODY;
  mfsdp_cond_broadcast(&t->cond);
  mfsdp_mutex_unlock(&t->mutex);
}

MFSDP_API int mfsdp__nccl_poisoned(mfsdp__nccl_transport *t) {
  int poisoned;
  mfsdp_mutex_lock(&t->mutex);
  poisoned = t->poisoned;
  mfsdp_mutex_unlock(&t->mutex);
  return poisoned;
}

/* ---- groups on their way, by who has the turn ---- */

MFSDP_API mfsdp__nccl_track *mfsdp__nccl_oldest(mfsdp__nccl_transport *t) {
  while (t->track_count > 0) {
    mfsdp__nccl_track *track = &t->tracks[t->first_track];
    if (mfsdp__cuda_event_state(track->end) == cudaErrorNotReady) return track;
    t->first_track = (t->first_track + 1) % MFSDP__NCCL_TRACKED;
    --t->track_count;
  }
  return NULL;
}

/* E_TIMEOUT if the oldest group has run for too long. Its clock starts when it is first seen to
 * run: what stands before it in the stream is not the peers' affair. */
MFSDP_API const mfsdp__nccl_track *mfsdp__nccl_late(mfsdp__nccl_transport *t, int64_t *waited_us) {
  mfsdp__nccl_track *track = mfsdp__nccl_oldest(t);
  if (track == NULL || mfsdp__cuda_event_state(track->begin) == cudaErrorNotReady) return NULL;
  if (track->since_us == 0) track->since_us = mfsdp_clock_us();
  *waited_us = mfsdp_clock_us() - track->since_us;
  return *waited_us > t->desc.deadline_us ? track : NULL;
}

/* Who does not answer on the control plane, and is waited for if anybody is. */
MFSDP_API void mfsdp__nccl_probe(mfsdp__nccl_transport *t, const uint8_t *peers, mfsdp_error *why) {
  const mfsdp_control *control = t->desc.control;
  mfsdp_context own;
  mfsdp_context_desc desc = mfsdp_context_desc_default();
  int32_t r;
  if (control == NULL) return;
  desc.rank = t->rank;
  memset(t->alive, 0, (size_t)t->world);
  if (mfsdp_context_init(&own, &desc) != MFSDP_OK) return;
  if (control->ops->probe(control->self, &own, t->alive, 1000000) == MFSDP_OK) {
    for (r = 0; r < t->world; ++r) {
      if (r == t->rank || t->alive[r]) continue;
      mfsdp__nccl_append(why, "; rank %d does not answer", (int)r);
      if (why->culprit < 0 || (peers[r] != 0 && peers[why->culprit] == 0)) why->culprit = r;
    }
    if (why->culprit < 0) mfsdp__nccl_append(why, "; all ranks answer");
  }
  (void)mfsdp_context_destroy(&own);
}

/* What a rank says whose deadline has passed. NCCL does not tell which of its peers it waits for:
 * with `asks` the control plane is asked, which may take a second. */
MFSDP_API mfsdp_status mfsdp__nccl_time_out(mfsdp__nccl_transport *t, const char *label,
                                            int64_t waited_us, const uint8_t *peers, int asks,
                                            mfsdp_error *why) {
  const char *separator = " for ";
  int32_t r, count = 0, last = -1;
  (void)MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, -1, "%s: rank %d waited %lld ms", label, (int)t->rank,
                        (long long)(waited_us / 1000));
  for (r = 0; r < t->world; ++r) {
    if (peers[r] == 0) continue;
    ++count;
    last = r;
    if (count > 8) continue;
    mfsdp__nccl_append(why, "%srank %d to %s", separator, (int)r,
                       peers[r] == MFSDP__NCCL_IT_SENDS      ? "send"
                       : peers[r] == MFSDP__NCCL_IT_RECEIVES ? "receive"
                                                             : "send and to receive");
    separator = " or ";
  }
  if (count > 8) mfsdp__nccl_append(why, " or %d others", (int)count - 8);
  if (count == 1) why->culprit = last;
  if (asks) mfsdp__nccl_probe(t, peers, why);
  mfsdp__nccl_append(why, "%s", mfsdp__nccl_fate(t));
  why->rank = t->rank;
  return why->status;
}

/* One look, by who has the turn: NCCL's own errors, then the clock. Who must not wait (`asks` 0)
 * leaves the clock to the watching thread, if that one has somebody to ask. */
MFSDP_API mfsdp_status mfsdp__nccl_look(mfsdp__nccl_transport *t, int asks, mfsdp_error *why) {
  ncclResult_t state = ncclSuccess;
  ncclResult_t result = ncclSuccess;
  const mfsdp__nccl_track *late;
  int64_t waited_us = 0;
  *why = mfsdp_error_none();
  if (t->comm == NULL) return MFSDP_OK;
  result = ncclCommGetAsyncError(t->comm, &state);
  if (result == ncclSuccess && state != ncclInProgress) result = state;
  if (result != ncclSuccess)
    return mfsdp__nccl_explain(t, result, "nccl transport", "asynchronous error", why);
  if (!asks && t->desc.watchdog_us > 0 && t->desc.control != NULL) return MFSDP_OK;
  late = mfsdp__nccl_late(t, &waited_us);
  if (late == NULL) return MFSDP_OK;
  return mfsdp__nccl_time_out(t, late->label, waited_us, late->peers, asks, why);
}

/* ---- the thread ---- */

/* Until the stream is inside our oldest group, or has none of ours: then nobody reads the note.
 * What stands before it ends by itself, or by another transport's abort. */
MFSDP_API void mfsdp__nccl_await_kernel(mfsdp__nccl_transport *t) {
  const int64_t deadline_us = mfsdp_clock_deadline_us(t->desc.deadline_us);
  for (;;) {
    const mfsdp__nccl_track *track = mfsdp__nccl_oldest(t);
    if (track == NULL || mfsdp__cuda_event_state(track->begin) != cudaErrorNotReady ||
        mfsdp_clock_us() >= deadline_us)
      return;
    mfsdp_clock_sleep_until(mfsdp_clock_us() + MFSDP__NCCL_LAST_SLEEP_US);
  }
}

MFSDP_API void mfsdp__nccl_abort(mfsdp__nccl_transport *t) {
  ncclComm_t comm = t->comm;
  mfsdp__nccl_await_kernel(t);
  t->note->error = t->error;
  t->note->fault = MFSDP_CUDA_FAULT_TASK;
  t->note->origin = NULL;
  __atomic_store_n(&t->note->failed_at, 1, __ATOMIC_RELEASE);
  mfsdp_mutex_lock(&t->mutex);
  t->comm = NULL;
  if (t->desc.aborted != NULL) *t->desc.aborted = 1;
  mfsdp_mutex_unlock(&t->mutex);
  (void)ncclCommAbort(comm);
}

/* One round with the mutex held, which is not while anything is called. */
MFSDP_API void mfsdp__nccl_thread_turn(mfsdp__nccl_transport *t, int aborts, int32_t *device_set) {
  mfsdp_error why;
  t->turn = MFSDP__NCCL_A_CALL;
  mfsdp_mutex_unlock(&t->mutex);
  if (!*device_set) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    *device_set = cudaSetDevice(t->cuda->device) == cudaSuccess;
    (void)cudaThreadExchangeStreamCaptureMode(&mode); /* or a look would break others' captures */
  }
  if (aborts) {
    mfsdp__nccl_abort(t);
  } else if (mfsdp__nccl_look(t, 1, &why) != MFSDP_OK) {
    mfsdp__nccl_poison(t, &why);
  }
  mfsdp_mutex_lock(&t->mutex);
  t->turn = MFSDP__NCCL_NOBODY;
  mfsdp_cond_broadcast(&t->cond);
}

MFSDP_API void mfsdp__nccl_thread_main(void *argument) {
  mfsdp__nccl_transport *t = (mfsdp__nccl_transport *)argument;
  int32_t device_set = 0;
  int64_t next_us = mfsdp_clock_deadline_us(t->desc.watchdog_us);
  mfsdp_mutex_lock(&t->mutex);
  while (!t->stopping) {
    const int aborts = t->poisoned && t->abortable && t->comm != NULL;
    const int watches = !t->poisoned && t->desc.watchdog_us > 0;
    if (t->turn == MFSDP__NCCL_NOBODY && (aborts || (watches && mfsdp_clock_us() >= next_us))) {
      mfsdp__nccl_thread_turn(t, aborts, &device_set);
      next_us = mfsdp_clock_deadline_us(t->desc.watchdog_us);
      continue;
    }
    if (watches && mfsdp_clock_us() >= next_us)
      next_us = mfsdp_clock_deadline_us(t->desc.watchdog_us); /* a batch sees to itself */
    (void)mfsdp_cond_wait_until(&t->cond, &t->mutex, watches ? next_us : MFSDP_DEADLINE_NEVER_US);
  }
  t->thread_ended = 1;
  mfsdp_cond_broadcast(&t->cond);
  mfsdp_mutex_unlock(&t->mutex);
}

/* Whether it has ended by the deadline; it has not if an abort hangs. */
MFSDP_API int mfsdp__nccl_thread_end(mfsdp__nccl_transport *t) {
  const int64_t deadline_us = mfsdp_clock_deadline_us(t->desc.deadline_us);
  int ended;
  if (!t->thread_ready) return 1;
  mfsdp_mutex_lock(&t->mutex);
  /* An abort that is due comes first: work of the communicator may hang. */
  while (t->poisoned && t->abortable && t->comm != NULL && !t->stopping)
    if (!mfsdp_cond_wait_until(&t->cond, &t->mutex, deadline_us)) break;
  t->stopping = 1;
  mfsdp_cond_broadcast(&t->cond);
  while (!t->thread_ended)
    if (!mfsdp_cond_wait_until(&t->cond, &t->mutex, deadline_us)) break;
  ended = t->thread_ended;
  mfsdp_mutex_unlock(&t->mutex);
  if (ended) mfsdp_thread_join(&t->thread);
  if (ended) t->thread_ready = 0;
  return ended;
}

#endif /* MFSDP_CUDA_NCCL_STATE_H */
