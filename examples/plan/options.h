/* SPDX-License-Identifier: MIT */
/* options.h - the command line of mfsdp-plan. */
#ifndef PLAN_OPTIONS_H
#define PLAN_OPTIONS_H

#include "models.h"
#include "outcome.h"

#include "mfsdp/simulate.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, help); the option is written with - for _. */
#define PLAN_OPTION_TABLE(X)                                                                       \
  X(world, "N[,N..]", "ranks to plan for, each 1 to 1048576; needed")                              \
  X(planner, "NAME", "round-robin, role-greedy, scope-greedy, cost-aware or balanced")             \
  X(cost, "NAME",                                                                                  \
    "newton-schulz (default): plan by its work in full products; form: by what really "            \
    "runs; elements: as the paper does")                                                           \
  X(max_resident, "BYTES", "cap on a rank's resident bytes, before optimizer state")               \
  X(max_gamma, "PERMILLE", "cap on every unit's gamma, in thousandths, at least 1000")             \
  X(max_owners, "N", "cap on the owners of a unit, at least 1")                                    \
  X(allow_banded, "COST",                                                                          \
    "lets matrices lie in row bands; COST: units of --cost that a byte takes on a "                \
    "link, or auto")                                                                               \
  X(cluster, "FILE", "lines of `key value`; default: nodes of 8 A100, data sheet rates")           \
  X(rules, "FILE",                                                                                 \
    "lines of `pattern role view unit` for names of checkpoints, tried before "                    \
    "the built-in ones")                                                                           \
  X(dtype, "NAME", "f32, bf16 or f16 to train in; default: as the input says")                     \
  X(views, "NAME", "whole (default) or heads: how built-in models cut query, key and value")       \
  X(collective, "NAME", "direct (default), ring, hierarchical or native, for ZeRO-1")              \
  X(steps, "N", "Newton-Schulz steps, 0 to 100; default 5")                                        \
  X(replicas, "N", "HSDP: copies of the ranks, 1 to 1048576; default 1")                           \
  X(tokens, "N", "tokens of a rank and step: adds 6 N active elements FLOPs; default 0")           \
  X(chunk, "BYTES", "of RING and of DIRECT reductions; default 4194304")                           \
  X(transport, "NAME", "of --calibrate: threads (default), or mpi for the processes of an mpirun") \
  X(json, "FILE", "writes the rows as JSON")                                                       \
  X(svg, "FILE", "draws ranks x units")

enum { PLAN_MOST_WORLDS = 64 };

typedef struct plan_options {
  char **inputs; /* points into argv */
  int input_count;
  int32_t worlds[PLAN_MOST_WORLDS];
  int world_count;
  mfsdp_planner planner;
  plan_cost cost;
  mfsdp_dtype dtype; /* 0: as the input says */
  plan_views views;
  mfsdp_sim_algorithm algorithm;
  int32_t steps, replicas;
  int64_t tokens, chunk;
  mfsdp_plan_caps caps;
  int64_t banded_wire_cost;                 /* 0: no bands, -1: from the cluster */
  const char *cluster, *rules, *json, *svg; /* NULL: not given */
  int help;
  int calibrate; /* 1: measure a cluster; inputs[0], if there, is the file for it */
  int use_mpi;
} plan_options;

/* Reorders argv so that inputs come first. PLAN_USAGE_ERROR with one line for anything unknown,
 * repeated, missing or out of range. After --help nothing else is checked. */
int plan_options_parse(int argc, char **argv, plan_options *options, plan_error *error);
void plan_options_help(FILE *f);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_OPTIONS_H */
