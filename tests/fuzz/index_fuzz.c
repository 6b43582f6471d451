/* SPDX-License-Identifier: MIT */
/* The reader of model.safetensors.index.json: an input is its text. What is taken is looked up,
 * written and read once more. */
#include "fuzz.h"

static void check_again(fuzz_rig *rig, const mfsdp_safetensors_index *index) {
  const int32_t count = mfsdp_safetensors_index_count(index);
  const int64_t said = mfsdp_safetensors_index_total_nbytes(index), total = said < 0 ? 0 : said;
  const mfsdp_safetensors_pair *pairs = mfsdp_safetensors_index_at(index, 0);
  mfsdp_safetensors_source source;
  mfsdp_safetensors_index *again;
  char *text;
  size_t nbytes;
  int32_t i;
  mfsdp_status status;
  rig->most_nbytes = SIZE_MAX; /* blanks may be more than there were */
  status = mfsdp_safetensors_index_write(&rig->context, pairs, count, total, NULL, 0, &nbytes);
  FUZZ_NEED(status == MFSDP_OK);
  text = (char *)malloc(nbytes);
  FUZZ_NEED(text != NULL);
  status = mfsdp_safetensors_index_write(&rig->context, pairs, count, total, text, nbytes, &nbytes);
  FUZZ_NEED(status == MFSDP_OK);
  source = mfsdp_safetensors_source_memory("again", text, nbytes);
  status = mfsdp_safetensors_index_create(&rig->context, &source, &again, NULL);
  FUZZ_NEED(status == MFSDP_OK && mfsdp_safetensors_index_count(again) == count &&
            mfsdp_safetensors_index_total_nbytes(again) == total &&
            mfsdp_safetensors_index_file_count(again) == mfsdp_safetensors_index_file_count(index));
  for (i = 0; i < count; ++i)
    FUZZ_NEED(strcmp(mfsdp_safetensors_index_find(again, pairs[i].key), pairs[i].value) == 0);
  mfsdp_safetensors_index_destroy(&rig->context, again);
  free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const mfsdp_safetensors_source source = mfsdp_safetensors_source_memory("input", data, size);
  mfsdp_safetensors_index *index;
  mfsdp_safetensors_fault fault;
  mfsdp_status status;
  fuzz_rig rig;
  int32_t i;
  fuzz_begin(&rig, size);
  status = mfsdp_safetensors_index_create(&rig.context, &source, &index, &fault);
  fuzz_check_status(&rig, status, fault);
  if (status == MFSDP_OK) {
    for (i = 0; i < mfsdp_safetensors_index_count(index); ++i) {
      const mfsdp_safetensors_pair *pair = mfsdp_safetensors_index_at(index, i);
      FUZZ_NEED(mfsdp_safetensors_index_find(index, pair->key) == pair->value);
      FUZZ_NEED(strpbrk(pair->value, "/\\:") == NULL && strcmp(pair->value, "..") != 0);
    }
    for (i = 1; i < mfsdp_safetensors_index_file_count(index); ++i)
      FUZZ_NEED(strcmp(mfsdp_safetensors_index_file_at(index, i - 1),
                       mfsdp_safetensors_index_file_at(index, i)) < 0);
    check_again(&rig, index);
    mfsdp_safetensors_index_destroy(&rig.context, index);
  }
  fuzz_end(&rig);
  return 0;
}
