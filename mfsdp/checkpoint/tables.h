/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/tables.h - which tensors a checkpoint has, in which files, and what of them is this
 * rank's. Private to checkpoint.h.
 *
 * Everything here but the runs is the same on every rank and for every world: it comes from the
 * parameters and the optimizer's groups alone, without communication.
 *
 * Sets: "model" (every parameter in its compute dtype), "optimizer.master" (fp32, of parameters
 * with another compute dtype), and one for each kind of state, as "optimizer.exp_avg". A set is cut
 * into files in the order of the format.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_TABLES_H
#define MFSDP_CHECKPOINT_TABLES_H

#include "desc.h"

#define MFSDP__CK_MAX_SETS 12
#define MFSDP__CK_PATH_NBYTES 1024
#define MFSDP__CK_FILE_NBYTES 112 /* of a file name of ours */
enum { MFSDP__CK_MODEL = 0, MFSDP__CK_MASTER = 1, MFSDP__CK_FIRST_STATE = 2 };

typedef struct mfsdp__ck_set {
  const char *state; /* "exp_avg"; of MODEL and MASTER their own names */
  int32_t tensor_first, tensor_count, file_first, file_count;
  int64_t data_nbytes;
} mfsdp__ck_set;

typedef struct mfsdp__ck_file {
  int32_t set, tensor_first, tensor_count;
  mfsdp_safetensors_layout layout;
} mfsdp__ck_file;

/* A stretch of a tensor that this rank owns. */
typedef struct mfsdp__ck_run {
  int32_t tensor, piece; /* piece: of the plan */
  int64_t first, count;  /* elements of the tensor */
  void *data;            /* where they are */
  mfsdp_space space;
} mfsdp__ck_run;

struct mfsdp_checkpoint {
  mfsdp_runtime *rt;
  mfsdp_context *context;
  const mfsdp_plan *plan;
  const mfsdp_control *control;
  mfsdp_io io;
  char *folder; /* copied */
  size_t folder_nbytes, stage_nbytes;
  int64_t max_file_nbytes, timeout_us;
  int32_t keep_last, rank, world;

  mfsdp__ck_set sets[MFSDP__CK_MAX_SETS];
  int32_t set_count, tensor_count, file_count, run_count, param_count;
  mfsdp_safetensors_tensor *tensors; /* set after set, in the order of their files */
  int32_t *tensor_params, *tensor_files;
  int64_t *shapes;        /* two for each tensor: of states with another shape than the parameter */
  int32_t *param_tensors; /* set_count x param_count: index of the tensor, or -1 */
  char *names;
  size_t name_nbytes;
  mfsdp__ck_file *files;
  mfsdp__ck_run *runs; /* by tensor, then first */
  uint64_t hash;       /* of everything but the runs */
  void *messages;      /* world of mfsdp__ck_message */

  mfsdp_buffer stage;  /* PINNED */
  mfsdp_buffer values; /* PINNED: converted */
  mfsdp_buffer device; /* DEVICE: fp32 values on the way to compute copies; empty without any */
};

/* ---- sets and names ---- */

MFSDP_API int32_t mfsdp__ck_state_set(mfsdp_checkpoint *ck, const char *state) {
  int32_t s;
  for (s = MFSDP__CK_FIRST_STATE; s < ck->set_count; ++s)
    if (strcmp(ck->sets[s].state, state) == 0) return s;
  return -1;
}

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

MFSDP_API int mfsdp__ck_has_state(const mfsdp_checkpoint *ck, int32_t param) {
  return mfsdp_plan_param_owner(ck->plan, param) == param && /* tied: saved by its owner */
         mfsdp_plan_param(ck->plan, param)->role != MFSDP_ROLE_FROZEN;
}

MFSDP_API const mfsdp_piece *mfsdp__ck_first_piece(const mfsdp_checkpoint *ck, int32_t param) {
  int32_t count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_param_pieces(ck->plan, param, &count);
  return count > 0 ? pieces : NULL;
}

/* Kinds of state in the order of the parameters. */
MFSDP_API mfsdp_status mfsdp__ck_make_sets(mfsdp_checkpoint *ck) {
  mfsdp__state_shape shape;
  int32_t i, k;
  ck->sets[MFSDP__CK_MODEL].state = "model";
  ck->sets[MFSDP__CK_MASTER].state = "master";
  ck->set_count = MFSDP__CK_FIRST_STATE;
  for (i = 0; i < ck->param_count; ++i) {
    const mfsdp_param *p = mfsdp_plan_param(ck->plan, i);
    if (!mfsdp__ck_has_state(ck, i)) continue;
    for (k = 0; mfsdp__ck_state_shape(ck, p, mfsdp__ck_first_piece(ck, i), k, &shape); ++k) {
      if (mfsdp__ck_state_set(ck, shape.name) >= 0) continue;
      if (ck->set_count == MFSDP__CK_MAX_SETS)
        return MFSDP_FAIL(ck->context, MFSDP_E_UNSUPPORTED,
                          "checkpoint: more than %d kinds of optimizer state",
                          MFSDP__CK_MAX_SETS - MFSDP__CK_FIRST_STATE);
      ck->sets[ck->set_count++].state = shape.name;
    }
  }
  return MFSDP_OK;
}

/* 1 if a parameter has a tensor in a set. */
MFSDP_API int mfsdp__ck_in_set(const mfsdp_checkpoint *ck, int32_t param, int32_t set) {
  const mfsdp_param *p = mfsdp_plan_param(ck->plan, param);
  mfsdp__state_shape shape;
  if (set == MFSDP__CK_MODEL) return mfsdp_plan_param_owner(ck->plan, param) == param;
  if (!mfsdp__ck_has_state(ck, param)) return 0;
  if (set == MFSDP__CK_MASTER) return p->compute != MFSDP_F32;
  return mfsdp__ck_state_named(ck, p, mfsdp__ck_first_piece(ck, param), ck->sets[set].state,
                               &shape);
}

/* Elements of a parameter's state in the pieces before `last` (of the plan; -1: in all). What
 * belongs to a matrix stands in the order of matrices, what belongs to elements in theirs. */
MFSDP_API int64_t mfsdp__ck_state_count(const mfsdp_checkpoint *ck, int32_t param, int32_t set,
                                        const mfsdp_piece *last) {
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_param_pieces(ck->plan, param, &count);
  mfsdp__state_shape shape;
  int64_t sum = 0;
  for (i = 0; i < count && (last == NULL || pieces[i].first < last->first); ++i)
    if (mfsdp__ck_state_named(ck, mfsdp_plan_param(ck->plan, param), &pieces[i],
                              ck->sets[set].state, &shape))
      sum += shape.rows * shape.cols; /* fits: it is in memory somewhere */
  return sum;
}

/* The whole state of a parameter: as the parameter, where it has as many elements; one matrix's as it
 * is; several matrices' one behind the other. */
MFSDP_API void mfsdp__ck_state_tensor(const mfsdp_checkpoint *ck, int32_t param, int32_t set,
                                      int64_t *own_shape, mfsdp_safetensors_tensor *t) {
  const mfsdp_param *p = mfsdp_plan_param(ck->plan, param);
  const int64_t numel = mfsdp_plan_param_numel(ck->plan, param);
  const int64_t count = mfsdp__ck_state_count(ck, param, set, NULL);
  mfsdp__state_shape shape;
  t->ndim = p->ndim;
  t->shape = p->shape;
  if (count == numel || numel == 0) return;
  t->ndim = 1;
  t->shape = own_shape;
  own_shape[0] = count;
  if (mfsdp__ck_state_named(ck, p, mfsdp__ck_first_piece(ck, param), ck->sets[set].state, &shape) &&
      shape.rows * shape.cols == count) {
    t->ndim = 2;
    own_shape[0] = shape.rows;
    own_shape[1] = shape.cols;
  }
}

/* Fills the table's next tensor; its name is written to `name`. */
MFSDP_API void mfsdp__ck_fill_tensor(mfsdp_checkpoint *ck, int32_t param, int32_t set, char *name,
                                     size_t nbytes) {
  const mfsdp_param *p = mfsdp_plan_param(ck->plan, param);
  mfsdp_safetensors_tensor *t = &ck->tensors[ck->tensor_count];
  const int is_model = set == MFSDP__CK_MODEL;
  (void)snprintf(name, nbytes, "%s%s%s", p->name, is_model ? "" : ".",
                 is_model ? "" : ck->sets[set].state);
  t->name = name;
  t->dtype = is_model ? mfsdp_safetensors_dtype_of(p->compute) : MFSDP_SAFETENSORS_F32;
  t->ndim = p->ndim;
  t->shape = p->shape;
  if (set >= MFSDP__CK_FIRST_STATE)
    mfsdp__ck_state_tensor(ck, param, set, ck->shapes + 2 * ck->tensor_count, t);
  ck->tensor_params[ck->tensor_count] = param;
}

/* Counts tensors and the bytes of their names, where ck->tensors is NULL; else fills them. */
MFSDP_API void mfsdp__ck_list_tensors(mfsdp_checkpoint *ck) {
  int32_t set, param;
  size_t at = 0;
  ck->tensor_count = 0;
  for (set = 0; set < ck->set_count; ++set) {
    const size_t extra = set == MFSDP__CK_MODEL ? 1 : strlen(ck->sets[set].state) + 2;
    ck->sets[set].tensor_first = ck->tensor_count;
    for (param = 0; param < ck->param_count; ++param) {
      const size_t nbytes = strlen(mfsdp_plan_param(ck->plan, param)->name) + extra;
      if (!mfsdp__ck_in_set(ck, param, set)) continue;
      if (ck->tensors != NULL) mfsdp__ck_fill_tensor(ck, param, set, ck->names + at, nbytes);
      at += nbytes;
      ++ck->tensor_count;
    }
    ck->sets[set].tensor_count = ck->tensor_count - ck->sets[set].tensor_first;
  }
  ck->name_nbytes = at;
}

/* ---- files ---- */

/* Puts the tensors of a set in the order of a file. */
MFSDP_API mfsdp_status mfsdp__ck_sort_set(mfsdp_checkpoint *ck, const mfsdp__ck_set *set) {
  const size_t count = (size_t)set->tensor_count;
  mfsdp_safetensors_tensor *tensors = ck->tensors + set->tensor_first, *sorted;
  int32_t *params = ck->tensor_params + set->tensor_first, *sorted_params;
  uint32_t *order;
  void *memory;
  size_t i, nbytes = sizeof(*sorted) + 3 * sizeof(uint32_t);
  MFSDP_TRY(mfsdp_table_alloc(ck->context, count, nbytes, "order of tensors", &memory));
  if (count == 0) return MFSDP_OK;
  sorted = (mfsdp_safetensors_tensor *)memory;
  order = (uint32_t *)(void *)(sorted + count);
  sorted_params = (int32_t *)(order + 2 * count);
  mfsdp__st_sort(order, order + count, count, mfsdp__st_less_in_file, tensors);
  for (i = 0; i < count; ++i) {
    sorted[i] = tensors[order[i]];
    sorted_params[i] = params[order[i]];
  }
  memcpy(tensors, sorted, count * sizeof(*sorted));
  memcpy(params, sorted_params, count * sizeof(*params));
  mfsdp_table_free(ck->context, memory, count, nbytes);
  return MFSDP_OK;
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
    run->tensor = ck->param_tensors[set * ck->param_count + owned->param];
    run->piece = owned->piece;
    run->first = owned->first;
    run->count = owned->count;
    run->data = data;
    run->space = space;
  }
  ++ck->run_count;
}

MFSDP_API void mfsdp__ck_add_state(mfsdp_checkpoint *ck, const mfsdp_owned *owned,
                                   const mfsdp_piece *piece, const mfsdp_optimizer_state *state) {
  const int32_t set = mfsdp__ck_state_set(ck, state->name);
  mfsdp__ck_add_run(ck, set, owned, state->data, state->space);
  if (ck->runs == NULL) return;
  ck->runs[ck->run_count - 1].first = mfsdp__ck_state_count(ck, owned->param, set, piece);
  ck->runs[ck->run_count - 1].count = state->count;
}

/* What this rank owns of a parameter: its copy, its master, its states. */
MFSDP_API void mfsdp__ck_add_owned(mfsdp_checkpoint *ck, const mfsdp_owned *owned) {
  int32_t piece_count = 0, state_count = 0, s;
  const mfsdp_piece *piece = mfsdp_plan_pieces(ck->plan, -1, &piece_count) + owned->piece;
  const mfsdp_optimizer_state *states =
      mfsdp_optimizer_states(mfsdp_runtime_optimizer(ck->rt), &state_count);
  void *copy = mfsdp__piece_copy(ck->rt, piece);
  float *master = mfsdp__piece_master(ck->rt, piece);
  if (copy != NULL)
    mfsdp__ck_add_run(ck, MFSDP__CK_MODEL, owned, copy, MFSDP_SPACE_DEVICE);
  else
    mfsdp__ck_add_run(ck, MFSDP__CK_MODEL, owned, master, owned->space);
  if (owned->tensor < 0) return;
  if (ck->param_tensors[MFSDP__CK_MASTER * ck->param_count + owned->param] >= 0)
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

MFSDP_API int mfsdp__ck_run_less(const void *table, uint32_t a, uint32_t b) {
  const mfsdp__ck_run *runs = (const mfsdp__ck_run *)table;
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
  for (i = 0; i < count; ++i)
    sorted[i] = ck->runs[order[i]];
  memcpy(ck->runs, sorted, count * sizeof(*sorted));
  mfsdp_table_free(ck->context, memory, count, nbytes);
  return MFSDP_OK;
}

MFSDP_API size_t mfsdp__ck_element_nbytes(const mfsdp_checkpoint *ck, int32_t tensor) {
  return (size_t)mfsdp_safetensors_dtype_bits(ck->tensors[tensor].dtype) / 8;
}

#endif /* MFSDP_CHECKPOINT_TABLES_H */
