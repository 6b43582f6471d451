/* SPDX-License-Identifier: MIT */
#include "calibrate.h"

#include "mfsdp/cost.h"
#include "mfsdp/host/transport_threads.h"
#include "mfsdp/newton_schulz.h"
#if MFSDP_EXAMPLE_CBLAS
#include "mfsdp/host/math_cblas.h"
#endif
#if MFSDP_EXAMPLE_MPI
#include "mfsdp/mpi/transport_mpi.h"
#endif

#include <stdlib.h>
#include <unistd.h>

enum { SIDE = 512, SMALL = 16, MOST_RANKS = 1024, LEAST_NBYTES = 1 << 16, MOST_NBYTES = 1 << 25 };

/* A probe with what it needs: made once, used by all measurements. */
typedef struct prober {
  const plan_probe *probe;
  mfsdp_queue *queue;
  mfsdp_event *event;
  mfsdp_buffer memory; /* 2 * MOST_NBYTES */
  double *words;       /* of all ranks */
} prober;

static double now(void) {
  return (double)mfsdp_clock_us() * 1e-6;
}

/* Sum over all ranks; also where they meet. */
static mfsdp_status sum_up(prober *p, double own, double *sum) {
  const mfsdp_control *control = p->probe->control;
  MFSDP_TRY(control->ops->allgather(control->self, p->probe->context, &own, sizeof own, p->words,
                                    control->deadline_us));
  *sum = 0.0;
  for (int32_t r = 0; r < control->world; ++r)
    *sum += p->words[r];
  return MFSDP_OK;
}

static mfsdp_status settle(prober *p) {
  const mfsdp_backend *backend = p->probe->backend;
  MFSDP_TRY(backend->ops->event_record(backend->self, p->queue, p->event));
  return backend->ops->event_wait(backend->self, p->probe->context, p->event,
                                  p->probe->transport->deadline_us);
}

/* ---- arithmetic ---- */

/* One piece of work; the amount it did. */
typedef mfsdp_status (*work_fn)(prober *p, double *amount);

/* Amount per second of one rank while all work for `seconds`: the mean. Over the time of the rank
 * that began first, until all are done: a rank that the system lets wait for a core has not had one
 * to itself. */
static mfsdp_status rate_of(prober *p, work_fn work, double *rate) {
  double amount = 0.0, one, start, sum, longest = 0.0;
  MFSDP_TRY(work(p, &one)); /* warms up */
  MFSDP_TRY(sum_up(p, 0.0, &sum));
  start = now();
  do {
    MFSDP_TRY(work(p, &one));
    amount += one;
  } while (now() - start < p->probe->seconds);
  MFSDP_TRY(sum_up(p, amount, &amount));
  MFSDP_TRY(sum_up(p, now() - start, &sum));
  for (int32_t r = 0; r < p->probe->control->world; ++r)
    longest = p->words[r] > longest ? p->words[r] : longest;
  *rate = amount / longest / p->probe->control->world;
  return MFSDP_OK;
}

static mfsdp_status multiply(prober *p, double *flops) {
  float *a = (float *)p->memory.data, *b = a + SIDE * SIDE, *c = b + SIDE * SIDE;
  p->probe->math->sgemm(0, 0, SIDE, SIDE, SIDE, 1.0f, a, SIDE, b, SIDE, 0.0f, c, SIDE);
  *flops = 2.0 * SIDE * SIDE * SIDE;
  return MFSDP_OK;
}

static mfsdp_status stream(prober *p, double *nbytes) {
  const size_t count = MOST_NBYTES / 2 / sizeof(float);
  float *x = (float *)p->memory.data, *y = x + count;
  for (size_t i = 0; i < count; ++i)
    y[i] = 0.5f * x[i] + y[i];
  *nbytes = 3.0 * (double)count * sizeof(float);
  return MFSDP_OK;
}

/* Five Newton-Schulz steps on a rows x cols matrix: adds its FLOPs as cost.h counts them. */
static mfsdp_status orthogonalize(prober *p, int64_t rows, int64_t cols, double *flops) {
  const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
  float *in = (float *)p->memory.data, *out = in + rows * cols, *scratch = out + rows * cols;
  size_t nbytes = 0;
  int64_t counted;
  MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(p->probe->context, &ns, rows, cols, &nbytes));
  if (nbytes > p->memory.nbytes - 2 * (size_t)(rows * cols) * sizeof(float) ||
      !mfsdp_cost_newton_schulz_flops(rows, cols, ns.step_count, &counted))
    return MFSDP_FAIL(p->probe->context, MFSDP_E_MEMORY, "calibrate: %zu bytes for Newton-Schulz",
                      nbytes);
  MFSDP_TRY(mfsdp_newton_schulz(p->probe->context, p->probe->backend, p->queue, &ns, rows, cols, in,
                                out, scratch, nbytes));
  *flops += (double)counted;
  return MFSDP_OK;
}

/* The matrices of half a transformer's block: long ones take another form than square ones, and
 * fewer FLOPs than are counted. */
static mfsdp_status orthogonalize_block(prober *p, double *flops) {
  *flops = 0.0;
  MFSDP_TRY(orthogonalize(p, SIDE, SIDE, flops));
  MFSDP_TRY(orthogonalize(p, SIDE, SIDE, flops));
  return orthogonalize(p, 4 * SIDE, SIDE, flops);
}

/* One matrix. */
static mfsdp_status orthogonalize_small(prober *p, double *matrices) {
  MFSDP_TRY(orthogonalize(p, SMALL, SMALL, matrices));
  *matrices = 1.0;
  return MFSDP_OK;
}

/* ---- links ---- */

static int32_t node_of(const mfsdp_transport *t, int32_t rank) {
  return t->node_of_rank == NULL ? 0 : t->node_of_rank[rank];
}

/* The nearest rank in `direction` that is in this rank's node, or in another; itself: none. With
 * equal nodes in rank order every rank is the next of exactly one. */
static int32_t partner(const mfsdp_transport *t, int32_t per_node, int32_t same_node,
                       int32_t direction) {
  const int32_t base = t->rank - t->rank % per_node;
  if (!same_node) return (t->rank + direction * per_node + t->world) % t->world;
  return base + (t->rank - base + direction + per_node) % per_node;
}

static mfsdp_status exchange(prober *p, int32_t to, int32_t from, size_t nbytes) {
  unsigned char *memory = (unsigned char *)p->memory.data;
  mfsdp_batch batch = mfsdp_batch_default();
  mfsdp_xfer xfers[2];
  memset(xfers, 0, sizeof xfers);
  xfers[0].src = memory;
  xfers[0].peer = to;
  xfers[0].is_send = 1;
  xfers[1].dst = memory + MOST_NBYTES;
  xfers[1].peer = from;
  xfers[0].nbytes = xfers[1].nbytes = nbytes;
  batch.xfers = xfers;
  batch.xfer_count = 2;
  batch.traffic = MFSDP_TRAFFIC_EXPORT;
  batch.label = "calibration";
  return mfsdp_transport_submit(p->probe->context, p->probe->transport, p->queue, &batch);
}

/* Seconds of one exchange, all ranks at once: the mean over ranks and `count` repeats. */
static mfsdp_status exchange_s(prober *p, int32_t to, int32_t from, size_t nbytes, int count,
                               double *seconds) {
  double start, sum;
  MFSDP_TRY(exchange(p, to, from, nbytes));
  MFSDP_TRY(settle(p));
  MFSDP_TRY(sum_up(p, 0.0, &sum));
  start = now();
  for (int i = 0; i < count; ++i)
    MFSDP_TRY(exchange(p, to, from, nbytes));
  MFSDP_TRY(settle(p));
  MFSDP_TRY(sum_up(p, (now() - start) / count, &sum));
  *seconds = sum / p->probe->control->world;
  return MFSDP_OK;
}

/* The best of a few: other programs only ever make it longer. */
static mfsdp_status best_exchange_s(prober *p, int32_t to, int32_t from, size_t nbytes, int count,
                                    double *seconds) {
  for (int i = 0; i < 3; ++i) {
    double once;
    MFSDP_TRY(exchange_s(p, to, from, nbytes, count, &once));
    if (i == 0 || once < *seconds) *seconds = once;
  }
  return MFSDP_OK;
}

/* All ranks see the same sums, and so take the same sizes. */
static mfsdp_status measure_links(prober *p, int32_t per_node, int32_t same_node,
                                  double *latency_us, double *nbytes_per_s) {
  const mfsdp_transport *t = p->probe->transport;
  const int32_t to = partner(t, per_node, same_node, 1);
  const int32_t from = partner(t, per_node, same_node, -1);
  size_t nbytes = LEAST_NBYTES;
  double small = 0.0, large = 0.0;
  MFSDP_TRY(best_exchange_s(p, to, from, 8, 20, &small));
  MFSDP_TRY(exchange_s(p, to, from, nbytes, 1, &large));
  /* A shaper lets a burst of at least 16 kB through at once: the figure needs many of them. */
  while (nbytes < MOST_NBYTES && large < p->probe->seconds) {
    nbytes *= 2;
    MFSDP_TRY(exchange_s(p, to, from, nbytes, 1, &large));
  }
  MFSDP_TRY(best_exchange_s(p, to, from, nbytes, 1, &large));
  *latency_us = small * 1e6;
  *nbytes_per_s = (double)nbytes / (large > small ? large - small : large);
  return MFSDP_OK;
}

/* Ranks of each node if all nodes have as many, in rank order; else 0. */
static int32_t ranks_per_node(const mfsdp_transport *t) {
  int32_t per_node = 1;
  while (per_node < t->world && node_of(t, per_node) == node_of(t, 0))
    ++per_node;
  if (t->world % per_node != 0) return 0;
  for (int32_t r = 0; r < t->world; ++r)
    if (node_of(t, r) != node_of(t, r - r % per_node)) return 0;
  return per_node;
}

static mfsdp_status measure_all_links(prober *p, mfsdp_cluster *c) {
  const mfsdp_transport *t = p->probe->transport;
  const int32_t per_node = ranks_per_node(t);
  if (per_node == 0)
    return MFSDP_FAIL(p->probe->context, MFSDP_E_UNSUPPORTED,
                      "calibrate: needs nodes of equally many ranks, in rank order");
  c->ranks_per_node = per_node;
  if (t->world == 1) return MFSDP_OK;
  if (per_node > 1)
    MFSDP_TRY(measure_links(p, per_node, 1, &c->node_latency_us, &c->node_nbytes_per_s));
  if (per_node < t->world)
    MFSDP_TRY(measure_links(p, per_node, 0, &c->net_latency_us, &c->net_nbytes_per_s));
  if (per_node == t->world) {
    c->net_latency_us = c->node_latency_us;
    c->net_nbytes_per_s = c->node_nbytes_per_s;
  }
  if (per_node == 1) {
    c->node_latency_us = c->net_latency_us;
    c->node_nbytes_per_s = c->net_nbytes_per_s;
  }
  c->net_node_nbytes_per_s = c->net_nbytes_per_s * per_node; /* all of a node sent at once */
  return MFSDP_OK;
}

/* ---- the whole ---- */

static mfsdp_status measure(prober *p, plan_calibration *out) {
  mfsdp_cluster *c = &out->cluster;
  const double pages = (double)sysconf(_SC_PHYS_PAGES), page = (double)sysconf(_SC_PAGESIZE);
  const int64_t count = (int64_t)(p->memory.nbytes / sizeof(float));
  double matrices_per_s;
  float *values = (float *)p->memory.data;
  for (int64_t i = 0; i < count; ++i)
    values[i] = (float)(i * 7 % 23) * 0.01f;
  *c = mfsdp_cluster_default();
  MFSDP_TRY(rate_of(p, multiply, &c->flops_per_s));
  MFSDP_TRY(rate_of(p, orthogonalize_block, &c->newton_schulz_flops_per_s));
  MFSDP_TRY(rate_of(p, orthogonalize_small, &matrices_per_s));
  MFSDP_TRY(settle(p));
  c->matrix_us = 1e6 / matrices_per_s;
  MFSDP_TRY(rate_of(p, stream, &c->memory_nbytes_per_s));
  MFSDP_TRY(measure_all_links(p, c));
  c->memory_nbytes = pages * page / c->ranks_per_node;
  return mfsdp_cluster_validate(p->probe->context, c);
}

mfsdp_status plan_calibrate(const plan_probe *probe, plan_calibration *out) {
  mfsdp_context *context = probe->context;
  const mfsdp_backend *backend = probe->backend;
  const size_t world = (size_t)probe->control->world;
  prober p;
  void *words = NULL;
  mfsdp_status status;
  memset(&p, 0, sizeof p);
  memset(out, 0, sizeof *out);
  p.probe = probe;
  MFSDP_TRY(mfsdp_table_alloc(context, world, sizeof(double), "calibration", &words));
  p.words = (double *)words;
  status = mfsdp_buffer_alloc(context, backend, 2 * (size_t)MOST_NBYTES, MFSDP_SPACE_DEVICE,
                              MFSDP_MEMORY_WORKSPACE, &p.memory);
  if (status == MFSDP_OK)
    status = backend->ops->queue_create(backend->self, context, "calibration", &p.queue);
  if (status == MFSDP_OK) status = backend->ops->event_create(backend->self, context, &p.event);
  if (status == MFSDP_OK) status = measure(&p, out);
  if (p.event != NULL) backend->ops->event_destroy(backend->self, context, p.event);
  if (p.queue != NULL) backend->ops->queue_destroy(backend->self, context, p.queue);
  mfsdp_buffer_free(context, backend, &p.memory);
  mfsdp_table_free(context, words, world, sizeof(double));
  return status;
}

double plan_matched_mbit(double flops_per_s) {
  return flops_per_s / (312e12 / 25e9) * 8e-6;
}

/* ---- ranks for it ---- */

static const mfsdp_host_math *host_math(void) {
#if MFSDP_EXAMPLE_CBLAS
  return mfsdp_host_math_cblas();
#else
  return mfsdp_host_math_loops();
#endif
}

/* A rank with its backend; transport and control are made in between by `join`. */
typedef struct member {
  mfsdp_context context;
  mfsdp_host_backend *host;
  const mfsdp_backend *backend;
  mfsdp_transport transport;
  mfsdp_control control;
  mfsdp_threads_world *world; /* of thread ranks */
  int32_t rank;
  mfsdp_thread thread;
  plan_calibration measured;
  mfsdp_status status;
} member;

static mfsdp_status member_open(member *m) {
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  context_desc.rank = m->rank;
  MFSDP_TRY(mfsdp_context_init(&m->context, &context_desc));
  desc.math = host_math();
  MFSDP_TRY(mfsdp_host_backend_create(&m->context, &desc, &m->host));
  m->backend = mfsdp_host_backend_get(m->host);
  return MFSDP_OK;
}

static mfsdp_status member_measure(member *m) {
  plan_probe probe;
  probe.context = &m->context;
  probe.backend = m->backend;
  probe.math = host_math();
  probe.transport = &m->transport;
  probe.control = &m->control;
  probe.seconds = 0.3;
  return plan_calibrate(&probe, &m->measured);
}

static void member_close(member *m) {
  if (m->transport.self != NULL) (void)m->transport.ops->destroy(m->transport.self, &m->context);
  if (m->control.self != NULL) (void)m->control.ops->destroy(m->control.self, &m->context);
  if (m->host != NULL) (void)mfsdp_host_backend_destroy(&m->context, m->host);
}

static mfsdp_status thread_rank(member *m) {
  MFSDP_TRY(member_open(m));
  MFSDP_TRY(
      mfsdp_threads_transport_create(&m->context, m->world, m->rank, m->backend, &m->transport));
  MFSDP_TRY(mfsdp_threads_control_create(&m->context, m->world, m->rank, &m->control));
  return member_measure(m);
}

static void thread_main(void *argument) {
  member *m = (member *)argument;
  m->status = thread_rank(m);
  if (m->status != MFSDP_OK) mfsdp_threads_world_poison(m->world, mfsdp_context_error(&m->context));
  member_close(m);
}

int plan_calibrate_threads(int32_t world, plan_calibration *out, plan_error *error) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  mfsdp_context context;
  mfsdp_threads_world *shared = NULL;
  member *members;
  int status = PLAN_OK;
  int32_t started = 0;
  if (world > MOST_RANKS)
    return plan_fail(error, "--calibrate: --world %d, needs at most %d threads", (int)world,
                     MOST_RANKS);
  desc.world = world;
  members = (member *)calloc((size_t)world, sizeof *members);
  if (members == NULL || mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_threads_world_create(&context, &desc, &shared) != MFSDP_OK) {
    free(members);
    return plan_fail(error, "--calibrate: no memory for %d ranks", (int)world);
  }
  for (; started < world && status == PLAN_OK; ++started) {
    members[started].world = shared;
    members[started].rank = started;
    if (mfsdp_thread_start(&members[started].thread, thread_main, &members[started]) == MFSDP_OK)
      continue;
    status = plan_fail(error, "--calibrate: the system refused thread %d", (int)started);
    {
      mfsdp_error why = mfsdp_error_none();
      (void)MFSDP_ERROR_SET(&why, MFSDP_E_BACKEND, -1, "a rank did not start");
      mfsdp_threads_world_poison(shared, &why);
    }
    break;
  }
  for (int32_t r = 0; r < started; ++r)
    mfsdp_thread_join(&members[r].thread);
  for (int32_t r = 0; r < started && status == PLAN_OK; ++r)
    if (members[r].status != MFSDP_OK)
      status =
          plan_fail(error, "--calibrate: %s", mfsdp_context_error(&members[r].context)->message);
  *out = members[0].measured;
  (void)mfsdp_threads_world_destroy(&context, shared);
  free(members);
  return status;
}

#if MFSDP_EXAMPLE_MPI
static mfsdp_status mpi_rank(member *m, mfsdp_mpi_world *world) {
  m->rank = world->rank;
  MFSDP_TRY(mfsdp_mpi_transport_create(&m->context, world, m->backend, &m->transport));
  MFSDP_TRY(mfsdp_mpi_control_create(&m->context, world, &m->control));
  return member_measure(m);
}

int plan_calibrate_mpi(int32_t *ranks, int32_t *rank, plan_calibration *out, plan_error *error) {
  const mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  mfsdp_mpi_world *world = NULL;
  member m;
  int level = 0, status = PLAN_OK;
  memset(&m, 0, sizeof m);
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS)
    return plan_fail(error, "--transport mpi: MPI did not start; run the program with mpirun");
  if (member_open(&m) != MFSDP_OK ||
      mfsdp_mpi_world_wrap(&m.context, MPI_COMM_WORLD, &desc, &world) != MFSDP_OK) {
    status = plan_fail(error, "--calibrate: %s", mfsdp_context_error(&m.context)->message);
    fprintf(stderr, "mfsdp-plan: %s\n", error->text);
    (void)MPI_Abort(MPI_COMM_WORLD, status);
    return status; /* MPI may come back */
  }
  *ranks = world->world;
  *rank = world->rank;
  if (mpi_rank(&m, world) != MFSDP_OK) {
    status = plan_fail(error, "--calibrate: %s", mfsdp_context_error(&m.context)->message);
    fprintf(stderr, "mfsdp-plan: rank %d: %s\n", (int)*rank, error->text);
    (void)MPI_Abort(MPI_COMM_WORLD, status);
  }
  *out = m.measured;
  member_close(&m);
  (void)mfsdp_mpi_world_destroy(&m.context, world);
  (void)MPI_Finalize();
  return status;
}
#else
int plan_calibrate_mpi(int32_t *ranks, int32_t *rank, plan_calibration *out, plan_error *error) {
  *ranks = *rank = 0;
  memset(out, 0, sizeof *out);
  return plan_fail(error, "--transport mpi: not in this build");
}
#endif
