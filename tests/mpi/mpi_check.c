/* SPDX-License-Identifier: MIT */
/*
 * mpi_check.c - the MPI transport and control plane, checked by the ranks of an mpirun.
 *
 *   mpirun -n 4 build/release/tests/mpi/mpi_check SCENARIO [VERDICTS]
 *   mpirun -n 4 build/release/tests/mpi/mpi_check wire BYTES
 *
 * Scenarios that every rank survives report through MPI: rank 0 prints `ok SCENARIO` or `not ok`.
 * Scenarios in which ranks fail, leave or die (fail-...) write VERDICTS.RANK instead, one line
 * "status culprit rank milliseconds message": the launcher's own exit status says little then.
 * `wire` measures links: every rank sends BYTES to the next one; the slowest and the fastest rate.
 * tests/cli/mpi.sh runs them and reads what they say.
 */
#include "mfsdp/collective.h"
#include "mfsdp/dtype.h"

#include "tests/mpi/peer.h"

#include <signal.h>

#define DEADLINE_US 500000

/* ---- what the transport asks of MPI: its own entry points, between the transport and MPI ---- */

static int highest_tag, longest_message; /* of data; from any thread */

static void note(int tag, int count) {
  if (tag > __atomic_load_n(&highest_tag, __ATOMIC_RELAXED))
    __atomic_store_n(&highest_tag, tag, __ATOMIC_RELAXED);
  if (tag == MFSDP__MPI_TAG_DATA && count > __atomic_load_n(&longest_message, __ATOMIC_RELAXED))
    __atomic_store_n(&longest_message, count, __ATOMIC_RELAXED);
}

int MPI_Isend(const void *buffer, int count, MPI_Datatype datatype, int other, int tag,
              MPI_Comm comm, MPI_Request *request) {
  note(tag, count);
  return PMPI_Isend(buffer, count, datatype, other, tag, comm, request);
}

int MPI_Irecv(void *buffer, int count, MPI_Datatype datatype, int other, int tag, MPI_Comm comm,
              MPI_Request *request) {
  note(tag, count);
  return PMPI_Irecv(buffer, count, datatype, other, tag, comm, request);
}

static mfsdp_status finish(peer *p) {
  MFSDP_TRY(p->backend->ops->event_record(p->backend->self, p->queue, p->event));
  return p->backend->ops->event_wait(p->backend->self, &p->context, p->event, INT64_MAX);
}

static mfsdp_status submit(peer *p, const mfsdp_xfer *xfers, int32_t count, uint64_t check,
                           const char *label) {
  mfsdp_batch batch = mfsdp_batch_default();
  batch.xfers = xfers;
  batch.xfer_count = count;
  batch.check = check;
  batch.label = label;
  batch.traffic = MFSDP_TRAFFIC_EXPORT;
  return mfsdp_transport_submit(&p->context, &p->transport, p->queue, &batch);
}

static mfsdp_xfer message(int32_t rank, int32_t is_send, void *data, size_t nbytes) {
  mfsdp_xfer x;
  memset(&x, 0, sizeof(x));
  x.peer = rank;
  x.is_send = is_send;
  x.nbytes = nbytes;
  if (is_send)
    x.src = data;
  else
    x.dst = data;
  return x;
}

/* ---- scenarios that end well ---- */

static void check_allgather(peer *p) {
  int64_t in[8], out[8 * 64];
  int round, i, r;
  for (round = 0; round < 50; ++round) {
    const int count = round % 6; /* sizes change from call to call, 0 among them */
    for (i = 0; i < count; ++i)
      in[i] = p->rank * 1000 + round * 10 + i;
    memset(out, 0xff, sizeof(out));
    expect(p, allgather(p, in, (size_t)count * 8, out) == MFSDP_OK, "allgather");
    for (r = 0; r < p->size; ++r)
      for (i = 0; i < count; ++i)
        expect(p, out[r * count + i] == r * 1000 + round * 10 + i, "a message is wrong");
  }
}

static void check_probe(peer *p) {
  uint8_t alive[64];
  int32_t r;
  if (p->rank == 0) { /* the others wait in the barrier below, and answer from there */
    expect(p, p->control.ops->probe(p->control.self, &p->context, alive, 20000000) == MFSDP_OK,
           "probe");
    for (r = 0; r < p->size; ++r)
      expect(p, alive[r] == 1, "a rank that waits does not answer");
  }
  expect(p, allgather(p, NULL, 0, NULL) == MFSDP_OK, "barrier");
}

static unsigned char byte_of(int from, int to, size_t length, size_t i) {
  return (unsigned char)((size_t)from * 31 + (size_t)to * 17 + length * 7 + i * 13 + i / 251);
}

/* Every pair, both ways, in one batch, by lengths around the cut of message_nbytes (fault b7), and
 * several messages between the same two ranks, whose order has no tag to tell it by. */
static void check_transfers(peer *p, uint64_t check) {
  static const size_t lengths[] = {0, 1, 999, 1000, 1001, 2001, 30000};
  enum { LENGTHS = 7, MOST = 30000 };
  const size_t peers = (size_t)p->size;
  unsigned char *out = (unsigned char *)malloc(peers * LENGTHS * MOST);
  unsigned char *in = (unsigned char *)malloc(peers * LENGTHS * MOST);
  mfsdp_xfer xfers[2 * 64 * LENGTHS];
  int32_t count = 0, r;
  size_t l, i, wrong = 0;
  memset(in, 0xee, peers * LENGTHS * MOST);
  for (l = 0; l < LENGTHS; ++l)
    for (r = 0; r < p->size; ++r) {
      const size_t place = ((size_t)r * LENGTHS + l) * MOST;
      if (r == p->rank) continue;
      for (i = 0; i < lengths[l]; ++i)
        out[place + i] = byte_of(p->rank, r, lengths[l], i);
      xfers[count++] = message(r, (int32_t)(l % 2), l % 2 ? out + place : in + place, lengths[l]);
      xfers[count++] =
          message(r, (int32_t)(l % 2 == 0), l % 2 ? in + place : out + place, lengths[l]);
    }
  expect(p, p->transport.ops->reserve(p->transport.self, &p->context, count) == MFSDP_OK,
         "reserve");
  expect(p, submit(p, xfers, count, check, "all pairs") == MFSDP_OK, "submit");
  expect(p, finish(p) == MFSDP_OK, "the batch");
  for (l = 0; l < LENGTHS; ++l)
    for (r = 0; r < p->size; ++r) {
      const size_t place = ((size_t)r * LENGTHS + l) * MOST;
      for (i = 0; i < MOST && r != p->rank; ++i)
        wrong += in[place + i] != (i < lengths[l] ? byte_of(r, p->rank, lengths[l], i) : 0xee);
    }
  expect(p, wrong == 0, "a byte is wrong, or was written beyond its message");
  free(in);
  free(out);
}

/* Many small batches in flight: the ring of records goes round, order is kept. */
static void check_stream(peer *p) {
  enum { ROUNDS = 300 };
  static int64_t in[ROUNDS], out[ROUNDS];
  const int32_t next = (p->rank + 1) % p->size, before = (p->rank + p->size - 1) % p->size;
  int i;
  if (p->size == 1) return;
  for (i = 0; i < ROUNDS; ++i) {
    mfsdp_xfer xfers[2];
    out[i] = p->rank * 1000 + i;
    xfers[0] = message(next, 1, &out[i], sizeof(out[i]));
    xfers[1] = message(before, 0, &in[i], sizeof(in[i]));
    expect(p, submit(p, xfers, 2, 0, "stream") == MFSDP_OK, "submit");
  }
  expect(p, finish(p) == MFSDP_OK, "the stream");
  for (i = 0; i < ROUNDS; ++i)
    expect(p, in[i] == before * 1000 + i, "a message came out of order");
}

/* ---- collectives: every algorithm, dtype and layout, with sums that are exact in all of them ---- */

enum { MOST_EXTENTS = 256, MOST_ELEMENTS = 16384 };

typedef struct uneven {
  mfsdp_extent extents[MOST_EXTENTS];
  int64_t segment[64]; /* elements, of each rank */
  mfsdp_layout layout;
} uneven;

static void add_extent(uneven *u, int32_t owner, int64_t count, int64_t gap) {
  mfsdp_extent *e = &u->extents[u->layout.extent_count++];
  e->owner = owner;
  e->count = e->payload_count = count;
  e->unit_offset = u->layout.full_count + gap;
  e->shard_offset = u->segment[owner];
  u->segment[owner] += count;
  u->layout.full_count += gap + count;
}

/* Even; empty owners; several extents for each owner, odd, with gaps, in reverse; nothing; one owner
 * of everything, each rank in turn. 0 after the last. */
static int make_uneven(uneven *u, int which, int32_t size) {
  int32_t i;
  memset(u, 0, sizeof(*u));
  u->layout.struct_nbytes = sizeof(u->layout);
  u->layout.extents = u->extents;
  u->layout.world = size;
  for (i = 0; i < size && which == 0; ++i)
    add_extent(u, i, 600, 0);
  for (i = 0; i < size && which == 1; i += 2)
    add_extent(u, i, 128 * (i + 1), 0);
  for (i = 0; i < 3 * size + 1 && which == 2; ++i)
    add_extent(u, (i * 5 + 1) % size, 37 * (i % 4) + 1, i % 3 == 0 ? 9 : 0);
  for (i = 0; i < u->layout.extent_count / 2 && which == 2; ++i) {
    const mfsdp_extent e = u->extents[i];
    u->extents[i] = u->extents[u->layout.extent_count - 1 - i];
    u->extents[u->layout.extent_count - 1 - i] = e;
  }
  if (which >= 4 && which < 4 + size) add_extent(u, which - 4, 2100, 0);
  return which < 4 + size;
}

/* The sum over 64 ranks fits in the 8 bits of bf16. */
static double term(int32_t rank, int64_t i) {
  return (double)((rank * 7 + i * 5) % 7 - 3);
}

static mfsdp_coll *make_coll(peer *p, uneven *u, mfsdp_coll_kind kind, mfsdp_algorithm algorithm,
                             mfsdp_dtype dtype) {
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  mfsdp_coll *coll = NULL;
  u->layout.dtype = dtype;
  desc.kind = kind;
  desc.layout = &u->layout;
  desc.transport = &p->transport;
  desc.chunk_nbytes = 1024; /* several messages: a buffer that is reused too soon shows */
  desc.algorithm = algorithm;
  desc.narrow_sums = 1;
  desc.traffic = kind == MFSDP_COLL_GATHER ? MFSDP_TRAFFIC_MATERIALIZE : MFSDP_TRAFFIC_REDUCE;
  expect(p, mfsdp_coll_create(&p->context, &desc, &coll) == MFSDP_OK, "create");
  return coll;
}

/* From a segment of its own, or, where it fits, in place. */
static void check_gather(peer *p, uneven *u, mfsdp_algorithm algorithm, mfsdp_dtype dtype,
                         int in_place) {
  static double full[MOST_ELEMENTS], apart[MOST_ELEMENTS];
  mfsdp_coll *coll = make_coll(p, u, MFSDP_COLL_GATHER, algorithm, dtype);
  unsigned char *shard = (unsigned char *)apart, owned[MOST_ELEMENTS];
  int64_t i, wrong = 0;
  int32_t e;
  if (coll == NULL) return;
  memset(full, 0xff, sizeof(full));
  memset(owned, 0, sizeof(owned));
  for (e = 0; e < u->layout.extent_count && in_place; ++e)
    if (u->extents[e].owner == p->rank)
      shard = (unsigned char *)full + (size_t)u->extents[e].unit_offset * mfsdp_dtype_nbytes(dtype);
  for (e = 0; e < u->layout.extent_count; ++e)
    for (i = 0; i < u->extents[e].count; ++i) {
      const mfsdp_extent *x = &u->extents[e];
      owned[x->unit_offset + i] = 1;
      if (x->owner == p->rank)
        mfsdp_element_set(shard, dtype, x->shard_offset + i, term(3, x->unit_offset + i));
    }
  expect(p,
         mfsdp_gather(&p->context, coll, p->queue, shard, full) == MFSDP_OK &&
             finish(p) == MFSDP_OK,
         "gather");
  for (i = 0; i < u->layout.full_count; ++i) {
    const double got = mfsdp_element_get(full, dtype, i);
    wrong += owned[i] ? !(got == term(3, i)) : got == got; /* NaN: nobody's, left alone */
  }
  expect(p, wrong == 0, "a gathered element is wrong");
  mfsdp_coll_destroy(&p->context, coll);
}

/* Twice: the second sum is added to the first. */
static void check_reduce(peer *p, uneven *u, mfsdp_algorithm algorithm, mfsdp_dtype dtype) {
  static double grad[MOST_ELEMENTS];
  static float sum[MOST_ELEMENTS];
  mfsdp_coll *coll = make_coll(p, u, MFSDP_COLL_REDUCE, algorithm, dtype);
  void *workspace;
  int64_t i, wrong = 0;
  int32_t e, r;
  int round;
  if (coll == NULL) return;
  workspace = malloc(mfsdp_coll_workspace_nbytes(coll) + 1);
  memset(sum, 0xff, sizeof(sum));
  for (i = 0; i < u->layout.full_count; ++i)
    mfsdp_element_set(grad, dtype, i, term(p->rank, i));
  for (round = 0; round < 2; ++round)
    expect(p,
           mfsdp_reduce(&p->context, coll, p->queue, grad, sum, round == 0, workspace) ==
                   MFSDP_OK &&
               finish(p) == MFSDP_OK,
           "reduce");
  for (e = 0; e < u->layout.extent_count; ++e)
    for (i = 0; i < u->extents[e].count && u->extents[e].owner == p->rank; ++i) {
      double want = 0.0;
      for (r = 0; r < p->size; ++r)
        want += 2.0 * term(r, u->extents[e].unit_offset + i);
      wrong += !((double)sum[u->extents[e].shard_offset + i] == want);
    }
  expect(p, wrong == 0, "a sum is wrong");
  mfsdp_coll_destroy(&p->context, coll);
  free(workspace);
}

/* Every rank's 100 elements and its number to each root in turn, doubled there, and back. */
static void check_roots(peer *p) {
  static float shard[MOST_ELEMENTS], full[MOST_ELEMENTS];
  static int32_t roots[MOST_EXTENTS];
  static uneven u;
  mfsdp_coll *gather, *scatter;
  int64_t i, wrong = 0;
  int32_t owner, root;
  memset(&u, 0, sizeof(u));
  u.layout.struct_nbytes = sizeof(u.layout);
  u.layout.extents = u.extents;
  u.layout.world = p->size;
  u.layout.roots = roots;
  for (root = 0; root < p->size && root < 3; ++root) {
    u.layout.full_count = 0; /* each root's buffer starts anew */
    for (owner = 0; owner < p->size; ++owner) {
      roots[u.layout.extent_count] = root;
      add_extent(&u, owner, 100 + owner, 0);
    }
  }
  gather = make_coll(p, &u, MFSDP_COLL_GATHER, MFSDP_DIRECT, MFSDP_F32);
  scatter = make_coll(p, &u, MFSDP_COLL_SCATTER, MFSDP_DIRECT, MFSDP_F32);
  if (gather == NULL || scatter == NULL) return;
  for (i = 0; i < u.segment[p->rank]; ++i)
    shard[i] = (float)(1000 * p->rank + i);
  expect(p,
         mfsdp_gather(&p->context, gather, p->queue, shard, full) == MFSDP_OK &&
             finish(p) == MFSDP_OK,
         "gather to roots");
  for (i = 0; i < u.layout.full_count; ++i)
    full[i] *= 2.0f;
  memset(shard, 0, sizeof(shard));
  expect(p,
         mfsdp_scatter(&p->context, scatter, p->queue, full, shard) == MFSDP_OK &&
             finish(p) == MFSDP_OK,
         "scatter from roots");
  for (i = 0; i < u.segment[p->rank]; ++i)
    wrong += shard[i] != 2.0f * (float)(1000 * p->rank + i);
  expect(p, wrong == 0, "an element did not come back from its root");
  mfsdp_coll_destroy(&p->context, gather);
  mfsdp_coll_destroy(&p->context, scatter);
}

static void check_collectives(peer *p) {
  static const mfsdp_dtype dtypes[4] = {MFSDP_F32, MFSDP_BF16, MFSDP_F16, MFSDP_F64};
  static uneven u;
  int which, algorithm, d;
  for (which = 0; make_uneven(&u, which, p->size); ++which)
    for (algorithm = MFSDP_DIRECT; algorithm <= MFSDP_NATIVE; ++algorithm) {
      const int any = algorithm == MFSDP_DIRECT || algorithm == MFSDP_NATIVE;
      for (d = 0; d < 4; ++d)
        check_gather(p, &u, (mfsdp_algorithm)algorithm, dtypes[d], which != 2 && d % 2);
      for (d = 0; d < (any ? 3 : 1); ++d)
        check_reduce(p, &u, (mfsdp_algorithm)algorithm, dtypes[d]);
    }
  check_roots(p);
}

/*
 * Rank 0 comes late to a sum for rank 2. The others have given their terms and leave at once, which
 * rank 2 hears while it still waits: they have done their part and are not to blame. Two parts of
 * one element, so that MPI sends terms up a tree, whose leaves are done at once. Nothing may follow.
 */
static void check_leavers_have_done_their_part(peer *p) {
  static float full[2], sums[2];
  mfsdp_native_part parts[2];
  mfsdp_native_args args;
  int i;
  memset(&args, 0, sizeof(args));
  memset(parts, 0, sizeof(parts));
  args.struct_nbytes = sizeof(args);
  args.kind = MFSDP_NATIVE_REDUCE;
  args.dtype = MFSDP_F32;
  args.parts = parts;
  args.part_count = 2;
  args.src = full;
  args.dst = p->rank == 2 ? sums : NULL;
  args.traffic = MFSDP_TRAFFIC_REDUCE;
  args.label = "late";
  for (i = 0; i < 2; ++i) {
    parts[i].owner = 2;
    parts[i].count = 1;
    parts[i].unit_offset = parts[i].shard_offset = i;
  }
  for (i = 0; i < 2; ++i)
    full[i] = (float)(p->rank + i);
  if (p->rank == 0) mfsdp_clock_sleep_until(mfsdp_clock_us() + 3 * MFSDP__MPI_LEFT_GRACE_US);
  expect(p,
         p->transport.ops->native_prepare(p->transport.self, &p->context, &args, &args.form) ==
                 MFSDP_OK &&
             mfsdp_transport_native(&p->context, &p->transport, p->queue, &args) == MFSDP_OK &&
             finish(p) == MFSDP_OK,
         "a sum whose others have left");
  for (i = 0; i < 2 && p->rank == 2; ++i)
    expect(p, sums[i] == (float)(p->size * (p->size - 1) / 2 + p->size * i), "a sum is wrong");
}

static void check_bad_input(peer *p) {
  char bytes[2] = {0, 0};
  mfsdp_xfer x = message((p->rank + 1) % p->size, 1, bytes, 1);
  mfsdp_batch batch = mfsdp_batch_default();
  mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  mfsdp_mpi_world *world = (mfsdp_mpi_world *)1;
  mfsdp_backend device = *p->backend;
  mfsdp_transport transport;
  device.traits &= ~(uint32_t)MFSDP_BACKEND_TASKS_MAY_WAIT;
  expect(p,
         mfsdp_mpi_transport_create(&p->context, p->world, &device, &transport) ==
                 MFSDP_E_UNSUPPORTED &&
             transport.self == NULL &&
             strstr(p->context.error.message, "mfsdp_device_transport_create") != NULL,
         "a backend whose tasks may not wait");
  x.peer = p->size;
  expect(p, submit(p, &x, 1, 0, "beyond") == MFSDP_E_ARGUMENT, "a peer beyond the world");
  x.peer = p->rank;
  expect(p, submit(p, &x, 1, 0, "self") == MFSDP_E_ARGUMENT, "the rank itself as a peer");
  batch.xfers = &x;
  batch.xfer_count = 1000000;
  expect(p,
         p->transport.ops->submit(p->transport.self, &p->context, p->queue, &batch) ==
             MFSDP_E_ARGUMENT,
         "more transfers than reserved");
  expect(p,
         p->control.ops->allgather(p->control.self, &p->context, bytes, 20000, bytes, 1) ==
             MFSDP_E_ARGUMENT,
         "a control message beyond control_nbytes");
  expect(p,
         p->control.ops->allgather(p->control.self, &p->context, NULL, 1, bytes, 1) ==
             MFSDP_E_ARGUMENT,
         "no control message");
  expect(p,
         p->control.ops->allgather(p->control.self, &p->context, bytes, 1, bytes, 0) ==
             MFSDP_E_ARGUMENT,
         "no time");
  expect(p,
         mfsdp_mpi_world_wrap(&p->context, MPI_COMM_NULL, &desc, &world) == MFSDP_E_ARGUMENT &&
             world == NULL,
         "MPI_COMM_NULL");
  desc.message_nbytes = (size_t)INT_MAX + 1;
  expect(p, mfsdp_mpi_world_wrap(&p->context, MPI_COMM_WORLD, &desc, &world) == MFSDP_E_ARGUMENT,
         "messages beyond INT_MAX");
  desc = mfsdp_mpi_world_desc_default();
  if (p->rank == 1) desc.message_nbytes -= 4;
  world = (mfsdp_mpi_world *)1;
  expect(p,
         mfsdp_mpi_world_wrap(&p->context, MPI_COMM_WORLD, &desc, &world) == MFSDP_E_MISMATCH &&
             world == NULL &&
             strstr(p->context.error.message, "message_nbytes is 67108864 on rank 0 and 67108860 "
                                              "on rank 1") != NULL,
         "another message_nbytes on one rank");
  desc = mfsdp_mpi_world_desc_default();
  if (p->rank == 0) desc.control_nbytes *= 2;
  expect(p, mfsdp_mpi_world_wrap(&p->context, MPI_COMM_WORLD, &desc, &world) == MFSDP_E_MISMATCH,
         "another control_nbytes on one rank");
  expect(p, allgather(p, NULL, 0, NULL) == MFSDP_OK, "none of this has hurt the world");
}

static void run_whole(int worker) {
  mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  int32_t failures = 0;
  const size_t longest = desc.message_nbytes;
  peer p;
  int again;
  /* A second world in the same process: nothing is left over. The first cuts what is longer than
   * 1000 bytes, so that its native collectives go extent by extent. */
  for (again = 0; again < 2; ++again) {
    mfsdp_status opened;
    desc.message_nbytes = again ? longest : 1000;
    opened = open_peer(&p, MPI_COMM_WORLD, &desc, worker);
    expect(&p, opened == MFSDP_OK, "open");
    if (opened != MFSDP_OK) break;
    check_allgather(&p);
    check_probe(&p);
    if (p.size > 1) check_bad_input(&p);
    check_transfers(&p, 0);
    check_transfers(&p, 77);
    check_stream(&p);
    check_collectives(&p);
    /* Fault b8: tags that count would be far beyond these by now. */
    expect(&p, highest_tag <= MFSDP__MPI_TAG_LEFT, "a tag that is none of the kinds of messages");
    expect(&p, again || longest_message <= 1000, "a message was not cut");
    if (again && p.size > 2) check_leavers_have_done_their_part(&p);
    failures += p.failures;
    p.failures = 0;
    expect(&p, close_peer(&p) == MFSDP_OK, "close");
    failures += p.failures;
  }
  say_result(failures, p.rank, p.size);
}

/* ---- scenarios that end in an error ---- */

/* A ring in which everyone waits for the rank before it, time after time. */
static mfsdp_status ring(peer *p, size_t nbytes, uint64_t check) {
  static char in[1 << 20], out[1 << 20];
  mfsdp_xfer xfers[2];
  int32_t round;
  xfers[0] = message((p->rank + 1) % p->size, 1, out, nbytes);
  xfers[1] = message((p->rank + p->size - 1) % p->size, 0, in, nbytes);
  for (round = 0; round < p->size; ++round) /* until nobody can go on without everybody */
    MFSDP_TRY(submit(p, xfers, 2, check, "ring"));
  return finish(p);
}

/* The same with native gathers of one part for each rank. */
static mfsdp_status natives(peer *p, uint64_t check) {
  enum { EACH = 250 };
  static float full[64 * EACH];
  static mfsdp_native_part parts[64];
  mfsdp_native_args args;
  int32_t r;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.kind = MFSDP_NATIVE_GATHER;
  args.dtype = MFSDP_F32;
  args.parts = parts;
  args.part_count = p->size;
  args.dst = full;
  args.traffic = MFSDP_TRAFFIC_MATERIALIZE;
  args.check = check;
  args.label = "ring";
  for (r = 0; r < p->size; ++r) {
    parts[r].owner = r;
    parts[r].count = EACH;
    parts[r].unit_offset = r * EACH;
  }
  MFSDP_TRY(p->transport.ops->native_prepare(p->transport.self, &p->context, &args, &args.form));
  for (r = 0; r < p->size; ++r)
    MFSDP_TRY(mfsdp_transport_native(&p->context, &p->transport, p->queue, &args));
  return finish(p);
}

/* Ranks 0 and 3 submit more than the ring of batches holds, behind one that gets on slowly: rank 2 sends
 * it something now and then, for longer than a submit has to wait, and then rank 1 is to send. */
static mfsdp_status behind(peer *p) {
  enum { PARTS = 4 };
  static char in[PARTS], out;
  mfsdp_xfer xfers[PARTS];
  int32_t i;
  if (p->rank == 2) {
    xfers[0] = message(0, 1, &out, 1);
    xfers[1] = message(3, 1, &out, 1);
    for (i = 0; i + 1 < PARTS; ++i) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + DEADLINE_US * 3 / 5);
      MFSDP_TRY(submit(p, xfers, 2, 0, "ring"));
    }
    xfers[0] = message(1, 0, in, 1);
    MFSDP_TRY(submit(p, xfers, 1, 0, "ring"));
    return finish(p);
  }
  for (i = 0; i < PARTS; ++i)
    xfers[i] = message(i + 1 < PARTS ? 2 : 1, 0, &in[i], 1);
  MFSDP_TRY(submit(p, xfers, PARTS, 0, "ring"));
  for (i = 0; i < p->world->desc.batch_count; ++i)
    MFSDP_TRY(submit(p, NULL, 0, 0, "behind it"));
  return finish(p);
}

static mfsdp_status fail_as(peer *p, const char *how) {
  const int culprit = p->rank == 1;
  if (strstr(how, "-kill") != NULL && culprit) (void)raise(SIGKILL);
  if (strstr(how, "-stop") != NULL && culprit) (void)raise(SIGSTOP);
  if (strstr(how, "-leave") != NULL && culprit) {
    (void)p->control.ops->destroy(p->control.self, &p->context);
    return p->transport.ops->destroy(p->transport.self, &p->context);
  }
  if (strstr(how, "-silent") != NULL && culprit) { /* computes, for longer than anyone waits */
    const int64_t times = strstr(how, "-behind") != NULL ? 8 : 4;
    mfsdp_clock_sleep_until(mfsdp_clock_us() + times * DEADLINE_US);
    return p->transport.ops->poll(p->transport.self, &p->context);
  }
  if (strstr(how, "-poison") != NULL && culprit) {
    mfsdp_error why = mfsdp_error_none();
    (void)MFSDP_ERROR_SET(&why, MFSDP_E_IO, 1, "the test's own reason");
    p->transport.ops->poison(p->transport.self, &why);
    return p->transport.ops->poll(p->transport.self, &p->context);
  }
  if (strstr(how, "-native") != NULL)
    return natives(p, strstr(how, "-check") == NULL ? 0 : culprit ? 2 : 1);
  if (strstr(how, "-behind") != NULL) return behind(p);
  if (strstr(how, "-length") != NULL) return ring(p, culprit ? 2000 : 1000, 0);
  if (strstr(how, "-check") != NULL) return ring(p, 1000, culprit ? 2 : 1);
  if (strstr(how, "-control") != NULL) return allgather(p, NULL, 0, NULL);
  return ring(p, strstr(how, "-large") != NULL ? (size_t)1 << 20 : 1000, 0);
}

static void run_failure(const char *how, const char *verdicts) {
  mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  int64_t start_us, pids[64], pid = (int64_t)getpid();
  mfsdp_status status;
  peer p;
  desc.deadline_us = DEADLINE_US;
  if (open_peer(&p, MPI_COMM_WORLD, &desc, strstr(how, "-worker") != NULL) != MFSDP_OK) return;
  if (allgather(&p, &pid, sizeof(pid), pids) != MFSDP_OK) return;
  start_us = mfsdp_clock_us();
  status = fail_as(&p, how);
  write_verdict(&p, verdicts, status, start_us);
  if (status != MFSDP_OK) { /* and every later call is refused at once */
    start_us = mfsdp_clock_us();
    status = strstr(how, "-control") ? allgather(&p, NULL, 0, NULL) : ring(&p, 10, 0);
    if (status != MFSDP_E_POISONED || mfsdp_clock_us() - start_us > DEADLINE_US)
      write_verdict(&p, verdicts, MFSDP_OK, start_us);
  }
  mfsdp_clock_sleep_until(mfsdp_clock_us() + DEADLINE_US); /* so that notices are out */
  if (strstr(how, "-stop") != NULL && p.rank == 0) (void)kill((pid_t)pids[1], SIGKILL);
  _exit(0); /* a poisoned process does not finalize: with a dead peer that may hang */
}

/* ---- links ---- */

/* The first message opens the connection and uses up what a shaper lets pass at once. */
static void measure_wire(int nbytes) {
  unsigned char *out = (unsigned char *)calloc((size_t)nbytes + 1, 2), *in = out + nbytes;
  int rank, size, round;
  int64_t start_us = 0, rate, slowest = 0, fastest = 0;
  if (out == NULL) return;
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  (void)MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (round = 0; round < 2; ++round) {
    (void)MPI_Barrier(MPI_COMM_WORLD);
    start_us = mfsdp_clock_us();
    (void)MPI_Sendrecv(out, nbytes, MPI_BYTE, (rank + 1) % size, 0, in, nbytes, MPI_BYTE,
                       (rank + size - 1) % size, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
  rate = (int64_t)nbytes * 1000000 / (mfsdp_clock_us() - start_us + 1);
  (void)MPI_Allreduce(&rate, &slowest, 1, MPI_INT64_T, MPI_MIN, MPI_COMM_WORLD);
  (void)MPI_Allreduce(&rate, &fastest, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0) printf("wire %lld %lld\n", (long long)slowest, (long long)fastest);
  free(out);
}

/* Before MPI_Init and after MPI_Finalize there is no world to be had. Says so if there was. */
static void expect_no_world(const char *when) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  mfsdp_mpi_world *world = NULL;
  mfsdp_context context;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_mpi_world_wrap(&context, MPI_COMM_WORLD, &desc, &world) != MFSDP_E_STATE ||
      world != NULL || strstr(context.error.message, when) == NULL)
    printf("not ok: a world, %s\n", when);
}

int main(int argc, char **argv) {
  const int worker = argc > 1 && strstr(argv[1], "worker") != NULL;
  int level = 0, wanted = MPI_THREAD_MULTIPLE;
  if (argc < 2) return 2;
  scenario_name = argv[1];
  if (strcmp(argv[1], "funneled") == 0) wanted = MPI_THREAD_FUNNELED;
  expect_no_world("not initialized");
  if (MPI_Init_thread(&argc, &argv, wanted, &level) != MPI_SUCCESS) return 1;
  if (strcmp(argv[1], "wire") == 0)
    measure_wire(argc > 2 ? atoi(argv[2]) : 1000000);
  else if (strncmp(argv[1], "fail-", 5) == 0)
    run_failure(argv[1], argc > 2 ? argv[2] : "verdict");
  else
    run_whole(worker);
  (void)MPI_Finalize();
  expect_no_world("finalized");
  return 0;
}
