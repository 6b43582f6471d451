/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/background.h - a save while training goes on. Part of checkpoint.h.
 *
 *   MFSDP_TRY(mfsdp_checkpoint_save_begin(ck, strings, count));   // copies, and begins to write
 *   ... steps, each followed by
 *   MFSDP_TRY(mfsdp_checkpoint_poll(ck, &running));               // goes on when all ranks have written
 *   ...
 *   MFSDP_TRY(mfsdp_checkpoint_wait(ck));                         // before the program ends
 *
 * The three phases of save.h: phase 1 and the copy are done in save_begin. Phase 2 is the other
 * thread's on every rank. That all ranks have ended it is found out by a call of this header, save,
 * load or another save_begin, on the ranks' own threads: the other threads never communicate. Rank 0
 * then lets its other thread do phase 3, and a further call takes the last verdict.
 *
 * A rank opens its files before it returns from save_begin, so a rank that is left behind after the
 * others gave up can write into files that are gone, never into another attempt of the same name.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_BACKGROUND_H
#define MFSDP_CHECKPOINT_BACKGROUND_H

#include "save.h"

/* ---- before the other thread ---- */

MFSDP_API mfsdp_status mfsdp__ck_open_files(mfsdp_checkpoint *ck) {
  struct mfsdp__ck_job *job = ck->job;
  int32_t file, first = 0, last;
  for (file = 0; file < ck->file_count; ++file, first = last) {
    char name[MFSDP__CK_FILE_NBYTES];
    mfsdp__ck_path path;
    last = mfsdp__ck_last_run(ck, file, first);
    if (!mfsdp__ck_touches(ck, first, last)) continue;
    mfsdp__ck_file_name(ck, file, name);
    path = mfsdp__ck_path_of(ck, job->save.attempt, name);
    MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_WRITE, &job->files[file]));
  }
  return MFSDP_OK;
}

/* What is still open after a failure; its errors have nothing to add. */
MFSDP_API void mfsdp__ck_close_files(mfsdp_checkpoint *ck) {
  struct mfsdp__ck_job *job = ck->job;
  int32_t file;
  for (file = 0; file < ck->file_count; ++file) {
    const mfsdp_error before = ck->context->error;
    (void)mfsdp_io_close(ck->context, &ck->io, job->files[file], "", MFSDP_OK);
    job->files[file] = NULL;
    ck->context->error = before;
  }
}

/* Every run behind the one before, so that what lies together in a file does so in memory. */
MFSDP_API mfsdp_status mfsdp__ck_take_snapshot(mfsdp_checkpoint *ck) {
  mfsdp_runtime *rt = ck->rt;
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  unsigned char *to = (unsigned char *)ck->job->snapshot.data;
  mfsdp_status status = MFSDP_OK, copied;
  int32_t i;
  for (i = 0; i < ck->write_count && status == MFSDP_OK; ++i) {
    const size_t nbytes = mfsdp__ck_run_nbytes(ck, &ck->runs[i]);
    if (nbytes == 0) continue;
    status = ops->copy(self, rt->compute, to, MFSDP_SPACE_PINNED, ck->runs[i].data,
                       ck->runs[i].space, nbytes);
    to += nbytes;
  }
  /* Also after a failure: copies may be on their way to memory that is about to be freed. */
  copied = ops->event_record(self, rt->compute, rt->compute_done);
  if (copied == MFSDP_OK)
    copied = ops->event_wait(self, ck->context, rt->compute_done, rt->deadline_us);
  return status != MFSDP_OK ? status : copied;
}

/* ---- on the other thread ---- */

MFSDP_API int64_t mfsdp__ck_run_offset(const mfsdp_checkpoint *ck, const mfsdp__ck_run *run) {
  return ck->tensors[run->tensor].file_offset +
         run->first * (int64_t)mfsdp__ck_element_nbytes(ck, run->tensor);
}

MFSDP_API mfsdp_status mfsdp__ck_write_parts(mfsdp_checkpoint *ck, mfsdp_io_file *file,
                                             const char *path, int64_t offset, size_t nbytes,
                                             const unsigned char *from) {
  size_t done, part;
  for (done = 0; done < nbytes; done += part) {
    part = nbytes - done < ck->stage_nbytes ? nbytes - done : ck->stage_nbytes;
    MFSDP_TRY(mfsdp_io_write(ck->context, &ck->io, file, path, offset + (int64_t)done, part,
                             from + done));
  }
  return MFSDP_OK;
}

/* The runs first .. last - 1 of a file, from *from on; neighbours in the file are written as one. */
MFSDP_API mfsdp_status mfsdp__ck_write_packed(mfsdp_checkpoint *ck, mfsdp_io_file *file,
                                              const char *path, int32_t first, int32_t last,
                                              const unsigned char **from) {
  while (first < last) {
    const int64_t begin = mfsdp__ck_run_offset(ck, &ck->runs[first]);
    size_t nbytes = 0;
    do
      nbytes += mfsdp__ck_run_nbytes(ck, &ck->runs[first++]);
    while (first < last && mfsdp__ck_run_offset(ck, &ck->runs[first]) == begin + (int64_t)nbytes);
    MFSDP_TRY(mfsdp__ck_write_parts(ck, file, path, begin, nbytes, *from));
    if (nbytes > 0) *from += nbytes; /* of nothing: never NULL + 0 */
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_write_snapshot(mfsdp_checkpoint *ck, struct mfsdp__ck_job *job) {
  const unsigned char *from = (const unsigned char *)job->snapshot.data;
  int32_t number, first = 0, last;
  for (number = 0; number < ck->file_count; ++number, first = last) {
    mfsdp_io_file *file = job->files[number];
    mfsdp_status status;
    char name[MFSDP__CK_FILE_NBYTES];
    last = mfsdp__ck_last_run(ck, number, first);
    if (file == NULL) continue;
    mfsdp__ck_file_name(ck, number, name);
    status = mfsdp__ck_write_packed(ck, file, name, first, last, &from);
    if (status == MFSDP_OK) status = mfsdp_io_sync(ck->context, &ck->io, file, name);
    job->files[number] = NULL;
    MFSDP_TRY(mfsdp_io_close(ck->context, &ck->io, file, name, status));
  }
  job->written_nbytes = (int64_t)job->snapshot.nbytes;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__ck_work_write(void *argument) {
  struct mfsdp__ck_job *job = (struct mfsdp__ck_job *)argument;
  job->status = mfsdp__ck_write_snapshot(&job->view, job);
}

MFSDP_API void mfsdp__ck_work_finish(void *argument) {
  struct mfsdp__ck_job *job = (struct mfsdp__ck_job *)argument;
  job->status = mfsdp__ck_finish(&job->view, &job->save);
  if (job->status == MFSDP_OK) job->status = mfsdp__ck_keep_last(&job->view, job->save.step);
}

/* ---- between the threads ---- */

/* Hands the job over. A refused thread is an error of the work: the ranks have agreed to begin. */
MFSDP_API void mfsdp__ck_start_work(mfsdp_checkpoint *ck, void (*work)(void *argument)) {
  struct mfsdp__ck_job *job = ck->job;
  mfsdp_error error = mfsdp_error_none();
  mfsdp_status status;
  job->view = *ck;
  job->view.context = &job->context;
  job->written_nbytes = 0;
  job->status = MFSDP_OK;
  status = job->run.ops->start(job->run.self, work, job, &error);
  if (status == MFSDP_OK) return;
  job->status = MFSDP_FAIL(&job->context, status, "%.200s",
                           error.status == MFSDP_OK ? "background refused" : error.message);
}

MFSDP_API void mfsdp__ck_end_job(mfsdp_checkpoint *ck, mfsdp_status status) {
  mfsdp__ck_close_files(ck);
  mfsdp__ck_end_save(ck, &ck->job->save, status);
  ck->job->phase = MFSDP__CK_IDLE;
}

/* At destroy: without a word to the other ranks. */
MFSDP_API void mfsdp__ck_abandon(mfsdp_checkpoint *ck) {
  struct mfsdp__ck_job *job = ck->job;
  const mfsdp_context_desc *desc = &ck->context->desc;
  const int finished = job->phase == MFSDP__CK_FINISHING;
  job->run.ops->wait(job->run.self);
  if (!finished && desc->log != NULL)
    desc->log(desc->user, MFSDP_LOG_WARNING,
              "checkpoint: a save in the background was given up: nobody waited for it");
  mfsdp__ck_end_job(ck, finished ? job->status : MFSDP_E_STATE);
}

/* This rank's work of a phase has ended: takes the verdict, and begins what comes next. Collective. */
MFSDP_API mfsdp_status mfsdp__ck_advance(mfsdp_checkpoint *ck) {
  struct mfsdp__ck_job *job = ck->job;
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status = job->status;
  own.value = job->written_nbytes;
  if (status != MFSDP_OK)
    (void)MFSDP_FAIL(ck->context, status, "save of step %lld in the background: %.180s",
                     (long long)job->save.step, job->context.error.message);
  status = mfsdp__ck_agree(ck, status, &own);
  if (status == MFSDP_OK && job->phase == MFSDP__CK_WRITING) {
    status = mfsdp__ck_check_written(ck); /* the same on all ranks: of their messages */
    if (status == MFSDP_OK) {
      job->phase = MFSDP__CK_FINISHING;
      job->written_nbytes = 0;
      if (ck->rank == 0) mfsdp__ck_start_work(ck, mfsdp__ck_work_finish);
      return MFSDP_OK;
    }
  }
  mfsdp__ck_end_job(ck, status);
  return status;
}

/* ---- api ---- */

/*
 * Ends the save in the background, if there is one; none is OK. Collective; save, save_begin and load
 * begin with it. COMPLETE: on OK the checkpoint survives a loss of power, and `latest` names it.
 * All ranks return the same status, with the message of the lowest rank whose save failed; then
 * `latest` still names what it named before, and the next save starts anew. Errors: those of
 * mfsdp_checkpoint_save.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_wait(mfsdp_checkpoint *ck) {
  struct mfsdp__ck_job *job = ck->job;
  while (job != NULL && job->phase != MFSDP__CK_IDLE) {
    job->run.ops->wait(job->run.self);
    MFSDP_TRY(mfsdp__ck_advance(ck));
  }
  return MFSDP_OK;
}

/*
 * Looks after the save in the background without waiting for a disk: *running = 0 where there is none
 * or it has ended on all ranks, else 1. Once a step is enough, and often enough for the checkpoint to
 * get its name soon after its last byte. Collective while a save runs (one small gather), no
 * communication otherwise. Errors as mfsdp_checkpoint_wait, once all ranks' parts have ended.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_poll(mfsdp_checkpoint *ck, int32_t *running) {
  struct mfsdp__ck_job *job = ck->job;
  mfsdp__ck_message own = mfsdp__ck_message_default();
  *running = 0;
  if (job == NULL || job->phase == MFSDP__CK_IDLE) return MFSDP_OK;
  own.value = job->run.ops->idle(job->run.self) ? 0 : 1;
  /* Nobody waits for a disk here: a rank that is lost is found out as in a step, not in an hour. */
  MFSDP_TRY(mfsdp__ck_agree_within(ck, MFSDP_OK, &own, ck->rt->groups[0].control->deadline_us));
  *running = ck->told.value != 0; /* how many still write */
  if (*running) return MFSDP_OK;
  MFSDP_TRY(mfsdp__ck_advance(ck));
  *running = job->phase != MFSDP__CK_IDLE;
  return MFSDP_OK;
}

#endif /* MFSDP_CHECKPOINT_BACKGROUND_H */
