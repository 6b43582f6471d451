/* SPDX-License-Identifier: MIT */
/*
 * runtime/banded.h - the step of BANDED matrices: bands of directions are exchanged, so that whole
 * matrices are orthogonalized somewhere, and bands committed everywhere. Part of runtime.h.
 *
 *   prepare      each rank writes the directions of its own bands
 *   rounds       HOME: the bands of a batch of matrices go to each home, all homes at once,
 *                Newton-Schulz there, and the bands of the result go back to where they came from.
 *                EVERYWHERE: the bands of one batch go to all ranks, which all do the same work and
 *                keep their own bands of it.
 *   commit       mfsdp_optimizer_step, on bands
 *
 * While one round computes, the next one's bands arrive and the result of the one before leaves:
 * the communication queue runs gather 0, gather 1, scatter 0, gather 2, scatter 1 ..., and two
 * slots in turn are enough, since a slot's scatter comes before its next gather. Groups come one
 * after the other and do not overlap: ranks differ in which groups follow, and would wait for each
 * other in a circle.
 *
 * A rank's bands of a round lie side by side, and so do a peer's in a slot: one message for each
 * peer and direction, however many small matrices share a batch. Batches of more than one are then
 * copied apart into whole matrices, and back: local copies, instead of as many messages, each with
 * a latency. A single matrix needs none of it: its bands in rank order are the matrix.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_BANDED_H
#define MFSDP_RUNTIME_BANDED_H

#include "measure_banded.h"

/* This rank's bands of a round in its directions; NULL without any. */
MFSDP_API float *mfsdp__banded_directions(const mfsdp_runtime *rt, const mfsdp__banded_round *r) {
  return r->band_count > 0 ? (float *)rt->banded.directions.data + r->direction_first : NULL;
}

/* Where this rank's batch of a round arrives; NULL if it has none. */
MFSDP_API float *mfsdp__banded_slot(const mfsdp_runtime *rt, const mfsdp__banded_round *r) {
  return r->matrix_count > 0 ? (float *)rt->banded.slots.data + r->slot * rt->banded.slot_count
                             : NULL;
}

/* Where it is worked on: where it has arrived, or copied apart. */
MFSDP_API float *mfsdp__banded_whole(const mfsdp_runtime *rt, const mfsdp__banded_round *r) {
  return r->copy_count > 0 ? (float *)rt->banded.whole.data : mfsdp__banded_slot(rt, r);
}

/* Copies [first, first + count) of the table: from whole matrices to what is packed, or the
 * reverse. */
MFSDP_API mfsdp_status mfsdp__banded_copies(mfsdp_runtime *rt, int32_t first, int32_t count,
                                            float *packed, float *whole, int pack) {
  const mfsdp_backend *backend = rt->backend;
  int32_t i;
  for (i = first; i < first + count; ++i) {
    const mfsdp__banded_copy *c = &rt->banded.copies[i];
    float *const a = packed + c->packed, *const b = whole + c->whole;
    MFSDP_TRY(backend->ops->copy(backend->self, rt->compute, pack ? a : b, MFSDP_SPACE_DEVICE,
                                 pack ? b : a, MFSDP_SPACE_DEVICE,
                                 (size_t)c->count * sizeof(float)));
  }
  return MFSDP_OK;
}

/* The bands of a round on their way; its slot is free once the round before in it is done. */
MFSDP_API mfsdp_status mfsdp__banded_gather(mfsdp_runtime *rt, const mfsdp__banded_round *r) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__banded *b = &rt->banded;
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, b->worked[r->slot]));
  MFSDP_TRY(mfsdp_gather(rt->context, r->gather, rt->communication, mfsdp__banded_directions(rt, r),
                         mfsdp__banded_slot(rt, r)));
  return ops->event_record(rt->backend->self, rt->communication, b->gathered[r->slot]);
}

/* Newton-Schulz of this rank's batch, if it has one. */
MFSDP_API mfsdp_status mfsdp__banded_work(mfsdp_runtime *rt, const mfsdp__banded_round *r) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__banded *b = &rt->banded;
  float *slot = mfsdp__banded_slot(rt, r), *whole = mfsdp__banded_whole(rt, r);
  if (r->matrix_count == 0) return MFSDP_OK;
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->compute, b->gathered[r->slot]));
  MFSDP_TRY(mfsdp__banded_copies(rt, r->copy_first, r->copy_count, slot, whole, 0));
  MFSDP_TRY(mfsdp_optimizer_orthogonalize(rt->context, rt->optimizer, rt->compute, r->hyper_group,
                                          r->rows, r->cols, r->matrix_count, whole, r->stride,
                                          b->workspace.data, b->workspace.nbytes));
  if (r->scatter != NULL)
    MFSDP_TRY(mfsdp__banded_copies(rt, r->copy_first, r->copy_count, slot, whole, 1));
  MFSDP_TRY(mfsdp__banded_copies(rt, r->own_first, r->own_count, mfsdp__banded_directions(rt, r),
                                 whole, 1));
  return ops->event_record(rt->backend->self, rt->compute, b->worked[r->slot]);
}

/* The result back to where its bands belong. */
MFSDP_API mfsdp_status mfsdp__banded_scatter(mfsdp_runtime *rt, const mfsdp__banded_round *r) {
  if (r->scatter == NULL) return MFSDP_OK;
  MFSDP_TRY(rt->backend->ops->queue_wait(rt->backend->self, rt->communication,
                                         rt->banded.worked[r->slot]));
  return mfsdp_scatter(rt->context, r->scatter, rt->communication, mfsdp__banded_slot(rt, r),
                       mfsdp__banded_directions(rt, r));
}

/* After the verdict, before the commit: the directions of this rank's bands become what they are
 * in the orthogonalized matrices. */
MFSDP_API mfsdp_status mfsdp__banded_step(mfsdp_runtime *rt) {
  mfsdp__banded *b = &rt->banded;
  int32_t t;
  if (b->round_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp_trace_mark_enqueue(rt->backend, rt->compute, &b->begin));
  MFSDP_TRY(mfsdp_optimizer_prepare(rt->context, rt->optimizer, rt->compute, MFSDP__BANDED_STAGE,
                                    (const mfsdp_step_scalars *)rt->verdict.scalars.data,
                                    (const uint32_t *)rt->verdict.present.data));
  MFSDP_TRY(mfsdp__runtime_order(rt, rt->compute, rt->compute_done, rt->communication));
  for (t = 0; t < b->round_count; ++t) {
    const mfsdp__banded_round *r = &b->rounds[t];
    if (r->opens_group) MFSDP_TRY(mfsdp__banded_gather(rt, r));
    if (t + 1 < b->round_count && !r[1].opens_group) MFSDP_TRY(mfsdp__banded_gather(rt, r + 1));
    MFSDP_TRY(mfsdp__banded_work(rt, r));
    MFSDP_TRY(mfsdp__banded_scatter(rt, r));
  }
  MFSDP_TRY(mfsdp__runtime_order(rt, rt->communication, rt->reduced, rt->compute));
  return mfsdp_trace_mark_enqueue(rt->backend, rt->compute, &b->end);
}

#endif /* MFSDP_RUNTIME_BANDED_H */
