/* SPDX-License-Identifier: MIT */
/*
 * mock_transport.h: proves a schedule without running it: a transport that records batches, and a
 * replay of all ranks' records with no buffering at all.
 *
 *   std::vector<std::unique_ptr<test::RecordingTransport>> mocks;
 *   for (int r = 0; r < world; ++r) mocks.emplace_back(new test::RecordingTransport(r, world,
 * backend)); for (int r = 0; r < world; ++r) collective(mocks[r]->table());      // one thread, one
 * after another EXPECT_EQ(test::replay_rendezvous(test::records_of(mocks)), "");
 *
 * The replay knows transport.h's rules only: the transfers of a batch progress together, a transfer
 * is done when the peer's matching one is there at the same time (so a wire that buffers nothing is
 * enough), a rank goes on to its next batch when all of this one are done, and messages between two
 * ranks match in the order of batches and tables. It returns what is wrong, in words: a deadlock
 * with who waits for whom, sizes or check words that differ, bad peers, buffers of one batch that
 * overlap where one is written. Empty: nothing.
 *
 * submit moves no data: receive buffers keep their contents. Buffer registration is checked: only
 * live handles may be given back, and `registered` tells how many are left.
 */
#ifndef MFSDP_TESTS_SUPPORT_MOCK_TRANSPORT_H
#define MFSDP_TESTS_SUPPORT_MOCK_TRANSPORT_H

#include "mfsdp/transport.h"

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace test {

struct RecordedBatch {
  std::vector<mfsdp_xfer> xfers;
  mfsdp_traffic traffic = static_cast<mfsdp_traffic>(0);
  uint64_t check = 0;
  std::string label;
};

using RankRecord = std::vector<RecordedBatch>;

class RecordingTransport {
public:
  RecordingTransport(int32_t rank, int32_t world, const mfsdp_backend *backend,
                     const int32_t *node_of_rank = nullptr) {
    std::memset(&table_, 0, sizeof(table_));
    table_.struct_nbytes = sizeof(table_);
    table_.ops = ops();
    table_.self = this;
    table_.backend = backend;
    table_.rank = rank;
    table_.world = world;
    table_.node_of_rank = node_of_rank;
    table_.deadline_us = 1000000;
  }
  RecordingTransport(const RecordingTransport &) = delete;
  RecordingTransport &operator=(const RecordingTransport &) = delete;

  mfsdp_transport *table() { return &table_; }
  const RankRecord &record() const { return record_; }
  void clear() { record_.clear(); }
  int32_t reserved() const { return reserved_; }
  /* Live registrations: pointer and size as they were passed. */
  std::vector<std::pair<const void *, std::size_t>> registered() const {
    std::vector<std::pair<const void *, std::size_t>> out;
    for (const auto &entry : handles_)
      out.push_back(entry.second);
    return out;
  }
  /* Submission number n (0: the next) fails with E_PEER and poisons; n < 0: none does. */
  void fail_submit_at(int64_t n) { fail_at_ = n; }

private:
  static RecordingTransport *of(void *self) { return static_cast<RecordingTransport *>(self); }

  static mfsdp_status submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                             const mfsdp_batch *batch) {
    RecordingTransport *t = of(self);
    (void)queue;
    if (t->error_.status != MFSDP_OK)
      return MFSDP_FAIL(context, MFSDP_E_POISONED, "mock: %s", t->error_.message);
    if (t->reserved_ >= 0 && batch->xfer_count > t->reserved_)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mock: %d transfers, but %d were reserved",
                        static_cast<int>(batch->xfer_count), static_cast<int>(t->reserved_));
    if (t->fail_at_ == 0) {
      t->fail_at_ = -1;
      (void)MFSDP_ERROR_SET(&t->error_, MFSDP_E_PEER, -1, "injected failure of %s", batch->label);
      return mfsdp_context_take_error(context, &t->error_);
    }
    if (t->fail_at_ > 0) --t->fail_at_;
    RecordedBatch recorded;
    recorded.xfers.assign(batch->xfers, batch->xfers + batch->xfer_count);
    recorded.traffic = batch->traffic;
    recorded.check = batch->check;
    recorded.label = batch->label;
    t->record_.push_back(recorded);
    return MFSDP_OK;
  }
  static mfsdp_status reserve(void *self, mfsdp_context *context, int32_t max_xfer_count) {
    (void)context;
    if (max_xfer_count > of(self)->reserved_) of(self)->reserved_ = max_xfer_count;
    return MFSDP_OK;
  }
  static mfsdp_status poll(void *self, mfsdp_context *context) {
    return mfsdp_context_take_error(context, &of(self)->error_);
  }
  static void poison(void *self, const mfsdp_error *why) {
    if (of(self)->error_.status == MFSDP_OK) of(self)->error_ = *why;
  }
  static mfsdp_status destroy(void *self, mfsdp_context *context) {
    if (!of(self)->handles_.empty())
      return MFSDP_FAIL(context, MFSDP_E_STATE, "mock: %zu buffers are still registered",
                        of(self)->handles_.size());
    return MFSDP_OK;
  }
  static mfsdp_status buffer_register(void *self, mfsdp_context *context, void *ptr,
                                      std::size_t nbytes, void **handle) {
    RecordingTransport *t = of(self);
    if (ptr == nullptr || nbytes == 0)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mock: registration of nothing");
    *handle = reinterpret_cast<void *>(++t->last_handle_);
    t->handles_[*handle] = std::make_pair(static_cast<const void *>(ptr), nbytes);
    return MFSDP_OK;
  }
  static mfsdp_status buffer_deregister(void *self, mfsdp_context *context, void *handle) {
    if (of(self)->handles_.erase(handle) != 1)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mock: this handle is not registered");
    return MFSDP_OK;
  }
  static const mfsdp_transport_ops *ops() {
    static const mfsdp_transport_ops table = {sizeof(mfsdp_transport_ops),
                                              "recording",
                                              &RecordingTransport::submit,
                                              &RecordingTransport::reserve,
                                              &RecordingTransport::poll,
                                              &RecordingTransport::poison,
                                              &RecordingTransport::destroy,
                                              &RecordingTransport::buffer_register,
                                              &RecordingTransport::buffer_deregister,
                                              nullptr,
                                              nullptr,
                                              nullptr};
    return &table;
  }

  mfsdp_transport table_;
  RankRecord record_;
  int32_t reserved_ = -1; /* reserve was not called: no bound */
  int64_t fail_at_ = -1;
  mfsdp_error error_ = mfsdp_error_none();
  std::uintptr_t last_handle_ = 0;
  std::map<void *, std::pair<const void *, std::size_t>> handles_;
};

inline std::vector<RankRecord> records_of(
    const std::vector<std::unique_ptr<RecordingTransport>> &mocks) {
  std::vector<RankRecord> out;
  for (const auto &mock : mocks)
    out.push_back(mock->record());
  return out;
}

/* ---- the replay ---- */

class Rendezvous {
public:
  explicit Rendezvous(const std::vector<RankRecord> &ranks) : ranks_(ranks) {}

  std::string run() {
    const std::size_t world = ranks_.size();
    position_.assign(world, 0);
    pending_.assign(world, 0);
    lanes_.assign(world * world, Lane());
    for (std::size_t r = 0; r < world; ++r)
      open(r);
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t s = 0; s < world; ++s)
        for (std::size_t d = 0; d < world; ++d)
          while (match(s, d))
            moved = true;
      for (std::size_t r = 0; r < world; ++r)
        while (position_[r] < ranks_[r].size() && pending_[r] == 0) {
          ++position_[r];
          open(r);
          moved = true;
        }
    }
    for (std::size_t r = 0; r < world; ++r)
      if (position_[r] < ranks_[r].size()) report_stuck(r);
    return out_.str();
  }

private:
  /* What is open now from one rank to another, oldest first. */
  struct Lane {
    std::deque<const mfsdp_xfer *> sends, receives;
  };

  Lane &lane(std::size_t from, std::size_t to) { return lanes_[from * ranks_.size() + to]; }
  const RecordedBatch &batch_of(std::size_t r) const { return ranks_[r][position_[r]]; }

  void open(std::size_t r) {
    if (position_[r] >= ranks_[r].size()) return;
    const RecordedBatch &batch = batch_of(r);
    check_overlap(r, batch);
    for (const mfsdp_xfer &x : batch.xfers) {
      const auto peer = static_cast<std::size_t>(x.peer);
      if (x.peer < 0 || peer >= ranks_.size() || peer == r) {
        out_ << "rank " << r << ", " << batch.label << ": bad peer " << x.peer << "\n";
        continue;
      }
      ++pending_[r];
      if (x.is_send)
        lane(r, peer).sends.push_back(&x);
      else
        lane(peer, r).receives.push_back(&x);
    }
  }

  bool match(std::size_t s, std::size_t d) {
    Lane &l = lane(s, d);
    if (l.sends.empty() || l.receives.empty()) return false;
    const mfsdp_xfer *sent = l.sends.front(), *received = l.receives.front();
    l.sends.pop_front();
    l.receives.pop_front();
    if (sent->nbytes != received->nbytes)
      out_ << "rank " << s << " sends " << sent->nbytes << " bytes in " << batch_of(s).label
           << ", rank " << d << " receives " << received->nbytes << " in " << batch_of(d).label
           << "\n";
    if (batch_of(s).check != 0 && batch_of(d).check != 0 && batch_of(s).check != batch_of(d).check)
      out_ << "check words differ: rank " << s << " in " << batch_of(s).label << ", rank " << d
           << " in " << batch_of(d).label << "\n";
    --pending_[s];
    --pending_[d];
    return true;
  }

  void check_overlap(std::size_t r, const RecordedBatch &batch) {
    for (std::size_t i = 0; i < batch.xfers.size(); ++i)
      for (std::size_t j = 0; j < batch.xfers.size(); ++j) {
        const mfsdp_xfer &a = batch.xfers[i], &b = batch.xfers[j];
        if (i == j || a.is_send || a.nbytes == 0 || b.nbytes == 0) continue;
        if (!b.is_send && j < i) continue; /* said once */
        const auto *a0 = static_cast<const char *>(a.dst);
        const auto *b0 = static_cast<const char *>(b.is_send ? b.src : b.dst);
        if (std::less<const char *>()(a0, b0 + b.nbytes) &&
            std::less<const char *>()(b0, a0 + a.nbytes))
          out_ << "rank " << r << ", " << batch.label << ": transfer " << i
               << " receives into the buffer of transfer " << j << "\n";
      }
  }

  void report_stuck(std::size_t r) {
    out_ << "rank " << r << " is stuck in batch " << position_[r] << ", " << batch_of(r).label
         << ":";
    for (std::size_t p = 0; p < ranks_.size(); ++p) {
      if (!lane(p, r).receives.empty()) out_ << " rank " << p << " does not send;";
      if (!lane(r, p).sends.empty()) out_ << " rank " << p << " does not receive;";
    }
    out_ << "\n";
  }

  const std::vector<RankRecord> &ranks_;
  std::vector<std::size_t> position_, pending_;
  std::vector<Lane> lanes_;
  std::ostringstream out_;
};

/* What is wrong with the schedule, one line each; empty: it completes, with equal sizes. */
inline std::string replay_rendezvous(const std::vector<RankRecord> &ranks) {
  return Rendezvous(ranks).run();
}

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_MOCK_TRANSPORT_H
