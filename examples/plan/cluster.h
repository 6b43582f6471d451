/* SPDX-License-Identifier: MIT */
/*
 * cluster.h - reads and writes a cluster as a text file of lines `key value`:
 *
 *   # two hosts with four GPUs each, one 100 Gb/s port a host
 *   ranks_per_node         4
 *   net_nbytes_per_s       12.5e9
 *   net_node_nbytes_per_s  12.5e9
 *
 * Keys are the fields of mfsdp_cluster; what a file leaves out keeps the value of
 * mfsdp_cluster_default().
 */
#ifndef PLAN_CLUSTER_H
#define PLAN_CLUSTER_H

#include "error.h"
#include "mfsdp/simulate.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An unknown, repeated or missing key, a value that is no number or out of range, or a word too
 * many is an error that names the file and the line. */
int plan_cluster_read(const char *path, mfsdp_cluster *cluster, plan_error *error);

/* Writes every key in the form that plan_cluster_read takes. */
void plan_cluster_write(const mfsdp_cluster *cluster, FILE *f);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_CLUSTER_H */
