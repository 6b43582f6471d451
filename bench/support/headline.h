/* SPDX-License-Identifier: MIT */
/*
 * headline.h - the published optimizer step times of MatrixFSDP against simulate.h, and what the
 * same model says of 64 to 16,384 ranks. Part of the benchmark `plan`.
 *
 * Published (arXiv 2607.05895): 8 nodes of 8 A100-SXM4-80GB, NVLink and InfiniBand; models of
 * 3.2/6.4/12.9/25.8 billion on 8/16/32/64 ranks; optimizer step of stock FSDP2 with Muon and of
 * MatrixFSDP: 367 -> 87, 1285 -> 89, 3079 -> 91, 5064 -> 93 ms. Its public repository also prints a
 * 32-layer model on 8 ranks: 747 -> 175 ms, "32 layers, hidden 4096, intermediate 16384, 32 heads".
 * Nothing here is measured on such a machine: two rates are fitted to one row, the rest is the
 * model.
 */
#ifndef MFSDP_BENCH_HEADLINE_H
#define MFSDP_BENCH_HEADLINE_H

#include "bench.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds the rows; writes the tables as Markdown and the charts as SVG. Ends the program where it
 * cannot go on. */
void headline_run(bench_report *report, int quick, FILE *tables, FILE *svg);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_HEADLINE_H */
