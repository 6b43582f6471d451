/* SPDX-License-Identifier: MIT */
/* outcome.h - one plan with its judgement and its predictions: as a table to read, as JSON rows. */
#ifndef PLAN_OUTCOME_H
#define PLAN_OUTCOME_H

#include "params.h"

#include "mfsdp/newton_schulz.h"
#include "mfsdp/simulate.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a plan goes by and is bound by. */
typedef enum plan_cost {
  PLAN_COST_NEWTON_SCHULZ = 1, /* a step in full products: mfsdp_cost_newton_schulz */
  PLAN_COST_FORM,              /* all steps, of five jordan's: mfsdp_newton_schulz_cost */
  PLAN_COST_ELEMENTS           /* mfsdp_plan_cost_elements */
} plan_cost;
const char *plan_cost_name(plan_cost cost); /* as the command line spells it */

typedef struct plan_question {
  const char *input; /* for titles */
  const plan_params *params;
  mfsdp_planner planner;
  plan_cost cost;
  mfsdp_plan_caps caps;
  int64_t
      banded_wire_cost; /* 0: no matrix becomes banded; -1: what the cluster gives; else as given */
  mfsdp_cluster cluster;
  mfsdp_sim_algorithm algorithm; /* of ZeRO-1; MatrixFSDP is predicted by all four */
  int32_t newton_schulz_steps, replicas;
  size_t chunk_nbytes;
  double model_flops; /* forward and backward of one rank; 0: not asked */
} plan_question;

/* MatrixFSDP by each collective, then the other strategies; MatrixFSDP with bands by each collective. */
enum { PLAN_PREDICTIONS = 8, PLAN_BANDED = 4 };

typedef struct plan_prediction {
  int bands; /* 1: of the plan with its bands */
  mfsdp_sim_strategy strategy;
  mfsdp_sim_algorithm algorithm;
  mfsdp_sim_result result;
} plan_prediction;

typedef struct plan_outcome {
  const plan_question *question;
  mfsdp_plan *plan;
  mfsdp_plan_summary summary;
  int64_t banded_wire_cost; /* that the plan was made with; 0: none */
  int prediction_count; /* PLAN_PREDICTIONS, and PLAN_BANDED more where matrices became banded */
  plan_prediction predictions[PLAN_PREDICTIONS + PLAN_BANDED];
} plan_outcome;

/*
 * Plans, judges and predicts. Matrices become banded where the planner's choice makes the simulated step
 * by DIRECT shorter; where it does not, the summary's predictions are 0. With bands the first
 * PLAN_PREDICTIONS are of the plan without. *out is to be freed with the same context; on failure it is
 * empty.
 */
int plan_outcome_make(mfsdp_context *context, const plan_question *question, int32_t world,
                      plan_outcome *out, plan_error *error);
void plan_outcome_free(mfsdp_context *context, plan_outcome *outcome);

/* The same for all worlds: what the input is. */
void plan_question_print(const plan_question *question, FILE *f);
void plan_outcome_print(const plan_outcome *outcome, FILE *f);
/* A row for each prediction of a JSON list, without the brackets; `first` says that none came before.
 */
void plan_outcome_json(const plan_outcome *outcome, int first, FILE *f);

/* "12.3 GB" of bytes, "4.56 T" of a count; `text` is returned. */
const char *plan_bytes_text(double nbytes, char text[24]);
const char *plan_count_text(double count, char text[24]);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_OUTCOME_H */
