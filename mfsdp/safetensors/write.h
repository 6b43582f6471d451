/* SPDX-License-Identifier: MIT */
/*
 * safetensors/write.h - the header of a safetensors file, and where each tensor's bytes go.
 *
 *   mfsdp_safetensors_layout layout = {tensors, count, metadata, pairs, 0, 0};
 *   MFSDP_TRY(mfsdp_safetensors_layout_make(&context, &layout));      // sets file_offset, nbytes
 *   MFSDP_TRY(mfsdp_safetensors_header_write(&context, &layout, buffer, layout.header_nbytes));
 *   ... one writer puts the buffer at byte 0; everyone writes his tensors at their file_offset.
 *
 * The bytes depend only on the set of names, dtypes, shapes and metadata, not on their order: larger
 * dtypes first (the order of MFSDP_SAFETENSORS_DTYPE_TABLE, backwards), then by the bytes of the
 * name; metadata by key; no blanks but the spaces that pad the header to a multiple of 8 bytes. The
 * reference implementation writes the same bytes, if there is at most one entry of metadata.
 * Does not: write files or tensor data.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_WRITE_H
#define MFSDP_SAFETENSORS_WRITE_H

#include "read.h"
#include "text.h"

typedef struct mfsdp_safetensors_layout {
  mfsdp_safetensors_tensor *tensors; /* in: name, dtype, ndim, shape. out: file_offset, nbytes */
  int32_t tensor_count;
  const mfsdp_safetensors_pair *metadata; /* NULL where pair_count is 0 */
  int32_t pair_count;
  size_t header_nbytes; /* out: bytes in front of the data, the 8 of the length included */
  int64_t file_nbytes;  /* out: of the whole file */
} mfsdp_safetensors_layout;

/* Larger dtypes first, then by name. */
MFSDP_API int mfsdp__st_less_in_file(const void *table, uint32_t a, uint32_t b) {
  const mfsdp_safetensors_tensor *t = (const mfsdp_safetensors_tensor *)table;
  if (t[a].dtype != t[b].dtype) return t[a].dtype > t[b].dtype;
  return mfsdp__st_less_by_name(table, a, b);
}

MFSDP_API mfsdp_status mfsdp__st_check_name(mfsdp_context *context, const char *what, int32_t index,
                                            const char *name) {
  int has_control = 0;
  if (name == NULL || name[0] == '\0')
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "safetensors: %s %d has no name", what,
                      (int)index);
  if (!mfsdp__utf8_check(name, &has_control) || has_control)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "safetensors: %s %d has a name that is not UTF-8 or holds a control character", what,
        (int)index);
  return MFSDP_OK;
}

/* Checks a tensor and sets its nbytes. */
MFSDP_API mfsdp_status mfsdp__st_check_tensor(mfsdp_context *context, int32_t index,
                                              mfsdp_safetensors_tensor *t) {
  mfsdp_safetensors_fault fault;
  MFSDP_TRY(mfsdp__st_check_name(context, "tensor", index, t->name));
  if (strcmp(t->name, "__metadata__") == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "safetensors: tensor %d is named __metadata__, which is reserved",
                      (int)index);
  if (t->ndim > 0 && t->shape == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "safetensors: tensor '%.100s' has no shape",
                      t->name);
  fault = mfsdp_safetensors_nbytes(t->dtype, t->ndim, t->shape, &t->nbytes);
  if (fault == MFSDP_SAFETENSORS_FAULT_NONE) return MFSDP_OK;
  return MFSDP_FAIL(
      context, fault == MFSDP_SAFETENSORS_FAULT_SHAPE_LARGE ? MFSDP_E_OVERFLOW : MFSDP_E_ARGUMENT,
      "safetensors: tensor '%.100s' (dtype %d, ndim %d): %s", t->name, (int)t->dtype, (int)t->ndim,
      mfsdp_safetensors_fault_text(fault));
}

MFSDP_API mfsdp_status mfsdp__st_check_layout(mfsdp_context *context,
                                              mfsdp_safetensors_layout *layout) {
  int32_t i;
  int has_control;
  if (layout->tensor_count < 0 || (layout->tensor_count > 0 && layout->tensors == NULL) ||
      layout->pair_count < 0 || (layout->pair_count > 0 && layout->metadata == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "safetensors: %d tensors and %d pairs of metadata need arrays of them",
                      (int)layout->tensor_count, (int)layout->pair_count);
  for (i = 0; i < layout->tensor_count; ++i)
    MFSDP_TRY(mfsdp__st_check_tensor(context, i, &layout->tensors[i]));
  for (i = 0; i < layout->pair_count; ++i) {
    const mfsdp_safetensors_pair *pair = &layout->metadata[i];
    if (pair->key == NULL || pair->value == NULL || !mfsdp__utf8_check(pair->key, &has_control) ||
        !mfsdp__utf8_check(pair->value, &has_control))
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "safetensors: entry %d of the metadata needs a key and a value in UTF-8",
                        (int)i);
  }
  return MFSDP_OK;
}

/* Distinct names and keys; order and scratch have room for the larger count. */
MFSDP_API mfsdp_status mfsdp__st_check_distinct(mfsdp_context *context,
                                                const mfsdp_safetensors_layout *layout,
                                                uint32_t *order, uint32_t *scratch) {
  int32_t i;
  mfsdp__st_sort(order, scratch, (size_t)layout->tensor_count, mfsdp__st_less_by_name,
                 layout->tensors);
  for (i = 1; i < layout->tensor_count; ++i)
    if (strcmp(layout->tensors[order[i]].name, layout->tensors[order[i - 1]].name) == 0)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "safetensors: tensor '%.100s' is there twice",
                        layout->tensors[order[i]].name);
  mfsdp__st_sort(order, scratch, (size_t)layout->pair_count, mfsdp__st_less_by_key,
                 layout->metadata);
  for (i = 1; i < layout->pair_count; ++i)
    if (strcmp(layout->metadata[order[i]].key, layout->metadata[order[i - 1]].key) == 0)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "safetensors: key '%.100s' of the metadata is there twice",
                        layout->metadata[order[i]].key);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__st_put_metadata(mfsdp__st_text *out, const mfsdp_safetensors_layout *layout,
                                      uint32_t *order, uint32_t *scratch) {
  int32_t i;
  if (layout->pair_count == 0) return;
  mfsdp__st_sort(order, scratch, (size_t)layout->pair_count, mfsdp__st_less_by_key,
                 layout->metadata);
  mfsdp__st_text_put(out, "\"__metadata__\":{");
  for (i = 0; i < layout->pair_count; ++i) {
    if (i > 0) mfsdp__st_text_put(out, ",");
    mfsdp__st_text_string(out, layout->metadata[order[i]].key);
    mfsdp__st_text_put(out, ":");
    mfsdp__st_text_string(out, layout->metadata[order[i]].value);
  }
  mfsdp__st_text_put(out, layout->tensor_count > 0 ? "}," : "}");
}

MFSDP_API void mfsdp__st_put_tensor(mfsdp__st_text *out, const mfsdp_safetensors_tensor *t,
                                    int64_t data_offset) {
  int32_t d;
  mfsdp__st_text_string(out, t->name);
  mfsdp__st_text_put(out, ":{\"dtype\":\"");
  mfsdp__st_text_put(out, mfsdp_safetensors_dtype_name(t->dtype));
  mfsdp__st_text_put(out, "\",\"shape\":[");
  for (d = 0; d < t->ndim; ++d) {
    if (d > 0) mfsdp__st_text_put(out, ",");
    mfsdp__st_text_number(out, t->shape[d]);
  }
  mfsdp__st_text_put(out, "],\"data_offsets\":[");
  mfsdp__st_text_number(out, t->file_offset - data_offset);
  mfsdp__st_text_put(out, ",");
  mfsdp__st_text_number(out, t->file_offset - data_offset + t->nbytes);
  mfsdp__st_text_put(out, "]}");
}

/* The JSON text with its padding; data begins at `data_offset`. */
MFSDP_API void mfsdp__st_put_header(mfsdp__st_text *out, const mfsdp_safetensors_layout *layout,
                                    int64_t data_offset, uint32_t *order, uint32_t *scratch) {
  int32_t i;
  mfsdp__st_text_put(out, "{");
  mfsdp__st_put_metadata(out, layout, order, scratch);
  mfsdp__st_sort(order, scratch, (size_t)layout->tensor_count, mfsdp__st_less_in_file,
                 layout->tensors);
  for (i = 0; i < layout->tensor_count; ++i) {
    if (i > 0) mfsdp__st_text_put(out, ",");
    mfsdp__st_put_tensor(out, &layout->tensors[order[i]], data_offset);
  }
  mfsdp__st_text_put(out, "}");
  while (out->nbytes % 8 != 0)
    mfsdp__st_text_put(out, " ");
}

MFSDP_API size_t mfsdp__st_order_count(const mfsdp_safetensors_layout *layout) {
  const int32_t most =
      layout->tensor_count > layout->pair_count ? layout->tensor_count : layout->pair_count;
  return (size_t)most + 1; /* never none: never NULL + 0 */
}

/* Places the tensors one behind the other, first from byte 0, then behind the header. */
MFSDP_API mfsdp_status mfsdp__st_place(mfsdp_context *context, mfsdp_safetensors_layout *layout,
                                       uint32_t *order, uint32_t *scratch) {
  mfsdp__st_text out;
  int64_t end = 0;
  int32_t i;
  MFSDP_TRY(mfsdp__st_check_distinct(context, layout, order, scratch));
  mfsdp__st_sort(order, scratch, (size_t)layout->tensor_count, mfsdp__st_less_in_file,
                 layout->tensors);
  for (i = 0; i < layout->tensor_count; ++i) {
    mfsdp_safetensors_tensor *t = &layout->tensors[order[i]];
    t->file_offset = end;
    if (!mfsdp_i64_add(end, t->nbytes, &end))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "safetensors: the file passes 63 bits");
  }
  memset(&out, 0, sizeof(out));
  mfsdp__st_put_header(&out, layout, 0, order, scratch);
  if (out.overflow || out.nbytes > MFSDP_SAFETENSORS_MAX_HEADER_NBYTES)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                      "safetensors: the header would have more than %d bytes: use several files",
                      MFSDP_SAFETENSORS_MAX_HEADER_NBYTES);
  layout->header_nbytes = 8 + out.nbytes;
  if (!mfsdp_i64_add(end, (int64_t)layout->header_nbytes, &layout->file_nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "safetensors: the file passes 63 bits");
  for (i = 0; i < layout->tensor_count; ++i)
    layout->tensors[i].file_offset += (int64_t)layout->header_nbytes;
  return MFSDP_OK;
}

/*
 * Sets file_offset and nbytes of every tensor (which keep their places in the array), and the sizes
 * of header and file. Nothing is kept. E_ARGUMENT: a name that is missing, there twice, not UTF-8,
 * __metadata__, or holds a control character; an unknown dtype; an invalid shape; elements below 8
 * bits that do not fill bytes; metadata that is not UTF-8 or has a key twice. E_OVERFLOW: sizes past
 * 63 bits, a header past 100 MB. E_MEMORY.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status
mfsdp_safetensors_layout_make(mfsdp_context *context, mfsdp_safetensors_layout *layout) {
  void *order;
  size_t count;
  mfsdp_status status;
  if (context == NULL || layout == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "safetensors: context and layout are needed");
  MFSDP_TRY(mfsdp__st_check_layout(context, layout));
  count = mfsdp__st_order_count(layout);
  MFSDP_TRY(mfsdp_table_alloc(context, count, 2 * sizeof(uint32_t), "order of a file", &order));
  status = mfsdp__st_place(context, layout, (uint32_t *)order, (uint32_t *)order + count);
  mfsdp_table_free(context, order, count, 2 * sizeof(uint32_t));
  return status;
}

/*
 * Writes the 8 bytes of the length and the header of a layout that mfsdp_safetensors_layout_make
 * finished: layout->header_nbytes bytes to dst. E_ARGUMENT if the capacity is less, or if the
 * layout was changed; then dst may be partly written. E_MEMORY.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status
mfsdp_safetensors_header_write(mfsdp_context *context, const mfsdp_safetensors_layout *layout,
                               void *dst, size_t capacity_nbytes) {
  mfsdp__st_text out;
  void *order;
  size_t count, i;
  if (context == NULL || layout == NULL || dst == NULL || layout->header_nbytes < 8 ||
      capacity_nbytes < layout->header_nbytes)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "safetensors: capacity is %zu bytes, the header of the layout needs %zu",
                      capacity_nbytes, layout == NULL ? (size_t)0 : layout->header_nbytes);
  count = mfsdp__st_order_count(layout);
  MFSDP_TRY(mfsdp_table_alloc(context, count, 2 * sizeof(uint32_t), "order of a file", &order));
  memset(&out, 0, sizeof(out));
  out.dst = (char *)dst + 8;
  out.capacity = layout->header_nbytes - 8;
  mfsdp__st_put_header(&out, layout, (int64_t)layout->header_nbytes, (uint32_t *)order,
                       (uint32_t *)order + count);
  mfsdp_table_free(context, order, count, 2 * sizeof(uint32_t));
  if (out.nbytes != out.capacity)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "safetensors: the header has %zu bytes, the layout says %zu: it was changed",
                      out.nbytes, out.capacity);
  for (i = 0; i < 8; ++i)
    ((unsigned char *)dst)[i] = (unsigned char)((uint64_t)out.nbytes >> (8 * i) & 0xffu);
  return MFSDP_OK;
}

#endif /* MFSDP_SAFETENSORS_WRITE_H */
