/* SPDX-License-Identifier: MIT */
/*
 * transport.h: what the checks reject, and in which words. The mock transport of tests/support is
 * judged here too, since it judges the schedules of others.
 */
#include "mfsdp/transport.h"

#include "tests/support/mock_transport.h"
#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace {

using test::receive_from;
using test::RecordingTransport;
using test::send_to;

/* A context, a backend and rank 1 of a recorded world of 4. */
class TransportTest : public ::testing::Test {
protected:
  void SetUp() override {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    mfsdp_host_backend_desc host_desc = mfsdp_host_backend_desc_default();
    ASSERT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
    ASSERT_EQ(mfsdp_host_backend_create(&context_, &host_desc, &host_), MFSDP_OK);
    backend_ = mfsdp_host_backend_get(host_);
    ASSERT_EQ(backend_->ops->queue_create(backend_->self, &context_, "test", &queue_), MFSDP_OK);
    mock_.reset(new RecordingTransport(1, 4, backend_));
  }
  void TearDown() override {
    backend_->ops->queue_destroy(backend_->self, &context_, queue_);
    EXPECT_EQ(mfsdp_host_backend_destroy(&context_, host_), MFSDP_OK);
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK);
  }
  mfsdp_status submit(const std::vector<mfsdp_xfer> &xfers) {
    mfsdp_batch batch = mfsdp_batch_default();
    batch.xfers = xfers.data();
    batch.xfer_count = static_cast<int32_t>(xfers.size());
    batch.label = "layer 3";
    return mfsdp_transport_submit(&context_, mock_->table(), queue_, &batch);
  }
  std::string message() const { return mfsdp_context_error(&context_)->message; }
  void expect_message(const char *part) const {
    EXPECT_NE(message().find(part), std::string::npos) << message();
  }

  mfsdp_context context_;
  mfsdp_host_backend *host_ = nullptr;
  const mfsdp_backend *backend_ = nullptr;
  mfsdp_queue *queue_ = nullptr;
  std::unique_ptr<RecordingTransport> mock_;
  char buffer_[64] = {0};
};

TEST_F(TransportTest, CheckAcceptsACompleteTransport) {
  EXPECT_EQ(mfsdp_transport_check(&context_, mock_->table()), MFSDP_OK) << message();
}

TEST_F(TransportTest, CheckRejectsNull) {
  EXPECT_EQ(mfsdp_transport_check(&context_, nullptr), MFSDP_E_ARGUMENT);
  expect_message("NULL");
  mfsdp_transport t = *mock_->table();
  t.ops = nullptr;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
  expect_message("without operations");
  t = *mock_->table();
  t.struct_nbytes = sizeof(t) - 1;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
  expect_message("transport: struct_nbytes is");
}

TEST_F(TransportTest, CheckRejectsEachMissingEntry) {
  mfsdp_transport t = *mock_->table();
  for (int entry = 0; entry < 4; ++entry) {
    mfsdp_transport_ops ops = *mock_->table()->ops;
    if (entry == 0) ops.submit = nullptr;
    if (entry == 1) ops.poll = nullptr;
    if (entry == 2) ops.poison = nullptr;
    if (entry == 3) ops.destroy = nullptr;
    t.ops = &ops;
    EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT) << entry;
    expect_message("recording: needs submit, poll, poison and destroy");
  }
}

TEST_F(TransportTest, CheckTreatsEntriesBeyondTheTableAsMissing) {
  mfsdp_transport t = *mock_->table();
  mfsdp_transport_ops ops = *mock_->table()->ops;
  ops.struct_nbytes = offsetof(mfsdp_transport_ops, destroy);
  t.ops = &ops;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
}

TEST_F(TransportTest, CheckRejectsRankWorldDeadlineAndBackend) {
  mfsdp_transport t = *mock_->table();
  t.world = 0;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
  expect_message("world is 0");
  t = *mock_->table();
  t.rank = 4;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
  expect_message("rank is 4, needs 0 to 3");
  t.rank = -1;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
  expect_message("rank is -1");
  t = *mock_->table();
  t.deadline_us = 0;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
  expect_message("deadline_us is 0");
  t = *mock_->table();
  t.backend = nullptr;
  EXPECT_EQ(mfsdp_transport_check(&context_, &t), MFSDP_E_ARGUMENT);
  expect_message("backend: NULL");
}

TEST_F(TransportTest, NativeRejects) {
  mfsdp_native_args args;
  const mfsdp_native_part part = {0, 0, 1, 0};
  float value = 0.0f;
  std::memset(&args, 0, sizeof(args));
  EXPECT_EQ(mfsdp_transport_native(&context_, mock_->table(), nullptr, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_transport_native(&context_, mock_->table(), nullptr, &args), MFSDP_E_ARGUMENT);
  expect_message("native: args are NULL, have no label, or their struct_nbytes is not");
  args.struct_nbytes = sizeof(args);
  args.label = "unit 3";
  EXPECT_EQ(mfsdp_transport_native(&context_, mock_->table(), nullptr, &args), MFSDP_E_ARGUMENT);
  expect_message("unit 3: needs a native kind (has 0)");
  args.kind = MFSDP_NATIVE_GATHER;
  args.part_count = 1;
  EXPECT_EQ(mfsdp_transport_native(&context_, mock_->table(), nullptr, &args), MFSDP_E_ARGUMENT);
  expect_message("a table of parts (has 1 in NULL)");
  args.parts = &part;
  args.src = &value;
  EXPECT_EQ(mfsdp_transport_native(&context_, mock_->table(), nullptr, &args), MFSDP_E_ARGUMENT);
  expect_message("unit 3: the full buffer is NULL but has parts");
  args.dst = &value;
  EXPECT_EQ(mfsdp_transport_native(&context_, mock_->table(), nullptr, &args), MFSDP_E_UNSUPPORTED);
  expect_message("unit 3: transport recording has no native collectives; use direct");
}

TEST_F(TransportTest, SubmitRejectsPeersThatAreNone) {
  for (int32_t peer : {-1, 4, 1}) {
    EXPECT_EQ(submit({send_to(0, buffer_, 4), send_to(peer, buffer_, 4)}), MFSDP_E_ARGUMENT);
    expect_message(("layer 3: transfer 1 names peer " + std::to_string(peer)).c_str());
  }
  EXPECT_TRUE(mock_->record().empty()) << "something was sent before the check";
}

TEST_F(TransportTest, SubmitRejectsMissingAndDoubleBuffers) {
  EXPECT_EQ(submit({send_to(0, nullptr, 4)}), MFSDP_E_ARGUMENT);
  expect_message("needs src and nothing else");
  EXPECT_EQ(submit({receive_from(0, nullptr, 4)}), MFSDP_E_ARGUMENT);
  expect_message("needs dst and nothing else");
  mfsdp_xfer both = send_to(0, buffer_, 4);
  both.dst = buffer_;
  EXPECT_EQ(submit({both}), MFSDP_E_ARGUMENT);
  both.is_send = 0;
  EXPECT_EQ(submit({both}), MFSDP_E_ARGUMENT);
  EXPECT_TRUE(mock_->record().empty());
}

TEST_F(TransportTest, SubmitRejectsABatchThatIsNone) {
  mfsdp_xfer xfer = send_to(0, buffer_, 4);
  mfsdp_batch batch = mfsdp_batch_default();
  batch.xfers = &xfer;
  batch.xfer_count = 1;
  const auto refuses = [&](const mfsdp_batch *b, const char *part) {
    EXPECT_EQ(mfsdp_transport_submit(&context_, mock_->table(), queue_, b), MFSDP_E_ARGUMENT);
    expect_message(part);
  };
  refuses(nullptr, "submit: batch is NULL");
  for (const size_t nbytes : {size_t(0), sizeof(batch) - 1, sizeof(batch) + 1}) {
    batch.struct_nbytes = nbytes;
    refuses(&batch, ("submit: batch.struct_nbytes is " + std::to_string(nbytes)).c_str());
  }
  batch.struct_nbytes = sizeof(batch);
  batch.xfer_count = -1;
  refuses(&batch, "batch: the batch has -1 transfers, needs");
  batch.xfer_count = 1;
  batch.xfers = nullptr;
  refuses(&batch, "batch: the batch has 1 transfers in xfers NULL, needs");
  batch.xfers = &xfer;
  batch.label = nullptr; /* allowed: messages say "batch" */
  xfer.peer = 4;
  refuses(&batch, "batch: transfer 0 names peer 4");
  EXPECT_TRUE(mock_->record().empty());
}

TEST_F(TransportTest, SubmitTakesZeroBytesWithoutBuffersAndEmptyBatches) {
  EXPECT_EQ(submit({send_to(0, nullptr, 0), receive_from(2, nullptr, 0)}), MFSDP_OK);
  EXPECT_EQ(submit({}), MFSDP_OK);
  ASSERT_EQ(mock_->record().size(), 2u);
  EXPECT_EQ(mock_->record()[0].xfers.size(), 2u);
  EXPECT_EQ(mock_->record()[0].label, "layer 3");
}

/* ---- control ---- */

mfsdp_status no_allgather(void *, mfsdp_context *, const void *, size_t, void *, int64_t) {
  return MFSDP_OK;
}
mfsdp_status no_probe(void *, mfsdp_context *, uint8_t *, int64_t) {
  return MFSDP_OK;
}
int64_t no_time(void *) {
  return 0;
}

TEST_F(TransportTest, ControlCheck) {
  mfsdp_control_ops ops = {
      sizeof(mfsdp_control_ops), "test", no_allgather, no_probe, no_time, nullptr};
  mfsdp_control control;
  std::memset(&control, 0, sizeof(control));
  control.struct_nbytes = sizeof(control);
  control.ops = &ops;
  control.world = 2;
  EXPECT_EQ(mfsdp_control_check(&context_, &control), MFSDP_OK);
  EXPECT_EQ(mfsdp_control_check(&context_, nullptr), MFSDP_E_ARGUMENT);
  control.struct_nbytes = 0;
  EXPECT_EQ(mfsdp_control_check(&context_, &control), MFSDP_E_ARGUMENT);
  expect_message("control: struct_nbytes is 0, needs");
  control.struct_nbytes = sizeof(control);
  control.rank = 2;
  EXPECT_EQ(mfsdp_control_check(&context_, &control), MFSDP_E_ARGUMENT);
  expect_message("rank is 2 of world 2, needs 0 to world - 1");
  control.rank = 0;
  for (int entry = 0; entry < 3; ++entry) {
    mfsdp_control_ops bad = ops;
    if (entry == 0) bad.allgather = nullptr;
    if (entry == 1) bad.probe = nullptr;
    if (entry == 2) bad.now_us = nullptr;
    control.ops = &bad;
    EXPECT_EQ(mfsdp_control_check(&context_, &control), MFSDP_E_ARGUMENT) << entry;
    expect_message("needs allgather, probe and now_us");
  }
}

/* ---- the mock: recording ---- */

TEST_F(TransportTest, MockRefusesMoreTransfersThanReserved) {
  ASSERT_EQ(mock_->table()->ops->reserve(mock_->table()->self, &context_, 1), MFSDP_OK);
  EXPECT_EQ(submit({send_to(0, buffer_, 1)}), MFSDP_OK);
  EXPECT_EQ(submit({send_to(0, buffer_, 1), send_to(2, buffer_, 1)}), MFSDP_E_ARGUMENT);
  expect_message("2 transfers, but 1 were reserved");
}

TEST_F(TransportTest, MockFailsOnDemandAndStaysFailed) {
  mock_->fail_submit_at(1);
  EXPECT_EQ(submit({send_to(0, buffer_, 1)}), MFSDP_OK);
  EXPECT_EQ(submit({send_to(0, buffer_, 1)}), MFSDP_E_PEER);
  expect_message("injected failure of layer 3");
  EXPECT_EQ(submit({send_to(0, buffer_, 1)}), MFSDP_E_POISONED);
  EXPECT_EQ(mock_->record().size(), 1u);
}

/* Fault b6: registration passed the wrong pointer and did nothing. */
TEST_F(TransportTest, MockKnowsWhatIsRegistered) {
  const mfsdp_transport *t = mock_->table();
  void *handle = nullptr;
  ASSERT_EQ(t->ops->buffer_register(t->self, &context_, buffer_, sizeof(buffer_), &handle),
            MFSDP_OK);
  ASSERT_EQ(mock_->registered().size(), 1u);
  EXPECT_EQ(mock_->registered()[0].first, buffer_);
  EXPECT_EQ(mock_->registered()[0].second, sizeof(buffer_));
  EXPECT_EQ(t->ops->destroy(t->self, &context_), MFSDP_E_STATE);
  expect_message("1 buffers are still registered");
  EXPECT_EQ(t->ops->buffer_deregister(t->self, &context_, buffer_), MFSDP_E_ARGUMENT);
  EXPECT_EQ(t->ops->buffer_deregister(t->self, &context_, handle), MFSDP_OK);
  EXPECT_EQ(t->ops->buffer_deregister(t->self, &context_, handle), MFSDP_E_ARGUMENT);
  EXPECT_EQ(t->ops->destroy(t->self, &context_), MFSDP_OK);
}

/* ---- the mock: replay ---- */

test::RecordedBatch batch_of(const std::vector<mfsdp_xfer> &xfers, const char *label,
                             uint64_t check = 0) {
  test::RecordedBatch batch;
  batch.xfers = xfers;
  batch.label = label;
  batch.check = check;
  return batch;
}

std::string replay(const std::vector<test::RankRecord> &ranks) {
  return test::replay_rendezvous(ranks);
}

void expect_part(const std::string &text, const char *part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

char A[16], B[16];

/* Fault b1: both send before they receive. In one batch that is allowed, in two it hangs. */
TEST(ReplayTest, CrossingSendsNeedOneBatch) {
  EXPECT_EQ(replay({{batch_of({send_to(1, A, 8), receive_from(1, B, 8)}, "both")},
                    {batch_of({send_to(0, A, 8), receive_from(0, B, 8)}, "both")}}),
            "");
  const std::string stuck =
      replay({{batch_of({send_to(1, A, 8)}, "out"), batch_of({receive_from(1, B, 8)}, "in")},
              {batch_of({send_to(0, A, 8)}, "out"), batch_of({receive_from(0, B, 8)}, "in")}});
  expect_part(stuck, "rank 0 is stuck in batch 0, out: rank 1 does not receive;");
  expect_part(stuck, "rank 1 is stuck in batch 0, out: rank 0 does not receive;");
}

TEST(ReplayTest, ARingNeedsOneBatchPerStep) {
  std::vector<test::RankRecord> good(3), bad(3);
  for (int32_t r = 0; r < 3; ++r) {
    const int32_t next = (r + 1) % 3, last = (r + 2) % 3;
    auto &g = good[static_cast<std::size_t>(r)];
    auto &b = bad[static_cast<std::size_t>(r)];
    for (int step = 0; step < 2; ++step) {
      g.push_back(batch_of({receive_from(last, B, 4), send_to(next, A, 4)}, "step"));
      b.push_back(batch_of({receive_from(last, B, 4)}, "wait"));
      b.push_back(batch_of({send_to(next, A, 4)}, "go"));
    }
  }
  EXPECT_EQ(replay(good), "");
  expect_part(replay(bad), "rank 2 is stuck in batch 0, wait: rank 1 does not send;");
}

TEST(ReplayTest, BatchesNeedNotLineUp) {
  EXPECT_EQ(replay({{batch_of({send_to(1, A, 1), send_to(1, A, 2)}, "two at once")},
                    {batch_of({receive_from(0, B, 1)}, "one"), batch_of({}, "nothing"),
                     batch_of({receive_from(0, B, 2)}, "another")}}),
            "");
}

/* Fault b2: zero bytes skipped on one side only. */
TEST(ReplayTest, ZeroBytesCount) {
  EXPECT_EQ(replay({{batch_of({send_to(1, nullptr, 0)}, "s")},
                    {batch_of({receive_from(0, nullptr, 0)}, "r")}}),
            "");
  expect_part(replay({{batch_of({send_to(1, nullptr, 0)}, "s")}, {}}),
              "rank 0 is stuck in batch 0, s: rank 1 does not receive;");
}

/* Fault b3. */
TEST(ReplayTest, SizesAndCheckWords) {
  expect_part(
      replay({{batch_of({send_to(1, A, 8)}, "s")}, {batch_of({receive_from(0, B, 7)}, "r")}}),
      "rank 0 sends 8 bytes in s, rank 1 receives 7 in r");
  expect_part(
      replay({{batch_of({send_to(1, A, 8)}, "s", 1)}, {batch_of({receive_from(0, B, 8)}, "r", 2)}}),
      "check words differ: rank 0 in s, rank 1 in r");
  EXPECT_EQ(
      replay({{batch_of({send_to(1, A, 8)}, "s", 1)}, {batch_of({receive_from(0, B, 8)}, "r", 0)}}),
      "");
}

TEST(ReplayTest, OrderBetweenTwoRanksIsTheOrderOfTables) {
  EXPECT_EQ(replay({{batch_of({send_to(1, A, 1), send_to(1, A, 2)}, "s")},
                    {batch_of({receive_from(0, B, 1), receive_from(0, B + 1, 2)}, "r")}}),
            "");
  EXPECT_NE(replay({{batch_of({send_to(1, A, 1), send_to(1, A, 2)}, "s")},
                    {batch_of({receive_from(0, B, 2), receive_from(0, B + 2, 1)}, "r")}}),
            "");
}

TEST(ReplayTest, BuffersOfOneBatchMustNotOverlapWhereOneIsWritten) {
  const std::string in_place =
      replay({{batch_of({send_to(1, A, 8), receive_from(1, A + 4, 8)}, "swap")},
              {batch_of({send_to(0, B, 8), receive_from(0, B + 8, 8)}, "swap")}});
  EXPECT_EQ(in_place, "rank 0, swap: transfer 1 receives into the buffer of transfer 0\n");
  EXPECT_EQ(replay({{batch_of({receive_from(1, A, 8), receive_from(1, A + 7, 8)}, "r")},
                    {batch_of({send_to(0, B, 8), send_to(0, B, 8)}, "s")}}),
            "rank 0, r: transfer 0 receives into the buffer of transfer 1\n");
}

TEST(ReplayTest, BadPeers) {
  expect_part(replay({{batch_of({send_to(0, A, 8)}, "self")}}), "bad peer 0");
  expect_part(replay({{batch_of({send_to(1, A, 8)}, "far")}}), "bad peer 1");
}

} // namespace
