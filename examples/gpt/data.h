/* SPDX-License-Identifier: MIT */
/*
 * data.h - a text file as training and validation windows of bytes.
 *
 * The file is read whole. Its last tenth (at least one batch, where the file allows it) is held out
 * for validation. A window is context + 1 bytes: the inputs, and the same shifted by one as
 * targets.
 *
 * Which window a sample block trains on is a pure function of (seed, block number), so the order
 * does not depend on ranks, and a run can be resumed from a step number alone.
 */
#ifndef GPT_DATA_H
#define GPT_DATA_H

#include "error.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpt_data {
  uint8_t *bytes;
  int64_t count;       /* bytes in the file */
  int64_t train_count; /* the first train_count of them are for training */
  int64_t context, batch;
} gpt_data;

/* Reads `path`. Fails with a line that says what to do if the file is missing, unreadable, empty,
 * larger than 4 GiB, or shorter than one batch (batch * (context + 1) bytes, and two windows). On
 * failure *data needs no destroy. context and batch are those of a checked gpt_config. */
int gpt_data_open(const char *path, int64_t context, int64_t batch, gpt_data *data,
                  gpt_error *error);
void gpt_data_destroy(gpt_data *data);

/* inputs, targets: batch x context. Any thread may call it; block >= 0. */
void gpt_data_batch(const gpt_data *data, uint64_t seed, int64_t block, uint8_t *inputs,
                    uint8_t *targets);

/* Batches of the held-out part that do not overlap, at least 1. */
int64_t gpt_data_validation_count(const gpt_data *data);
/* Batch `index` of `batch_count`: all windows together are spaced evenly over the held-out part,
 * the same at every call. 0 <= index < batch_count; any batch_count >= 1 is allowed. */
void gpt_data_validation_batch(const gpt_data *data, int64_t index, int64_t batch_count,
                               uint8_t *inputs, uint8_t *targets);

#ifdef __cplusplus
}
#endif

#endif /* GPT_DATA_H */
