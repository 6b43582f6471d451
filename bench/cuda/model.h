/* SPDX-License-Identifier: MIT */
/*
 * model.h - the tensors of a GPT-2 with tied embeddings, for the step of an optimizer: hidden matrices,
 * query, key and value apart, and all that is updated element by element.
 *
 * The same list as that of bench/peers/torch_gpu.py, and for gpt2-1.5b that of examples/plan/models.c;
 * tests/cuda/bench_device_test.cpp compares them.
 */
#ifndef MFSDP_BENCH_MODEL_H
#define MFSDP_BENCH_MODEL_H

#include "mfsdp/optimizer.h"

typedef struct model {
  const char *name;
  int64_t layers, width, vocab, positions;
} model;

#define MODEL_GPT2 \
  { "gpt2-1.5b", 48, 1600, 50257, 1024 }
#define MODEL_TINY \
  { "gpt2-tiny", 2, 16, 64, 32 }

typedef struct model_tensor {
  int64_t rows, cols;
  int32_t matrix; /* 1: the matrix optimizer's */
} model_tensor;

#define MODEL_LAYER 14 /* tensors of a layer: six matrices, two norms, four biases */
#define MODEL_REST 4   /* the embeddings, and the last norm */

static inline int32_t model_tensor_count(const model *m) {
  return (int32_t)m->layers * MODEL_LAYER + MODEL_REST;
}

static inline model_tensor model_tensor_make(int64_t rows, int64_t cols, int32_t matrix) {
  model_tensor tensor;
  tensor.rows = rows;
  tensor.cols = cols;
  tensor.matrix = matrix;
  return tensor;
}

/* index: less than model_tensor_count. Layers first; a vector is one row. */
static inline model_tensor model_tensor_at(const model *m, int32_t index) {
  const int64_t width = m->width;
  const int32_t rest = index - (int32_t)m->layers * MODEL_LAYER;
  if (rest == 0) return model_tensor_make(m->vocab, width, 0);
  if (rest == 1) return model_tensor_make(m->positions, width, 0);
  if (rest > 1) return model_tensor_make(1, width, 0);
  switch (index % MODEL_LAYER) {
  case 0:
  case 1:
  case 2:
  case 3: return model_tensor_make(width, width, 1); /* query, key, value, output */
  case 4: return model_tensor_make(4 * width, width, 1);
  case 5: return model_tensor_make(width, 4 * width, 1);
  case 6: return model_tensor_make(1, 3 * width, 0);
  case 7: return model_tensor_make(1, 4 * width, 0);
  default: return model_tensor_make(1, width, 0);
  }
}

/* Elements of the tensors before `index`, each one padded to the alignment: where it starts in an
 * array of all. */
static inline int64_t model_offset(const model *m, int32_t index) {
  int64_t offset = 0, padded = 0;
  int32_t i;
  for (i = 0; i < index; ++i) {
    const model_tensor tensor = model_tensor_at(m, i);
    (void)mfsdp_i64_align(tensor.rows * tensor.cols, &padded); /* far from an overflow */
    offset += padded;
  }
  return offset;
}

#endif /* MFSDP_BENCH_MODEL_H */
