/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/job.h - what saves in the background need: a copy of what this rank owns, and a thread's
 * own view of the checkpoint. Private to checkpoint.h.
 *
 * The other thread works on `view`, a copy of the checkpoint whose tables nobody changes and whose
 * context is its own; it allocates nothing and never uses the control plane. The two threads hand
 * the job to each other by start and wait alone.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_JOB_H
#define MFSDP_CHECKPOINT_JOB_H

#include "agree.h"

/* A save under way. */
typedef struct mfsdp__ck_save {
  int64_t step;
  uint64_t token;
  mfsdp_io_file *lock; /* rank 0 */
  char attempt[MFSDP_CHECKPOINT_NAME_NBYTES];
} mfsdp__ck_save;

typedef enum mfsdp__ck_phase {
  MFSDP__CK_IDLE = 0,
  MFSDP__CK_WRITING,  /* every rank what it owns */
  MFSDP__CK_FINISHING /* rank 0: the name, and older checkpoints */
} mfsdp__ck_phase;

struct mfsdp__ck_job {
  mfsdp_background run;
  mfsdp__ck_phase phase;
  mfsdp__ck_save save;
  mfsdp_checkpoint view;
  mfsdp_context context;  /* of the view; holds the error of the work */
  mfsdp_io_file **files;  /* of ck->files: opened before the work begins, see background.h */
  mfsdp_buffer snapshot;  /* PINNED: the runs, packed in their order */
  mfsdp_status status;    /* of the work */
  int64_t written_nbytes; /* by it */
  void (*abandon)(mfsdp_checkpoint *ck); /* set in all phases but IDLE */
};

MFSDP_API size_t mfsdp__ck_run_nbytes(const mfsdp_checkpoint *ck, const mfsdp__ck_run *run) {
  return (size_t)run->count * mfsdp__ck_element_nbytes(ck, run->tensor);
}

/*
 * Bytes of this rank's copy for saves in the background, which checkpoint_create takes if the
 * description has a `background`: what the rank writes, once.
 */
MFSDP_API size_t mfsdp_checkpoint_snapshot_nbytes(const mfsdp_checkpoint *ck) {
  size_t sum = 0;
  int32_t i;
  for (i = 0; i < ck->write_count; ++i)
    sum += mfsdp__ck_run_nbytes(ck, &ck->runs[i]); /* fits: it is in memory already */
  return sum;
}

MFSDP_API mfsdp_status mfsdp__ck_make_job(mfsdp_checkpoint *ck,
                                          const mfsdp_background *background) {
  mfsdp_context_desc desc = mfsdp_context_desc_default();
  void *memory;
  if (background == NULL) return MFSDP_OK;
  MFSDP_TRY(
      mfsdp_table_alloc(ck->context, 1, sizeof(*ck->job), "background of a checkpoint", &memory));
  ck->job = (struct mfsdp__ck_job *)memory;
  ck->job->run = *background;
  desc.rank = ck->rank;
  MFSDP_TRY(mfsdp_context_init(&ck->job->context, &desc)); /* it logs and allocates nothing */
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)ck->file_count, sizeof(*ck->job->files),
                              "files of a background save", &memory));
  ck->job->files = (mfsdp_io_file **)memory;
  MFSDP_TRY(mfsdp_buffer_alloc(ck->context, ck->rt->backend, mfsdp_checkpoint_snapshot_nbytes(ck),
                               MFSDP_SPACE_PINNED, MFSDP_MEMORY_STAGING, &ck->job->snapshot));
  if (ck->job->snapshot.data != NULL) /* its pages come now, not during the first save */
    memset(ck->job->snapshot.data, 0, ck->job->snapshot.nbytes);
  return MFSDP_OK;
}

/* Waits for the other thread, and gives up what it was at. */
MFSDP_API void mfsdp__ck_free_job(mfsdp_checkpoint *ck) {
  struct mfsdp__ck_job *job = ck->job;
  if (job == NULL) return;
  if (job->phase != MFSDP__CK_IDLE) job->abandon(ck);
  mfsdp_buffer_free(ck->context, ck->rt->backend, &job->snapshot);
  mfsdp_table_free(ck->context, (void *)job->files, (size_t)ck->file_count, sizeof(*job->files));
  mfsdp_table_free(ck->context, job, 1, sizeof(*job));
  ck->job = NULL;
}

#endif /* MFSDP_CHECKPOINT_JOB_H */
