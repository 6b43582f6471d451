/* SPDX-License-Identifier: MIT */
/*
 * strat_load.h - the models of the strategies benchmark: the example's GPT, which trains, and shape
 * lists of larger models, whose gradients are made up. Both are a gpt_job: the table of parameters
 * is what differs. Everything is fp32; hidden matrices get Muon, all else AdamW.
 *
 *   const strat_model *model = strat_model_find("gpt-256");
 *   strat_load load;
 *   strat_load_create(&load, model, 4);
 *   load.job.options.strategy = GPT_STRATEGY_ZERO1;  gpt_job_set_strategy(&load.job);
 *   strat_load_destroy(&load);
 */
#ifndef MFSDP_BENCH_STRAT_LOAD_H
#define MFSDP_BENCH_STRAT_LOAD_H

#include "gpt_job.h"
#include "plan/models.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct strat_model {
  const char *name, *what; /* on the command line and in rows; in words */
  const char *built_in;    /* of plan/models.h; NULL: the example's GPT */
  int64_t layers, dim;     /* dim: of the GPT */
  int trains;              /* 1: it has a forward and a backward */
} strat_model;

/* NULL past the last, or for an unknown name. */
const strat_model *strat_model_at(int index);
const strat_model *strat_model_find(const char *name);

typedef struct strat_load {
  const strat_model *model;
  gpt_job job;
  plan_params params; /* of a built-in model: what job.table points to */
  int64_t elements;   /* of all parameters */
  int whole;          /* 1: whole steps are measured too; those of models that train */
} strat_load;

/* Strategy matrix, planner balanced, no clipping: set what is to differ afterwards. Prints and
 * exits without memory. */
void strat_load_create(strat_load *load, const strat_model *model, int32_t world);
void strat_load_destroy(strat_load *load);

/* mfsdp_init_fn of any load. */
void strat_load_init(void *user, int32_t param, int64_t first, int64_t count, float *dst);
/* A made-up gradient: full rank, another one for every (parameter, sample block). */
void strat_load_gradient(int32_t param, int64_t block, int64_t count, float *dst);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_STRAT_LOAD_H */
