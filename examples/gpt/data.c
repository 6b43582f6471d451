/* SPDX-License-Identifier: MIT */
#include "data.h"

#include "file.h"
#include "mfsdp/random.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The generator's stream for window positions; initial values use hashes of names. */
#define WINDOW_STREAM UINT64_C(0x77696e646f77)

static int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}

int gpt_data_open(const char *path, int64_t context, int64_t batch, gpt_data *data,
                  gpt_error *error) {
  const int64_t window = context + 1, need = most(batch, 2) * window;
  int64_t held_out;
  memset(data, 0, sizeof *data);
  if (gpt_file_read(path, INT64_C(1) << 32, &data->bytes, &data->count, error) != GPT_OK)
    return GPT_USAGE_ERROR;
  if (data->count < need) {
    if (data->count == 0)
      gpt_fail(error, "%s is empty; give a text file with --data", path);
    else
      gpt_fail(error,
               "%s has %" PRId64 " bytes, shorter than one batch (%" PRId64 " windows of %" PRId64
               " bytes); use a longer file, or lower --batch or --context",
               path, data->count, need / window, window);
    gpt_data_destroy(data);
    return GPT_USAGE_ERROR;
  }
  /* A short file is split in halves, so that both parts hold at least one window. */
  held_out = most(data->count / 10, least(need, data->count / 2));
  data->train_count = data->count - held_out;
  data->context = context;
  data->batch = batch;
  return GPT_OK;
}

void gpt_data_destroy(gpt_data *data) {
  free(data->bytes);
  memset(data, 0, sizeof *data);
}

static void copy_window(const gpt_data *data, int64_t start, int64_t row, uint8_t *inputs,
                        uint8_t *targets) {
  const uint8_t *window = data->bytes + start;
  memcpy(inputs + row * data->context, window, (size_t)data->context);
  memcpy(targets + row * data->context, window + 1, (size_t)data->context);
}

void gpt_data_batch(const gpt_data *data, uint64_t seed, int64_t block, uint8_t *inputs,
                    uint8_t *targets) {
  const uint64_t starts = (uint64_t)(data->train_count - data->context);
  for (int64_t row = 0; row < data->batch; ++row) {
    const uint64_t sample = (uint64_t)(block * data->batch + row);
    const uint64_t start = mfsdp_random_below(seed, WINDOW_STREAM, sample, starts);
    copy_window(data, (int64_t)start, row, inputs, targets);
  }
}

int64_t gpt_data_validation_count(const gpt_data *data) {
  const int64_t held_out = data->count - data->train_count;
  return most(1, held_out / (data->batch * (data->context + 1)));
}

void gpt_data_validation_batch(const gpt_data *data, int64_t index, int64_t batch_count,
                               uint8_t *inputs, uint8_t *targets) {
  const int64_t last_start = data->count - data->train_count - data->context - 1;
  const int64_t gaps = most(1, batch_count * data->batch - 1);
  for (int64_t row = 0; row < data->batch; ++row) {
    const int64_t window = index * data->batch + row;
    /* last_start < 2^32, and so is any sensible number of windows: no overflow. */
    copy_window(data, data->train_count + last_start * window / gaps, row, inputs, targets);
  }
}
