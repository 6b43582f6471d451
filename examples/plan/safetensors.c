/* SPDX-License-Identifier: MIT */
#include "safetensors.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

typedef struct open_file {
  FILE *f;
  const char *path;
} open_file;

static mfsdp_status read_at(void *user, int64_t offset, size_t nbytes, void *dst,
                            mfsdp_error *error) {
  const open_file *file = (const open_file *)user;
  if (fseeko(file->f, (off_t)offset, SEEK_SET) == 0 && fread(dst, 1, nbytes, file->f) == nbytes)
    return MFSDP_OK;
  return MFSDP_ERROR_SET(error, MFSDP_E_IO, -1, "cannot read %s: %s", file->path,
                         ferror(file->f) ? strerror(errno) : "it has become shorter");
}

static int read_header(FILE *f, const char *path, plan_safetensors *out, plan_error *error) {
  mfsdp_safetensors_source source = mfsdp_safetensors_source_default();
  open_file file = {f, path};
  struct stat info;
  if (fstat(fileno(f), &info) != 0 || !S_ISREG(info.st_mode))
    return plan_fail(error, "%s is not a regular file", path);
  source.name = path;
  source.file_nbytes = (int64_t)info.st_size;
  source.read = read_at;
  source.user = &file;
  if (mfsdp_safetensors_create(&out->context, &source, &out->file, NULL) == MFSDP_OK)
    return PLAN_OK;
  return plan_fail(error, "%s", mfsdp_context_error(&out->context)->message);
}

int plan_safetensors_read(const char *path, plan_safetensors *out, plan_error *error) {
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  int status;
  FILE *f = fopen(path, "rb");
  memset(out, 0, sizeof *out);
  if (!f) return plan_fail(error, "cannot read %s: %s", path, strerror(errno));
  status = mfsdp_context_init(&out->context, &desc) == MFSDP_OK ? read_header(f, path, out, error)
                                                                : plan_fail(error, "no context");
  fclose(f);
  return status;
}

void plan_safetensors_free(plan_safetensors *st) {
  mfsdp_safetensors_destroy(&st->context, st->file);
  st->file = NULL;
  (void)mfsdp_context_destroy(&st->context);
}
