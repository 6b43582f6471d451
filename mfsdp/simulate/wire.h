/* SPDX-License-Identifier: MIT */
/*
 * simulate/wire.h - predicts one gather or reduce of owner segments.
 *
 *   mfsdp_sim_segment segments[4] = {{1 << 20, 1}, {0, 0}, {1 << 20, 1}, {1 << 19, 2}};
 *   double us;
 *   MFSDP_TRY(mfsdp_sim_collective(&context, &cluster, MFSDP_SIM_RING, 0, segments, 4, 0, &us, NULL));
 *
 * Notation: W ranks in N nodes of n; rank r owns s_r bytes in e_r extents; P = sum of s; P_k that
 * of node k; a_in, b_in latency and bandwidth inside a node, a_net, b_net of one rank between
 * nodes, b_node of a whole node into the network.
 *
 * DIRECT (Hockney's alpha-beta cost of each message, ports as in simulate.h). In a gather rank r
 * sends s_r to W - 1 peers and receives P - s_r; inside its node (n - 1) s_r and P_k - s_r of
 * these, between nodes (W - n) s_r and P - P_k: T = max over r of [ max(latencies of what it sends,
 * of what it receives)
 *                       + max((n-1) s_r / b_in, (P_k - s_r) / b_in, (W-n) s_r / b_net,
 *                             (P - P_k) / b_net) ]
 *   and at least max over k of max(P_k (W-n), n (P - P_k)) / b_node.
 * RING: collective.h's one ring in rank order, in chunks of c. The link into rank q carries P - s_q
 * in as many chunks; a chunk then has W - 2 more hops. With a, b of each link (one rank's network
 * port where it leaves a node):
 *   T = max over links [ chunks a + (P - s_q) / b ] + sum over the other W - 2 links of
 *       [ a + min(c, largest s) / b ],
 *   the pipelined form of the ring all-gather's (W-1) a + (W-1)/W P/b (Thakur, Rabenseifner and
 *   Gropp, "Optimization of collective communication operations in MPICH", 2005).
 * HIERARCHICAL: each segment goes once to every other node, to the rank there with the owner's
 * place in its node (modulo the size of a smaller last node), which sends it on to its n - 1
 * neighbours; with F_r the bytes that rank r receives so: T = max over r of [ e_r (N-1) a_net +
 * max((N-1) s_r, F_r) / b_net ] (and at least max over k of max(P_k (N-1), P - P_k) / b_node) +
 *     max over r of [ messages a_in + max((n-1) (s_r + F_r), P - s_r - F_r) / b_in ].
 * NATIVE (NCCL, MPI): rings through all network ports of a node at once, as nccl-tests defines bus
 * bandwidth (PERFORMANCE.md: an all-gather takes S/B (W-1)/W), with the hops that NCCL's own tuning
 * model counts (tuning.cc: N - 1 of a ring's W - 1 steps cross the network):
 *   T = (W - N) a_in + (N - 1) a_net + (P - min s) / B, B = b_in in one node, else
 *   min(b_in, b_node).
 *
 * A reduce is the gather backwards: the same times, sends and receives exchanged. Its sums add a
 * pass over memory: DIRECT reads W terms and writes one, (W+1) max s / b_memory; RING and NATIVE
 * read two and write one of everything, 3 P / b_memory; HIERARCHICAL n + 1 times the largest
 * s + F and N + 1 times the largest s. DIRECT reductions go in chunks: e_r + s_r / c messages.
 *
 * Does not: know a plan (simulate/step.h does).
 * Link flags: none.
 */
#ifndef MFSDP_SIMULATE_WIRE_H
#define MFSDP_SIMULATE_WIRE_H

#include "desc.h"

/* What one rank owns on the wire. */
typedef struct mfsdp_sim_segment {
  int64_t nbytes;        /* >= 0, padding that travels included */
  int32_t message_count; /* extents: messages to each peer; 0 exactly where nbytes is 0 */
} mfsdp_sim_segment;

typedef struct mfsdp__sim_wire {
  const mfsdp_cluster *cluster;
  const mfsdp_sim_segment *segments;
  int64_t *sent; /* world entries or NULL */
  int64_t total, messages, largest, smallest;
  int32_t world, node_count, is_reduce;
  double chunk;
  int overflow; /* a count of sent bytes passed 64 bits */
} mfsdp__sim_wire;

MFSDP_API double mfsdp__sim_max(double a, double b) {
  return a > b ? a : b;
}

/* Microseconds of `nbytes` at a rate per second. */
MFSDP_API double mfsdp__sim_us(double nbytes, double rate) {
  return nbytes / rate * 1e6;
}

MFSDP_API int32_t mfsdp__sim_node_first(const mfsdp__sim_wire *w, int32_t node) {
  return node * w->cluster->ranks_per_node;
}

MFSDP_API int32_t mfsdp__sim_node_size(const mfsdp__sim_wire *w, int32_t node) {
  const int32_t left = w->world - mfsdp__sim_node_first(w, node);
  return left < w->cluster->ranks_per_node ? left : w->cluster->ranks_per_node;
}

/* sent[rank] += count * times, noticing overflow. */
MFSDP_API void mfsdp__sim_send(mfsdp__sim_wire *w, int32_t rank, int64_t count, int64_t times) {
  int64_t product;
  if (w->sent == NULL) return;
  if (!mfsdp_i64_mul(count, times, &product) ||
      !mfsdp_i64_add(w->sent[rank], product, &w->sent[rank]))
    w->overflow = 1;
}

/* Bytes and messages together. */
typedef struct mfsdp__sim_load {
  int64_t nbytes, messages;
} mfsdp__sim_load;

MFSDP_API mfsdp__sim_load mfsdp__sim_load_of(const mfsdp__sim_wire *w, int32_t rank) {
  mfsdp__sim_load load;
  load.nbytes = w->segments[rank].nbytes;
  load.messages = w->segments[rank].message_count;
  return load;
}

MFSDP_API void mfsdp__sim_load_add(mfsdp__sim_load *sum, mfsdp__sim_load one) {
  sum->nbytes += one.nbytes;
  sum->messages += one.messages;
}

/* ---- ports ---- */

/* Messages and bytes through one port. Doubles: products of counts pass 64 bits, and as times they
 * need no more digits. */
typedef struct mfsdp__sim_port {
  double messages, nbytes;
} mfsdp__sim_port;

/* What one rank exchanges point to point with ranks of its node (near) and of others (far). */
typedef struct mfsdp__sim_ports {
  mfsdp__sim_port near_out, near_in, far_out, far_in;
} mfsdp__sim_ports;

/* The slowest rank so far, and what its node has sent into the network and received from it. */
typedef struct mfsdp__sim_slowest {
  double us, node_out, node_in;
} mfsdp__sim_slowest;

/* One rank alone: it starts its messages one after the other, its ports work at the same time. */
MFSDP_API double mfsdp__sim_ports_us(const mfsdp_cluster *c, const mfsdp__sim_ports *p) {
  const double send =
      p->near_out.messages * c->node_latency_us + p->far_out.messages * c->net_latency_us;
  const double receive =
      p->near_in.messages * c->node_latency_us + p->far_in.messages * c->net_latency_us;
  return mfsdp__sim_max(send, receive) +
         mfsdp__sim_max(mfsdp__sim_us(mfsdp__sim_max(p->near_out.nbytes, p->near_in.nbytes),
                                      c->node_nbytes_per_s),
                        mfsdp__sim_us(mfsdp__sim_max(p->far_out.nbytes, p->far_in.nbytes),
                                      c->net_nbytes_per_s));
}

/* Ranks come by rising number: those of a node share its network. */
MFSDP_API void mfsdp__sim_slowest_add(const mfsdp_cluster *c, int32_t rank,
                                      const mfsdp__sim_ports *ports, mfsdp__sim_slowest *slowest) {
  if (rank % c->ranks_per_node == 0) slowest->node_out = slowest->node_in = 0.0;
  slowest->node_out += ports->far_out.nbytes;
  slowest->node_in += ports->far_in.nbytes;
  slowest->us = mfsdp__sim_max(slowest->us, mfsdp__sim_ports_us(c, ports));
  slowest->us =
      mfsdp__sim_max(slowest->us, mfsdp__sim_us(mfsdp__sim_max(slowest->node_out, slowest->node_in),
                                                c->net_node_nbytes_per_s));
}

/* ---- DIRECT ---- */

MFSDP_API mfsdp__sim_load mfsdp__sim_direct_load(const mfsdp__sim_wire *w, int32_t rank) {
  mfsdp__sim_load load = mfsdp__sim_load_of(w, rank);
  if (w->is_reduce) load.messages += (int64_t)((double)load.nbytes / w->chunk);
  return load;
}

MFSDP_API mfsdp__sim_port mfsdp__sim_port_of(double times, int64_t messages, int64_t nbytes) {
  mfsdp__sim_port port;
  port.messages = times * (double)messages;
  port.nbytes = times * (double)nbytes;
  return port;
}

/* One rank's ports in a gather; reversed in a reduce, which takes as long. */
MFSDP_API mfsdp__sim_ports mfsdp__sim_direct_ports(const mfsdp__sim_wire *w, mfsdp__sim_load own,
                                                   mfsdp__sim_load node, mfsdp__sim_load all,
                                                   int32_t size) {
  mfsdp__sim_ports ports;
  ports.near_out = mfsdp__sim_port_of(size - 1, own.messages, own.nbytes);
  ports.near_in = mfsdp__sim_port_of(1.0, node.messages - own.messages, node.nbytes - own.nbytes);
  ports.far_out = mfsdp__sim_port_of(w->world - size, own.messages, own.nbytes);
  ports.far_in = mfsdp__sim_port_of(1.0, all.messages - node.messages, all.nbytes - node.nbytes);
  return ports;
}

MFSDP_API double mfsdp__sim_direct(mfsdp__sim_wire *w) {
  mfsdp__sim_load all = {0, 0};
  mfsdp__sim_slowest slowest = {0.0, 0.0, 0.0};
  int32_t k, r;
  for (r = 0; r < w->world; ++r) {
    mfsdp__sim_load_add(&all, mfsdp__sim_direct_load(w, r));
    if (w->is_reduce)
      mfsdp__sim_send(w, r, w->total - w->segments[r].nbytes, 1);
    else
      mfsdp__sim_send(w, r, w->segments[r].nbytes, w->world - 1);
  }
  for (k = 0; k < w->node_count; ++k) {
    const int32_t first = mfsdp__sim_node_first(w, k), size = mfsdp__sim_node_size(w, k);
    mfsdp__sim_load node = {0, 0};
    for (r = first; r < first + size; ++r)
      mfsdp__sim_load_add(&node, mfsdp__sim_direct_load(w, r));
    for (r = first; r < first + size; ++r) {
      const mfsdp__sim_ports ports =
          mfsdp__sim_direct_ports(w, mfsdp__sim_direct_load(w, r), node, all, size);
      mfsdp__sim_slowest_add(w->cluster, r, &ports, &slowest);
    }
  }
  if (w->is_reduce)
    slowest.us +=
        mfsdp__sim_us((w->world + 1.0) * (double)w->largest, w->cluster->memory_nbytes_per_s);
  return slowest.us;
}

/* ---- RING and NATIVE ---- */

/* Bytes along a ring: everything but what the next rank owns (of a reduce: but what the rank owns
 * itself, since the ring runs backwards). */
MFSDP_API void mfsdp__sim_ring_sent(mfsdp__sim_wire *w) {
  int32_t r;
  for (r = 0; r < w->world; ++r) {
    const int32_t but = w->is_reduce ? r : (r + 1) % w->world;
    mfsdp__sim_send(w, r, w->total - w->segments[but].nbytes, 1);
  }
}

MFSDP_API double mfsdp__sim_chunks(const mfsdp__sim_wire *w, int32_t rank) {
  const double exact = (double)w->segments[rank].nbytes / w->chunk;
  const double whole = exact < 9e15 ? (double)(int64_t)exact : exact;
  return whole < exact ? whole + 1.0 : whole;
}

MFSDP_API double mfsdp__sim_ring(mfsdp__sim_wire *w) {
  const mfsdp_cluster *c = w->cluster;
  const double out = c->net_nbytes_per_s < c->net_node_nbytes_per_s ? c->net_nbytes_per_s
                                                                    : c->net_node_nbytes_per_s;
  const double piece = (double)w->largest < w->chunk ? (double)w->largest : w->chunk;
  double chunks = 0.0, busy = 0.0, busy_hop = 0.0, hops = 0.0, cheapest = 0.0;
  int32_t q;
  for (q = 0; q < w->world; ++q)
    chunks += mfsdp__sim_chunks(w, q);
  for (q = 0; q < w->world; ++q) { /* the link into q */
    const int32_t before = q == 0 ? w->world - 1 : q - 1;
    const int inside = before / c->ranks_per_node == q / c->ranks_per_node;
    const double a = inside ? c->node_latency_us : c->net_latency_us;
    const double b = inside ? c->node_nbytes_per_s : out;
    const double hop = a + mfsdp__sim_us(piece, b);
    const double time = (chunks - mfsdp__sim_chunks(w, q)) * a +
                        mfsdp__sim_us((double)(w->total - w->segments[q].nbytes), b);
    hops += hop;
    if (q == 0 || hop < cheapest) cheapest = hop;
    if (time < busy) continue;
    busy = time;
    busy_hop = hop;
  }
  mfsdp__sim_ring_sent(w);
  if (w->is_reduce) busy += mfsdp__sim_us(3.0 * (double)w->total, c->memory_nbytes_per_s);
  return w->world > 2 ? busy + hops - busy_hop - cheapest : busy;
}

/* NATIVE without its sums: `nbytes` is what the neediest rank receives. */
MFSDP_API double mfsdp__sim_native_us(const mfsdp_cluster *c, int32_t world, double nbytes) {
  const int32_t nodes = (world - 1) / c->ranks_per_node + 1;
  double b = c->node_nbytes_per_s;
  if (nodes > 1 && c->net_node_nbytes_per_s < b) b = c->net_node_nbytes_per_s;
  return (world - nodes) * c->node_latency_us + (nodes - 1) * c->net_latency_us +
         mfsdp__sim_us(nbytes, b);
}

MFSDP_API double mfsdp__sim_native(mfsdp__sim_wire *w) {
  const mfsdp_cluster *c = w->cluster;
  double us = mfsdp__sim_native_us(c, w->world, (double)(w->total - w->smallest));
  mfsdp__sim_ring_sent(w);
  if (w->is_reduce) us += mfsdp__sim_us(3.0 * (double)w->total, c->memory_nbytes_per_s);
  return us;
}

/* ---- HIERARCHICAL ---- */

/* What the ranks of other nodes that share the place of `rank` own: F_r. O(world / places). */
MFSDP_API mfsdp__sim_load mfsdp__sim_foreign(const mfsdp__sim_wire *w, int32_t rank) {
  const int32_t n = w->cluster->ranks_per_node, node = rank / n;
  const int32_t size = mfsdp__sim_node_size(w, node), step = size;
  mfsdp__sim_load sum = {0, 0};
  int32_t place, q;
  for (place = rank % n; place < n; place += step)
    for (q = place; q < w->world; q += n)
      if (q / n != node) mfsdp__sim_load_add(&sum, mfsdp__sim_load_of(w, q));
  return sum;
}

/* What all ranks with one place own. */
MFSDP_API mfsdp__sim_load mfsdp__sim_column(const mfsdp__sim_wire *w, int32_t place) {
  mfsdp__sim_load sum = {0, 0};
  int32_t q;
  for (q = place; q < w->world; q += w->cluster->ranks_per_node)
    mfsdp__sim_load_add(&sum, mfsdp__sim_load_of(w, q));
  return sum;
}

typedef struct mfsdp__sim_phases {
  double between, within, most, most_within;
} mfsdp__sim_phases;

MFSDP_API void mfsdp__sim_hierarchical_rank(mfsdp__sim_wire *w, int32_t rank, int32_t size,
                                            mfsdp__sim_load foreign, mfsdp__sim_phases *p) {
  const mfsdp_cluster *c = w->cluster;
  const mfsdp__sim_load own = mfsdp__sim_load_of(w, rank);
  const double nodes = w->node_count - 1, near = size - 1;
  const int64_t held = own.nbytes + foreign.nbytes, messages = own.messages + foreign.messages;
  const double out = mfsdp__sim_max(nodes * (double)own.messages, (double)foreign.messages);
  const double out_nbytes = mfsdp__sim_max(nodes * (double)own.nbytes, (double)foreign.nbytes);
  const double in = mfsdp__sim_max(near * (double)messages, (double)(w->messages - messages));
  const double in_nbytes = mfsdp__sim_max(near * (double)held, (double)(w->total - held));
  p->between = mfsdp__sim_max(p->between, out * c->net_latency_us +
                                              mfsdp__sim_us(out_nbytes, c->net_nbytes_per_s));
  p->within = mfsdp__sim_max(p->within, in * c->node_latency_us +
                                            mfsdp__sim_us(in_nbytes, c->node_nbytes_per_s));
  p->most = mfsdp__sim_max(p->most, (double)own.nbytes);
  p->most_within = mfsdp__sim_max(p->most_within, (double)held);
  if (w->is_reduce) {
    /* To the neighbours what they collect, to the owners on other nodes what it has collected. */
    mfsdp__sim_send(w, rank, w->total - own.nbytes, 1);
    return;
  }
  mfsdp__sim_send(w, rank, own.nbytes, w->node_count - 1);
  mfsdp__sim_send(w, rank, held, size - 1);
}

MFSDP_API double mfsdp__sim_hierarchical(mfsdp__sim_wire *w) {
  const mfsdp_cluster *c = w->cluster;
  const int32_t n = c->ranks_per_node;
  mfsdp__sim_phases p = {0.0, 0.0, 0.0, 0.0};
  int32_t k, r, place;
  for (place = 0; place < n && place < w->world; ++place) {
    const mfsdp__sim_load column = mfsdp__sim_column(w, place);
    for (r = place; r < w->world; r += n) {
      const int32_t size = mfsdp__sim_node_size(w, r / n);
      const mfsdp__sim_load own = mfsdp__sim_load_of(w, r);
      mfsdp__sim_load foreign;
      if (size == n) {
        foreign.nbytes = column.nbytes - own.nbytes;
        foreign.messages = column.messages - own.messages;
      } else {
        foreign = mfsdp__sim_foreign(w, r);
      }
      mfsdp__sim_hierarchical_rank(w, r, size, foreign, &p);
    }
  }
  for (k = 0; k < w->node_count; ++k) {
    double node = 0.0;
    for (r = mfsdp__sim_node_first(w, k); r / n == k && r < w->world; ++r)
      node += (double)w->segments[r].nbytes;
    node = mfsdp__sim_max(node * (w->node_count - 1), (double)w->total - node);
    if (w->node_count > 1)
      p.between = mfsdp__sim_max(p.between, mfsdp__sim_us(node, c->net_node_nbytes_per_s));
  }
  if (w->is_reduce)
    p.within += mfsdp__sim_us((n + 1.0) * p.most_within + (w->node_count + 1.0) * p.most,
                              c->memory_nbytes_per_s);
  return p.between + p.within;
}

/* ---- the whole ---- */

/* The chunk that the runtime takes for what it would move: as asked, or for 0 what it chooses. */
MFSDP_API size_t mfsdp__sim_chunk_nbytes(const mfsdp_cluster *cluster,
                                         mfsdp_sim_algorithm algorithm, const mfsdp_wire_cost *wire,
                                         int32_t world, int64_t unit_nbytes, int64_t longest_nbytes,
                                         size_t chunk_nbytes) {
  mfsdp__chunk_ask ask;
  if (chunk_nbytes > 0) return chunk_nbytes;
  if (algorithm != MFSDP_SIM_RING && algorithm != MFSDP_SIM_HIERARCHICAL) return MFSDP_CHUNK_NBYTES;
  ask.unit_nbytes = unit_nbytes;
  ask.longest_nbytes = longest_nbytes;
  ask.world = world;
  ask.node_count = (world - 1) / cluster->ranks_per_node + 1;
  ask.by_nodes = algorithm == MFSDP_SIM_HIERARCHICAL;
  ask.wire = wire;
  return mfsdp__chunk_choose(&ask);
}

/* Sizes, and the rules of segments. */
MFSDP_API mfsdp_status mfsdp__sim_wire_measure(mfsdp_context *context, mfsdp__sim_wire *w) {
  int32_t r;
  w->smallest = w->segments[0].nbytes;
  for (r = 0; r < w->world; ++r) {
    const mfsdp_sim_segment *s = &w->segments[r];
    if (s->nbytes < 0 || s->message_count < 0 || (s->nbytes > 0) != (s->message_count > 0))
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "simulate: segment of rank %d has %lld bytes in %d messages, needs both "
                        "positive or both 0",
                        (int)r, (long long)s->nbytes, (int)s->message_count);
    if (!mfsdp_i64_add(w->total, s->nbytes, &w->total))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "simulate: segments pass 64 bits at rank %d",
                        (int)r);
    w->messages += s->message_count;
    if (s->nbytes > w->largest) w->largest = s->nbytes;
    if (s->nbytes < w->smallest) w->smallest = s->nbytes;
  }
  return MFSDP_OK;
}

/*
 * Predicts one gather (is_reduce 0) or reduce (1). segments: world entries. chunk_nbytes 0: what
 * the library chooses of the segments alone. *us receives microseconds; sent_nbytes (world entries,
 * NULL: not asked) has the bytes that each rank sends added to it. World 1 and empty units take no
 * time. E_ARGUMENT for a NULL, an invalid cluster, algorithm, world or segment; E_OVERFLOW if bytes
 * pass 64 bits. O(world), allocates nothing.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_sim_collective(
    mfsdp_context *context, const mfsdp_cluster *cluster, mfsdp_sim_algorithm algorithm,
    int32_t is_reduce, const mfsdp_sim_segment *segments, int32_t world, size_t chunk_nbytes,
    double *us, int64_t *sent_nbytes) {
  const mfsdp_wire_cost unknown = {0, 0, 0, 0};
  mfsdp__sim_wire w;
  MFSDP_TRY(mfsdp_cluster_validate(context, cluster));
  if (segments == NULL || us == NULL || world < 1 || world > MFSDP_PLAN_MAX_WORLD)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: segments, us and a world of 1 to %d (has %d) are needed",
                      MFSDP_PLAN_MAX_WORLD, (int)world);
  memset(&w, 0, sizeof(w));
  w.cluster = cluster;
  w.segments = segments;
  w.sent = sent_nbytes;
  w.world = world;
  w.is_reduce = is_reduce != 0;
  w.node_count = (world - 1) / cluster->ranks_per_node + 1;
  MFSDP_TRY(mfsdp__sim_wire_measure(context, &w));
  w.chunk = (double)mfsdp__sim_chunk_nbytes(cluster, algorithm, &unknown, world, w.total, w.largest,
                                            chunk_nbytes);
  *us = 0.0;
  if (world == 1 || w.total == 0) return MFSDP_OK;
  switch (algorithm) {
  case MFSDP_SIM_DIRECT: *us = mfsdp__sim_direct(&w); break;
  case MFSDP_SIM_RING: *us = mfsdp__sim_ring(&w); break;
  case MFSDP_SIM_HIERARCHICAL: *us = mfsdp__sim_hierarchical(&w); break;
  case MFSDP_SIM_NATIVE: *us = mfsdp__sim_native(&w); break;
  default:
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: algorithm is %d, needs an mfsdp_sim_algorithm", (int)algorithm);
  }
  if (w.overflow)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "simulate: the bytes a rank sends pass 64 bits");
  return MFSDP_OK;
}

#endif /* MFSDP_SIMULATE_WIRE_H */
