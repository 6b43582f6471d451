/* SPDX-License-Identifier: MIT */
/*
 * collective.h with a chunk_nbytes of 0: the same list as with the chunk that it stands for, on every
 * rank; sums whose bits no chunk changes; AUTO, which weighs each algorithm by its own chunk.
 */
#include "mfsdp/collective.h"

#include "mfsdp/random.h"
#include "tests/support/backend_rig.h"
#include "tests/support/mock_transport.h"
#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

using test::Rank;
using test::RecordingTransport;

const int32_t kWorld = 4;
const int64_t kCount = 1 << 18; /* 1 MiB of fp32 */
const std::size_t kKib = 1024;

/* Of rank 1 half of the unit in two extents, of the others the rest, all multiples of 128. */
struct Unit {
  Unit() {
    const int64_t counts[] = {kCount / 4, kCount / 8, kCount / 4, kCount / 8, kCount / 4};
    const int32_t owners[] = {1, 0, 1, 2, 3};
    int64_t segment[kWorld] = {0, 0, 0, 0}, at = 0;
    for (int i = 0; i < 5; ++i) {
      mfsdp_extent e;
      e.owner = owners[i];
      e.unit_offset = at;
      e.shard_offset = segment[owners[i]];
      e.count = e.payload_count = counts[i];
      at += counts[i];
      segment[owners[i]] += counts[i];
      extents.push_back(e);
    }
    std::memset(&table, 0, sizeof(table));
    table.struct_nbytes = sizeof(table);
    table.extents = extents.data();
    table.extent_count = 5;
    table.world = kWorld;
    table.dtype = MFSDP_F32;
    table.full_count = kCount;
  }
  Unit(const Unit &) = delete;
  Unit &operator=(const Unit &) = delete;
  std::vector<mfsdp_extent> extents;
  mfsdp_layout table;
};

const int64_t kLongest = kCount / 2;
const int32_t kAlone[kWorld] = {0, 1, 2, 3}, kPairs[kWorld] = {0, 0, 1, 1};
const int32_t kThree[kWorld] = {0, 0, 0, 1}; /* sums of two numbers have but one order */
const mfsdp_wire_cost kUnknown = {0, 0, 0, 0};
/* 5 us and 5 GB/s inside, 50 us and 125 MB/s between. */
const mfsdp_wire_cost kEthernet = {5000, 209715, 50000, 8388608};

mfsdp_coll_desc desc_of(const Unit &unit, mfsdp_coll_kind kind, mfsdp_algorithm algorithm) {
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  desc.kind = kind;
  desc.algorithm = algorithm;
  desc.layout = &unit.table;
  desc.traffic = MFSDP_TRAFFIC_MATERIALIZE;
  return desc;
}

/* What a collective of this unit takes for 0. */
std::size_t taken(const mfsdp_transport *transport, mfsdp_algorithm algorithm,
                  const mfsdp_wire_cost &wire) {
  return mfsdp_coll_chunk_nbytes(transport, algorithm, &wire, MFSDP_F32, kCount, kLongest, 0);
}

class Chunks : public ::testing::Test {
protected:
  Chunks() : host_(test::rig_kinds().front()) {
    const mfsdp_context_desc desc = mfsdp_context_desc_default();
    EXPECT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
  }
  ~Chunks() override { EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK); }
  mfsdp_coll *create(const mfsdp_coll_desc &desc) {
    mfsdp_coll *coll = nullptr;
    EXPECT_EQ(mfsdp_coll_create(&context_, &desc, &coll), MFSDP_OK)
        << mfsdp_context_error(&context_)->message;
    return coll;
  }
  test::Rig host_;
  mfsdp_context context_;
};

void expect_same(const mfsdp_coll *a, const mfsdp_coll *b, const std::string &what) {
  ASSERT_TRUE(a != nullptr && b != nullptr) << what;
  EXPECT_EQ(a->identity, b->identity) << what;
  EXPECT_EQ(a->workspace_nbytes, b->workspace_nbytes) << what;
  ASSERT_EQ(a->op_count, b->op_count) << what;
  ASSERT_EQ(a->term_count, b->term_count) << what;
  ASSERT_EQ(a->xfer_count, b->xfer_count) << what;
  for (int32_t i = 0; i < a->xfer_count; ++i)
    EXPECT_TRUE(a->xfers[i].offset_nbytes == b->xfers[i].offset_nbytes &&
                a->xfers[i].nbytes == b->xfers[i].nbytes && a->xfers[i].peer == b->xfers[i].peer)
        << what << ", transfer " << i;
}

TEST_F(Chunks, DefaultIsTheChunkItStandsFor) {
  const Unit unit;
  for (const int32_t *nodes : {static_cast<const int32_t *>(nullptr), kPairs, kAlone})
    for (const mfsdp_wire_cost &wire : {kUnknown, kEthernet})
      for (mfsdp_algorithm algorithm : {MFSDP_DIRECT, MFSDP_RING, MFSDP_HIERARCHICAL})
        for (mfsdp_coll_kind kind : {MFSDP_COLL_GATHER, MFSDP_COLL_REDUCE}) {
          uint64_t identity = 0;
          for (int32_t rank = 0; rank < kWorld; ++rank) {
            RecordingTransport transport(rank, kWorld, host_.backend, nodes);
            const std::string what = std::string(mfsdp_algorithm_name(algorithm)) + ", rank " +
                                     std::to_string(rank) + ", kind " + std::to_string(kind);
            mfsdp_coll_desc desc = desc_of(unit, kind, algorithm);
            desc.transport = transport.table();
            desc.wire = wire;
            mfsdp_coll *by_default = create(desc);
            desc.chunk_nbytes = taken(desc.transport, algorithm, wire);
            mfsdp_coll *asked = create(desc);
            expect_same(by_default, asked, what);
            if (rank > 0) {
              EXPECT_EQ(by_default->identity, identity) << what;
            }
            identity = by_default->identity;
            mfsdp_coll_destroy(&context_, by_default);
            mfsdp_coll_destroy(&context_, asked);
          }
        }
}

/* By hand: h c <= 1 MiB / 16 with h = 2 of a ring of 4, and of half a unit in one segment. */
TEST_F(Chunks, OfThisUnit) {
  RecordingTransport one(0, kWorld, host_.backend), pairs(0, kWorld, host_.backend, kPairs),
      alone(0, kWorld, host_.backend, kAlone);
  for (const mfsdp_transport *t : {one.table(), pairs.table(), alone.table()}) {
    EXPECT_EQ(taken(t, MFSDP_DIRECT, kUnknown), 256 * kKib);
    EXPECT_EQ(taken(t, MFSDP_DIRECT, kEthernet), 256 * kKib);
    EXPECT_EQ(taken(t, MFSDP_NATIVE, kUnknown), 256 * kKib);
    EXPECT_EQ(mfsdp_coll_chunk_nbytes(t, MFSDP_RING, &kUnknown, MFSDP_F32, kCount, kLongest, 2000),
              2000u)
        << "as given";
  }
  for (mfsdp_algorithm algorithm : {MFSDP_RING, MFSDP_HIERARCHICAL}) {
    EXPECT_EQ(taken(one.table(), algorithm, kUnknown), 256 * kKib);
    EXPECT_EQ(taken(pairs.table(), algorithm, kUnknown),
              (algorithm == MFSDP_RING ? 60 : 32) *
                  kKib); /* of the ring's two links one is between nodes */
    EXPECT_EQ(taken(alone.table(), algorithm, kUnknown), 32 * kKib);
  }
  /* 17.1 x 50 + 2 x 492 us by 60 KiB, 4 x 150 + 2 x 2,097 by 256 KiB, 32 x 50 + 2 x 262 by 32 KiB. */
  EXPECT_EQ(taken(alone.table(), MFSDP_RING, kEthernet), 60 * kKib);
  /* Twice the elements are twice as much, of 16 bits half of that: 2 x 60 KiB <= 2 MiB / 16. */
  for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16})
    EXPECT_EQ(mfsdp_coll_chunk_nbytes(alone.table(), MFSDP_RING, &kUnknown, dtype, 2 * kCount,
                                      kLongest, 0),
              (dtype == MFSDP_F32 ? 60 : 32) * kKib);
}

/* The order of additions is the ring's, or the nodes': numbers whose sums round show any other. */
TEST_F(Chunks, NoChunkChangesABit) {
  for (mfsdp_algorithm algorithm : {MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_DIRECT}) {
    test::RanksOptions options(kWorld);
    options.world.node_of_rank = algorithm == MFSDP_HIERARCHICAL ? kThree : kAlone;
    const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
      const Unit unit;
      std::vector<float> own(kCount), first, sum;
      for (int64_t i = 0; i < kCount; ++i)
        own[static_cast<std::size_t>(i)] = static_cast<float>(
            1.0 / (1.0 + static_cast<double>(mfsdp_random_u64(7, static_cast<uint64_t>(rank.rank),
                                                              static_cast<uint64_t>(i)) %
                                             1000)));
      for (std::size_t chunk : {std::size_t{0}, 64 * kKib, std::size_t{5000}, 256 * kKib}) {
        mfsdp_coll_desc desc = desc_of(unit, MFSDP_COLL_REDUCE, algorithm);
        mfsdp_coll *coll = nullptr;
        desc.transport = &rank.transport;
        desc.chunk_nbytes = chunk;
        MFSDP_TRY(mfsdp_coll_create(&rank.context, &desc, &coll));
        std::vector<unsigned char> workspace(mfsdp_coll_workspace_nbytes(coll) + 1);
        sum.assign(static_cast<std::size_t>(kLongest), -1.0f);
        mfsdp_status status = mfsdp_reduce(&rank.context, coll, rank.queue, own.data(), sum.data(),
                                           1, workspace.data());
        if (status == MFSDP_OK) status = rank.finish();
        mfsdp_coll_destroy(&rank.context, coll);
        MFSDP_TRY(status);
        if (first.empty()) first = sum;
        if (std::memcmp(first.data(), sum.data(), sum.size() * sizeof(float)) != 0 ||
            !(sum[0] > 0.0f))
          return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "%s: other sums in chunks of %zu",
                            mfsdp_algorithm_name(algorithm), chunk);
      }
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/*
 * RING's own chunk makes it the choice where chunks of 256 KiB, as DIRECT's, would not: on 8 ranks with
 * one owner of 1 MiB, 7 times a byte by DIRECT, against 1 and a fill of 6 / 4 by the larger chunks.
 */
TEST_F(Chunks, AutoWeighsWithTheChunkItTakes) {
  const int32_t nodes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  RecordingTransport transport(0, 8, host_.backend, nodes);
  const mfsdp_wire_cost slow = {0, 1000000000, 0, 1000000000}; /* messages are free */
  const auto choice = [&](int64_t longest, std::size_t chunk) {
    return mfsdp_coll_choose(transport.table(), MFSDP_ALGORITHM_AUTO, &slow, MFSDP_COLL_GATHER,
                             MFSDP_F32, kCount, longest, chunk);
  };
  /* DIRECT: 7 S; RING: 1 MiB + 6 c. Between them with S of 5 / 16 MiB: 2.19, and 2.5 or 1.19. */
  const int64_t longest = kCount * 5 / 16;
  EXPECT_EQ(
      mfsdp_coll_chunk_nbytes(transport.table(), MFSDP_RING, &slow, MFSDP_F32, kCount, longest, 0),
      32 * kKib);
  EXPECT_EQ(choice(longest, 256 * kKib), MFSDP_DIRECT);
  EXPECT_EQ(choice(longest, 32 * kKib), MFSDP_RING);
  EXPECT_EQ(choice(longest, 0), MFSDP_RING);
}

/* And its list is that of the choice by name, without a chunk as well. */
TEST_F(Chunks, AutoIsTheAlgorithmItChooses) {
  const Unit unit;
  for (const int32_t *nodes : {kPairs, kAlone})
    for (mfsdp_coll_kind kind : {MFSDP_COLL_GATHER, MFSDP_COLL_REDUCE}) {
      RecordingTransport transport(1, kWorld, host_.backend, nodes);
      mfsdp_coll_desc desc = desc_of(unit, kind, MFSDP_ALGORITHM_AUTO);
      desc.transport = transport.table();
      desc.wire = kEthernet;
      mfsdp_coll *chosen = create(desc);
      desc.algorithm = mfsdp_coll_choose(desc.transport, desc.algorithm, &desc.wire, kind,
                                         MFSDP_F32, kCount, kLongest, 0);
      EXPECT_NE(desc.algorithm, MFSDP_DIRECT) << "of half a unit in one segment";
      mfsdp_coll *named = create(desc);
      expect_same(chosen, named, mfsdp_algorithm_name(desc.algorithm));
      mfsdp_coll_destroy(&context_, chosen);
      mfsdp_coll_destroy(&context_, named);
    }
}

TEST_F(Chunks, ATooSmallOneIsStillRefused) {
  const Unit unit;
  RecordingTransport transport(0, kWorld, host_.backend, kAlone);
  mfsdp_coll_desc desc = desc_of(unit, MFSDP_COLL_REDUCE, MFSDP_RING);
  desc.transport = transport.table();
  for (std::size_t chunk : {std::size_t{1}, std::size_t{1023}}) {
    mfsdp_coll *coll = nullptr;
    desc.chunk_nbytes = chunk;
    EXPECT_EQ(mfsdp_coll_create(&context_, &desc, &coll), MFSDP_E_ARGUMENT);
    EXPECT_NE(std::string(mfsdp_context_error(&context_)->message).find("or 0"), std::string::npos);
  }
}

} // namespace
