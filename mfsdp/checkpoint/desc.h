/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/desc.h - everything public of checkpoint.h but the functions. Include checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_DESC_H
#define MFSDP_CHECKPOINT_DESC_H

#include "../background.h"
#include "../dtype.h"
#include "../io.h"
#include "../runtime.h"
#include "../safetensors.h"

typedef struct mfsdp_checkpoint mfsdp_checkpoint;

/* Equal on all ranks. What it names must outlive the checkpoint; strings are copied. */
typedef struct mfsdp_checkpoint_desc {
  size_t struct_nbytes;
  const mfsdp_io *io;      /* mfsdp_io_posix() of posix/io_posix.h, or the program's own */
  const char *folder;      /* holds all checkpoints; made if it is not there */
  int64_t max_file_nbytes; /* tensors of one file; a larger tensor has a file of its own */
  int32_t keep_last;       /* whole checkpoints that stay after a save; 0: all */
  int64_t timeout_us;      /* how long ranks wait for the slowest one's files */
  size_t stage_nbytes;     /* bytes moved at a time; two such buffers on each rank */
  /* For mfsdp_checkpoint_save_begin: one of the checkpoint's own, as mfsdp_background_posix() of
   * posix/background_posix.h. Costs mfsdp_checkpoint_snapshot_nbytes(). NULL: no such saves. */
  const mfsdp_background *background;
} mfsdp_checkpoint_desc;

/* No folder and no io (they must be set), 5 GB a file, all kept, an hour, 4 MiB, no background. */
MFSDP_API mfsdp_checkpoint_desc mfsdp_checkpoint_desc_default(void) {
  mfsdp_checkpoint_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.max_file_nbytes = INT64_C(5000000000);
  desc.timeout_us = INT64_C(3600000000);
  desc.stage_nbytes = (size_t)4 << 20;
  return desc;
}

/* What a load met that it did not expect. */
typedef enum mfsdp_checkpoint_issue {
  MFSDP_CHECKPOINT_MISSING = 1, /* the runtime has the tensor, the files do not */
  MFSDP_CHECKPOINT_UNEXPECTED,  /* the other way round */
  MFSDP_CHECKPOINT_DTYPE,       /* another dtype: an error unless converted */
  MFSDP_CHECKPOINT_SHAPE        /* another shape: always an error */
} mfsdp_checkpoint_issue;

typedef struct mfsdp_checkpoint_load_desc {
  size_t struct_nbytes;
  const char *name;         /* "step-12"; NULL: the latest */
  int32_t weights_only;     /* 1: no optimizer state, no step counts */
  int32_t allow_missing;    /* 1: a missing tensor keeps its value */
  int32_t allow_unexpected; /* 1: tensors that the runtime does not have are skipped */
  int32_t convert; /* 1: other dtypes are converted, by way of fp32; from masters, if saved */
  /* Called on every rank for each issue, allowed or not; NULL: not wanted. */
  void (*report)(void *user, mfsdp_checkpoint_issue issue, const char *tensor);
  void *user; /* handed to report */
} mfsdp_checkpoint_load_desc;

/* The latest, everything, strictly. */
MFSDP_API mfsdp_checkpoint_load_desc mfsdp_checkpoint_load_desc_default(void) {
  mfsdp_checkpoint_load_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  return desc;
}

#define MFSDP_CHECKPOINT_NAME_NBYTES 40

/* What a load did, on this rank where it says so. */
typedef struct mfsdp_checkpoint_loaded {
  size_t struct_nbytes;
  char name[MFSDP_CHECKPOINT_NAME_NBYTES];
  mfsdp_progress progress; /* as saved; of the default with weights_only */
  int64_t data_nbytes;     /* of tensors, read by this rank: what it owns, once */
  int32_t missing_count, unexpected_count, dtype_count;
} mfsdp_checkpoint_loaded;

/* Zeros, with its size. */
MFSDP_API mfsdp_checkpoint_loaded mfsdp_checkpoint_loaded_default(void) {
  mfsdp_checkpoint_loaded loaded;
  memset(&loaded, 0, sizeof(loaded));
  loaded.struct_nbytes = sizeof(loaded);
  loaded.progress = mfsdp_progress_default();
  return loaded;
}

#endif /* MFSDP_CHECKPOINT_DESC_H */
