/* SPDX-License-Identifier: MIT */
/*
 * strat_tradeoffs.h - what a step costs in time and memory under each of the options that trade one
 * for the other: units gathered ahead (none, 1, 2), parameters kept from forward to backward, the
 * algorithm of the collectives, and step_in_backward. Strategy `matrix`, whole steps, worker queues
 * (in place where nothing is gathered ahead and no step runs in backward). Memory is all that the
 * runtime holds, of the fullest rank. The table is sorted by time; * marks what nothing beats in
 * both.
 */
#ifndef MFSDP_BENCH_STRAT_TRADEOFFS_H
#define MFSDP_BENCH_STRAT_TRADEOFFS_H

#include "strat_rank.h"
#include "strat_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* On a model that trains. process_rank: of MPI ranks; -1: threads. Rows go to `rows`, with the
 * options in place of a strategy; what is there already is taken from there. */
void strat_tradeoffs(const strat_model *model, const char *links, int32_t world,
                     int32_t process_rank, double seconds, strat_rows *rows);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_STRAT_TRADEOFFS_H */
