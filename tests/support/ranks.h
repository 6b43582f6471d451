/* SPDX-License-Identifier: MIT */
/*
 * ranks.h: runs a function on W ranks that are threads of the test, each with a context, a host
 * backend (C loops), a queue, an event, the threads transport and its control plane; or, with
 * options.cuda, the CUDA backend on the host double and the transport of ranks that share a device,
 * or, with options.nccl.on, ranks with a device each and the transport over NCCL.
 *
 *   test::RanksOptions options(4);                           // 4 ranks, deadline 20 s
 *   test::RanksResult result = test::run_ranks(options, [](test::Rank &rank) {
 *     MFSDP_TRY(mfsdp_transport_submit(&rank.context, &rank.transport, rank.queue, &batch));
 *     return rank.finish();                                  // waits for the queue
 *   });
 *   EXPECT_TRUE(result.ok()) << result.text();
 *
 * The function returns its status; the context's error is kept with it. After it, everything is
 * destroyed again, and what that finds wrong (a leak, a write beyond a block, a batch in flight) is
 * a failure of the rank, also when the function failed. A rank that has not returned after
 * join_timeout_us is named, the world is poisoned, and if that does not wake it the test program
 * aborts: a hang is never a pass.
 */
#ifndef MFSDP_TESTS_SUPPORT_RANKS_H
#define MFSDP_TESTS_SUPPORT_RANKS_H

#include "fault_allocator.h"
#include "tests/cudasim/rig.h"

#include "mfsdp/host/backend_host.h"
#include "mfsdp/host/transport_threads.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace test {

/* The milliseconds of "... waited N ms ...", or -1: on a busy machine N may exceed the deadline. */
inline long waited_ms(const std::string &message) {
  const std::string word = " waited ";
  const std::size_t at = message.find(word);
  return at == std::string::npos ? -1 : std::atol(message.c_str() + at + word.size());
}

struct Rank {
  int32_t rank = -1, world = 0;
  FaultAllocator *memory = nullptr; /* behind the context */
  mfsdp_context context;
  mfsdp_host_backend *host = nullptr; /* or cuda */
  void *cuda = nullptr;
  const mfsdp_backend *backend = nullptr;
  mfsdp_queue *queue = nullptr;
  mfsdp_event *event = nullptr;
  mfsdp_transport transport;
  mfsdp_control control;
  mfsdp_threads_world *shared = nullptr; /* of the control plane, and of the threads transport */
  void *device_world = nullptr;          /* of the transport over CUDA */
  bool nccl = false;                     /* which of the two that is */
  int64_t timeout_us = 0;                /* of finish */

  /* Waits for all that was enqueued on `queue`; the queue's error, if it failed. */
  mfsdp_status finish() {
    MFSDP_TRY(backend->ops->event_record(backend->self, queue, event));
    return backend->ops->event_wait(backend->self, &context, event, timeout_us);
  }
  mfsdp_status submit(const std::vector<mfsdp_xfer> &xfers, const char *label, uint64_t check = 0) {
    mfsdp_batch batch = mfsdp_batch_default();
    batch.xfers = xfers.data();
    batch.xfer_count = static_cast<int32_t>(xfers.size());
    batch.traffic = MFSDP_TRAFFIC_EXPORT;
    batch.label = label;
    batch.check = check;
    return mfsdp_transport_submit(&context, &transport, queue, &batch);
  }
  /* Copies of DEVICE memory, which is no host's to touch; waits for the queue. */
  template <class T> mfsdp_status read(const void *data, std::size_t count, std::vector<T> *out) {
    out->resize(count);
    MFSDP_TRY(backend->ops->copy(backend->self, queue, out->data(), MFSDP_SPACE_HOST, data,
                                 MFSDP_SPACE_DEVICE, count * sizeof(T)));
    return finish();
  }
  mfsdp_status barrier() {
    return control.ops->allgather(control.self, &context, nullptr, 0, nullptr, control.deadline_us);
  }
};

inline mfsdp_xfer send_to(int32_t peer, const void *src, std::size_t nbytes) {
  mfsdp_xfer x;
  std::memset(&x, 0, sizeof(x));
  x.src = src;
  x.nbytes = nbytes;
  x.peer = peer;
  x.is_send = 1;
  return x;
}

inline mfsdp_xfer receive_from(int32_t peer, void *dst, std::size_t nbytes) {
  mfsdp_xfer x;
  std::memset(&x, 0, sizeof(x));
  x.dst = dst;
  x.nbytes = nbytes;
  x.peer = peer;
  return x;
}

struct RanksOptions {
  explicit RanksOptions(int32_t world_size) : context(mfsdp_context_desc_default()) {
    world = mfsdp_threads_world_desc_default();
    world.world = world_size;
    world.deadline_us = 20 * 1000000;
    host = mfsdp_host_backend_desc_default();
  }
  mfsdp_threads_world_desc world;
  mfsdp_context_desc context; /* rank and allocator are set for each rank */
  mfsdp_host_backend_desc host;
  bool cuda = false; /* of `world` only size, deadline and control messages count then */
  NcclOptions nccl;  /* on: cuda too */
  int64_t join_timeout_us = 120 * 1000000LL;
  /* Called before anything of the rank is made, to make its nth allocation fail. */
  std::function<void(int32_t rank, FaultAllocator *memory)> before;
};

struct RankOutcome {
  mfsdp_status status = MFSDP_OK; /* of the function, or of what failed before it */
  mfsdp_error error = mfsdp_error_none();
  bool ran = false;      /* the function was called and returned */
  std::string set_up;    /* empty: the rank's objects were made */
  std::string tear_down; /* empty: all was given back, nothing was overwritten */
};

class RanksResult {
public:
  std::vector<RankOutcome> ranks;
  std::string world; /* empty: the shared part was made and given back */

  const RankOutcome &operator[](std::size_t rank) const { return ranks.at(rank); }
  /* Everything went well on every rank. */
  bool ok() const {
    for (const RankOutcome &r : ranks)
      if (r.status != MFSDP_OK) return false;
    return clean();
  }
  /* Nothing leaked and nothing was overwritten, whatever the functions returned. */
  bool clean() const {
    for (const RankOutcome &r : ranks)
      if (!r.tear_down.empty()) return false;
    return world.empty();
  }
  std::string text() const {
    std::string out = world;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const RankOutcome &o = ranks[r];
      if (o.status != MFSDP_OK)
        out += "rank " + std::to_string(r) + (o.ran ? ": " : " (set-up): ") +
               mfsdp_status_name(o.status) + ": " + o.error.message + "\n";
      if (!o.tear_down.empty())
        out += "rank " + std::to_string(r) + " after: " + o.tear_down + "\n";
    }
    return out.empty() ? "all ranks returned MFSDP_OK" : out;
  }
};

using RankFunction = std::function<mfsdp_status(Rank &)>;

namespace detail {

/* Counts ranks that have come to a point. */
struct Gate {
  std::mutex mutex;
  std::condition_variable all;
  std::vector<bool> done;
  std::size_t count = 0;

  explicit Gate(std::size_t ranks) : done(ranks, false) {}
  void arrive(int32_t rank) {
    std::lock_guard<std::mutex> lock(mutex);
    done[static_cast<std::size_t>(rank)] = true;
    ++count;
    all.notify_all();
  }
  bool wait(int64_t timeout_us) {
    std::unique_lock<std::mutex> lock(mutex);
    return all.wait_for(lock, std::chrono::microseconds(timeout_us),
                        [this] { return count == done.size(); });
  }
  std::string missing() {
    std::lock_guard<std::mutex> lock(mutex);
    std::string out;
    for (std::size_t r = 0; r < done.size(); ++r)
      if (!done[r]) out += " " + std::to_string(r);
    return out;
  }
};

inline mfsdp_status make_rank(const RanksOptions &options, Rank *rank) {
  if (options.cuda) {
    MFSDP_TRY(cuda_rig_create_on(&rank->context, options.nccl.on ? rank->rank : 0, &rank->cuda,
                                 &rank->backend));
  } else {
    MFSDP_TRY(mfsdp_host_backend_create(&rank->context, &options.host, &rank->host));
    rank->backend = mfsdp_host_backend_get(rank->host);
  }
  MFSDP_TRY(
      rank->backend->ops->queue_create(rank->backend->self, &rank->context, "test", &rank->queue));
  MFSDP_TRY(rank->backend->ops->event_create(rank->backend->self, &rank->context, &rank->event));
  MFSDP_TRY(mfsdp_threads_control_create(&rank->context, rank->shared, rank->rank, &rank->control));
  if (options.nccl.on)
    return nccl_rig_transport_create(&rank->context, rank->device_world, rank->rank, rank->cuda,
                                     &rank->control, &rank->transport);
  if (options.cuda)
    return cuda_rig_transport_create(&rank->context, rank->device_world, rank->rank, rank->cuda,
                                     &rank->transport);
  return mfsdp_threads_transport_create(&rank->context, rank->shared, rank->rank, rank->backend,
                                        &rank->transport);
}

/* Queue before transport: a failed queue may have skipped batches. */
inline std::string unmake_rank(Rank *rank, mfsdp_status status) {
  std::string out;
  if (rank->transport.self != nullptr && status != MFSDP_OK) {
    mfsdp_error why = *mfsdp_context_error(&rank->context);
    rank->transport.ops->poison(rank->transport.self, &why);
    if (rank->cuda != nullptr) mfsdp_threads_world_poison(rank->shared, &why); /* two worlds */
  }
  if (rank->backend != nullptr) {
    rank->backend->ops->queue_destroy(rank->backend->self, &rank->context, rank->queue);
    rank->backend->ops->event_destroy(rank->backend->self, &rank->context, rank->event);
  }
  if (rank->nccl)
    out += nccl_rig_transport_destroy(&rank->context, rank->device_world, rank->rank,
                                      &rank->transport);
  else if (rank->transport.self != nullptr &&
           rank->transport.ops->destroy(rank->transport.self, &rank->context) != MFSDP_OK)
    out += std::string(mfsdp_context_error(&rank->context)->message) + "\n";
  mfsdp_threads_control_destroy(&rank->control);
  if (mfsdp_host_backend_destroy(&rank->context, rank->host) != MFSDP_OK)
    out += std::string(mfsdp_context_error(&rank->context)->message) + "\n";
  if (cuda_rig_destroy(&rank->context, rank->cuda) != MFSDP_OK)
    out += std::string(mfsdp_context_error(&rank->context)->message) + "\n";
  if (mfsdp_context_destroy(&rank->context) != MFSDP_OK)
    out += std::string(mfsdp_context_error(&rank->context)->message) + "\n";
  if (rank->memory->live_count() != 0)
    out += std::to_string(rank->memory->live_count()) + " blocks leaked\n";
  return out + rank->memory->complaints();
}

inline void run_rank(const RanksOptions &options, mfsdp_threads_world *shared, void *device_world,
                     int32_t number, const RankFunction &function, Gate *ready, RankOutcome *out) {
  FaultAllocator memory;
  Rank rank;
  mfsdp_context_desc desc = options.context;
  std::memset(&rank.transport, 0, sizeof(rank.transport));
  std::memset(&rank.control, 0, sizeof(rank.control));
  if (options.before) options.before(number, &memory);
  rank.rank = number;
  rank.world = options.world.world;
  rank.memory = &memory;
  rank.shared = shared;
  rank.device_world = device_world;
  rank.nccl = options.nccl.on;
  rank.timeout_us = options.world.deadline_us + 10 * 1000000;
  desc.rank = number;
  desc.allocator = memory.allocator();
  out->status = mfsdp_context_init(&rank.context, &desc);
  if (out->status == MFSDP_OK) out->status = make_rank(options, &rank);
  ready->arrive(number);
  (void)ready->wait(options.join_timeout_us);
  if (out->status != MFSDP_OK) {
    out->set_up = mfsdp_context_error(&rank.context)->message;
  } else {
    try {
      out->status = function(rank);
    } catch (const std::exception &e) {
      out->status = MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "the test threw: %s", e.what());
    }
    out->ran = true;
  }
  if (out->status != MFSDP_OK) out->error = *mfsdp_context_error(&rank.context);
  out->tear_down = unmake_rank(&rank, out->status);
}

} // namespace detail

inline RanksResult run_ranks(const RanksOptions &options, const RankFunction &function) {
  RanksResult result;
  FaultAllocator memory;
  mfsdp_context context;
  mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_threads_world *shared = nullptr;
  void *device_world = nullptr;
  std::vector<std::thread> threads;
  desc.allocator = memory.allocator();
  if (mfsdp_context_init(&context, &desc) != MFSDP_OK ||
      mfsdp_threads_world_create(&context, &options.world, &shared) != MFSDP_OK ||
      (options.cuda && !options.nccl.on &&
       cuda_rig_world_create(&context, options.world.world, options.world.deadline_us,
                             &device_world) != MFSDP_OK) ||
      (options.nccl.on &&
       nccl_rig_world_create(&context, options.world.world, options.world.deadline_us, options.nccl,
                             &device_world) != MFSDP_OK)) {
    result.world = std::string(mfsdp_context_error(&context)->message) + "\n";
    return result;
  }
  result.ranks.resize(static_cast<std::size_t>(options.world.world));
  detail::Gate ready(result.ranks.size()), finish(result.ranks.size());
  for (int32_t r = 0; r < options.world.world; ++r)
    threads.emplace_back([&, r] {
      detail::run_rank(options, shared, device_world, r, function, &ready,
                       &result.ranks[static_cast<std::size_t>(r)]);
      finish.arrive(r);
    });
  if (!finish.wait(options.join_timeout_us)) {
    mfsdp_error why = mfsdp_error_none();
    result.world = "ranks that did not return in time:" + finish.missing() + "\n";
    (void)MFSDP_ERROR_SET(&why, MFSDP_E_TIMEOUT, -1, "the test gave up");
    mfsdp_threads_world_poison(shared, &why);
    if (!options.nccl.on) cuda_rig_world_poison(device_world, &why);
    if (!finish.wait(10 * 1000000)) {
      std::fprintf(stderr, "hung ranks:%s\n", finish.missing().c_str());
      std::abort();
    }
  }
  for (std::thread &thread : threads)
    thread.join();
  if (mfsdp_threads_world_destroy(&context, shared) != MFSDP_OK ||
      (options.nccl.on ? nccl_rig_world_destroy(&context, device_world)
                       : cuda_rig_world_destroy(&context, device_world)) != MFSDP_OK ||
      mfsdp_context_destroy(&context) != MFSDP_OK)
    result.world += std::string(mfsdp_context_error(&context)->message) + "\n";
  result.world += memory.complaints();
  if (options.cuda) result.world += cuda_rig_complaints();
  return result;
}

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_RANKS_H
