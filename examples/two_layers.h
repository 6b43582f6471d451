/* SPDX-License-Identifier: MIT */
/*
 * two_layers.h - what loop_by_hand.c and loop.c train: two matrices whose product shall reverse a vector.
 * The parts that a trainer has already; nothing of the library but its random numbers.
 */
#ifndef EXAMPLES_TWO_LAYERS_H
#define EXAMPLES_TWO_LAYERS_H

#include "mfsdp/random.h"

#include <string.h>

#define LAYERS 2
#define WIDTH 24
#define ROWS 16 /* samples of each rank */

typedef struct net {
  float x[LAYERS + 1][ROWS * WIDTH]; /* input, and what each layer made of it */
  float d[ROWS * WIDTH];             /* gradient of the mean loss with respect to the last x */
  double loss;
} net;

static inline void net_load(net *n, int rank, int ranks, int step) {
  int i;
  for (i = 0; i < ROWS * WIDTH; ++i)
    n->x[0][i] =
        mfsdp_random_normal(1, (uint64_t)step * (uint64_t)ranks + (uint64_t)rank, (uint64_t)i);
}

static inline float net_init(int layer, int64_t i) {
  return 0.2f * mfsdp_random_normal(2, (uint64_t)layer, (uint64_t)i);
}

/* x[layer + 1] = x[layer] w^T; behind the last layer the loss and its gradient */
static inline void net_forward(net *n, int layer, const float *w) {
  const float *x = n->x[layer];
  float *y = n->x[layer + 1];
  int r, o, i;
  for (r = 0; r < ROWS; ++r)
    for (o = 0; o < WIDTH; ++o) {
      y[r * WIDTH + o] = 0.0f;
      for (i = 0; i < WIDTH; ++i)
        y[r * WIDTH + o] += x[r * WIDTH + i] * w[o * WIDTH + i];
    }
  if (layer + 1 < LAYERS) return;
  n->loss = 0.0;
  for (r = 0; r < ROWS; ++r)
    for (o = 0; o < WIDTH; ++o) {
      const float wrong = y[r * WIDTH + o] - n->x[0][r * WIDTH + WIDTH - 1 - o];
      n->loss += 0.5 * wrong * wrong / ROWS;
      n->d[r * WIDTH + o] = wrong / ROWS;
    }
}

/* dw += d^T x[layer]; d = d w */
static inline void net_backward(net *n, int layer, const float *w, float *dw) {
  const float *x = n->x[layer];
  float d[ROWS * WIDTH];
  int r, o, i;
  memcpy(d, n->d, sizeof(d));
  memset(n->d, 0, sizeof(n->d));
  for (r = 0; r < ROWS; ++r)
    for (o = 0; o < WIDTH; ++o)
      for (i = 0; i < WIDTH; ++i) {
        dw[o * WIDTH + i] += d[r * WIDTH + o] * x[r * WIDTH + i];
        n->d[r * WIDTH + i] += d[r * WIDTH + o] * w[o * WIDTH + i];
      }
}

#endif /* EXAMPLES_TWO_LAYERS_H */
