/* SPDX-License-Identifier: MIT */
/* The reader of safetensors headers. Byte 0 of an input: even: a whole file follows; odd: 2 bytes
 * of little-endian data size follow, then the JSON text. What is taken is looked up, laid out again,
 * written and read once more. */
#include "fuzz.h"

typedef struct virtual_file {
  unsigned char prefix[8];
  const uint8_t *header; /* NULL: `whole` is the file */
  const uint8_t *whole;
  size_t nbytes; /* of what is there to be read */
} virtual_file;

static mfsdp_status read_file(void *user, int64_t offset, size_t nbytes, void *dst,
                              mfsdp_error *error) {
  const virtual_file *file = (const virtual_file *)user;
  (void)error;
  FUZZ_NEED(nbytes > 0 && offset >= 0 && (uint64_t)offset <= file->nbytes &&
            nbytes <= file->nbytes - (size_t)offset);
  if (file->header == NULL) {
    memcpy(dst, file->whole + offset, nbytes);
    return MFSDP_OK;
  }
  FUZZ_NEED(offset == 0 ? nbytes <= 8 : offset >= 8); /* the reader asks for one or the other */
  memcpy(dst, offset == 0 ? file->prefix : file->header + (offset - 8), nbytes);
  return MFSDP_OK;
}

/* The same set of tensors and metadata again, and once more: the same bytes. */
static void check_again(fuzz_rig *rig, const mfsdp_safetensors *file) {
  const int32_t count = mfsdp_safetensors_count(file),
                pairs = mfsdp_safetensors_metadata_count(file);
  mfsdp_safetensors_layout layout;
  mfsdp_safetensors_tensor *tensors;
  mfsdp_safetensors_source source;
  mfsdp_safetensors *again;
  char *header;
  int32_t i;
  mfsdp_status status;
  memset(&layout, 0, sizeof layout);
  tensors = (mfsdp_safetensors_tensor *)calloc((size_t)count + 1, sizeof *tensors);
  FUZZ_NEED(tensors != NULL);
  for (i = 0; i < count; ++i)
    tensors[i] = *mfsdp_safetensors_at(file, i);
  layout.tensors = tensors;
  layout.tensor_count = count;
  layout.metadata = mfsdp_safetensors_metadata_at(file, 0);
  layout.pair_count = pairs;
  rig->most_nbytes = SIZE_MAX; /* offsets and escapes may be longer than they were */
  status = mfsdp_safetensors_layout_make(&rig->context, &layout);
  FUZZ_NEED(status == MFSDP_OK);
  header = (char *)malloc(layout.header_nbytes);
  FUZZ_NEED(header != NULL);
  status = mfsdp_safetensors_header_write(&rig->context, &layout, header, layout.header_nbytes);
  FUZZ_NEED(status == MFSDP_OK && layout.header_nbytes % 8 == 0);
  source = mfsdp_safetensors_source_memory("again", header, layout.header_nbytes);
  source.file_nbytes = layout.file_nbytes;
  status = mfsdp_safetensors_create(&rig->context, &source, &again, NULL);
  FUZZ_NEED(status == MFSDP_OK && mfsdp_safetensors_count(again) == count &&
            mfsdp_safetensors_metadata_count(again) == pairs);
  for (i = 0; i < count; ++i) {
    const mfsdp_safetensors_tensor *t = mfsdp_safetensors_find(again, tensors[i].name);
    FUZZ_NEED(t != NULL && t->dtype == tensors[i].dtype && t->ndim == tensors[i].ndim &&
              t->file_offset == tensors[i].file_offset && t->nbytes == tensors[i].nbytes);
    FUZZ_NEED(t->ndim == 0 || memcmp(t->shape, tensors[i].shape, (size_t)t->ndim * 8) == 0);
  }
  for (i = 0; i < pairs; ++i) {
    const mfsdp_safetensors_pair *pair = mfsdp_safetensors_metadata_at(file, i);
    FUZZ_NEED(strcmp(mfsdp_safetensors_metadata_find(again, pair->key), pair->value) == 0);
  }
  mfsdp_safetensors_destroy(&rig->context, again);
  free(header);
  free(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  virtual_file input;
  mfsdp_safetensors_source source = mfsdp_safetensors_source_default();
  mfsdp_safetensors *file;
  mfsdp_safetensors_fault fault;
  mfsdp_status status;
  fuzz_rig rig;
  int32_t i;
  if (size < 3) return 0;
  memset(&input, 0, sizeof input);
  source.name = "input";
  source.read = read_file;
  source.user = &input;
  if (data[0] % 2 == 0) {
    input.whole = data + 1;
    input.nbytes = size - 1;
    source.file_nbytes = (int64_t)input.nbytes;
  } else {
    input.header = data + 3;
    input.nbytes = 8 + (size - 3);
    for (i = 0; i < 8; ++i)
      input.prefix[i] = (unsigned char)((uint64_t)(size - 3) >> (8 * i) & 0xffu);
    source.file_nbytes = (int64_t)input.nbytes + data[1] + 256 * data[2];
  }
  fuzz_begin(&rig, size);
  status = mfsdp_safetensors_create(&rig.context, &source, &file, &fault);
  fuzz_check_status(&rig, status, fault);
  if (status == MFSDP_OK) {
    for (i = 0; i < mfsdp_safetensors_count(file); ++i) {
      const mfsdp_safetensors_tensor *t = mfsdp_safetensors_at(file, i);
      FUZZ_NEED(mfsdp_safetensors_find(file, t->name) == t);
      FUZZ_NEED(t->file_offset >= 10 && t->nbytes >= 0 &&
                t->file_offset <= source.file_nbytes - t->nbytes);
    }
    check_again(&rig, file);
    mfsdp_safetensors_destroy(&rig.context, file);
  }
  fuzz_end(&rig);
  return 0;
}
