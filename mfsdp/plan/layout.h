/* SPDX-License-Identifier: MIT */
/*
 * plan/layout.h - from owners to pieces: their order, their offsets in unit buffers and segments.
 *
 * Two layouts per unit. GATHER holds every tensor, REDUCE leaves FROZEN out. In a full buffer
 * tensors stand in declared order, each on a multiple of MFSDP_ALIGN_ELEMENTS; in a segment the
 * owner's pieces stand in the same order, each on such a multiple. All lengths are such multiples.
 * Private to the plan.
 * Does not: choose owners.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_LAYOUT_H
#define MFSDP_PLAN_LAYOUT_H

#include "check.h"

/* Places in the tables below while pieces are emitted in order. */
typedef struct mfsdp__emit {
  int32_t piece, matrix;
  int64_t run, run_end; /* of the unit at hand */
} mfsdp__emit;

MFSDP_API int64_t mfsdp__aligned(int64_t count) {
  int64_t padded = count;
  (void)mfsdp_i64_align(count, &padded); /* counts are limited to 2^46 */
  return padded;
}

/* A whole matrix or a run; bands change what differs. */
MFSDP_API mfsdp_piece *mfsdp__emit_piece(mfsdp__build *build, mfsdp__emit *emit, int32_t param,
                                         int32_t owner, int64_t first, int64_t rows, int64_t cols) {
  const mfsdp_plan *plan = build->plan;
  mfsdp_piece *piece = &build->plan->pieces[emit->piece++];
  piece->param = param;
  piece->matrix = -1;
  piece->unit = plan->params[param].unit;
  piece->owner = piece->home = owner;
  piece->first = piece->matrix_first = first;
  piece->count = rows * cols;
  piece->rows = piece->matrix_rows = rows;
  piece->cols = cols;
  piece->placement = plan->params[param].placement;
  piece->unit_offset = plan->infos[param].offset[0] + first;
  piece->grad_unit_offset = plan->infos[param].offset[1];
  if (piece->grad_unit_offset >= 0) piece->grad_unit_offset += first;
  return piece;
}

/* The pieces of the matrix that the cursor shows: one, or one per rank that holds a band. */
MFSDP_API void mfsdp__emit_matrix(mfsdp__build *build, mfsdp__emit *emit, int32_t param,
                                  const mfsdp__view_cursor *cursor) {
  const int32_t matrix = emit->matrix++, home = build->owner[matrix];
  mfsdp__band_cursor band = mfsdp__band_begin(cursor->rows, build->plan->world);
  build->plan->costs[emit->piece] = build->cost[matrix];
  if (!build->banded[matrix]) {
    mfsdp__emit_piece(build, emit, param, home, cursor->first, cursor->rows, cursor->cols)->matrix =
        cursor->matrix;
    return;
  }
  while (mfsdp__band_next(&band)) {
    mfsdp_piece *piece =
        mfsdp__emit_piece(build, emit, param, band.rank, cursor->first + band.first * cursor->cols,
                          band.count, cursor->cols);
    piece->matrix = cursor->matrix;
    piece->placement = MFSDP_PLACEMENT_BANDED;
    piece->home = home;
    piece->matrix_first = cursor->first;
    piece->matrix_rows = cursor->rows;
  }
}

/* The pieces of one tensor. Runs of a unit were made in its declared order. */
MFSDP_API void mfsdp__emit_param(mfsdp__build *build, mfsdp__emit *emit, int32_t param) {
  const mfsdp_plan *plan = build->plan;
  mfsdp__plan_param *info = &build->plan->infos[param];
  info->piece_first = emit->piece;
  if (plan->params[param].role == MFSDP_ROLE_MATRIX) {
    mfsdp__view_cursor cursor = mfsdp__view_begin();
    while (mfsdp__view_next(&plan->params[param], info->numel, &cursor))
      mfsdp__emit_matrix(build, emit, param, &cursor);
  }
  while (emit->run < emit->run_end && build->runs[emit->run].param == param) {
    const mfsdp__run *run = &build->runs[emit->run++];
    (void)mfsdp__emit_piece(build, emit, param, run->owner, run->first, 1, run->count);
  }
  info->piece_count = emit->piece - info->piece_first;
}

/* Offsets of tensors in both buffers of a unit, and their lengths. */
MFSDP_API void mfsdp__layout_unit(mfsdp_plan *plan, int32_t unit) {
  mfsdp__plan_unit *table = &plan->units[unit];
  int32_t j, kind;
  for (j = 0; j < table->param_count; ++j) {
    const int32_t i = plan->unit_params[table->param_first + j];
    mfsdp__plan_param *info = &plan->infos[i];
    if (plan->params[i].alias_of != NULL) continue;
    for (kind = 0; kind < 2; ++kind) {
      info->offset[kind] = -1;
      if (kind == 1 && plan->params[i].role == MFSDP_ROLE_FROZEN) continue;
      info->offset[kind] = table->length[kind];
      table->length[kind] += mfsdp__aligned(info->numel);
      table->payload[kind] += info->numel;
    }
  }
}

/* Pieces of all matrices. */
MFSDP_API int64_t mfsdp__layout_count_matrix_pieces(const mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  int64_t pieces = 0;
  int32_t u, j, matrix = 0;
  for (u = 0; u < plan->unit_count; ++u)
    for (j = 0; j < plan->units[u].param_count; ++j) {
      const int32_t i = plan->unit_params[plan->units[u].param_first + j];
      mfsdp__view_cursor cursor = mfsdp__view_begin();
      if (plan->params[i].alias_of != NULL || plan->params[i].role != MFSDP_ROLE_MATRIX) continue;
      while (mfsdp__view_next(&plan->params[i], plan->infos[i].numel, &cursor))
        pieces += build->banded[matrix++] ? mfsdp__band_count(cursor.rows, plan->world) : 1;
    }
  return pieces;
}

/* Emits all pieces; unit buffers are laid out on the way. */
MFSDP_API void mfsdp__layout_pieces(mfsdp__build *build) {
  mfsdp_plan *plan = build->plan;
  mfsdp__emit emit;
  int32_t u, j;
  memset(&emit, 0, sizeof(emit));
  for (u = 0; u < plan->unit_count; ++u) {
    mfsdp__plan_unit *unit = &plan->units[u];
    mfsdp__layout_unit(plan, u);
    unit->piece_first = emit.piece;
    emit.run = build->run_first[u];
    emit.run_end = emit.run + build->run_count[u];
    for (j = 0; j < unit->param_count; ++j) {
      const int32_t i = plan->unit_params[unit->param_first + j];
      if (plan->params[i].alias_of == NULL) mfsdp__emit_param(build, &emit, i);
    }
    unit->piece_count = emit.piece - unit->piece_first;
  }
}

/* How many (unit, owner) pairs own something. */
MFSDP_API int64_t mfsdp__layout_count_segments(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  int64_t count = 0;
  int32_t i;
  memset(build->mark, 0, (size_t)plan->world * sizeof(*build->mark));
  for (i = 0; i < plan->piece_count; ++i) {
    const mfsdp_piece *piece = &plan->pieces[i];
    if (build->mark[piece->owner] == piece->unit + 1) continue;
    build->mark[piece->owner] = piece->unit + 1;
    ++count;
  }
  return count;
}

/* The segments of one unit, by rank; shard offsets of its pieces. */
MFSDP_API void mfsdp__layout_segments_of(mfsdp__build *build, int32_t unit) {
  mfsdp_plan *plan = build->plan;
  mfsdp__plan_unit *table = &plan->units[unit];
  const int32_t end = table->piece_first + table->piece_count;
  int32_t owners = 0, i;
  for (i = table->piece_first; i < end; ++i) {
    const int32_t rank = plan->pieces[i].owner;
    if (build->mark[rank] == unit + 1) continue;
    build->mark[rank] = unit + 1;
    build->heap[owners].key = 0;
    build->heap[owners++].id = rank;
  }
  mfsdp__keyed_sort(build->heap, owners);
  table->segment_count = owners;
  /* From here on mark holds the segment of a rank that owns something of this unit. */
  for (i = 0; i < owners; ++i) {
    plan->segments[table->segment_first + i].rank = build->heap[i].id;
    build->mark[build->heap[i].id] = table->segment_first + i;
  }
  for (i = table->piece_first; i < end; ++i) {
    mfsdp_piece *piece = &plan->pieces[i];
    mfsdp__plan_segment *segment = &plan->segments[build->mark[piece->owner]];
    piece->shard_offset = segment->length[0];
    segment->length[0] += mfsdp__aligned(piece->count);
    segment->payload[0] += piece->count;
    piece->grad_shard_offset = -1;
    if (piece->grad_unit_offset < 0) continue;
    piece->grad_shard_offset = segment->length[1];
    segment->length[1] += mfsdp__aligned(piece->count);
    segment->payload[1] += piece->count;
  }
  for (i = 0; i < owners; ++i)
    build->mark[build->heap[i].id] = 0;
}

MFSDP_API void mfsdp__layout_segments(mfsdp__build *build) {
  mfsdp_plan *plan = build->plan;
  int32_t u, first = 0;
  memset(build->mark, 0, (size_t)plan->world * sizeof(*build->mark));
  for (u = 0; u < plan->unit_count; ++u) {
    plan->units[u].segment_first = first;
    mfsdp__layout_segments_of(build, u);
    first += plan->units[u].segment_count;
  }
}

/* Canonical blocks of the whole plan. */
MFSDP_API int64_t mfsdp__layout_count_blocks(const mfsdp_plan *plan) {
  int64_t count = 0;
  int32_t i;
  for (i = 0; i < plan->piece_count; ++i) {
    const mfsdp_piece *piece = &plan->pieces[i];
    const int64_t cut = mfsdp__plan_cut(plan, piece);
    if (plan->params[piece->param].role == MFSDP_ROLE_FROZEN) continue;
    count += piece->count / cut + (piece->count % cut != 0);
  }
  return count;
}

#endif /* MFSDP_PLAN_LAYOUT_H */
