/* SPDX-License-Identifier: MIT */
/*
 * strategy.h - what a strategy's name means for the library: where parameters live between steps
 * and who updates the matrices. All of them are settings of one plan and one runtime.
 *
 *   const gpt_strategy *strategy = gpt_strategy_at(options.strategy);
 *   gpt_strategy_params(strategy, table.params, table.count);   // before mfsdp_plan_create
 *   gpt_strategy_plan(strategy, &plan_desc);
 *   gpt_strategy_runtime(strategy, &runtime_desc);
 */
#ifndef GPT_STRATEGY_H
#define GPT_STRATEGY_H

#include "mfsdp/runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The names in the order of the numbers below, as the table of options writes a choice. */
#define GPT_STRATEGIES "matrix|gather|alltoall|zero1|replicated|hybrid"
enum {
  GPT_STRATEGY_MATRIX = 0, /* owners hold whole matrices and update them */
  GPT_STRATEGY_GATHER,     /* row bands on all ranks; every rank gathers and updates all matrices */
  GPT_STRATEGY_ALLTOALL,   /* row bands on all ranks; they go to a home rank and back */
  GPT_STRATEGY_ZERO1,      /* parameters stay on every rank; owners update and send them */
  GPT_STRATEGY_REPLICATED, /* everything on every rank: plain data parallel */
  GPT_STRATEGY_HYBRID,     /* as MATRIX, but the planner may cut a matrix into bands */
  GPT_STRATEGY_COUNT
};

typedef struct gpt_strategy {
  const char *name;
  mfsdp_placement matrices, elements; /* of MATRIX parameters, and of all others */
  mfsdp_residency residency;
  int32_t everywhere;   /* 1: every rank updates a matrix in bands, 0: its home alone */
  int32_t allow_banded; /* 1: the planner may choose bands */
} gpt_strategy;

/* The strategy of a number; NULL past the last. */
const gpt_strategy *gpt_strategy_at(int32_t index);

/* Placement of `count` parameters. */
void gpt_strategy_params(const gpt_strategy *strategy, mfsdp_param *params, int32_t count);
/* Residency, and what the planner may do. */
void gpt_strategy_plan(const gpt_strategy *strategy, mfsdp_plan_desc *desc);
/* How matrices in bands are updated. */
void gpt_strategy_runtime(const gpt_strategy *strategy, mfsdp_runtime_desc *desc);

#ifdef __cplusplus
}
#endif

#endif /* GPT_STRATEGY_H */
