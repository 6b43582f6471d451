/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup.h - builds the runtime's tables from a plan, and takes them down. Part of
 * runtime.h.
 *
 * The only place that reads options. A step replays what is made here.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_H
#define MFSDP_RUNTIME_SETUP_H

#include "setup_banded.h"
#include "setup_register.h"
#include "setup_stage.h"
#include "setup_verdict.h"
#include "step.h"

/* ---- optimizer ---- */

MFSDP_API mfsdp_optimizer_tensor mfsdp__setup_tensor(const mfsdp_runtime *rt,
                                                     const mfsdp__group_entry *group,
                                                     const mfsdp_piece *piece) {
  mfsdp_optimizer_tensor tensor = mfsdp__piece_tensor(rt->desc, group->plan, piece);
  tensor.param = rt->params[group->param_first + piece->param].presence;
  tensor.master = mfsdp__piece_master(rt, piece);
  tensor.param_data = mfsdp__piece_copy(rt, piece);
  tensor.grad = mfsdp__piece_sums(rt, piece);
  return tensor;
}

/* Lists this rank's trainable pieces, group after group; counts them while `tensors` is NULL. */
MFSDP_API int32_t mfsdp__setup_tensors(const mfsdp_runtime *rt, mfsdp_optimizer_tensor *tensors) {
  int32_t used = 0, g, i;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__group_entry *group = &rt->groups[g];
    int32_t count = 0;
    const mfsdp_piece *pieces = mfsdp_plan_pieces(group->plan, -1, &count);
    for (i = 0; i < count; ++i) {
      if (!mfsdp__holds(group, &pieces[i]) || pieces[i].grad_shard_offset < 0) continue;
      if (tensors != NULL) tensors[used] = mfsdp__setup_tensor(rt, group, &pieces[i]);
      ++used;
    }
  }
  return used;
}

MFSDP_API mfsdp_status mfsdp__setup_optimizer(mfsdp_runtime *rt, const mfsdp__sizes *sizes) {
  const int32_t count = mfsdp__setup_tensors(rt, NULL);
  mfsdp_optimizer_desc desc = *rt->desc->optimizer;
  mfsdp_status status;
  void *tensors;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)count, sizeof(mfsdp_optimizer_tensor),
                              "runtime optimizer tensors", &tensors));
  (void)mfsdp__setup_tensors(rt, (mfsdp_optimizer_tensor *)tensors);
  desc.state_space = rt->desc->state_space;
  status = mfsdp__setup_stages(rt, sizes, (mfsdp_optimizer_tensor *)tensors, count);
  if (status == MFSDP_OK)
    status = mfsdp__setup_banded(rt, sizes, (mfsdp_optimizer_tensor *)tensors);
  if (status == MFSDP_OK)
    status = mfsdp_optimizer_create(rt->context, rt->backend, &desc,
                                    (const mfsdp_optimizer_tensor *)tensors, count, &rt->optimizer);
  mfsdp_table_free(rt->context, tensors, (size_t)count, sizeof(mfsdp_optimizer_tensor));
  return status;
}

/* ---- life cycle ---- */

MFSDP_API mfsdp_status mfsdp__setup_queues(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  MFSDP_TRY(ops->queue_create(self, rt->context, "communication", &rt->communication));
  rt->compute = rt->desc->compute_queue;
  if (rt->compute == NULL) {
    MFSDP_TRY(ops->queue_create(self, rt->context, "compute", &rt->compute));
    rt->owns_compute = 1;
  }
  MFSDP_TRY(ops->event_create(self, rt->context, &rt->compute_done));
  MFSDP_TRY(ops->event_create(self, rt->context, &rt->reduced));
  MFSDP_TRY(ops->event_create(self, rt->context, &rt->verdict_ready));
  return ops->event_create(self, rt->context, &rt->step_done);
}

/* What an export moves at a time, at most. Ranks that have other groups beside this one may have
 * larger slots than their peers: it goes by what the group's own units need, which every rank's
 * slots have; where an export may find a slot in either ring (params.h), by the smaller ones. */
MFSDP_API int64_t mfsdp__export_count(const mfsdp_runtime *rt, int32_t group) {
  size_t params = MFSDP_ALIGN_NBYTES, grads = MFSDP_ALIGN_NBYTES;
  int32_t u, resident = 0, keeps = 0;
  if (rt->group_count == 1) return INT64_MAX; /* whatever the slot holds */
  for (u = 0; u < rt->unit_count; ++u) {
    const mfsdp__unit *unit = &rt->units[u];
    if (unit->group != group) continue;
    resident = unit->resident;
    keeps = unit->keeps[MFSDP_USE_FORWARD];
    mfsdp__size_max(&params, (size_t)unit->full_count * mfsdp_dtype_nbytes(unit->compute));
    mfsdp__size_max(&grads, (size_t)unit->grad_count * mfsdp_dtype_nbytes(unit->grad));
  }
  if (resident || (keeps && grads < params)) params = grads;
  return (int64_t)(params / sizeof(float));
}

MFSDP_API mfsdp_status mfsdp__setup_export(mfsdp_runtime *rt) {
  void *memory;
  int32_t g;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->export_xfer_count, sizeof(*rt->export_xfers),
                              "runtime export transfers", &memory));
  rt->export_xfers = (mfsdp_xfer *)memory;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp_transport *transport = rt->groups[g].transport;
    rt->groups[g].export_count = mfsdp__export_count(rt, g);
    if (MFSDP_HAS(transport->ops, reserve))
      MFSDP_TRY(transport->ops->reserve(transport->self, rt->context, rt->groups[g].world));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup(mfsdp_runtime *rt, const mfsdp__sizes *sizes) {
  int32_t g;
  MFSDP_TRY(mfsdp__setup_groups(rt));
  MFSDP_TRY(mfsdp__setup_queues(rt));
  MFSDP_TRY(mfsdp__setup_units(rt));
  MFSDP_TRY(mfsdp__setup_params(rt));
  MFSDP_TRY(mfsdp__setup_owners(rt));
  MFSDP_TRY(mfsdp__setup_prefetch(rt));
  MFSDP_TRY(mfsdp__setup_memory(rt, sizes));
  for (g = 0; g < rt->group_count; ++g)
    MFSDP_TRY(mfsdp__setup_replica(rt, &rt->groups[g]));
  MFSDP_TRY(mfsdp__setup_verdict(rt)); /* numbers the presence bits that optimizer items refer to */
  MFSDP_TRY(mfsdp__setup_optimizer(rt, sizes));
  MFSDP_TRY(mfsdp__setup_registrations(rt));
  MFSDP_TRY(mfsdp__setup_export(rt));
  rt->optimizer_begin = mfsdp_trace_mark_make(rt->context, 1, "compute", "optimizer");
  rt->optimizer_end = mfsdp_trace_mark_make(rt->context, 0, "compute", "optimizer");
  /* Masters, slots and accumulators are cleared on `compute`: other queues come after that. */
  MFSDP_TRY(rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->step_done));
  return rt->backend->ops->event_wait(rt->backend->self, rt->context, rt->step_done,
                                      rt->deadline_us);
}

MFSDP_API void mfsdp__teardown_ring(mfsdp_runtime *rt, mfsdp__ring *ring) {
  int32_t i;
  for (i = 0; i < ring->count && ring->slots != NULL; ++i)
    if (ring->slots[i].idle != NULL)
      rt->backend->ops->event_destroy(rt->backend->self, rt->context, ring->slots[i].idle);
  mfsdp_buffer_free(rt->context, rt->backend, &ring->buffer);
  mfsdp_table_free(rt->context, ring->slots, (size_t)ring->count, sizeof(*ring->slots));
}

MFSDP_API void mfsdp__teardown_verdict(mfsdp_runtime *rt) {
  mfsdp__verdict_tables *t = &rt->verdict;
  mfsdp_coll_destroy(rt->context, t->replica_gather);
  mfsdp_coll_destroy(rt->context, t->gather);
  mfsdp_buffer_free(rt->context, rt->backend, &t->record);
  mfsdp_buffer_free(rt->context, rt->backend, &t->header);
  mfsdp_buffer_free(rt->context, rt->backend, &t->scalars);
  mfsdp_buffer_free(rt->context, rt->backend, &t->present);
  mfsdp_buffer_free(rt->context, rt->backend, &t->rates);
  mfsdp_buffer_free(rt->context, rt->backend, &t->blocks);
  mfsdp_buffer_free(rt->context, rt->backend, &t->block_word);
  mfsdp_buffer_free(rt->context, rt->backend, &t->rank_word);
  mfsdp_buffer_free(rt->context, rt->backend, &t->messages);
}

MFSDP_API void mfsdp__teardown_groups(mfsdp_runtime *rt) {
  int32_t g;
  for (g = 0; g < rt->group_count; ++g) {
    mfsdp_coll_destroy(rt->context, rt->groups[g].replica_gather);
    mfsdp_coll_destroy(rt->context, rt->groups[g].replica_reduce);
    mfsdp_buffer_free(rt->context, rt->backend, &rt->groups[g].replica_sum);
  }
  mfsdp_table_free(rt->context, rt->groups, (size_t)rt->group_count, sizeof(*rt->groups));
}

MFSDP_API void mfsdp__teardown_units(mfsdp_runtime *rt) {
  int32_t u;
  for (u = 0; u < rt->unit_count && rt->units != NULL; ++u) {
    mfsdp_coll_destroy(rt->context, rt->units[u].sums_gather);
    mfsdp_coll_destroy(rt->context, rt->units[u].refresh);
    mfsdp_coll_destroy(rt->context, rt->units[u].reduce);
    mfsdp_coll_destroy(rt->context, rt->units[u].gather);
    if (rt->units[u].gathered != NULL)
      rt->backend->ops->event_destroy(rt->backend->self, rt->context, rt->units[u].gathered);
  }
  mfsdp_table_free(rt->context, rt->prefetch_units, (size_t)rt->prefetch_unit_count,
                   sizeof(*rt->prefetch_units));
  mfsdp_table_free(rt->context, rt->owner_units, (size_t)rt->owner_unit_count,
                   sizeof(*rt->owner_units));
  mfsdp_table_free(rt->context, rt->params, (size_t)rt->param_count, sizeof(*rt->params));
  mfsdp_table_free(rt->context, rt->units, (size_t)rt->unit_count, sizeof(*rt->units));
}

MFSDP_API void mfsdp__teardown(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  mfsdp_event *events[4];
  int32_t i;
  mfsdp__runtime_drain(rt);
  events[0] = rt->step_done;
  events[1] = rt->verdict_ready;
  events[2] = rt->reduced;
  events[3] = rt->compute_done;
  mfsdp__teardown_registrations(rt);
  mfsdp_table_free(rt->context, rt->export_xfers, (size_t)rt->export_xfer_count,
                   sizeof(*rt->export_xfers));
  mfsdp__teardown_verdict(rt);
  mfsdp_optimizer_destroy(rt->context, rt->optimizer);
  mfsdp__teardown_banded(rt);
  mfsdp__teardown_stages(rt);
  mfsdp__teardown_ring(rt, &rt->grad_ring);
  mfsdp__teardown_ring(rt, &rt->param_ring);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->wire);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->staging);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->accumulator);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->sums);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->resident);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->copy);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->master);
  mfsdp__teardown_units(rt);
  mfsdp__teardown_groups(rt);
  for (i = 0; i < 4; ++i)
    if (events[i] != NULL) ops->event_destroy(self, rt->context, events[i]);
  if (rt->owns_compute) ops->queue_destroy(self, rt->context, rt->compute);
  if (rt->communication != NULL) ops->queue_destroy(self, rt->context, rt->communication);
  mfsdp_table_free(rt->context, rt, 1, sizeof(*rt));
}

/*
 * Makes a runtime: checks the description, agrees with all ranks on version, options and plan, and
 * allocates everything that steps will use. Parameters start as zeros (mfsdp_runtime_init).
 * Collective, COMPLETE. On failure *out is NULL and nothing is held.
 * E_ARGUMENT, E_UNSUPPORTED and E_OVERFLOW of the description come before anything is allocated for
 * the runtime, and reach all ranks: those whose own description is fine get the same status with
 * the culprit and its message. E_MISMATCH names the first difference on every rank. After both all
 * may try again. Where a rank's transports or control planes are what is wrong, those that can be
 * are poisoned instead, and a rank without any description or groups leaves the others to their
 * deadline. Any other failure poisons the transports, so that peers do not wait for this rank.
 */
MFSDP_API mfsdp_status mfsdp_runtime_create(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                            mfsdp_runtime **out) {
  mfsdp__sizes sizes;
  mfsdp_runtime *rt;
  mfsdp_status status;
  void *memory;
  if (out != NULL) *out = NULL;
  status = out != NULL ? mfsdp__runtime_check(context, desc)
                       : MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "runtime: out is NULL");
  if (status == MFSDP_OK) status = mfsdp__measure(context, desc, &sizes);
  if (status != MFSDP_OK) {
    mfsdp__runtime_refuse(context, desc);
    return status;
  }
  MFSDP_TRY(mfsdp__runtime_agree(context, desc, &sizes));
  status = mfsdp_table_alloc(context, 1, sizeof(*rt), "runtime", &memory);
  if (status != MFSDP_OK) {
    mfsdp__groups_poison(desc, &context->error);
    return status;
  }
  rt = (mfsdp_runtime *)memory;
  rt->context = context;
  rt->desc = desc;
  rt->backend = desc->backend;
  rt->holds_sums = desc->local_accumulation != 0;
  rt->state_space = desc->state_space;
  rt->scaling = desc->loss_scale;
  rt->schedule = desc->schedule;
  rt->hyper_count = desc->optimizer->group_count;
  rt->loss_scale = desc->loss_scale.initial > 0.0 ? desc->loss_scale.initial : 1.0;
  rt->failure = mfsdp_error_none();
  status = mfsdp__setup(rt, &sizes);
  if (status != MFSDP_OK) {
    mfsdp__groups_poison(desc, &context->error); /* all of them, however far set-up came */
    mfsdp__teardown(rt);
    return status;
  }
  rt->desc = NULL; /* read by set-up only */
  *out = rt;
  return MFSDP_OK;
}

/*
 * Waits until this rank's work is done and gives everything back. NULL is allowed. After a failure
 * it waits for this rank's queues only, which the poisoned transport lets run dry, and returns
 * MFSDP_OK; otherwise the status of the wait. The runtime is gone in any case.
 */
MFSDP_API mfsdp_status mfsdp_runtime_destroy(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops;
  mfsdp_status status = MFSDP_OK;
  if (rt == NULL) return MFSDP_OK;
  ops = rt->backend->ops;
  if (rt->failure.status == MFSDP_OK) {
    status = mfsdp__runtime_order(rt, rt->communication, rt->reduced, rt->compute);
    if (status == MFSDP_OK) status = mfsdp__stage_end(rt);
    if (status == MFSDP_OK)
      status = ops->event_record(rt->backend->self, rt->compute, rt->compute_done);
    if (status == MFSDP_OK)
      status = ops->event_wait(rt->backend->self, rt->context, rt->compute_done, rt->deadline_us);
    if (status != MFSDP_OK)
      (void)mfsdp__runtime_failed(rt, status); /* peers must not wait for us */
  }
  mfsdp__teardown(rt);
  return status;
}

#endif /* MFSDP_RUNTIME_SETUP_H */
