/* SPDX-License-Identifier: MIT */
/*
 * mpi_world.h - what the transport and the control plane of an MPI process share: duplicates of the
 * caller's communicator, the first error, answers to probes, and the loop that polls requests.
 *
 *   mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
 *   mfsdp_mpi_world *world;
 *   MFSDP_TRY(mfsdp_mpi_world_wrap(&context, MPI_COMM_WORLD, &desc, &world));   // collective
 *   ... transport_mpi.h, control_mpi.h ...
 *   MFSDP_TRY(mfsdp_mpi_world_destroy(&context, world));                        // collective
 *
 * MPI-3, non-blocking operations and polling only (set-up and destroy aside). Every rank runs the
 * same program on machines of one byte order. The caller initializes and finalizes MPI, and keeps
 * the communicator; the duplicates are ours. Threads: with MPI_THREAD_MULTIPLE any thread may call;
 * with MPI_THREAD_SERIALIZED any thread, if the description brings the lock that the caller holds
 * around its own MPI calls; otherwise only the thread that made the world, so that queues must be
 * in place (mfsdp_mpi_world_threads says so).
 *
 * One world, one fate: the first error of a rank, on the transport or on the control plane, poisons
 * both, and is sent to all peers, which find it in their next wait and return it. What MPI does to
 * the job when a process dies is for its launcher to say: see docs/failure.md.
 * Does not: initialize, finalize or abort MPI. Link flags: -lmpi -lpthread. In C++ define
 * OMPI_SKIP_MPICXX (Open MPI) or MPICH_SKIP_MPICXX (MPICH), or link their old C++ classes. POSIX
 * 2008: see posix/clock.h.
 */
#ifndef MFSDP_MPI_MPI_WORLD_H
#define MFSDP_MPI_MPI_WORLD_H

#include "../posix/clock.h"
#include "../posix/thread.h"
#include "../transport.h"

#include <limits.h>
#include <mpi.h>

#if MPI_VERSION < 3
#error "matrixfsdp: mpi/ needs MPI-3"
#endif

typedef struct mfsdp_mpi_world_desc {
  size_t struct_nbytes;
  int64_t deadline_us;      /* of every wait, counted from the last progress; positive */
  size_t control_nbytes;    /* largest control message of a rank; equal on all ranks */
  size_t message_nbytes;    /* longest MPI message, equal on all ranks: longer transfers are cut, so
                             * that counts stay below INT_MAX and progress shows; 1 to INT_MAX */
  int32_t batch_count;      /* batches that may be queued at a time; at least 1 */
  int32_t batch_xfer_count; /* transfers of a batch until `reserve` asks for more; at least 1 */
  /* With MPI_THREAD_SERIALIZED: held around every MPI call of ours, never around a wait. */
  void (*lock)(void *user);
  void (*unlock)(void *user);
  void *user;
} mfsdp_mpi_world_desc;

/* 60 s, control messages up to 16 KiB, MPI messages up to 64 MiB, 4 batches of 64 transfers, no
 * lock. */
MFSDP_API mfsdp_mpi_world_desc mfsdp_mpi_world_desc_default(void) {
  mfsdp_mpi_world_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.deadline_us = 60000000;
  desc.control_nbytes = 16384;
  desc.message_nbytes = (size_t)64 << 20;
  desc.batch_count = 4;
  desc.batch_xfer_count = 64;
  return desc;
}

/* Tags of the two duplicates. They never change: messages of a pair are first in, first out. */
enum {
  MFSDP__MPI_TAG_DATA = 1, /* on the data communicator; the others on the control communicator */
  MFSDP__MPI_TAG_GATHER,
  MFSDP__MPI_TAG_PING,
  MFSDP__MPI_TAG_PONG,
  MFSDP__MPI_TAG_NOTICE,
  MFSDP__MPI_TAG_LEFT
};

/* A rank that has left gets this long for what it has sent before to arrive. */
#define MFSDP__MPI_LEFT_GRACE_US 250000
/* How long a rank that waits in a call of ours may take to answer a probe. */
#define MFSDP__MPI_PROBE_US 1000000

/* An mfsdp_error on its way to a peer. */
typedef struct mfsdp__mpi_notice {
  int32_t status, rank, culprit, line;
  char message[384];
} mfsdp__mpi_notice;

typedef struct mfsdp_mpi_world {
  mfsdp_mpi_world_desc desc;
  MPI_Comm data, control; /* duplicates of the caller's, ours to free */
  int32_t rank, world, thread_level;
  pthread_t creator;
  int32_t *node_of_rank;
  int32_t mutex_ready, probe_mutex_ready;
  mfsdp_mutex mutex;       /* the rest, and the requests of the service */
  mfsdp_mutex probe_mutex; /* one probe at a time */
  int32_t serving;         /* the service's receives are posted */
  MPI_Request ping_receive, pong_send, notice_receive, left_receive;
  uint64_t ping_in, ping_out, pong_out, left_in, left_out;
  int64_t *left_us;       /* world: when a peer's leaving was noticed; 0: it is there */
  uint64_t *left_natives; /* world: how many native collectives a peer that has left had ended */
  uint64_t native_count;  /* atomic: how many this rank has ended */
  int32_t left_sent;      /* this rank has told its peers that it leaves */
  mfsdp__mpi_notice notice_in, notice_out;
  int32_t notice_sent;
  int32_t poisoned; /* atomic: `error` is set and will not change */
  mfsdp_error error;
  MPI_Request *probe_requests; /* 2 x world */
  uint64_t *probe_words;       /* world: the pongs */
} mfsdp_mpi_world;

/* ---- calling MPI ---- */

MFSDP_API void mfsdp__mpi_lock(mfsdp_mpi_world *world) {
  if (world->desc.lock != NULL) world->desc.lock(world->desc.user);
}

MFSDP_API void mfsdp__mpi_unlock(mfsdp_mpi_world *world) {
  if (world->desc.unlock != NULL) world->desc.unlock(world->desc.user);
}

/* Whether this thread may call MPI. */
MFSDP_API int mfsdp__mpi_thread_allowed(const mfsdp_mpi_world *world) {
  if (world->thread_level == MPI_THREAD_MULTIPLE) return 1;
  if (world->thread_level == MPI_THREAD_SERIALIZED && world->desc.lock != NULL) return 1;
  return pthread_equal(world->creator, pthread_self()) != 0;
}

/* 1 if queues with threads of their own may carry batches; 0: *reason (may be NULL) says why not,
 * and queues must be in place (prefetch off). */
MFSDP_API int mfsdp_mpi_world_threads(const mfsdp_mpi_world *world, const char **reason) {
  const char *text = NULL;
  if (world->thread_level == MPI_THREAD_SERIALIZED && world->desc.lock == NULL)
    text = "MPI provides MPI_THREAD_SERIALIZED and the description brings no lock";
  else if (world->thread_level < MPI_THREAD_SERIALIZED)
    text = "MPI provides less than MPI_THREAD_SERIALIZED (ask MPI_Init_thread for "
           "MPI_THREAD_MULTIPLE)";
  if (reason != NULL) *reason = text;
  return text == NULL;
}

/* An MPI error code as a status with MPI's own words. */
MFSDP_API mfsdp_status mfsdp__mpi_explain(int code, int32_t culprit, const char *label,
                                          mfsdp_error *why) {
  char text[MPI_MAX_ERROR_STRING + 1];
  int length = 0, error_class = MPI_ERR_OTHER;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  text[length] = '\0';
  (void)MPI_Error_class(code, &error_class);
  return MFSDP_ERROR_SET(why, error_class == MPI_ERR_TRUNCATE ? MFSDP_E_MISMATCH : MFSDP_E_PEER,
                         culprit, "%s: MPI says: %.300s", label, text);
}

/* ---- the first error ---- */

MFSDP_API int mfsdp__mpi_poisoned(const mfsdp_mpi_world *world) {
  return __atomic_load_n(&world->poisoned, __ATOMIC_ACQUIRE);
}

/* With the mutex: keeps the first error, and what to tell the peers. */
MFSDP_API void mfsdp__mpi_keep_error(mfsdp_mpi_world *world, const mfsdp_error *why) {
  if (world->poisoned) return;
  if (why != NULL && why->status != MFSDP_OK)
    world->error = *why;
  else
    (void)MFSDP_ERROR_SET(&world->error, MFSDP_E_POISONED, -1,
                          "mpi: poisoned from outside, no reason given");
  if (world->error.rank < 0) world->error.rank = world->rank;
  world->notice_out.status = (int32_t)world->error.status;
  world->notice_out.rank = world->error.rank;
  world->notice_out.culprit = world->error.culprit;
  world->notice_out.line = world->error.line;
  memcpy(world->notice_out.message, world->error.message, sizeof(world->notice_out.message));
  __atomic_store_n(&world->poisoned, 1, __ATOMIC_RELEASE);
}

/* With the mutex, on a thread that may call MPI: tells every peer, once. Nobody waits for these
 * small sends; their buffer lives as long as the world. */
MFSDP_API void mfsdp__mpi_send_notices(mfsdp_mpi_world *world) {
  int32_t r;
  if (!world->poisoned || world->notice_sent) return;
  world->notice_sent = 1;
  for (r = 0; r < world->world; ++r) {
    MPI_Request request;
    if (r == world->rank) continue;
    if (MPI_Isend(&world->notice_out, (int)sizeof(world->notice_out), MPI_BYTE, r,
                  MFSDP__MPI_TAG_NOTICE, world->control, &request) == MPI_SUCCESS)
      (void)MPI_Request_free(&request);
  }
}

/*
 * Ends the world: `why` becomes its error unless there is one, and every later wait and call, here
 * and on the peers, returns it. Any thread; idempotent. A thread that may not call MPI leaves the
 * telling to the next one that may. NULL: E_POISONED without a reason.
 */
MFSDP_API void mfsdp_mpi_world_poison(mfsdp_mpi_world *world, const mfsdp_error *why) {
  mfsdp_mutex_lock(&world->mutex);
  mfsdp__mpi_keep_error(world, why);
  if (mfsdp__mpi_thread_allowed(world)) {
    mfsdp__mpi_lock(world);
    mfsdp__mpi_send_notices(world);
    mfsdp__mpi_unlock(world);
  }
  mfsdp_mutex_unlock(&world->mutex);
}

MFSDP_API mfsdp_status mfsdp__mpi_first_error(const mfsdp_mpi_world *world, mfsdp_error *error) {
  *error = world->error;
  return error->status;
}

/* What every call on a poisoned world returns: E_POISONED and the first message. */
MFSDP_API mfsdp_status mfsdp__mpi_refuse(const mfsdp_mpi_world *world, mfsdp_context *context,
                                         const char *label) {
  return MFSDP_FAIL_PEER(context, MFSDP_E_POISONED, world->error.culprit,
                         "%s: refused after the first error (%s, noticed by rank %d): %s", label,
                         mfsdp_status_name(world->error.status), (int)world->error.rank,
                         world->error.message);
}

/* ---- the service: what a rank does for its peers whenever it polls ---- */

MFSDP_API void mfsdp__mpi_take_notice(mfsdp_mpi_world *world) {
  mfsdp_error why = mfsdp_error_none();
  const mfsdp__mpi_notice *notice = &world->notice_in;
  why.status = notice->status > MFSDP_OK && notice->status < MFSDP_STATUS_COUNT
                   ? (mfsdp_status)notice->status
                   : MFSDP_E_POISONED;
  why.rank = notice->rank;
  why.culprit = notice->culprit;
  why.line = notice->line;
  memcpy(why.message, notice->message, sizeof(why.message));
  why.message[sizeof(why.message) - 1] = '\0';
  mfsdp__mpi_keep_error(world, &why);
  world->notice_sent = 1; /* its finder has told everyone */
}

/* Pings are answered one by one: the next is received when the answer to the last is on its way. */
MFSDP_API void mfsdp__mpi_answer_pings(mfsdp_mpi_world *world) {
  MPI_Status status;
  int flag = 0;
  if (world->ping_receive != MPI_REQUEST_NULL) {
    if (MPI_Test(&world->ping_receive, &flag, &status) != MPI_SUCCESS || !flag) return;
    world->pong_out = world->ping_in;
    if (MPI_Isend(&world->pong_out, (int)sizeof(world->pong_out), MPI_BYTE, status.MPI_SOURCE,
                  MFSDP__MPI_TAG_PONG, world->control, &world->pong_send) != MPI_SUCCESS)
      world->pong_send = MPI_REQUEST_NULL;
  }
  if (world->pong_send != MPI_REQUEST_NULL &&
      (MPI_Test(&world->pong_send, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || !flag))
    return;
  if (MPI_Irecv(&world->ping_in, (int)sizeof(world->ping_in), MPI_BYTE, MPI_ANY_SOURCE,
                MFSDP__MPI_TAG_PING, world->control, &world->ping_receive) != MPI_SUCCESS)
    world->ping_receive = MPI_REQUEST_NULL;
}

MFSDP_API void mfsdp__mpi_take_left(mfsdp_mpi_world *world, int source) {
  world->left_us[source] = mfsdp_clock_us();
  world->left_natives[source] = world->left_in;
  (void)MPI_Irecv(&world->left_in, (int)sizeof(world->left_in), MPI_BYTE, MPI_ANY_SOURCE,
                  MFSDP__MPI_TAG_LEFT, world->control, &world->left_receive);
}

/* Answers probes, takes and sends notices. On a thread that may call MPI, without the lock. */
MFSDP_API void mfsdp__mpi_serve(mfsdp_mpi_world *world) {
  MPI_Status status;
  int flag = 0;
  mfsdp_mutex_lock(&world->mutex);
  mfsdp__mpi_lock(world);
  if (world->serving) {
    if (world->notice_receive != MPI_REQUEST_NULL &&
        MPI_Test(&world->notice_receive, &flag, &status) == MPI_SUCCESS && flag)
      mfsdp__mpi_take_notice(world);
    mfsdp__mpi_answer_pings(world);
    flag = 0;
    if (MPI_Test(&world->left_receive, &flag, &status) == MPI_SUCCESS && flag)
      mfsdp__mpi_take_left(world, status.MPI_SOURCE);
    mfsdp__mpi_send_notices(world);
  }
  mfsdp__mpi_unlock(world);
  mfsdp_mutex_unlock(&world->mutex);
}

/* When rank r was seen to leave, or 0. */
MFSDP_API int64_t mfsdp__mpi_left_us(mfsdp_mpi_world *world, int32_t r) {
  int64_t left_us;
  mfsdp_mutex_lock(&world->mutex);
  left_us = world->left_us[r];
  mfsdp_mutex_unlock(&world->mutex);
  return left_us;
}

MFSDP_API uint64_t mfsdp__mpi_left_natives(mfsdp_mpi_world *world, int32_t r) {
  uint64_t count;
  mfsdp_mutex_lock(&world->mutex);
  count = world->left_natives[r];
  mfsdp_mutex_unlock(&world->mutex);
  return count;
}

/* Tells the peers, once, that this rank waits for nothing and sends nothing any more. */
MFSDP_API void mfsdp__mpi_say_left(mfsdp_mpi_world *world) {
  int32_t r;
  mfsdp_mutex_lock(&world->mutex);
  mfsdp__mpi_lock(world);
  if (!world->left_sent) world->left_out = __atomic_load_n(&world->native_count, __ATOMIC_ACQUIRE);
  for (r = 0; r < world->world && !world->left_sent; ++r) {
    MPI_Request request;
    if (r != world->rank && MPI_Isend(&world->left_out, (int)sizeof(world->left_out), MPI_BYTE, r,
                                      MFSDP__MPI_TAG_LEFT, world->control, &request) == MPI_SUCCESS)
      (void)MPI_Request_free(&request);
  }
  world->left_sent = 1;
  mfsdp__mpi_unlock(world);
  mfsdp_mutex_unlock(&world->mutex);
}

/* ---- polling ---- */

/*
 * What a loop does between two polls that found nothing: `idle` counts them. Polls hard for some
 * tens of microseconds, which is what a message takes, then sleeps, so that ranks that share cores
 * with computing threads leave them to those. No yields: see mfsdp__threads_wait.
 */
MFSDP_API void mfsdp__mpi_pause(mfsdp_mpi_world *world, int64_t idle) {
  if (idle % 16 == 15) mfsdp__mpi_serve(world);
  if (idle < 64) return;
  mfsdp_clock_sleep_until(mfsdp_clock_us() + (idle < 256 ? 5 : 50));
}

/* ---- probing ---- */

/* One look at the pongs: counts who has answered this probe's word; stale answers are received
 * again. With the lock held. */
MFSDP_API int32_t mfsdp__mpi_look_for_pongs(mfsdp_mpi_world *world, uint8_t *alive) {
  int32_t r, count = 0;
  for (r = 0; r < world->world; ++r) {
    MPI_Request *request = &world->probe_requests[r];
    int flag = 0;
    if (!alive[r] && *request != MPI_REQUEST_NULL &&
        MPI_Test(request, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && flag) {
      if (world->probe_words[r] == world->ping_out)
        alive[r] = 1;
      else
        (void)MPI_Irecv(&world->probe_words[r], (int)sizeof(uint64_t), MPI_BYTE, r,
                        MFSDP__MPI_TAG_PONG, world->control, request);
    }
    count += alive[r];
  }
  return count;
}

MFSDP_API void mfsdp__mpi_send_pings(mfsdp_mpi_world *world, uint8_t *alive) {
  int32_t r;
  ++world->ping_out;
  for (r = 0; r < world->world; ++r) {
    MPI_Request request;
    alive[r] = r == world->rank;
    world->probe_requests[r] = MPI_REQUEST_NULL;
    if (r == world->rank) continue;
    if (MPI_Irecv(&world->probe_words[r], (int)sizeof(uint64_t), MPI_BYTE, r, MFSDP__MPI_TAG_PONG,
                  world->control, &world->probe_requests[r]) != MPI_SUCCESS)
      world->probe_requests[r] = MPI_REQUEST_NULL;
    if (MPI_Isend(&world->ping_out, (int)sizeof(uint64_t), MPI_BYTE, r, MFSDP__MPI_TAG_PING,
                  world->control, &request) == MPI_SUCCESS)
      (void)MPI_Request_free(&request);
  }
}

/*
 * alive[r] = 1 for every rank that answers within timeout_us: ranks that wait in a transfer or a
 * control call do, ranks that compute, have left, are stopped or dead do not.
 */
MFSDP_API void mfsdp__mpi_probe(mfsdp_mpi_world *world, uint8_t *alive, int64_t timeout_us) {
  const int64_t deadline_us = mfsdp_clock_deadline_us(timeout_us);
  int32_t r, count = 0;
  mfsdp_mutex_lock(&world->probe_mutex);
  mfsdp__mpi_lock(world);
  mfsdp__mpi_send_pings(world, alive);
  mfsdp__mpi_unlock(world);
  for (;;) {
    mfsdp__mpi_serve(world);
    mfsdp__mpi_lock(world);
    count = mfsdp__mpi_look_for_pongs(world, alive);
    mfsdp__mpi_unlock(world);
    if (count == world->world || mfsdp_clock_us() >= deadline_us) break;
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 50);
  }
  mfsdp__mpi_lock(world);
  for (r = 0; r < world->world; ++r)
    if (world->probe_requests[r] != MPI_REQUEST_NULL) {
      (void)MPI_Cancel(&world->probe_requests[r]);
      (void)MPI_Wait(&world->probe_requests[r], MPI_STATUS_IGNORE); /* of a receive: local */
    }
  mfsdp__mpi_unlock(world);
  mfsdp_mutex_unlock(&world->probe_mutex);
}

/* Appends to a message under construction; what does not fit is cut. */
MFSDP_API MFSDP_FORMAT(3, 4) void mfsdp__mpi_append(char *text, size_t text_nbytes,
                                                    const char *format, ...) {
  const size_t used = strlen(text);
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text + used, text_nbytes - used, format, arguments);
  va_end(arguments);
}

/* ---- life cycle ---- */

MFSDP_API mfsdp_status mfsdp__mpi_desc_check(mfsdp_context *context,
                                             const mfsdp_mpi_world_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "mpi world: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_mpi_world_desc_default)",
                      sizeof(*desc));
  if (desc->deadline_us <= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "mpi world: desc.deadline_us is %lld, needs to be positive",
                      (long long)desc->deadline_us);
  if (desc->message_nbytes < 1 || desc->message_nbytes > INT_MAX)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "mpi world: desc.message_nbytes is %zu, needs 1 to %d", desc->message_nbytes,
                      INT_MAX);
  if (desc->control_nbytes > INT_MAX / 2)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "mpi world: desc.control_nbytes is %zu, needs at most %d",
                      desc->control_nbytes, INT_MAX / 2);
  if (desc->batch_count < 1 || desc->batch_xfer_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "mpi world: desc.batch_count is %d and batch_xfer_count %d, both need at "
                      "least 1",
                      (int)desc->batch_count, (int)desc->batch_xfer_count);
  if ((desc->lock == NULL) != (desc->unlock == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mpi world: desc.%s is NULL, needs both or none",
                      desc->lock == NULL ? "lock" : "unlock");
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__mpi_try(mfsdp_context *context, int code, const char *what) {
  mfsdp_error why = mfsdp_error_none();
  if (code == MPI_SUCCESS) return MFSDP_OK;
  (void)mfsdp__mpi_explain(code, -1, what, &why);
  return mfsdp_context_take_error(context, &why);
}

/* Numbers nodes by their first rank: ranks that can share memory are of one node. */
MFSDP_API mfsdp_status mfsdp__mpi_map_nodes(mfsdp_context *context, mfsdp_mpi_world *world) {
  MPI_Comm node = MPI_COMM_NULL;
  int32_t leader = world->rank, r, nodes = 0;
  MFSDP_TRY(mfsdp__mpi_try(
      context,
      MPI_Comm_split_type(world->control, MPI_COMM_TYPE_SHARED, world->rank, MPI_INFO_NULL, &node),
      "mpi world: MPI_Comm_split_type"));
  (void)MPI_Bcast(&leader, 1, MPI_INT32_T, 0, node);
  (void)MPI_Comm_free(&node);
  MFSDP_TRY(mfsdp__mpi_try(
      context,
      MPI_Allgather(&leader, 1, MPI_INT32_T, world->node_of_rank, 1, MPI_INT32_T, world->control),
      "mpi world: MPI_Allgather"));
  /* A leader is the lowest rank of its node, so its number is there when its node's ranks ask. */
  for (r = 0; r < world->world; ++r) {
    const int32_t first = world->node_of_rank[r];
    if (first < 0 || first > r)
      return MFSDP_FAIL(context, MFSDP_E_BACKEND, "mpi world: MPI's node map makes no sense");
    world->node_of_rank[r] = first == r ? nodes++ : world->node_of_rank[first];
  }
  return MFSDP_OK;
}

/* E_MISMATCH on every rank if a size is not the same on all: messages would be cut in other places, or
 * native collectives go by other calls, and the ranks wait for each other. */
MFSDP_API mfsdp_status mfsdp__mpi_same_size(mfsdp_context *context, mfsdp_mpi_world *world,
                                            size_t nbytes, const char *name) {
  uint64_t own = nbytes;
  int32_t r;
  MFSDP_TRY(mfsdp__mpi_try(
      context,
      MPI_Allgather(&own, 1, MPI_UINT64_T, world->probe_words, 1, MPI_UINT64_T, world->control),
      "mpi world: MPI_Allgather"));
  for (r = 1; r < world->world; ++r)
    if (world->probe_words[r] != world->probe_words[0])
      return MFSDP_FAIL(context, MFSDP_E_MISMATCH,
                        "mpi world: desc.%s is %llu on rank 0 and %llu on rank %d, needs to be the "
                        "same on all",
                        name, (unsigned long long)world->probe_words[0],
                        (unsigned long long)world->probe_words[r], (int)r);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__mpi_start_service(mfsdp_context *context, mfsdp_mpi_world *world) {
  MFSDP_TRY(mfsdp__mpi_try(context,
                           MPI_Irecv(&world->ping_in, (int)sizeof(world->ping_in), MPI_BYTE,
                                     MPI_ANY_SOURCE, MFSDP__MPI_TAG_PING, world->control,
                                     &world->ping_receive),
                           "mpi world: MPI_Irecv"));
  MFSDP_TRY(mfsdp__mpi_try(context,
                           MPI_Irecv(&world->notice_in, (int)sizeof(world->notice_in), MPI_BYTE,
                                     MPI_ANY_SOURCE, MFSDP__MPI_TAG_NOTICE, world->control,
                                     &world->notice_receive),
                           "mpi world: MPI_Irecv"));
  MFSDP_TRY(mfsdp__mpi_try(context,
                           MPI_Irecv(&world->left_in, (int)sizeof(world->left_in), MPI_BYTE,
                                     MPI_ANY_SOURCE, MFSDP__MPI_TAG_LEFT, world->control,
                                     &world->left_receive),
                           "mpi world: MPI_Irecv"));
  world->serving = 1;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__mpi_world_fill(mfsdp_context *context, mfsdp_mpi_world *world,
                                             MPI_Comm comm) {
  const size_t count = (size_t)world->world;
  void *table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(int32_t), "mpi world: nodes", &table));
  world->node_of_rank = (int32_t *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(MPI_Request), "mpi world: probes", &table));
  world->probe_requests = (MPI_Request *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(uint64_t), "mpi world: pongs", &table));
  world->probe_words = (uint64_t *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(int64_t), "mpi world: leavers", &table));
  world->left_us = (int64_t *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(uint64_t), "mpi world: leavers", &table));
  world->left_natives = (uint64_t *)table;
  if (mfsdp_mutex_init(&world->mutex) != MFSDP_OK)
    return MFSDP_FAIL(context, MFSDP_E_MEMORY, "mpi world: the system refused a mutex");
  world->mutex_ready = 1;
  if (mfsdp_mutex_init(&world->probe_mutex) != MFSDP_OK)
    return MFSDP_FAIL(context, MFSDP_E_MEMORY, "mpi world: the system refused a mutex");
  world->probe_mutex_ready = 1;
  MFSDP_TRY(mfsdp__mpi_try(context, MPI_Comm_dup(comm, &world->data), "mpi world: MPI_Comm_dup"));
  MFSDP_TRY(
      mfsdp__mpi_try(context, MPI_Comm_dup(comm, &world->control), "mpi world: MPI_Comm_dup"));
  (void)MPI_Comm_set_errhandler(world->data, MPI_ERRORS_RETURN);
  (void)MPI_Comm_set_errhandler(world->control, MPI_ERRORS_RETURN);
  MFSDP_TRY(mfsdp__mpi_map_nodes(context, world));
  MFSDP_TRY(mfsdp__mpi_same_size(context, world, world->desc.message_nbytes, "message_nbytes"));
  MFSDP_TRY(mfsdp__mpi_same_size(context, world, world->desc.control_nbytes, "control_nbytes"));
  return mfsdp__mpi_start_service(context, world);
}

MFSDP_API void mfsdp__mpi_stop_service(mfsdp_mpi_world *world) {
  MPI_Request *requests[3];
  int i;
  requests[0] = &world->ping_receive;
  requests[1] = &world->notice_receive;
  requests[2] = &world->left_receive;
  for (i = 0; i < 3; ++i)
    if (*requests[i] != MPI_REQUEST_NULL) {
      (void)MPI_Cancel(requests[i]);
      (void)MPI_Wait(requests[i], MPI_STATUS_IGNORE);
    }
  if (world->pong_send != MPI_REQUEST_NULL) (void)MPI_Request_free(&world->pong_send);
  world->serving = 0;
}

MFSDP_API void mfsdp__mpi_world_free(mfsdp_context *context, mfsdp_mpi_world *world) {
  const size_t count = (size_t)world->world;
  mfsdp__mpi_stop_service(world);
  /* Freeing a communicator asks its peers: after a failure there may be none. */
  if (world->control != MPI_COMM_NULL && !world->poisoned) (void)MPI_Comm_free(&world->control);
  if (world->data != MPI_COMM_NULL && !world->poisoned) (void)MPI_Comm_free(&world->data);
  if (world->probe_mutex_ready) mfsdp_mutex_destroy(&world->probe_mutex);
  if (world->mutex_ready) mfsdp_mutex_destroy(&world->mutex);
  mfsdp_table_free(context, world->left_natives, count, sizeof(uint64_t));
  mfsdp_table_free(context, world->left_us, count, sizeof(int64_t));
  mfsdp_table_free(context, world->probe_words, count, sizeof(uint64_t));
  mfsdp_table_free(context, world->probe_requests, count, sizeof(MPI_Request));
  mfsdp_table_free(context, world->node_of_rank, count, sizeof(int32_t));
  mfsdp_table_free(context, world, 1, sizeof(*world));
}

/*
 * Makes a world of the ranks of `comm`. Collective over it: every rank calls with the same
 * description; set-up blocks in MPI without a deadline of ours. E_ARGUMENT, E_STATE if MPI is not
 * initialized or is finalized, E_MEMORY, E_MISMATCH if sizes differ between ranks, E_PEER with MPI's
 * words. *out is NULL then.
 */
MFSDP_API mfsdp_status mfsdp_mpi_world_wrap(mfsdp_context *context, MPI_Comm comm,
                                            const mfsdp_mpi_world_desc *desc,
                                            mfsdp_mpi_world **out) {
  mfsdp_mpi_world *world;
  mfsdp_status status;
  int ready = 0, ended = 0, rank = 0, size = 0, level = 0;
  void *table;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mpi world: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__mpi_desc_check(context, desc));
  (void)MPI_Initialized(&ready);
  (void)MPI_Finalized(&ended);
  if (!ready || ended)
    return MFSDP_FAIL(context, MFSDP_E_STATE, "mpi world: MPI is %s",
                      ended ? "finalized" : "not initialized (call MPI_Init_thread first)");
  if (comm == MPI_COMM_NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mpi world: comm is MPI_COMM_NULL");
  MFSDP_TRY(mfsdp__mpi_try(context, MPI_Comm_rank(comm, &rank), "mpi world: MPI_Comm_rank"));
  MFSDP_TRY(mfsdp__mpi_try(context, MPI_Comm_size(comm, &size), "mpi world: MPI_Comm_size"));
  MFSDP_TRY(mfsdp__mpi_try(context, MPI_Query_thread(&level), "mpi world: MPI_Query_thread"));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*world), "mpi world", &table));
  world = (mfsdp_mpi_world *)table;
  world->desc = *desc;
  if (level == MPI_THREAD_MULTIPLE) world->desc.lock = world->desc.unlock = NULL;
  world->data = world->control = MPI_COMM_NULL;
  world->ping_receive = world->pong_send = MPI_REQUEST_NULL;
  world->notice_receive = world->left_receive = MPI_REQUEST_NULL;
  world->rank = rank;
  world->world = size;
  world->thread_level = level;
  world->creator = pthread_self();
  world->error = mfsdp_error_none();
  status = mfsdp__mpi_world_fill(context, world, comm);
  if (status != MFSDP_OK) {
    mfsdp__mpi_world_free(context, world);
    return status;
  }
  *out = world;
  return MFSDP_OK;
}

/* Until every peer has left, so that nothing is on the way when the communicators go. -1, or the
 * first rank that has not at the deadline. */
MFSDP_API int32_t mfsdp__mpi_wait_for_leavers(mfsdp_mpi_world *world) {
  const int64_t deadline_us = mfsdp_clock_deadline_us(world->desc.deadline_us);
  int64_t idle = 0;
  int32_t r = 0;
  while (r < world->world && !mfsdp__mpi_poisoned(world)) {
    if (r == world->rank || mfsdp__mpi_left_us(world, r) != 0) {
      ++r;
      continue;
    }
    if (mfsdp_clock_us() >= deadline_us) return r;
    mfsdp__mpi_serve(world);
    mfsdp__mpi_pause(world, idle++);
  }
  return -1;
}

/*
 * Ends a world whose transport and control plane are destroyed; NULL is allowed. Collective: waits
 * until all ranks have come here or to the end of their transport or control plane. On a poisoned
 * world it waits for nobody: the duplicates stay with MPI, and the process should leave by MPI_Abort
 * (docs/failure.md). E_STATE after MPI_Finalize; E_TIMEOUT names a rank that has not come, and the
 * world is gone all the same.
 */
MFSDP_API mfsdp_status mfsdp_mpi_world_destroy(mfsdp_context *context, mfsdp_mpi_world *world) {
  mfsdp_status status = MFSDP_OK;
  int32_t late = -1;
  int ended = 0;
  if (world == NULL) return MFSDP_OK;
  (void)MPI_Finalized(&ended);
  if (ended)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "mpi world: destroyed after MPI_Finalize; its "
                      "communicators are lost");
  mfsdp__mpi_say_left(world);
  late = mfsdp__mpi_wait_for_leavers(world);
  if (late >= 0) {
    mfsdp_error why = mfsdp_error_none();
    (void)MFSDP_ERROR_SET(&why, MFSDP_E_TIMEOUT, late,
                          "mpi world: rank %d waited %lld ms for rank %d to end its world",
                          (int)world->rank, (long long)(world->desc.deadline_us / 1000), (int)late);
    mfsdp_mpi_world_poison(world, &why);
    status = mfsdp_context_take_error(context, &why);
  }
  mfsdp__mpi_world_free(context, world);
  return status;
}

#endif /* MFSDP_MPI_MPI_WORLD_H */
