/* SPDX-License-Identifier: MIT */
/*
 * transport_cases.h: what every transport on CUDA must do, as functions of one rank. Buffers are
 * filled and reused in stream order alone: the host waits for the end only, so that an event that
 * the transport forgets is a data race for the thread sanitizer, and mostly wrong bytes.
 */
#ifndef MFSDP_TESTS_CUDA_TRANSPORT_CASES_H
#define MFSDP_TESTS_CUDA_TRANSPORT_CASES_H

#include "tests/support/ranks.h"

#include "mfsdp/collective.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

namespace test {

using Bytes = std::vector<unsigned char>;

inline void expect_part(const std::string &text, const std::string &part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

/* DEVICE memory of a rank, and host memory beside it; everything is enqueued on the rank's queue.
 * */
class Block {
public:
  Block(Rank *rank, std::size_t nbytes, unsigned char byte = 0) : host(nbytes, byte), rank_(rank) {
    EXPECT_EQ(mfsdp_buffer_alloc(&rank->context, rank->backend, nbytes, MFSDP_SPACE_DEVICE,
                                 MFSDP_MEMORY_STAGING, &buffer_),
              MFSDP_OK)
        << rank->context.error.message;
  }
  Block(const Block &) = delete;
  Block &operator=(const Block &) = delete;
  ~Block() { /* also after a failure, when the queue may still be at it */
    const mfsdp_error error = rank_->context.error;
    (void)rank_->finish();
    rank_->context.error = error;
    mfsdp_buffer_free(&rank_->context, rank_->backend, &buffer_);
  }
  void *data() const { return buffer_.data; }
  mfsdp_status upload() {
    return copy(buffer_.data, MFSDP_SPACE_DEVICE, host.data(), MFSDP_SPACE_HOST);
  }
  mfsdp_status download() {
    return copy(host.data(), MFSDP_SPACE_HOST, buffer_.data, MFSDP_SPACE_DEVICE);
  }
  mfsdp_status fill(int byte) {
    const mfsdp_backend *b = rank_->backend;
    return b->ops->fill_bytes(b->self, rank_->queue, buffer_.data, byte, buffer_.nbytes);
  }
  Bytes host;

private:
  mfsdp_status copy(void *to, mfsdp_space to_space, const void *from, mfsdp_space from_space) {
    const mfsdp_backend *b = rank_->backend;
    return b->ops->copy(b->self, rank_->queue, to, to_space, from, from_space, host.size());
  }
  Rank *rank_;
  mfsdp_buffer buffer_;
};

/* What rank `from` sends to rank `to` in round `round`. */
inline void set_pattern(Bytes *bytes, int32_t from, int32_t to, int round) {
  for (std::size_t i = 0; i < bytes->size(); ++i)
    (*bytes)[i] = static_cast<unsigned char>((static_cast<std::size_t>(from * 131 + to * 31) +
                                              static_cast<std::size_t>(round * 7) + i % 251) &
                                             0xff);
}

inline bool has_pattern(const Bytes &bytes, int32_t from, int32_t to, int round) {
  Bytes want(bytes.size());
  set_pattern(&want, from, to, round);
  return bytes == want;
}

inline mfsdp_status one_copy(Rank &rank) {
  Block block(&rank, 1000);
  if (rank.rank == 0) set_pattern(&block.host, 0, 1, 0);
  MFSDP_TRY(block.upload());
  MFSDP_TRY(rank.submit(
      {rank.rank == 0 ? send_to(1, block.data(), 1000) : receive_from(0, block.data(), 1000)},
      "one"));
  MFSDP_TRY(block.download());
  MFSDP_TRY(rank.finish());
  EXPECT_TRUE(has_pattern(block.host, 0, 1, 0));
  return MFSDP_OK;
}

/* Every rank sends to every other and receives from every other, in one batch; then overwrites what
 * it sent. */
inline mfsdp_status exchange_all(Rank &rank, std::size_t nbytes, int round, bool sends_first) {
  std::deque<Block> out, in;
  std::vector<mfsdp_xfer> sends, receives, all;
  for (int32_t p = 0; p < rank.world; ++p) {
    out.emplace_back(&rank, nbytes);
    in.emplace_back(&rank, nbytes, static_cast<unsigned char>(0xee));
    if (p == rank.rank) continue;
    set_pattern(&out.back().host, rank.rank, p, round);
    MFSDP_TRY(out.back().upload());
    MFSDP_TRY(in.back().upload());
    sends.push_back(send_to(p, out.back().data(), nbytes));
    receives.push_back(receive_from(p, in.back().data(), nbytes));
  }
  all = sends_first ? sends : receives;
  const auto &rest = sends_first ? receives : sends;
  all.insert(all.end(), rest.begin(), rest.end());
  MFSDP_TRY(rank.submit(all, "all to all"));
  for (Block &block : out)
    MFSDP_TRY(block.fill(0xdd));
  for (Block &block : in)
    MFSDP_TRY(block.download());
  MFSDP_TRY(rank.finish());
  for (int32_t p = 0; p < rank.world; ++p)
    if (p != rank.rank && !has_pattern(in[static_cast<std::size_t>(p)].host, p, rank.rank, round))
      return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "wrong bytes from rank %d",
                        static_cast<int>(p));
  return MFSDP_OK;
}

/* Between two ranks: the order of batches and, inside a batch, of its table. The same device memory
 * in every round, and the host never waits. For three ranks. */
inline mfsdp_status first_in_first_out(Rank &rank) {
  const int kRounds = MFSDP_TEST_SANITIZER ? 40 : 200;
  const mfsdp_backend *b = rank.backend;
  const int32_t next = (rank.rank + 1) % 3, last = (rank.rank + 2) % 3;
  Block out(&rank, 6 * sizeof(int)), in(&rank, 6 * sizeof(int));
  std::vector<int> values(static_cast<std::size_t>(6 * kRounds)), got(values.size(), -1);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<mfsdp_xfer> xfers;
    const std::size_t first = static_cast<std::size_t>(6 * round);
    for (std::size_t i = 0; i < 6; ++i) {
      values[first + i] = rank.rank * 1000000 + static_cast<int>(first + i);
      xfers.push_back(send_to(next, static_cast<int *>(out.data()) + i, sizeof(int)));
      xfers.push_back(receive_from(last, static_cast<int *>(in.data()) + i, sizeof(int)));
    }
    MFSDP_TRY(b->ops->copy(b->self, rank.queue, out.data(), MFSDP_SPACE_DEVICE, &values[first],
                           MFSDP_SPACE_HOST, 6 * sizeof(int)));
    MFSDP_TRY(rank.submit(xfers, "six"));
    MFSDP_TRY(b->ops->copy(b->self, rank.queue, &got[first], MFSDP_SPACE_HOST, in.data(),
                           MFSDP_SPACE_DEVICE, 6 * sizeof(int)));
  }
  MFSDP_TRY(rank.finish());
  for (std::size_t i = 0; i < got.size(); ++i)
    if (got[i] != last * 1000000 + static_cast<int>(i))
      return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "message %d: got %d", static_cast<int>(i),
                        got[i]);
  return MFSDP_OK;
}

/* One sends in one batch what the other takes in three. */
inline mfsdp_status batches_need_not_line_up(Rank &rank) {
  Block abc(&rank, 3);
  char *at = static_cast<char *>(abc.data());
  if (rank.rank == 0) {
    abc.host = {'a', 'b', 'c'};
    MFSDP_TRY(abc.upload());
    MFSDP_TRY(
        rank.submit({send_to(1, at, 1), send_to(1, at + 1, 1), send_to(1, at + 2, 1)}, "three"));
    return rank.finish();
  }
  MFSDP_TRY(rank.submit({receive_from(0, at, 1)}, "first"));
  MFSDP_TRY(rank.submit({}, "nothing"));
  MFSDP_TRY(rank.submit({receive_from(0, at + 1, 1)}, "second"));
  MFSDP_TRY(rank.submit({receive_from(0, at + 2, 1)}, "third"));
  MFSDP_TRY(abc.download());
  MFSDP_TRY(rank.finish());
  EXPECT_EQ(abc.host, (Bytes{'a', 'b', 'c'}));
  return MFSDP_OK;
}

/* Rank 0 receives from 1 and from 2 in one batch; 1 sends only after it has something from 2, which
 * has to get rid of its message to 0 first. */
inline mfsdp_status transfers_progress_together(Rank &rank) {
  Block two(&rank, 2);
  char *at = static_cast<char *>(two.data());
  MFSDP_TRY(two.fill(rank.rank));
  if (rank.rank == 0) {
    MFSDP_TRY(rank.submit({receive_from(1, at, 1), receive_from(2, at + 1, 1)}, "both"));
    MFSDP_TRY(two.download());
    MFSDP_TRY(rank.finish());
    EXPECT_EQ(two.host, (Bytes{2, 2}));
    return MFSDP_OK;
  }
  if (rank.rank == 1) {
    MFSDP_TRY(rank.submit({receive_from(2, at, 1)}, "from 2"));
    MFSDP_TRY(rank.submit({send_to(0, at, 1)}, "on to 0"));
    return rank.finish();
  }
  MFSDP_TRY(rank.submit({send_to(0, at, 1)}, "to 0"));
  MFSDP_TRY(rank.submit({send_to(1, at + 1, 1)}, "to 1"));
  return rank.finish();
}

/* Rounds differ in who speaks to whom and how much; every rank has one buffer to send from, which
 * it fills anew for each round while peers may still read what was there. */
inline mfsdp_status many_uneven_batches(Rank &rank) {
  const int kRounds = MFSDP_TEST_SANITIZER ? 30 : 120;
  Block out(&rank, 256);
  std::deque<Block> in;
  std::vector<unsigned char> want;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<mfsdp_xfer> xfers;
    MFSDP_TRY(out.fill((rank.rank * 50 + round) % 256));
    for (int32_t from = 0; from < rank.world; ++from)
      for (int32_t to = 0; to < rank.world; ++to) {
        const auto nbytes = static_cast<std::size_t>((from * 37 + to * 11 + round * 13) % 200);
        if (from == to || (from * 5 + to * 3 + round) % 3 == 0) continue;
        if (from == rank.rank) xfers.push_back(send_to(to, out.data(), nbytes));
        if (to != rank.rank) continue;
        in.emplace_back(&rank, nbytes);
        want.push_back(static_cast<unsigned char>((from * 50 + round) % 256));
        xfers.push_back(receive_from(from, in.back().data(), nbytes));
      }
    MFSDP_TRY(rank.submit(xfers, "uneven"));
  }
  for (Block &block : in)
    MFSDP_TRY(block.download());
  MFSDP_TRY(rank.finish());
  for (std::size_t i = 0; i < in.size(); ++i)
    if (in[i].host != Bytes(in[i].host.size(), want[i]))
      return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "message %zu: wrong bytes", i);
  return MFSDP_OK;
}

/* Extents of uneven lengths for all ranks, in no order, as one full buffer of floats. */
struct Layout {
  std::vector<mfsdp_extent> extents;
  int64_t full_count = 0;

  explicit Layout(int32_t world) {
    std::vector<int64_t> ends(static_cast<std::size_t>(world), 0);
    for (int32_t i = 0; i < 2 * world + 1; ++i) {
      mfsdp_extent e;
      e.owner = (i * 5 + 1) % world;
      e.count = e.payload_count = 37 * (i % 4) + 300;
      e.unit_offset = full_count;
      e.shard_offset = ends[static_cast<std::size_t>(e.owner)];
      ends[static_cast<std::size_t>(e.owner)] += e.count;
      full_count += e.count;
      extents.push_back(e);
    }
  }
  mfsdp_layout table(int32_t world) const {
    mfsdp_layout t;
    std::memset(&t, 0, sizeof(t));
    t.struct_nbytes = sizeof(t);
    t.extents = extents.data();
    t.extent_count = static_cast<int32_t>(extents.size());
    t.world = world;
    t.dtype = MFSDP_F32;
    t.full_count = full_count;
    return t;
  }
  std::size_t segment(int32_t rank) const {
    int64_t end = 0;
    for (const mfsdp_extent &e : extents)
      if (e.owner == rank) end = std::max(end, e.shard_offset + e.count);
    return static_cast<std::size_t>(end);
  }
};

/* Whole numbers, whose sums are exact in any order. */
inline float term(int32_t rank, int64_t index) {
  return static_cast<float>((rank + 3) * 131 + index * 29 % 511);
}

inline void set_floats(Bytes *bytes, const std::vector<float> &values) {
  std::memcpy(bytes->data(), values.data(), values.size() * sizeof(float));
}

/* Every rank's contribution is reduced to the owners, and their sums are gathered again, twice over
 * the same memory. */
inline mfsdp_status reduce_and_gather(Rank &rank, mfsdp_algorithm algorithm) {
  const Layout layout(rank.world);
  const mfsdp_layout table = layout.table(rank.world);
  const std::size_t nbytes = static_cast<std::size_t>(layout.full_count) * sizeof(float);
  const std::size_t segment = layout.segment(rank.rank) * sizeof(float);
  Block full(&rank, nbytes), sums(&rank, nbytes, 0xee), own(&rank, segment);
  std::vector<float> terms, want;
  mfsdp_coll *reduce = nullptr, *gather = nullptr;
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  for (int64_t i = 0; i < layout.full_count; ++i) {
    terms.push_back(term(rank.rank, i));
    want.push_back(0.0f);
    for (int32_t r = 0; r < rank.world; ++r)
      want.back() += 2 * term(r, i);
  }
  set_floats(&full.host, terms);
  desc.kind = MFSDP_COLL_REDUCE;
  desc.algorithm = algorithm;
  desc.layout = &table;
  desc.transport = &rank.transport;
  desc.traffic = MFSDP_TRAFFIC_REDUCE;
  desc.chunk_nbytes = 1024;
  desc.wire.latency_ns = desc.wire.between_latency_ns = 10000; /* for AUTO */
  desc.wire.ns_per_mib = desc.wire.between_ns_per_mib = 1000;
  desc.label = "reduce";
  MFSDP_TRY(mfsdp_coll_create(&rank.context, &desc, &reduce));
  desc.kind = MFSDP_COLL_GATHER;
  desc.traffic = MFSDP_TRAFFIC_MATERIALIZE;
  desc.label = "gather";
  MFSDP_TRY(mfsdp_coll_create(&rank.context, &desc, &gather));
  Block workspace(&rank, mfsdp_coll_workspace_nbytes(reduce));
  MFSDP_TRY(full.upload());
  MFSDP_TRY(sums.upload());
  for (int32_t round = 0; round < 2; ++round)
    MFSDP_TRY(mfsdp_reduce(&rank.context, reduce, rank.queue, full.data(),
                           static_cast<float *>(own.data()), round == 0, workspace.data()));
  MFSDP_TRY(full.fill(0xdd));
  MFSDP_TRY(mfsdp_gather(&rank.context, gather, rank.queue, own.data(), sums.data()));
  MFSDP_TRY(sums.download());
  MFSDP_TRY(rank.finish());
  mfsdp_coll_destroy(&rank.context, reduce);
  mfsdp_coll_destroy(&rank.context, gather);
  if (std::memcmp(sums.host.data(), want.data(), nbytes) != 0)
    return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "wrong sums");
  return MFSDP_OK;
}

/* A batch of one message from rank 0 to rank 1, of which each rank has its own idea. */
inline mfsdp_status one_message(Rank &rank, const std::size_t nbytes[2],
                                const char *const labels[2], const uint64_t checks[2]) {
  Block block(&rank, 8);
  void *data = nbytes[rank.rank] > 0 ? block.data() : nullptr;
  return rank.submit(
      {rank.rank == 0 ? send_to(1, data, nbytes[0]) : receive_from(0, data, nbytes[1])},
      labels[rank.rank], checks[rank.rank]);
}

const char *const kLabels[2] = {"reduce blocks.7", "reduce blocks.8"};

/* A byte from or to `peer` in a batch of its own. A batch that comes after another rank's error is
 * refused; then that error. */
inline mfsdp_status one_byte(Rank &rank, int32_t peer, bool sending, const char *label) {
  Block block(&rank, 1);
  const mfsdp_status status = rank.submit(
      {sending ? send_to(peer, block.data(), 1) : receive_from(peer, block.data(), 1)}, label);
  if (status != MFSDP_E_POISONED) return status;
  return rank.transport.ops->poll(rank.transport.self, &rank.context);
}

} // namespace test

#endif // MFSDP_TESTS_CUDA_TRANSPORT_CASES_H
