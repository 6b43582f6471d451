/* SPDX-License-Identifier: MIT */
/*
 * strat_rank.h - one strategy on one load, measured by all its ranks.
 *
 *   strat_result result;
 *   strat_measure(&load, STRAT_STEP_ALONE, 1.0, &result);     // on every process
 *
 * All ranks read one clock: threads, or processes of one machine. A time is that from the first
 * rank's start to the last one's end.
 *
 *   STRAT_STEP_ALONE   gradients are made up, queues in place, ranks meet before every reduction:
 *                      reduce, verdict and optimizer, bytes and memory, and the checksum. With
 *                      load.whole: materialize, one gather of every unit.
 *   STRAT_WHOLE        whole steps with the model, queues in place
 *   STRAT_QUEUES       worker queues, one unit ahead and behind, nobody waits for anybody: whole
 *                      steps where the load trains, otherwise made-up gradients
 *   STRAT_IN_BACKWARD  the same with step_in_backward
 *
 * optimizer: from the last reduction to the end of the update, exchanges and broadcasts included,
 * less the verdict's message. exposed: from the end of the last reduction (where it ran, on its
 * queue) to the end of the step: what the optimizer adds that nothing hides, the verdict included.
 */
#ifndef MFSDP_BENCH_STRAT_RANK_H
#define MFSDP_BENCH_STRAT_RANK_H

#include "plan/calibrate.h"
#include "strat_load.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum strat_variant {
  STRAT_STEP_ALONE = 0,
  STRAT_WHOLE,
  STRAT_QUEUES,
  STRAT_IN_BACKWARD,
  STRAT_AS_GIVEN, /* as QUEUES, by the options that the job has already */
  STRAT_VARIANTS
} strat_variant;

enum {
  STRAT_MATERIALIZE = 0,
  STRAT_REDUCE,
  STRAT_VERDICT,
  STRAT_OPTIMIZER,
  STRAT_EXPOSED,
  STRAT_STEP,
  STRAT_TIMES
};
enum { STRAT_MOST_REPEATS = 64 };

typedef struct strat_result {
  int refused; /* 1: the library does not do this, and `why` says so */
  char why[384];
  double seconds[STRAT_TIMES][STRAT_MOST_REPEATS];
  int count[STRAT_TIMES];
  double sent[MFSDP_TRAFFIC_CLASS_COUNT]; /* payload bytes of one step, all ranks together */
  double resident, held; /* bytes of the fullest rank: between steps; all that the runtime holds */
  double resident_bound; /* below which no plan of whole matrices is proven; NAN unless SHARDED */
  double predicted_held; /* mfsdp_runtime_memory's, of the fullest rank */
  double rss;            /* of processes: the most of a rank over what it had before; else NAN */
  uint64_t checksum;     /* of all parameters after two steps */
} strat_result;

/* Collective; the result is rank 0's. job.options.ranks, processes and process_rank are set, and
 * the options of the strategy. `seconds`: about what the repeats of one figure may take; there is
 * one at least, behind one that warms up unless that takes longer. Prints and exits on failures
 * that are no refusals. */
void strat_measure(strat_load *load, strat_variant variant, double seconds, strat_result *result);

/* What these ranks have, all at once: for predictions. Collective; the same on every process. */
void strat_calibrate(strat_load *load, plan_calibration *out);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_STRAT_RANK_H */
