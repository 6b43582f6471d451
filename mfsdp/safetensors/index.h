/* SPDX-License-Identifier: MIT */
/*
 * safetensors/index.h - model.safetensors.index.json: which file of several holds a tensor.
 *
 *   {"metadata": {"total_size": 123}, "weight_map": {"a": "model-00001-of-00002.safetensors", ...}}
 *
 *   MFSDP_TRY(mfsdp_safetensors_index_create(&context, &source, &index, NULL));
 *   file = mfsdp_safetensors_index_find(index, "layers.0.weight");     // NULL: no such tensor
 *   mfsdp_safetensors_index_destroy(&context, index);
 *
 * File names are plain: what would leave the folder of the index is refused. Members that this
 * reader does not know are skipped.
 * Does not: open the files, or compare them with the index.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_INDEX_H
#define MFSDP_SAFETENSORS_INDEX_H

#include "write.h"

/* A checked index. Its fields are private: the functions below read them. */
typedef struct mfsdp_safetensors_index {
  char *text; /* strings decoded in place */
  size_t text_nbytes;
  mfsdp_safetensors_pair *pairs; /* tensor, file; in the order of the text */
  const char **files;            /* distinct, sorted; room for pair_count */
  uint32_t *order;               /* pairs by tensor; scratch: 3 * pair_count in all */
  size_t pair_count, file_count;
  int64_t total_nbytes; /* -1: not said */
} mfsdp_safetensors_index;

typedef struct mfsdp__st_index_parser {
  mfsdp__json json;
  mfsdp_safetensors_index *index;
  int is_filling; /* 0: count only */
  size_t pair_count;
  unsigned seen; /* 1: metadata, 2: weight_map, 4: total_size */
} mfsdp__st_index_parser;

/* 1 for a plain name of a file, which stays in its folder on every system. */
MFSDP_API int mfsdp__st_index_is_file(const char *name) {
  return name[0] != '\0' && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
         strpbrk(name, "/\\:") == NULL;
}

/* The same for a string that is not decoded yet. */
MFSDP_API int mfsdp__st_index_is_file_token(const mfsdp__json *json, mfsdp__json_token token) {
  const char *text = json->text + token.first;
  size_t i = 0;
  if (token.nbytes == 0 || token.has_control || mfsdp__json_is(json, token, ".") ||
      mfsdp__json_is(json, token, ".."))
    return 0;
  while (i < token.nbytes) {
    uint32_t code = (unsigned char)text[i];
    size_t length = 1;
    if (code == '\\') (void)mfsdp__json_escape(text + i, token.nbytes - i, &code, &length);
    if (code == '/' || code == '\\' || code == ':') return 0;
    i += length;
  }
  return 1;
}

MFSDP_API mfsdp_status mfsdp__st_index_once(mfsdp__st_index_parser *p, unsigned bit) {
  if (p->seen & bit) return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_SECTION_TWICE, "");
  p->seen |= bit;
  return MFSDP_OK;
}

/* A whole number of bytes; some writers end it in ".0". */
MFSDP_API mfsdp_status mfsdp__st_index_total(mfsdp__st_index_parser *p) {
  mfsdp__json *json = &p->json;
  MFSDP_TRY(mfsdp__st_index_once(p, 4u));
  MFSDP_TRY(mfsdp__json_digits(json, &p->index->total_nbytes));
  if (mfsdp__json_peek(json) == '.') {
    ++json->at;
    if (mfsdp__json_peek(json) != '0')
      return mfsdp__json_refuse(json, MFSDP_SAFETENSORS_FAULT_NUMBER, "");
    while (mfsdp__json_peek(json) == '0')
      ++json->at;
  }
  mfsdp__json_blanks(json);
  if (mfsdp__json_peek(json) == ',' || mfsdp__json_peek(json) == '}') return MFSDP_OK;
  return mfsdp__json_refuse(json, MFSDP_SAFETENSORS_FAULT_NUMBER, "");
}

MFSDP_API mfsdp_status mfsdp__st_index_metadata(mfsdp__st_index_parser *p) {
  mfsdp__json_token key;
  MFSDP_TRY(mfsdp__st_index_once(p, 1u));
  if (!mfsdp__json_take(&p->json, '{'))
    return mfsdp__json_refuse(&p->json, MFSDP_SAFETENSORS_FAULT_NEEDS_OBJECT, "");
  if (mfsdp__json_take(&p->json, '}')) return MFSDP_OK;
  do {
    MFSDP_TRY(mfsdp__json_key(&p->json, &key));
    if (mfsdp__json_is(&p->json, key, "total_size"))
      MFSDP_TRY(mfsdp__st_index_total(p));
    else
      MFSDP_TRY(mfsdp__json_skip(&p->json));
  } while (mfsdp__json_take(&p->json, ','));
  return mfsdp__json_expect(&p->json, '}', ", or } in metadata");
}

MFSDP_API mfsdp_status mfsdp__st_index_entry(mfsdp__st_index_parser *p) {
  mfsdp__json_token name, file;
  MFSDP_TRY(mfsdp__json_key(&p->json, &name));
  if (name.nbytes == 0) return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_NAME_EMPTY, "");
  if (name.has_control) return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_NAME_CONTROL, "");
  MFSDP_TRY(mfsdp__json_string(&p->json, &file));
  if (p->is_filling) {
    mfsdp_safetensors_pair *pair = &p->index->pairs[p->pair_count];
    pair->key = mfsdp__json_decode(&p->json, name);
    pair->value = mfsdp__json_decode(&p->json, file);
  } else if (!mfsdp__st_index_is_file_token(&p->json, file)) {
    return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_FILE_NAME, "");
  }
  ++p->pair_count;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__st_index_weight_map(mfsdp__st_index_parser *p) {
  MFSDP_TRY(mfsdp__st_index_once(p, 2u));
  if (!mfsdp__json_take(&p->json, '{'))
    return mfsdp__json_refuse(&p->json, MFSDP_SAFETENSORS_FAULT_NEEDS_OBJECT, "");
  if (mfsdp__json_take(&p->json, '}')) return MFSDP_OK;
  do
    MFSDP_TRY(mfsdp__st_index_entry(p));
  while (mfsdp__json_take(&p->json, ','));
  return mfsdp__json_expect(&p->json, '}', ", or } in weight_map");
}

/* The whole text. Counts, and fills if there is what to fill. */
MFSDP_API mfsdp_status mfsdp__st_index_parse(mfsdp__st_index_parser *p) {
  mfsdp__json_token key;
  p->json.at = p->pair_count = 0;
  p->seen = 0;
  if (!mfsdp__json_take(&p->json, '{'))
    return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_START, "");
  if (!mfsdp__json_take(&p->json, '}')) {
    do {
      MFSDP_TRY(mfsdp__json_key(&p->json, &key));
      if (mfsdp__json_is(&p->json, key, "metadata"))
        MFSDP_TRY(mfsdp__st_index_metadata(p));
      else if (mfsdp__json_is(&p->json, key, "weight_map"))
        MFSDP_TRY(mfsdp__st_index_weight_map(p));
      else
        MFSDP_TRY(mfsdp__json_skip(&p->json));
    } while (mfsdp__json_take(&p->json, ','));
    MFSDP_TRY(mfsdp__json_expect(&p->json, '}', ", or }"));
  }
  if (p->json.at != p->json.nbytes)
    return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_TRAILING, "");
  if (p->seen & 2u) return MFSDP_OK;
  return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_NO_WEIGHT_MAP, "");
}

MFSDP_API int mfsdp__st_less_by_value(const void *table, uint32_t a, uint32_t b) {
  const mfsdp_safetensors_pair *pairs = (const mfsdp_safetensors_pair *)table;
  return strcmp(pairs[a].value, pairs[b].value) < 0;
}

/* The list of files, the sorted view, and no tensor twice. */
MFSDP_API mfsdp_status mfsdp__st_index_check_together(mfsdp__st_index_parser *p) {
  mfsdp_safetensors_index *index = p->index;
  uint32_t *by_name = index->order, *by_file = by_name + index->pair_count;
  uint32_t *scratch = by_file + index->pair_count;
  size_t i;
  mfsdp__st_sort(by_name, scratch, index->pair_count, mfsdp__st_less_by_key, index->pairs);
  for (i = 1; i < index->pair_count; ++i)
    if (strcmp(index->pairs[by_name[i]].key, index->pairs[by_name[i - 1]].key) == 0)
      return mfsdp__st_fail(&p->json, index->pairs[by_name[i]].key,
                            MFSDP_SAFETENSORS_FAULT_NAME_TWICE, "%s", "");
  mfsdp__st_sort(by_file, scratch, index->pair_count, mfsdp__st_less_by_value, index->pairs);
  for (i = 0; i < index->pair_count; ++i) {
    mfsdp_safetensors_pair *pair = &index->pairs[by_file[i]];
    if (index->file_count == 0 || strcmp(index->files[index->file_count - 1], pair->value) != 0)
      index->files[index->file_count++] = pair->value;
    pair->value = index->files[index->file_count - 1]; /* one pointer for one file */
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__st_index_alloc(mfsdp__st_index_parser *p) {
  mfsdp_context *context = p->json.context;
  mfsdp_safetensors_index *index = p->index;
  void *block;
  index->pair_count = p->pair_count;
  MFSDP_TRY(mfsdp_table_alloc(context, index->pair_count, sizeof(*index->pairs),
                              "tensors of an index", &block));
  index->pairs = (mfsdp_safetensors_pair *)block;
  MFSDP_TRY(mfsdp_table_alloc(context, index->pair_count, sizeof(*index->files),
                              "files of an index", &block));
  index->files = (const char **)block;
  MFSDP_TRY(mfsdp_table_alloc(context, index->pair_count + 1, 3 * sizeof(*index->order),
                              "order of an index", &block)); /* never none: never NULL + 0 */
  index->order = (uint32_t *)block;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__st_index_fill(mfsdp_context *context,
                                            const mfsdp_safetensors_source *source,
                                            mfsdp_safetensors_index *index,
                                            mfsdp_safetensors_fault *fault) {
  mfsdp__st_index_parser p;
  mfsdp_status status;
  void *text;
  if (source->file_nbytes > MFSDP_SAFETENSORS_MAX_HEADER_NBYTES) {
    *fault = MFSDP_SAFETENSORS_FAULT_HEADER_LARGE;
    return MFSDP_FAIL(context, MFSDP_E_FORMAT,
                      "%.120s: the index has %lld bytes, at most %d are allowed", source->name,
                      (long long)source->file_nbytes, MFSDP_SAFETENSORS_MAX_HEADER_NBYTES);
  }
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)source->file_nbytes, 1, "text of an index", &text));
  index->text = (char *)text;
  index->text_nbytes = (size_t)source->file_nbytes;
  MFSDP_TRY(mfsdp_safetensors_source_read(context, source, 0, index->text_nbytes, text));
  memset(&p, 0, sizeof(p));
  p.json.context = context;
  p.json.name = source->name;
  p.json.unit = "byte";
  p.json.text = index->text;
  p.json.nbytes = index->text_nbytes;
  p.index = index;
  status = mfsdp__st_index_parse(&p);
  if (status == MFSDP_OK) status = mfsdp__st_index_alloc(&p);
  if (status == MFSDP_OK) {
    p.is_filling = 1;
    status = mfsdp__st_index_parse(&p);
  }
  if (status == MFSDP_OK) status = mfsdp__st_index_check_together(&p);
  *fault = p.json.fault;
  return status;
}

/* Gives everything back. NULL is allowed. `context` is the one of the creation. */
MFSDP_API void mfsdp_safetensors_index_destroy(mfsdp_context *context,
                                               mfsdp_safetensors_index *index) {
  if (index == NULL) return;
  mfsdp_table_free(context, index->text, index->text_nbytes, 1);
  mfsdp_table_free(context, index->pairs, index->pair_count, sizeof(*index->pairs));
  mfsdp_table_free(context, (void *)index->files, index->pair_count, sizeof(*index->files));
  mfsdp_table_free(context, index->order, index->pair_count + 1, 3 * sizeof(*index->order));
  mfsdp_table_free(context, index, 1, sizeof(*index));
}

/*
 * Reads an index of at most 100 MB. Memory: at most 6 times the text, and 4 KiB; time: n log n.
 * *out is to be given to mfsdp_safetensors_index_destroy. Errors as mfsdp_safetensors_create.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status
mfsdp_safetensors_index_create(mfsdp_context *context, const mfsdp_safetensors_source *source,
                               mfsdp_safetensors_index **out, mfsdp_safetensors_fault *fault) {
  mfsdp_safetensors_fault found = MFSDP_SAFETENSORS_FAULT_NONE;
  mfsdp_safetensors_index *index;
  mfsdp_status status;
  void *block;
  if (out != NULL) *out = NULL;
  if (fault != NULL) *fault = found;
  if (context == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "safetensors index: context and out are needed");
  MFSDP_TRY(mfsdp__st_source_check(context, source));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*index), "safetensors index", &block));
  index = (mfsdp_safetensors_index *)block;
  index->total_nbytes = -1;
  status = mfsdp__st_index_fill(context, source, index, &found);
  if (fault != NULL) *fault = found;
  if (status == MFSDP_OK)
    *out = index;
  else
    mfsdp_safetensors_index_destroy(context, index);
  return status;
}

/* metadata.total_size: the bytes of all tensors, as the writer says; -1 where it says nothing. */
MFSDP_API int64_t mfsdp_safetensors_index_total_nbytes(const mfsdp_safetensors_index *index) {
  return index->total_nbytes;
}

/* Tensors in the index. */
MFSDP_API int32_t mfsdp_safetensors_index_count(const mfsdp_safetensors_index *index) {
  return (int32_t)index->pair_count;
}

/* Tensor (key) and file (value) number i in the order of the text; NULL out of range. */
MFSDP_API const mfsdp_safetensors_pair *mfsdp_safetensors_index_at(
    const mfsdp_safetensors_index *index, int32_t i) {
  return i >= 0 && (size_t)i < index->pair_count ? &index->pairs[i] : NULL;
}

/* Distinct files in the index. */
MFSDP_API int32_t mfsdp_safetensors_index_file_count(const mfsdp_safetensors_index *index) {
  return (int32_t)index->file_count;
}

/* File number i in the order of their names; NULL out of range. The same pointer as in the pairs. */
MFSDP_API const char *mfsdp_safetensors_index_file_at(const mfsdp_safetensors_index *index,
                                                      int32_t i) {
  return i >= 0 && (size_t)i < index->file_count ? index->files[i] : NULL;
}

/* The file that holds a tensor, or NULL; log n comparisons. */
MFSDP_API const char *mfsdp_safetensors_index_find(const mfsdp_safetensors_index *index,
                                                   const char *tensor) {
  const mfsdp_safetensors_pair *pair =
      mfsdp__st_find_pair(index->pairs, index->order, index->pair_count, tensor);
  return pair == NULL ? NULL : pair->value;
}

/* ---- writing ---- */

MFSDP_API mfsdp_status mfsdp__st_index_check(mfsdp_context *context,
                                             const mfsdp_safetensors_pair *pairs, int32_t count) {
  int32_t i;
  int has_control = 0;
  for (i = 0; i < count; ++i) {
    MFSDP_TRY(mfsdp__st_check_name(context, "tensor", i, pairs[i].key));
    if (pairs[i].value == NULL || !mfsdp__st_index_is_file(pairs[i].value) ||
        !mfsdp__utf8_check(pairs[i].value, &has_control) || has_control)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "safetensors index: tensor '%.100s' needs the plain name of a file",
                        pairs[i].key);
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__st_index_put(mfsdp_context *context,
                                           const mfsdp_safetensors_pair *pairs, int32_t count,
                                           int64_t total_nbytes, uint32_t *order,
                                           mfsdp__st_text *out) {
  int32_t i;
  mfsdp__st_sort(order, order + count, (size_t)count, mfsdp__st_less_by_key, pairs);
  mfsdp__st_text_put(out, "{\n  \"metadata\": {\n    \"total_size\": ");
  mfsdp__st_text_number(out, total_nbytes);
  mfsdp__st_text_put(out, "\n  },\n  \"weight_map\": {");
  for (i = 0; i < count; ++i) {
    const mfsdp_safetensors_pair *pair = &pairs[order[i]];
    if (i > 0 && strcmp(pair->key, pairs[order[i - 1]].key) == 0)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "safetensors index: tensor '%.100s' is there twice", pair->key);
    mfsdp__st_text_put(out, i > 0 ? ",\n    " : "\n    ");
    mfsdp__st_text_string(out, pair->key);
    mfsdp__st_text_put(out, ": ");
    mfsdp__st_text_string(out, pair->value);
  }
  mfsdp__st_text_put(out, count > 0 ? "\n  }\n}\n" : "}\n}\n");
  if (!out->overflow && out->nbytes <= MFSDP_SAFETENSORS_MAX_HEADER_NBYTES) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "safetensors index: it has more than %d bytes",
                    MFSDP_SAFETENSORS_MAX_HEADER_NBYTES);
}

/*
 * Writes the index of `count` tensors (key) in files (value): sorted by tensor, two blanks a level,
 * so the same bytes for the same set. *needed_nbytes receives its length. dst: capacity_nbytes
 * bytes, or NULL with capacity 0 to query. E_ARGUMENT: a name that is missing, there twice, not
 * UTF-8 or holds a control character; a file name with a folder; total_nbytes below 0; a capacity
 * above 0 that is not enough (dst may then be partly written). E_OVERFLOW: more than 100 MB.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_safetensors_index_write(
    mfsdp_context *context, const mfsdp_safetensors_pair *pairs, int32_t count,
    int64_t total_nbytes, void *dst, size_t capacity_nbytes, size_t *needed_nbytes) {
  mfsdp__st_text out;
  mfsdp_status status;
  void *order;
  if (context == NULL || needed_nbytes == NULL || count < 0 || (count > 0 && pairs == NULL) ||
      total_nbytes < 0 || (dst == NULL && capacity_nbytes > 0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "safetensors index: pairs for count %d, total_nbytes %lld >= 0, "
                      "needed_nbytes and room for capacity %zu are needed",
                      (int)count, (long long)total_nbytes, capacity_nbytes);
  MFSDP_TRY(mfsdp__st_index_check(context, pairs, count));
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)count + 1, 2 * sizeof(uint32_t), "order of an index",
                              &order)); /* never none: never NULL + 0 */
  memset(&out, 0, sizeof(out));
  out.dst = (char *)dst;
  out.capacity = capacity_nbytes;
  status = mfsdp__st_index_put(context, pairs, count, total_nbytes, (uint32_t *)order, &out);
  mfsdp_table_free(context, order, (size_t)count + 1, 2 * sizeof(uint32_t));
  MFSDP_TRY(status);
  *needed_nbytes = out.nbytes;
  if (capacity_nbytes == 0 || out.nbytes <= capacity_nbytes) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                    "safetensors index: capacity is %zu bytes, needs %zu", capacity_nbytes,
                    out.nbytes);
}

#endif /* MFSDP_SAFETENSORS_INDEX_H */
