/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/object.h - the checkpoint's tables and small helpers to read them. Private to
 * checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_OBJECT_H
#define MFSDP_CHECKPOINT_OBJECT_H

#include "desc.h"

#define MFSDP__CK_MAX_SETS 16
#define MFSDP__CK_PATH_NBYTES 1024
#define MFSDP__CK_FILE_NBYTES 112 /* of a file name of ours */
#define MFSDP__CK_KIND_NBYTES 40  /* of the name of a kind of state */
enum { MFSDP__CK_MODEL = 0, MFSDP__CK_MASTER = 1, MFSDP__CK_FIRST_STATE = 2 };

/* A tensor of a checkpoint; its name follows, with its zero, padded to 8 bytes. */
typedef struct mfsdp__ck_record {
  int64_t shape[MFSDP_MAX_NDIM];
  uint64_t nbytes; /* up to the next record */
  int32_t ndim, dtype;
  char kind[MFSDP__CK_KIND_NBYTES]; /* "model", "master", or a state's, as "exp_avg" */
} mfsdp__ck_record;

typedef struct mfsdp__ck_set {
  const char *state; /* the kind */
  int32_t tensor_first, tensor_count, file_first, file_count;
  int64_t data_nbytes;
} mfsdp__ck_set;

typedef struct mfsdp__ck_file {
  int32_t set, tensor_first, tensor_count;
  mfsdp_safetensors_layout layout;
} mfsdp__ck_file;

/* A stretch of a tensor that this rank owns. */
typedef struct mfsdp__ck_run {
  int32_t tensor, param; /* param: the runtime's number */
  int32_t piece;         /* of the plan of the parameter's group */
  int32_t writes;        /* 0: another rank has the same and writes it */
  int64_t first, count;  /* elements of the tensor */
  void *data;            /* where they are */
  mfsdp_space space;
} mfsdp__ck_run;

/* What ranks tell each other (agree.h). */
typedef struct mfsdp__ck_message {
  int32_t status, culprit; /* of the lowest rank that failed */
  int32_t first, other;    /* the rank that sent it; one whose hash differs, or 0 */
  int64_t value;           /* what the phase is about: bytes written, a step */
  uint64_t hash;           /* must be equal on all ranks */
  uint64_t token;
  char name[MFSDP_CHECKPOINT_NAME_NBYTES];
  char text[240];
} mfsdp__ck_message;

struct mfsdp_checkpoint {
  mfsdp_runtime *rt;
  mfsdp_context *context;
  mfsdp_io io;
  char *folder; /* copied */
  size_t folder_nbytes, stage_nbytes;
  int64_t max_file_nbytes, timeout_us;
  int32_t keep_last;
  int32_t rank; /* among all ranks: group 0's, copy after copy */

  unsigned char *records; /* mfsdp__ck_record, of all groups */
  size_t records_nbytes, records_capacity;
  mfsdp__ck_set sets[MFSDP__CK_MAX_SETS];
  int32_t set_count, tensor_count, file_count, run_count;
  int32_t write_count;               /* of the runs, those that this rank writes: the first */
  mfsdp_safetensors_tensor *tensors; /* set after set, in the order of their files */
  int32_t *tensor_files;
  int32_t *param_tensors; /* set_count x the runtime's parameters: index of the tensor, or -1 */
  mfsdp__ck_file *files;
  mfsdp__ck_run *runs; /* by tensor, then first */
  uint64_t hash;       /* of everything but the runs */

  mfsdp__ck_message *messages; /* message_count, as many as ranks or replicas */
  int32_t message_count;
  mfsdp__ck_message told; /* the last verdict */

  mfsdp_buffer stage;  /* PINNED */
  mfsdp_buffer values; /* PINNED: converted */
  mfsdp_buffer device; /* DEVICE: fp32 values on the way to compute copies; empty without any */

  struct mfsdp__ck_job *job; /* saves in the background; NULL: none */
};

/* ---- parameters, by the runtime's number ---- */

MFSDP_API const mfsdp_plan *mfsdp__ck_plan(const mfsdp_checkpoint *ck, int32_t param) {
  return ck->rt->groups[ck->rt->params[param].group].plan;
}

MFSDP_API const mfsdp_param *mfsdp__ck_param(const mfsdp_checkpoint *ck, int32_t param) {
  return mfsdp_plan_param(mfsdp__ck_plan(ck, param), ck->rt->params[param].index);
}

MFSDP_API const mfsdp_piece *mfsdp__ck_pieces(const mfsdp_checkpoint *ck, int32_t param,
                                              int32_t *count) {
  return mfsdp_plan_param_pieces(mfsdp__ck_plan(ck, param), ck->rt->params[param].index, count);
}

/* The piece of a run. */
MFSDP_API const mfsdp_piece *mfsdp__ck_piece(const mfsdp_checkpoint *ck, const mfsdp__ck_run *run) {
  int32_t count = 0;
  return mfsdp_plan_pieces(mfsdp__ck_plan(ck, run->param), -1, &count) + run->piece;
}

/* The tensor of a parameter in a set, or -1. */
MFSDP_API int32_t mfsdp__ck_tensor_of(const mfsdp_checkpoint *ck, int32_t set, int32_t param) {
  return ck->param_tensors[set * ck->rt->param_count + param];
}

/* ---- memory of the runtime ---- */

/* Whether the processor itself reads and writes a space: what lies there needs no staging. */
MFSDP_API int mfsdp__ck_reaches(const mfsdp_checkpoint *ck, mfsdp_space space) {
  return space != MFSDP_SPACE_DEVICE || (ck->rt->backend->traits & MFSDP_BACKEND_HOST_MEMORY) != 0;
}

/* Waits for everything that the compute queue was given. */
MFSDP_API mfsdp_status mfsdp__ck_settle(mfsdp_checkpoint *ck) {
  mfsdp_runtime *rt = ck->rt;
  const mfsdp_backend_ops *ops = rt->backend->ops;
  MFSDP_TRY(ops->event_record(rt->backend->self, rt->compute, rt->compute_done));
  return ops->event_wait(rt->backend->self, ck->context, rt->compute_done, rt->deadline_us);
}

#endif /* MFSDP_CHECKPOINT_OBJECT_H */
