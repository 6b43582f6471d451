/* SPDX-License-Identifier: MIT */
/*
 * result.h - the one JSON line that a training run ends with: written by the trainer, read by the
 * report. Keys are only ever added; a reader skips keys that it does not know.
 */
#ifndef GPT_RESULT_H
#define GPT_RESULT_H

#include "error.h"

#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPT_RESULT_MAX_RANKS 1024
#define GPT_RESULT_TEXT_NBYTES 32

/* Payload bytes by traffic class, all ranks together. */
typedef struct gpt_result_bytes {
  int64_t materialize, reduce, optimizer_matrix, scalar;
} gpt_result_bytes;

typedef struct gpt_result {
  int64_t steps, ranks;
  double train_loss, val_loss;              /* NAN is written as null */
  char params_hash[GPT_RESULT_TEXT_NBYTES]; /* hexadecimal digits */
  double tokens_per_s, opt_step_ms;
  gpt_result_bytes bytes;
  int64_t resident_bytes[GPT_RESULT_MAX_RANKS]; /* the first `ranks` count */
  int64_t slot_bytes, skipped_steps, ns_calls;
  char strategy[GPT_RESULT_TEXT_NBYTES]; /* a name of strategy.h */
} gpt_result;

/* One line with its newline. Fails if it cannot be written. */
int gpt_result_write(FILE *out, const gpt_result *result, gpt_error *error);

/* Reads the last line of `path` that is not empty. Strict: JSON syntax, every key present once with
 * its type, as many resident_bytes as ranks; errors name the file and the key. */
int gpt_result_read(const char *path, gpt_result *result, gpt_error *error);

#ifdef __cplusplus
}
#endif

#endif /* GPT_RESULT_H */
