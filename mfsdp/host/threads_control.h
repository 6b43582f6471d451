/* SPDX-License-Identifier: MIT */
/*
 * threads_control.h - the control plane of ranks that are threads: all-gather of small messages.
 *
 *   mfsdp_control control;
 *   MFSDP_TRY(mfsdp_threads_control_create(context, world, rank, &control));   // each rank, once
 *   MFSDP_TRY(control.ops->allgather(control.self, context, &hash, sizeof(hash), hashes,
 *                                    control.deadline_us));                    // COMPLETE
 *   mfsdp_threads_control_destroy(&control);
 *
 * A message of 0 bytes makes a barrier. Messages are limited by the world's control_nbytes.
 * Does not: carry tensors, or go on after an error (it shares the fate of the world's transport).
 * Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_HOST_THREADS_CONTROL_H
#define MFSDP_HOST_THREADS_CONTROL_H

#include "../posix/control_check.h"
#include "threads_world.h"

MFSDP_API uint64_t mfsdp__meeting_generation(const mfsdp__threads_meeting *meeting) {
  return __atomic_load_n(&meeting->generation, __ATOMIC_ACQUIRE);
}

MFSDP_API unsigned char *mfsdp__meeting_message(mfsdp_threads_world *world, uint64_t generation,
                                                int32_t rank) {
  const size_t count = (size_t)world->desc.world;
  return world->meeting.messages +
         ((size_t)(generation % 2) * count + (size_t)rank) * world->desc.control_nbytes;
}

MFSDP_API size_t *mfsdp__meeting_nbytes(mfsdp_threads_world *world, uint64_t generation) {
  return world->meeting.message_nbytes + (size_t)(generation % 2) * (size_t)world->desc.world;
}

/*
 * Puts the message down and arrives. Odd and even meetings have places of their own: a rank can
 * come to meeting g + 2 only after all have come to g + 1, that is, after all have read those of g.
 */
MFSDP_API void mfsdp__meeting_arrive(mfsdp__threads_slot *slot, uint64_t generation, const void *in,
                                     size_t nbytes) {
  mfsdp_threads_world *world = slot->world;
  mfsdp__threads_meeting *meeting = &world->meeting;
  if (nbytes > 0) memcpy(mfsdp__meeting_message(world, generation, slot->rank), in, nbytes);
  mfsdp__meeting_nbytes(world, generation)[slot->rank] = nbytes;
  mfsdp_mutex_lock(&meeting->mutex);
  meeting->arrived[slot->rank] = generation + 1;
  if (++meeting->arrived_count == world->desc.world) {
    meeting->arrived_count = 0;
    __atomic_store_n(&meeting->generation, generation + 1, __ATOMIC_RELEASE);
    mfsdp_cond_broadcast(&meeting->cond);
  }
  mfsdp_mutex_unlock(&meeting->mutex);
}

/* With the meeting's mutex: the first rank that has left and is missing here, or -1. */
MFSDP_API int32_t mfsdp__meeting_lost(mfsdp_threads_world *world, uint64_t generation) {
  int32_t r;
  if (__atomic_load_n(&world->left_count, __ATOMIC_ACQUIRE) == 0) return -1;
  for (r = 0; r < world->desc.world; ++r)
    if (world->meeting.arrived[r] <= generation &&
        mfsdp__threads_role(&world->slots[r].control_role) == MFSDP__THREADS_LEFT)
      return r;
  return -1;
}

/* Waits until all have arrived. The outcome goes to *status: OK, E_TIMEOUT, E_PEER (then *lost), or
 * E_POISONED. */
MFSDP_API mfsdp_status mfsdp__meeting_wait(mfsdp__threads_slot *slot, uint64_t generation,
                                           int64_t deadline_us, int32_t *lost) {
  mfsdp_threads_world *world = slot->world;
  mfsdp__threads_meeting *meeting = &world->meeting;
  mfsdp_status status = MFSDP_OK;
  if (mfsdp__meeting_generation(meeting) > generation) return MFSDP_OK;
  mfsdp_mutex_lock(&meeting->mutex);
  while (status == MFSDP_OK && mfsdp__meeting_generation(meeting) <= generation) {
    *lost = mfsdp__meeting_lost(world, generation);
    if (mfsdp__threads_poisoned(world))
      status = MFSDP_E_POISONED;
    else if (*lost >= 0)
      status = MFSDP_E_PEER;
    else if (!mfsdp_cond_wait_until(&meeting->cond, &meeting->mutex, deadline_us) &&
             mfsdp__meeting_generation(meeting) <= generation)
      status = MFSDP_E_TIMEOUT;
  }
  mfsdp_mutex_unlock(&meeting->mutex);
  return status;
}

/* Names the ranks that have not come. */
MFSDP_API void mfsdp__meeting_explain(mfsdp__threads_slot *slot, uint64_t generation,
                                      int64_t waited_us, mfsdp_error *why) {
  mfsdp_threads_world *world = slot->world;
  int32_t r;
  (void)MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, -1, "control allgather: rank %d waited %lld ms",
                        (int)slot->rank, (long long)(waited_us / 1000));
  for (r = 0; r < world->desc.world; ++r) {
    int here;
    mfsdp_mutex_lock(&world->meeting.mutex);
    here = world->meeting.arrived[r] > generation;
    mfsdp_mutex_unlock(&world->meeting.mutex);
    if (here) continue;
    mfsdp__threads_append(why->message, sizeof(why->message), "; rank %d has not come and %s",
                          (int)r, mfsdp__threads_whereabouts(world, r));
    if (why->culprit < 0) why->culprit = r;
  }
}

/* All ranks see the same sizes, so all come to the same verdict without another word. */
MFSDP_API mfsdp_status mfsdp__meeting_compare(mfsdp__threads_slot *slot, uint64_t generation,
                                              mfsdp_error *why) {
  const size_t *nbytes = mfsdp__meeting_nbytes(slot->world, generation);
  int32_t r;
  for (r = 1; r < slot->world->desc.world; ++r)
    if (nbytes[r] != nbytes[0])
      return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                             "control allgather: rank 0 brings %zu bytes, rank %d brings %zu",
                             nbytes[0], (int)r, nbytes[r]);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__threads_control_check(mfsdp__threads_slot *slot,
                                                    mfsdp_context *context, const void *in,
                                                    size_t nbytes, const void *out,
                                                    int64_t timeout_us) {
  MFSDP_TRY(mfsdp__control_check_gather(context, in, nbytes, out, timeout_us,
                                        slot->world->desc.control_nbytes,
                                        "mfsdp_threads_world_desc.control_nbytes"));
  if (mfsdp__threads_role(&slot->control_role) != MFSDP__THREADS_JOINED)
    return MFSDP_FAIL(context, MFSDP_E_STATE, "control allgather: rank %d has left",
                      (int)slot->rank);
  if (mfsdp__threads_poisoned(slot->world))
    return mfsdp__threads_refuse(slot->world, context, "control allgather");
  return MFSDP_OK;
}

MFSDP_API void mfsdp__threads_in_control(mfsdp__threads_slot *slot, int32_t in_control) {
  mfsdp_mutex_lock(&slot->mutex);
  slot->in_control = in_control;
  mfsdp_mutex_unlock(&slot->mutex);
}

/* The table's allgather. An error other than E_ARGUMENT and E_STATE poisons the world. */
MFSDP_API mfsdp_status mfsdp__threads_allgather(void *self, mfsdp_context *context, const void *in,
                                                size_t nbytes, void *out, int64_t timeout_us) {
  mfsdp__threads_slot *slot = (mfsdp__threads_slot *)self;
  mfsdp_threads_world *world = slot->world;
  const int64_t start_us = mfsdp_clock_us();
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status;
  uint64_t generation;
  int32_t lost = -1, r;
  MFSDP_TRY(mfsdp__threads_control_check(slot, context, in, nbytes, out, timeout_us));
  generation = slot->control_generation++;
  mfsdp__threads_in_control(slot, 1);
  mfsdp__meeting_arrive(slot, generation, in, nbytes);
  status = mfsdp__meeting_wait(slot, generation, mfsdp_clock_deadline_us(timeout_us), &lost);
  if (status == MFSDP_OK) status = mfsdp__meeting_compare(slot, generation, &why);
  if (status == MFSDP_E_TIMEOUT)
    mfsdp__meeting_explain(slot, generation, mfsdp_clock_us() - start_us, &why);
  if (status == MFSDP_E_PEER)
    (void)MFSDP_ERROR_SET(&why, status, lost,
                          "control allgather: rank %d waits for rank %d, which has left",
                          (int)slot->rank, (int)lost);
  if (status != MFSDP_OK) why.rank = slot->rank;
  if (status != MFSDP_OK && status != MFSDP_E_POISONED) mfsdp_threads_world_poison(world, &why);
  /* Not before: a peer whose own time has run out as well still finds this rank here. */
  mfsdp__threads_in_control(slot, 0);
  if (status != MFSDP_OK) {
    (void)mfsdp__threads_first_error(world, &why);
    return mfsdp_context_take_error(context, &why);
  }
  for (r = 0; r < world->desc.world && nbytes > 0; ++r)
    memcpy((unsigned char *)out + (size_t)r * nbytes, mfsdp__meeting_message(world, generation, r),
           nbytes);
  return MFSDP_OK;
}

/* A thread answers if it has joined and has left neither role; no time is needed to know. */
MFSDP_API mfsdp_status mfsdp__threads_probe(void *self, mfsdp_context *context, uint8_t *alive,
                                            int64_t timeout_us) {
  mfsdp_threads_world *world = ((mfsdp__threads_slot *)self)->world;
  int32_t r;
  (void)timeout_us;
  if (alive == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "control probe: alive is NULL");
  for (r = 0; r < world->desc.world; ++r) {
    const int32_t transport_role = mfsdp__threads_role(&world->slots[r].transport_role);
    const int32_t control_role = mfsdp__threads_role(&world->slots[r].control_role);
    alive[r] =
        (uint8_t)(transport_role != MFSDP__THREADS_LEFT && control_role != MFSDP__THREADS_LEFT &&
                  (transport_role == MFSDP__THREADS_JOINED ||
                   control_role == MFSDP__THREADS_JOINED));
  }
  return MFSDP_OK;
}

MFSDP_API int64_t mfsdp__threads_now_us(void *self) {
  (void)self;
  return mfsdp_clock_us();
}

MFSDP_API mfsdp_status mfsdp__threads_control_leave(void *self, mfsdp_context *context) {
  mfsdp__threads_slot *slot = (mfsdp__threads_slot *)self;
  (void)context;
  mfsdp__threads_leave(slot->world, &slot->control_role);
  return MFSDP_OK;
}

MFSDP_API const mfsdp_control_ops *mfsdp__threads_control_ops(void) {
  static const mfsdp_control_ops ops = {sizeof(mfsdp_control_ops), "threads",
                                        mfsdp__threads_allgather,  mfsdp__threads_probe,
                                        mfsdp__threads_now_us,     mfsdp__threads_control_leave};
  return &ops;
}

/*
 * Joins the control plane of `world` as `rank`, in any order with the transport. Allocates nothing.
 * *out holds the table; its deadline_us is the world's. COMPLETE.
 * E_ARGUMENT; E_STATE if this rank has joined before; E_POISONED.
 */
MFSDP_API mfsdp_status mfsdp_threads_control_create(mfsdp_context *context,
                                                    mfsdp_threads_world *world, int32_t rank,
                                                    mfsdp_control *out) {
  if (world == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "threads control: %s is NULL",
                      world == NULL ? "world" : "out");
  memset(out, 0, sizeof(*out));
  if (rank < 0 || rank >= world->desc.world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "threads control: rank is %d, needs 0 to %d",
                      (int)rank, (int)world->desc.world - 1);
  MFSDP_TRY(mfsdp__threads_join(world, context, rank, &world->slots[rank].control_role,
                                "threads control"));
  out->struct_nbytes = sizeof(*out);
  out->ops = mfsdp__threads_control_ops();
  out->self = &world->slots[rank];
  out->rank = rank;
  out->world = world->desc.world;
  out->deadline_us = world->desc.deadline_us;
  return MFSDP_OK;
}

/* Leaves: ranks that wait for this one, now or later, get E_PEER. Clears *control; a cleared one is
 * allowed. COMPLETE. */
MFSDP_API void mfsdp_threads_control_destroy(mfsdp_control *control) {
  if (control->self == NULL) return;
  (void)mfsdp__threads_control_leave(control->self, NULL);
  memset(control, 0, sizeof(*control));
}

#endif /* MFSDP_HOST_THREADS_CONTROL_H */
