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

#include <limits>
#include <memory>
#include <numeric>
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
  EXPECT_EQ(run(1, 2, 0), MFSDP_E_ARGUMENT);
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
  d.chunk_nbytes = 0;
  refused(d, "chunk_nbytes is 0");
  result.struct_nbytes = 2;
  refused(good, "result.struct_nbytes is 2");
  result = mfsdp_sim_result_default();
  EXPECT_EQ(mfsdp_simulate(&rig.context, &good, &result, nullptr, 3), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_simulate(&rig.context, nullptr, &result, nullptr, 0), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_simulate(&rig.context, &good, nullptr, nullptr, 0), MFSDP_E_ARGUMENT);
}

/* Every allocation fails once: a status, no leak (the rig looks), the next call works. */
TEST(Simulate, FailingAllocations) {
  test::Params list;
  test::PlanRig rig;
  fill(&list);
  ASSERT_EQ(rig.create(list.desc(4)), MFSDP_OK) << rig.message();
  const mfsdp_cluster cluster = small_cluster();
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
  EXPECT_EQ(failures, 7); /* seven tables by rank */
}

} // namespace
