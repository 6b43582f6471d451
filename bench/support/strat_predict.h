/* SPDX-License-Identifier: MIT */
/*
 * strat_predict.h - what simulate.h says of a strategy on a load, for ranks whose figures were
 * measured (the update with the rate of Newton-Schulz, the model with that of sgemm). It knows
 * whole matrices on owners, slices that are gathered or exchanged, ZeRO-1 and plain data parallel,
 * and of the hybrid the plan itself. Collectives by AUTO are not predicted (all NAN).
 */
#ifndef MFSDP_BENCH_STRAT_PREDICT_H
#define MFSDP_BENCH_STRAT_PREDICT_H

#include "plan/calibrate.h"
#include "strat_load.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct strat_prediction {
  double materialize_s; /* one gather of all units */
  double reduce_s, optimizer_s, verdict_s, step_s, overlapped_s;
  double reduce_nbytes, optimizer_nbytes; /* wire bytes of one step, all ranks together */
} strat_prediction;

void strat_predict(strat_load *load, const plan_calibration *machine, int32_t strategy,
                   strat_prediction *out);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_STRAT_PREDICT_H */
