/* SPDX-License-Identifier: MIT */
/*
 * launch.h - which rank this process is, from the variables that its launcher set.
 *
 *   mfsdp_launch launch;
 *   MFSDP_TRY(mfsdp_launch_read(&context, NULL, NULL, &launch));
 *   printf("rank %d of %d, number %d on its host, by %s\n", launch.rank, ...);
 *
 * The first launcher of this list whose variables are there is believed:
 *
 *   launcher    rank                  world                 on its host
 *   torchrun    RANK                  WORLD_SIZE            LOCAL_RANK, LOCAL_WORLD_SIZE
 *   Open MPI    OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK, ..._LOCAL_SIZE
 *   MPICH       PMI_RANK              PMI_SIZE              MPI_LOCALRANKID, MPI_LOCALNRANKS
 *   SLURM       SLURM_PROCID          SLURM_NTASKS          SLURM_LOCALID, -
 *   none: rank 0 of 1
 *
 * SLURM counts only inside a step that srun started (SLURM_STEP_ID): its batch script and salloc's
 * shell carry the other variables as well, and run one process. torchrun's names are also what
 * scripts export by hand: where they disagree with the Open MPI or MPICH that started the process,
 * that is an error. A variable that is there must be a number that makes sense; half a launcher is
 * an error that names the missing variable.
 * Also: where rank 0 listens (MASTER_ADDR, MASTER_PORT), and which job this is (the launcher's number
 * of it).
 * Does not: find peers, choose devices (cuda/bootstrap.h), or set anything. Link flags: none.
 */
#ifndef MFSDP_POSIX_LAUNCH_H
#define MFSDP_POSIX_LAUNCH_H

#include "../context.h"

#include <errno.h>
#include <stdlib.h>

typedef struct mfsdp_launch {
  size_t struct_nbytes;
  const char *launcher; /* "torchrun", "Open MPI", "MPICH", "SLURM" or "none"; NULL: as "none" */
  int32_t rank, world;
  int32_t local_rank, local_world; /* on this host; -1: the launcher did not say */
} mfsdp_launch;

/* The value of a variable, or NULL. `user` is the caller's. */
typedef const char *(*mfsdp_launch_getter)(void *user, const char *name);

MFSDP_API const char *mfsdp__launch_getenv(void *user, const char *name) {
  (void)user;
  return getenv(name);
}

typedef struct mfsdp__launcher {
  const char *name, *rank, *world, *local_rank, *local_world;
  const char *needs; /* a variable without which the launcher is not in charge; NULL: none */
} mfsdp__launcher;

/* In order of precedence. */
MFSDP_API const mfsdp__launcher *mfsdp__launchers(int *count) {
  static const mfsdp__launcher launchers[] = {
      {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL},
      {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE", NULL},
      {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL},
      {"SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL, "SLURM_STEP_ID"},
  };
  *count = (int)(sizeof(launchers) / sizeof(launchers[0]));
  return launchers;
}

/* A whole number from 0 to 2^20 without anything around it; *out stays if the variable is not set. */
MFSDP_API mfsdp_status mfsdp__launch_number(mfsdp_context *context, const char *name,
                                            const char *text, int32_t *out) {
  char *end = NULL;
  long value;
  if (text == NULL) return MFSDP_OK;
  errno = 0;
  value = strtol(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value > 1048576)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "launch: %s is \"%.40s\", needs a whole number from 0 to 1048576", name,
                      text);
  *out = (int32_t)value;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__launch_check(mfsdp_context *context, const mfsdp__launcher *l,
                                           const mfsdp_launch *launch) {
  if (launch->world < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "launch: %s is %d, needs at least 1", l->world,
                      (int)launch->world);
  if (launch->rank >= launch->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "launch: %s is %d and %s is %d, needs a lower rank", l->rank,
                      (int)launch->rank, l->world, (int)launch->world);
  if (launch->local_world == 0 || launch->local_world > launch->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "launch: %s is %d and %s is %d, needs 1 to that",
                      l->local_world, (int)launch->local_world, l->world, (int)launch->world);
  if (launch->local_rank >= (launch->local_world >= 0 ? launch->local_world : launch->world))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "launch: %s is %d and %s is %d, needs a lower one",
                      l->local_rank, (int)launch->local_rank,
                      launch->local_world >= 0 ? l->local_world : l->world,
                      (int)(launch->local_world >= 0 ? launch->local_world : launch->world));
  return MFSDP_OK;
}

/* What launcher l set. *found = 1 if it is in charge. */
MFSDP_API mfsdp_status mfsdp__launch_try(mfsdp_context *context, const mfsdp__launcher *l,
                                         mfsdp_launch_getter get, void *user, int *found,
                                         mfsdp_launch *out) {
  const char *rank = get(user, l->rank), *world = get(user, l->world);
  *found = (rank != NULL || world != NULL) && (l->needs == NULL || get(user, l->needs) != NULL);
  if (!*found) return MFSDP_OK;
  if (rank == NULL || world == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "launch: %s is set and %s is not (%s sets both)",
                      rank != NULL ? l->rank : l->world, rank != NULL ? l->world : l->rank,
                      l->name);
  out->launcher = l->name;
  out->local_rank = out->local_world = -1;
  MFSDP_TRY(mfsdp__launch_number(context, l->rank, rank, &out->rank));
  MFSDP_TRY(mfsdp__launch_number(context, l->world, world, &out->world));
  MFSDP_TRY(
      mfsdp__launch_number(context, l->local_rank, get(user, l->local_rank), &out->local_rank));
  if (l->local_world != NULL)
    MFSDP_TRY(mfsdp__launch_number(context, l->local_world, get(user, l->local_world),
                                   &out->local_world));
  return mfsdp__launch_check(context, l, out);
}

/* RANK and WORLD_SIZE exported by hand under an mpirun must be what the mpirun says. */
MFSDP_API mfsdp_status mfsdp__launch_compare(mfsdp_context *context, mfsdp_launch_getter get,
                                             void *user, const mfsdp_launch *torchrun) {
  int count, i;
  const mfsdp__launcher *launchers = mfsdp__launchers(&count);
  for (i = 1; i <= 2; ++i) { /* Open MPI, MPICH: their processes are the ranks */
    mfsdp_launch other;
    int found;
    memset(&other, 0, sizeof(other));
    MFSDP_TRY(mfsdp__launch_try(context, &launchers[i], get, user, &found, &other));
    if (!found || (other.rank == torchrun->rank && other.world == torchrun->world)) continue;
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "launch: RANK is %d of WORLD_SIZE %d, but %s is %d of %s %d; unset one pair",
                      (int)torchrun->rank, (int)torchrun->world, launchers[i].rank, (int)other.rank,
                      launchers[i].world, (int)other.world);
  }
  return MFSDP_OK;
}

/*
 * Reads the environment, or what `get` finds. COMPLETE. E_ARGUMENT names the variable, its value and
 * what it needs; *out is rank 0 of 1 then.
 */
MFSDP_API mfsdp_status mfsdp_launch_read(mfsdp_context *context, mfsdp_launch_getter get,
                                         void *user, mfsdp_launch *out) {
  int count, i, found = 0;
  const mfsdp__launcher *launchers = mfsdp__launchers(&count);
  mfsdp_launch launch;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "launch: out is NULL");
  if (get == NULL) get = mfsdp__launch_getenv;
  memset(&launch, 0, sizeof(launch));
  launch.struct_nbytes = sizeof(launch);
  launch.launcher = "none";
  launch.world = launch.local_world = 1;
  *out = launch;
  for (i = 0; i < count && !found; ++i)
    MFSDP_TRY(mfsdp__launch_try(context, &launchers[i], get, user, &found, &launch));
  if (found && i == 1) MFSDP_TRY(mfsdp__launch_compare(context, get, user, &launch));
  *out = launch;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__launch_check_struct(mfsdp_context *context,
                                                  const mfsdp_launch *launch) {
  if (launch != NULL && launch->struct_nbytes == sizeof(*launch)) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                    "launch: launch is NULL or its struct_nbytes is not %zu (use "
                    "mfsdp_launch_read)",
                    sizeof(*launch));
}

/*
 * Where rank 0 listens: MASTER_ADDR (into the environment, no copy) and MASTER_PORT. COMPLETE.
 * Under a torchrun whose agent has a store of its own at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE
 * is True) it is the port after that one.
 * E_ARGUMENT: one is not set and there are several ranks (this host is never assumed: ranks elsewhere
 * would wait for nobody), or the port is not 1 to 65535. World 1 needs neither: NULL and 0.
 */
MFSDP_API mfsdp_status mfsdp_launch_meeting_point(mfsdp_context *context,
                                                  const mfsdp_launch *launch,
                                                  mfsdp_launch_getter get, void *user,
                                                  const char **address, int32_t *port) {
  const char *host, *number;
  int32_t value = 0;
  MFSDP_TRY(mfsdp__launch_check_struct(context, launch));
  if (address == NULL || port == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "launch: %s is NULL",
                      address == NULL ? "address" : "port");
  *address = NULL;
  *port = 0;
  if (launch->world <= 1) return MFSDP_OK;
  if (get == NULL) get = mfsdp__launch_getenv;
  host = get(user, "MASTER_ADDR");
  number = get(user, "MASTER_PORT");
  if (host == NULL || host[0] == '\0' || number == NULL)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "launch: %s is not set and there are %d ranks; set MASTER_ADDR to the host of "
        "rank 0 and MASTER_PORT to a free port there, on all ranks",
        host == NULL || host[0] == '\0' ? "MASTER_ADDR" : "MASTER_PORT", (int)launch->world);
  MFSDP_TRY(mfsdp__launch_number(context, "MASTER_PORT", number, &value));
  if (value < 1 || value > 65535)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "launch: MASTER_PORT is %d, needs 1 to 65535",
                      (int)value);
  number = get(user, "TORCHELASTIC_USE_AGENT_STORE");
  if (number != NULL && strcmp(number, "True") == 0) value += value < 65535 ? 1 : -1;
  *address = host;
  *port = value;
  return MFSDP_OK;
}

/* Adds a part of the job's name, if the variable is set; *used goes on where there is no room. */
MFSDP_API void mfsdp__launch_job_part(const char *text, char *job, size_t job_nbytes, size_t *used,
                                      uint64_t *hash) {
  const char *point = *used > 0 ? "." : "";
  if (text == NULL || text[0] == '\0') return;
  if (*used < job_nbytes) (void)snprintf(job + *used, job_nbytes - *used, "%s%s", point, text);
  *used += strlen(point) + strlen(text);
  *hash = mfsdp_hash_bytes(*hash, point, strlen(point));
  *hash = mfsdp_hash_bytes(*hash, text, strlen(text));
}

/*
 * What tells the processes of this run from those of others: MFSDP_JOB, or what the launcher in
 * charge calls it (torchrun: TORCHELASTIC_RUN_ID; Open MPI: PMIX_NAMESPACE; SLURM: job, step and
 * restart); "" if it does not say, or launch->launcher is NULL (a launcher of the caller's own).
 * Only variables that are equal on all ranks: torchrun's count of restarts is each agent's own. A
 * long one ends in its hash. COMPLETE. E_ARGUMENT: job_nbytes is below 40, or struct_nbytes.
 */
MFSDP_API mfsdp_status mfsdp_launch_job(mfsdp_context *context, const mfsdp_launch *launch,
                                        mfsdp_launch_getter get, void *user, char *job,
                                        size_t job_nbytes) {
  static const char *const names[][4] = {
      {"torchrun", "TORCHELASTIC_RUN_ID", NULL, NULL},
      {"Open MPI", "PMIX_NAMESPACE", NULL, NULL},
      {"SLURM", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
  };
  const char *launcher;
  uint64_t hash = MFSDP_HASH_SEED;
  size_t i, k, used = 0;
  MFSDP_TRY(mfsdp__launch_check_struct(context, launch));
  if (job == NULL || job_nbytes < 40)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "launch: job is NULL, or job_nbytes is %zu, needs at least 40", job_nbytes);
  launcher = launch->launcher != NULL ? launch->launcher : "none";
  if (get == NULL) get = mfsdp__launch_getenv;
  job[0] = '\0';
  mfsdp__launch_job_part(get(user, "MFSDP_JOB"), job, job_nbytes, &used, &hash);
  for (i = 0; i < sizeof(names) / sizeof(names[0]) && used == 0; ++i)
    for (k = 1; k < 4 && strcmp(names[i][0], launcher) == 0 && names[i][k] != NULL; ++k)
      mfsdp__launch_job_part(get(user, names[i][k]), job, job_nbytes, &used, &hash);
  if (used >= job_nbytes)
    (void)snprintf(job + job_nbytes - 18, 18, "#%016llx", (unsigned long long)hash);
  return MFSDP_OK;
}

#endif /* MFSDP_POSIX_LAUNCH_H */
