/* SPDX-License-Identifier: MIT */
/*
 * runtime/measure.h - how much memory a runtime takes: one walk over the plans that both predicts
 * (mfsdp_runtime_memory) and sizes what create allocates. Part of runtime.h.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_MEASURE_H
#define MFSDP_RUNTIME_MEASURE_H

#include "check.h"
#include "measure_banded.h"

typedef struct mfsdp__sizes {
  int64_t master_count, accumulator_count, sums_count; /* floats */
  size_t copy_nbytes, param_slot_nbytes, grad_slot_nbytes, staging_nbytes, wire_nbytes;
  size_t resident_nbytes;
  size_t replica_sum_nbytes; /* of all groups */
  int32_t param_slot_count, grad_slot_count, unit_count, tied_count;
  int32_t resident_count, resident_tied_count; /* of the units, those that take no slot */
  mfsdp_optimizer_sizes optimizer;
  int32_t stage_tensor_count; /* of the step in backward */
  size_t direction_nbytes, stage_workspace_nbytes;
  mfsdp__banded_sizes banded;
} mfsdp__sizes;

/* What one rank holds of a unit between steps. */
typedef struct mfsdp__unit_sizes {
  mfsdp_dtype compute, grad, wire;
  int64_t full_count, grad_count, shard_count, master_count, accumulator_count;
  int64_t copy_count, sums_count;
  int32_t separate; /* what is gathered is a copy of its own beside the masters */
  int32_t resident, replicated;
  int32_t in_place; /* resident, and what this rank gathers lies in the full buffer itself */
} mfsdp__unit_sizes;

/*
 * A RESIDENT unit's gathered segment needs no memory of its own: the pieces lie where they belong
 * in the full buffer, and DIRECT sends them from there. The other algorithms cut segments into
 * chunks and need them packed. REPLICATED never gathers.
 */
MFSDP_API int32_t mfsdp__unit_is_in_place(const mfsdp_runtime_desc *desc, int32_t resident,
                                          int32_t replicated) {
  return resident && (replicated || desc->gather_algorithm == MFSDP_DIRECT);
}

MFSDP_API mfsdp__unit_sizes mfsdp__unit_sizes_of(const mfsdp_runtime_desc *desc,
                                                 const mfsdp_plan *plan, int32_t rank,
                                                 int32_t unit) {
  mfsdp__unit_sizes s;
  s.compute = mfsdp_plan_unit_dtype(plan, unit, MFSDP_LAYOUT_GATHER);
  s.grad = mfsdp_plan_unit_dtype(plan, unit, MFSDP_LAYOUT_REDUCE);
  s.wire = mfsdp_plan_unit_wire(plan, unit);
  s.full_count = mfsdp_plan_unit_count_elements(plan, unit, MFSDP_LAYOUT_GATHER);
  s.grad_count = mfsdp_plan_unit_count_elements(plan, unit, MFSDP_LAYOUT_REDUCE);
  s.shard_count = mfsdp_plan_segment_count(plan, unit, rank, MFSDP_LAYOUT_GATHER);
  s.accumulator_count = mfsdp_plan_segment_count(plan, unit, rank, MFSDP_LAYOUT_REDUCE);
  s.separate = s.compute != MFSDP_F32 || desc->state_space != MFSDP_SPACE_DEVICE;
  s.resident = mfsdp_plan_residency(plan) == MFSDP_RESIDENCY_RESIDENT;
  s.replicated = mfsdp__plan_is_replicated(plan);
  s.in_place = mfsdp__unit_is_in_place(desc, s.resident, s.replicated);
  s.sums_count = s.replicated ? s.grad_count : 0;
  s.copy_count = s.separate && !s.in_place ? s.shard_count : 0;
  if (s.separate) /* FROZEN has no master then */
    s.master_count = s.replicated ? s.grad_count : s.accumulator_count;
  else
    s.master_count = s.in_place ? 0 : s.shard_count;
  return s;
}

MFSDP_API void mfsdp__size_max(size_t *largest, size_t value) {
  if (value > *largest) *largest = value;
}

MFSDP_API int64_t mfsdp__longest_segment(const mfsdp_plan *plan, int32_t unit) {
  int64_t longest = 0;
  int32_t r;
  for (r = 0; r < mfsdp_plan_world(plan); ++r) {
    const int64_t count = mfsdp_plan_segment_count(plan, unit, r, MFSDP_LAYOUT_REDUCE);
    if (count > longest) longest = count;
  }
  return longest;
}

/* The plan bounds the elements of all tensors together (2^46), so sums of segments cannot
 * overflow. */
MFSDP_API void mfsdp__measure_unit(const mfsdp_runtime_desc *desc, const mfsdp_group *group,
                                   int32_t unit, mfsdp__sizes *out) {
  const mfsdp__unit_sizes s = mfsdp__unit_sizes_of(desc, group->plan, group->transport->rank, unit);
  const int64_t longest = mfsdp__longest_segment(group->plan, unit);
  mfsdp_algorithm reduce;
  int32_t count = 0;
  (void)mfsdp_plan_unit_params(group->plan, unit, &count);
  if (count == 0) return;
  ++out->unit_count;
  out->resident_count += s.resident;
  out->master_count += s.master_count;
  out->accumulator_count += s.accumulator_count;
  out->sums_count += s.sums_count;
  out->copy_nbytes += (size_t)s.copy_count * mfsdp_dtype_nbytes(s.compute);
  if (s.resident)
    out->resident_nbytes += (size_t)s.full_count * mfsdp_dtype_nbytes(s.compute);
  else
    mfsdp__size_max(&out->param_slot_nbytes, (size_t)s.full_count * mfsdp_dtype_nbytes(s.compute));
  mfsdp__size_max(&out->grad_slot_nbytes, (size_t)s.grad_count * mfsdp_dtype_nbytes(s.grad));
  if (s.wire != s.grad)
    mfsdp__size_max(&out->wire_nbytes, (size_t)s.grad_count * mfsdp_dtype_nbytes(s.wire));
  reduce = mfsdp_coll_choose(group->transport, desc->reduce_algorithm, &desc->wire,
                             MFSDP_COLL_REDUCE, s.wire, s.grad_count, longest, desc->chunk_nbytes);
  mfsdp__size_max(&out->staging_nbytes,
                  mfsdp_coll_reduce_workspace_nbytes(
                      group->transport, reduce, s.accumulator_count, longest, s.wire,
                      mfsdp_coll_chunk_nbytes(group->transport, reduce, &desc->wire, s.wire,
                                              s.grad_count, longest, desc->chunk_nbytes)));
}

/* Units whose tensors are used under another name by other units: each once. */
MFSDP_API int32_t mfsdp__count_tied_units(const mfsdp_plan *plan) {
  const int32_t count = mfsdp_plan_param_count(plan);
  int32_t i, k, tied = 0;
  for (i = 0; i < count; ++i) {
    const int32_t owner = mfsdp_plan_param_owner(plan, i),
                  unit = mfsdp_plan_param(plan, owner)->unit;
    if (owner == i || mfsdp_plan_param(plan, i)->unit == unit) continue;
    for (k = 0; k < i; ++k) {
      const int32_t other = mfsdp_plan_param_owner(plan, k);
      if (other != k && mfsdp_plan_param(plan, other)->unit == unit &&
          mfsdp_plan_param(plan, k)->unit != unit)
        break;
    }
    tied += k == i;
  }
  return tied;
}

/* Replica k's part of `count` accumulators: whole alignment units, the last parts may be short or
 * empty. */
MFSDP_API mfsdp_extent mfsdp__replica_part(int64_t count, int32_t replicas, int32_t k) {
  mfsdp_extent part;
  int64_t share = (count + replicas - 1) / replicas, first;
  share = (share + MFSDP_ALIGN_ELEMENTS - 1) / MFSDP_ALIGN_ELEMENTS * MFSDP_ALIGN_ELEMENTS;
  first = share * k < count ? share * k : count;
  part.owner = k;
  part.unit_offset = first;
  part.shard_offset = 0;
  part.count = part.payload_count = count - first < share ? count - first : share;
  return part;
}

MFSDP_API void mfsdp__measure_replica(const mfsdp_runtime_desc *desc, const mfsdp_group *group,
                                      int64_t accumulator_count, mfsdp__sizes *out) {
  mfsdp_extent part;
  int64_t longest;
  size_t chunk;
  if (group->replica == NULL || accumulator_count == 0) return;
  part = mfsdp__replica_part(accumulator_count, group->replica->world, group->replica->rank);
  longest = mfsdp__replica_part(accumulator_count, group->replica->world, 0).count;
  chunk = mfsdp_coll_chunk_nbytes(group->replica, MFSDP_DIRECT, &desc->wire, MFSDP_F32,
                                  accumulator_count, longest, desc->chunk_nbytes);
  out->replica_sum_nbytes += (size_t)part.count * sizeof(float);
  mfsdp__size_max(&out->staging_nbytes,
                  mfsdp_coll_reduce_workspace_nbytes(group->replica, MFSDP_DIRECT, part.count,
                                                     longest, MFSDP_F32, chunk));
}

/* Whether the step in backward works on this piece: a whole matrix of an algorithm that can. */
MFSDP_API int mfsdp__piece_in_backward(const mfsdp_runtime_desc *desc, const mfsdp_param *param,
                                       const mfsdp_piece *piece) {
  const mfsdp_hyper_group *group = &desc->optimizer->groups[param->hyper_group];
  return desc->step_in_backward && piece->matrix >= 0 &&
         piece->placement != MFSDP_PLACEMENT_BANDED &&
         mfsdp__algorithm_of(group->algorithm)->stages != NULL;
}

/* A piece as the optimizer sees it, without its arrays. */
MFSDP_API mfsdp_optimizer_tensor mfsdp__piece_tensor(const mfsdp_runtime_desc *desc,
                                                     const mfsdp_plan *plan,
                                                     const mfsdp_piece *piece) {
  const mfsdp_param *param = mfsdp_plan_param(plan, piece->param);
  mfsdp_optimizer_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.name = param->name;
  tensor.role = param->role;
  tensor.hyper_group = param->hyper_group;
  tensor.rows = piece->rows;
  tensor.cols = piece->cols;
  tensor.count = piece->count;
  tensor.param_dtype = param->compute;
  if (mfsdp__piece_in_backward(desc, param, piece)) {
    tensor.staged = 1;
    tensor.stage = piece->unit;
  }
  if (mfsdp__piece_is_exchanged(desc, plan, piece)) {
    tensor.staged = 1;
    tensor.stage = MFSDP__BANDED_STAGE;
    tensor.whole_rows = piece->matrix_rows;
  }
  return tensor;
}

/* Directions of all staged matrices, and the workspace of the largest. */
MFSDP_API mfsdp_status mfsdp__measure_stage(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                            const mfsdp_optimizer_tensor *tensor,
                                            mfsdp__sizes *out) {
  size_t nbytes = 0;
  int64_t padded = 0;
  if (!tensor->staged || tensor->count == 0 || tensor->stage == MFSDP__BANDED_STAGE)
    return MFSDP_OK;
  ++out->stage_tensor_count;
  if (!mfsdp_i64_align(tensor->count, &padded) ||
      !mfsdp_elements_nbytes(padded, MFSDP_F32, &nbytes) ||
      !mfsdp_size_add(out->direction_nbytes, nbytes, &out->direction_nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "runtime: the directions overflow size_t");
  MFSDP_TRY(mfsdp_optimizer_orthogonalize_nbytes(context,
                                                 &desc->optimizer->groups[tensor->hyper_group],
                                                 tensor->rows, tensor->cols, 1, &nbytes));
  mfsdp__size_max(&out->stage_workspace_nbytes, nbytes);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__measure_optimizer(mfsdp_context *context,
                                                const mfsdp_runtime_desc *desc,
                                                const mfsdp_group *group, mfsdp__sizes *out) {
  mfsdp_optimizer_desc optimizer = *desc->optimizer;
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(group->plan, -1, &count);
  const int32_t all = mfsdp__plan_is_replicated(group->plan);
  optimizer.state_space = desc->state_space;
  for (i = 0; i < count; ++i) {
    mfsdp_optimizer_tensor tensor;
    if ((pieces[i].owner != group->transport->rank && !all) || pieces[i].grad_shard_offset < 0)
      continue;
    tensor = mfsdp__piece_tensor(desc, group->plan, &pieces[i]);
    MFSDP_TRY(mfsdp__measure_stage(context, desc, &tensor, out));
    MFSDP_TRY(mfsdp_optimizer_measure_tensor(context, desc->backend, &optimizer, &tensor,
                                             &out->optimizer));
  }
  return MFSDP_OK;
}

/* Slots: what the caller holds at once, one for each unit that others tie to, and what is in
 * flight. RESIDENT units take none for their parameters. */
MFSDP_API mfsdp_status mfsdp__measure_slots(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                            mfsdp__sizes *out) {
  const int64_t all = out->unit_count > 0 ? out->unit_count : 1;
  const int64_t slotted = all - out->resident_count;
  int64_t params = (int64_t)desc->active_units + out->tied_count - out->resident_tied_count +
                   desc->prefetch_depth;
  int64_t grads = (int64_t)desc->active_grads + out->tied_count + desc->reduce_depth;
  size_t nbytes;
  if (params > slotted || desc->reshard_after_forward == 0) params = slotted;
  if (grads > all || desc->local_accumulation) grads = all;
  if (params > 0)
    mfsdp__size_max(&out->param_slot_nbytes,
                    MFSDP_ALIGN_NBYTES); /* units without elements are legal */
  mfsdp__size_max(&out->grad_slot_nbytes, MFSDP_ALIGN_NBYTES);
  out->param_slot_count = (int32_t)params;
  out->grad_slot_count = (int32_t)grads;
  if (!mfsdp_size_mul((size_t)params, out->param_slot_nbytes, &nbytes) ||
      !mfsdp_size_mul((size_t)grads, out->grad_slot_nbytes, &nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "runtime: the slots overflow size_t");
  if (desc->max_slot_nbytes > 0 && (out->param_slot_nbytes > desc->max_slot_nbytes ||
                                    out->grad_slot_nbytes > desc->max_slot_nbytes))
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "runtime: the largest unit needs slots of %zu (parameters) and %zu (gradients) "
        "bytes, max_slot_nbytes is %zu; split the unit",
        out->param_slot_nbytes, out->grad_slot_nbytes, desc->max_slot_nbytes);
  return MFSDP_OK;
}

/* The description has been checked. Allocates nothing. */
MFSDP_API mfsdp_status mfsdp__measure(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                      mfsdp__sizes *out) {
  int32_t g, u, tied;
  memset(out, 0, sizeof(*out));
  for (g = 0; g < desc->group_count; ++g) {
    const mfsdp_group *group = &desc->groups[g];
    const int64_t before = out->accumulator_count;
    for (u = 0; u < mfsdp_plan_unit_count(group->plan); ++u)
      mfsdp__measure_unit(desc, group, u, out);
    mfsdp__measure_replica(desc, group, out->accumulator_count - before, out);
    tied = mfsdp__count_tied_units(group->plan);
    out->tied_count += tied;
    if (mfsdp_plan_residency(group->plan) == MFSDP_RESIDENCY_RESIDENT)
      out->resident_tied_count += tied;
    MFSDP_TRY(mfsdp__measure_optimizer(context, desc, group, out));
    MFSDP_TRY(
        mfsdp__measure_banded(context, desc, group->plan, group->transport->rank, &out->banded));
  }
  return mfsdp__measure_slots(context, desc, out);
}

/*
 * Predicts what mfsdp_runtime_create with this description will hold on this rank, without
 * allocating or communicating. `out` starts as mfsdp_memory_default. E_ARGUMENT, E_UNSUPPORTED and
 * E_OVERFLOW as create.
 */
MFSDP_API mfsdp_status mfsdp_runtime_memory(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                            mfsdp_memory *out) {
  mfsdp__sizes sizes;
  if (out == NULL || out->struct_nbytes != sizeof(*out))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "runtime memory: out is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_memory_default)",
                      sizeof(*out));
  MFSDP_TRY(mfsdp__runtime_check(context, desc));
  MFSDP_TRY(mfsdp__measure(context, desc, &sizes));
  out->shard_nbytes =
      (size_t)sizes.master_count * sizeof(float) + sizes.copy_nbytes + sizes.resident_nbytes;
  out->state_nbytes = sizes.optimizer.state_nbytes;
  out->grad_nbytes = (size_t)(sizes.accumulator_count + sizes.sums_count) * sizeof(float);
  out->slot_nbytes = (size_t)sizes.param_slot_count * sizes.param_slot_nbytes +
                     (size_t)sizes.grad_slot_count * sizes.grad_slot_nbytes;
  out->staging_nbytes = sizes.staging_nbytes + sizes.wire_nbytes + sizes.replica_sum_nbytes +
                        sizes.optimizer.staging_nbytes + sizes.direction_nbytes +
                        mfsdp__banded_staging_nbytes(&sizes.banded);
  out->workspace_nbytes = sizes.optimizer.direction_nbytes + sizes.optimizer.scratch_nbytes +
                          sizes.stage_workspace_nbytes + sizes.banded.workspace_nbytes;
  return MFSDP_OK;
}

#endif /* MFSDP_RUNTIME_MEASURE_H */
