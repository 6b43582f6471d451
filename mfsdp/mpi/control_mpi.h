/* SPDX-License-Identifier: MIT */
/*
 * control_mpi.h - the control plane of MPI processes: all-gather of small messages, probe.
 *
 *   mfsdp_control control;
 *   MFSDP_TRY(mfsdp_mpi_control_create(&context, world, &control));            // each rank
 *   MFSDP_TRY(control.ops->allgather(control.self, &context, &hash, sizeof(hash), hashes,
 *                                    control.deadline_us));                    // COMPLETE
 *   MFSDP_TRY(control.ops->destroy(control.self, &context));
 *
 * Every rank sends its message to every other one: set-up and rare agreements use it, steps do not.
 * A message of 0 bytes makes a barrier.
 * Does not: carry tensors, or go on after an error (it shares the fate of the world's transport).
 * Link flags: -lmpi -lpthread.
 */
#ifndef MFSDP_MPI_CONTROL_MPI_H
#define MFSDP_MPI_CONTROL_MPI_H

#include "../posix/control_check.h"
#include "mpi_world.h"

/* Before every message: ranks that count calls differently, or bring other sizes, are told apart. */
typedef struct mfsdp__mpi_control_head {
  uint64_t generation, nbytes;
} mfsdp__mpi_control_head;

typedef struct mfsdp__mpi_control {
  mfsdp_mpi_world *world;
  uint64_t generation;     /* calls so far */
  size_t capacity;         /* of a message, with its head */
  unsigned char *outgoing; /* capacity */
  unsigned char *incoming; /* world x capacity */
  MPI_Request *requests;   /* 2 x world: receives, then sends */
  uint8_t *alive;          /* world */
  int32_t abandoned;       /* requests of a failed call: buffers stay */
} mfsdp__mpi_control;

MFSDP_API void mfsdp__mpi_control_post(mfsdp__mpi_control *c, size_t nbytes, const void *in,
                                       int *code) {
  mfsdp_mpi_world *world = c->world;
  mfsdp__mpi_control_head head;
  int32_t r;
  head.generation = c->generation;
  head.nbytes = nbytes;
  memcpy(c->outgoing, &head, sizeof(head));
  if (nbytes > 0) memcpy(c->outgoing + sizeof(head), in, nbytes);
  mfsdp__mpi_lock(world);
  for (r = 0; r < 2 * world->world; ++r)
    c->requests[r] = MPI_REQUEST_NULL;
  for (r = 0; r < world->world && *code == MPI_SUCCESS; ++r)
    if (r != world->rank)
      *code = MPI_Irecv(c->incoming + (size_t)r * c->capacity, (int)c->capacity, MPI_BYTE, r,
                        MFSDP__MPI_TAG_GATHER, world->control, &c->requests[r]);
  for (r = 0; r < world->world && *code == MPI_SUCCESS; ++r)
    if (r != world->rank)
      *code = MPI_Isend(c->outgoing, (int)(sizeof(head) + nbytes), MPI_BYTE, r,
                        MFSDP__MPI_TAG_GATHER, world->control, &c->requests[world->world + r]);
  mfsdp__mpi_unlock(world);
}

/* Tests all requests: how many are still open. */
MFSDP_API int32_t mfsdp__mpi_control_open_count(mfsdp__mpi_control *c, int *code) {
  int32_t r, open = 0;
  mfsdp__mpi_lock(c->world);
  for (r = 0; r < 2 * c->world->world && *code == MPI_SUCCESS; ++r) {
    int flag = 1;
    if (c->requests[r] == MPI_REQUEST_NULL) continue;
    *code = MPI_Test(&c->requests[r], &flag, MPI_STATUS_IGNORE);
    open += !flag;
  }
  mfsdp__mpi_unlock(c->world);
  return open;
}

/* After a failure: receives are cancelled; what does not end at once keeps its buffer for ever. */
MFSDP_API void mfsdp__mpi_control_abandon(mfsdp__mpi_control *c) {
  int32_t r;
  int code = MPI_SUCCESS;
  mfsdp__mpi_lock(c->world);
  for (r = 0; r < c->world->world; ++r)
    if (c->requests[r] != MPI_REQUEST_NULL) (void)MPI_Cancel(&c->requests[r]);
  mfsdp__mpi_unlock(c->world);
  c->abandoned = mfsdp__mpi_control_open_count(c, &code);
}

/* The first rank whose message is missing and that has left long enough ago, or -1. */
MFSDP_API int32_t mfsdp__mpi_control_leaver(mfsdp__mpi_control *c) {
  int32_t r;
  for (r = 0; r < c->world->world; ++r) {
    int64_t left_us;
    if (c->requests[r] == MPI_REQUEST_NULL) continue;
    left_us = mfsdp__mpi_left_us(c->world, r);
    if (left_us != 0 && mfsdp_clock_us() - left_us > MFSDP__MPI_LEFT_GRACE_US) return r;
  }
  return -1;
}

/* Names the ranks that have not come, and which of them do not answer. */
MFSDP_API void mfsdp__mpi_control_explain(mfsdp__mpi_control *c, int64_t waited_us,
                                          mfsdp_error *why) {
  mfsdp_mpi_world *world = c->world;
  int32_t r, silent = -1, missing = -1;
  (void)MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, -1, "control allgather: rank %d waited %lld ms",
                        (int)world->rank, (long long)(waited_us / 1000));
  mfsdp__mpi_probe(world, c->alive, MFSDP__MPI_PROBE_US);
  for (r = 0; r < world->world; ++r) {
    if (c->requests[r] == MPI_REQUEST_NULL) continue;
    mfsdp__mpi_append(why->message, sizeof(why->message), "; rank %d has not come and %s", (int)r,
                      c->alive[r] ? "is in another call" : "does not answer");
    if (missing < 0) missing = r;
    if (silent < 0 && !c->alive[r]) silent = r;
  }
  why->culprit = silent >= 0 ? silent : missing;
}

MFSDP_API mfsdp_status mfsdp__mpi_control_wait(mfsdp__mpi_control *c, int64_t timeout_us, int code,
                                               mfsdp_error *why) {
  mfsdp_mpi_world *world = c->world;
  const int64_t start_us = mfsdp_clock_us();
  const int64_t deadline_us = mfsdp_clock_deadline_us(timeout_us);
  int64_t idle = 0;
  for (;;) {
    const int32_t open = mfsdp__mpi_control_open_count(c, &code);
    int32_t leaver;
    if (code != MPI_SUCCESS) return mfsdp__mpi_explain(code, -1, "control allgather", why);
    if (open == 0) return MFSDP_OK;
    if (mfsdp__mpi_poisoned(world)) return MFSDP_E_POISONED;
    leaver = mfsdp__mpi_control_leaver(c);
    if (leaver >= 0)
      return MFSDP_ERROR_SET(why, MFSDP_E_PEER, leaver,
                             "control allgather: rank %d waits for rank %d, which has left",
                             (int)world->rank, (int)leaver);
    if (mfsdp_clock_us() >= deadline_us) {
      mfsdp__mpi_control_explain(c, mfsdp_clock_us() - start_us, why);
      return mfsdp__mpi_poisoned(world) ? MFSDP_E_POISONED : MFSDP_E_TIMEOUT;
    }
    mfsdp__mpi_pause(world, idle++);
  }
}

/* All ranks see the same heads, so all come to the same verdict without another word. */
MFSDP_API mfsdp_status mfsdp__mpi_control_compare(mfsdp__mpi_control *c, size_t nbytes,
                                                  mfsdp_error *why) {
  mfsdp__mpi_control_head first, head;
  int32_t r;
  memcpy(c->incoming + (size_t)c->world->rank * c->capacity, c->outgoing, sizeof(head) + nbytes);
  memcpy(&first, c->incoming, sizeof(first));
  for (r = 1; r < c->world->world; ++r) {
    memcpy(&head, c->incoming + (size_t)r * c->capacity, sizeof(head));
    if (head.nbytes != first.nbytes || head.generation != first.generation)
      return mfsdp__control_differ(r, first.nbytes, first.generation, head.nbytes, head.generation,
                                   why);
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__mpi_control_check(mfsdp__mpi_control *c, mfsdp_context *context,
                                                const void *in, size_t nbytes, const void *out,
                                                int64_t timeout_us) {
  MFSDP_TRY(mfsdp__control_check_gather(context, in, nbytes, out, timeout_us,
                                        c->world->desc.control_nbytes,
                                        "mfsdp_mpi_world_desc.control_nbytes"));
  if (mfsdp__mpi_poisoned(c->world))
    return mfsdp__mpi_refuse(c->world, context, "control allgather");
  if (!mfsdp__mpi_thread_allowed(c->world))
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "control allgather: this thread may not call MPI (see "
                      "mfsdp_mpi_world_threads)");
  return MFSDP_OK;
}

/* The table's allgather. An error other than E_ARGUMENT and E_UNSUPPORTED poisons the world. */
MFSDP_API mfsdp_status mfsdp__mpi_allgather(void *self, mfsdp_context *context, const void *in,
                                            size_t nbytes, void *out, int64_t timeout_us) {
  mfsdp__mpi_control *c = (mfsdp__mpi_control *)self;
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status;
  int code = MPI_SUCCESS;
  int32_t r;
  MFSDP_TRY(mfsdp__mpi_control_check(c, context, in, nbytes, out, timeout_us));
  mfsdp__mpi_control_post(c, nbytes, in, &code);
  ++c->generation;
  status = mfsdp__mpi_control_wait(c, timeout_us, code, &why);
  if (status == MFSDP_OK) status = mfsdp__mpi_control_compare(c, nbytes, &why);
  if (status != MFSDP_OK) {
    mfsdp__mpi_control_abandon(c);
    if (status != MFSDP_E_POISONED) mfsdp_mpi_world_poison(c->world, &why);
    (void)mfsdp__mpi_first_error(c->world, &why);
    return mfsdp_context_take_error(context, &why);
  }
  for (r = 0; r < c->world->world && nbytes > 0; ++r)
    memcpy((unsigned char *)out + (size_t)r * nbytes,
           c->incoming + (size_t)r * c->capacity + sizeof(mfsdp__mpi_control_head), nbytes);
  return MFSDP_OK;
}

/* The table's probe. */
MFSDP_API mfsdp_status mfsdp__mpi_control_probe(void *self, mfsdp_context *context, uint8_t *alive,
                                                int64_t timeout_us) {
  mfsdp__mpi_control *c = (mfsdp__mpi_control *)self;
  if (alive == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "control probe: alive is NULL");
  mfsdp__mpi_probe(c->world, alive, timeout_us);
  return MFSDP_OK;
}

MFSDP_API int64_t mfsdp__mpi_now_us(void *self) {
  (void)self;
  return mfsdp_clock_us();
}

MFSDP_API void mfsdp__mpi_control_free(mfsdp_context *context, mfsdp__mpi_control *c) {
  const size_t count = (size_t)c->world->world;
  mfsdp_table_free(context, c->alive, count, sizeof(uint8_t));
  mfsdp_table_free(context, c->requests, 2 * count, sizeof(MPI_Request));
  mfsdp_table_free(context, c->incoming, count, c->capacity);
  mfsdp_table_free(context, c->outgoing, 1, c->capacity);
  mfsdp_table_free(context, c, 1, sizeof(*c));
}

/* Leaves: ranks that wait for this one get E_PEER. E_STATE, and nothing is freed, while messages of
 * a failed call are still in MPI's hands: the process must leave without freeing them. */
MFSDP_API mfsdp_status mfsdp__mpi_control_destroy(void *self, mfsdp_context *context) {
  mfsdp__mpi_control *c = (mfsdp__mpi_control *)self;
  int code = MPI_SUCCESS;
  if (c == NULL) return MFSDP_OK;
  if (c->abandoned > 0) c->abandoned = mfsdp__mpi_control_open_count(c, &code);
  if (c->abandoned > 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "mpi control: %d messages of a failed call are still in MPI's hands",
                      (int)c->abandoned);
  if (!mfsdp__mpi_poisoned(c->world)) mfsdp__mpi_say_left(c->world);
  mfsdp__mpi_control_free(context, c);
  return MFSDP_OK;
}

MFSDP_API const mfsdp_control_ops *mfsdp__mpi_control_ops(void) {
  static const mfsdp_control_ops ops = {sizeof(mfsdp_control_ops), "mpi",
                                        mfsdp__mpi_allgather,      mfsdp__mpi_control_probe,
                                        mfsdp__mpi_now_us,         mfsdp__mpi_control_destroy};
  return &ops;
}

MFSDP_API mfsdp_status mfsdp__mpi_control_alloc(mfsdp_context *context, mfsdp__mpi_control *c) {
  const size_t count = (size_t)c->world->world;
  void *table;
  MFSDP_TRY(mfsdp_table_alloc(context, 1, c->capacity, "mpi control: message", &table));
  c->outgoing = (unsigned char *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, c->capacity, "mpi control: messages", &table));
  c->incoming = (unsigned char *)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, 2 * count, sizeof(MPI_Request), "mpi control: requests", &table));
  c->requests = (MPI_Request *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(uint8_t), "mpi control: answers", &table));
  c->alive = (uint8_t *)table;
  return MFSDP_OK;
}

/* Joins the control plane of `world`; one for each world. COMPLETE. E_ARGUMENT, E_MEMORY,
 * E_POISONED. */
MFSDP_API mfsdp_status mfsdp_mpi_control_create(mfsdp_context *context, mfsdp_mpi_world *world,
                                                mfsdp_control *out) {
  mfsdp__mpi_control *c;
  mfsdp_status status;
  void *table;
  if (world == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mpi control: %s is NULL",
                      world == NULL ? "world" : "out");
  memset(out, 0, sizeof(*out));
  if (mfsdp__mpi_poisoned(world)) return mfsdp__mpi_refuse(world, context, "mpi control");
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*c), "mpi control", &table));
  c = (mfsdp__mpi_control *)table;
  c->world = world;
  c->capacity = sizeof(mfsdp__mpi_control_head) + world->desc.control_nbytes;
  status = mfsdp__mpi_control_alloc(context, c);
  if (status != MFSDP_OK) {
    mfsdp__mpi_control_free(context, c);
    return status;
  }
  out->struct_nbytes = sizeof(*out);
  out->ops = mfsdp__mpi_control_ops();
  out->self = c;
  out->rank = world->rank;
  out->world = world->world;
  out->deadline_us = world->desc.deadline_us;
  return MFSDP_OK;
}

#endif /* MFSDP_MPI_CONTROL_MPI_H */
