/* SPDX-License-Identifier: MIT */
/*
 * safetensors/element.h - the dtypes of the format, and the bytes of a tensor.
 *
 *   int64_t nbytes;
 *   if (mfsdp_safetensors_nbytes(MFSDP_SAFETENSORS_BF16, 2, shape, &nbytes) != ...FAULT_NONE) ...
 *
 * All dtypes of the format are carried, also those the library does not compute with.
 * Does not: convert elements (dtype.h does, for the four that are computed with).
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_ELEMENT_H
#define MFSDP_SAFETENSORS_ELEMENT_H

#include "fault.h"

/* Of other tools: NumPy and PyTorch take no more than 64. */
#define MFSDP_SAFETENSORS_MAX_NDIM 64

/* X(name as in the file, bits of an element), in the order of the reference implementation (Rust
 * crate and Python package 0.8, `Dtype`): files are laid out from the last to the first. */
#define MFSDP_SAFETENSORS_DTYPE_TABLE(X)                                                          \
  X(BOOL, 8)                                                                                      \
  X(F4, 4)                                                                                        \
  X(F6_E2M3, 6)                                                                                   \
  X(F6_E3M2, 6)                                                                                   \
  X(U8, 8) X(I8, 8) X(F8_E5M2, 8) X(F8_E4M3, 8) X(F8_E8M0, 8) X(F8_E4M3FNUZ, 8) X(F8_E5M2FNUZ, 8) \
      X(I16, 16) X(U16, 16) X(F16, 16) X(BF16, 16) X(I32, 32) X(U32, 32) X(F32, 32) X(C64, 64)    \
          X(F64, 64) X(I64, 64) X(U64, 64)

typedef enum mfsdp_safetensors_dtype {
  MFSDP_SAFETENSORS_NO_DTYPE, /* never in a file: a forgotten field is caught */
#define MFSDP__DTYPE_ENUM(name, bits) MFSDP_SAFETENSORS_##name,
  MFSDP_SAFETENSORS_DTYPE_TABLE(MFSDP__DTYPE_ENUM)
#undef MFSDP__DTYPE_ENUM
      MFSDP_SAFETENSORS_DTYPE_END
} mfsdp_safetensors_dtype;

/* Bits of one element; 0 for no dtype. */
MFSDP_API int32_t mfsdp_safetensors_dtype_bits(mfsdp_safetensors_dtype dtype) {
  switch (dtype) {
#define MFSDP__DTYPE_BITS(name, bits) \
  case MFSDP_SAFETENSORS_##name: return bits;
    MFSDP_SAFETENSORS_DTYPE_TABLE(MFSDP__DTYPE_BITS)
#undef MFSDP__DTYPE_BITS
  case MFSDP_SAFETENSORS_NO_DTYPE:
  case MFSDP_SAFETENSORS_DTYPE_END: break;
  }
  return 0;
}

/* The name in the file, as "BF16"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_safetensors_dtype_name(mfsdp_safetensors_dtype dtype) {
  switch (dtype) {
#define MFSDP__DTYPE_NAME(name, bits) \
  case MFSDP_SAFETENSORS_##name: return #name;
    MFSDP_SAFETENSORS_DTYPE_TABLE(MFSDP__DTYPE_NAME)
#undef MFSDP__DTYPE_NAME
  case MFSDP_SAFETENSORS_NO_DTYPE:
  case MFSDP_SAFETENSORS_DTYPE_END: break;
  }
  return "invalid";
}

/* How files name a dtype of the library; NO_DTYPE for an invalid one. */
MFSDP_API mfsdp_safetensors_dtype mfsdp_safetensors_dtype_of(mfsdp_dtype dtype) {
  switch (dtype) {
  case MFSDP_F32: return MFSDP_SAFETENSORS_F32;
  case MFSDP_F64: return MFSDP_SAFETENSORS_F64;
  case MFSDP_BF16: return MFSDP_SAFETENSORS_BF16;
  case MFSDP_F16: return MFSDP_SAFETENSORS_F16;
  }
  return MFSDP_SAFETENSORS_NO_DTYPE;
}

/* 1 and *out if the library computes with the dtype, else 0. */
MFSDP_API int mfsdp_safetensors_dtype_to(mfsdp_safetensors_dtype dtype, mfsdp_dtype *out) {
  switch (dtype) {
  case MFSDP_SAFETENSORS_F32: *out = MFSDP_F32; return 1;
  case MFSDP_SAFETENSORS_F64: *out = MFSDP_F64; return 1;
  case MFSDP_SAFETENSORS_BF16: *out = MFSDP_BF16; return 1;
  case MFSDP_SAFETENSORS_F16: *out = MFSDP_F16; return 1;
  default: return 0;
  }
}

/* A tensor of a file. */
typedef struct mfsdp_safetensors_tensor {
  const char *name; /* UTF-8, not empty, without control characters */
  mfsdp_safetensors_dtype dtype;
  int32_t ndim;         /* 0 for a scalar, at most MFSDP_SAFETENSORS_MAX_NDIM */
  const int64_t *shape; /* ndim sizes, 0 is allowed; not read where ndim is 0 */
  int64_t file_offset;  /* of the first byte, counted from the beginning of the file */
  int64_t nbytes;       /* row-major, little-endian, without padding */
} mfsdp_safetensors_tensor;

/* Two UTF-8 strings: an entry of __metadata__, or a tensor's name and the file it is in. */
typedef struct mfsdp_safetensors_pair {
  const char *key, *value;
} mfsdp_safetensors_pair;

/*
 * The bytes of a tensor of ndim sizes (none: a scalar, one element): row-major, without padding,
 * elements below 8 bits packed. Faults: DTYPE, NDIM, NEGATIVE, SHAPE_LARGE (the product of the
 * sizes, or of those that are not 0: no tool can hold such a shape, even empty), MISALIGNED (the
 * last byte of elements below 8 bits would not be full). Writes *nbytes with FAULT_NONE only.
 */
MFSDP_API mfsdp_safetensors_fault mfsdp_safetensors_nbytes(mfsdp_safetensors_dtype dtype,
                                                           int32_t ndim, const int64_t *shape,
                                                           int64_t *nbytes) {
  int64_t bits = mfsdp_safetensors_dtype_bits(dtype);
  int empty = 0;
  int32_t d;
  if (bits == 0) return MFSDP_SAFETENSORS_FAULT_DTYPE;
  if (ndim < 0 || ndim > MFSDP_SAFETENSORS_MAX_NDIM) return MFSDP_SAFETENSORS_FAULT_NDIM;
  for (d = 0; d < ndim; ++d) {
    if (shape[d] < 0) return MFSDP_SAFETENSORS_FAULT_NEGATIVE;
    if (shape[d] == 0)
      empty = 1;
    else if (!mfsdp_i64_mul(bits, shape[d], &bits))
      return MFSDP_SAFETENSORS_FAULT_SHAPE_LARGE;
  }
  if (empty) bits = 0;
  if (bits % 8 != 0) return MFSDP_SAFETENSORS_FAULT_MISALIGNED;
  *nbytes = bits / 8;
  return MFSDP_SAFETENSORS_FAULT_NONE;
}

#endif /* MFSDP_SAFETENSORS_ELEMENT_H */
