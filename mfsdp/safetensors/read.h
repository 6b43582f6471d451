/* SPDX-License-Identifier: MIT */
/*
 * safetensors/read.h - reads and checks the header of a safetensors file.
 *
 *   mfsdp_safetensors *file;
 *   const mfsdp_safetensors_tensor *t;
 *   MFSDP_TRY(mfsdp_safetensors_create(&context, &source, &file, NULL));
 *   t = mfsdp_safetensors_find(file, "layers.0.weight");        // NULL: not in this file
 *   if (t) MFSDP_TRY(mfsdp_safetensors_source_read(&context, &source, t->file_offset, n, dst));
 *   mfsdp_safetensors_destroy(&context, file);
 *
 * The text is parsed twice by the same code, first to check and count, then to fill tables of
 * exactly the size that is needed; strings are decoded where they lie.
 * Does not: read tensor data by itself, keep the source, or ask that offsets are multiples of an
 * element (older writers left them as they fell): copy bytes, do not cast pointers into a mapping.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_READ_H
#define MFSDP_SAFETENSORS_READ_H

#include "element.h"
#include "json.h"
#include "sort.h"
#include "source.h"

/* The reference implementation takes no longer header either. */
#define MFSDP_SAFETENSORS_MAX_HEADER_NBYTES 100000000

/* A checked header. Its fields are private: the functions below read them. */
typedef struct mfsdp_safetensors {
  char *text; /* the header, strings decoded in place */
  size_t text_nbytes;
  mfsdp_safetensors_tensor *tensors; /* in the order of the header */
  int64_t *sizes;                    /* all shapes */
  mfsdp_safetensors_pair *pairs;     /* __metadata__ */
  uint32_t *order;                   /* tensors by name, pairs by key, scratch */
  size_t tensor_count, size_count, pair_count, order_count;
  int64_t data_offset, data_nbytes; /* where tensor data begins; how much there is */
} mfsdp_safetensors;

/* ---- from here to `api`: private ---- */

/* One tensor as the header says it. */
typedef struct mfsdp__st_entry {
  mfsdp__json_token name;
  mfsdp_safetensors_dtype dtype;
  int32_t ndim, offset_count;
  int64_t shape[MFSDP_SAFETENSORS_MAX_NDIM];
  int64_t offsets[2];
  int64_t nbytes;
} mfsdp__st_entry;

typedef struct mfsdp__st_parser {
  mfsdp__json json;
  mfsdp_safetensors *file;                     /* its tables are there in the second pass */
  int is_filling;                              /* 0: count only */
  size_t tensor_count, size_count, pair_count; /* so far */
} mfsdp__st_parser;

/* How much of nbytes to print: at most 100, and no part of a character. */
MFSDP_API int mfsdp__st_printable(const char *text, size_t nbytes) {
  if (nbytes <= 100) return (int)nbytes;
  for (nbytes = 100; nbytes > 0 && ((unsigned char)text[nbytes] & 0xc0u) == 0x80u;)
    --nbytes;
  return (int)nbytes;
}

/* E_FORMAT that names the tensor; `detail` goes behind the fault's text. */
MFSDP_API MFSDP_FORMAT(4, 5) mfsdp_status
    mfsdp__st_fail(mfsdp__json *json, const char *name, mfsdp_safetensors_fault fault,
                   const char *detail, ...) {
  char text[96];
  va_list arguments;
  va_start(arguments, detail);
  (void)vsnprintf(text, sizeof(text), detail, arguments);
  va_end(arguments);
  json->fault = fault;
  return MFSDP_FAIL(json->context, MFSDP_E_FORMAT, "%.120s: tensor '%.*s': %s%s", json->name,
                    mfsdp__st_printable(name, strlen(name)), name,
                    mfsdp_safetensors_fault_text(fault), text);
}

/* The same for a name that is still in the text. */
MFSDP_API mfsdp_status mfsdp__st_fail_entry(mfsdp__st_parser *p, const mfsdp__st_entry *entry,
                                            mfsdp_safetensors_fault fault, const char *detail) {
  char name[104];
  const char *text = p->json.text + entry->name.first;
  const int nbytes = mfsdp__st_printable(text, entry->name.nbytes);
  memcpy(name, text, (size_t)nbytes);
  name[nbytes] = '\0';
  return mfsdp__st_fail(&p->json, name, fault, "%s", detail);
}

MFSDP_API mfsdp_status mfsdp__st_dtype(mfsdp__st_parser *p, mfsdp__st_entry *entry) {
  mfsdp__json_token token;
  char detail[64];
  int dtype, nbytes;
  MFSDP_TRY(mfsdp__json_string(&p->json, &token));
  for (dtype = 1; dtype < MFSDP_SAFETENSORS_DTYPE_END; ++dtype) {
    entry->dtype = (mfsdp_safetensors_dtype)dtype;
    if (mfsdp__json_is(&p->json, token, mfsdp_safetensors_dtype_name(entry->dtype)))
      return MFSDP_OK;
  }
  nbytes = token.has_control || token.nbytes > 40 ? 0 : (int)token.nbytes;
  (void)snprintf(detail, sizeof(detail), " '%.*s'", nbytes, p->json.text + token.first);
  return mfsdp__st_fail_entry(p, entry, MFSDP_SAFETENSORS_FAULT_DTYPE, nbytes == 0 ? "" : detail);
}

/* The value of one of the three members; `seen` has a bit for each that was there. */
MFSDP_API mfsdp_status mfsdp__st_member(mfsdp__st_parser *p, mfsdp__st_entry *entry,
                                        unsigned *seen) {
  mfsdp__json_token key;
  unsigned bit;
  MFSDP_TRY(mfsdp__json_key(&p->json, &key));
  bit = mfsdp__json_is(&p->json, key, "dtype")          ? 1u
        : mfsdp__json_is(&p->json, key, "shape")        ? 2u
        : mfsdp__json_is(&p->json, key, "data_offsets") ? 4u
                                                        : 0u;
  if (bit == 0u) return mfsdp__st_fail_entry(p, entry, MFSDP_SAFETENSORS_FAULT_MEMBER_UNKNOWN, "");
  if (*seen & bit) return mfsdp__st_fail_entry(p, entry, MFSDP_SAFETENSORS_FAULT_MEMBER_TWICE, "");
  *seen |= bit;
  if (bit == 1u) return mfsdp__st_dtype(p, entry);
  if (bit == 2u)
    return mfsdp__json_list(&p->json, entry->shape, MFSDP_SAFETENSORS_MAX_NDIM,
                            MFSDP_SAFETENSORS_FAULT_NDIM, &entry->ndim);
  return mfsdp__json_list(&p->json, entry->offsets, 2, MFSDP_SAFETENSORS_FAULT_OFFSET_COUNT,
                          &entry->offset_count);
}

/* What a tensor says of itself, against the bytes that there are. */
MFSDP_API mfsdp_status mfsdp__st_check(mfsdp__st_parser *p, mfsdp__st_entry *entry) {
  const int64_t begin = entry->offsets[0], end = entry->offsets[1];
  char detail[96];
  mfsdp_safetensors_fault fault;
  if (entry->offset_count != 2)
    return mfsdp__st_fail_entry(p, entry, MFSDP_SAFETENSORS_FAULT_OFFSET_COUNT, "");
  if (begin > end) return mfsdp__st_fail_entry(p, entry, MFSDP_SAFETENSORS_FAULT_OFFSET_ORDER, "");
  fault = mfsdp_safetensors_nbytes(entry->dtype, entry->ndim, entry->shape, &entry->nbytes);
  if (fault != MFSDP_SAFETENSORS_FAULT_NONE) return mfsdp__st_fail_entry(p, entry, fault, "");
  if (end - begin != entry->nbytes) {
    (void)snprintf(detail, sizeof(detail), ": has %lld, needs %lld", (long long)(end - begin),
                   (long long)entry->nbytes);
    return mfsdp__st_fail_entry(p, entry, MFSDP_SAFETENSORS_FAULT_NBYTES, detail);
  }
  if (end > p->file->data_nbytes) {
    (void)snprintf(detail, sizeof(detail), " (at data byte %lld of %lld)", (long long)end,
                   (long long)p->file->data_nbytes);
    return mfsdp__st_fail_entry(p, entry, MFSDP_SAFETENSORS_FAULT_BEYOND, detail);
  }
  return MFSDP_OK;
}

MFSDP_API void mfsdp__st_store(mfsdp__st_parser *p, const mfsdp__st_entry *entry) {
  mfsdp_safetensors *file = p->file;
  if (p->is_filling) {
    mfsdp_safetensors_tensor *t = &file->tensors[p->tensor_count];
    t->name = mfsdp__json_decode(&p->json, entry->name);
    t->dtype = entry->dtype;
    t->ndim = entry->ndim;
    t->file_offset = file->data_offset + entry->offsets[0]; /* inside the file: it was checked */
    t->nbytes = entry->nbytes;
    if (entry->ndim > 0) {
      int64_t *shape = file->sizes + p->size_count;
      memcpy(shape, entry->shape, (size_t)entry->ndim * sizeof(*shape));
      t->shape = shape;
    }
  }
  ++p->tensor_count;
  p->size_count += (size_t)entry->ndim;
}

MFSDP_API mfsdp_status mfsdp__st_tensor(mfsdp__st_parser *p, mfsdp__json_token name) {
  mfsdp__st_entry entry;
  unsigned seen = 0;
  memset(&entry, 0, sizeof(entry));
  entry.name = name;
  if (name.nbytes == 0) return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_NAME_EMPTY, "");
  if (name.has_control) return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_NAME_CONTROL, "");
  if (!mfsdp__json_take(&p->json, '{'))
    return mfsdp__json_refuse(&p->json, MFSDP_SAFETENSORS_FAULT_NEEDS_OBJECT, "");
  if (!mfsdp__json_take(&p->json, '}')) {
    do
      MFSDP_TRY(mfsdp__st_member(p, &entry, &seen));
    while (mfsdp__json_take(&p->json, ','));
    MFSDP_TRY(mfsdp__json_expect(&p->json, '}', ", or } in a tensor"));
  }
  if (seen != 7u)
    return mfsdp__st_fail_entry(p, &entry, MFSDP_SAFETENSORS_FAULT_MEMBER_MISSING, "");
  MFSDP_TRY(mfsdp__st_check(p, &entry));
  mfsdp__st_store(p, &entry);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__st_metadata(mfsdp__st_parser *p) {
  mfsdp_safetensors *file = p->file;
  mfsdp__json_token key, value;
  if (!mfsdp__json_take(&p->json, '{'))
    return mfsdp__json_refuse(&p->json, MFSDP_SAFETENSORS_FAULT_NEEDS_OBJECT, "");
  if (mfsdp__json_take(&p->json, '}')) return MFSDP_OK;
  do {
    MFSDP_TRY(mfsdp__json_key(&p->json, &key));
    MFSDP_TRY(mfsdp__json_string(&p->json, &value));
    if (p->is_filling) {
      file->pairs[p->pair_count].key = mfsdp__json_decode(&p->json, key);
      file->pairs[p->pair_count].value = mfsdp__json_decode(&p->json, value);
    }
    ++p->pair_count;
  } while (mfsdp__json_take(&p->json, ','));
  return mfsdp__json_expect(&p->json, '}', ", or } in __metadata__");
}

/* The whole header, from byte 0. Counts, and fills if there is what to fill. */
MFSDP_API mfsdp_status mfsdp__st_parse(mfsdp__st_parser *p) {
  int has_metadata = 0;
  mfsdp__json_token key;
  p->json.at = 0;
  p->tensor_count = p->size_count = p->pair_count = 0;
  if (mfsdp__json_peek(&p->json) != '{')
    return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_START, "");
  (void)mfsdp__json_take(&p->json, '{');
  if (!mfsdp__json_take(&p->json, '}')) {
    do {
      MFSDP_TRY(mfsdp__json_key(&p->json, &key));
      if (!mfsdp__json_is(&p->json, key, "__metadata__")) {
        MFSDP_TRY(mfsdp__st_tensor(p, key));
      } else {
        if (has_metadata++)
          return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_METADATA_TWICE, "");
        MFSDP_TRY(mfsdp__st_metadata(p));
      }
    } while (mfsdp__json_take(&p->json, ','));
    MFSDP_TRY(mfsdp__json_expect(&p->json, '}', ", or } behind a tensor"));
  }
  if (p->json.at == p->json.nbytes) return MFSDP_OK;
  return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_TRAILING, "");
}

MFSDP_API int mfsdp__st_less_by_name(const void *table, uint32_t a, uint32_t b) {
  const mfsdp_safetensors_tensor *t = (const mfsdp_safetensors_tensor *)table;
  return strcmp(t[a].name, t[b].name) < 0;
}

MFSDP_API int mfsdp__st_less_by_key(const void *table, uint32_t a, uint32_t b) {
  const mfsdp_safetensors_pair *pairs = (const mfsdp_safetensors_pair *)table;
  return strcmp(pairs[a].key, pairs[b].key) < 0;
}

/* The pair of that key among pairs whose sorted view is `order`, or NULL. */
MFSDP_API const mfsdp_safetensors_pair *mfsdp__st_find_pair(const mfsdp_safetensors_pair *pairs,
                                                            const uint32_t *order, size_t count,
                                                            const char *key) {
  size_t first = 0, last = count;
  while (first < last) {
    const size_t middle = first + (last - first) / 2;
    const int compared = strcmp(key, pairs[order[middle]].key);
    if (compared == 0) return &pairs[order[middle]];
    if (compared < 0)
      last = middle;
    else
      first = middle + 1;
  }
  return NULL;
}

/* By where they lie; an empty tensor stands before one that begins there. */
MFSDP_API int mfsdp__st_less_by_place(const void *table, uint32_t a, uint32_t b) {
  const mfsdp_safetensors_tensor *t = (const mfsdp_safetensors_tensor *)table;
  if (t[a].file_offset != t[b].file_offset) return t[a].file_offset < t[b].file_offset;
  return t[a].nbytes < t[b].nbytes;
}

/* Every byte of data belongs to one tensor. `order` is scratch for twice the tensors. */
MFSDP_API mfsdp_status mfsdp__st_check_cover(mfsdp__st_parser *p, uint32_t *order) {
  const mfsdp_safetensors *file = p->file;
  const int64_t end = file->data_offset + file->data_nbytes;
  int64_t covered = file->data_offset;
  size_t i;
  mfsdp__st_sort(order, order + file->tensor_count, file->tensor_count, mfsdp__st_less_by_place,
                 file->tensors);
  for (i = 0; i < file->tensor_count; ++i) {
    const mfsdp_safetensors_tensor *t = &file->tensors[order[i]];
    if (t->file_offset != covered)
      return mfsdp__st_fail(&p->json, t->name,
                            t->file_offset < covered ? MFSDP_SAFETENSORS_FAULT_OVERLAP
                                                     : MFSDP_SAFETENSORS_FAULT_HOLE,
                            " (begins at data byte %lld, needs %lld)",
                            (long long)(t->file_offset - file->data_offset),
                            (long long)(covered - file->data_offset));
    covered += t->nbytes;
  }
  if (covered == end) return MFSDP_OK;
  p->json.fault = MFSDP_SAFETENSORS_FAULT_UNUSED;
  return MFSDP_FAIL(p->json.context, MFSDP_E_FORMAT, "%.120s: %lld %s", p->json.name,
                    (long long)(end - covered),
                    mfsdp_safetensors_fault_text(MFSDP_SAFETENSORS_FAULT_UNUSED));
}

/* Makes the sorted views, and with their help checks what single tensors cannot show. */
MFSDP_API mfsdp_status mfsdp__st_check_together(mfsdp__st_parser *p) {
  const mfsdp_safetensors *file = p->file;
  uint32_t *by_name = file->order, *by_key = file->order + file->tensor_count;
  uint32_t *scratch = by_key + file->pair_count;
  size_t i;
  mfsdp__st_sort(by_key, scratch, file->pair_count, mfsdp__st_less_by_key, file->pairs);
  for (i = 1; i < file->pair_count; ++i)
    if (strcmp(file->pairs[by_key[i]].key, file->pairs[by_key[i - 1]].key) == 0) {
      p->json.at = (size_t)(file->pairs[by_key[i]].key - file->text);
      return mfsdp__json_fail(&p->json, MFSDP_SAFETENSORS_FAULT_KEY_TWICE, "");
    }
  mfsdp__st_sort(by_name, scratch, file->tensor_count, mfsdp__st_less_by_name, file->tensors);
  for (i = 1; i < file->tensor_count; ++i)
    if (strcmp(file->tensors[by_name[i]].name, file->tensors[by_name[i - 1]].name) == 0)
      return mfsdp__st_fail(&p->json, file->tensors[by_name[i]].name,
                            MFSDP_SAFETENSORS_FAULT_NAME_TWICE, "%s", "");
  return mfsdp__st_check_cover(p, scratch);
}

/* Tables for what the first pass counted. Their counts are set with them, to be freed alike. */
MFSDP_API mfsdp_status mfsdp__st_alloc(mfsdp__st_parser *p) {
  mfsdp_context *context = p->json.context;
  mfsdp_safetensors *file = p->file;
  void *block;
  file->tensor_count = p->tensor_count;
  file->size_count = p->size_count;
  file->pair_count = p->pair_count;
  /* No overflow: each of them has bytes of its own in a header of at most 100 MB. */
  file->order_count = p->tensor_count + p->pair_count + 1; /* never none: never NULL + 0 */
  file->order_count += p->pair_count > 2 * p->tensor_count ? p->pair_count : 2 * p->tensor_count;
  MFSDP_TRY(mfsdp_table_alloc(context, file->tensor_count, sizeof(*file->tensors),
                              "tensors of a file", &block));
  file->tensors = (mfsdp_safetensors_tensor *)block;
  MFSDP_TRY(mfsdp_table_alloc(context, file->size_count, sizeof(*file->sizes), "shapes of a file",
                              &block));
  file->sizes = (int64_t *)block;
  MFSDP_TRY(mfsdp_table_alloc(context, file->pair_count, sizeof(*file->pairs), "metadata of a file",
                              &block));
  file->pairs = (mfsdp_safetensors_pair *)block;
  MFSDP_TRY(mfsdp_table_alloc(context, file->order_count, sizeof(*file->order), "order of a file",
                              &block));
  file->order = (uint32_t *)block;
  return MFSDP_OK;
}

/* The header's text, of a length that was checked before memory is asked for. */
MFSDP_API mfsdp_status mfsdp__st_read_text(mfsdp_context *context,
                                           const mfsdp_safetensors_source *source,
                                           mfsdp_safetensors *file,
                                           mfsdp_safetensors_fault *fault) {
  unsigned char prefix[8];
  uint64_t length = 0;
  void *text;
  int i;
  *fault = MFSDP_SAFETENSORS_FAULT_FILE_SHORT;
  if (source->file_nbytes < (int64_t)sizeof(prefix))
    return MFSDP_FAIL(context, MFSDP_E_FORMAT, "%.120s: %s", source->name,
                      mfsdp_safetensors_fault_text(*fault));
  *fault = MFSDP_SAFETENSORS_FAULT_NONE;
  MFSDP_TRY(mfsdp_safetensors_source_read(context, source, 0, sizeof(prefix), prefix));
  for (i = 7; i >= 0; --i)
    length = length << 8 | prefix[i];
  if (length > MFSDP_SAFETENSORS_MAX_HEADER_NBYTES)
    *fault = MFSDP_SAFETENSORS_FAULT_HEADER_LARGE;
  else if (length > (uint64_t)source->file_nbytes - sizeof(prefix))
    *fault = MFSDP_SAFETENSORS_FAULT_HEADER_SHORT;
  if (*fault != MFSDP_SAFETENSORS_FAULT_NONE)
    return MFSDP_FAIL(context, MFSDP_E_FORMAT,
                      "%.120s: %s (it says %llu bytes; the file has %lld, at most %d are allowed)",
                      source->name, mfsdp_safetensors_fault_text(*fault),
                      (unsigned long long)length,
                      (long long)(source->file_nbytes - (int64_t)sizeof(prefix)),
                      MFSDP_SAFETENSORS_MAX_HEADER_NBYTES);
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)length, 1, "header of a file", &text));
  file->text = (char *)text;
  file->text_nbytes = (size_t)length;
  file->data_offset = (int64_t)sizeof(prefix) + (int64_t)length;
  file->data_nbytes = source->file_nbytes - file->data_offset;
  return mfsdp_safetensors_source_read(context, source, sizeof(prefix), (size_t)length, text);
}

MFSDP_API mfsdp_status mfsdp__st_fill(mfsdp_context *context,
                                      const mfsdp_safetensors_source *source,
                                      mfsdp_safetensors *file, mfsdp_safetensors_fault *fault) {
  mfsdp__st_parser p;
  mfsdp_status status;
  MFSDP_TRY(mfsdp__st_read_text(context, source, file, fault));
  memset(&p, 0, sizeof(p));
  p.json.context = context;
  p.json.name = source->name;
  p.json.unit = "header byte";
  p.json.text = file->text;
  p.json.nbytes = file->text_nbytes;
  p.file = file;
  status = mfsdp__st_parse(&p);
  if (status == MFSDP_OK) status = mfsdp__st_alloc(&p);
  if (status == MFSDP_OK) {
    p.is_filling = 1;
    status = mfsdp__st_parse(&p);
  }
  if (status == MFSDP_OK) status = mfsdp__st_check_together(&p);
  *fault = p.json.fault;
  return status;
}

/* ---- api ---- */

/* Gives everything back. NULL is allowed. `context` is the one of the creation. */
MFSDP_API void mfsdp_safetensors_destroy(mfsdp_context *context, mfsdp_safetensors *file) {
  if (file == NULL) return;
  mfsdp_table_free(context, file->text, file->text_nbytes, 1);
  mfsdp_table_free(context, file->tensors, file->tensor_count, sizeof(*file->tensors));
  mfsdp_table_free(context, file->sizes, file->size_count, sizeof(*file->sizes));
  mfsdp_table_free(context, file->pairs, file->pair_count, sizeof(*file->pairs));
  mfsdp_table_free(context, file->order, file->order_count, sizeof(*file->order));
  mfsdp_table_free(context, file, 1, sizeof(*file));
}

/*
 * Reads the header from `source` and checks it whole: afterwards names are distinct, every tensor
 * has the bytes that its dtype and shape need, and together they cover the data without holes or
 * overlaps. The source is not needed afterwards. Memory: at most 6 times the header, which is not
 * longer than the file, and 4 KiB; time: n log n. *out is to be given to mfsdp_safetensors_destroy.
 * E_ARGUMENT; E_FORMAT with *fault (NULL: not wanted) and the place in the message; E_MEMORY; what
 * the source's read returned. On failure *out is NULL and nothing is held.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status
mfsdp_safetensors_create(mfsdp_context *context, const mfsdp_safetensors_source *source,
                         mfsdp_safetensors **out, mfsdp_safetensors_fault *fault) {
  mfsdp_safetensors_fault found = MFSDP_SAFETENSORS_FAULT_NONE;
  mfsdp_safetensors *file;
  mfsdp_status status;
  void *block;
  if (out != NULL) *out = NULL;
  if (fault != NULL) *fault = found;
  if (context == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "safetensors: context and out are needed");
  MFSDP_TRY(mfsdp__st_source_check(context, source));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*file), "safetensors", &block));
  file = (mfsdp_safetensors *)block;
  status = mfsdp__st_fill(context, source, file, &found);
  if (fault != NULL) *fault = found;
  if (status == MFSDP_OK)
    *out = file;
  else
    mfsdp_safetensors_destroy(context, file);
  return status;
}

/* Tensors in the file. */
MFSDP_API int32_t mfsdp_safetensors_count(const mfsdp_safetensors *file) {
  return (int32_t)file->tensor_count;
}

/* Tensor `index` in the order of the header; NULL out of range. They are one array, which lives as
 * long as `file`. */
MFSDP_API const mfsdp_safetensors_tensor *mfsdp_safetensors_at(const mfsdp_safetensors *file,
                                                               int32_t index) {
  return index >= 0 && (size_t)index < file->tensor_count ? &file->tensors[index] : NULL;
}

/* The tensor of that name, or NULL; log n comparisons. */
MFSDP_API const mfsdp_safetensors_tensor *mfsdp_safetensors_find(const mfsdp_safetensors *file,
                                                                 const char *name) {
  size_t first = 0, last = file->tensor_count;
  while (first < last) {
    const size_t middle = first + (last - first) / 2;
    const mfsdp_safetensors_tensor *t = &file->tensors[file->order[middle]];
    const int order = strcmp(name, t->name);
    if (order == 0) return t;
    if (order < 0)
      last = middle;
    else
      first = middle + 1;
  }
  return NULL;
}

/* Entries of __metadata__; 0 also where there is none. */
MFSDP_API int32_t mfsdp_safetensors_metadata_count(const mfsdp_safetensors *file) {
  return (int32_t)file->pair_count;
}

/* Entry `index` of __metadata__ in the order of the header; NULL out of range. They are one
 * array. Values may hold control characters. */
MFSDP_API const mfsdp_safetensors_pair *mfsdp_safetensors_metadata_at(const mfsdp_safetensors *file,
                                                                      int32_t index) {
  return index >= 0 && (size_t)index < file->pair_count ? &file->pairs[index] : NULL;
}

/* The value of a key of __metadata__, or NULL; log n comparisons. */
MFSDP_API const char *mfsdp_safetensors_metadata_find(const mfsdp_safetensors *file,
                                                      const char *key) {
  const mfsdp_safetensors_pair *pair =
      mfsdp__st_find_pair(file->pairs, file->order + file->tensor_count, file->pair_count, key);
  return pair == NULL ? NULL : pair->value;
}

#endif /* MFSDP_SAFETENSORS_READ_H */
