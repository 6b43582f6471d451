/* SPDX-License-Identifier: MIT */
#include "cluster.h"

#include "file.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_NBYTES = 1 << 16, KEY_COUNT = 11 };

static const char *const keys[KEY_COUNT] = {"ranks_per_node",
#define KEY(field, unit, value, low, high) #field,
                                            MFSDP_CLUSTER_TABLE(KEY)
#undef KEY
};

static void set(mfsdp_cluster *cluster, int key, double value) {
  int index = 1;
  if (key == 0) cluster->ranks_per_node = (int32_t)value;
#define SET(field, unit, standard, low, high) \
  if (key == index++) cluster->field = value;
  MFSDP_CLUSTER_TABLE(SET)
#undef SET
}

/* The range of every key, so that a message can name the line. */
static int check(const char *path, int line, int key, double value, plan_error *error) {
  double low = 1.0, most = MFSDP_PLAN_MAX_WORLD;
  int index = 1;
#define RANGE(field, unit, standard, smallest, largest) \
  if (key == index++) {                                 \
    low = (smallest);                                   \
    most = (largest);                                   \
  }
  MFSDP_CLUSTER_TABLE(RANGE)
#undef RANGE
  if (!(value >= low && value <= most))
    return plan_fail(error, "%s:%d: %s is %.10g, needs %.10g to %.10g", path, line, keys[key],
                     value, low, most);
  if (key == 0 && value != (double)(int32_t)value)
    return plan_fail(error, "%s:%d: %s is %g, needs a whole number", path, line, keys[key], value);
  return PLAN_OK;
}

static int read_line(const char *path, int number, char *line, mfsdp_cluster *cluster, int *seen,
                     plan_error *error) {
  char *rest = line, *end;
  const char *key = plan_file_word(&rest), *text = plan_file_word(&rest);
  double value;
  int k = 0;
  if (!text || plan_file_word(&rest))
    return plan_fail(error, "%s:%d: needs a key and a value", path, number);
  while (k < KEY_COUNT && strcmp(keys[k], key) != 0)
    ++k;
  if (k == KEY_COUNT)
    return plan_fail(error,
                     "%s:%d: unknown key '%.40s'; keys are ranks_per_node, node_latency_us, "
                     "net_latency_us, node_nbytes_per_s, net_nbytes_per_s, net_node_nbytes_per_s, "
                     "flops_per_s, memory_nbytes_per_s, memory_nbytes, matrix_us, "
                     "newton_schulz_flops_per_s",
                     path, number, key);
  if (seen[k]) return plan_fail(error, "%s:%d: %s is there twice", path, number, key);
  seen[k] = 1;
  value = strtod(text, &end);
  if (*end || end == text)
    return plan_fail(error, "%s:%d: %s is '%.40s', needs a number", path, number, key, text);
  if (check(path, number, k, value, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  set(cluster, k, value);
  return PLAN_OK;
}

int plan_cluster_read(const char *path, mfsdp_cluster *cluster, plan_error *error) {
  int seen[KEY_COUNT] = {0}, number = 0, status = PLAN_OK;
  char *text, *rest, *line;
  *cluster = mfsdp_cluster_default();
  if (plan_file_read_text(path, MOST_NBYTES, &text, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  rest = text;
  while (status == PLAN_OK && (line = plan_file_line(&rest, &number)) != NULL)
    status = read_line(path, number, line, cluster, seen, error);
  free(text);
  return status;
}

void plan_cluster_write(const mfsdp_cluster *cluster, FILE *f) {
  fprintf(f, "%-22s %d\n", keys[0], (int)cluster->ranks_per_node);
#define WRITE(field, unit, standard, low, high) \
  fprintf(f, "%-22s %.9g # %s\n", #field, cluster->field, unit);
  MFSDP_CLUSTER_TABLE(WRITE)
#undef WRITE
}
