/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/load.h - reads a checkpoint, each rank what it owns. Part of checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_LOAD_H
#define MFSDP_CHECKPOINT_LOAD_H

#include "open.h"

/* ---- values ---- */

/* Elements first .. first + count - 1 of a tensor in fp32: at `direct`, unless that is NULL, if the file
 * holds fp32, else in ck->stage or ck->values. count * 4 and count times the file's element fit the
 * buffers. */
MFSDP_API mfsdp_status mfsdp__ck_read_values(mfsdp__ck_load *load, const mfsdp__ck_place *place,
                                             int64_t first, int64_t count, float *direct,
                                             const float **out) {
  mfsdp_checkpoint *ck = load->ck;
  const mfsdp__ck_open_file *file = &load->files[place->file];
  const int64_t element = mfsdp_safetensors_dtype_bits(place->tensor->dtype) / 8;
  float *values = (float *)ck->values.data;
  mfsdp_dtype dtype = MFSDP_F32;
  void *dst = ck->stage.data;
  int64_t i;
  (void)mfsdp_safetensors_dtype_to(place->tensor->dtype, &dtype);
  if (dtype == MFSDP_F32 && direct != NULL) dst = direct;
  load->unread = 1;
  MFSDP_TRY(mfsdp_io_read(ck->context, &ck->io, file->file, file->name,
                          place->tensor->file_offset + first * element, (size_t)(count * element),
                          dst));
  load->unread = 0;
  load->loaded.data_nbytes += count * element;
  *out = (const float *)dst;
  if (dtype == MFSDP_F32) return MFSDP_OK;
  for (i = 0; i < count; ++i)
    values[i] = (float)mfsdp_element_get(ck->stage.data, dtype, i);
  *out = values;
  return MFSDP_OK;
}

/* The master of a parameter that needs none here, but had one where it was saved. */
MFSDP_API mfsdp__ck_place mfsdp__ck_find_master(const mfsdp__ck_load *load, int32_t param) {
  const mfsdp_checkpoint *ck = load->ck;
  const char *name = mfsdp__ck_param(ck, param)->name;
  const int64_t numel =
      mfsdp_plan_param_numel(mfsdp__ck_plan(ck, param), ck->rt->params[param].index);
  mfsdp__ck_place place;
  char key[512];
  int32_t f;
  memset(&place, 0, sizeof(place));
  if ((size_t)snprintf(key, sizeof(key), "%s.master", name) >= sizeof(key)) return place;
  for (f = 0; f < load->file_count; ++f) {
    const mfsdp_safetensors_tensor *t;
    if (load->files[f].set != MFSDP__CK_MASTER) continue;
    t = mfsdp_safetensors_find(load->files[f].header, key);
    if (t == NULL || t->dtype != MFSDP_SAFETENSORS_F32 || t->nbytes / 4 != numel) continue;
    place.tensor = t;
    place.file = f;
  }
  return place;
}

/* Where a parameter's values come from: its master, if there is one in the files. */
MFSDP_API mfsdp__ck_place mfsdp__ck_value_place(const mfsdp__ck_load *load, int32_t param) {
  const mfsdp_checkpoint *ck = load->ck;
  const int32_t master = mfsdp__ck_tensor_of(ck, MFSDP__CK_MASTER, param);
  mfsdp__ck_place place;
  memset(&place, 0, sizeof(place));
  if (!load->weights_only && master >= 0)
    place = load->places[master];
  else if (!load->weights_only && load->convert)
    place = mfsdp__ck_find_master(load, param);
  return place.tensor != NULL ? place
                              : load->places[mfsdp__ck_tensor_of(ck, MFSDP__CK_MODEL, param)];
}

/* A run of the model: the master and the compute copy from one reading. */
MFSDP_API mfsdp_status mfsdp__ck_load_param(mfsdp__ck_load *load, const mfsdp__ck_run *run) {
  mfsdp_checkpoint *ck = load->ck;
  const mfsdp_piece *piece = mfsdp__ck_piece(ck, run);
  const mfsdp__ck_place place = mfsdp__ck_value_place(load, run->param);
  const int64_t most = (int64_t)(ck->stage_nbytes / sizeof(double));
  const int whole = mfsdp__piece_copy(ck->rt, piece) == NULL; /* the master is all there is */
  float *master = whole && mfsdp__ck_reaches(ck, ck->rt->state_space)
                      ? mfsdp__piece_master(ck->rt, piece)
                      : NULL;
  int64_t done, count;
  if (place.tensor == NULL) return MFSDP_OK; /* allowed: it keeps its value */
  for (done = 0; done < run->count; done += count) {
    float *direct = master != NULL ? master + done : NULL;
    const float *values = NULL;
    count = run->count - done < most ? run->count - done : most;
    MFSDP_TRY(mfsdp__ck_read_values(load, &place, run->first + done, count, direct, &values));
    if (values != direct)
      MFSDP_TRY(mfsdp__init_store(ck->rt, piece, done, count, values, (float *)ck->device.data));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_load_state(mfsdp__ck_load *load, const mfsdp__ck_run *run) {
  mfsdp_checkpoint *ck = load->ck;
  mfsdp_runtime *rt = ck->rt;
  const int64_t most = (int64_t)(ck->stage_nbytes / sizeof(double));
  const int reached = mfsdp__ck_reaches(ck, run->space);
  int64_t done, count;
  if (load->places[run->tensor].tensor == NULL) return MFSDP_OK;
  for (done = 0; done < run->count; done += count) {
    float *to = (float *)run->data + done;
    const float *values = NULL;
    count = run->count - done < most ? run->count - done : most;
    MFSDP_TRY(mfsdp__ck_read_values(load, &load->places[run->tensor], run->first + done, count,
                                    reached ? to : NULL, &values));
    if (values == to) continue;
    MFSDP_TRY(rt->backend->ops->copy(rt->backend->self, rt->compute, to, run->space, values,
                                     MFSDP_SPACE_PINNED, (size_t)count * sizeof(float)));
    MFSDP_TRY(mfsdp__ck_settle(ck));
  }
  return MFSDP_OK;
}

/* Everything this rank owns, in the order of the files it was saved in. */
MFSDP_API mfsdp_status mfsdp__ck_load_runs(mfsdp__ck_load *load) {
  mfsdp_checkpoint *ck = load->ck;
  const mfsdp__ck_set *model = &ck->sets[MFSDP__CK_MODEL], *master = &ck->sets[MFSDP__CK_MASTER];
  const mfsdp_backend_ops *ops = ck->rt->backend->ops;
  int32_t i;
  mfsdp__unit_drop_unacquired(ck->rt);
  /* What was gathered ahead and is now dropped may still be on its way out of the masters. */
  MFSDP_TRY(mfsdp__runtime_order(ck->rt, ck->rt->communication, ck->rt->reduced, ck->rt->compute));
  MFSDP_TRY(mfsdp__ck_settle(ck));
  for (i = 0; i < ck->run_count; ++i) {
    const int32_t tensor = ck->runs[i].tensor;
    if (tensor < model->tensor_first + model->tensor_count)
      MFSDP_TRY(mfsdp__ck_load_param(load, &ck->runs[i]));
    else if (!load->weights_only && tensor >= master->tensor_first + master->tensor_count)
      MFSDP_TRY(mfsdp__ck_load_state(load, &ck->runs[i]));
  }
  return ops->event_record(ck->rt->backend->self, ck->rt->compute, ck->rt->step_done);
}

/* ---- counts and strings ---- */

/* Opens the file of the counts; the caller destroys *out. */
MFSDP_API mfsdp_status mfsdp__ck_read_state(mfsdp_checkpoint *ck, const char *name,
                                            mfsdp_safetensors **out) {
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, name, MFSDP__CK_STATE_FILE);
  mfsdp_safetensors_source source;
  mfsdp__ck_source from;
  mfsdp_status status;
  *out = NULL;
  from.ck = ck;
  from.path = path.text;
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_READ, &from.file));
  status = mfsdp__ck_source_of(&from, &source);
  if (status == MFSDP_OK) status = mfsdp_safetensors_create(ck->context, &source, out, NULL);
  return mfsdp_io_close(ck->context, &ck->io, from.file, path.text, status);
}

MFSDP_API mfsdp_status mfsdp__ck_load_progress(mfsdp__ck_load *load) {
  mfsdp_safetensors *state = NULL;
  mfsdp_status status;
  if (load->weights_only) return MFSDP_OK;
  status = mfsdp__ck_read_state(load->ck, load->name, &state);
  if (status == MFSDP_OK) status = mfsdp__ck_get_progress(load->ck, state, &load->loaded.progress);
  mfsdp_safetensors_destroy(load->ck->context, state);
  return status;
}

/* ---- api ---- */

/* What to load: rank 0 looks, all take its word. */
MFSDP_API mfsdp_status mfsdp__ck_choose(mfsdp__ck_load *load, const char *name) {
  mfsdp_checkpoint *ck = load->ck;
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status = MFSDP_OK;
  own.hash = ck->hash;
  if (ck->rank == 0 && name == NULL)
    status = mfsdp__ck_find_latest(ck, own.name);
  else if (name != NULL)
    (void)snprintf(own.name, sizeof(own.name), "%.39s", name);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  memcpy(load->name, ck->told.name, sizeof(load->name));
  return MFSDP_OK;
}

/* All values, then the counts that belong to them. */
MFSDP_API mfsdp_status mfsdp__ck_load_own(mfsdp__ck_load *load) {
  const mfsdp_status status = mfsdp__ck_load_runs(load);
  if (status != MFSDP_OK) {
    load->broken = !load->unread;
    return status;
  }
  if (load->weights_only) return MFSDP_OK;
  return mfsdp__resume_counts(load->ck->rt, &load->loaded.progress, &load->broken);
}

/* After a failed queue this rank's values are neither old nor new, and its runtime is as failed as
 * after any other call. By `why`, this rank's own error; the context keeps what all ranks return. */
MFSDP_API void mfsdp__ck_load_failed(mfsdp_checkpoint *ck, const mfsdp_error *why) {
  const mfsdp_error told = ck->context->error;
  ck->context->error = *why;
  (void)mfsdp__runtime_failed(ck->rt, why->status);
  mfsdp__runtime_drain(ck->rt); /* a queue may still read the stage */
  ck->context->error = told;
}

MFSDP_API mfsdp_status mfsdp__ck_load_phases(mfsdp__ck_load *load, const char *name) {
  mfsdp_checkpoint *ck = load->ck;
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status;
  mfsdp_error why;
  MFSDP_TRY(mfsdp__ck_choose(load, name));
  status = mfsdp__ck_load_progress(load);
  if (status == MFSDP_OK) status = mfsdp__ck_open_all(load);
  if (status == MFSDP_OK && !load->weights_only)
    status = mfsdp__resume_check(ck->rt, &load->loaded.progress);
  own.hash = mfsdp_hash_u64(ck->hash, (uint64_t)load->loaded.progress.step);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  status = mfsdp__ck_load_own(load);
  why = ck->context->error;
  status = mfsdp__ck_agree(ck, status, &own);
  if (load->broken) mfsdp__ck_load_failed(ck, &why); /* not before: it may end the control plane */
  return status;
}

MFSDP_API mfsdp_status mfsdp__ck_load_check_flags(mfsdp_context *context,
                                                  const mfsdp_checkpoint_load_desc *desc) {
  const char *what = "checkpoint load";
  MFSDP_TRY(mfsdp__flag_check(context, what, "weights_only", desc->weights_only));
  MFSDP_TRY(mfsdp__flag_check(context, what, "allow_missing", desc->allow_missing));
  MFSDP_TRY(mfsdp__flag_check(context, what, "allow_unexpected", desc->allow_unexpected));
  return mfsdp__flag_check(context, what, "convert", desc->convert);
}

/* A name as loads, strings and differences take it: of one folder here, not of an attempt. */
MFSDP_API mfsdp_status mfsdp__ck_name_check(mfsdp_checkpoint *ck, const char *what,
                                            const char *name) {
  int64_t step;
  if (strlen(name) >= MFSDP_CHECKPOINT_NAME_NBYTES || name[0] == '\0' || strcmp(name, "..") == 0 ||
      strchr(name, '/') != NULL)
    return MFSDP_FAIL(ck->context, MFSDP_E_ARGUMENT,
                      "checkpoint %s: name is '%.80s', needs one like step-12", what, name);
  if (mfsdp__ck_parse(name, &step) == MFSDP__CK_ATTEMPT)
    return MFSDP_FAIL(ck->context, MFSDP_E_ARGUMENT,
                      "checkpoint %s: %.40s is not finished: its tensors may be holes", what, name);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_load_check(mfsdp_checkpoint *ck,
                                            const mfsdp_checkpoint_load_desc *desc,
                                            const mfsdp_checkpoint_loaded *out) {
  int32_t i;
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc) || out == NULL ||
      out->struct_nbytes != sizeof(*out))
    return MFSDP_FAIL(ck->context, MFSDP_E_ARGUMENT,
                      "checkpoint load: desc or out is NULL or of another size (use the _default "
                      "functions)");
  MFSDP_TRY(mfsdp__ck_load_check_flags(ck->context, desc));
  if (desc->name != NULL) MFSDP_TRY(mfsdp__ck_name_check(ck, "load", desc->name));
  if (ck->rt->in_step)
    return MFSDP_FAIL(ck->context, MFSDP_E_STATE, "checkpoint load: a step is open");
  for (i = 0; i < ck->rt->unit_count; ++i)
    if (ck->rt->units[i].acquires > 0)
      return MFSDP_FAIL(ck->context, MFSDP_E_STATE, "checkpoint load: unit %d is acquired", (int)i);
  return MFSDP_OK;
}

/*
 * Loads into the runtime what this rank owns of it, whatever world, planner or transport saved it;
 * training then goes on with the same bits (weights_only: with fresh state and counts). Collective,
 * between two steps. COMPLETE. Reads the headers of all files, and of tensors exactly the bytes that
 * the rank owns, which is all of a REPLICATED plan (out->data_nbytes). Also takes a folder with
 * model.safetensors of other tools, with weights_only.
 * All ranks return the same status, with the message of the lowest rank that failed. Names, dtypes
 * and shapes are compared before anything is changed. E_FORMAT: they differ in a way that the
 * description does not allow, or a file is damaged (its message says how). E_IO: the disk, or
 * nothing to load; if it comes while values are read, they are undefined until a load or an init
 * succeeds. E_STATE: a step is open, a unit is acquired. E_ARGUMENT; E_MEMORY (headers, given back);
 * E_TIMEOUT, E_PEER, E_MISMATCH. E_BACKEND, or another error of a rank's queues: that rank's runtime
 * has failed, and its peers learn of it at their next wait. The failure of an earlier save in the
 * background comes first: then nothing was loaded.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_load(mfsdp_checkpoint *ck,
                                             const mfsdp_checkpoint_load_desc *desc,
                                             mfsdp_checkpoint_loaded *out) {
  mfsdp__ck_load load;
  mfsdp_status status;
  MFSDP_TRY(mfsdp__runtime_usable(ck->rt));
  MFSDP_TRY(mfsdp__ck_load_check(ck, desc, out));
  MFSDP_TRY(mfsdp_checkpoint_wait(ck)); /* a save in the background: what it saves may be meant */
  MFSDP_TRY(mfsdp_runtime_progress(ck->rt, &out->progress));
  memset(&load, 0, sizeof(load));
  load.ck = ck;
  load.weights_only = desc->weights_only;
  load.allow_missing = desc->allow_missing;
  load.allow_unexpected = desc->allow_unexpected;
  load.convert = desc->convert;
  load.report = desc->report;
  load.user = desc->user;
  load.loaded = mfsdp_checkpoint_loaded_default();
  status = mfsdp__ck_load_phases(&load, desc->name);
  mfsdp__ck_close_all(&load);
  memcpy(load.loaded.name, load.name, sizeof(load.name));
  *out = load.loaded;
  return status;
}

MFSDP_API mfsdp_status mfsdp__ck_visit_check(mfsdp_checkpoint *ck, const char *what,
                                             const char *name, int has_visit) {
  if (name == NULL || !has_visit)
    return MFSDP_FAIL(ck->context, MFSDP_E_ARGUMENT, "checkpoint %s: %s is NULL", what,
                      name == NULL ? "name" : "visit");
  return mfsdp__ck_name_check(ck, what, name);
}

/*
 * The strings that the program gave to the save, and those of the library ("group.0.lr", ...): calls
 * `visit` for each, on this rank alone, without communication. `name` as mfsdp_checkpoint_loaded
 * has it. E_ARGUMENT: visit is NULL, or no such name can be; E_IO, E_FORMAT, E_MEMORY.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_strings(mfsdp_checkpoint *ck, const char *name,
                                                void (*visit)(void *user, const char *key,
                                                              const char *value),
                                                void *user) {
  mfsdp_safetensors *state = NULL;
  int32_t i;
  MFSDP_TRY(mfsdp__ck_visit_check(ck, "strings", name, visit != NULL));
  MFSDP_TRY(mfsdp__ck_read_state(ck, name, &state));
  for (i = 0; i < mfsdp_safetensors_metadata_count(state); ++i) {
    const mfsdp_safetensors_pair *pair = mfsdp_safetensors_metadata_at(state, i);
    visit(user, pair->key, pair->value);
  }
  mfsdp_safetensors_destroy(ck->context, state);
  return MFSDP_OK;
}

/* The keys that say how a run was trained, not how far it came. */
MFSDP_API int mfsdp__ck_is_choice(const char *key) {
  return strncmp(key, "group.", 6) == 0 || strncmp(key, "schedule.", 9) == 0;
}

/*
 * What this runtime does otherwise than the run that saved: calls `visit` for each hyperparameter
 * ("group.0.lr", "schedule.kind", ...; numbers as text) whose saved value is not the runtime's; saved
 * is NULL where the checkpoint has none. A load takes all of them without a word. On this rank alone,
 * without communication. `name` as mfsdp_checkpoint_loaded has it. Not told: what only the checkpoint
 * has. E_ARGUMENT: visit is NULL, or no such name can be; E_IO, E_FORMAT, E_MEMORY.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_differences(
    mfsdp_checkpoint *ck, const char *name,
    void (*visit)(void *user, const char *key, const char *saved, const char *now), void *user) {
  const mfsdp_progress none = mfsdp_progress_default();
  mfsdp_safetensors *file = NULL;
  mfsdp__ck_state own;
  mfsdp_status status;
  int32_t i;
  MFSDP_TRY(mfsdp__ck_visit_check(ck, "differences", name, visit != NULL));
  MFSDP_TRY(mfsdp__ck_read_state(ck, name, &file));
  status = mfsdp__ck_state_make(ck, &none, NULL, 0, &own);
  for (i = 0; status == MFSDP_OK && i < own.count; ++i) {
    const mfsdp_safetensors_pair *now = &own.pairs[i];
    const char *saved = mfsdp_safetensors_metadata_find(file, now->key);
    if (mfsdp__ck_is_choice(now->key) && (saved == NULL || strcmp(saved, now->value) != 0))
      visit(user, now->key, saved, now->value);
  }
  if (status == MFSDP_OK) mfsdp__ck_state_free(ck, &own);
  mfsdp_safetensors_destroy(ck->context, file);
  return status;
}

#endif /* MFSDP_CHECKPOINT_LOAD_H */
