/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/records.h - the tensors of this rank's groups, one record for each. Private to
 * checkpoint.h.
 *
 * A record says all that files and headers need, so that a rank can write those of groups that it is
 * not part of (share.h). It depends on the parameter and its optimizer alone, not on who owns what.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_RECORDS_H
#define MFSDP_CHECKPOINT_RECORDS_H

#include "object.h"

/* Where records go; data NULL: their bytes are counted only. */
typedef struct mfsdp__ck_writer {
  unsigned char *data;
  size_t nbytes;
} mfsdp__ck_writer;

/* `kind` "model": the parameter's own name. */
MFSDP_API void mfsdp__ck_put_record(mfsdp__ck_writer *writer, const char *name, const char *kind,
                                    mfsdp_safetensors_dtype dtype, int32_t ndim,
                                    const int64_t *shape) {
  const int model = strcmp(kind, "model") == 0;
  const size_t name_nbytes = strlen(name) + (model ? 0 : strlen(kind) + 1) + 1;
  const size_t nbytes = sizeof(mfsdp__ck_record) + (name_nbytes + 7) / 8 * 8;
  if (writer->data != NULL) {
    mfsdp__ck_record *record = (mfsdp__ck_record *)(void *)(writer->data + writer->nbytes);
    memset(record, 0, nbytes);
    memcpy(record->shape, shape, (size_t)ndim * sizeof(*shape));
    record->nbytes = nbytes;
    record->ndim = ndim;
    record->dtype = (int32_t)dtype;
    (void)snprintf(record->kind, sizeof(record->kind), "%.39s", kind);
    (void)snprintf((char *)(record + 1), name_nbytes, "%s%s%s", name, model ? "" : ".",
                   model ? "" : kind);
  }
  writer->nbytes += nbytes;
}

/* ---- optimizer state ---- */

/* State array `index` of a piece of a parameter (NULL: of an empty one); 0 if there is none. */
MFSDP_API int mfsdp__ck_state_shape(const mfsdp_checkpoint *ck, const mfsdp_param *param,
                                    const mfsdp_piece *piece, int32_t index,
                                    mfsdp__state_shape *out) {
  const mfsdp_hyper_group *group = &mfsdp_runtime_optimizer(ck->rt)->groups[param->hyper_group];
  mfsdp_optimizer_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.name = param->name;
  tensor.role = param->role;
  tensor.hyper_group = param->hyper_group;
  if (piece != NULL) {
    tensor.rows = piece->rows;
    tensor.cols = piece->cols;
    tensor.count = piece->count;
  }
  return mfsdp__algorithm_of(group->algorithm)->state(group, &tensor, index, out);
}

/* The same by name. */
MFSDP_API int mfsdp__ck_state_named(const mfsdp_checkpoint *ck, const mfsdp_param *param,
                                    const mfsdp_piece *piece, const char *name,
                                    mfsdp__state_shape *out) {
  int32_t k;
  for (k = 0; mfsdp__ck_state_shape(ck, param, piece, k, out); ++k)
    if (strcmp(out->name, name) == 0) return 1;
  return 0;
}

/* Elements of a parameter's state in the pieces before `last` (NULL: in all). What belongs to a
 * matrix stands in the order of matrices, what belongs to elements in theirs. */
MFSDP_API int64_t mfsdp__ck_state_count(const mfsdp_checkpoint *ck, int32_t param, const char *kind,
                                        const mfsdp_piece *last) {
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp__ck_pieces(ck, param, &count);
  mfsdp__state_shape shape;
  int64_t sum = 0;
  for (i = 0; i < count && (last == NULL || pieces[i].first < last->first); ++i)
    if (mfsdp__ck_state_named(ck, mfsdp__ck_param(ck, param), &pieces[i], kind, &shape))
      sum += shape.rows * shape.cols; /* fits: it is in memory somewhere */
  return sum;
}

/* The whole state of a parameter: as the parameter, where it has as many elements; one matrix's as it
 * is; several matrices' one behind the other. `first`: the state of the first piece. */
MFSDP_API void mfsdp__ck_put_state(mfsdp__ck_writer *writer, const mfsdp_checkpoint *ck,
                                   int32_t param, const mfsdp__state_shape *first) {
  const mfsdp_param *p = mfsdp__ck_param(ck, param);
  const int64_t numel =
      mfsdp_plan_param_numel(mfsdp__ck_plan(ck, param), ck->rt->params[param].index);
  const int64_t count = mfsdp__ck_state_count(ck, param, first->name, NULL);
  int64_t own[2];
  if (count == numel || numel == 0) {
    mfsdp__ck_put_record(writer, p->name, first->name, MFSDP_SAFETENSORS_F32, p->ndim, p->shape);
    return;
  }
  own[0] = first->rows * first->cols == count ? first->rows : count;
  own[1] = first->cols;
  mfsdp__ck_put_record(writer, p->name, first->name, MFSDP_SAFETENSORS_F32,
                       first->rows * first->cols == count ? 2 : 1, own);
}

/* ---- all of a parameter, all of a group ---- */

/* Tied: saved by its owner. */
MFSDP_API void mfsdp__ck_put_param(mfsdp__ck_writer *writer, const mfsdp_checkpoint *ck,
                                   int32_t param) {
  const mfsdp_param *p = mfsdp__ck_param(ck, param);
  int32_t count = 0, k;
  const mfsdp_piece *pieces = mfsdp__ck_pieces(ck, param, &count);
  mfsdp__state_shape shape;
  if (ck->rt->params[param].owner != param) return;
  mfsdp__ck_put_record(writer, p->name, "model", mfsdp_safetensors_dtype_of(p->compute), p->ndim,
                       p->shape);
  if (p->role == MFSDP_ROLE_FROZEN) return;
  if (p->compute != MFSDP_F32)
    mfsdp__ck_put_record(writer, p->name, "master", MFSDP_SAFETENSORS_F32, p->ndim, p->shape);
  for (k = 0; mfsdp__ck_state_shape(ck, p, count > 0 ? pieces : NULL, k, &shape); ++k)
    mfsdp__ck_put_state(writer, ck, param, &shape);
}

MFSDP_API void mfsdp__ck_put_records(mfsdp__ck_writer *writer, const mfsdp_checkpoint *ck,
                                     int32_t group) {
  const mfsdp__group_entry *entry = &ck->rt->groups[group];
  const int32_t count = mfsdp_plan_param_count(entry->plan);
  int32_t i;
  for (i = 0; i < count; ++i)
    mfsdp__ck_put_param(writer, ck, entry->param_first + i);
}

#endif /* MFSDP_CHECKPOINT_RECORDS_H */
