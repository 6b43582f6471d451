/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/tables.h - which tensors a checkpoint has, in which files, and what of them is this
 * rank's. Private to checkpoint.h.
 *
 * Everything here but the runs is the same on every rank and for every world: it comes from the
 * records (records.h), which name the tensors of all groups.
 *
 * Sets: "model" (every parameter in its compute dtype), "optimizer.master" (fp32, of parameters
 * with another compute dtype), and one for each kind of state, as "optimizer.exp_avg". A set is cut
 * into files in the order of the format.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_TABLES_H
#define MFSDP_CHECKPOINT_TABLES_H

#include "records.h"

/* ---- sets and names ---- */

MFSDP_API int32_t mfsdp__ck_state_set(const mfsdp_checkpoint *ck, const char *kind) {
  int32_t s;
  for (s = 0; s < ck->set_count; ++s)
    if (strcmp(ck->sets[s].state, kind) == 0) return s;
  return -1;
}

/* Steps through the records; start from NULL. NULL past the last one. */
MFSDP_API const mfsdp__ck_record *mfsdp__ck_record_next(const mfsdp_checkpoint *ck,
                                                        const mfsdp__ck_record *record) {
  const unsigned char *at = ck->records, *end;
  if (at == NULL) return NULL;
  end = at + ck->records_nbytes;
  if (record != NULL) at = (const unsigned char *)record + record->nbytes;
  return at < end ? (const mfsdp__ck_record *)(const void *)at : NULL;
}

/* Kinds of state by name, whatever the order of the parameters; counts the tensors. */
MFSDP_API mfsdp_status mfsdp__ck_make_sets(mfsdp_checkpoint *ck) {
  const mfsdp__ck_record *record = NULL;
  int32_t s;
  ck->sets[MFSDP__CK_MODEL].state = "model";
  ck->sets[MFSDP__CK_MASTER].state = "master";
  ck->set_count = MFSDP__CK_FIRST_STATE;
  ck->tensor_count = 0;
  while ((record = mfsdp__ck_record_next(ck, record)) != NULL) {
    ++ck->tensor_count;
    if (mfsdp__ck_state_set(ck, record->kind) >= 0) continue;
    if (ck->set_count == MFSDP__CK_MAX_SETS)
      return MFSDP_FAIL(ck->context, MFSDP_E_UNSUPPORTED,
                        "checkpoint: more than %d kinds of optimizer state",
                        MFSDP__CK_MAX_SETS - MFSDP__CK_FIRST_STATE);
    for (s = ck->set_count++; s > MFSDP__CK_FIRST_STATE; --s) {
      if (strcmp(ck->sets[s - 1].state, record->kind) < 0) break;
      ck->sets[s].state = ck->sets[s - 1].state;
    }
    ck->sets[s].state = record->kind;
  }
  return MFSDP_OK;
}

/* Fills the tables of tensors, set after set. */
MFSDP_API void mfsdp__ck_fill_tensors(mfsdp_checkpoint *ck) {
  int32_t set, count = 0;
  for (set = 0; set < ck->set_count; ++set) {
    const mfsdp__ck_record *record = NULL;
    ck->sets[set].tensor_first = count;
    while ((record = mfsdp__ck_record_next(ck, record)) != NULL) {
      mfsdp_safetensors_tensor *t = &ck->tensors[count];
      if (strcmp(record->kind, ck->sets[set].state) != 0) continue;
      t->name = (const char *)(record + 1);
      t->dtype = (mfsdp_safetensors_dtype)record->dtype;
      t->ndim = record->ndim;
      t->shape = record->shape;
      ++count;
    }
    ck->sets[set].tensor_count = count - ck->sets[set].tensor_first;
  }
}

/* ---- files ---- */

/* Puts the tensors of a set in the order of a file. */
MFSDP_API mfsdp_status mfsdp__ck_sort_set(mfsdp_checkpoint *ck, const mfsdp__ck_set *set) {
  const size_t count = (size_t)set->tensor_count;
  mfsdp_safetensors_tensor *tensors = ck->tensors + set->tensor_first, *sorted;
  uint32_t *order;
  void *memory;
  size_t i, nbytes = sizeof(*sorted) + 2 * sizeof(uint32_t);
  MFSDP_TRY(mfsdp_table_alloc(ck->context, count, nbytes, "order of tensors", &memory));
  if (count == 0) return MFSDP_OK;
  sorted = (mfsdp_safetensors_tensor *)memory;
  order = (uint32_t *)(void *)(sorted + count);
  mfsdp__st_sort(order, order + count, count, mfsdp__st_less_in_file, tensors);
  for (i = 0; i < count; ++i)
    sorted[i] = tensors[order[i]];
  memcpy(tensors, sorted, count * sizeof(*sorted));
  mfsdp_table_free(ck->context, memory, count, nbytes);
  return MFSDP_OK;
}

/* Names are unique over all groups, also those that no rank has together. */
MFSDP_API mfsdp_status mfsdp__ck_check_names(mfsdp_checkpoint *ck) {
  const mfsdp_safetensors_tensor *tensors = ck->tensors; /* of the first set: the model */
  const size_t count = (size_t)ck->sets[MFSDP__CK_MODEL].tensor_count;
  mfsdp_status status = MFSDP_OK;
  uint32_t *order;
  void *memory;
  size_t i;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, count, 2 * sizeof(*order), "order of names", &memory));
  if (count == 0) return MFSDP_OK;
  order = (uint32_t *)memory;
  mfsdp__st_sort(order, order + count, count, mfsdp__st_less_by_name, tensors);
  for (i = 1; i < count && status == MFSDP_OK; ++i)
    if (strcmp(tensors[order[i - 1]].name, tensors[order[i]].name) == 0)
      status = MFSDP_FAIL(ck->context, MFSDP_E_ARGUMENT,
                          "checkpoint: two groups have a parameter '%.200s'; names are unique",
                          tensors[order[i]].name);
  mfsdp_table_free(ck->context, memory, count, 2 * sizeof(*order));
  return status;
}

/* A tensor of a set by dtype and name, or -1. */
MFSDP_API int32_t mfsdp__ck_find_tensor(const mfsdp_checkpoint *ck, int32_t set,
                                        mfsdp_safetensors_dtype dtype, const char *name) {
  int32_t first = ck->sets[set].tensor_first, last = first + ck->sets[set].tensor_count;
  while (first < last) {
    const int32_t middle = first + (last - first) / 2;
    const mfsdp_safetensors_tensor *t = &ck->tensors[middle];
    const int order = t->dtype != dtype ? (t->dtype < dtype ? -1 : 1) : strcmp(name, t->name);
    if (order == 0) return middle;
    if (order < 0)
      last = middle;
    else
      first = middle + 1;
  }
  return -1;
}

/* Fills param_tensors; `name` has room for the longest one. */
MFSDP_API void mfsdp__ck_map_params(mfsdp_checkpoint *ck, char *name, size_t nbytes) {
  const int32_t param_count = ck->rt->param_count;
  int32_t set, param;
  for (set = 0; set < ck->set_count; ++set)
    for (param = 0; param < param_count; ++param) {
      const mfsdp_param *p = mfsdp__ck_param(ck, param);
      const int model = set == MFSDP__CK_MODEL;
      const mfsdp_safetensors_dtype dtype =
          model ? mfsdp_safetensors_dtype_of(p->compute) : MFSDP_SAFETENSORS_F32;
      int32_t *tensor = &ck->param_tensors[set * param_count + param];
      *tensor = -1;
      if (ck->rt->params[param].owner != param) continue;
      (void)snprintf(name, nbytes, "%s%s%s", p->name, model ? "" : ".",
                     model ? "" : ck->sets[set].state);
      *tensor = mfsdp__ck_find_tensor(ck, set, dtype, name);
    }
}

/* Cuts a set into files, greedily; counts them, and fills ck->files where it is not NULL. */
MFSDP_API mfsdp_status mfsdp__ck_cut_set(mfsdp_checkpoint *ck, int32_t index) {
  mfsdp__ck_set *set = &ck->sets[index];
  int64_t in_file = 0;
  int32_t i;
  set->file_first = ck->file_count;
  set->data_nbytes = 0;
  for (i = set->tensor_first; i < set->tensor_first + set->tensor_count; ++i) {
    mfsdp_safetensors_tensor *t = &ck->tensors[i];
    int64_t nbytes = 0;
    if (mfsdp_safetensors_nbytes(t->dtype, t->ndim, t->shape, &nbytes) !=
            MFSDP_SAFETENSORS_FAULT_NONE ||
        !mfsdp_i64_add(set->data_nbytes, nbytes, &set->data_nbytes))
      return MFSDP_FAIL(ck->context, MFSDP_E_OVERFLOW, "checkpoint: '%.100s' is too large",
                        t->name);
    if (ck->file_count == set->file_first ||
        (in_file > 0 && nbytes > ck->max_file_nbytes - in_file)) {
      if (ck->files != NULL) {
        ck->files[ck->file_count].set = index;
        ck->files[ck->file_count].tensor_first = i;
      }
      ++ck->file_count;
      in_file = 0;
    }
    if (ck->files != NULL) {
      ++ck->files[ck->file_count - 1].tensor_count;
      ck->tensor_files[i] = ck->file_count - 1;
    }
    /* What is above the limit alone fills its file. */
    in_file = nbytes > ck->max_file_nbytes - in_file ? ck->max_file_nbytes : in_file + nbytes;
  }
  set->file_count = ck->file_count - set->file_first;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_cut(mfsdp_checkpoint *ck) {
  int32_t set;
  ck->file_count = 0;
  for (set = 0; set < ck->set_count; ++set)
    MFSDP_TRY(mfsdp__ck_cut_set(ck, set));
  return MFSDP_OK;
}

/* Every tensor's place in its file. */
MFSDP_API mfsdp_status mfsdp__ck_lay_out(mfsdp_checkpoint *ck) {
  int32_t f, i;
  ck->hash = MFSDP_HASH_SEED;
  for (f = 0; f < ck->file_count; ++f) {
    mfsdp__ck_file *file = &ck->files[f];
    file->layout.tensors = ck->tensors + file->tensor_first;
    file->layout.tensor_count = file->tensor_count;
    MFSDP_TRY(mfsdp_safetensors_layout_make(ck->context, &file->layout));
    for (i = file->tensor_first; i < file->tensor_first + file->tensor_count; ++i) {
      const mfsdp_safetensors_tensor *t = &ck->tensors[i];
      ck->hash = mfsdp_hash_bytes(ck->hash, t->name, strlen(t->name) + 1);
      ck->hash = mfsdp_hash_u64(ck->hash, (uint64_t)f << 8 | (uint64_t)t->dtype);
      ck->hash = mfsdp_hash_u64(ck->hash, (uint64_t)t->file_offset);
      ck->hash = mfsdp_hash_u64(ck->hash, (uint64_t)t->nbytes);
    }
  }
  return MFSDP_OK;
}

/* "model.safetensors", or "model-00002-of-00003.safetensors" of several; `set` as "model" or
 * "optimizer.exp_avg". */
MFSDP_API void mfsdp__ck_set_name(const mfsdp_checkpoint *ck, int32_t set, char *name) {
  (void)snprintf(name, MFSDP__CK_FILE_NBYTES, "%s%.40s", set == MFSDP__CK_MODEL ? "" : "optimizer.",
                 ck->sets[set].state);
}

MFSDP_API void mfsdp__ck_file_name(const mfsdp_checkpoint *ck, int32_t file, char *name) {
  const mfsdp__ck_set *set = &ck->sets[ck->files[file].set];
  char stem[MFSDP__CK_FILE_NBYTES];
  mfsdp__ck_set_name(ck, ck->files[file].set, stem);
  if (set->file_count == 1)
    (void)snprintf(name, MFSDP__CK_FILE_NBYTES, "%.60s.safetensors", stem);
  else
    (void)snprintf(name, MFSDP__CK_FILE_NBYTES, "%.60s-%05d-of-%05d.safetensors", stem,
                   (int)(file - set->file_first) + 1, (int)set->file_count);
}

/* ---- runs ---- */

MFSDP_API void mfsdp__ck_add_run(mfsdp_checkpoint *ck, int32_t set, const mfsdp_owned *owned,
                                 void *data, mfsdp_space space) {
  if (ck->runs != NULL) {
    mfsdp__ck_run *run = &ck->runs[ck->run_count];
    run->tensor = mfsdp__ck_tensor_of(ck, set, owned->param);
    run->param = owned->param;
    run->piece = owned->piece;
    run->writes = owned->saves;
    run->first = owned->first;
    run->count = owned->count;
    run->data = data;
    run->space = space;
  }
  ++ck->run_count;
}

MFSDP_API void mfsdp__ck_add_state(mfsdp_checkpoint *ck, const mfsdp_owned *owned,
                                   const mfsdp_piece *piece, const mfsdp_optimizer_state *state) {
  mfsdp__ck_add_run(ck, mfsdp__ck_state_set(ck, state->name), owned, state->data, state->space);
  if (ck->runs == NULL) return;
  ck->runs[ck->run_count - 1].first = mfsdp__ck_state_count(ck, owned->param, state->name, piece);
  ck->runs[ck->run_count - 1].count = state->count;
}

/* What this rank owns of a parameter: its copy, its master, its states. */
MFSDP_API void mfsdp__ck_add_owned(mfsdp_checkpoint *ck, const mfsdp_owned *owned) {
  int32_t piece_count = 0, state_count = 0, s;
  const mfsdp_plan *plan = ck->rt->groups[owned->group].plan;
  const mfsdp_piece *piece = mfsdp_plan_pieces(plan, -1, &piece_count) + owned->piece;
  const mfsdp_optimizer_state *states =
      mfsdp_optimizer_states(mfsdp_runtime_optimizer(ck->rt), &state_count);
  void *copy = mfsdp__piece_copy(ck->rt, piece);
  float *master = mfsdp__piece_master(ck->rt, piece);
  if (copy != NULL)
    mfsdp__ck_add_run(ck, MFSDP__CK_MODEL, owned, copy, MFSDP_SPACE_DEVICE);
  else
    mfsdp__ck_add_run(ck, MFSDP__CK_MODEL, owned, master, owned->space);
  if (owned->tensor < 0) return;
  if (mfsdp__ck_tensor_of(ck, MFSDP__CK_MASTER, owned->param) >= 0)
    mfsdp__ck_add_run(ck, MFSDP__CK_MASTER, owned, master, owned->space);
  for (s = 0; s < state_count; ++s)
    if (states[s].tensor == owned->tensor) mfsdp__ck_add_state(ck, owned, piece, &states[s]);
}

MFSDP_API void mfsdp__ck_list_runs(mfsdp_checkpoint *ck) {
  mfsdp_owned owned = mfsdp_owned_default();
  ck->run_count = 0;
  while (mfsdp_owned_next(ck->rt, &owned))
    mfsdp__ck_add_owned(ck, &owned);
}

/* What this rank writes comes first. */
MFSDP_API int mfsdp__ck_run_less(const void *table, uint32_t a, uint32_t b) {
  const mfsdp__ck_run *runs = (const mfsdp__ck_run *)table;
  if (runs[a].writes != runs[b].writes) return runs[a].writes > runs[b].writes;
  if (runs[a].tensor != runs[b].tensor) return runs[a].tensor < runs[b].tensor;
  return runs[a].first < runs[b].first;
}

MFSDP_API mfsdp_status mfsdp__ck_sort_runs(mfsdp_checkpoint *ck) {
  const size_t count = (size_t)ck->run_count, nbytes = sizeof(*ck->runs) + 2 * sizeof(uint32_t);
  mfsdp__ck_run *sorted;
  uint32_t *order;
  void *memory;
  size_t i;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, count, nbytes, "order of runs", &memory));
  if (count == 0) return MFSDP_OK;
  sorted = (mfsdp__ck_run *)memory;
  order = (uint32_t *)(void *)(sorted + count);
  mfsdp__st_sort(order, order + count, count, mfsdp__ck_run_less, ck->runs);
  for (i = 0; i < count; ++i) {
    sorted[i] = ck->runs[order[i]];
    ck->write_count += sorted[i].writes;
  }
  memcpy(ck->runs, sorted, count * sizeof(*sorted));
  mfsdp_table_free(ck->context, memory, count, nbytes);
  return MFSDP_OK;
}

MFSDP_API size_t mfsdp__ck_element_nbytes(const mfsdp_checkpoint *ck, int32_t tensor) {
  return (size_t)mfsdp_safetensors_dtype_bits(ck->tensors[tensor].dtype) / 8;
}

#endif /* MFSDP_CHECKPOINT_TABLES_H */
