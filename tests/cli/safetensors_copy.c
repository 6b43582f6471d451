/* SPDX-License-Identifier: MIT */
/* For safetensors_python.sh:  safetensors_copy IN OUT  reads a file with safetensors.h and writes its
 * tensors and metadata anew;  safetensors_copy --check FILE...  prints a line "ok" or a fault each. */
#include "mfsdp/safetensors.h"

#include <stdio.h>

static char *read_all(const char *path, size_t *nbytes) {
  FILE *f = fopen(path, "rb");
  char *data = (char *)malloc(16u << 20);
  *nbytes = f != NULL && data != NULL ? fread(data, 1, 16u << 20, f) : 0;
  if (f != NULL) fclose(f);
  return data;
}

static mfsdp_status copy(mfsdp_context *context, const mfsdp_safetensors *file, const char *data,
                         const char *path) {
  static mfsdp_safetensors_tensor tensors[4096];
  mfsdp_safetensors_layout layout = {tensors, 0, NULL, 0, 0, 0};
  const int32_t count = mfsdp_safetensors_count(file);
  char *out;
  FILE *f;
  if (count > 4096) return MFSDP_E_UNSUPPORTED;
  for (int32_t i = 0; i < count; ++i)
    tensors[i] = *mfsdp_safetensors_at(file, i);
  layout.tensor_count = count;
  layout.metadata = mfsdp_safetensors_metadata_at(file, 0);
  layout.pair_count = mfsdp_safetensors_metadata_count(file);
  MFSDP_TRY(mfsdp_safetensors_layout_make(context, &layout));
  out = (char *)malloc((size_t)layout.file_nbytes);
  f = fopen(path, "wb");
  if (out == NULL || f == NULL) return MFSDP_E_IO;
  MFSDP_TRY(mfsdp_safetensors_header_write(context, &layout, out, layout.header_nbytes));
  for (int32_t i = 0; i < count; ++i)
    memcpy(out + tensors[i].file_offset, data + mfsdp_safetensors_at(file, i)->file_offset,
           (size_t)tensors[i].nbytes);
  if (fwrite(out, 1, (size_t)layout.file_nbytes, f) != (size_t)layout.file_nbytes)
    return MFSDP_E_IO;
  free(out);
  return fclose(f) == 0 ? MFSDP_OK : MFSDP_E_IO;
}

int main(int argc, char **argv) {
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  const int check = argc > 1 && strcmp(argv[1], "--check") == 0;
  mfsdp_context context;
  mfsdp_status status = mfsdp_context_init(&context, &desc);
  if (status != MFSDP_OK || (!check && argc != 3)) return 2;
  for (int i = check ? 2 : 1; i < (check ? argc : 2); ++i) {
    size_t nbytes;
    char *data = read_all(argv[i], &nbytes);
    const mfsdp_safetensors_source source = mfsdp_safetensors_source_memory(argv[i], data, nbytes);
    mfsdp_safetensors *file;
    mfsdp_safetensors_fault fault;
    status = mfsdp_safetensors_create(&context, &source, &file, &fault);
    if (check) printf("%s\n", status == MFSDP_OK ? "ok" : mfsdp_safetensors_fault_name(fault));
    if (!check && status == MFSDP_OK) status = copy(&context, file, data, argv[2]);
    mfsdp_safetensors_destroy(&context, file);
    free(data);
  }
  if (!check && status != MFSDP_OK) fprintf(stderr, "%s\n", mfsdp_context_error(&context)->message);
  return check || status == MFSDP_OK ? 0 : 1;
}
