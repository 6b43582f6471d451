/* SPDX-License-Identifier: MIT */
/*
 * safetensors.h - reads and writes the headers of safetensors files, and the index of several.
 *
 *   mfsdp_safetensors_source source = mfsdp_safetensors_source_memory("a", bytes, nbytes);
 *   mfsdp_safetensors *file;
 *   const mfsdp_safetensors_tensor *t;
 *   if (mfsdp_safetensors_create(&context, &source, &file, NULL) != MFSDP_OK) ...
 *   t = mfsdp_safetensors_find(file, "layers.0.weight"); // dtype, shape, file_offset, nbytes
 *   mfsdp_safetensors_destroy(&context, file);
 *
 *   read.h    checks a header and looks tensors up       source.h  bytes from a callback or memory
 *   write.h   where each tensor goes, and the header     element.h dtypes and tensors
 *   index.h   model.safetensors.index.json               fault.h   what a file can have wrong
 *
 * Format: https://github.com/huggingface/safetensors, "Format". 8 bytes of little-endian length, a
 * JSON object {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...,
 * "__metadata__": {"key": "text"}}, then the data without holes. Files come from anywhere: a file
 * that breaks a rule is MFSDP_E_FORMAT with a fault of its own; memory and time are bounded by the
 * length of the header, and nothing recurses.
 * Stricter than the reference: no key twice, no member but the three, names neither empty nor with
 * control characters, no 0 character in any string, at most 64 dimensions, { in byte 0.
 * Does not: open files, convert, or look at tensor data.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_H
#define MFSDP_SAFETENSORS_H

#include "safetensors/element.h"
#include "safetensors/fault.h"
#include "safetensors/index.h"
#include "safetensors/json.h"
#include "safetensors/read.h"
#include "safetensors/sort.h"
#include "safetensors/source.h"
#include "safetensors/text.h"
#include "safetensors/utf8.h"
#include "safetensors/write.h"

#endif /* MFSDP_SAFETENSORS_H */
