/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/state.h - step counts, hyperparameters and the program's own strings, as the metadata
 * of a safetensors file without tensors. Private to checkpoint.h.
 *
 * Counts are decimal; the loss scale stands there twice, for people and as the bits of a double.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_STATE_H
#define MFSDP_CHECKPOINT_STATE_H

#include "folder.h"

#define MFSDP__CK_FORMAT "matrixfsdp 1"
#define MFSDP__CK_STATE_PAIRS 12 /* without those of the groups */
#define MFSDP__CK_GROUP_PAIRS 24 /* at most, of each group */
#define MFSDP__CK_TEXT_NBYTES 48 /* of a key or a value of ours */

/* Pairs under construction; texts of ours live in `texts`. */
typedef struct mfsdp__ck_state {
  mfsdp_safetensors_pair *pairs;
  char (*texts)[MFSDP__CK_TEXT_NBYTES];
  int32_t count, capacity, text_count;
  void *memory;
  size_t element_nbytes;
} mfsdp__ck_state;

MFSDP_API char *mfsdp__ck_text(mfsdp__ck_state *state) {
  return state->texts[state->text_count++];
}

MFSDP_API void mfsdp__ck_put_text(mfsdp__ck_state *state, const char *key, const char *value) {
  char *text = mfsdp__ck_text(state);
  (void)snprintf(text, MFSDP__CK_TEXT_NBYTES, "%s", value);
  state->pairs[state->count].key = key;
  state->pairs[state->count++].value = text;
}

MFSDP_API void mfsdp__ck_put_i64(mfsdp__ck_state *state, const char *key, int64_t value) {
  char text[24];
  (void)snprintf(text, sizeof(text), "%lld", (long long)value);
  mfsdp__ck_put_text(state, key, text);
}

/* Shortest text that gives the double back; a point whatever the locale says. */
MFSDP_API void mfsdp__ck_put_f64(mfsdp__ck_state *state, const char *key, double value) {
  char text[40], *at;
  int digits = 15;
  do
    (void)snprintf(text, sizeof(text), "%.*g", digits, value);
  while (strtod(text, NULL) != value && digits++ < 17);
  for (at = text; *at != '\0'; ++at)
    if (*at == ',') *at = '.';
  mfsdp__ck_put_text(state, key, text);
}

MFSDP_API void mfsdp__ck_put_bits(mfsdp__ck_state *state, const char *key, uint64_t bits) {
  char text[24];
  (void)snprintf(text, sizeof(text), "%016llx", (unsigned long long)bits);
  mfsdp__ck_put_text(state, key, text);
}

/* "group.2.lr" */
MFSDP_API const char *mfsdp__ck_group_key(mfsdp__ck_state *state, int32_t group, const char *name) {
  char *text = mfsdp__ck_text(state);
  (void)snprintf(text, MFSDP__CK_TEXT_NBYTES, "group.%d.%s", (int)group, name);
  return text;
}

MFSDP_API uint64_t mfsdp__ck_hash_coefficients(const mfsdp_newton_schulz_desc *ns) {
  uint64_t hash = MFSDP_HASH_SEED, bits;
  int32_t row, k;
  for (row = 0; row < ns->coefficient_count; ++row)
    for (k = 0; k < 3; ++k) {
      memcpy(&bits, &ns->coefficients[row][k], sizeof(bits));
      hash = mfsdp_hash_u64(hash, bits);
    }
  return hash;
}

/* Every choice of a preset, so that a checkpoint says how it was trained. */
MFSDP_API void mfsdp__ck_put_muon(mfsdp__ck_state *s, int32_t g, const mfsdp_muon_desc *muon) {
  const mfsdp_newton_schulz_desc *ns = &muon->newton_schulz;
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "muon.momentum"), muon->momentum);
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "muon.grad_weight"), muon->grad_weight);
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "muon.nesterov_weight"), muon->nesterov_weight);
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "muon.nesterov"), muon->nesterov);
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "muon.scale"), (int64_t)muon->scale);
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "muon.normalize_rows"), muon->normalize_rows);
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "muon.row_beta2"), muon->row_beta2);
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "muon.row_eps"), muon->row_eps);
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "muon.steps"), ns->step_count);
  mfsdp__ck_put_bits(s, mfsdp__ck_group_key(s, g, "muon.coefficients_hash"),
                     mfsdp__ck_hash_coefficients(ns));
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "muon.form"), (int64_t)ns->form);
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "muon.dtype"), (int64_t)ns->dtype);
  mfsdp__ck_put_bits(s, mfsdp__ck_group_key(s, g, "muon.restarts"), ns->restarts);
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "muon.norm_rule"), (int64_t)ns->norm_rule);
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "muon.eps"), ns->eps);
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "muon.norm_factor"), ns->norm_factor);
}

MFSDP_API void mfsdp__ck_put_group(mfsdp__ck_state *s, int32_t g, const mfsdp_hyper_group *group) {
  const mfsdp__algorithm *algorithm = mfsdp__algorithm_of(group->algorithm);
  const char *name;
  double value;
  int32_t i;
  mfsdp__ck_put_text(s, mfsdp__ck_group_key(s, g, "algorithm"),
                     mfsdp_algorithm_kind_name(group->algorithm));
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "lr"), group->lr);
  mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "weight_decay"), group->weight_decay);
  mfsdp__ck_put_i64(s, mfsdp__ck_group_key(s, g, "clipped"), group->clipped);
  if (group->algorithm == MFSDP_ALGORITHM_ADAMW) {
    mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "adamw.beta1"), group->adamw.beta1);
    mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "adamw.beta2"), group->adamw.beta2);
    mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, "adamw.eps"), group->adamw.eps);
  } else if (group->algorithm == MFSDP_ALGORITHM_MUON) {
    mfsdp__ck_put_muon(s, g, &group->muon);
  }
  for (i = 0; algorithm->field != NULL && algorithm->field(group, i, &name, &value); ++i)
    mfsdp__ck_put_f64(s, mfsdp__ck_group_key(s, g, name), value);
}

MFSDP_API void mfsdp__ck_put_progress(mfsdp__ck_state *state, const mfsdp_progress *progress) {
  uint64_t bits;
  memcpy(&bits, &progress->loss_scale, sizeof(bits));
  mfsdp__ck_put_text(state, "format", MFSDP__CK_FORMAT);
  mfsdp__ck_put_i64(state, "step", progress->step);
  mfsdp__ck_put_i64(state, "applied_steps", progress->applied_steps);
  mfsdp__ck_put_i64(state, "skipped_steps", progress->skipped_steps);
  mfsdp__ck_put_i64(state, "steps_since_skip", progress->steps_since_skip);
  mfsdp__ck_put_f64(state, "loss_scale", progress->loss_scale);
  mfsdp__ck_put_bits(state, "loss_scale_bits", bits);
}

MFSDP_API void mfsdp__ck_put_schedule(mfsdp__ck_state *state, const mfsdp_schedule *schedule) {
  mfsdp__ck_put_text(state, "schedule.kind", mfsdp_schedule_kind_name(schedule->kind));
  mfsdp__ck_put_i64(state, "schedule.warmup_steps", schedule->warmup_steps);
  mfsdp__ck_put_i64(state, "schedule.total_steps", schedule->total_steps);
  mfsdp__ck_put_i64(state, "schedule.decay_steps", schedule->decay_steps);
  mfsdp__ck_put_f64(state, "schedule.final_factor", schedule->final_factor);
}

/* The caller's strings last, by reference. A key of ours among them is refused by the format. */
MFSDP_API mfsdp_status mfsdp__ck_state_make(mfsdp_checkpoint *ck, const mfsdp_progress *progress,
                                            const mfsdp_safetensors_pair *strings,
                                            int32_t string_count, mfsdp__ck_state *state) {
  const mfsdp_optimizer *optimizer = mfsdp_runtime_optimizer(ck->rt);
  int32_t g, i, ours;
  memset(state, 0, sizeof(*state));
  ours = MFSDP__CK_STATE_PAIRS + MFSDP__CK_GROUP_PAIRS * optimizer->group_count;
  state->capacity = ours + string_count;
  state->element_nbytes = sizeof(*state->pairs) + (size_t)2 * MFSDP__CK_TEXT_NBYTES;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)state->capacity, state->element_nbytes,
                              "state of a checkpoint", &state->memory));
  state->pairs = (mfsdp_safetensors_pair *)state->memory;
  state->texts = (char(*)[MFSDP__CK_TEXT_NBYTES])(void *)(state->pairs + state->capacity);
  mfsdp__ck_put_progress(state, progress);
  mfsdp__ck_put_schedule(state, mfsdp_runtime_schedule(ck->rt));
  for (g = 0; g < optimizer->group_count; ++g)
    mfsdp__ck_put_group(state, g, &optimizer->groups[g]);
  for (i = 0; i < string_count; ++i)
    state->pairs[state->count++] = strings[i];
  return MFSDP_OK;
}

MFSDP_API void mfsdp__ck_state_free(mfsdp_checkpoint *ck, mfsdp__ck_state *state) {
  mfsdp_table_free(ck->context, state->memory, (size_t)state->capacity, state->element_nbytes);
}

/* ---- reading ---- */

MFSDP_API mfsdp_status mfsdp__ck_get(mfsdp_checkpoint *ck, const mfsdp_safetensors *file,
                                     const char *key, const char **value) {
  *value = mfsdp_safetensors_metadata_find(file, key);
  if (*value != NULL) return MFSDP_OK;
  return MFSDP_FAIL(ck->context, MFSDP_E_FORMAT, "%s has no '%s'", MFSDP__CK_STATE_FILE, key);
}

MFSDP_API mfsdp_status mfsdp__ck_get_i64(mfsdp_checkpoint *ck, const mfsdp_safetensors *file,
                                         const char *key, int64_t *out) {
  const char *value = NULL, *at;
  int64_t number = 0;
  MFSDP_TRY(mfsdp__ck_get(ck, file, key, &value));
  for (at = value; *at >= '0' && *at <= '9'; ++at)
    if (!mfsdp_i64_mul(number, 10, &number) || !mfsdp_i64_add(number, *at - '0', &number)) break;
  if (*at != '\0' || at == value)
    return MFSDP_FAIL(ck->context, MFSDP_E_FORMAT, "%s: '%s' is '%.40s', needs a whole number",
                      MFSDP__CK_STATE_FILE, key, value);
  *out = number;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_get_bits(mfsdp_checkpoint *ck, const mfsdp_safetensors *file,
                                          const char *key, double *out) {
  const char *value = NULL;
  uint64_t bits = 0;
  int i, digit = 0;
  MFSDP_TRY(mfsdp__ck_get(ck, file, key, &value));
  for (i = 0; i < 16 && digit >= 0; ++i) {
    const char c = value[i];
    digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    bits = bits << 4 | (uint64_t)(digit & 15);
  }
  if (digit < 0 || value[16] != '\0')
    return MFSDP_FAIL(ck->context, MFSDP_E_FORMAT, "%s: '%s' is '%.40s', needs 16 digits",
                      MFSDP__CK_STATE_FILE, key, value);
  memcpy(out, &bits, sizeof(bits));
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_get_progress(mfsdp_checkpoint *ck, const mfsdp_safetensors *file,
                                              mfsdp_progress *out) {
  const char *format = NULL;
  MFSDP_TRY(mfsdp__ck_get(ck, file, "format", &format));
  if (strcmp(format, MFSDP__CK_FORMAT) != 0)
    return MFSDP_FAIL(ck->context, MFSDP_E_FORMAT, "%s: format is '%.40s', needs '%s'",
                      MFSDP__CK_STATE_FILE, format, MFSDP__CK_FORMAT);
  MFSDP_TRY(mfsdp__ck_get_i64(ck, file, "step", &out->step));
  MFSDP_TRY(mfsdp__ck_get_i64(ck, file, "applied_steps", &out->applied_steps));
  MFSDP_TRY(mfsdp__ck_get_i64(ck, file, "skipped_steps", &out->skipped_steps));
  MFSDP_TRY(mfsdp__ck_get_i64(ck, file, "steps_since_skip", &out->steps_since_skip));
  return mfsdp__ck_get_bits(ck, file, "loss_scale_bits", &out->loss_scale);
}

#endif /* MFSDP_CHECKPOINT_STATE_H */
