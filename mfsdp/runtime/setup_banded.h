/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup_banded.h - the rounds in which BANDED matrices are exchanged: who works on what,
 * when, and what travels. Part of runtime.h.
 *
 * A group's exchanged matrices are taken by falling size and put into batches by the rule of
 * measure_banded.h: each batch is of one lane, which is a home rank, or, where every rank does the
 * same work, the only one. Round t is the t-th batch of every lane, so that large matrices meet
 * large ones. All ranks of the group make the same rounds.
 * Bands are packed without padding: what is sent is what is needed, and offsets are those of
 * floats.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_BANDED_H
#define MFSDP_RUNTIME_SETUP_BANDED_H

#include "banded.h"
#include "resident.h"
#include "setup_units.h"

/* An exchanged matrix, or a batch of equal ones. */
typedef struct mfsdp__banded_matrix {
  int64_t rows, cols;
  int32_t hyper_group, lane;
  int32_t batch;  /* of a matrix */
  int32_t tensor; /* of a matrix: this rank's band in the optimizer's list; -1: it has none */
  int32_t round, count, limit; /* of a batch */
} mfsdp__banded_matrix;

/* Scratch of set-up, for one group at a time. */
typedef struct mfsdp__banded_build {
  mfsdp__banded_matrix *matrices, *batches; /* capacity each */
  mfsdp__keyed *order;                      /* capacity: matrices by falling size */
  int32_t *lane_rounds;                     /* widest: batches of each lane so far */
  mfsdp_extent *extents;                    /* of one round */
  int32_t *roots;
  int64_t *segment; /* widest: floats of a round that each rank has bands of */
  int32_t capacity, widest, extent_capacity;
  int32_t matrix_count, batch_count, extent_count;
  int64_t direction; /* where this rank's next bands go, over all groups */
} mfsdp__banded_build;

/* Where a rank's band lies in a matrix, and how long it is, in floats. */
MFSDP_API int64_t mfsdp__banded_band(const mfsdp__banded_matrix *like, int32_t world, int32_t rank,
                                     int64_t *first) {
  int64_t rows, count;
  mfsdp_plan_band(like->rows, world, rank, &rows, &count);
  *first = rows * like->cols;
  return count * like->cols;
}

/* ---- matrices into batches ---- */

/* Lists a group's exchanged matrices. *tensor counts this rank's tensors as mfsdp__setup_tensors
 * does. */
MFSDP_API void mfsdp__banded_list(const mfsdp_runtime *rt, const mfsdp__group_entry *group,
                                  mfsdp__banded_build *b, int32_t *tensor) {
  int32_t piece_count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(group->plan, -1, &piece_count);
  b->matrix_count = b->batch_count = 0;
  for (i = 0; i < piece_count; ++i) {
    const mfsdp_piece *piece = &pieces[i];
    const int held = mfsdp__holds(group, piece) && piece->grad_shard_offset >= 0;
    if (mfsdp__piece_is_exchanged(rt->desc, group->plan, piece)) {
      mfsdp__banded_matrix *matrix;
      if (mfsdp__piece_opens_matrix(piece)) ++b->matrix_count;
      matrix = &b->matrices[b->matrix_count - 1];
      if (mfsdp__piece_opens_matrix(piece)) {
        matrix->rows = piece->matrix_rows;
        matrix->cols = piece->cols;
        matrix->hyper_group = mfsdp_plan_param(group->plan, piece->param)->hyper_group;
        matrix->lane = rt->desc->banded_update == MFSDP_BANDED_EVERYWHERE ? 0 : piece->home;
        matrix->tensor = -1;
      }
      if (held) matrix->tensor = *tensor;
    }
    *tensor += held;
  }
}

/* The batch that a matrix joins: the last one of its lane that is like it and has room; or a new
 * one. */
MFSDP_API mfsdp__banded_matrix *mfsdp__banded_join(mfsdp__banded_build *b,
                                                   const mfsdp__banded_matrix *matrix) {
  mfsdp__banded_matrix *batch;
  int32_t i;
  for (i = b->batch_count; i-- > 0;) {
    batch = &b->batches[i];
    if (batch->rows * batch->cols != matrix->rows * matrix->cols) break; /* larger ones before it */
    if (batch->lane == matrix->lane && batch->rows == matrix->rows &&
        batch->hyper_group == matrix->hyper_group && batch->count < batch->limit)
      return batch;
  }
  batch = &b->batches[b->batch_count++];
  *batch = *matrix;
  batch->count = 0;
  batch->round = b->lane_rounds[matrix->lane]++;
  return batch;
}

/* The most matrices like this one that share a batch. */
MFSDP_API mfsdp_status mfsdp__banded_limit_of(mfsdp_runtime *rt, const mfsdp__banded_matrix *like,
                                              int64_t largest, size_t workspace_nbytes,
                                              int32_t *limit) {
  int64_t count = 0, most;
  size_t nbytes = 0;
  (void)mfsdp_i64_align(like->rows * like->cols, &count); /* the plan bounds it */
  MFSDP_TRY(mfsdp_optimizer_orthogonalize_nbytes(rt->context,
                                                 &rt->desc->optimizer->groups[like->hyper_group],
                                                 like->rows, like->cols, 1, &nbytes));
  most = mfsdp__banded_limit(largest, workspace_nbytes, count, nbytes);
  *limit = most > INT32_MAX ? INT32_MAX : (int32_t)most;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__banded_batches(mfsdp_runtime *rt, const mfsdp__group_entry *group,
                                             mfsdp__banded_build *b) {
  size_t workspace_nbytes;
  int64_t largest;
  int32_t i;
  MFSDP_TRY(mfsdp__banded_room(rt->context, rt->desc, group->plan, &largest, &workspace_nbytes));
  memset(b->lane_rounds, 0, (size_t)b->widest * sizeof(*b->lane_rounds));
  for (i = 0; i < b->matrix_count; ++i) {
    b->order[i].key = -(b->matrices[i].rows * b->matrices[i].cols);
    b->order[i].id = i;
  }
  mfsdp__heap_build(b->order, b->matrix_count);
  for (i = b->matrix_count; i > 0; --i) {
    mfsdp__banded_matrix *matrix = &b->matrices[mfsdp__heap_pop(b->order, i).id], *batch;
    MFSDP_TRY(mfsdp__banded_limit_of(rt, matrix, largest, workspace_nbytes, &matrix->limit));
    batch = mfsdp__banded_join(b, matrix);
    ++batch->count;
    matrix->batch = (int32_t)(batch - b->batches);
  }
  return MFSDP_OK;
}

/* ---- a round ---- */

/* What travels for one batch: from each rank with bands one stretch, all matrices of the batch in
 * it. */
MFSDP_API void mfsdp__banded_extents(const mfsdp__group_entry *group, mfsdp__banded_build *b,
                                     const mfsdp__banded_matrix *batch) {
  int32_t r;
  for (r = 0; r < group->world; ++r) {
    int64_t first;
    const int64_t count = mfsdp__banded_band(batch, group->world, r, &first);
    mfsdp_extent *e = &b->extents[b->extent_count];
    if (count == 0) continue;
    e->owner = r;
    e->unit_offset = batch->count * first;
    e->shard_offset = b->segment[r];
    e->count = e->payload_count = batch->count * count;
    b->roots[b->extent_count++] = batch->lane;
    b->segment[r] += e->count;
  }
}

/* This rank's bands of a batch lie in the directions from `direction` on, matrix after matrix. */
MFSDP_API void mfsdp__banded_place(const mfsdp_runtime *rt, const mfsdp__group_entry *group,
                                   const mfsdp__banded_build *b, int32_t batch, int64_t direction,
                                   mfsdp_optimizer_tensor *tensors) {
  int64_t first;
  const int64_t count = mfsdp__banded_band(&b->batches[batch], group->world, group->rank, &first);
  int32_t i;
  for (i = 0; i < b->matrix_count && count > 0; ++i) {
    if (b->matrices[i].batch != batch) continue;
    tensors[b->matrices[i].tensor].direction = (float *)rt->banded.directions.data + direction;
    direction += count;
  }
}

MFSDP_API void mfsdp__banded_add_copy(mfsdp_runtime *rt, int64_t packed, int64_t whole,
                                      int64_t count) {
  mfsdp__banded_copy *copy = &rt->banded.copies[rt->banded.copy_count++];
  copy->packed = packed;
  copy->whole = whole;
  copy->count = count;
}

/* This rank's batch of a round: its shape, and which copies it takes. `direction`: of its own
 * bands in what it has of the round. */
MFSDP_API void mfsdp__banded_mine(mfsdp_runtime *rt, const mfsdp__group_entry *group,
                                  const mfsdp__banded_matrix *batch, mfsdp__banded_round *round) {
  int64_t first, count;
  int32_t r, j;
  round->hyper_group = batch->hyper_group;
  round->matrix_count = batch->count;
  round->rows = batch->rows;
  round->cols = batch->cols;
  (void)mfsdp_i64_align(batch->rows * batch->cols, &round->stride); /* the plan bounds it */
  round->copy_first = rt->banded.copy_count;
  for (r = 0; r < group->world && batch->count > 1; ++r) {
    count = mfsdp__banded_band(batch, group->world, r, &first);
    for (j = 0; j < batch->count && count > 0; ++j)
      mfsdp__banded_add_copy(rt, batch->count * first + j * count, j * round->stride + first,
                             count);
  }
  round->copy_count = rt->banded.copy_count - round->copy_first;
  round->own_first = rt->banded.copy_count;
  count = mfsdp__banded_band(batch, group->world, group->rank, &first);
  for (j = 0; j < batch->count && rt->desc->banded_update == MFSDP_BANDED_EVERYWHERE && count > 0;
       ++j)
    mfsdp__banded_add_copy(rt, j * count, j * round->stride + first, count);
  round->own_count = rt->banded.copy_count - round->own_first;
}

/* The collectives of a round whose extents have been listed. */
MFSDP_API mfsdp_status mfsdp__banded_colls(mfsdp_runtime *rt, const mfsdp__group_entry *group,
                                           const mfsdp__banded_build *b, int64_t full_count,
                                           mfsdp__banded_round *round) {
  const int home = rt->desc->banded_update == MFSDP_BANDED_HOME;
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_layout layout;
  memset(&layout, 0, sizeof(layout));
  layout.struct_nbytes = sizeof(layout);
  layout.extents = b->extents;
  layout.extent_count = b->extent_count;
  layout.world = group->world;
  layout.dtype = MFSDP_F32;
  layout.full_count = full_count;
  layout.roots = home ? b->roots : NULL;
  desc.kind = MFSDP_COLL_GATHER;
  if (!home) desc.algorithm = rt->desc->gather_algorithm; /* roots are DIRECT's alone */
  desc.wire = rt->desc->wire;
  desc.chunk_nbytes = rt->desc->chunk_nbytes;
  desc.layout = &layout;
  desc.transport = group->transport;
  desc.traffic = MFSDP_TRAFFIC_OPTIMIZER_MATRIX;
  desc.label = "bands to matrices";
  MFSDP_TRY(mfsdp_coll_create(rt->context, &desc, &round->gather));
  desc.kind = MFSDP_COLL_SCATTER;
  desc.label = "matrices to bands";
  return home ? mfsdp_coll_create(rt->context, &desc, &round->scatter) : MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__banded_emit_round(mfsdp_runtime *rt, const mfsdp__group_entry *group,
                                                mfsdp__banded_build *b, int32_t number,
                                                mfsdp_optimizer_tensor *tensors) {
  mfsdp__banded_round *round = &rt->banded.rounds[rt->banded.round_count++];
  int64_t full_count = 0;
  int32_t i;
  memset(b->segment, 0, (size_t)b->widest * sizeof(*b->segment));
  b->extent_count = 0;
  round->opens_group = number == 0;
  round->slot = number % 2;
  round->direction_first = b->direction;
  for (i = 0; i < b->batch_count; ++i) {
    const mfsdp__banded_matrix *batch = &b->batches[i];
    const int64_t count = batch->rows * batch->cols * batch->count;
    if (batch->round != number) continue;
    mfsdp__banded_place(rt, group, b, i, b->direction + b->segment[group->rank], tensors);
    mfsdp__banded_extents(group, b, batch);
    if (count > full_count) full_count = count;
    if (rt->desc->banded_update == MFSDP_BANDED_EVERYWHERE || batch->lane == group->rank)
      mfsdp__banded_mine(rt, group, batch, round);
  }
  round->band_count = b->segment[group->rank];
  b->direction += round->band_count;
  return mfsdp__banded_colls(rt, group, b, full_count, round);
}

/* ---- memory ---- */

MFSDP_API void mfsdp__banded_build_free(mfsdp_runtime *rt, mfsdp__banded_build *b) {
  const size_t capacity = (size_t)b->capacity, widest = (size_t)b->widest;
  const size_t extents = (size_t)b->extent_capacity;
  mfsdp_table_free(rt->context, b->segment, widest, sizeof(*b->segment));
  mfsdp_table_free(rt->context, b->roots, extents, sizeof(*b->roots));
  mfsdp_table_free(rt->context, b->extents, extents, sizeof(*b->extents));
  mfsdp_table_free(rt->context, b->lane_rounds, widest, sizeof(*b->lane_rounds));
  mfsdp_table_free(rt->context, b->order, capacity, sizeof(*b->order));
  mfsdp_table_free(rt->context, b->batches, capacity, sizeof(*b->batches));
  mfsdp_table_free(rt->context, b->matrices, capacity, sizeof(*b->matrices));
}

/* A round has at most one batch of each lane, and a batch one band on each rank that can have one.
 */
MFSDP_API mfsdp_status mfsdp__banded_build_alloc(mfsdp_runtime *rt, int32_t matrix_count,
                                                 mfsdp__banded_build *b) {
  static const char what[] = "runtime bands";
  size_t capacity, widest, extents;
  void *memory;
  int32_t g;
  b->capacity = matrix_count;
  b->widest = 1;
  for (g = 0; g < rt->group_count; ++g)
    if (rt->groups[g].world > b->widest) b->widest = rt->groups[g].world;
  b->extent_capacity = b->widest < MFSDP_PLAN_BANDS ? b->widest : MFSDP_PLAN_BANDS;
  b->extent_capacity *= b->widest < matrix_count ? b->widest : matrix_count;
  capacity = (size_t)b->capacity;
  widest = (size_t)b->widest;
  extents = (size_t)b->extent_capacity;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, capacity, sizeof(*b->matrices), what, &memory));
  b->matrices = (mfsdp__banded_matrix *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, capacity, sizeof(*b->batches), what, &memory));
  b->batches = (mfsdp__banded_matrix *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, capacity, sizeof(*b->order), what, &memory));
  b->order = (mfsdp__keyed *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, widest, sizeof(*b->lane_rounds), what, &memory));
  b->lane_rounds = (int32_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, extents, sizeof(*b->extents), what, &memory));
  b->extents = (mfsdp_extent *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, extents, sizeof(*b->roots), what, &memory));
  b->roots = (int32_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, widest, sizeof(*b->segment), what, &memory));
  b->segment = (int64_t *)memory;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__banded_alloc(mfsdp_runtime *rt, const mfsdp__banded_sizes *sizes) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__banded *b = &rt->banded;
  void *memory;
  int k;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)sizes->matrix_count, sizeof(*b->rounds),
                              "runtime rounds of bands", &memory));
  b->rounds = (mfsdp__banded_round *)memory;
  b->round_capacity = sizes->matrix_count; /* at least one matrix each */
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)sizes->copy_count, sizeof(*b->copies),
                              "runtime copies of bands", &memory));
  b->copies = (mfsdp__banded_copy *)memory;
  b->copy_capacity = sizes->copy_count;
  b->slot_count = sizes->slot_count;
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)sizes->direction_count * sizeof(float),
                                MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING, &b->directions));
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)(sizes->slots * sizes->slot_count) * sizeof(float),
                                MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING, &b->slots));
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)sizes->whole_count * sizeof(float), MFSDP_SPACE_DEVICE,
                                MFSDP_MEMORY_STAGING, &b->whole));
  MFSDP_TRY(mfsdp__setup_buffer(rt, sizes->workspace_nbytes, MFSDP_SPACE_DEVICE,
                                MFSDP_MEMORY_WORKSPACE, &b->workspace));
  for (k = 0; k < 2; ++k) {
    MFSDP_TRY(ops->event_create(rt->backend->self, rt->context, &b->gathered[k]));
    MFSDP_TRY(ops->event_create(rt->backend->self, rt->context, &b->worked[k]));
  }
  b->begin = mfsdp_trace_mark_make(rt->context, 1, "compute", "bands");
  b->end = mfsdp_trace_mark_make(rt->context, 0, "compute", "bands");
  return MFSDP_OK;
}

/* The rounds of all groups, and the directions of the bands in the optimizer's list. */
MFSDP_API mfsdp_status mfsdp__banded_emit(mfsdp_runtime *rt, mfsdp__banded_build *b,
                                          mfsdp_optimizer_tensor *tensors) {
  int32_t g, r, t, tensor = 0;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__group_entry *group = &rt->groups[g];
    int32_t rounds = 0;
    mfsdp__banded_list(rt, group, b, &tensor);
    MFSDP_TRY(mfsdp__banded_batches(rt, group, b));
    for (r = 0; r < group->world; ++r)
      if (b->lane_rounds[r] > rounds) rounds = b->lane_rounds[r];
    for (t = 0; t < rounds; ++t)
      MFSDP_TRY(mfsdp__banded_emit_round(rt, group, b, t, tensors));
  }
  return MFSDP_OK;
}

/* The list has been made, the directions apart. Nothing is held where nothing is exchanged. */
MFSDP_API mfsdp_status mfsdp__setup_banded(mfsdp_runtime *rt, const mfsdp__sizes *sizes,
                                           mfsdp_optimizer_tensor *tensors) {
  mfsdp__banded_build build;
  mfsdp_status status;
  if (sizes->banded.matrix_count == 0) return MFSDP_OK;
  memset(&build, 0, sizeof(build));
  MFSDP_TRY(mfsdp__banded_alloc(rt, &sizes->banded));
  status = mfsdp__banded_build_alloc(rt, sizes->banded.matrix_count, &build);
  if (status == MFSDP_OK) status = mfsdp__banded_emit(rt, &build, tensors);
  mfsdp__banded_build_free(rt, &build);
  return status;
}

MFSDP_API void mfsdp__teardown_banded(mfsdp_runtime *rt) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  mfsdp__banded *b = &rt->banded;
  int32_t t;
  int k;
  for (t = 0; t < b->round_count; ++t) {
    mfsdp_coll_destroy(rt->context, b->rounds[t].scatter);
    mfsdp_coll_destroy(rt->context, b->rounds[t].gather);
  }
  for (k = 0; k < 2; ++k) {
    if (b->gathered[k] != NULL) ops->event_destroy(rt->backend->self, rt->context, b->gathered[k]);
    if (b->worked[k] != NULL) ops->event_destroy(rt->backend->self, rt->context, b->worked[k]);
  }
  mfsdp_buffer_free(rt->context, rt->backend, &b->workspace);
  mfsdp_buffer_free(rt->context, rt->backend, &b->whole);
  mfsdp_buffer_free(rt->context, rt->backend, &b->slots);
  mfsdp_buffer_free(rt->context, rt->backend, &b->directions);
  mfsdp_table_free(rt->context, b->copies, (size_t)b->copy_capacity, sizeof(*b->copies));
  mfsdp_table_free(rt->context, b->rounds, (size_t)b->round_capacity, sizeof(*b->rounds));
}

#endif /* MFSDP_RUNTIME_SETUP_BANDED_H */
