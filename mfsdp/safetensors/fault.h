/* SPDX-License-Identifier: MIT */
/*
 * safetensors/fault.h - what can be wrong with a safetensors file or its index, one constant each.
 *
 *   mfsdp_safetensors_fault fault;
 *   if (mfsdp_safetensors_create(&context, &source, &file, &fault) == MFSDP_E_FORMAT)
 *     ... mfsdp_safetensors_fault_text(fault), and where: mfsdp_context_error(&context)->message
 *
 * Every fault is the status MFSDP_E_FORMAT; the fault says which rule of the format was broken.
 * Does not: hold state.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_FAULT_H
#define MFSDP_SAFETENSORS_FAULT_H

#include "../context.h"

/* X(suffix, text) */
#define MFSDP_SAFETENSORS_FAULT_TABLE(X)                                                \
  X(NONE, "no fault")                                                                   \
  X(FILE_SHORT, "the file is truncated: it has fewer than 8 bytes")                     \
  X(HEADER_LARGE, "the header is too long")                                             \
  X(HEADER_SHORT, "the file is truncated: the header goes past its end")                \
  X(START, "a JSON object is needed: the text does not begin with {")                   \
  X(END, "the text ends in the middle")                                                 \
  X(SYNTAX, "a character is out of place")                                              \
  X(TRAILING, "bytes follow the JSON object")                                           \
  X(UTF8, "a string is not UTF-8")                                                      \
  X(ESCAPE, "an unknown escape in a string")                                            \
  X(HEX, "\\u needs four hexadecimal digits")                                           \
  X(SURROGATE, "half of a surrogate pair")                                              \
  X(CONTROL, "a bare control character in a string")                                    \
  X(ZERO, "a 0 character in a string")                                                  \
  X(NUMBER, "a whole number is needed")                                                 \
  X(NEGATIVE, "a negative number")                                                      \
  X(LEADING_ZERO, "a number with a leading 0")                                          \
  X(NUMBER_LARGE, "a number past 63 bits")                                              \
  X(NEEDS_OBJECT, "an object is needed")                                                \
  X(NEEDS_LIST, "a list of whole numbers is needed")                                    \
  X(NEEDS_STRING, "a string is needed")                                                 \
  X(NESTED, "values are nested where the format has none, or too deeply")               \
  X(METADATA_TWICE, "__metadata__ is there twice")                                      \
  X(KEY_TWICE, "a key of the metadata is there twice")                                  \
  X(NAME_EMPTY, "a tensor without a name")                                              \
  X(NAME_CONTROL, "a control character in a tensor's name")                             \
  X(NAME_TWICE, "the tensor is there twice")                                            \
  X(MEMBER_UNKNOWN, "the tensor has a member other than dtype, shape and data_offsets") \
  X(MEMBER_TWICE, "the tensor has a member twice")                                      \
  X(MEMBER_MISSING, "the tensor needs dtype, shape and data_offsets")                   \
  X(DTYPE, "the tensor has an unknown dtype")                                           \
  X(NDIM, "the tensor has too many dimensions")                                         \
  X(OFFSET_COUNT, "the tensor needs two data_offsets")                                  \
  X(OFFSET_ORDER, "the tensor ends before it begins")                                   \
  X(SHAPE_LARGE, "the tensor's shape has a size that passes 63 bits")                   \
  X(MISALIGNED, "the tensor's elements do not fill whole bytes")                        \
  X(NBYTES, "the tensor's bytes of data are not those of its shape")                    \
  X(BEYOND, "the tensor ends behind the file: truncated?")                              \
  X(OVERLAP, "the tensor overlaps another")                                             \
  X(HOLE, "the tensor leaves a hole before it")                                         \
  X(UNUSED, "bytes at the end of the file belong to no tensor")                         \
  X(SECTION_TWICE, "metadata, weight_map or total_size is there twice")                 \
  X(NO_WEIGHT_MAP, "there is no weight_map")                                            \
  X(FILE_NAME, "weight_map needs plain file names: no folders, no control characters")

typedef enum mfsdp_safetensors_fault {
#define MFSDP__FAULT_ENUM(suffix, text) MFSDP_SAFETENSORS_FAULT_##suffix,
  MFSDP_SAFETENSORS_FAULT_TABLE(MFSDP__FAULT_ENUM)
#undef MFSDP__FAULT_ENUM
      MFSDP_SAFETENSORS_FAULT_COUNT
} mfsdp_safetensors_fault;

/* The constant's name without its prefix, as "UTF8"; never NULL. */
MFSDP_API const char *mfsdp_safetensors_fault_name(mfsdp_safetensors_fault fault) {
  switch (fault) {
#define MFSDP__FAULT_NAME(suffix, text) \
  case MFSDP_SAFETENSORS_FAULT_##suffix: return #suffix;
    MFSDP_SAFETENSORS_FAULT_TABLE(MFSDP__FAULT_NAME)
#undef MFSDP__FAULT_NAME
  case MFSDP_SAFETENSORS_FAULT_COUNT: break;
  }
  return "unknown";
}

/* One English sentence fragment; never NULL. */
MFSDP_API const char *mfsdp_safetensors_fault_text(mfsdp_safetensors_fault fault) {
  switch (fault) {
#define MFSDP__FAULT_TEXT(suffix, text) \
  case MFSDP_SAFETENSORS_FAULT_##suffix: return text;
    MFSDP_SAFETENSORS_FAULT_TABLE(MFSDP__FAULT_TEXT)
#undef MFSDP__FAULT_TEXT
  case MFSDP_SAFETENSORS_FAULT_COUNT: break;
  }
  return "unknown fault";
}

#endif /* MFSDP_SAFETENSORS_FAULT_H */
