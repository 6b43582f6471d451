/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/folder.h - the names in the folder of checkpoints, and the changes that a loss of power
 * may interrupt anywhere. Private to checkpoint.h; only rank 0 changes anything.
 *
 *   step-12/           a checkpoint: complete, since it got its name after everything was synced
 *   step-12.attempt/   being written, or being removed; nobody reads it
 *   step-12.old/       what step-12 was before it was saved again, until `latest` is in place
 *   latest             a file that holds the name "step-12"
 *   lock               held by the rank 0 that saves
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_FOLDER_H
#define MFSDP_CHECKPOINT_FOLDER_H

#include "create.h"

#define MFSDP__CK_STATE_FILE "state.safetensors"

/* The longest: folder of 512, name of 40, file of 240 bytes. */
typedef struct mfsdp__ck_path {
  char text[MFSDP__CK_PATH_NBYTES];
} mfsdp__ck_path;

/* folder/name, or folder/name/file. */
MFSDP_API mfsdp__ck_path mfsdp__ck_path_of(const mfsdp_checkpoint *ck, const char *name,
                                           const char *file) {
  mfsdp__ck_path path;
  (void)snprintf(path.text, sizeof(path.text), "%.512s/%.200s%s%.240s", ck->folder, name,
                 file == NULL ? "" : "/", file == NULL ? "" : file);
  return path;
}

typedef enum mfsdp__ck_kind {
  MFSDP__CK_OTHER = 0,
  MFSDP__CK_STEP,
  MFSDP__CK_ATTEMPT,
  MFSDP__CK_OLD
} mfsdp__ck_kind;

/* What a name of the folder is; *step is set unless it is OTHER. */
MFSDP_API mfsdp__ck_kind mfsdp__ck_parse(const char *name, int64_t *step) {
  int64_t value = 0;
  int digits = 0;
  if (strncmp(name, "step-", 5) != 0) return MFSDP__CK_OTHER;
  name += 5;
  if (name[0] == '0' && name[1] >= '0' && name[1] <= '9') return MFSDP__CK_OTHER;
  for (; *name >= '0' && *name <= '9' && digits < 19; ++name, ++digits)
    if (!mfsdp_i64_mul(value, 10, &value) || !mfsdp_i64_add(value, *name - '0', &value))
      return MFSDP__CK_OTHER;
  if (digits == 0) return MFSDP__CK_OTHER;
  *step = value;
  if (*name == '\0') return MFSDP__CK_STEP;
  if (strcmp(name, ".attempt") == 0) return MFSDP__CK_ATTEMPT;
  return strcmp(name, ".old") == 0 ? MFSDP__CK_OLD : MFSDP__CK_OTHER;
}

MFSDP_API void mfsdp__ck_name(int64_t step, const char *suffix, char *name) {
  (void)snprintf(name, MFSDP_CHECKPOINT_NAME_NBYTES, "step-%lld%s", (long long)step, suffix);
}

/* ---- looking ---- */

typedef struct mfsdp__ck_look {
  const char *name; /* has this one? */
  int found;
  mfsdp__ck_kind kind; /* the first of this kind */
  int64_t avoid;       /* a step that the smallest shall not be */
  int64_t step, count; /* of `kind`: a step, how many */
  int64_t largest, smallest;
  int64_t below; /* largest below this one */
  char any[300]; /* the first name of all */
} mfsdp__ck_look;

MFSDP_API void mfsdp__ck_visit(void *user, const char *name) {
  mfsdp__ck_look *look = (mfsdp__ck_look *)user;
  int64_t step = 0;
  if (look->any[0] == '\0') (void)snprintf(look->any, sizeof(look->any), "%.299s", name);
  /* As far as `any` goes: a longer name is known again by what was kept of it. */
  if (look->name != NULL && strncmp(name, look->name, sizeof(look->any) - 1) == 0) look->found = 1;
  if (look->kind == MFSDP__CK_OTHER || mfsdp__ck_parse(name, &step) != look->kind) return;
  look->step = step;
  ++look->count;
  if (step < look->below && step > look->largest) look->largest = step;
  if (step != look->avoid && (look->smallest < 0 || step < look->smallest)) look->smallest = step;
}

MFSDP_API mfsdp_status mfsdp__ck_look_at(mfsdp_checkpoint *ck, const char *path,
                                         mfsdp__ck_kind kind, const char *name,
                                         mfsdp__ck_look *look) {
  memset(look, 0, sizeof(*look));
  look->kind = kind;
  look->name = name;
  look->largest = look->smallest = look->avoid = -1;
  look->below = INT64_MAX;
  return mfsdp_io_list(ck->context, &ck->io, path, mfsdp__ck_visit, look);
}

/* *found = 1 if folder/name (name NULL: the folder) has `file`. */
MFSDP_API mfsdp_status mfsdp__ck_has(mfsdp_checkpoint *ck, const char *name, const char *file,
                                     int *found) {
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, name == NULL ? "." : name, NULL);
  mfsdp__ck_look look;
  MFSDP_TRY(mfsdp__ck_look_at(ck, path.text, MFSDP__CK_OTHER, file, &look));
  *found = look.found;
  return MFSDP_OK;
}

/* *whole = 1 if the folder holds a whole checkpoint of that name. */
MFSDP_API mfsdp_status mfsdp__ck_is_whole(mfsdp_checkpoint *ck, const char *name, int *whole) {
  MFSDP_TRY(mfsdp__ck_has(ck, NULL, name, whole));
  return *whole ? mfsdp__ck_has(ck, name, MFSDP__CK_STATE_FILE, whole) : MFSDP_OK;
}

/* What `latest` says; empty where there is none. */
MFSDP_API mfsdp_status mfsdp__ck_read_latest(mfsdp_checkpoint *ck, char *name) {
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, "latest", NULL);
  mfsdp_io_file *file;
  mfsdp_status status;
  int64_t nbytes = 0, step;
  int there;
  name[0] = '\0';
  MFSDP_TRY(mfsdp__ck_has(ck, NULL, "latest", &there));
  if (!there) return MFSDP_OK;
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_READ, &file));
  status = mfsdp_io_size(ck->context, &ck->io, file, path.text, &nbytes);
  if (status == MFSDP_OK && (nbytes < 2 || nbytes >= MFSDP_CHECKPOINT_NAME_NBYTES)) nbytes = 0;
  if (status == MFSDP_OK)
    status = mfsdp_io_read(ck->context, &ck->io, file, path.text, 0, (size_t)nbytes, name);
  MFSDP_TRY(mfsdp_io_close(ck->context, &ck->io, file, path.text, status));
  if (nbytes > 0 && name[nbytes - 1] == '\n') {
    name[nbytes - 1] = '\0';
    if (mfsdp__ck_parse(name, &step) == MFSDP__CK_STEP) return MFSDP_OK;
  }
  return MFSDP_FAIL(ck->context, MFSDP_E_FORMAT, "%.200s does not hold a name like step-12",
                    path.text);
}

/* The checkpoint to load: what `latest` names; if that is gone, what it was before; else the newest
 * whole one. */
MFSDP_API mfsdp_status mfsdp__ck_find_latest(mfsdp_checkpoint *ck, char *name) {
  mfsdp__ck_look look;
  int64_t below = INT64_MAX;
  int whole = 0, pass;
  char old[MFSDP_CHECKPOINT_NAME_NBYTES];
  MFSDP_TRY(mfsdp__ck_read_latest(ck, name));
  if (name[0] != '\0') {
    MFSDP_TRY(mfsdp__ck_is_whole(ck, name, &whole));
    if (whole) return MFSDP_OK;
    (void)snprintf(old, sizeof(old), "%.30s.old", name);
    MFSDP_TRY(mfsdp__ck_is_whole(ck, old, &whole));
    if (whole) {
      memcpy(name, old, sizeof(old));
      return MFSDP_OK;
    }
  }
  for (pass = 0; pass < 1000000; ++pass) {
    memset(&look, 0, sizeof(look));
    look.kind = MFSDP__CK_STEP;
    look.largest = look.smallest = look.avoid = -1;
    look.below = below;
    MFSDP_TRY(mfsdp_io_list(ck->context, &ck->io, ck->folder, mfsdp__ck_visit, &look));
    if (look.largest < 0) break;
    mfsdp__ck_name(look.largest, "", name);
    MFSDP_TRY(mfsdp__ck_is_whole(ck, name, &whole));
    if (whole) return MFSDP_OK;
    below = look.largest;
  }
  name[0] = '\0';
  return MFSDP_FAIL(ck->context, MFSDP_E_IO, "there is no whole checkpoint in %.200s", ck->folder);
}

/* ---- changing ---- */

/*
 * The loops below take names away until a look into the folder finds none. E_IO: the io table answered
 * "removed" or "renamed" and the look still finds that name; they would go on for ever. folder/name
 * (NULL: the folder of checkpoints) has look->name.
 */
MFSDP_API mfsdp_status mfsdp__ck_check_gone(mfsdp_checkpoint *ck, const char *name,
                                            const mfsdp__ck_look *look) {
  const mfsdp__ck_path path = name == NULL ? mfsdp__ck_path_of(ck, look->name, NULL)
                                           : mfsdp__ck_path_of(ck, name, look->name);
  if (!look->found) return MFSDP_OK;
  return MFSDP_FAIL(ck->context, MFSDP_E_IO,
                    "%.200s: the io table removed or renamed it, and still lists it", path.text);
}

/* Removes a folder with its files. Nobody may need it any more: the order of removals is not kept. */
MFSDP_API mfsdp_status mfsdp__ck_remove_folder(mfsdp_checkpoint *ck, const char *name) {
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, name, NULL);
  char gone[sizeof(((mfsdp__ck_look *)0)->any)] = "";
  for (;;) {
    mfsdp__ck_look look;
    mfsdp__ck_path file;
    MFSDP_TRY(mfsdp__ck_look_at(ck, path.text, MFSDP__CK_OTHER, gone, &look));
    MFSDP_TRY(mfsdp__ck_check_gone(ck, name, &look));
    if (look.any[0] == '\0') break;
    file = mfsdp__ck_path_of(ck, name, look.any);
    MFSDP_TRY(mfsdp_io_remove(ck->context, &ck->io, file.text));
    memcpy(gone, look.any, sizeof(gone));
  }
  return mfsdp_io_remove(ck->context, &ck->io, path.text);
}

/* Takes a name out of sight, durably, and then its files away. */
MFSDP_API mfsdp_status mfsdp__ck_retire(mfsdp_checkpoint *ck, int64_t step, const char *suffix) {
  char name[MFSDP_CHECKPOINT_NAME_NBYTES], attempt[MFSDP_CHECKPOINT_NAME_NBYTES];
  mfsdp__ck_path from, to;
  mfsdp__ck_name(step, suffix, name);
  mfsdp__ck_name(step, ".attempt", attempt);
  from = mfsdp__ck_path_of(ck, name, NULL);
  to = mfsdp__ck_path_of(ck, attempt, NULL);
  MFSDP_TRY(mfsdp_io_rename(ck->context, &ck->io, from.text, to.text));
  MFSDP_TRY(mfsdp_io_sync_folder(ck->context, &ck->io, ck->folder));
  return mfsdp__ck_remove_folder(ck, attempt);
}

/* What an earlier save left: attempts go, and an old one comes back if nothing took its place. */
MFSDP_API mfsdp_status mfsdp__ck_clean(mfsdp_checkpoint *ck) {
  char name[MFSDP_CHECKPOINT_NAME_NBYTES] = "", old[MFSDP_CHECKPOINT_NAME_NBYTES] = "";
  mfsdp__ck_look look;
  int whole = 0;
  for (;;) {
    MFSDP_TRY(mfsdp__ck_look_at(ck, ck->folder, MFSDP__CK_ATTEMPT, name, &look));
    MFSDP_TRY(mfsdp__ck_check_gone(ck, NULL, &look));
    if (look.count == 0) break;
    mfsdp__ck_name(look.step, ".attempt", name);
    MFSDP_TRY(mfsdp__ck_remove_folder(ck, name));
  }
  for (;;) {
    MFSDP_TRY(mfsdp__ck_look_at(ck, ck->folder, MFSDP__CK_OLD, old, &look));
    MFSDP_TRY(mfsdp__ck_check_gone(ck, NULL, &look));
    if (look.count == 0) return MFSDP_OK;
    mfsdp__ck_name(look.step, "", name);
    mfsdp__ck_name(look.step, ".old", old);
    MFSDP_TRY(mfsdp__ck_is_whole(ck, name, &whole));
    if (whole) {
      MFSDP_TRY(mfsdp__ck_retire(ck, look.step, ".old"));
    } else {
      const mfsdp__ck_path from = mfsdp__ck_path_of(ck, old, NULL);
      const mfsdp__ck_path to = mfsdp__ck_path_of(ck, name, NULL);
      MFSDP_TRY(mfsdp_io_rename(ck->context, &ck->io, from.text, to.text));
      MFSDP_TRY(mfsdp_io_sync_folder(ck->context, &ck->io, ck->folder));
    }
  }
}

/* Writes a small file whole; who publishes it syncs it before. */
MFSDP_API mfsdp_status mfsdp__ck_write_file(mfsdp_checkpoint *ck, const char *path,
                                            const void *data, size_t nbytes) {
  mfsdp_io_file *file;
  mfsdp_status status;
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path, MFSDP_IO_CREATE, &file));
  status = mfsdp_io_write(ck->context, &ck->io, file, path, 0, nbytes, data);
  return mfsdp_io_close(ck->context, &ck->io, file, path, status);
}

MFSDP_API mfsdp_status mfsdp__ck_sync_path(mfsdp_checkpoint *ck, const char *path) {
  mfsdp_io_file *file;
  mfsdp_status status;
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path, MFSDP_IO_WRITE, &file));
  status = mfsdp_io_sync(ck->context, &ck->io, file, path);
  return mfsdp_io_close(ck->context, &ck->io, file, path, status);
}

MFSDP_API mfsdp_status mfsdp__ck_write_latest(mfsdp_checkpoint *ck, int64_t step) {
  const mfsdp__ck_path temporary = mfsdp__ck_path_of(ck, "latest.tmp", NULL);
  const mfsdp__ck_path latest = mfsdp__ck_path_of(ck, "latest", NULL);
  char name[MFSDP_CHECKPOINT_NAME_NBYTES + 1];
  mfsdp__ck_name(step, "\n", name);
  MFSDP_TRY(mfsdp__ck_write_file(ck, temporary.text, name, strlen(name)));
  MFSDP_TRY(mfsdp__ck_sync_path(ck, temporary.text));
  MFSDP_TRY(mfsdp_io_rename(ck->context, &ck->io, temporary.text, latest.text));
  return mfsdp_io_sync_folder(ck->context, &ck->io, ck->folder);
}

/* Gives a finished attempt its name, and `latest` the same. */
MFSDP_API mfsdp_status mfsdp__ck_publish(mfsdp_checkpoint *ck, int64_t step) {
  char attempt[MFSDP_CHECKPOINT_NAME_NBYTES], name[MFSDP_CHECKPOINT_NAME_NBYTES];
  char old[MFSDP_CHECKPOINT_NAME_NBYTES];
  mfsdp__ck_path from, to, aside;
  int again = 0;
  mfsdp__ck_name(step, ".attempt", attempt);
  mfsdp__ck_name(step, "", name);
  mfsdp__ck_name(step, ".old", old);
  from = mfsdp__ck_path_of(ck, attempt, NULL);
  to = mfsdp__ck_path_of(ck, name, NULL);
  aside = mfsdp__ck_path_of(ck, old, NULL);
  MFSDP_TRY(mfsdp__ck_has(ck, NULL, name, &again));
  if (again) MFSDP_TRY(mfsdp_io_rename(ck->context, &ck->io, to.text, aside.text));
  MFSDP_TRY(mfsdp_io_rename(ck->context, &ck->io, from.text, to.text));
  MFSDP_TRY(mfsdp_io_sync_folder(ck->context, &ck->io, ck->folder));
  MFSDP_TRY(mfsdp__ck_write_latest(ck, step));
  return again ? mfsdp__ck_retire(ck, step, ".old") : MFSDP_OK;
}

/* Removes the oldest until keep_last are left; never `step`, which latest names. */
MFSDP_API mfsdp_status mfsdp__ck_keep_last(mfsdp_checkpoint *ck, int64_t step) {
  char gone[MFSDP_CHECKPOINT_NAME_NBYTES] = "";
  while (ck->keep_last > 0) {
    mfsdp__ck_look look;
    memset(&look, 0, sizeof(look));
    look.kind = MFSDP__CK_STEP;
    look.largest = look.smallest = -1;
    look.avoid = step;
    look.below = INT64_MAX;
    look.name = gone;
    MFSDP_TRY(mfsdp_io_list(ck->context, &ck->io, ck->folder, mfsdp__ck_visit, &look));
    MFSDP_TRY(mfsdp__ck_check_gone(ck, NULL, &look));
    if (look.count <= ck->keep_last || look.smallest < 0) return MFSDP_OK;
    mfsdp__ck_name(look.smallest, "", gone);
    MFSDP_TRY(mfsdp__ck_retire(ck, look.smallest, ""));
  }
  return MFSDP_OK;
}

/* Makes the name of the folder of checkpoints durable in the folder above. */
MFSDP_API mfsdp_status mfsdp__ck_sync_above(mfsdp_checkpoint *ck) {
  char parent[MFSDP__CK_PATH_NBYTES];
  size_t length;
  (void)snprintf(parent, sizeof(parent), "%.512s", ck->folder);
  length = strlen(parent);
  while (length > 1 && parent[length - 1] == '/')
    --length;
  while (length > 0 && parent[length - 1] != '/')
    --length;
  if (length == 0)
    (void)snprintf(parent, sizeof(parent), ".");
  else
    parent[length] = '\0';
  return mfsdp_io_sync_folder(ck->context, &ck->io, parent);
}

/*
 * Makes the folder of checkpoints. Its name must be durable before the first `latest`, also where a
 * process that was killed made it; one that someone else made may lie where we are not allowed to
 * sync, and is then theirs.
 */
MFSDP_API mfsdp_status mfsdp__ck_make_root(mfsdp_checkpoint *ck) {
  mfsdp_error before;
  int32_t existed = 0;
  int there = 0;
  MFSDP_TRY(mfsdp_io_make_folder(ck->context, &ck->io, ck->folder, &existed));
  if (!existed) return mfsdp__ck_sync_above(ck);
  MFSDP_TRY(mfsdp__ck_has(ck, NULL, "latest", &there));
  before = ck->context->error;
  if (!there) (void)mfsdp__ck_sync_above(ck);
  ck->context->error = before;
  return MFSDP_OK;
}

#endif /* MFSDP_CHECKPOINT_FOLDER_H */
