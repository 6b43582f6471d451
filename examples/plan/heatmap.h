/* SPDX-License-Identifier: MIT */
/* heatmap.h - who holds and computes what: ranks x units, as one SVG. */
#ifndef PLAN_HEATMAP_H
#define PLAN_HEATMAP_H

#include "outcome.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Draws every outcome, one below the other: a map of resident bytes and one of optimizer cost,
 * totals by rank (bars at the right, dashed: the mean) and by unit (bars below), a legend. More
 * ranks than PLAN_HEATMAP_ROWS or more units than PLAN_HEATMAP_COLUMNS share rows and columns,
 * which then show the largest of them. */
int plan_heatmap(const plan_outcome *outcomes, int count, FILE *f, plan_error *error);

enum { PLAN_HEATMAP_ROWS = 128, PLAN_HEATMAP_COLUMNS = 200 };

#ifdef __cplusplus
}
#endif

#endif /* PLAN_HEATMAP_H */
