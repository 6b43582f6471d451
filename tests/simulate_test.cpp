/* SPDX-License-Identifier: MIT */
/*
 * simulate.h: formulas against cases worked out by hand, bytes against the lists that collective.h
 * emits, what must grow when something grows, and its rules.
 */
#include "mfsdp/simulate.h"

#include "mfsdp/collective.h"
#include "tests/support/backend_rig.h"
#include "tests/support/mock_transport.h"
#include "tests/support/plan_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace {

const mfsdp_sim_algorithm kAlgorithms[] = {MFSDP_SIM_DIRECT, MFSDP_SIM_RING, MFSDP_SIM_HIERARCHICAL,
                                           MFSDP_SIM_NATIVE};
const mfsdp_sim_strategy kStrategies[] = {MFSDP_SIM_OWNER,   MFSDP_SIM_GATHER,
                                          MFSDP_SIM_SHARDED, MFSDP_SIM_EXCHANGE,
                                          MFSDP_SIM_ZERO1,   MFSDP_SIM_REPLICATED};

/* Two ranks a node, numbers that divide well: 1000 B/us inside, 100 out of a rank, 150 out of a
 * node; sums at 10,000 B/us of memory. */
mfsdp_cluster small_cluster() {
  mfsdp_cluster c = mfsdp_cluster_default();
  c.ranks_per_node = 2;
  c.node_latency_us = 1;
  c.net_latency_us = 10;
  c.node_nbytes_per_s = 1e9;
  c.net_nbytes_per_s = 1e8;
  c.net_node_nbytes_per_s = 1.5e8;
  c.flops_per_s = 1e9;
  c.memory_nbytes_per_s = 1e10;
  c.matrix_us = 0;
  return c;
}

struct Wire {
  double us = -1;
  std::vector<int64_t> sent;
  mfsdp_status status = MFSDP_OK;
};

class Context {
public:
  Context() {
    const mfsdp_context_desc d = mfsdp_context_desc_default();
    EXPECT_EQ(mfsdp_context_init(&context, &d), MFSDP_OK);
  }
  ~Context() { EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  std::string message() const { return mfsdp_context_error(&context)->message; }
  mfsdp_context context;
};

Wire wire(mfsdp_sim_algorithm algorithm, bool is_reduce,
          const std::vector<mfsdp_sim_segment> &segments,
          const mfsdp_cluster &cluster = small_cluster(), std::size_t chunk = 1000) {
  Context c;
  Wire out;
  out.sent.resize(segments.size());
  out.status =
      mfsdp_sim_collective(&c.context, &cluster, algorithm, is_reduce ? 1 : 0, segments.data(),
                           static_cast<int32_t>(segments.size()), chunk, &out.us, out.sent.data());
  EXPECT_EQ(out.status, MFSDP_OK) << c.message();
  return out;
}

using Sent = std::vector<int64_t>;
/* Rank 0 owns 1000 bytes in one extent, rank 2 (of the other node) 2000 in two. */
const std::vector<mfsdp_sim_segment> kUneven = {{1000, 1}, {0, 0}, {2000, 2}, {0, 0}};
/* All sums are of exact decimals; only the division by rates rounds. */
const double kTiny = 1e-9;

/* ---- collectives by hand ---- */

TEST(SimulateWire, Direct) {
  const Wire w = wire(MFSDP_SIM_DIRECT, false, kUneven);
  /* Rank 2 is the slowest: two messages to one neighbour and two strangers, 2 (1 + 2 x 10) us, and
   * 2 x 2000 bytes at 100 B/us. */
  EXPECT_NEAR(w.us, 42 + 40, kTiny);
  EXPECT_EQ(w.sent, (Sent{3000, 0, 6000, 0}));
}

TEST(SimulateWire, DirectIsBoundByTheNodesNetwork) {
  mfsdp_cluster c = small_cluster();
  c.net_node_nbytes_per_s = 2e7; /* 20 B/us for 2 ranks x 2000 bytes: 200 us, more than 82 */
  EXPECT_NEAR(wire(MFSDP_SIM_DIRECT, false, kUneven, c).us, 200, kTiny);
}

TEST(SimulateWire, DirectReduceIsTheGatherBackwards) {
  const Wire w = wire(MFSDP_SIM_DIRECT, true, kUneven, small_cluster(), 5000);
  /* The same ports, and (W + 1) x 2000 bytes of memory at 10,000 B/us; one chunk. */
  EXPECT_NEAR(w.us, 82 + 1, kTiny);
  EXPECT_EQ(w.sent, (Sent{2000, 3000, 1000, 3000}));
  /* In chunks of 1000 rank 2 gets two messages more from each peer. */
  EXPECT_NEAR(wire(MFSDP_SIM_DIRECT, true, kUneven).us, 82 + 42 + 1, kTiny);
}

TEST(SimulateWire, Ring) {
  const Wire w = wire(MFSDP_SIM_RING, false, kUneven);
  /* The link into rank 0: two chunks, 2 x 10 + 2000 / 100. Then the chunk's two more hops: of the
   * links' hop times 20, 2, 20, 2 without the busy 20 and the cheapest 2. */
  EXPECT_NEAR(w.us, 40 + 22, kTiny);
  EXPECT_EQ(w.sent, (Sent{3000, 1000, 3000, 2000}));
  const Wire back = wire(MFSDP_SIM_RING, true, kUneven);
  EXPECT_NEAR(back.us, 62 + 0.9, kTiny); /* 3 x 3000 bytes of memory */
  EXPECT_EQ(back.sent, (Sent{2000, 3000, 1000, 3000}));
}

TEST(SimulateWire, Hierarchical) {
  const Wire w = wire(MFSDP_SIM_HIERARCHICAL, false, kUneven);
  /* Between nodes two messages of 10 us and 2000 bytes at 100; inside three messages of 1 us and
   * 3000 bytes at 1000. */
  EXPECT_NEAR(w.us, 20 + 20 + 3 + 3, kTiny);
  EXPECT_EQ(w.sent, (Sent{4000, 0, 5000, 0}));
  const Wire back = wire(MFSDP_SIM_HIERARCHICAL, true, kUneven);
  /* (2 + 1) x 3000 + (2 + 1) x 2000 bytes of memory. */
  EXPECT_NEAR(back.us, 46 + 1.5, kTiny);
  EXPECT_EQ(back.sent, (Sent{2000, 3000, 1000, 3000}));
}

TEST(SimulateWire, HierarchicalWithASmallLastNode) {
  mfsdp_cluster c = small_cluster();
  c.ranks_per_node = 4; /* nodes of 4 and of 2: places 2 and 3 go to places 0 and 1 of the last */
  const std::vector<mfsdp_sim_segment> s = {{100, 1}, {200, 1}, {300, 1},
                                            {400, 1}, {500, 1}, {600, 1}};
  /* Rank 4 gets 100 and 300, sends them and its own to one neighbour; rank 0 gets 500. */
  EXPECT_EQ(
      wire(MFSDP_SIM_HIERARCHICAL, false, s, c).sent,
      (Sent{100 + 3 * 600, 200 + 3 * 800, 300 + 3 * 300, 400 + 3 * 400, 500 + 900, 600 + 1200}));
}

TEST(SimulateWire, Native) {
  /* Two hops inside and one between nodes; 3000 bytes (rank 1 owns nothing) at the node's 150. */
  EXPECT_NEAR(wire(MFSDP_SIM_NATIVE, false, kUneven).us, 12 + 20, kTiny);
  mfsdp_cluster c = small_cluster();
  c.ranks_per_node = 4;
  EXPECT_NEAR(wire(MFSDP_SIM_NATIVE, false, kUneven, c).us, 3 + 3, kTiny);
}

TEST(SimulateWire, NothingToSendTakesNoTime) {
  for (const mfsdp_sim_algorithm a : kAlgorithms)
    for (const bool is_reduce : {false, true}) {
      EXPECT_EQ(wire(a, is_reduce, {{5000, 3}}).us, 0.0);
      EXPECT_EQ(wire(a, is_reduce, {{0, 0}, {0, 0}, {0, 0}}).us, 0.0);
      EXPECT_EQ(wire(a, is_reduce, {{5000, 3}}).sent, (Sent{0}));
    }
}

/* Whatever the algorithm: W - 1 copies of everything cross the wire, all ranks together. */
TEST(SimulateWire, EveryAlgorithmSendsTheSameTotal) {
  for (int32_t world = 1; world <= 21; ++world)
    for (int32_t node = 1; node <= world; ++node) {
      mfsdp_cluster c = small_cluster();
      std::vector<mfsdp_sim_segment> s;
      int64_t total = 0;
      c.ranks_per_node = node;
      for (int32_t r = 0; r < world; ++r) {
        const int64_t nbytes = r % 3 == 1 ? 0 : 100 + 37 * (r * 7 % 11);
        s.push_back({nbytes, nbytes > 0 ? 1 + r % 2 : 0});
        total += nbytes;
      }
      for (const mfsdp_sim_algorithm a : kAlgorithms)
        for (const bool is_reduce : {false, true}) {
          const Wire w = wire(a, is_reduce, s, c);
          EXPECT_EQ(std::accumulate(w.sent.begin(), w.sent.end(), int64_t{0}), total * (world - 1))
              << mfsdp_sim_algorithm_name(a) << " world " << world << " node " << node;
        }
    }
}

TEST(SimulateWire, MoreBytesOrASlowerClusterNeverTakeLess) {
  for (const mfsdp_sim_algorithm a : kAlgorithms)
    for (const bool is_reduce : {false, true})
      for (int32_t world = 2; world <= 9; ++world) {
        std::vector<mfsdp_sim_segment> s(static_cast<std::size_t>(world), {1000, 1});
        const double before = wire(a, is_reduce, s).us;
        for (mfsdp_sim_segment &one : s) {
          one.nbytes += 777;
          /* NATIVE waits for the rank that lacks most: a larger smallest segment is a gain. */
          if (a == MFSDP_SIM_NATIVE) continue;
          EXPECT_GE(wire(a, is_reduce, s).us, before);
        }
        EXPECT_GT(wire(a, is_reduce, s).us, before);
        mfsdp_cluster slow = small_cluster();
        slow.net_nbytes_per_s /= 2;
        slow.net_node_nbytes_per_s /= 2;
        slow.node_nbytes_per_s /= 2;
        EXPECT_GT(wire(a, is_reduce, s, slow).us, wire(a, is_reduce, s).us);
        slow = small_cluster();
        slow.node_latency_us *= 2;
        slow.net_latency_us *= 2;
        EXPECT_GT(wire(a, is_reduce, s, slow).us, wire(a, is_reduce, s).us);
      }
}

/* A ring does not care who owns what, point-to-point from one owner does. */
TEST(SimulateWire, RingLevelsWhatDirectDoesNot) {
  std::vector<mfsdp_sim_segment> level(16, {1 << 20, 1}), one(16, {0, 0});
  one[5] = {16 << 20, 1};
  const std::size_t chunk = 1 << 14;
  mfsdp_cluster c = small_cluster();
  c.node_latency_us = c.net_latency_us = 0;
  const double ring = wire(MFSDP_SIM_RING, false, one, c, chunk).us /
                      wire(MFSDP_SIM_RING, false, level, c, chunk).us;
  const double direct = wire(MFSDP_SIM_DIRECT, false, one, c, chunk).us /
                        wire(MFSDP_SIM_DIRECT, false, level, c, chunk).us;
  EXPECT_LT(ring, 1.1);
  EXPECT_GT(direct, 8.0);
}

/* On slow links the chunk that is chosen of the size alone is near the best of all: its fill is at most
 * a sixteenth of the unit, or that of the smallest (here 6 x 32 KiB of 3 MB, 6.6 %; twice that for what a rank
 * with a long segment receives). That of 256 KiB is half of it. */
TEST(SimulateWire, RingsOwnChunkSuitsSlowLinks) {
  std::vector<mfsdp_sim_segment> block(8, {286000, 1});
  block[3] = {998000, 1};
  mfsdp_cluster c = small_cluster();
  c.ranks_per_node = 1;
  c.net_latency_us = 50;
  c.net_nbytes_per_s = c.net_node_nbytes_per_s = 1.5e6;
  for (const bool is_reduce : {false, true}) {
    const double own = wire(MFSDP_SIM_RING, is_reduce, block, c, 0).us;
    double best = own;
    for (std::size_t chunk = 1024; chunk <= 1 << 20; chunk += 1024)
      best = std::min(best, wire(MFSDP_SIM_RING, is_reduce, block, c, chunk).us);
    EXPECT_LT(own, 1.125 * best);
    EXPECT_GT(wire(MFSDP_SIM_RING, is_reduce, block, c, 256 << 10).us, 1.3 * own);
  }
}

/* ---- rules ---- */

TEST(SimulateWire, Refuses) {
  Context c;
  const mfsdp_cluster good = small_cluster();
  mfsdp_sim_segment s[2] = {{8, 1}, {8, 1}};
  int64_t sent[2] = {0, 0};
  double us;
  const auto run = [&](int algorithm, int32_t world, std::size_t chunk) {
    return mfsdp_sim_collective(&c.context, &good, static_cast<mfsdp_sim_algorithm>(algorithm), 0,
                                s, world, chunk, &us, sent);
  };
  EXPECT_EQ(run(9, 2, 1), MFSDP_E_ARGUMENT);
  EXPECT_NE(c.message().find("algorithm is 9"), std::string::npos) << c.message();
  EXPECT_EQ(run(1, 0, 1), MFSDP_E_ARGUMENT);
  EXPECT_NE(c.message().find("has 0"), std::string::npos) << c.message();
  EXPECT_EQ(mfsdp_sim_collective(&c.context, &good, MFSDP_SIM_RING, 0, nullptr, 2, 1, &us, sent),
            MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_sim_collective(&c.context, &good, MFSDP_SIM_RING, 0, s, 2, 1, nullptr, sent),
            MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_sim_collective(&c.context, nullptr, MFSDP_SIM_RING, 0, s, 2, 1, &us, sent),
            MFSDP_E_ARGUMENT);
  s[1].message_count = 0;
  EXPECT_EQ(run(1, 2, 1), MFSDP_E_ARGUMENT);
  EXPECT_NE(c.message().find("rank 1 has 8 bytes in 0 messages"), std::string::npos) << c.message();
  s[1] = {-1, 1};
  EXPECT_EQ(run(1, 2, 1), MFSDP_E_ARGUMENT);
  s[0] = s[1] = {std::numeric_limits<int64_t>::max(), 1};
  EXPECT_EQ(run(1, 2, 1), MFSDP_E_OVERFLOW);
  s[0] = {std::numeric_limits<int64_t>::max() / 2, 1};
  s[1] = {8, 1};
  sent[0] = std::numeric_limits<int64_t>::max() - 5;
  EXPECT_EQ(run(1, 2, 1), MFSDP_E_OVERFLOW);
}

TEST(SimulateCluster, EveryFieldHasARange) {
  Context c;
  mfsdp_cluster cluster = mfsdp_cluster_default();
  EXPECT_EQ(mfsdp_cluster_validate(&c.context, &cluster), MFSDP_OK);
#define FIELD(field, unit, value, low, high)                                              \
  for (const double bad :                                                                 \
       {-1.0, static_cast<double>(high) * 1.01, std::numeric_limits<double>::quiet_NaN(), \
        std::numeric_limits<double>::infinity()}) {                                       \
    cluster = mfsdp_cluster_default();                                                    \
    EXPECT_EQ(cluster.field, static_cast<double>(value));                                 \
    cluster.field = bad;                                                                  \
    EXPECT_EQ(mfsdp_cluster_validate(&c.context, &cluster), MFSDP_E_ARGUMENT);            \
    EXPECT_NE(c.message().find(#field), std::string::npos) << c.message();                \
  }
  MFSDP_CLUSTER_TABLE(FIELD)
#undef FIELD
  cluster = mfsdp_cluster_default();
  cluster.ranks_per_node = 0;
  EXPECT_EQ(mfsdp_cluster_validate(&c.context, &cluster), MFSDP_E_ARGUMENT);
  EXPECT_NE(c.message().find("ranks_per_node is 0"), std::string::npos) << c.message();
  cluster = mfsdp_cluster_default();
  cluster.struct_nbytes = 3;
  EXPECT_EQ(mfsdp_cluster_validate(&c.context, &cluster), MFSDP_E_ARGUMENT);
  EXPECT_NE(c.message().find("struct_nbytes is 3"), std::string::npos) << c.message();
  EXPECT_EQ(mfsdp_cluster_validate(&c.context, nullptr), MFSDP_E_ARGUMENT);
}

TEST(Simulate, AlgorithmsAreThoseOfCollectiveH) {
  EXPECT_EQ(static_cast<int>(MFSDP_SIM_DIRECT), static_cast<int>(MFSDP_DIRECT));
  EXPECT_EQ(static_cast<int>(MFSDP_SIM_RING), static_cast<int>(MFSDP_RING));
  EXPECT_EQ(static_cast<int>(MFSDP_SIM_HIERARCHICAL), static_cast<int>(MFSDP_HIERARCHICAL));
  EXPECT_EQ(static_cast<int>(MFSDP_SIM_NATIVE), static_cast<int>(MFSDP_NATIVE));
}

/* ---- steps ---- */

/* Two blocks of two matrices and a norm, an embedding; bf16 on the wire. */
void fill(test::Params *list) {
  list->add("embed", MFSDP_ROLE_ELEMENTWISE, 0, {300, 64});
  for (int32_t b = 1; b <= 2; ++b) {
    const std::string name = "block" + std::to_string(b);
    list->add(name + ".norm", MFSDP_ROLE_ELEMENTWISE, b, {64});
    list->add(name + ".up", MFSDP_ROLE_MATRIX, b, {256, 64});
    list->add(name + ".frozen", MFSDP_ROLE_FROZEN, b, {77});
    list->add(name + ".down", MFSDP_ROLE_MATRIX, b, {64, 256});
  }
  for (mfsdp_param &p : list->list)
    p.compute = p.grad = p.wire = MFSDP_BF16;
}

struct Step {
  mfsdp_sim_result result = mfsdp_sim_result_default();
  std::vector<mfsdp_sim_rank> ranks;
};

Step step(test::PlanRig *rig, mfsdp_sim_desc desc, const mfsdp_cluster &cluster) {
  Step out;
  desc.plan = rig->plan;
  desc.cluster = &cluster;
  out.ranks.resize(static_cast<std::size_t>(mfsdp_plan_world(rig->plan)));
  EXPECT_EQ(mfsdp_simulate(&rig->context, &desc, &out.result, out.ranks.data(),
                           static_cast<int32_t>(out.ranks.size())),
            MFSDP_OK)
      << rig->message();
  return out;
}

mfsdp_sim_desc ask(mfsdp_sim_strategy strategy, mfsdp_sim_algorithm algorithm = MFSDP_SIM_DIRECT) {
  mfsdp_sim_desc d = mfsdp_sim_desc_default();
  d.strategy = strategy;
  d.algorithm = algorithm;
  return d;
}

/* What the lists of one collective of one unit send, by rank: wire bytes. */
std::vector<int64_t> emitted(test::PlanRig *rig, test::Rig *host, int32_t unit,
                             mfsdp_layout_kind kind) {
  const int32_t world = mfsdp_plan_world(rig->plan);
  const bool is_gather = kind == MFSDP_LAYOUT_GATHER;
  std::vector<int64_t> sent(static_cast<std::size_t>(world));
  std::vector<mfsdp_extent> extents(512);
  int32_t count = 0;
  EXPECT_EQ(mfsdp_plan_extents(&rig->context, rig->plan, unit, kind, extents.data(), 512, &count),
            MFSDP_OK);
  EXPECT_LE(count, 512);
  for (int32_t rank = 0; rank < world; ++rank) {
    test::RecordingTransport transport(rank, world, host->backend);
    mfsdp_layout layout;
    mfsdp_coll_desc desc = mfsdp_coll_desc_default();
    mfsdp_coll *coll = nullptr;
    std::memset(&layout, 0, sizeof(layout));
    layout.struct_nbytes = sizeof(layout);
    layout.extents = extents.data();
    layout.extent_count = count;
    layout.world = world;
    layout.dtype = is_gather ? mfsdp_plan_unit_dtype(rig->plan, unit, kind)
                             : mfsdp_plan_unit_wire(rig->plan, unit);
    layout.full_count = mfsdp_plan_unit_count_elements(rig->plan, unit, kind);
    desc.kind = is_gather ? MFSDP_COLL_GATHER : MFSDP_COLL_REDUCE;
    desc.traffic = is_gather ? MFSDP_TRAFFIC_MATERIALIZE : MFSDP_TRAFFIC_REDUCE;
    desc.layout = &layout;
    desc.transport = transport.table();
    EXPECT_EQ(mfsdp_coll_create(&rig->context, &desc, &coll), MFSDP_OK) << rig->message();
    for (int32_t i = 0; coll != nullptr && i < coll->xfer_count; ++i)
      if (coll->xfers[i].is_send)
        sent[static_cast<std::size_t>(rank)] += static_cast<int64_t>(coll->xfers[i].nbytes);
    mfsdp_coll_destroy(&rig->context, coll);
  }
  return sent;
}

TEST(Simulate, DirectBytesAreThoseOfTheCollectivesLists) {
  test::Params list;
  test::Rig host(test::rig_kinds().front());
  fill(&list);
  for (const int32_t world : {1, 2, 3, 5, 8}) {
    test::PlanRig rig;
    std::vector<int64_t> gather(static_cast<std::size_t>(world)), reduce(gather);
    mfsdp_sim_desc desc = ask(MFSDP_SIM_OWNER);
    ASSERT_EQ(rig.create(list.desc(world)), MFSDP_OK) << rig.message();
    for (int32_t unit = 0; unit < mfsdp_plan_unit_count(rig.plan); ++unit) {
      const std::vector<int64_t> g = emitted(&rig, &host, unit, MFSDP_LAYOUT_GATHER);
      const std::vector<int64_t> r = emitted(&rig, &host, unit, MFSDP_LAYOUT_REDUCE);
      for (std::size_t i = 0; i < g.size(); ++i) {
        gather[i] += 2 * g[i];
        reduce[i] += 3 * r[i];
      }
    }
    desc.materialize_count = 2;
    desc.reduce_count = 3;
    const Step s = step(&rig, desc, small_cluster());
    for (std::size_t i = 0; i < gather.size(); ++i) {
      EXPECT_EQ(s.ranks[i].materialize_nbytes, gather[i]) << "world " << world << " rank " << i;
      EXPECT_EQ(s.ranks[i].reduce_nbytes, reduce[i]) << "world " << world << " rank " << i;
      EXPECT_EQ(s.ranks[i].optimizer_nbytes, 0);
    }
  }
}

/*
 * Without a chunk, that of the runtime: of each unit's collectives, by the wire that the runtime is told.
 * The matrices make a unit of 2 MiB on eight ranks, of which two own half each: RING takes 32 KiB between
 * two nodes and more, 256 on one, HIERARCHICAL (whose times do not depend on it) others.
 */
TEST(Simulate, ChunksAreThoseOfTheRuntime) {
  const mfsdp_wire_cost unknown = {0, 0, 0, 0}, known = {5000, 209715, 500000, 8388608};
  const int32_t world = 8;
  test::Params list;
  test::PlanRig rig;
  std::set<std::size_t> seen;
  list.add("a", MFSDP_ROLE_MATRIX, 0, {512, 512});
  list.add("b", MFSDP_ROLE_MATRIX, 0, {512, 512});
  ASSERT_EQ(rig.create(list.desc(world)), MFSDP_OK) << rig.message();
  for (const int32_t each : {1, 4, 8})
    for (const mfsdp_wire_cost &told : {unknown, known})
      for (const mfsdp_layout_kind kind : {MFSDP_LAYOUT_GATHER, MFSDP_LAYOUT_REDUCE}) {
        std::vector<int32_t> nodes;
        for (int32_t r = 0; r < world; ++r)
          nodes.push_back(r / each);
        const test::RecordingTransport transport(0, world, nullptr, nodes.data());
        mfsdp_cluster cluster = small_cluster();
        mfsdp_sim_desc desc = ask(MFSDP_SIM_OWNER, MFSDP_SIM_RING);
        cluster.ranks_per_node = each;
        desc.wire = told;
        desc.materialize_count = kind == MFSDP_LAYOUT_GATHER;
        desc.reduce_count = kind == MFSDP_LAYOUT_REDUCE;
        int64_t longest = 0;
        for (int32_t r = 0; r < world; ++r)
          longest = std::max(longest, mfsdp_plan_segment_count(rig.plan, 0, r, kind));
        const double by_default = step(&rig, desc, cluster).result.step_us;
        desc.chunk_nbytes = mfsdp_coll_chunk_nbytes(
            const_cast<test::RecordingTransport &>(transport).table(), MFSDP_RING, &told, MFSDP_F32,
            mfsdp_plan_unit_count_elements(rig.plan, 0, kind), longest, 0);
        seen.insert(desc.chunk_nbytes);
        EXPECT_EQ(by_default, step(&rig, desc, cluster).result.step_us) << each;
        desc.chunk_nbytes *= 2;
        EXPECT_NE(by_default, step(&rig, desc, cluster).result.step_us) << each;
      }
  EXPECT_EQ(seen, (std::set<std::size_t>{32 << 10, 60 << 10, 256 << 10, 512 << 10}))
      << "of four kinds";
  /* One collective alone knows of no wire. */
  const std::vector<mfsdp_sim_segment> halves = {{1 << 20, 1}, {0, 0}, {1 << 20, 1}, {0, 0}};
  EXPECT_EQ(wire(MFSDP_SIM_RING, false, halves, small_cluster(), 0).us,
            wire(MFSDP_SIM_RING, false, halves, small_cluster(), 60 << 10).us);
  EXPECT_NE(wire(MFSDP_SIM_RING, false, halves, small_cluster(), 0).us,
            wire(MFSDP_SIM_RING, false, halves, small_cluster(), 64 << 10).us);
  EXPECT_EQ(wire(MFSDP_SIM_DIRECT, true, halves, small_cluster(), 0).us,
            wire(MFSDP_SIM_DIRECT, true, halves, small_cluster(), 256 << 10).us);
}

/* One 4 x 8 and one 8 x 4 matrix on two ranks: each owns one. */
class TwoMatrices : public testing::Test {
protected:
  void SetUp() override {
    list_.add("a", MFSDP_ROLE_MATRIX, 0, {4, 8});
    list_.add("b", MFSDP_ROLE_MATRIX, 0, {8, 4});
    ASSERT_EQ(rig_.create(list_.desc(2)), MFSDP_OK) << rig_.message();
    desc_ = mfsdp_sim_desc_default();
    desc_.newton_schulz_steps = 3;
    cluster_ = small_cluster();
    cluster_.matrix_us = 7;
  }
  Step run(mfsdp_sim_strategy strategy) {
    desc_.strategy = strategy;
    return step(&rig_, desc_, cluster_);
  }
  test::Params list_;
  test::PlanRig rig_;
  mfsdp_sim_desc desc_;
  mfsdp_cluster cluster_;
};

/* 2 x 3 steps x 4^2 (2 x 8 + 4) = 1920 FLOPs at 1000 a microsecond, 32 x 28 bytes at 10,000. */
const double kProducts = 1.92, kElements = 0.0896;
const double kVerdict = 1; /* one round inside the node */

/* Newton-Schulz at a rate of its own, four times that of products: where every strategy does its products.
 * The model's arithmetic keeps the other. */
TEST_F(TwoMatrices, NewtonSchulzHasItsOwnRate) {
  desc_.model_flops = 5e3;
  for (mfsdp_sim_strategy strategy : kStrategies) {
    cluster_.newton_schulz_flops_per_s = 0;
    const Step without = run(strategy);
    cluster_.newton_schulz_flops_per_s = cluster_.flops_per_s;
    const Step same = run(strategy);
    cluster_.newton_schulz_flops_per_s = 4e9;
    const Step faster = run(strategy);
    const bool both =
        strategy == MFSDP_SIM_GATHER || strategy == MFSDP_SIM_REPLICATED; /* on a rank */
    EXPECT_EQ(same.result.step_us, without.result.step_us);
    EXPECT_NEAR(faster.result.optimizer_compute_us,
                without.result.optimizer_compute_us - (both ? 2 : 1) * 0.75 * kProducts, kTiny)
        << strategy;
    EXPECT_EQ(faster.result.model_us, without.result.model_us);
  }
}

TEST_F(TwoMatrices, Owner) {
  const Step s = run(MFSDP_SIM_OWNER);
  EXPECT_NEAR(s.result.optimizer_compute_us, kProducts + 7 + kElements, kTiny);
  EXPECT_EQ(s.result.optimizer_wire_us, 0.0);
  EXPECT_NEAR(s.result.optimizer_us, kProducts + 7 + kElements + kVerdict, kTiny);
  EXPECT_EQ(s.result.optimizer_nbytes.sum, 0);
  /* Each gather: an extent of 128 bytes f32 (32 elements; the gap to the next owner is not sent).
   */
  EXPECT_EQ(s.ranks[0].materialize_nbytes, 2 * 128);
  EXPECT_EQ(s.ranks[1].reduce_nbytes, 128);
  EXPECT_NEAR(s.result.materialize_us, 2 * (1 + 0.128), kTiny);
  EXPECT_EQ(s.ranks[0].resident_nbytes, 32 * (4 + 4 + 4)); /* master, accumulator, momentum */
}

TEST_F(TwoMatrices, GatherEverywhere) {
  const Step s = run(MFSDP_SIM_GATHER);
  EXPECT_NEAR(s.result.optimizer_compute_us, 2 * (kProducts + 7) + kElements, kTiny);
  /* Each matrix: a slice of 16 f32 to the peer. */
  EXPECT_NEAR(s.result.optimizer_wire_us, 2 * (1 + 0.064), kTiny);
  EXPECT_EQ(s.ranks[0].optimizer_nbytes, 2 * 64);
  EXPECT_EQ(s.result.optimizer_nbytes.sum, 4 * 64);
  EXPECT_EQ(s.ranks[1].resident_nbytes, 32 * 12);
  EXPECT_EQ(s.ranks[1].materialize_nbytes, 2 * 128); /* a slice of 32 of 64, twice */
}

TEST_F(TwoMatrices, ShardedProducts) {
  const Step s = run(MFSDP_SIM_SHARDED);
  EXPECT_NEAR(s.result.optimizer_compute_us, 2 * (kProducts / 2 + 7) + kElements, kTiny);
  /* Each matrix and step: slices of 16, 8 and 16 f32. */
  EXPECT_EQ(s.ranks[0].optimizer_nbytes, 2 * 3 * 40 * 4);
  EXPECT_NEAR(s.result.optimizer_wire_us, 2 * 3 * (3 + 0.160), kTiny);
}

/* Any number of steps is one multiplication, not a loop of that length. */
TEST_F(TwoMatrices, MoreStepsThanAnybodyRuns) {
  const int32_t most = std::numeric_limits<int32_t>::max();
  desc_.newton_schulz_steps = most;
  const Step s = run(MFSDP_SIM_SHARDED);
  EXPECT_EQ(s.ranks[0].optimizer_nbytes, int64_t{2} * most * 40 * 4);
  EXPECT_DOUBLE_EQ(s.result.optimizer_wire_us, 2.0 * most * (3 + 0.160));
}

TEST_F(TwoMatrices, AllToAll) {
  const Step s = run(MFSDP_SIM_EXCHANGE);
  EXPECT_NEAR(s.result.optimizer_compute_us, kProducts + 7 + kElements, kTiny);
  EXPECT_EQ(s.ranks[0].optimizer_nbytes, 2 * 64); /* a slice to the other owner, one back */
  EXPECT_NEAR(s.result.optimizer_wire_us, 2 * (1 + 0.064), kTiny);
}

TEST_F(TwoMatrices, Zero1) {
  const Step s = run(MFSDP_SIM_ZERO1);
  EXPECT_EQ(s.result.materialize_us, 0.0);
  EXPECT_EQ(s.result.materialize_nbytes.sum, 0);
  EXPECT_EQ(s.ranks[0].optimizer_nbytes, 128); /* its matrix to the other rank */
  EXPECT_NEAR(s.result.optimizer_wire_us, 1 + 0.128, kTiny);
  EXPECT_NEAR(s.result.optimizer_compute_us, kProducts + 7 + kElements, kTiny);
  EXPECT_EQ(s.ranks[0].resident_nbytes, 32 * 12 + 32 * 4); /* and the other's parameters */
}

TEST_F(TwoMatrices, Replicated) {
  const Step owner = run(MFSDP_SIM_OWNER), s = run(MFSDP_SIM_REPLICATED);
  EXPECT_EQ(s.result.materialize_nbytes.sum, 0);
  EXPECT_EQ(s.result.optimizer_nbytes.sum, 0);
  EXPECT_EQ(s.result.optimizer_wire_us, 0.0);
  /* The sum of its matrix to the other rank, one message in each of the two units. */
  EXPECT_EQ(s.ranks[0].reduce_nbytes - owner.ranks[0].reduce_nbytes, 128);
  EXPECT_NEAR(s.result.optimizer_compute_us, 2 * owner.result.optimizer_compute_us, kTiny);
  EXPECT_EQ(s.ranks[0].resident_nbytes, 2 * owner.ranks[0].resident_nbytes + 32 * 4);
}

TEST_F(TwoMatrices, ReplicasReduceOnceMore) {
  const Step one = run(MFSDP_SIM_OWNER);
  desc_.replica_count = 4;
  const Step four = run(MFSDP_SIM_OWNER);
  /* 2 x 3 rounds of 32 bytes: 10 us and 32 / 100; the node's two ranks 64 / 150 are less. */
  EXPECT_NEAR(four.result.reduce_us - one.result.reduce_us, 6 * (10 + 0.32), kTiny);
  EXPECT_EQ(four.ranks[0].reduce_nbytes - one.ranks[0].reduce_nbytes, 6 * 32);
  /* Eight ranks in all: three rounds between nodes instead of one inside. */
  EXPECT_NEAR(four.result.optimizer_us - one.result.optimizer_us, 30 - 1, kTiny);
}

TEST_F(TwoMatrices, TheStepIsTheSumAndItsOverlapIsLess) {
  desc_.model_flops = 5000; /* 5 us */
  const Step s = run(MFSDP_SIM_OWNER);
  EXPECT_NEAR(s.result.model_us, 5, kTiny);
  EXPECT_NEAR(s.result.step_us,
              s.result.materialize_us + s.result.reduce_us + 5 + s.result.optimizer_us, kTiny);
  EXPECT_NEAR(s.result.overlapped_us, 5 + s.result.optimizer_us, kTiny);
}

TEST(Simulate, PartialSumsTravelAsF32) {
  test::Params list;
  test::PlanRig rig;
  fill(&list);
  ASSERT_EQ(rig.create(list.desc(4)), MFSDP_OK) << rig.message();
  const int64_t direct = step(&rig, ask(MFSDP_SIM_OWNER), small_cluster()).result.reduce_nbytes.sum;
  EXPECT_EQ(
      step(&rig, ask(MFSDP_SIM_OWNER, MFSDP_SIM_RING), small_cluster()).result.reduce_nbytes.sum,
      2 * direct);
  EXPECT_EQ(
      step(&rig, ask(MFSDP_SIM_OWNER, MFSDP_SIM_NATIVE), small_cluster()).result.reduce_nbytes.sum,
      direct);
}

TEST(Simulate, GrowsWithTheModelAndTheSteps) {
  test::Params small, large;
  fill(&small);
  fill(&large);
  large.list[2].shape[0] *= 3; /* block1.up */
  for (const mfsdp_sim_strategy strategy : kStrategies)
    for (const mfsdp_sim_algorithm algorithm : kAlgorithms) {
      test::PlanRig a, b;
      ASSERT_EQ(a.create(small.desc(4)), MFSDP_OK);
      ASSERT_EQ(b.create(large.desc(4)), MFSDP_OK);
      mfsdp_sim_desc desc = ask(strategy, algorithm);
      const mfsdp_sim_result one = step(&a, desc, small_cluster()).result;
      EXPECT_GT(step(&b, desc, small_cluster()).result.step_us, one.step_us);
      EXPECT_GE(step(&b, desc, small_cluster()).result.resident_nbytes.max,
                one.resident_nbytes.max);
      desc.newton_schulz_steps += 1;
      EXPECT_GT(step(&a, desc, small_cluster()).result.optimizer_us, one.optimizer_us);
      desc.reduce_count += 1;
      EXPECT_GT(step(&a, desc, small_cluster()).result.reduce_us, one.reduce_us);
    }
}

TEST(Simulate, OneRankMovesNothing) {
  test::Params list;
  test::PlanRig rig;
  fill(&list);
  ASSERT_EQ(rig.create(list.desc(1)), MFSDP_OK) << rig.message();
  for (const mfsdp_sim_strategy strategy : kStrategies) {
    const Step s = step(&rig, ask(strategy), small_cluster());
    EXPECT_EQ(s.result.materialize_us + s.result.reduce_us + s.result.optimizer_wire_us, 0.0);
    EXPECT_EQ(s.result.materialize_nbytes.sum + s.result.reduce_nbytes.sum +
                  s.result.optimizer_nbytes.sum,
              0);
    EXPECT_NEAR(s.result.optimizer_us,
                step(&rig, ask(MFSDP_SIM_OWNER), small_cluster()).result.optimizer_us, kTiny);
  }
}

TEST(Simulate, RefusesABadQuestion) {
  test::Params list;
  test::PlanRig rig;
  fill(&list);
  ASSERT_EQ(rig.create(list.desc(4)), MFSDP_OK) << rig.message();
  const mfsdp_cluster cluster = small_cluster();
  mfsdp_sim_result result = mfsdp_sim_result_default();
  mfsdp_sim_desc good = ask(MFSDP_SIM_OWNER);
  good.plan = rig.plan;
  good.cluster = &cluster;
  const auto refused = [&](const mfsdp_sim_desc &desc, const std::string &text) {
    EXPECT_EQ(mfsdp_simulate(&rig.context, &desc, &result, nullptr, 0), MFSDP_E_ARGUMENT) << text;
    EXPECT_NE(rig.message().find(text), std::string::npos) << rig.message();
  };
  mfsdp_sim_desc d = good;
  d.struct_nbytes = 1;
  refused(d, "struct_nbytes is 1");
  d = good;
  d.plan = nullptr;
  refused(d, "plan is NULL");
  d = good;
  d.cluster = nullptr;
  refused(d, "cluster: is NULL");
  d = good;
  d.strategy = static_cast<mfsdp_sim_strategy>(0);
  refused(d, "strategy is 0");
  d = good;
  d.algorithm = static_cast<mfsdp_sim_algorithm>(5);
  refused(d, "algorithm is 5");
  d = good;
  d.materialize_count = -1;
  refused(d, "materialize_count -1");
  d = good;
  d.reduce_count = -2;
  refused(d, "reduce_count -2");
  d = good;
  d.newton_schulz_steps = -3;
  refused(d, "newton_schulz_steps -3");
  d = good;
  d.replica_count = 0;
  refused(d, "replica_count is 0");
  d = good;
  d.model_flops = std::numeric_limits<double>::quiet_NaN();
  refused(d, "model_flops nan");
  d = good;
  d.matrix_update_nbytes = -1;
  refused(d, "matrix_update_nbytes -1");
  d = good;
  d.element_update_nbytes = -1;
  refused(d, "element_update_nbytes -1");
  d = good;
  d.banded_everywhere = 2;
  refused(d, "banded_everywhere is 2");
  result.struct_nbytes = 2;
  refused(good, "result.struct_nbytes is 2");
  result = mfsdp_sim_result_default();
  EXPECT_EQ(mfsdp_simulate(&rig.context, &good, &result, nullptr, 3), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_simulate(&rig.context, nullptr, &result, nullptr, 0), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_simulate(&rig.context, &good, nullptr, nullptr, 0), MFSDP_E_ARGUMENT);
}

/* ---- BANDED matrices of the plan ---- */

/* Every matrix BANDED. */
void band_all(test::Params *list) {
  for (mfsdp_param &p : list->list)
    if (p.role == MFSDP_ROLE_MATRIX) p.placement = MFSDP_PLACEMENT_BANDED;
}

/* A 4 x 8 matrix in bands of one row and a 2 x 8 one whole, on two nodes of two ranks. */
class OneBanded : public testing::Test {
protected:
  void SetUp() override {
    list_.add("a", MFSDP_ROLE_MATRIX, 0, {4, 8}).placement = MFSDP_PLACEMENT_BANDED;
    list_.add("b", MFSDP_ROLE_MATRIX, 1, {2, 8});
    ASSERT_EQ(rig_.create(list_.desc(4)), MFSDP_OK) << rig_.message();
    ASSERT_EQ(rig_.pieces()[0].home, 0);
    ASSERT_EQ(rig_.pieces()[4].owner, 1);
    desc_ = mfsdp_sim_desc_default();
    desc_.newton_schulz_steps = 3;
    cluster_ = small_cluster();
    cluster_.matrix_us = 7;
  }
  test::Params list_;
  test::PlanRig rig_;
  mfsdp_sim_desc desc_;
  mfsdp_cluster cluster_;
};

/* Steps of 2 x 3 x 4^2 (2 x 8 + 4) and 2 x 3 x 2^2 (2 x 8 + 2) FLOPs at 1000 a microsecond. */
const double kBandedProducts = 1.92, kOwnedProducts = 0.432;
/* A band of 8 elements and b's 16, of 28 bytes at 10,000 a microsecond. */
const double kBandElements = 0.0224, kOwnedElements = 0.0448;

TEST_F(OneBanded, AtHome) {
  const Step s = step(&rig_, desc_, cluster_);
  EXPECT_NEAR(s.ranks[0].optimizer_us, kBandedProducts + 7 + kBandElements, kTiny);
  EXPECT_NEAR(s.ranks[1].optimizer_us, kOwnedProducts + 7 + kBandElements + kOwnedElements, kTiny);
  EXPECT_NEAR(s.ranks[2].optimizer_us, kBandElements, kTiny);
  EXPECT_NEAR(s.result.optimizer_compute_us, kBandedProducts + 7 + kBandElements, kTiny);
  /* Home gets three bands of 32 bytes: one message from inside its node and two from the other, of
   * which 64 bytes at 100 a microsecond are the longest; and sends as much back. */
  EXPECT_NEAR(s.result.optimizer_wire_us, 2 * (1 + 2 * 10 + 0.64), kTiny);
  EXPECT_EQ(s.ranks[0].optimizer_nbytes, 3 * 32);
  for (int r = 1; r < 4; ++r)
    EXPECT_EQ(s.ranks[static_cast<std::size_t>(r)].optimizer_nbytes, 32);
  EXPECT_EQ(s.result.optimizer_nbytes.sum, 6 * 32);
  /* Unit 0: a message of 32 bytes from each rank to each, from a rank one inside and two outside. Unit
   * 1: all 64 from rank 1. Twice. */
  EXPECT_NEAR(s.result.materialize_us, 2 * (1 + 20 + 0.64 + 1 + 20 + 1.28), kTiny);
  EXPECT_EQ(s.ranks[1].materialize_nbytes, 2 * 3 * (32 + 64));
  EXPECT_EQ(s.ranks[3].reduce_nbytes, 3 * 32 + 64);
  /* Master, accumulator and momentum of what a rank holds. */
  EXPECT_EQ(s.ranks[1].resident_nbytes, (8 + 16) * 12);
  EXPECT_EQ(s.ranks[2].resident_nbytes, 8 * 12);
}

TEST_F(OneBanded, NodesShareTheirNetwork) {
  cluster_.net_node_nbytes_per_s = 1e6; /* 64 bytes into the home's node: 64 us */
  EXPECT_NEAR(step(&rig_, desc_, cluster_).result.optimizer_wire_us, 2 * 64, kTiny);
}

TEST_F(OneBanded, Everywhere) {
  desc_.banded_everywhere = 1;
  const Step s = step(&rig_, desc_, cluster_);
  EXPECT_NEAR(s.ranks[0].optimizer_us, kBandedProducts + 7 + kBandElements, kTiny);
  EXPECT_NEAR(s.ranks[1].optimizer_us,
              kBandedProducts + kOwnedProducts + 14 + kBandElements + kOwnedElements, kTiny);
  EXPECT_NEAR(s.ranks[3].optimizer_us, kBandedProducts + 7 + kBandElements, kTiny);
  EXPECT_NEAR(s.result.optimizer_wire_us, 1 + 20 + 0.64, kTiny); /* as a gather of unit 0 */
  for (const mfsdp_sim_rank &rank : s.ranks)
    EXPECT_EQ(rank.optimizer_nbytes, 3 * 32);
}

/* What all-BANDED plans are told to be by a strategy: the slices of one are the bands of the other
 * where rows and elements divide by the ranks, in f32 and by NATIVE. */
TEST(SimulateBanded, AllInBandsIsTheStrategyOfSlices) {
  for (const int32_t world : {1, 2, 4, 8, 16})
    for (const int32_t node : {1, 3, 4, 16})
      for (const bool everywhere : {false, true}) {
        test::Params owned, banded;
        for (test::Params *list : {&owned, &banded})
          for (int32_t b = 0; b < 3; ++b) {
            const std::string name = "block" + std::to_string(b);
            list->add(name + ".in", MFSDP_ROLE_MATRIX, b, {256, 128});
            list->add_heads(name + ".heads", b, 4, 512, 128);
            list->add(name + ".out", MFSDP_ROLE_MATRIX, b, {128, 512});
          }
        band_all(&banded);
        test::PlanRig a, b;
        ASSERT_EQ(a.create(owned.desc(world)), MFSDP_OK) << a.message();
        ASSERT_EQ(b.create(banded.desc(world)), MFSDP_OK) << b.message();
        mfsdp_cluster cluster = small_cluster();
        cluster.ranks_per_node = node;
        cluster.matrix_us = 3;
        mfsdp_sim_desc desc = ask(MFSDP_SIM_OWNER, MFSDP_SIM_NATIVE);
        desc.reduce_count = 3;
        desc.replica_count = 2;
        desc.model_flops = 1e6;
        desc.banded_everywhere = everywhere;
        const Step bands = step(&b, desc, cluster);
        desc.strategy = everywhere ? MFSDP_SIM_GATHER : MFSDP_SIM_EXCHANGE;
        const Step slices = step(&a, desc, cluster);
        const mfsdp_sim_result &x = bands.result, &y = slices.result;
        const auto context = [&] {
          return "world " + std::to_string(world) + ", nodes of " + std::to_string(node) +
                 (everywhere ? ", everywhere" : ", at home");
        };
        /* The same sums in another order: a last bit of a few terms. */
        const double kOrder = 1e-12;
        EXPECT_NEAR(x.materialize_us, y.materialize_us, kOrder * y.step_us) << context();
        EXPECT_NEAR(x.reduce_us, y.reduce_us, kOrder * y.step_us) << context();
        EXPECT_NEAR(x.optimizer_compute_us, y.optimizer_compute_us, kOrder * y.step_us)
            << context();
        EXPECT_NEAR(x.optimizer_wire_us, y.optimizer_wire_us, kOrder * y.step_us) << context();
        EXPECT_NEAR(x.step_us, y.step_us, kOrder * y.step_us) << context();
        for (std::size_t r = 0; r < bands.ranks.size(); ++r) {
          EXPECT_EQ(bands.ranks[r].materialize_nbytes, slices.ranks[r].materialize_nbytes);
          EXPECT_EQ(bands.ranks[r].reduce_nbytes, slices.ranks[r].reduce_nbytes);
          EXPECT_EQ(bands.ranks[r].optimizer_nbytes, slices.ranks[r].optimizer_nbytes) << context();
          EXPECT_EQ(bands.ranks[r].resident_nbytes, slices.ranks[r].resident_nbytes);
          EXPECT_NEAR(bands.ranks[r].optimizer_us, slices.ranks[r].optimizer_us,
                      kOrder * y.step_us);
        }
      }
}

/* The exchange from the pieces: what each rank sends to each, one message for a pair that has any. */
double exchange_us(const test::PlanRig &rig, const mfsdp_cluster &c,
                   std::vector<int64_t> *sent_nbytes) {
  const auto ranks = static_cast<std::size_t>(mfsdp_plan_world(rig.plan));
  const auto nodes = static_cast<std::size_t>(c.ranks_per_node);
  std::vector<std::vector<int64_t>> to(ranks, std::vector<int64_t>(ranks));
  double us = 0;
  for (const mfsdp_piece &x : rig.pieces())
    to[static_cast<std::size_t>(x.owner)][static_cast<std::size_t>(x.home)] += 4 * x.count;
  sent_nbytes->assign(ranks, 0);
  for (std::size_t node = 0; node * nodes < ranks; ++node) {
    int64_t node_out = 0, node_in = 0;
    for (std::size_t r = node * nodes; r < std::min(ranks, (node + 1) * nodes); ++r) {
      double out_us = 0, in_us = 0;
      int64_t near[2] = {0, 0}, far[2] = {0, 0}; /* out, in */
      for (std::size_t q = 0; q < ranks; ++q) {
        const bool inside = q / nodes == node;
        const double latency = inside ? c.node_latency_us : c.net_latency_us;
        if (q == r) continue;
        (inside ? near : far)[0] += to[r][q];
        (inside ? near : far)[1] += to[q][r];
        out_us += to[r][q] > 0 ? latency : 0;
        in_us += to[q][r] > 0 ? latency : 0;
        (*sent_nbytes)[r] += to[r][q] + to[q][r];
      }
      node_out += far[0];
      node_in += far[1];
      us = std::max(
          us,
          std::max(out_us, in_us) +
              std::max(static_cast<double>(std::max(near[0], near[1])) / c.node_nbytes_per_s * 1e6,
                       static_cast<double>(std::max(far[0], far[1])) / c.net_nbytes_per_s * 1e6));
    }
    us = std::max(us,
                  static_cast<double>(std::max(node_out, node_in)) / c.net_node_nbytes_per_s * 1e6);
  }
  return 2 * us;
}

/* Any plan with bands: the exchange against the table of pairs and against the plan's own report, the
 * collectives against the lists that they emit. */
TEST(SimulateBanded, RandomMixes) {
  test::Rig host(test::rig_kinds().front());
  int32_t exchanged = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    test::Params list;
    test::fill_random(&list, seed);
    test::Draw draw(seed + 77);
    for (mfsdp_param &p : list.list)
      if (p.role == MFSDP_ROLE_MATRIX && p.alias_of == nullptr && draw.below(3) > 0)
        p.placement = MFSDP_PLACEMENT_BANDED;
    for (mfsdp_param &p : list.list)
      for (const mfsdp_param &owner : list.list)
        if (p.alias_of != nullptr && std::string(p.alias_of) == owner.name)
          p.placement = owner.placement;
    for (const int32_t world : {1, 2, 3, 7, 8, 70}) {
      test::PlanRig rig;
      ASSERT_EQ(rig.create(list.desc(world, MFSDP_PLANNER_BALANCED)), MFSDP_OK) << rig.message();
      mfsdp_cluster cluster = small_cluster();
      cluster.ranks_per_node = static_cast<int32_t>(1 + seed % 5);
      cluster.net_node_nbytes_per_s = draw.below(2) ? 1.5e8 : 3e7;
      const Step s = step(&rig, ask(MFSDP_SIM_OWNER), cluster);
      std::vector<int64_t> sent;
      const double us = exchange_us(rig, cluster, &sent);
      /* The same sums in another order. */
      EXPECT_NEAR(s.result.optimizer_wire_us, us, 1e-12 * us) << "seed " << seed << " of " << world;
      mfsdp_plan_summary report = mfsdp_plan_summary_default();
      ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &report, nullptr, 0), MFSDP_OK);
      EXPECT_EQ(s.result.optimizer_nbytes.sum, 4 * report.exchanged.sum);
      EXPECT_EQ(s.result.optimizer_nbytes.max, 4 * report.exchanged.max);
      EXPECT_EQ(s.result.optimizer_nbytes.max_rank, report.exchanged.max_rank);
      exchanged += report.exchanged.sum > 0;
      std::vector<int64_t> gather(sent.size()), reduce(sent.size());
      for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan) && world <= 8; ++u) {
        const std::vector<int64_t> g = emitted(&rig, &host, u, MFSDP_LAYOUT_GATHER);
        const std::vector<int64_t> r = emitted(&rig, &host, u, MFSDP_LAYOUT_REDUCE);
        for (std::size_t i = 0; i < g.size(); ++i) {
          gather[i] += 2 * g[i];
          reduce[i] += r[i];
        }
      }
      for (std::size_t i = 0; i < sent.size(); ++i) {
        EXPECT_EQ(s.ranks[i].optimizer_nbytes, sent[i]) << "seed " << seed << ", rank " << i;
        if (world > 8) continue;
        EXPECT_EQ(s.ranks[i].materialize_nbytes, gather[i]) << "seed " << seed << ", rank " << i;
        EXPECT_EQ(s.ranks[i].reduce_nbytes, reduce[i]) << "seed " << seed << ", rank " << i;
      }
    }
  }
  EXPECT_GT(exchanged, 100) << "plans that exchange something";
}

/* ---- plans by simulation ---- */

double step_us_of(test::PlanRig *rig, const mfsdp_plan *plan, mfsdp_sim_desc desc) {
  mfsdp_sim_result result = mfsdp_sim_result_default();
  desc.plan = plan;
  EXPECT_EQ(mfsdp_simulate(&rig->context, &desc, &result, nullptr, 0), MFSDP_OK) << rig->message();
  return result.step_us;
}

/* Any model, cluster and algorithm: never longer than the plan of whole matrices, and where the
 * planner's own choice is shorter that choice. Both happen. */
TEST(SimulatePlan, NeverLongerThanWithout) {
  int32_t kept = 0, refused = 0;
  for (uint64_t seed = 0; seed < 240; ++seed) {
    test::Params list;
    test::Draw draw(seed);
    if (seed % 2)
      test::fill_random(&list, seed);
    else
      test::fill_gpt(&list, static_cast<int32_t>(draw.between(1, 3)), 64 * draw.between(1, 4),
                     1000 * draw.between(0, 5));
    mfsdp_cluster cluster = mfsdp_cluster_default();
    cluster.ranks_per_node = static_cast<int32_t>(draw.between(1, 8));
    cluster.node_latency_us *= 1e-4 * static_cast<double>(draw.below(1000));
    cluster.net_latency_us *= 1e-4 * static_cast<double>(draw.below(1000));
    cluster.net_node_nbytes_per_s /= static_cast<double>(draw.between(1, 8));
    mfsdp_sim_desc desc = ask(MFSDP_SIM_OWNER, kAlgorithms[draw.below(4)]);
    desc.cluster = &cluster;
    desc.materialize_count = static_cast<int32_t>(draw.between(0, 2));
    desc.reduce_count = static_cast<int32_t>(draw.between(0, 2));
    for (const int32_t world : {1, 3, 8, 20}) {
      const std::string context =
          "seed " + std::to_string(seed) + ", world " + std::to_string(world);
      mfsdp_plan_desc plan_desc = list.desc(world, MFSDP_PLANNER_BALANCED);
      test::PlanRig owned, chosen;
      mfsdp_plan *plan = nullptr;
      mfsdp_plan_summary s = mfsdp_plan_summary_default(), all = s;
      ASSERT_EQ(owned.create(plan_desc), MFSDP_OK) << owned.message();
      plan_desc.allow_banded = 1;
      plan_desc.banded_wire_cost = 3;
      ASSERT_EQ(mfsdp_simulate_plan(&owned.context, &plan_desc, &desc, &plan), MFSDP_OK)
          << owned.message();
      ASSERT_EQ(mfsdp_plan_report(&owned.context, plan, &s, nullptr, 0), MFSDP_OK);
      plan_desc.materialize_count = desc.materialize_count;
      plan_desc.reduce_count = desc.reduce_count;
      plan_desc.banded_message_nbytes = mfsdp_cluster_message_nbytes(&cluster, world);
      ASSERT_EQ(chosen.create(plan_desc), MFSDP_OK) << chosen.message();
      ASSERT_EQ(mfsdp_plan_report(&chosen.context, chosen.plan, &all, nullptr, 0), MFSDP_OK);
      const double us = step_us_of(&owned, plan, desc),
                   whole = step_us_of(&owned, owned.plan, desc);
      const bool pays = step_us_of(&chosen, chosen.plan, desc) < whole;
      EXPECT_LE(us, whole) << context;
      EXPECT_EQ(s.chosen_count, pays ? all.chosen_count : 0) << context;
      if (all.chosen_count == 0 || pays) {
        EXPECT_EQ(mfsdp_plan_hash(plan), mfsdp_plan_hash(chosen.plan)) << context;
      }
      kept += s.chosen_count > 0;
      refused += all.chosen_count > s.chosen_count;
      mfsdp_plan_destroy(&owned.context, plan);
    }
  }
  EXPECT_GT(kept, 50);
  EXPECT_GT(refused, 10);
}

TEST(SimulatePlan, RefusesAndHoldsNothing) {
  test::Params list;
  test::PlanRig rig;
  fill(&list);
  mfsdp_cluster cluster = small_cluster();
  mfsdp_sim_desc desc = ask(MFSDP_SIM_OWNER);
  mfsdp_plan_desc plan_desc = list.desc(8, MFSDP_PLANNER_BALANCED);
  mfsdp_plan *plan = nullptr;
  desc.cluster = &cluster;
  plan_desc.allow_banded = 1;
  plan_desc.banded_wire_cost = 1;
  EXPECT_EQ(mfsdp_simulate_plan(&rig.context, nullptr, &desc, &plan), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_simulate_plan(&rig.context, &plan_desc, nullptr, &plan), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_simulate_plan(&rig.context, &plan_desc, &desc, nullptr), MFSDP_E_ARGUMENT);
  desc.strategy = MFSDP_SIM_GATHER;
  EXPECT_EQ(mfsdp_simulate_plan(&rig.context, &plan_desc, &desc, &plan), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("strategy is gather, needs matrixfsdp"), std::string::npos);
  desc.strategy = MFSDP_SIM_OWNER;
  plan_desc.struct_nbytes = 5;
  EXPECT_EQ(mfsdp_simulate_plan(&rig.context, &plan_desc, &desc, &plan), MFSDP_E_ARGUMENT);
  plan_desc.struct_nbytes = sizeof(plan_desc);
  mfsdp_status status = MFSDP_E_MEMORY;
  for (int failing = 0; status != MFSDP_OK; ++failing) {
    rig.memory.fail_at(failing);
    status = mfsdp_simulate_plan(&rig.context, &plan_desc, &desc, &plan);
    rig.memory.fail_at(-1);
    ASSERT_TRUE(status == MFSDP_OK || status == MFSDP_E_MEMORY) << rig.message();
    EXPECT_EQ(plan == nullptr, status != MFSDP_OK);
    ASSERT_LT(failing, 300);
  }
  mfsdp_plan_destroy(&rig.context, plan);
}

TEST(SimulateCluster, MessagesInBytes) {
  mfsdp_cluster c = small_cluster(); /* nodes of 2; 1 us at 1000 B/us inside, 10 at 100 between */
  EXPECT_EQ(mfsdp_cluster_message_nbytes(&c, 1), 1000);
  EXPECT_EQ(mfsdp_cluster_message_nbytes(&c, 2), 1000);
  c.net_latency_us = 10.016;
  EXPECT_EQ(mfsdp_cluster_message_nbytes(&c, 3), 1002);
  c.net_latency_us = 0;
  EXPECT_EQ(mfsdp_cluster_message_nbytes(&c, 3), 0);
  c.net_latency_us = 1e9;
  c.net_nbytes_per_s = 1e18;
  EXPECT_EQ(mfsdp_cluster_message_nbytes(&c, 3), MFSDP_PLAN_MAX_MESSAGE_NBYTES);
}

/* Every allocation fails once: a status, no leak (the rig looks), the next call works. */
TEST(Simulate, FailingAllocations) {
  for (const bool banded : {false, true}) {
    test::Params list;
    test::PlanRig rig;
    fill(&list);
    if (banded) band_all(&list);
    ASSERT_EQ(rig.create(list.desc(4)), MFSDP_OK) << rig.message();
    const mfsdp_cluster cluster = mfsdp_cluster_default();
    mfsdp_sim_desc desc = ask(MFSDP_SIM_OWNER);
    desc.plan = rig.plan;
    desc.cluster = &cluster;
    int failures = 0;
    for (;; ++failures) {
      mfsdp_sim_result result = mfsdp_sim_result_default();
      rig.memory.fail_at(failures);
      const mfsdp_status status = mfsdp_simulate(&rig.context, &desc, &result, nullptr, 0);
      rig.memory.fail_at(-1);
      if (status == MFSDP_OK) break;
      EXPECT_EQ(status, MFSDP_E_MEMORY);
      ASSERT_LT(failures, 100);
    }
    EXPECT_EQ(failures, banded ? 11 : 7); /* seven tables by rank; four of the exchange */
  }
}

} // namespace
