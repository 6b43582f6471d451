/* SPDX-License-Identifier: MIT */
#include "checkpoint.h"

#include "error.h"

#include "mfsdp/posix/io_posix.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

/* What the program adds to a checkpoint. Samples are a function of (seed, block). */
static const char seed_key[] = "train_gpt.seed", block_key[] = "train_gpt.next_block";

int64_t gpt_checkpoint_block(const gpt_rank *rank, int64_t step, int64_t micro_batch) {
  const gpt_options *o = &rank->job->options;
  const int64_t round = (step - rank->start_step) * o->micro_batches + micro_batch;
  return rank->start_block + round * o->ranks + rank->index;
}

typedef struct saved_strings {
  int64_t seed, block; /* -1: not there */
} saved_strings;

/* A count that we wrote, or -1: a sample index that is made up must not pass, nor overflow later. */
static int64_t count_of(const char *text) {
  int64_t value = 0;
  const char *c = text;
  for (; *c >= '0' && *c <= '9' && value < INT64_C(1) << 53; ++c)
    value = 10 * value + (*c - '0');
  return *c == '\0' && c > text ? value : -1;
}

static void visit_string(void *user, const char *key, const char *value) {
  saved_strings *saved = (saved_strings *)user;
  if (strcmp(key, seed_key) == 0) saved->seed = count_of(value);
  if (strcmp(key, block_key) == 0) saved->block = count_of(value);
}

/* Numbers in few digits: what tells them apart stands in the options. */
static void shorten(const char *value, char *text, size_t capacity) {
  char *end = NULL;
  const double number = strtod(value, &end);
  if (end != value && *end == '\0')
    (void)snprintf(text, capacity, "%g", number);
  else
    (void)snprintf(text, capacity, "%s", value);
}

/* Another learning rate or schedule is a choice, but never a silent one. */
static void note_difference(void *user, const char *key, const char *saved, const char *now) {
  const char *name = (const char *)user;
  char before[64] = "not there", after[64];
  if (saved != NULL) shorten(saved, before, sizeof(before));
  shorten(now, after, sizeof(after));
  fprintf(stderr, "note: %s was %s in %s, is %s now\n", key, before, name, after);
}

static mfsdp_status resume(gpt_rank *rank) {
  mfsdp_checkpoint_load_desc desc = mfsdp_checkpoint_load_desc_default();
  mfsdp_checkpoint_loaded loaded = mfsdp_checkpoint_loaded_default();
  saved_strings saved;
  saved.seed = saved.block = -1;
  MFSDP_TRY(mfsdp_checkpoint_load(rank->checkpoint, &desc, &loaded));
  MFSDP_TRY(mfsdp_checkpoint_strings(rank->checkpoint, loaded.name, visit_string, &saved));
  if (saved.block < 0)
    return MFSDP_FAIL(&rank->context, MFSDP_E_FORMAT, "%s was not saved by train_gpt", loaded.name);
  if (saved.seed != rank->job->options.seed)
    return MFSDP_FAIL(&rank->context, MFSDP_E_ARGUMENT,
                      "--seed is %" PRId64 ", %s was trained with %" PRId64 "; give the same",
                      rank->job->options.seed, loaded.name, saved.seed);
  rank->start_step = loaded.progress.step;
  rank->start_block = saved.block;
  if (rank->index != 0) return MFSDP_OK;
  fprintf(stderr, "resumed from %s/%s\n", rank->job->options.checkpoint, loaded.name);
  return mfsdp_checkpoint_differences(rank->checkpoint, loaded.name, note_difference, loaded.name);
}

int gpt_checkpoint_check(const gpt_options *options, gpt_error *error) {
  const char *folder = options->checkpoint;
  const mfsdp_io io = mfsdp_io_posix();
  mfsdp_error why = mfsdp_error_none();
  int32_t existed = 0;
  if (folder == NULL || options->resume) return GPT_OK; /* a resume says itself what is not there */
  if (io.ops->make_folder(io.self, folder, &existed, &why) != MFSDP_OK)
    return gpt_fail(error, "--checkpoint %.200s: %.100s", folder, why.message);
  if (access(folder, W_OK | X_OK) != 0)
    return gpt_fail(error, "--checkpoint %.200s: cannot be written to", folder);
  return GPT_OK;
}

/* Steps of the same number are replaced, and --keep-last counts the old ones too. */
static void note_others(const char *folder) {
  char path[1024];
  const int nbytes = snprintf(path, sizeof(path), "%s/latest", folder);
  if (nbytes < (int)sizeof(path) && access(path, F_OK) == 0)
    fprintf(stderr,
            "note: %s has checkpoints of another run, which this one begins to replace; --resume "
            "goes on from them\n",
            folder);
}

mfsdp_status gpt_checkpoint_open(gpt_rank *rank) {
  const gpt_options *o = &rank->job->options;
  mfsdp_checkpoint_desc desc = mfsdp_checkpoint_desc_default();
  if (o->checkpoint == NULL) return MFSDP_OK;
  rank->io = mfsdp_io_posix();
  desc.io = &rank->io;
  desc.folder = o->checkpoint;
  desc.keep_last = (int32_t)o->keep_last;
  if (o->async_save) {
    rank->background = mfsdp_background_posix(&rank->save_thread);
    desc.background = &rank->background;
  }
  MFSDP_TRY(mfsdp_checkpoint_create(rank->runtime, &desc, &rank->checkpoint));
  if (!o->resume && rank->index == 0) note_others(o->checkpoint);
  return o->resume ? resume(rank) : MFSDP_OK;
}

void gpt_checkpoint_close(gpt_rank *rank) {
  mfsdp_checkpoint_destroy(rank->checkpoint);
  rank->checkpoint = NULL;
}

mfsdp_status gpt_checkpoint_step(gpt_rank *rank, int64_t step, int is_last) {
  const gpt_options *o = &rank->job->options;
  const int64_t block = gpt_checkpoint_block(rank, step, 0) - rank->index;
  char seed_text[24], block_text[24];
  mfsdp_safetensors_pair strings[2];
  int32_t running = 0;
  if (rank->checkpoint == NULL) return MFSDP_OK;
  if (!is_last && (o->save_every == 0 || step % o->save_every != 0))
    return mfsdp_checkpoint_poll(rank->checkpoint, &running); /* of --async-save, if one runs */
  (void)snprintf(seed_text, sizeof(seed_text), "%" PRId64, o->seed);
  (void)snprintf(block_text, sizeof(block_text), "%" PRId64, block);
  strings[0].key = seed_key;
  strings[0].value = seed_text;
  strings[1].key = block_key;
  strings[1].value = block_text;
  /* Nothing is trained beside the last one. */
  if (o->async_save && !is_last) return mfsdp_checkpoint_save_begin(rank->checkpoint, strings, 2);
  return mfsdp_checkpoint_save(rank->checkpoint, strings, 2);
}
