/* SPDX-License-Identifier: MIT */
/*
 * collective.c - gather and reduce of uneven segments by every algorithm that there is, on thread ranks
 * or on MPI processes, beside what the same machine does for the same bytes in the same run.
 *
 * A unit of B bytes of fp32; rank 0 owns gamma / world of it, the others share the rest, so gamma 1
 * is balanced and gamma = world is one owner of everything. Time t is that of the slowest rank; the smallest of the repeats, in which all ways take turns.
 *   algbw = B / t
 *   busbw = (B - smallest segment) / t: what the busiest rank must at least receive (gather) or send
 *           (reduce): (world - 1) / world * B when balanced, B with one owner
 * Peers: MPI's own (support/coll_peers.h), the best of which is the peer of every row of ours.
 * `auto` is what AUTO picks for links of --rate, or for 5 GB/s, with 50 or 5 us for a message.
 * Limits: on threads, plain memcpy of the same segments by all ranks at once, or sums straight from
 * all ranks' buffers; with --rate the wire's. `wrong` counts elements over all ranks.
 */
#include "support/bench.h"
#include "support/coll_rank.h"

#include "mfsdp/host/transport_threads.h"
#if MFSDP_EXAMPLE_MPI
#include "mfsdp/mpi/transport_mpi.h"
#include "support/coll_peers.h"
#endif

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

enum { MOST_REPEATS = 64, MOST_WAYS = 20 };

typedef struct settings {
  bench_options bench;
  int use_mpi;
  int32_t ranks;
  double mbytes, rate_mbit, gamma, seconds; /* gamma 0: several; rate 0: no wire */
  const char *op;                           /* NULL: both */
  double chunk_kbytes;                      /* 0: the library's own */
} settings;

/* One way to do a case: ours, a peer, or a limit. */
enum { WAY_OURS, WAY_PEER, WAY_LIMIT };
typedef struct way {
  char name[48];
  int role;
  coll_ours ours;
  int peer;
  double times[MOST_REPEATS];
  bench_stats stats;
  int count;
  int64_t wrong;
} way;

struct team;
typedef struct member {
  coll_rank rank;
  struct team *team;
  way ways[MOST_WAYS];
  int way_count, one_clock; /* all ranks read the same clock: they are on one machine */
#if MFSDP_EXAMPLE_MPI
  coll_peer peers[COLL_MOST_PEERS];
  int peer_count;
#endif
  mfsdp_thread thread;
} member;

/* What all ranks of this process share. */
typedef struct team {
  const settings *set;
  bench_report report;
  mfsdp_threads_world *world;
  pthread_barrier_t barrier;
  double words[COLL_MOST_RANKS];
  member *members;
} team;

/* ---- ranks together ---- */

static void meet(member *m) {
#if MFSDP_EXAMPLE_MPI
  if (m->team->set->use_mpi) {
    (void)MPI_Barrier(MPI_COMM_WORLD);
    return;
  }
#endif
  (void)pthread_barrier_wait(&m->team->barrier);
}

/* The largest, or the sum, over all ranks. */
static double combine(member *m, double value, int largest) {
  double result = 0.0;
  int32_t r;
#if MFSDP_EXAMPLE_MPI
  if (m->team->set->use_mpi) {
    (void)MPI_Allreduce(&value, &result, 1, MPI_DOUBLE, largest ? MPI_MAX : MPI_SUM,
                        MPI_COMM_WORLD);
    return result;
  }
#endif
  m->team->words[m->rank.rank] = value;
  meet(m);
  for (r = 0; r < m->rank.world; ++r) {
    const double other = m->team->words[r];
    result = r == 0 ? other : !largest ? result + other : other > result ? other : result;
  }
  meet(m);
  return result;
}

/* ---- the limits of threads ---- */

static void copy_segments(member *m, const coll_split *split) {
  int32_t step;
  for (step = 0; step < m->rank.world; ++step) { /* not all from rank 0 first */
    const int32_t q = (m->rank.rank + step) % m->rank.world;
    memcpy(m->rank.full + split->first[q], m->team->members[q].rank.shard,
           (size_t)split->count[q] * sizeof(float));
  }
}

static void sum_segments(member *m, const coll_split *split) {
  coll_rank *r = &m->rank;
  const void *terms[COLL_MOST_RANKS];
  int32_t q;
  for (q = 0; q < r->world; ++q)
    terms[q] = m->team->members[q].rank.grad + split->first[r->rank];
  coll_need(r, r->backend->ops->sum_terms(r->backend->self, r->queue, r->sum, 1, terms, MFSDP_F32,
                                          r->world, split->count[r->rank]));
}

/* ---- one case ---- */

static void run_way(member *m, way *w, const coll_split *split, mfsdp_coll_kind kind) {
  if (w->role == WAY_OURS) {
    coll_ours_run(&m->rank, &w->ours);
  } else if (w->role == WAY_LIMIT) {
    if (kind == MFSDP_COLL_GATHER)
      copy_segments(m, split);
    else
      sum_segments(m, split);
  } else {
#if MFSDP_EXAMPLE_MPI
    coll_peer_run(&m->peers[w->peer], &m->rank, split);
#endif
  }
}

/* From the first rank's start to the last one's end: where ranks share cores, a rank's own clock
 * starts only when it gets one. */
static double time_way(member *m, way *w, const coll_split *split, mfsdp_coll_kind kind) {
  double start, end;
  meet(m);
  start = bench_now();
  run_way(m, w, split, kind);
  end = bench_now();
  if (!m->one_clock) return combine(m, end - start, 1);
  end = combine(m, end, 1);
  return end + combine(m, -start, 1);
}

static way *add_way(member *m, const char *name, int role) {
  way *w = &m->ways[m->way_count++];
  memset(w, 0, sizeof(*w));
  (void)snprintf(w->name, sizeof(w->name), "%s", name);
  w->role = role;
  return w;
}

/* What AUTO reckons with; its chunks, unless told, are those of such links. */
static mfsdp_wire_cost wire_of(const settings *set) {
  mfsdp_wire_cost wire;
  const int shaped = set->rate_mbit > 0.0;
  wire.latency_ns = wire.between_latency_ns = shaped ? 50000 : 5000;
  wire.ns_per_mib = wire.between_ns_per_mib =
      shaped ? (int64_t)(1048576.0 * 8e3 / set->rate_mbit) : 209715;
  return wire;
}

static void make_ways(member *m, const coll_split *split, mfsdp_coll_kind kind) {
  coll_how how;
  int algorithm;
  how.chunk_nbytes = (size_t)(m->team->set->chunk_kbytes * 1024.0);
  m->way_count = 0;
  for (algorithm = MFSDP_DIRECT; algorithm <= MFSDP_ALGORITHM_AUTO; ++algorithm) {
    way *w = add_way(m, mfsdp_algorithm_name((mfsdp_algorithm)algorithm), WAY_OURS);
    how.algorithm = (mfsdp_algorithm)algorithm;
    memset(&how.wire, 0, sizeof(how.wire)); /* the others know of no links, as by default */
    if (algorithm == MFSDP_ALGORITHM_AUTO) how.wire = wire_of(m->team->set);
    if (!coll_ours_make(&m->rank, &w->ours, split, kind, &how)) --m->way_count;
  }
  if (!m->team->set->use_mpi)
    (void)add_way(m, kind == MFSDP_COLL_GATHER ? "memcpy" : "sum in place", WAY_LIMIT);
#if MFSDP_EXAMPLE_MPI
  if (m->team->set->use_mpi) {
    int i;
    m->peer_count = coll_peers_make(kind, m->peers);
    for (i = 0; i < m->peer_count; ++i)
      add_way(m, m->peers[i].name, WAY_PEER)->peer = i;
  }
#endif
}

static void free_ways(member *m) {
  int i;
  for (i = 0; i < m->way_count; ++i)
    if (m->ways[i].role == WAY_OURS) coll_ours_free(&m->rank, &m->ways[i].ours);
#if MFSDP_EXAMPLE_MPI
  if (m->team->set->use_mpi) coll_peers_free(m->peers, m->peer_count);
#endif
}

/* The first run of every way is checked, and says how many more there is time for. */
static void first_runs(member *m, const coll_split *split, mfsdp_coll_kind kind, int *repeats) {
  int i;
  for (i = 0; i < m->way_count; ++i) {
    way *w = &m->ways[i];
    double seconds;
    coll_rank_spoil(&m->rank, split, kind);
    seconds = time_way(m, w, split, kind);
    w->wrong = (int64_t)combine(m, (double)coll_rank_wrong(&m->rank, split, kind), 0);
    repeats[i] = (int)(m->team->set->seconds / seconds);
    if (repeats[i] > MOST_REPEATS) repeats[i] = MOST_REPEATS;
    if (repeats[i] == 0) w->times[w->count++] = seconds;
  }
}

static void measure(member *m, const coll_split *split, mfsdp_coll_kind kind) {
  int repeats[MOST_WAYS], round, i;
  first_runs(m, split, kind, repeats);
  for (round = 0; round < MOST_REPEATS; ++round)
    for (i = 0; i < m->way_count; ++i)
      if (round < repeats[i])
        m->ways[i].times[m->ways[i].count++] = time_way(m, &m->ways[i], split, kind);
  for (i = 0; i < m->way_count; ++i)
    m->ways[i].stats = bench_summarize(m->ways[i].times, m->ways[i].count);
}

/* ---- rows ---- */

/* The fastest way of a role, or NULL. */
static const way *best(const member *m, int role) {
  const way *found = NULL;
  int i;
  for (i = 0; i < m->way_count; ++i)
    if (m->ways[i].role == role && (found == NULL || m->ways[i].stats.min < found->stats.min))
      found = &m->ways[i];
  return found;
}

static void report_way(member *m, const way *w, const coll_split *split, const char *name) {
  const settings *set = m->team->set;
  const way *peer = best(m, WAY_PEER), *limit = best(m, WAY_LIMIT);
  const double unit = (double)split->total * 4.0, least = unit - (double)split->smallest * 4.0;
  bench_row row = bench_row_default();
  char wire[32];
  row.bench = "collective";
  row.name = name;
  row.unit = "GB/s";
  row.metric = "algbw";
  row.value = unit / w->stats.min * 1e-9;
  row.wrong = w->wrong;
  if (w->role == WAY_OURS && peer != NULL) {
    row.peer = peer->name;
    row.ratio_to_peer = peer->stats.min / w->stats.min;
  }
  if (set->rate_mbit > 0.0) {
    (void)snprintf(wire, sizeof(wire), "%g Mbit/s wire", set->rate_mbit);
    row.limit = wire;
    row.ratio_to_limit = least / w->stats.min / (set->rate_mbit * 125e3);
  } else if (limit != NULL && limit != w) {
    row.limit = limit->name;
    row.ratio_to_limit = limit->stats.min / w->stats.min;
  }
  bench_add(&m->team->report, &row);
  row.metric = "busbw";
  row.value = least / w->stats.min * 1e-9;
  bench_add(&m->team->report, &row);
  printf("    %d times: min %.2f, median %.2f, p99 %.2f ms\n", w->count, w->stats.min * 1e3,
         w->stats.median * 1e3, w->stats.p99 * 1e3);
}

static void run_case(member *m, mfsdp_coll_kind kind, double gamma) {
  const settings *set = m->team->set;
  const char *op = kind == MFSDP_COLL_GATHER ? "gather" : "reduce";
  static coll_split splits[COLL_MOST_RANKS]; /* one for each rank of this process */
  coll_split *split = &splits[m->rank.rank];
  char name[96];
  int i;
  coll_split_make(split, m->rank.world, (int64_t)(set->mbytes * 1e6 / 4.0), gamma);
  coll_rank_fill(&m->rank, split);
  make_ways(m, split, kind);
  measure(m, split, kind);
  for (i = 0; i < m->way_count && m->rank.rank == 0; ++i) {
    (void)snprintf(name, sizeof(name), "%s gamma=%g %s", op, gamma, m->ways[i].name);
    report_way(m, &m->ways[i], split, name);
  }
  meet(m);
  free_ways(m);
}

static void run_cases(member *m) {
  const settings *set = m->team->set;
  double gammas[8];
  int count = 0, kind, i;
  meet(m);
  {
    const double now = bench_now(); /* counts from a machine's own start */
    m->one_clock = combine(m, now, 1) + combine(m, -now, 1) < 1.0;
  }
  if (set->gamma > 0.0) {
    gammas[count++] = set->gamma;
  } else {
    double gamma;
    for (gamma = 1.0; gamma < m->rank.world && count < 7; gamma *= set->bench.quick ? 8.0 : 2.0)
      gammas[count++] = gamma;
    gammas[count++] = (double)m->rank.world;
  }
  coll_rank_buffers(&m->rank, (int64_t)(set->mbytes * 1e6 / 4.0));
  for (kind = MFSDP_COLL_GATHER; kind <= MFSDP_COLL_REDUCE; ++kind)
    for (i = 0; i < count; ++i)
      if (set->op == NULL || strcmp(set->op, kind == MFSDP_COLL_GATHER ? "gather" : "reduce") == 0)
        run_case(m, (mfsdp_coll_kind)kind, gammas[i]);
}

static int open_report(team *t, int32_t ranks) {
  const settings *set = t->set;
  const int status = bench_open(&t->report, "collective", &set->bench);
  if (status == 0)
    printf("ranks: %d %s, unit of %g MB of fp32\n", (int)ranks,
           set->use_mpi ? "MPI processes" : "threads", set->mbytes);
  return status;
}

/* ---- threads ---- */

static void thread_main(void *argument) {
  member *m = (member *)argument;
  const int32_t rank = (int32_t)(m - m->team->members);
  coll_rank_open(&m->rank, rank, m->team->set->ranks);
  coll_need(&m->rank, mfsdp_threads_transport_create(&m->rank.context, m->team->world, rank,
                                                     m->rank.backend, &m->rank.transport));
  run_cases(m);
  meet(m);
  coll_rank_close(&m->rank);
}

static void report_copy(team *t) {
  bench_row row = bench_row_default();
  row.bench = "collective";
  row.name = "memcpy, one thread";
  row.metric = "read + written";
  row.unit = "GB/s";
  row.value = bench_copy_rate() * 1e-9;
  bench_add(&t->report, &row);
}

static int run_threads(team *t) {
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  int32_t i;
  const int status = open_report(t, t->set->ranks);
  if (status != 0) return status;
  report_copy(t);
  desc.world = t->set->ranks;
  t->members = (member *)calloc((size_t)desc.world, sizeof(member));
  if (t->members == NULL || mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_threads_world_create(&context, &desc, &t->world) != MFSDP_OK ||
      pthread_barrier_init(&t->barrier, NULL, (unsigned)desc.world) != 0) {
    fprintf(stderr, "bench collective: set-up failed\n");
    return 1;
  }
  for (i = 0; i < desc.world; ++i) {
    t->members[i].team = t;
    if (mfsdp_thread_start(&t->members[i].thread, thread_main, &t->members[i]) != MFSDP_OK) exit(1);
  }
  for (i = 0; i < desc.world; ++i)
    mfsdp_thread_join(&t->members[i].thread);
  (void)pthread_barrier_destroy(&t->barrier);
  (void)mfsdp_threads_world_destroy(&context, t->world);
  free(t->members);
  return bench_close(&t->report);
}

/* ---- MPI ---- */

#if MFSDP_EXAMPLE_MPI
static int run_mpi(team *t) {
  static member m;
  const mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  mfsdp_mpi_world *world;
  int level, rank, ranks, status = 0;
  coll_peers_prepare();
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS) return 1;
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  (void)MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (rank == 0) status = open_report(t, ranks);
  (void)MPI_Bcast(&status, 1, MPI_INT, 0, MPI_COMM_WORLD);
  if (status == 0 && ranks <= COLL_MOST_RANKS) {
    m.team = t;
    coll_rank_open(&m.rank, rank, ranks);
    coll_need(&m.rank, mfsdp_mpi_world_wrap(&m.rank.context, MPI_COMM_WORLD, &desc, &world));
    coll_need(&m.rank, mfsdp_mpi_transport_create(&m.rank.context, world, m.rank.backend,
                                                  &m.rank.transport));
    run_cases(&m);
    coll_need(&m.rank, m.rank.transport.ops->destroy(m.rank.transport.self, &m.rank.context));
    m.rank.transport.self = NULL;
    coll_need(&m.rank, mfsdp_mpi_world_destroy(&m.rank.context, world));
    coll_rank_close(&m.rank);
    if (rank == 0) status = bench_close(&t->report);
  }
  (void)MPI_Finalize();
  return status;
}
#endif

/* ---- options ---- */

static int take_number(const char *text, double low, double high, double *out) {
  char *end;
  *out = strtod(text, &end);
  return end != text && *end == '\0' && *out >= low && *out <= high;
}

/* 1 if the option is ours and its value is good; 0 if it is not ours; -1 if the value is bad. */
static int take_option(settings *set, const char *name, const char *value) {
  double ranks;
  if (strcmp(name, "--transport") == 0) {
    set->use_mpi = strcmp(value, "mpi") == 0;
    return set->use_mpi || strcmp(value, "threads") == 0 ? 1 : -1;
  }
  if (strcmp(name, "--op") == 0) {
    set->op = value;
    return strcmp(value, "gather") == 0 || strcmp(value, "reduce") == 0 ? 1 : -1;
  }
  if (strcmp(name, "--ranks") == 0) {
    const int good = take_number(value, 1, COLL_MOST_RANKS, &ranks);
    set->ranks = (int32_t)ranks;
    return good ? 1 : -1;
  }
  if (strcmp(name, "--mbytes") == 0) return take_number(value, 1e-3, 4e3, &set->mbytes) ? 1 : -1;
  if (strcmp(name, "--rate") == 0) return take_number(value, 1, 1e6, &set->rate_mbit) ? 1 : -1;
  if (strcmp(name, "--gamma") == 0)
    return take_number(value, 1, COLL_MOST_RANKS, &set->gamma) ? 1 : -1;
  if (strcmp(name, "--seconds") == 0) return take_number(value, 0, 1e3, &set->seconds) ? 1 : -1;
  if (strcmp(name, "--chunk") == 0) return take_number(value, 1, 1e6, &set->chunk_kbytes) ? 1 : -1;
  return 0;
}

static const char about[] =
    "collective: gather and reduce of uneven segments, beside MPI's own\n\n"
    "  --transport T  threads (default), or mpi under mpirun\n"
    "  --ranks N      threads (default 8)\n"
    "  --mbytes N     the unit (default 64)\n"
    "  --gamma G      only this share of rank 0: G / ranks of the unit (default several)\n"
    "  --op OP        only gather, or only reduce\n"
    "  --chunk KB     chunk_nbytes in KiB (default: the library's)\n"
    "  --rate MBIT    the wire's rate, as the limit\n"
    "  --seconds S    repeats of each way for this long (default 1; --quick: 0.1)";

/* Takes this program's options out of argv. 0, or 2 after a message. */
static int take_options(settings *set, int *argc, char **argv) {
  int i, kept = 1;
  for (i = 1; i < *argc; ++i) {
    const int taken = i + 1 < *argc ? take_option(set, argv[i], argv[i + 1]) : 0;
    if (taken < 0) {
      fprintf(stderr, "%s: %s %s is out of range (see --help)\n", argv[0], argv[i], argv[i + 1]);
      return 2;
    }
    if (taken)
      ++i;
    else
      argv[kept++] = argv[i];
  }
  *argc = kept;
  return 0;
}

int main(int argc, char **argv) {
  static team t;
  settings set;
  int status;
  memset(&set, 0, sizeof(set));
  set.ranks = 8;
  set.mbytes = 64.0;
  set.seconds = -1.0;
  status = take_options(&set, &argc, argv);
  if (status == 0) status = bench_parse(argc, argv, about, &set.bench);
  if (status != 0) return status == 1 ? 0 : status;
  if (set.seconds < 0.0) set.seconds = set.bench.quick ? 0.1 : 1.0;
  t.set = &set;
  if (!set.use_mpi) return run_threads(&t);
#if MFSDP_EXAMPLE_MPI
  return run_mpi(&t);
#else
  fprintf(stderr, "%s: --transport mpi is not in this build (see make info)\n", argv[0]);
  return 2;
#endif
}
