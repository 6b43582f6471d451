/* SPDX-License-Identifier: MIT */
/*
 * cost/chunk.h: the choice of a chunk against a scan of its own model in wider arithmetic, its bounds
 * and directions over many cases, and cases by hand.
 */
#include "mfsdp/cost.h"

#include "mfsdp/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

const int64_t kKib = 1024;
const mfsdp_wire_cost kUnknown = {0, 0, 0, 0};

mfsdp__chunk_ask ask_of(int64_t unit, int64_t longest, int64_t world, int64_t nodes,
                        const mfsdp_wire_cost *wire = &kUnknown) {
  mfsdp__chunk_ask ask;
  ask.unit_nbytes = unit;
  ask.longest_nbytes = longest;
  ask.world = world;
  ask.node_count = nodes;
  ask.by_nodes = 0;
  ask.wire = wire;
  return ask;
}

int64_t chosen(const mfsdp__chunk_ask &ask) {
  return static_cast<int64_t>(mfsdp__chunk_choose(&ask));
}

std::vector<int64_t> choices(const mfsdp__chunk_ask &ask) {
  if (ask.node_count == 1) return {256 * kKib, 512 * kKib};
  return {32 * kKib, 60 * kKib, 256 * kKib, 512 * kKib};
}

/* A number that grows by its logarithm: all sizes are equally likely. */
int64_t log_random(uint64_t seed, uint64_t stream, int64_t low, int64_t high) {
  const double u =
      static_cast<double>(mfsdp_random_u64(seed, stream, 0) >> 11) / 9007199254740992.0;
  return std::min(high, static_cast<int64_t>(
                            static_cast<double>(low) *
                            std::pow(static_cast<double>(high) / static_cast<double>(low), u)));
}

struct Case {
  mfsdp_wire_cost wire;
  mfsdp__chunk_ask ask;
};

void fill(uint64_t seed, Case *c) {
  const int64_t unit = log_random(seed, 1, 1, INT64_C(1) << 40);
  c->wire.latency_ns = log_random(seed, 2, 1, 100000000);
  c->wire.ns_per_mib = log_random(seed, 3, 1, 1000000000000);
  c->wire.between_latency_ns = log_random(seed, 4, 1, 100000000);
  c->wire.between_ns_per_mib = log_random(seed, 5, 1, 1000000000000);
  c->ask = ask_of(unit, log_random(seed, 6, 1, unit), log_random(seed, 7, 1, 4096), 1, &c->wire);
  c->ask.node_count = log_random(seed, 8, 1, c->ask.world);
  c->ask.by_nodes = static_cast<int32_t>(seed % 2);
  if (seed % 3 == 0) c->wire = kUnknown;
}

const uint64_t kCases = 20000;

TEST(Chunk, IsAChoiceWithinItsBounds) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    Case c;
    fill(seed, &c);
    const int64_t chunk = chosen(c.ask);
    const std::vector<int64_t> all = choices(c.ask);
    EXPECT_NE(std::find(all.begin(), all.end(), chunk), all.end()) << seed << ": " << chunk;
    EXPECT_LE(chunk, (mfsdp_wire_cost_valid(&c.wire) ? 512 : 256) * kKib) << seed;
  }
}

/* More to move, dearer messages or cheaper bytes never make it smaller; more ranks never larger. */
TEST(Chunk, GoesTheRightWay) {
  int64_t moved[5] = {0, 0, 0, 0, 0};
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    Case c;
    fill(seed, &c);
    c.ask.by_nodes = 0;
    const int64_t chunk = chosen(c.ask);
    Case other = c;
    other.ask.wire = &other.wire;
    other.ask.unit_nbytes *= 2;
    EXPECT_GE(chosen(other.ask), chunk) << seed;
    moved[0] += chosen(other.ask) > chunk;
    other.ask.unit_nbytes = c.ask.unit_nbytes;
    other.ask.world *= 2;
    EXPECT_LE(chosen(other.ask), chunk) << seed;
    moved[1] += chosen(other.ask) < chunk;
    other.ask.world = c.ask.world;
    if (!mfsdp_wire_cost_valid(&c.wire)) continue;
    other.wire.latency_ns *= 2;
    other.wire.between_latency_ns *= 2;
    EXPECT_GE(chosen(other.ask), chunk) << seed;
    moved[2] += chosen(other.ask) > chunk;
    other.wire = c.wire;
    other.wire.ns_per_mib = (c.wire.ns_per_mib + 1) / 2;
    other.wire.between_ns_per_mib = (c.wire.between_ns_per_mib + 1) / 2;
    EXPECT_GE(chosen(other.ask), chunk) << seed;
    moved[3] += chosen(other.ask) > chunk;
    other.wire = c.wire;
    other.ask.longest_nbytes = (c.ask.longest_nbytes + 1) / 2; /* what it is within says nothing */
    moved[4] += chosen(other.ask) != chunk;
  }
  for (const int64_t count : moved)
    EXPECT_GT(count, 0) << "a direction that no case shows";
}

/* Links that the last chunks go; those of them between nodes. */
double hops_of(const mfsdp__chunk_ask &ask, double *between) {
  const double nodes = static_cast<double>(ask.node_count);
  if (ask.by_nodes) {
    const double hops =
        std::ceil(static_cast<double>(ask.unit_nbytes) / static_cast<double>(ask.longest_nbytes));
    *between = nodes > 1.0 ? hops : 0.0;
    return hops;
  }
  const double hops = std::max(0.0, static_cast<double>(ask.world - 2));
  *between = std::min(hops, nodes - 1.0);
  return hops;
}

/* The model in doubles, which do not saturate: L P / c + min(c, S) b over h links, and 3 L from 64 KiB
 * on. */
double model_ns(const mfsdp__chunk_ask &ask, int64_t chunk) {
  const mfsdp_wire_cost &w = *ask.wire;
  const bool inside = ask.node_count == 1;
  const double p = static_cast<double>(ask.unit_nbytes),
               s = static_cast<double>(ask.longest_nbytes);
  const double latency =
      inside ? static_cast<double>(w.latency_ns)
             : static_cast<double>(w.between_latency_ns) * (chunk < 64 * kKib ? 1.0 : 3.0);
  double between = 0.0;
  const double hops = hops_of(ask, &between);
  const double fill = (hops - between) * static_cast<double>(w.ns_per_mib) +
                      between * static_cast<double>(w.between_ns_per_mib);
  return p / static_cast<double>(chunk) * latency +
         fill * std::min(static_cast<double>(chunk), s) / 1048576.0;
}

/* Whole KiB of h min(c, S), and nanoseconds: rounded there, not here. */
double slack_ns(const Case &c) {
  return static_cast<double>(c.wire.ns_per_mib + c.wire.between_ns_per_mib) / 1024.0 + 3.0;
}

/*
 * Against every whole KiB of its range. Of A / c + B c between two neighbours the worst place is where
 * both cost alike: 32 and 60 miss the best by 5.0 % there, 60 and 256 (3 A) by 4.5 %, 256 and 512 by
 * (sqrt 2 + 1 / sqrt 2) / 2 - 1 = 6.1 %. Segments shorter than a chunk make another model.
 */
TEST(Chunk, IsNearTheBestOfItsModel) {
  int inner = 0;
  for (uint64_t seed = 0; seed < kCases / 4; ++seed) {
    Case c;
    fill(seed, &c);
    if (!mfsdp_wire_cost_valid(&c.wire) || c.ask.longest_nbytes < 512 * kKib) continue;
    const int64_t low = choices(c.ask).front(), chunk = chosen(c.ask);
    double best = std::numeric_limits<double>::infinity();
    for (int64_t at = low; at <= 512 * kKib; at += kKib)
      best = std::min(best, model_ns(c.ask, at));
    EXPECT_LE(model_ns(c.ask, chunk), 1.061 * best + slack_ns(c)) << seed;
    inner += chunk > low && chunk < 512 * kKib;
  }
  EXPECT_GT(inner, 20) << "hardly a case has its best inside";
}

/* And of the choices it is the best one, the larger of equals; short segments too. */
TEST(Chunk, IsTheBestChoice) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    Case c;
    fill(seed, &c);
    if (!mfsdp_wire_cost_valid(&c.wire)) continue;
    const int64_t chunk = chosen(c.ask);
    for (const int64_t at : choices(c.ask)) {
      const double here = model_ns(c.ask, chunk), there = model_ns(c.ask, at);
      if (std::max(here, there) > 9e15) continue; /* 100 days: saturates at 2^63 / 1024 */
      EXPECT_LE(here, there + 1e-9 * here + slack_ns(c)) << seed << " at " << at;
    }
  }
  const mfsdp_wire_cost free_messages = {0, 1000, 0, 1000};
  EXPECT_EQ(chosen(ask_of(1 << 30, 1 << 30, 8, 8, &free_messages)), 32 * kKib);
  EXPECT_EQ(chosen(ask_of(1 << 30, 1 << 30, 2, 2, &free_messages)), 512 * kKib)
      << "all cost the same";
}

/* By size alone: the largest whose fill is at most a sixteenth of the unit, but no smaller one than makes
 * 256 of it. */
TEST(Chunk, BySizeTheFillIsASixteenth) {
  int inner = 0, counted = 0;
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    Case c;
    fill(3 * seed, &c);
    if (c.ask.node_count == 1) continue;
    const int64_t chunk = chosen(c.ask);
    const double p = static_cast<double>(c.ask.unit_nbytes);
    double between = 0.0;
    (void)hops_of(c.ask, &between);
    const auto fits = [&](int64_t kib) { /* its fill; units are whole bytes */
                                         return 16.0 * between * static_cast<double>(kib * kKib) <
                                                p + 16.0;
    };
    const auto few = [&](int64_t kib) { return p <= 256.0 * static_cast<double>(kib * kKib); };
    if (chunk == 60 * kKib) {
      EXPECT_TRUE(fits(60) || !few(32)) << seed;
    }
    if (chunk == 256 * kKib) {
      EXPECT_TRUE(fits(256) || !few(60)) << seed;
    }
    if (chunk < 256 * kKib) {
      EXPECT_TRUE(!fits(256) || 16.0 * between * 262144.0 > p - 16.0) << seed;
      EXPECT_TRUE(few(60)) << seed;
    }
    if (chunk == 32 * kKib) {
      EXPECT_TRUE(!fits(60) || 16.0 * between * 61440.0 > p - 16.0) << seed;
      EXPECT_TRUE(few(32)) << seed;
    }
    inner += chunk == 60 * kKib;
    counted += chunk == 256 * kKib && !fits(256);
  }
  EXPECT_GT(inner, 20) << "hardly a case is between the bounds";
  EXPECT_GT(counted, 20) << "hardly a case is bounded by the count";
}

TEST(Chunk, ByHand) {
  const int64_t mb = 1000000;
  /* A block of 3.3 MB on eight hosts: 3.3 MB / (16 x 6) is 34,375. On four hosts of two only 3 of
   * the 6 links are between them: 68,750. */
  EXPECT_EQ(chosen(ask_of(33 * mb / 10, mb, 8, 4)), 60 * kKib);
  /* GPT-2's, 14 MB, on 64 hosts: not in more than 256 pieces. */
  EXPECT_EQ(chosen(ask_of(14 * mb, mb, 64, 64)), 60 * kKib);
  EXPECT_EQ(chosen(ask_of(33 * mb / 10, mb, 8, 8)), 32 * kKib);
  EXPECT_EQ(chosen(ask_of(33 * mb / 10, mb, 8, 1)), 256 * kKib) << "on one host";
  EXPECT_EQ(chosen(ask_of(3 * mb, mb, 4, 4)), 60 * kKib); /* 93,750 */
  EXPECT_EQ(chosen(ask_of(3 * mb, mb, 2, 2)), 256 * kKib) << "nothing passes through";
  EXPECT_EQ(chosen(ask_of(64 * mb, mb, 8, 8)), 256 * kKib);
  mfsdp__chunk_ask nodes = ask_of(3 * mb, mb, 8, 2);
  nodes.by_nodes = 1;
  EXPECT_EQ(chosen(nodes), 60 * kKib); /* one batch of 3 owners: 62,500 */
  /* 1 Gbit/s and 50 us for a message: 91.6 x 50 + 6 x 262 = 6,152 us by 32 KiB, 48.8 x 50 + 6 x 492 =
   * 5,390 by 60 KiB, 11.4 x 150 + 6 x 1,000 (a segment) = 7,710 by 256 KiB. */
  const mfsdp_wire_cost ethernet = {5000, 209715, 50000, 8388608};
  EXPECT_EQ(chosen(ask_of(3 * mb, mb, 8, 8, &ethernet)), 60 * kKib);
  EXPECT_EQ(chosen(ask_of(3 * mb, mb, 8, 1, &ethernet)), 256 * kKib);
  EXPECT_EQ(chosen(ask_of(64 * mb, 8 * mb, 8, 1, &ethernet)), 512 * kKib);
}

TEST(Chunk, NothingIsNotDividedBy) {
  mfsdp__chunk_ask none = ask_of(0, 0, 1, 1);
  EXPECT_EQ(chosen(none), 256 * kKib);
  none.by_nodes = 1;
  EXPECT_EQ(chosen(none), 256 * kKib);
  none.node_count = none.world = 2;
  EXPECT_EQ(chosen(none), 256 * kKib);
}

/* A wire that mfsdp_wire_cost_valid refuses is none. */
TEST(Chunk, AWireThatIsNoneIsNotKnown) {
  const mfsdp_wire_cost negative = {-5000, -1, 50000, 8388608}, half = {5000, 209715, 0, 0};
  for (const mfsdp_wire_cost *wire : {&negative, &half})
    EXPECT_EQ(chosen(ask_of(3000000, 1000000, 8, 8, wire)), chosen(ask_of(3000000, 1000000, 8, 8)));
}

/* Numbers as large as they get saturate and overflow nowhere (the sanitizers look on). */
TEST(Chunk, HugeNumbersStillGiveAnAnswer) {
  const int64_t dear = 1000000000000, most = std::numeric_limits<int64_t>::max() / 2;
  const mfsdp_wire_cost wire = {dear, dear, dear, dear};
  for (const int32_t by_nodes : {0, 1})
    for (const int64_t longest : {INT64_C(1), most}) {
      mfsdp__chunk_ask ask = ask_of(most, longest, 1 << 20, 1 << 20, &wire);
      ask.by_nodes = by_nodes;
      EXPECT_GE(chosen(ask), 32 * kKib);
      ask.wire = &kUnknown;
      EXPECT_GE(chosen(ask), 32 * kKib);
    }
}

} // namespace
