/* SPDX-License-Identifier: MIT */
/* NCCL of the double: ranks meet on their streams, and what they disagree about is named. */
#include "cudasim.h"
#include "detail.h"

#include "mfsdp/dtype.h"

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace cudasim {
namespace {

using Bytes = std::vector<char>;

struct Comm;

/* A send or a receive, or a rank's part of a collective. */
struct Item {
  enum Kind { kSend, kReceive, kBroadcast, kReduce } kind = kSend;
  const void *src = nullptr;
  void *dst = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclInt8;
  int peer = 0; /* or root */
  ncclRedOp_t op = ncclSum;
  uint64_t number = 0; /* of a collective in its communicator */
  /* while it runs */
  bool matched = false;
  std::unique_ptr<Bytes> data; /* of a send until it is taken, of a receive from then on */
};

/* The part of a group that one communicator has: one kernel. */
struct Group {
  std::shared_ptr<Comm> comm;
  cudaStream_t stream = nullptr;
  uint64_t number = 0; /* in its communicator */
  std::vector<std::unique_ptr<Item>> items;
};

/* Whoever holds the last reference frees; that they are ordered is hidden. */
template <class T> void forget(T *object) {
  Quiet quiet;
  delete object;
}

struct Flow { /* of one rank to another: first in, first out */
  std::deque<Item *> sends, receives;
};

struct Collective {
  std::map<int, Item *> parts;                       /* by rank, those that have come */
  std::map<int, std::shared_ptr<const Bytes>> bytes; /* what they brought */
  int gone = 0;
};

/* The ranks of one communicator. */
struct Clique {
  std::string name;
  int world = 0;
  std::vector<std::shared_ptr<Comm>> members; /* by rank; null: has not come */
  bool ready = false;
  std::string broken; /* ranks disagree: nothing moves any more */
  std::map<std::pair<int, int>, Flow> flows;
  std::map<uint64_t, Collective> collectives;
  std::set<std::pair<int, int>> sender_connects, receiver_connects;
  std::set<int> collective_connects;
  std::map<int, std::vector<int>> splits; /* rank: color, key */
  std::map<int, std::shared_ptr<Clique>> parts;
  int splits_taken = 0;
};

struct Comm {
  std::shared_ptr<Clique> clique;
  int rank = 0, device = 0;
  bool blocking = true;
  ncclResult_t async = ncclSuccess;
  std::string last_error;
  bool aborted = false, dead = false;
  uint64_t submitted = 0, done = 0, collectives = 0;
  Group *running = nullptr;
  /* Of a communicator that does not block: what a later poll finishes. */
  std::vector<std::shared_ptr<Group>> pending;
  int polls = 0;
  bool launching = false; /* by a poll, just now */
  char handed_over = 0;   /* an edge from who called to who polls */
  char ended_by = 0;      /* and from who aborts to what its kernels leave */
  int64_t delay_us = 0, fails_after = -1;
  std::map<void *, std::pair<uintptr_t, std::size_t>> registered;
};

struct Fault {
  NcclFault kind = NcclFault::kNone;
  int64_t after = 0, delay_us = 0;
};

struct Net {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<Clique>> cliques; /* of ids, until all have come */
  std::map<ncclComm_t, std::shared_ptr<Comm>> comms;
  std::map<int, Fault> faults;         /* by device */
  std::map<int, Comm *> running;       /* by device */
  std::map<uintptr_t, int> registered; /* by address: how often */
  int64_t stall_us = 60 * 1000000LL, next_id = 1, moved = 0;
  int polls = 2;
  uintptr_t next_registration = 1;
};

Net &net() { /* never destroyed: as the machine */
  static Net *n = new Net;
  return *n;
}

thread_local int group_depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local std::vector<std::shared_ptr<Group>> group;
thread_local std::string thread_error;

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
  case ncclInt8:
  case ncclUint8: return 1;
  case ncclFloat16:
  case ncclBfloat16: return 2;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32: return 4;
  case ncclInt64:
  case ncclUint64:
  case ncclFloat64: return 8;
  default: return 0;
  }
}

ncclResult_t fail(ncclResult_t result, const std::string &why) {
  thread_error = why;
  if (group_depth > 0 && group_error == ncclSuccess) group_error = result;
  return result;
}

std::string who(const Comm &c) {
  return "rank " + std::to_string(c.rank) + " of " + c.clique->name;
}

std::string what(const Item &item, const Comm &c) {
  const std::string bytes = std::to_string(item.count) + " of type " + std::to_string(item.type);
  switch (item.kind) {
  case Item::kSend: return "send " + bytes + " to rank " + std::to_string(item.peer);
  case Item::kReceive: return "receive " + bytes + " from rank " + std::to_string(item.peer);
  default:
    return std::string(item.kind == Item::kReduce ? "reduce " : "broadcast ") + bytes +
           " with root " + std::to_string(item.peer) + " as collective " +
           std::to_string(item.number) + " of " + std::to_string(c.clique->world) + " ranks";
  }
}

/* ---- all below with the lock, and hidden from the thread sanitizer ---- */

void set_async(Comm *c, ncclResult_t result, const std::string &why) {
  if (c->async != ncclSuccess && c->async != ncclInProgress) return;
  c->async = result;
  c->last_error = why;
}

/* Ranks disagree. On hardware they would hang, or overwrite memory. */
void break_clique(Clique *clique, const std::string &why) {
  if (!clique->broken.empty()) return;
  clique->broken = why;
  for (const std::shared_ptr<Comm> &c : clique->members)
    if (c != nullptr) set_async(c.get(), ncclInternalError, why);
  net().changed.notify_all();
}

std::shared_ptr<Comm> find(ncclComm_t handle) {
  const auto found = net().comms.find(handle);
  return found == net().comms.end() ? nullptr : found->second;
}

/* Ranks that must come before this item can end. */
std::vector<int> awaited(const Comm &c, const Item &item) {
  std::vector<int> out;
  if (item.matched) return out;
  if (item.kind == Item::kSend || item.kind == Item::kReceive) {
    out.push_back(item.peer);
    return out;
  }
  const auto found = c.clique->collectives.find(item.number);
  for (int r = 0; r < c.clique->world && found != c.clique->collectives.end(); ++r)
    if (found->second.parts.count(r) == 0) out.push_back(r);
  return out;
}

std::string waits_of(const Comm &c) {
  std::string out;
  if (c.running == nullptr) return out;
  for (const auto &item : c.running->items)
    if (!awaited(c, *item).empty())
      out += (out.empty() ? "" : ", ") + std::string("waits to ") + what(*item, c);
  return out;
}

/* Does a chain of waits lead from `from` back to `to`? Operations of a communicator run one after
 * the other, so nobody on such a circle can go on. */
bool reaches(Clique *clique, int from, int to, std::set<int> *seen, std::vector<int> *path) {
  const std::shared_ptr<Comm> &c = clique->members[static_cast<std::size_t>(from)];
  if (c == nullptr || c->running == nullptr || c->aborted || !seen->insert(from).second)
    return false;
  path->push_back(from);
  for (const auto &item : c->running->items)
    for (const int next : awaited(*c, *item))
      if (next == to || reaches(clique, next, to, seen, path)) return true;
  path->pop_back();
  return false;
}

std::string describe(const Clique &clique, const std::vector<int> &ranks) {
  std::string out;
  for (const int r : ranks) {
    const std::shared_ptr<Comm> &c = clique.members[static_cast<std::size_t>(r)];
    const std::string waits = c == nullptr ? "" : waits_of(*c);
    out += (out.empty() ? "" : "; ") + std::string("rank ") + std::to_string(r) + " " +
           (c == nullptr      ? "has not come"
            : c->dead         ? "is dead"
            : c->aborted      ? "has aborted"
            : !waits.empty()  ? waits
            : c->running != 0 ? "runs"
                              : "is in no operation");
  }
  return out;
}

void find_deadlock(Comm *c) {
  std::set<int> seen;
  std::vector<int> path;
  if (!reaches(c->clique.get(), c->rank, c->rank, &seen, &path)) return;
  const std::string why =
      "nccl: deadlock on " + c->clique->name + ": " + describe(*c->clique, path);
  complain(why);
  break_clique(c->clique.get(), why);
}

void match(Clique *clique, int from, int to) {
  Flow &flow = clique->flows[{from, to}];
  while (!flow.sends.empty() && !flow.receives.empty()) {
    Item *send = flow.sends.front(), *receive = flow.receives.front();
    if (send->count * size_of(send->type) != receive->count * size_of(receive->type) ||
        send->type != receive->type) {
      const std::string why = "nccl: mismatch on " + clique->name + ": rank " +
                              std::to_string(from) + " sends " + std::to_string(send->count) +
                              " of type " + std::to_string(send->type) + ", rank " +
                              std::to_string(to) + " receives " + std::to_string(receive->count) +
                              " of type " + std::to_string(receive->type);
      complain(why);
      break_clique(clique, why);
      return;
    }
    receive->data = std::move(send->data);
    send->matched = receive->matched = true;
    flow.sends.pop_front();
    flow.receives.pop_front();
    ++net().moved;
  }
}

void join_collective(Comm *c, Item *item, std::shared_ptr<const Bytes> bytes) {
  Collective &all = c->clique->collectives[item->number];
  if (!all.parts.empty()) {
    const auto first = all.parts.begin();
    const Item &other = *first->second;
    if (other.kind != item->kind || other.count != item->count || other.type != item->type ||
        other.peer != item->peer || other.op != item->op) {
      const std::string why = "nccl: mismatch on " + c->clique->name + ": rank " +
                              std::to_string(first->first) + " is in " + what(other, *c) +
                              ", rank " + std::to_string(c->rank) + " in " + what(*item, *c);
      complain(why);
      break_clique(c->clique.get(), why);
      return;
    }
  }
  all.parts[c->rank] = item;
  all.bytes[c->rank] = std::move(bytes);
  if (static_cast<int>(all.parts.size()) < c->clique->world) return;
  for (const auto &part : all.parts)
    part.second->matched = true;
  ++net().moved;
}

/* What was not matched is taken back: nobody may look at it any more. */
void withdraw(Comm *c, Group *g) {
  c->running = nullptr;
  for (const auto &item : g->items) {
    if (item->kind == Item::kSend || item->kind == Item::kReceive) {
      const bool send = item->kind == Item::kSend;
      Flow &flow = c->clique->flows[send ? std::make_pair(c->rank, item->peer)
                                         : std::make_pair(item->peer, c->rank)];
      std::deque<Item *> &queue = send ? flow.sends : flow.receives;
      for (auto at = queue.begin(); at != queue.end(); ++at)
        if (*at == item.get()) {
          queue.erase(at);
          break;
        }
    } else if (!item->matched) {
      const auto found = c->clique->collectives.find(item->number);
      if (found == c->clique->collectives.end()) continue;
      found->second.parts.erase(c->rank);
      found->second.bytes.erase(c->rank);
    }
  }
}

bool all_matched(const Group &g) {
  for (const auto &item : g.items)
    if (!item->matched) return false;
  return true;
}

/* Until `ready`, or until this communicator ends. Complains if nothing moves for the stall limit.
 * */
template <class Ready> bool wait_for(std::unique_lock<std::mutex> *lock, Comm *c, Ready ready) {
  Net &n = net();
  int64_t seen = n.moved;
  auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(n.stall_us);
  while (!ready()) {
    if (c->aborted || !c->clique->broken.empty()) return false;
    if (n.changed.wait_until(*lock, deadline) != std::cv_status::timeout) continue;
    if (n.moved != seen) {
      seen = n.moved;
      deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(n.stall_us);
      continue;
    }
    if (ready()) return true;
    std::vector<int> all;
    for (int r = 0; r < c->clique->world; ++r)
      all.push_back(r);
    const std::string why = "nccl: nothing moves on " + c->clique->name + ", seen by rank " +
                            std::to_string(c->rank) + ": " + describe(*c->clique, all);
    complain(why);
    break_clique(c->clique.get(), why);
    return false;
  }
  return true;
}

/* ---- one group, on its stream's thread ---- */

template <class T, class Load, class Store>
void add_up(const std::vector<const Bytes *> &terms, Bytes *out, Load load, Store store) {
  const std::size_t count = out->size() / sizeof(T);
  for (std::size_t i = 0; i < count; ++i) {
    T x;
    std::memcpy(&x, terms[0]->data() + i * sizeof(T), sizeof(T));
    for (std::size_t t = 1; t < terms.size(); ++t) { /* rounded at every addition */
      T y;
      std::memcpy(&y, terms[t]->data() + i * sizeof(T), sizeof(T));
      x = store(load(x) + load(y));
    }
    std::memcpy(out->data() + i * sizeof(T), &x, sizeof(T));
  }
}

/* In the order of a ring that ends at the root: not the order of ranks, which nobody may rely on.
 * */
Bytes sum(const Item &item, int world, std::map<int, std::shared_ptr<const Bytes>> *bytes) {
  std::vector<const Bytes *> terms;
  Bytes out(item.count * size_of(item.type));
  for (int k = 1; k <= world; ++k)
    terms.push_back((*bytes)[(item.peer + k) % world].get());
  const auto same_f = [](float x) { return x; };
  const auto same_d = [](double x) { return x; };
  if (item.type == ncclFloat32)
    add_up<float>(terms, &out, same_f, same_f);
  else if (item.type == ncclFloat64)
    add_up<double>(terms, &out, same_d, same_d);
  else if (item.type == ncclBfloat16)
    add_up<uint16_t>(terms, &out, mfsdp_f32_from_bf16, mfsdp_bf16_from_f32);
  else if (item.type == ncclFloat16)
    add_up<uint16_t>(terms, &out, mfsdp_f32_from_f16, mfsdp_f16_from_f32);
  else
    complain("nccl: a sum of a type that the double does not add");
  return out;
}

/* What a rank brings is copied on its own stream, and is taken from the copy by those that receive
 * it: data goes one way, and so do the edges that the thread sanitizer sees. */
std::unique_ptr<Bytes> stage(const Item &item) {
  const char *src = static_cast<const char *>(item.src);
  std::unique_ptr<Bytes> out(new Bytes(item.count * size_of(item.type)));
  if (!out->empty()) std::memcpy(out->data(), src, out->size());
  release(out.get());
  return out;
}

void deliver_collective(Comm *c, Item *item) {
  std::map<int, std::shared_ptr<const Bytes>> bytes;
  const std::size_t nbytes = item->count * size_of(item->type);
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(net().mutex);
    Collective &all = c->clique->collectives[item->number];
    bytes = all.bytes;
    if (++all.gone == c->clique->world) c->clique->collectives.erase(item->number);
  }
  if (item->kind == Item::kBroadcast) {
    const Bytes *from = bytes[item->peer].get();
    if (c->rank != item->peer) acquire(const_cast<Bytes *>(from));
    if (nbytes > 0 && item->dst != item->src) std::memcpy(item->dst, from->data(), nbytes);
    if (nbytes > 0 && item->dst == item->src && c->rank != item->peer)
      std::memcpy(item->dst, from->data(), nbytes);
  } else if (c->rank == item->peer) {
    for (const auto &part : bytes)
      acquire(const_cast<Bytes *>(part.second.get()));
    const Bytes total = sum(*item, c->clique->world, &bytes);
    if (nbytes > 0) std::memcpy(item->dst, total.data(), nbytes);
  }
  Quiet quiet; /* the last one frees what others have read */
  bytes.clear();
}

/* A kernel that nobody answers, until it is aborted; at last the stream goes on. */
void hang(std::unique_lock<std::mutex> *lock, Comm *c) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::microseconds(net().stall_us);
  while (!c->aborted && net().changed.wait_until(*lock, deadline) != std::cv_status::timeout) {
  }
}

/* Its turn has come: what is to happen to it. False: nothing of it may be seen. */
bool begin(std::unique_lock<std::mutex> *lock, Comm *c, Group *g) {
  Net &n = net();
  const Fault fault = n.faults[c->device];
  while (c->done != g->number && !c->aborted)
    n.changed.wait(*lock); /* another stream's work of this communicator comes first */
  if (fault.kind == NcclFault::kDelay && static_cast<int64_t>(g->number) >= fault.after) {
    lock->unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(fault.delay_us));
    lock->lock();
  }
  if (static_cast<int64_t>(g->number) >= fault.after &&
      (fault.kind == NcclFault::kKill || fault.kind == NcclFault::kKillSeen)) {
    c->dead = true;
    for (const std::shared_ptr<Comm> &other : c->clique->members)
      if (fault.kind == NcclFault::kKillSeen && other != nullptr && other.get() != c)
        set_async(other.get(), ncclRemoteError, "a remote process has exited (the double)");
    n.changed.notify_all();
  }
  if (fault.kind == NcclFault::kFail && static_cast<int64_t>(g->number) >= fault.after) {
    set_async(c, ncclSystemError, "the network failed (the double)");
    hang(lock, c);
    return false;
  }
  if (!c->clique->broken.empty() && !c->dead) hang(lock, c);
  if (c->dead || c->aborted || !c->clique->broken.empty()) return false;
  Comm *&running = n.running[c->device];
  if (running != nullptr && running != c)
    complain("nccl: " + who(*c) + " runs on device " + std::to_string(c->device) + " while rank " +
             std::to_string(running->rank) + " of " + running->clique->name +
             " does: two communicators of a device at once may deadlock");
  running = c;
  return true;
}

void finish(Comm *c, Group *g) {
  Net &n = net();
  if (n.running[c->device] == c) n.running[c->device] = nullptr;
  if (c->running == g) c->running = nullptr;
  ++c->done;
  n.changed.notify_all();
}

void post(Comm *c, Item *item, std::unique_ptr<Bytes> data) {
  Clique *clique = c->clique.get();
  switch (item->kind) {
  case Item::kSend:
    item->data = std::move(data);
    clique->flows[{c->rank, item->peer}].sends.push_back(item);
    match(clique, c->rank, item->peer);
    break;
  case Item::kReceive:
    clique->flows[{item->peer, c->rank}].receives.push_back(item);
    match(clique, item->peer, c->rank);
    break;
  default: join_collective(c, item, std::shared_ptr<const Bytes>(std::move(data)));
  }
}

/* Posts everything and waits until all of it has met its other side. */
bool meet(Comm *c, Group *g, std::vector<std::unique_ptr<Bytes>> *staged) {
  Quiet quiet;
  std::unique_lock<std::mutex> lock(net().mutex);
  for (std::size_t i = 0; i < g->items.size() && c->clique->broken.empty(); ++i)
    post(c, g->items[i].get(), std::move((*staged)[i]));
  c->running = g;
  net().changed.notify_all();
  if (!all_matched(*g)) find_deadlock(c);
  const bool met = wait_for(&lock, c, [g] { return all_matched(*g); });
  if (met) return true;
  withdraw(c, g);
  hang(&lock, c);
  return false;
}

void run(const std::shared_ptr<Group> &g) {
  Comm *c = g->comm.get(); /* counting references would be an edge */
  bool runs;
  {
    Quiet quiet;
    std::unique_lock<std::mutex> lock(net().mutex);
    runs = begin(&lock, c, g.get());
  }
  if (runs) {
    std::vector<std::unique_ptr<Bytes>> staged;
    for (const auto &item : g->items)
      staged.push_back(item->src == nullptr || item->kind == Item::kReceive ||
                               (item->kind == Item::kBroadcast && item->peer != c->rank)
                           ? nullptr
                           : stage(*item));
    if (meet(c, g.get(), &staged))
      for (const auto &item : g->items) {
        if (item->kind == Item::kReceive) {
          acquire(item->data.get());
          if (!item->data->empty()) std::memcpy(item->dst, item->data->data(), item->data->size());
          item->data.reset();
        } else if (item->kind != Item::kSend) {
          deliver_collective(c, item.get());
        }
      }
  }
  bool aborted;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(net().mutex);
    aborted = c->aborted;
  }
  if (aborted) acquire(&c->ended_by);
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  finish(c, g.get());
}

/* ---- launching ---- */

/* The first message between two ranks makes a connection, for which both must have come. */
bool connected(Comm *c, const Group &g, bool announce) {
  Clique *clique = c->clique.get();
  bool all = true;
  for (const auto &item : g.items) {
    if (item->kind == Item::kBroadcast || item->kind == Item::kReduce) {
      if (announce) clique->collective_connects.insert(c->rank);
      all = all && static_cast<int>(clique->collective_connects.size()) == clique->world;
      continue;
    }
    const bool send = item->kind == Item::kSend;
    const std::pair<int, int> pair =
        send ? std::make_pair(c->rank, item->peer) : std::make_pair(item->peer, c->rank);
    if (announce) (send ? clique->sender_connects : clique->receiver_connects).insert(pair);
    all = all && clique->sender_connects.count(pair) != 0 &&
          clique->receiver_connects.count(pair) != 0;
  }
  return all;
}

ncclResult_t launch(const std::shared_ptr<Group> &g) {
  const cudaError_t error = enqueue(g->stream, [g] { run(g); });
  return error == cudaSuccess ? ncclSuccess
                              : fail(ncclUnhandledCudaError, "the stream took no kernel");
}

ncclResult_t launch_pending(Comm *c) {
  std::vector<std::shared_ptr<Group>> pending;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(net().mutex);
    pending.swap(c->pending);
  }
  acquire(&c->handed_over);
  ncclResult_t result = ncclSuccess;
  for (const std::shared_ptr<Group> &g : pending)
    if (result == ncclSuccess) result = launch(g);
  Quiet quiet; /* the last one to let go of a group frees it */
  pending.clear();
  return result;
}

/* A group of a communicator at the end of ncclGroupEnd. */
ncclResult_t submit(const std::shared_ptr<Group> &g) {
  Comm *c = g->comm.get();
  release(&c->handed_over);
  {
    Quiet quiet;
    std::unique_lock<std::mutex> lock(net().mutex);
    if (c->async != ncclSuccess) {
      if (c->async == ncclInProgress)
        complain("nccl: " + who(*c) + " was used while an earlier call is in progress");
      return fail(c->async == ncclInProgress ? ncclInvalidUsage : c->async,
                  c->last_error.empty() ? "the communicator has failed" : c->last_error);
    }
    g->number = c->submitted++;
    for (const auto &item : g->items)
      if (item->kind == Item::kBroadcast || item->kind == Item::kReduce)
        item->number = c->collectives++;
    (void)connected(c, *g, true);
    ++net().moved;
    net().changed.notify_all();
    if (!c->blocking) {
      c->pending.push_back(g);
      c->async = ncclInProgress;
      c->polls = net().polls;
      return ncclInProgress;
    }
    if (!c->dead && !wait_for(&lock, c, [c, &g] { return connected(c, *g, false); })) {
      ++c->done; /* it will never run */
      return fail(ncclInternalError, "no connection");
    }
  }
  return launch(g);
}

ncclResult_t end_group() {
  std::vector<std::shared_ptr<Group>> groups;
  ncclResult_t result = group_error;
  groups.swap(group);
  group_error = ncclSuccess;
  for (const std::shared_ptr<Group> &g : groups) {
    if (result != ncclSuccess && result != ncclInProgress) break;
    const ncclResult_t one = submit(g);
    if (one != ncclSuccess) result = one;
  }
  Quiet quiet; /* as above */
  groups.clear();
  return result;
}

/* The end of a buffer must lie in the same allocation. */
bool buffer_fits(const char *call, const void *data, std::size_t count, ncclDataType_t type) {
  return in_device(call, data, count * size_of(type));
}

ncclResult_t check(const char *call, ncclComm_t handle, cudaStream_t stream, const Item &item,
                   std::shared_ptr<Comm> *out) {
  int device = -1;
  std::shared_ptr<Comm> c;
  if (delivers_fault()) return fail(ncclSystemError, std::string(call) + ": a planted fault");
  if (host_function_runs()) {
    complain("a host function called NCCL");
    return fail(ncclInvalidUsage, "in a host function");
  }
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(net().mutex);
    c = find(handle);
  }
  if (c == nullptr) {
    complain(std::string(call) + ": a communicator that does not exist");
    return fail(ncclInvalidArgument, std::string(call) + ": no such communicator");
  }
  if (item.peer < 0 || item.peer >= c->clique->world || size_of(item.type) == 0)
    return fail(ncclInvalidArgument, std::string(call) + ": peer, root or type out of range");
  if (!device_of(stream, &device) || device != c->device) {
    complain(std::string(call) + ": the stream is not of the communicator's device");
    return fail(ncclInvalidUsage, std::string(call) + ": another device's stream");
  }
  if (captures(stream)) {
    complain(std::string(call) + ": captured, which the double cannot");
    return fail(ncclInvalidUsage, "captured");
  }
  *out = c;
  return ncclSuccess;
}

/* Adds an operation to the thread's group. Alone it is a group of one. */
ncclResult_t add(const char *call, ncclComm_t handle, cudaStream_t stream,
                 std::unique_ptr<Item> item) {
  std::shared_ptr<Comm> c;
  const ncclResult_t checked = check(call, handle, stream, *item, &c);
  if (checked != ncclSuccess) return checked;
  std::shared_ptr<Group> g;
  for (const std::shared_ptr<Group> &known : group)
    if (known->comm == c) g = known;
  if (g == nullptr) {
    g.reset(new Group, forget<Group>);
    g->comm = c;
    g->stream = stream;
    group.push_back(g);
  }
  if (g->stream != stream) complain(std::string(call) + ": two streams in one group");
  g->items.push_back(std::move(item));
  return group_depth > 0 ? ncclSuccess : end_group();
}

std::unique_ptr<Item> make(Item::Kind kind, const void *src, void *dst, std::size_t count,
                           ncclDataType_t type, int peer) {
  std::unique_ptr<Item> item(new Item);
  item->kind = kind;
  item->src = src;
  item->dst = dst;
  item->count = count;
  item->type = type;
  item->peer = peer;
  return item;
}

/* ---- communicators ---- */

/* With the lock: all have come. */
void open_clique(Clique *clique) {
  std::string wrong;
  for (std::size_t a = 0; a < clique->members.size(); ++a)
    for (std::size_t b = a + 1; b < clique->members.size(); ++b)
      if (clique->members[a]->device == clique->members[b]->device && wrong.empty())
        wrong = "Duplicate GPU detected: rank " + std::to_string(a) + " and rank " +
                std::to_string(b) + " both on device " + std::to_string(clique->members[a]->device);
  clique->ready = true;
  for (const std::shared_ptr<Comm> &c : clique->members) {
    if (!wrong.empty()) set_async(c.get(), ncclInvalidUsage, wrong);
  }
  if (!wrong.empty()) clique->broken = wrong;
  net().changed.notify_all();
}

/* With the lock: takes a place. */
ncclResult_t enter(const std::shared_ptr<Clique> &clique, int rank, bool blocking, int device,
                   ncclComm_t *out) {
  const std::size_t place = static_cast<std::size_t>(rank);
  std::shared_ptr<Comm> c(new Comm, forget<Comm>);
  if (clique->members[place] != nullptr)
    return fail(ncclInvalidUsage,
                "rank " + std::to_string(rank) + " has come to " + clique->name + " twice");
  c->clique = clique;
  c->rank = rank;
  c->device = device;
  c->blocking = blocking;
  c->async = ncclInProgress;
  c->polls = net().polls;
  clique->members[place] = c;
  *out = reinterpret_cast<ncclComm_t>(c.get());
  net().comms[*out] = c;
  ++net().moved;
  net().changed.notify_all();
  for (const std::shared_ptr<Comm> &member : clique->members)
    if (member == nullptr) return ncclSuccess;
  open_clique(clique.get());
  return ncclSuccess;
}

ncclResult_t settle_entry(std::unique_lock<std::mutex> *lock, const std::shared_ptr<Comm> &c) {
  if (!c->blocking) return ncclInProgress;
  const bool came = wait_for(lock, c.get(), [&c] { return c->clique->ready; });
  if (came && c->async == ncclInProgress) c->async = ncclSuccess;
  return came && c->async == ncclSuccess ? ncclSuccess : fail(c->async, c->last_error);
}

ncclResult_t init(ncclComm_t *out, int world, const ncclUniqueId &id, int rank, bool blocking) {
  const int device = current_device_now();
  if (delivers_fault()) return fail(ncclSystemError, "ncclCommInitRank: a planted fault");
  if (out == nullptr || world < 1 || rank < 0 || rank >= world)
    return fail(ncclInvalidArgument, "ncclCommInitRank: rank or nranks out of range");
  Quiet quiet;
  std::unique_lock<std::mutex> lock(net().mutex);
  const std::string key(id.internal, sizeof(id.internal));
  std::shared_ptr<Clique> &place = net().cliques[key];
  if (place == nullptr) {
    place = std::make_shared<Clique>();
    place->name = "communicator " + std::string(id.internal);
    place->world = world;
    place->members.resize(static_cast<std::size_t>(world));
  }
  const std::shared_ptr<Clique> clique = place;
  if (clique->world != world)
    return fail(ncclInvalidArgument, "ncclCommInitRank: rank " + std::to_string(rank) + " wants " +
                                         std::to_string(world) + " ranks, others " +
                                         std::to_string(clique->world));
  const ncclResult_t entered = enter(clique, rank, blocking, device, out);
  if (entered != ncclSuccess) return entered;
  if (clique->ready) net().cliques.erase(key);
  return settle_entry(&lock, find(*out));
}

/* With the lock. */
void leave(ncclComm_t handle, const std::shared_ptr<Comm> &c) {
  for (const auto &r : c->registered)
    if (--net().registered[r.second.first] == 0) net().registered.erase(r.second.first);
  if (!c->registered.empty() && !c->aborted)
    complain("nccl: " + who(*c) + " was destroyed with registered buffers");
  c->registered.clear();
  net().comms.erase(handle);
  for (std::shared_ptr<Comm> &member : c->clique->members)
    if (member == c) member.reset();
  net().changed.notify_all();
}

/* Work that the streams have must end first. */
bool drain(std::unique_lock<std::mutex> *lock, Comm *c, const char *call) {
  Net &n = net();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(n.stall_us);
  while (c->done < c->submitted)
    if (n.changed.wait_until(*lock, deadline) == std::cv_status::timeout &&
        c->done < c->submitted) {
      complain(std::string("nccl: ") + call + " of " + who(*c) +
               " waits for work that stands behind other work of its stream");
      return false;
    }
  return true;
}

} // namespace

/* ---- for tests and the other parts ---- */

void nccl_fault(int device, NcclFault kind, int64_t after, int64_t delay_us) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  Fault &fault = net().faults[device];
  fault.kind = kind;
  fault.after = after;
  fault.delay_us = delay_us;
}

void nccl_reset() {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  net().faults.clear();
  net().stall_us = 60 * 1000000LL;
  net().polls = 2;
}

void nccl_set_stall_us(int64_t stall_us) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  net().stall_us = stall_us;
}

void nccl_set_polls(int polls) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  net().polls = polls;
}

int64_t nccl_communicators() {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  return static_cast<int64_t>(net().comms.size());
}

std::size_t nccl_registrations() {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  return net().registered.size();
}

bool nccl_holds(const void *first, std::size_t nbytes) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  const uintptr_t at = reinterpret_cast<uintptr_t>(first);
  const auto found = net().registered.lower_bound(at);
  return found != net().registered.end() && found->first < at + nbytes;
}

} // namespace cudasim

using namespace cudasim;

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  if (delivers_fault()) return fail(ncclSystemError, "ncclGetUniqueId: a planted fault");
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  std::memset(id, 0, sizeof(*id));
  const std::string name = std::to_string(net().next_id++);
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  if (config != nullptr && config->magic != 0xcafebeef)
    return fail(ncclInvalidArgument, "ncclCommInitRankConfig: config is not initialized");
  return init(comm, nranks, id, rank, config == nullptr || config->blocking != 0);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
  return init(comm, nranks, id, rank, true);
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config) {
  if (delivers_fault()) return fail(ncclSystemError, "ncclCommSplit: a planted fault");
  Quiet quiet;
  std::unique_lock<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr) return fail(ncclInvalidArgument, "ncclCommSplit: no such communicator");
  Clique *clique = c->clique.get();
  *out = nullptr;
  if (c->async != ncclSuccess) return fail(ncclInvalidUsage, "ncclCommSplit: not ready");
  clique->splits[c->rank] = {color, key};
  ++net().moved;
  net().changed.notify_all();
  if (!wait_for(&lock, c.get(),
                [clique] { return static_cast<int>(clique->splits.size()) == clique->world; }))
    return fail(ncclInternalError, "ncclCommSplit: a rank has not come");
  std::vector<std::pair<int, int>> order; /* (key, rank) */
  for (const auto &split : clique->splits)
    if (split.second[0] == color) order.push_back({split.second[1], split.first});
  std::sort(order.begin(), order.end());
  int rank = 0;
  while (order[static_cast<std::size_t>(rank)].second != c->rank)
    ++rank;
  std::shared_ptr<Clique> part = clique->parts[color];
  if (part == nullptr) {
    part = std::make_shared<Clique>();
    part->name = clique->name + "/" + std::to_string(color);
    part->world = static_cast<int>(order.size());
    part->members.resize(order.size());
    clique->parts[color] = part;
  }
  if (++clique->splits_taken == clique->world) { /* the next split starts anew */
    clique->splits.clear();
    clique->parts.clear();
    clique->splits_taken = 0;
  } else if (!wait_for(&lock, c.get(), [clique] { return clique->splits_taken == 0; })) {
    return fail(ncclInternalError, "ncclCommSplit: a rank has gone");
  }
  net().changed.notify_all();
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  const bool blocking = config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT
                            ? c->blocking
                            : config->blocking != 0;
  const ncclResult_t entered = enter(part, rank, blocking, c->device, out);
  if (entered != ncclSuccess) return entered;
  return settle_entry(&lock, find(*out));
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  Quiet quiet;
  std::unique_lock<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr) return fail(ncclInvalidArgument, "ncclCommFinalize: no such communicator");
  if (c->blocking) return drain(&lock, c.get(), "ncclCommFinalize") ? ncclSuccess : ncclSystemError;
  if (c->async == ncclSuccess) {
    c->async = ncclInProgress;
    c->polls = net().polls;
  }
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  Quiet quiet;
  std::unique_lock<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr) {
    complain("ncclCommDestroy: a communicator that does not exist");
    return fail(ncclInvalidArgument, "ncclCommDestroy: no such communicator");
  }
  if (!c->pending.empty()) complain("ncclCommDestroy: " + who(*c) + " is in progress");
  const bool drained = drain(&lock, c.get(), "ncclCommDestroy");
  leave(handle, c);
  return drained ? ncclSuccess : ncclSystemError;
}

/* Kernels end, but what stands before them in their streams must end by itself. */
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  std::shared_ptr<Comm> c;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(net().mutex);
    c = find(handle);
  }
  if (c == nullptr) {
    complain("ncclCommAbort: a communicator that does not exist");
    return fail(ncclInvalidArgument, "ncclCommAbort: no such communicator");
  }
  release(&c->ended_by);
  Quiet quiet;
  const std::shared_ptr<Comm> last = std::move(c); /* it may be the last one to hold it */
  std::unique_lock<std::mutex> lock(net().mutex);
  last->aborted = true;
  last->done += last->pending.size(); /* they will never be launched */
  last->pending.clear();
  net().changed.notify_all();
  const bool drained = drain(&lock, last.get(), "ncclCommAbort");
  leave(handle, last);
  return drained ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int *count) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr || (!c->clique->ready && !c->blocking))
    return fail(ncclInvalidArgument, "ncclCommCount: not a communicator, or not ready");
  *count = c->clique->world;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int *rank) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr) return fail(ncclInvalidArgument, "ncclCommUserRank: no such communicator");
  *rank = c->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int *device) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr) return fail(ncclInvalidArgument, "ncclCommCuDevice: no such communicator");
  *device = c->device;
  return ncclSuccess;
}

/* Work of a communicator that does not block goes on here, a few polls later. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *result) {
  std::shared_ptr<Comm> c;
  bool launches = false;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(net().mutex);
    c = find(handle);
    if (c == nullptr) {
      complain("ncclCommGetAsyncError: a communicator that does not exist");
      return fail(ncclInvalidArgument, "ncclCommGetAsyncError: no such communicator");
    }
    bool ready = c->clique->ready;
    for (const std::shared_ptr<Group> &g : c->pending)
      ready = ready && (c->dead || connected(c.get(), *g, false));
    if (c->async == ncclInProgress && ready && --c->polls <= 0) {
      launches = !c->pending.empty() && !c->launching;
      if (launches) c->launching = true;
      if (!c->launching) c->async = ncclSuccess;
    }
    *result = c->async;
  }
  if (!launches) return ncclSuccess;
  const ncclResult_t launched = launch_pending(c.get());
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  c->launching = false;
  if (c->async == ncclInProgress) c->async = launched;
  *result = c->async;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  switch (result) {
  case ncclSuccess: return "no error";
  case ncclUnhandledCudaError: return "unhandled cuda error";
  case ncclSystemError: return "unhandled system error";
  case ncclInternalError: return "internal error";
  case ncclInvalidArgument: return "invalid argument";
  case ncclInvalidUsage: return "invalid usage";
  case ncclRemoteError: return "remote process exited or there was a network error";
  case ncclInProgress: return "NCCL operation in progress";
  default: return "unknown result code";
  }
}

/* Valid until the thread's next call that fails, or until the communicator goes. */
const char *ncclGetLastError(ncclComm_t handle) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c != nullptr && !c->last_error.empty()) return c->last_error.c_str();
  return thread_error.c_str();
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) {
    complain("ncclGroupEnd without ncclGroupStart");
    return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group");
  }
  return --group_depth > 0 ? ncclSuccess : end_group();
}

ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (!buffer_fits("ncclSend", src, count, type)) return fail(ncclInvalidArgument, "ncclSend");
  return add("ncclSend", comm, stream, make(Item::kSend, src, nullptr, count, type, peer));
}

ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (!buffer_fits("ncclRecv", dst, count, type)) return fail(ncclInvalidArgument, "ncclRecv");
  return add("ncclRecv", comm, stream, make(Item::kReceive, nullptr, dst, count, type, peer));
}

ncclResult_t ncclBroadcast(const void *src, void *dst, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  if (!buffer_fits("ncclBroadcast", dst, count, type))
    return fail(ncclInvalidArgument, "ncclBroadcast");
  return add("ncclBroadcast", comm, stream, make(Item::kBroadcast, src, dst, count, type, root));
}

ncclResult_t ncclReduce(const void *src, void *dst, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  int rank = -1;
  if (op != ncclSum) return fail(ncclInvalidArgument, "ncclReduce: the double adds only");
  if (ncclCommUserRank(comm, &rank) == ncclSuccess && rank == root &&
      !buffer_fits("ncclReduce", dst, count, type))
    return fail(ncclInvalidArgument, "ncclReduce");
  if (!buffer_fits("ncclReduce", src, count, type)) return fail(ncclInvalidArgument, "ncclReduce");
  return add("ncclReduce", comm, stream, make(Item::kReduce, src, dst, count, type, root));
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void *data, size_t nbytes, void **out) {
  if (delivers_fault()) return fail(ncclSystemError, "ncclCommRegister: a planted fault");
  if (!in_device("ncclCommRegister", data, nbytes) || nbytes == 0 || out == nullptr)
    return fail(ncclInvalidArgument, "ncclCommRegister: not device memory");
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr) return fail(ncclInvalidArgument, "ncclCommRegister: no such communicator");
  *out = reinterpret_cast<void *>(net().next_registration++);
  c->registered[*out] = {reinterpret_cast<uintptr_t>(data), nbytes};
  ++net().registered[reinterpret_cast<uintptr_t>(data)];
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void *registration) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(net().mutex);
  const std::shared_ptr<Comm> c = find(handle);
  if (c == nullptr || c->registered.count(registration) == 0) {
    complain("ncclCommDeregister: no such registration");
    return fail(ncclInvalidArgument, "ncclCommDeregister: no such registration");
  }
  const uintptr_t at = c->registered[registration].first;
  if (--net().registered[at] == 0) net().registered.erase(at);
  c->registered.erase(registration);
  return ncclSuccess;
}

} // extern "C"
