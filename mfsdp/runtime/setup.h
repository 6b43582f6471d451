/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup.h - builds the runtime's tables from a plan, and takes them down. Part of runtime.h.
 *
 * The only place that reads options. A step replays what is made here.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_H
#define MFSDP_RUNTIME_SETUP_H

#include "check.h"
#include "step.h"

#include <stdio.h>

/* ---- units and parameters ---- */

MFSDP_API mfsdp_status mfsdp__setup_params(mfsdp_runtime *rt)
{
  const mfsdp_plan *plan = rt->plan;
  void *memory;
  int32_t i;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->param_count, sizeof(*rt->params),
                              "runtime parameters", &memory));
  rt->params = (mfsdp__param_entry *)memory;
  for (i = 0; i < rt->param_count; ++i) {
    mfsdp__param_entry *entry = &rt->params[i];
    entry->owner = mfsdp_plan_param_owner(plan, i);
    entry->use_unit = mfsdp_plan_param(plan, i)->unit;
    entry->unit = mfsdp_plan_param(plan, entry->owner)->unit;
    entry->offset = mfsdp_plan_param_offset(plan, i, MFSDP_LAYOUT_GATHER);
    entry->grad_offset = mfsdp_plan_param_offset(plan, i, MFSDP_LAYOUT_REDUCE);
  }
  return MFSDP_OK;
}

/* Lists, for each unit, the other units that own its tied tensors, each once. */
MFSDP_API mfsdp_status mfsdp__setup_owners(mfsdp_runtime *rt)
{
  void *memory;
  int32_t i, k, u, used = 0;
  for (i = 0; i < rt->param_count; ++i)
    rt->owner_unit_count += rt->params[i].unit != rt->params[i].use_unit;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->owner_unit_count, sizeof(*rt->owner_units),
                              "runtime tied units", &memory));
  rt->owner_units = (int32_t *)memory;
  for (u = 0; u < rt->unit_count; ++u) {
    mfsdp__unit *unit = &rt->units[u];
    int32_t count = 0;
    const int32_t *params = mfsdp_plan_unit_params(rt->plan, u, &count);
    unit->owners = rt->owner_units + used;
    for (i = 0; i < count; ++i) {
      const int32_t owner_unit = rt->params[params[i]].unit;
      for (k = 0; k < unit->owner_count && unit->owners[k] != owner_unit; ++k) continue;
      if (owner_unit == u || k < unit->owner_count) continue;
      unit->owners[unit->owner_count++] = owner_unit;
      ++used;
    }
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup_unit_coll(mfsdp_runtime *rt, int32_t index, mfsdp_layout_kind kind,
                                              mfsdp_coll **out)
{
  const int gather = kind == MFSDP_LAYOUT_GATHER;
  mfsdp__unit *unit = &rt->units[index];
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_layout layout;
  mfsdp_status status;
  void *extents = NULL;
  int32_t capacity = 0;
  MFSDP_TRY(mfsdp_plan_extents(rt->context, rt->plan, index, kind, NULL, 0, &capacity));
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)capacity, sizeof(mfsdp_extent), "extents", &extents));
  memset(&layout, 0, sizeof(layout));
  layout.struct_nbytes = sizeof(layout);
  layout.extents = (const mfsdp_extent *)extents;
  layout.world = rt->world;
  layout.dtype = gather ? mfsdp_plan_unit_dtype(rt->plan, index, kind)
                        : mfsdp_plan_unit_wire(rt->plan, index);
  layout.full_count = gather ? unit->full_count : unit->grad_count;
  desc.kind = gather ? MFSDP_COLL_GATHER : MFSDP_COLL_REDUCE;
  desc.algorithm = gather ? rt->desc.gather_algorithm : rt->desc.reduce_algorithm;
  desc.traffic = gather ? MFSDP_TRAFFIC_MATERIALIZE : MFSDP_TRAFFIC_REDUCE;
  desc.layout = &layout;
  desc.transport = rt->transport;
  desc.chunk_nbytes = rt->desc.chunk_nbytes;
  desc.label = gather ? unit->gather_label : unit->reduce_label;
  status = mfsdp_plan_extents(rt->context, rt->plan, index, kind, (mfsdp_extent *)extents, capacity,
                              &layout.extent_count);
  if (status == MFSDP_OK) status = mfsdp_coll_create(rt->context, &desc, out);
  mfsdp_table_free(rt->context, extents, (size_t)capacity, sizeof(mfsdp_extent));
  return status;
}

MFSDP_API mfsdp_status mfsdp__setup_unit(mfsdp_runtime *rt, int32_t index, int64_t *shard_total,
                                         int64_t *accumulator_total)
{
  mfsdp__unit *unit = &rt->units[index];
  (void)snprintf(unit->gather_label, sizeof(unit->gather_label), "gather unit %d", (int)index);
  (void)snprintf(unit->reduce_label, sizeof(unit->reduce_label), "reduce unit %d", (int)index);
  unit->param_slot = unit->grad_slot = -1;
  unit->full_count = mfsdp_plan_unit_count_elements(rt->plan, index, MFSDP_LAYOUT_GATHER);
  unit->grad_count = mfsdp_plan_unit_count_elements(rt->plan, index, MFSDP_LAYOUT_REDUCE);
  unit->shard_first = *shard_total;
  unit->shard_count = mfsdp_plan_segment_count(rt->plan, index, rt->rank, MFSDP_LAYOUT_GATHER);
  unit->accumulator_first = *accumulator_total;
  unit->accumulator_count =
    mfsdp_plan_segment_count(rt->plan, index, rt->rank, MFSDP_LAYOUT_REDUCE);
  *shard_total += unit->shard_count; /* the plan bounds the sum of all tensors */
  *accumulator_total += unit->accumulator_count;
  MFSDP_TRY(rt->backend->ops->event_create(rt->backend->self, rt->context, &unit->gathered));
  if (unit->full_count > 0)
    MFSDP_TRY(mfsdp__setup_unit_coll(rt, index, MFSDP_LAYOUT_GATHER, &unit->gather));
  if (unit->grad_count > 0)
    MFSDP_TRY(mfsdp__setup_unit_coll(rt, index, MFSDP_LAYOUT_REDUCE, &unit->reduce));
  return MFSDP_OK;
}

/* ---- memory ---- */

MFSDP_API mfsdp_status mfsdp__setup_floats(mfsdp_runtime *rt, int64_t count,
                                           mfsdp_memory_class memory_class, mfsdp_buffer *out)
{
  size_t nbytes;
  if (!mfsdp_elements_nbytes(count, MFSDP_F32, &nbytes))
    return MFSDP_FAIL(rt->context, MFSDP_E_OVERFLOW, "runtime: %lld elements overflow size_t",
                      (long long)count);
  MFSDP_TRY(mfsdp_buffer_alloc(rt->context, rt->backend, nbytes, MFSDP_SPACE_DEVICE, memory_class, out));
  return rt->backend->ops->fill_bytes(rt->backend->self, rt->compute, out->data, 0, nbytes);
}

MFSDP_API mfsdp_status mfsdp__setup_ring(mfsdp_runtime *rt, int32_t count, int64_t slot_elements,
                                         mfsdp__ring *ring)
{
  int64_t total;
  size_t slot_nbytes;
  void *memory;
  int32_t i;
  if (slot_elements == 0) slot_elements = MFSDP_ALIGN_ELEMENTS; /* units without elements are legal */
  if (!mfsdp_elements_nbytes(slot_elements, MFSDP_F32, &slot_nbytes) ||
      !mfsdp_i64_mul(count, slot_elements, &total))
    return MFSDP_FAIL(rt->context, MFSDP_E_OVERFLOW, "runtime: %d slots of %lld elements overflow",
                      (int)count, (long long)slot_elements);
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)count, sizeof(*ring->slots), "runtime slots",
                              &memory));
  ring->slots = (mfsdp__slot *)memory;
  ring->count = count;
  ring->slot_nbytes = slot_nbytes;
  MFSDP_TRY(mfsdp__setup_floats(rt, total, MFSDP_MEMORY_SLOT, &ring->buffer));
  for (i = 0; i < count; ++i) {
    ring->slots[i].unit = -1;
    ring->slots[i].data = (unsigned char *)ring->buffer.data + (size_t)i * slot_nbytes;
    MFSDP_TRY(rt->backend->ops->event_create(rt->backend->self, rt->context, &ring->slots[i].idle));
  }
  return MFSDP_OK;
}

/* Slots: what the caller holds at once, and one for each unit that others tie to. */
MFSDP_API mfsdp_status mfsdp__setup_rings(mfsdp_runtime *rt)
{
  int64_t longest = 0, longest_grad = 0;
  int32_t u, i, k, tied = 0;
  for (u = 0; u < rt->unit_count; ++u) {
    if (rt->units[u].full_count > longest) longest = rt->units[u].full_count;
    if (rt->units[u].grad_count > longest_grad) longest_grad = rt->units[u].grad_count;
  }
  for (i = 0; i < rt->owner_unit_count; ++i) {
    for (k = 0; k < i && rt->owner_units[k] != rt->owner_units[i]; ++k) continue;
    tied += k == i;
  }
  MFSDP_TRY(mfsdp__setup_ring(rt, rt->desc.active_units + tied, longest, &rt->param_ring));
  return mfsdp__setup_ring(rt, rt->desc.active_grads + tied, longest_grad, &rt->grad_ring);
}

MFSDP_API mfsdp_status mfsdp__setup_staging(mfsdp_runtime *rt)
{
  size_t nbytes = 0;
  int32_t u;
  for (u = 0; u < rt->unit_count; ++u)
    if (rt->units[u].reduce != NULL && mfsdp_coll_workspace_nbytes(rt->units[u].reduce) > nbytes)
      nbytes = mfsdp_coll_workspace_nbytes(rt->units[u].reduce);
  return mfsdp_buffer_alloc(rt->context, rt->backend, nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING,
                            &rt->staging);
}

/* ---- optimizer ---- */

MFSDP_API void mfsdp__setup_tensor(const mfsdp_runtime *rt, const mfsdp_piece *piece,
                                   mfsdp_optimizer_tensor *out)
{
  const mfsdp_param *param = mfsdp_plan_param(rt->plan, piece->param);
  const mfsdp__unit *unit = &rt->units[piece->unit];
  memset(out, 0, sizeof(*out));
  out->name = param->name;
  out->role = param->role;
  out->hyper_group = param->hyper_group;
  out->param = piece->param;
  out->rows = piece->rows;
  out->cols = piece->cols;
  out->count = piece->count;
  out->master = (float *)rt->master.data + unit->shard_first + piece->shard_offset;
  out->param_dtype = param->compute;
  out->grad =
    (const float *)rt->accumulator.data + unit->accumulator_first + piece->grad_shard_offset;
}

MFSDP_API mfsdp_status mfsdp__setup_optimizer(mfsdp_runtime *rt)
{
  int32_t piece_count = 0, used = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(rt->plan, -1, &piece_count);
  mfsdp_status status;
  void *tensors;
  for (i = 0; i < piece_count; ++i)
    used += pieces[i].owner == rt->rank && pieces[i].grad_shard_offset >= 0;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)used, sizeof(mfsdp_optimizer_tensor),
                              "runtime optimizer tensors", &tensors));
  used = 0;
  for (i = 0; i < piece_count; ++i)
    if (pieces[i].owner == rt->rank && pieces[i].grad_shard_offset >= 0)
      mfsdp__setup_tensor(rt, &pieces[i], (mfsdp_optimizer_tensor *)tensors + used++);
  status = mfsdp_optimizer_create(rt->context, rt->backend, rt->desc.optimizer,
                                  (const mfsdp_optimizer_tensor *)tensors, used, &rt->optimizer);
  mfsdp_table_free(rt->context, tensors, (size_t)used, sizeof(mfsdp_optimizer_tensor));
  return status;
}

/* ---- verdict ---- */

MFSDP_API mfsdp_status mfsdp__setup_device_table(mfsdp_runtime *rt, const void *host, size_t nbytes,
                                                 mfsdp_buffer *out)
{
  mfsdp_status status;
  MFSDP_TRY(mfsdp_buffer_alloc(rt->context, rt->backend, nbytes, MFSDP_SPACE_DEVICE,
                               MFSDP_MEMORY_TABLE, out));
  if (host == NULL) return rt->backend->ops->fill_bytes(rt->backend->self, rt->compute, out->data, 0, nbytes);
  MFSDP_TRY(rt->backend->ops->copy(rt->backend->self, rt->compute, out->data, MFSDP_SPACE_DEVICE, host,
                                   MFSDP_SPACE_HOST, nbytes));
  /* The host table is freed by the caller next. */
  status = rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->compute_done);
  if (status == MFSDP_OK)
    status = rt->backend->ops->event_wait(rt->backend->self, rt->context, rt->compute_done,
                                          rt->transport->deadline_us);
  if (status != MFSDP_OK) mfsdp__runtime_drain(rt);
  return status;
}

/* Host copies of the verdict's tables while they are built. */
typedef struct mfsdp__verdict_build {
  mfsdp_norm_block *blocks; /* of the plan, tensor order */
  mfsdp_block *own;
  int64_t *rank_word, *block_word, *rank_blocks;
  mfsdp_extent *extents;
  int32_t block_count;
} mfsdp__verdict_build;

MFSDP_API void mfsdp__verdict_build_free(mfsdp_runtime *rt, mfsdp__verdict_build *b)
{
  const size_t world = (size_t)rt->world, blocks = (size_t)b->block_count;
  mfsdp_table_free(rt->context, b->extents, world, sizeof(*b->extents));
  mfsdp_table_free(rt->context, b->rank_blocks, world, sizeof(int64_t));
  mfsdp_table_free(rt->context, b->block_word, blocks, sizeof(int64_t));
  mfsdp_table_free(rt->context, b->rank_word, world, sizeof(int64_t));
  mfsdp_table_free(rt->context, b->own, blocks, sizeof(*b->own));
  mfsdp_table_free(rt->context, b->blocks, blocks, sizeof(*b->blocks));
}

MFSDP_API mfsdp_status mfsdp__verdict_build_alloc(mfsdp_runtime *rt, mfsdp__verdict_build *b)
{
  const size_t world = (size_t)rt->world, blocks = (size_t)mfsdp_plan_block_count(rt->plan);
  void *memory;
  b->block_count = (int32_t)blocks;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, blocks, sizeof(*b->blocks), "norm blocks", &memory));
  b->blocks = (mfsdp_norm_block *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, blocks, sizeof(*b->own), "own norm blocks", &memory));
  b->own = (mfsdp_block *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, world, sizeof(int64_t), "message offsets", &memory));
  b->rank_word = (int64_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, blocks, sizeof(int64_t), "block words", &memory));
  b->block_word = (int64_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, world, sizeof(int64_t), "blocks per rank", &memory));
  b->rank_blocks = (int64_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, world, sizeof(*b->extents), "message extents", &memory));
  b->extents = (mfsdp_extent *)memory;
  return mfsdp_plan_blocks(rt->context, rt->plan, b->blocks, b->block_count, &b->block_count);
}

/* Where each rank's message and each block's sum lie; returns the words of all messages. */
MFSDP_API int64_t mfsdp__verdict_layout(mfsdp_runtime *rt, mfsdp__verdict_build *b)
{
  mfsdp__verdict_tables *t = &rt->verdict;
  int32_t piece_count = 0, i, r;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(rt->plan, -1, &piece_count);
  int64_t word = 0;
  for (i = 0; i < b->block_count; ++i) ++b->rank_blocks[pieces[b->blocks[i].piece].owner];
  for (r = 0; r < rt->world; ++r) {
    const int64_t words = t->header_words + b->rank_blocks[r];
    b->rank_word[r] = word;
    b->extents[r].owner = r;
    b->extents[r].unit_offset = word;
    b->extents[r].count = b->extents[r].payload_count = words;
    b->rank_blocks[r] = 0; /* now counts the blocks placed */
    word += words;
  }
  for (i = 0; i < b->block_count; ++i) {
    const mfsdp_norm_block *block = &b->blocks[i];
    const mfsdp_piece *piece = &pieces[block->piece];
    const int64_t place = b->rank_blocks[piece->owner]++;
    b->block_word[i] = b->rank_word[piece->owner] + t->header_words + place;
    if (piece->owner != rt->rank) continue;
    b->own[place].first = rt->units[piece->unit].accumulator_first + piece->grad_shard_offset +
                          block->first - piece->first;
    b->own[place].count = block->count;
    b->own[place].slot = (int32_t)place;
    b->own[place].param = block->param;
    ++t->own_block_count;
  }
  t->own_word = b->rank_word[rt->rank];
  t->block_count = b->block_count;
  return word;
}

MFSDP_API mfsdp_status mfsdp__verdict_gather_create(mfsdp_runtime *rt, const mfsdp__verdict_build *b,
                                                    int64_t words)
{
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_layout layout;
  memset(&layout, 0, sizeof(layout));
  layout.struct_nbytes = sizeof(layout);
  layout.extents = b->extents;
  layout.extent_count = rt->world;
  layout.world = rt->world;
  layout.dtype = MFSDP_F64;
  layout.full_count = words;
  desc.kind = MFSDP_COLL_GATHER;
  desc.traffic = MFSDP_TRAFFIC_SCALAR;
  desc.layout = &layout;
  desc.transport = rt->transport;
  desc.label = "gather verdict";
  return mfsdp_coll_create(rt->context, &desc, &rt->verdict.gather);
}

MFSDP_API mfsdp_status mfsdp__verdict_upload(mfsdp_runtime *rt, const mfsdp__verdict_build *b,
                                             int64_t words)
{
  mfsdp__verdict_tables *t = &rt->verdict;
  const size_t blocks = (size_t)b->block_count;
  MFSDP_TRY(mfsdp__setup_device_table(rt, NULL, (size_t)words * 8, &t->messages));
  MFSDP_TRY(mfsdp__setup_device_table(rt, b->rank_word, (size_t)rt->world * 8, &t->rank_word));
  MFSDP_TRY(mfsdp__setup_device_table(rt, b->block_word, blocks * 8, &t->block_word));
  MFSDP_TRY(mfsdp__setup_device_table(rt, b->own, (size_t)t->own_block_count * sizeof(*b->own),
                                      &t->blocks));
  MFSDP_TRY(mfsdp__setup_device_table(rt, NULL, (size_t)rt->param_count * sizeof(uint32_t), &t->present));
  MFSDP_TRY(mfsdp__setup_device_table(rt, NULL, (size_t)rt->group_count * sizeof(mfsdp_step_scalars),
                                      &t->scalars));
  MFSDP_TRY(mfsdp_buffer_alloc(rt->context, rt->backend, (size_t)t->header_words * 8,
                               MFSDP_SPACE_PINNED, MFSDP_MEMORY_TABLE, &t->header));
  MFSDP_TRY(mfsdp_buffer_alloc(rt->context, rt->backend, sizeof(mfsdp_verdict_record),
                               MFSDP_SPACE_PINNED, MFSDP_MEMORY_TABLE, &t->record));
  memset(t->header.data, 0, t->header.nbytes);
  memset(t->record.data, 0, t->record.nbytes);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup_rates(mfsdp_runtime *rt)
{
  const size_t nbytes = (size_t)rt->group_count * sizeof(mfsdp_group_rates);
  mfsdp_status status;
  mfsdp_group_rates *rates;
  void *memory;
  int32_t i;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, 1, nbytes, "group rates", &memory));
  rates = (mfsdp_group_rates *)memory;
  for (i = 0; i < rt->group_count; ++i) {
    rates[i].lr = rt->desc.optimizer->groups[i].lr;
    rates[i].weight_decay = rt->desc.optimizer->groups[i].weight_decay;
  }
  status = mfsdp__setup_device_table(rt, rates, nbytes, &rt->verdict.rates);
  mfsdp_table_free(rt->context, memory, 1, nbytes);
  return status;
}

MFSDP_API mfsdp_status mfsdp__setup_verdict(mfsdp_runtime *rt)
{
  mfsdp__verdict_build build;
  mfsdp_status status;
  int64_t words;
  memset(&build, 0, sizeof(build));
  rt->verdict.header_words = 1 + rt->desc.max_micro_batches + (rt->param_count + 63) / 64;
  status = mfsdp__verdict_build_alloc(rt, &build);
  if (status == MFSDP_OK) {
    words = mfsdp__verdict_layout(rt, &build);
    status = mfsdp__verdict_upload(rt, &build, words);
    if (status == MFSDP_OK) status = mfsdp__verdict_gather_create(rt, &build, words);
    if (status == MFSDP_OK) status = mfsdp__setup_rates(rt);
  }
  mfsdp__verdict_build_free(rt, &build);
  return status;
}

/* ---- life cycle ---- */

MFSDP_API mfsdp_status mfsdp__setup_queues(mfsdp_runtime *rt)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  MFSDP_TRY(ops->queue_create(self, rt->context, "communication", &rt->communication));
  rt->compute = rt->desc.compute_queue;
  if (rt->compute == NULL) {
    MFSDP_TRY(ops->queue_create(self, rt->context, "compute", &rt->compute));
    rt->owns_compute = 1;
  }
  MFSDP_TRY(ops->event_create(self, rt->context, &rt->compute_done));
  MFSDP_TRY(ops->event_create(self, rt->context, &rt->reduced));
  MFSDP_TRY(ops->event_create(self, rt->context, &rt->verdict_ready));
  return ops->event_create(self, rt->context, &rt->step_done);
}

MFSDP_API mfsdp_status mfsdp__setup(mfsdp_runtime *rt)
{
  int64_t shard_total = 0, accumulator_total = 0;
  void *memory;
  int32_t u;
  MFSDP_TRY(mfsdp__setup_queues(rt));
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->unit_count, sizeof(*rt->units), "runtime units",
                              &memory));
  rt->units = (mfsdp__unit *)memory;
  MFSDP_TRY(mfsdp__setup_params(rt));
  MFSDP_TRY(mfsdp__setup_owners(rt));
  for (u = 0; u < rt->unit_count; ++u)
    MFSDP_TRY(mfsdp__setup_unit(rt, u, &shard_total, &accumulator_total));
  MFSDP_TRY(mfsdp__setup_floats(rt, shard_total, MFSDP_MEMORY_SHARD, &rt->master));
  MFSDP_TRY(mfsdp__setup_floats(rt, accumulator_total, MFSDP_MEMORY_GRAD, &rt->accumulator));
  MFSDP_TRY(mfsdp__setup_rings(rt));
  MFSDP_TRY(mfsdp__setup_staging(rt));
  MFSDP_TRY(mfsdp__setup_optimizer(rt));
  MFSDP_TRY(mfsdp__setup_verdict(rt));
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)rt->world, sizeof(*rt->export_xfers),
                              "runtime export transfers", &memory));
  rt->export_xfers = (mfsdp_xfer *)memory;
  if (MFSDP_HAS(rt->transport->ops, reserve))
    MFSDP_TRY(rt->transport->ops->reserve(rt->transport->self, rt->context, rt->world));
  /* Masters, slots and accumulators are cleared on `compute`: other queues come after that. */
  MFSDP_TRY(rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->step_done));
  return rt->backend->ops->event_wait(rt->backend->self, rt->context, rt->step_done,
                                      rt->transport->deadline_us);
}

MFSDP_API void mfsdp__teardown_ring(mfsdp_runtime *rt, mfsdp__ring *ring)
{
  int32_t i;
  for (i = 0; i < ring->count && ring->slots != NULL; ++i)
    if (ring->slots[i].idle != NULL)
      rt->backend->ops->event_destroy(rt->backend->self, rt->context, ring->slots[i].idle);
  mfsdp_buffer_free(rt->context, rt->backend, &ring->buffer);
  mfsdp_table_free(rt->context, ring->slots, (size_t)ring->count, sizeof(*ring->slots));
}

MFSDP_API void mfsdp__teardown_verdict(mfsdp_runtime *rt)
{
  mfsdp__verdict_tables *t = &rt->verdict;
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

MFSDP_API void mfsdp__teardown_units(mfsdp_runtime *rt)
{
  int32_t u;
  for (u = 0; u < rt->unit_count && rt->units != NULL; ++u) {
    mfsdp_coll_destroy(rt->context, rt->units[u].reduce);
    mfsdp_coll_destroy(rt->context, rt->units[u].gather);
    if (rt->units[u].gathered != NULL)
      rt->backend->ops->event_destroy(rt->backend->self, rt->context, rt->units[u].gathered);
  }
  mfsdp_table_free(rt->context, rt->owner_units, (size_t)rt->owner_unit_count,
                   sizeof(*rt->owner_units));
  mfsdp_table_free(rt->context, rt->params, (size_t)rt->param_count, sizeof(*rt->params));
  mfsdp_table_free(rt->context, rt->units, (size_t)rt->unit_count, sizeof(*rt->units));
}

MFSDP_API void mfsdp__teardown(mfsdp_runtime *rt)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  mfsdp_event *events[4];
  int32_t i;
  mfsdp__runtime_drain(rt);
  events[0] = rt->step_done;
  events[1] = rt->verdict_ready;
  events[2] = rt->reduced;
  events[3] = rt->compute_done;
  mfsdp_table_free(rt->context, rt->export_xfers, (size_t)rt->world, sizeof(*rt->export_xfers));
  mfsdp__teardown_verdict(rt);
  mfsdp_optimizer_destroy(rt->context, rt->optimizer);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->staging);
  mfsdp__teardown_ring(rt, &rt->grad_ring);
  mfsdp__teardown_ring(rt, &rt->param_ring);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->accumulator);
  mfsdp_buffer_free(rt->context, rt->backend, &rt->master);
  mfsdp__teardown_units(rt);
  for (i = 0; i < 4; ++i)
    if (events[i] != NULL) ops->event_destroy(self, rt->context, events[i]);
  if (rt->owns_compute) ops->queue_destroy(self, rt->context, rt->compute);
  if (rt->communication != NULL) ops->queue_destroy(self, rt->context, rt->communication);
  mfsdp_table_free(rt->context, rt, 1, sizeof(*rt));
}

/*
 * Makes a runtime: checks the description, agrees with all ranks on version, options and plan, and
 * allocates everything that steps will use. Parameters start as zeros (mfsdp_runtime_init). Collective,
 * COMPLETE. E_ARGUMENT and E_UNSUPPORTED come before any communication or allocation; E_MISMATCH names
 * the first difference on every rank. On failure *out is NULL and nothing is held.
 */
MFSDP_API mfsdp_status mfsdp_runtime_create(mfsdp_context *context, const mfsdp_runtime_desc *desc,
                                            mfsdp_runtime **out)
{
  mfsdp_runtime *rt;
  mfsdp_status status;
  void *memory;
  *out = NULL;
  MFSDP_TRY(mfsdp__runtime_check_options(context, desc));
  MFSDP_TRY(mfsdp__runtime_check_group(context, desc));
  MFSDP_TRY(mfsdp__runtime_check_params(context, desc));
  MFSDP_TRY(mfsdp__runtime_agree(context, desc));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*rt), "runtime", &memory));
  rt = (mfsdp_runtime *)memory;
  rt->context = context;
  rt->desc = *desc;
  rt->backend = desc->backend;
  rt->plan = desc->groups[0].plan;
  rt->transport = desc->groups[0].transport;
  rt->control = desc->groups[0].control;
  rt->rank = rt->transport->rank;
  rt->world = rt->transport->world;
  rt->unit_count = mfsdp_plan_unit_count(rt->plan);
  rt->param_count = mfsdp_plan_param_count(rt->plan);
  rt->group_count = desc->optimizer->group_count;
  rt->failure = mfsdp_error_none();
  status = mfsdp__setup(rt);
  if (status != MFSDP_OK) {
    mfsdp__teardown(rt);
    return status;
  }
  rt->desc.groups = NULL; /* read by set-up only; the caller may free the arrays */
  rt->desc.optimizer = NULL;
  *out = rt;
  return MFSDP_OK;
}

/*
 * Waits until this rank's work is done and gives everything back. NULL is allowed. After a failure it
 * waits for this rank's queues only, which the poisoned transport lets run dry, and returns MFSDP_OK;
 * otherwise the status of the wait. The runtime is gone in any case.
 */
MFSDP_API mfsdp_status mfsdp_runtime_destroy(mfsdp_runtime *rt)
{
  const mfsdp_backend_ops *ops;
  mfsdp_status status = MFSDP_OK;
  if (rt == NULL) return MFSDP_OK;
  ops = rt->backend->ops;
  if (rt->failure.status == MFSDP_OK) {
    status = mfsdp__runtime_order(rt, rt->communication, rt->reduced, rt->compute);
    if (status == MFSDP_OK)
      status = ops->event_record(rt->backend->self, rt->compute, rt->compute_done);
    if (status == MFSDP_OK)
      status = ops->event_wait(rt->backend->self, rt->context, rt->compute_done,
                               rt->transport->deadline_us);
    if (status != MFSDP_OK) (void)mfsdp__runtime_failed(rt, status); /* peers must not wait for us */
  }
  mfsdp__teardown(rt);
  return status;
}

#endif /* MFSDP_RUNTIME_SETUP_H */
