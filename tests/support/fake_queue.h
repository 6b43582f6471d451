/* SPDX-License-Identifier: MIT */
/*
 * fake_queue.h: queues that run nothing until a scheduler says so, for every interleaving of the
 * work of several queues, hosts and ranks in one process.
 *
 *   test::Exhaustive paths;                                  // or test::random_schedule(seed)
 *   do {
 *     test::FakeOptions options(1);                          // one rank, races are looked for
 *     options.choose = paths.chooser();
 *     EXPECT_EQ(test::run_fake(options, [](test::Rank &rank, test::FakeWorld &world) {
 *       ... make a runtime on rank.backend, rank.transport, rank.control ...
 *       world.explore(true);                                 // choices begin to count
 *       ...
 *       return MFSDP_OK;
 *     }), "");
 *   } while (paths.next());
 *
 * Work is done by a host backend with INLINE queues, one piece at a time. The scheduler chooses who
 * goes on, a queue whose first piece may run or a host that is not waiting, wherever that can
 * matter: before each piece that touches memory, where a host waits, and where it says it touches
 * memory (host_touches). Enqueuing touches none, so it is no point of choice: any order of it with
 * other work equals one in which the host ran ahead. Waits between queues and the halves of a batch
 * without data run as soon as they can, for the same reason.
 *
 * Races: each piece of work has a vector clock from the order that queues, events, host waits and
 * messages promise, and every 4-byte word of backend memory remembers its last write and reads. Two
 * accesses without an order between them, one of them a write, are reported, whatever order they
 * ran in: a run without report says the same of every schedule of the same calls. Freeing counts as
 * a write by the host. Host memory that a copy will read must not change meanwhile.
 *
 * Batches: posted, received when all senders have posted (the receiver reads the sender's buffer
 * there), finished when all was taken. Ranks are threads of which one runs at a time.
 *
 * drop_wait leaves chosen waits out, to show that they are needed.
 */
#ifndef MFSDP_TESTS_SUPPORT_FAKE_QUEUE_H
#define MFSDP_TESTS_SUPPORT_FAKE_QUEUE_H

#include "ranks.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>

namespace test {

/* ---- schedules ---- */

struct FakeChoice {
  int actor; /* hosts first: 0 .. ranks - 1 */
  bool host;
};
/* Which of the choices (two or more) goes on. The host at hand comes first, if it can go on. */
using FakeChooser = std::function<std::size_t(const std::vector<FakeChoice> &)>;

/* Depth first through the tree of choices, one path a run. */
class Exhaustive {
public:
  FakeChooser chooser() {
    at_ = 0;
    return [this](const std::vector<FakeChoice> &choices) {
      if (at_ == path_.size()) path_.push_back({0, choices.size()});
      if (path_[at_].second != choices.size()) throw std::logic_error("a run is not repeatable");
      return path_[at_++].first;
    };
  }
  /* To the next path; false: there is none. */
  bool next() {
    ++count_;
    while (!path_.empty() && path_.back().first + 1 == path_.back().second)
      path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().first;
    return true;
  }
  int64_t count() const { return count_; }

private:
  std::vector<std::pair<std::size_t, std::size_t>> path_;
  std::size_t at_ = 0;
  int64_t count_ = 0;
};

/* Even seeds: every choice is equally likely. Odd ones: actors have priorities that seldom change,
 * so that one may fall far behind. */
inline FakeChooser random_schedule(uint64_t seed) {
  auto random = std::make_shared<std::mt19937_64>(seed);
  auto priority = std::make_shared<std::map<int, uint64_t>>();
  const bool uniform = seed % 2 == 0;
  return [random, priority, uniform](const std::vector<FakeChoice> &choices) {
    if (uniform) return static_cast<std::size_t>((*random)() % choices.size());
    if ((*random)() % 16 == 0) priority->clear();
    std::size_t best = 0;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (priority->count(choices[i].actor) == 0) (*priority)[choices[i].actor] = (*random)();
      if ((*priority)[choices[i].actor] > (*priority)[choices[best].actor]) best = i;
    }
    return best;
  };
}

/* Queues run only when every host waits. */
inline FakeChooser hosts_first() {
  return [](const std::vector<FakeChoice> &) { return static_cast<std::size_t>(0); };
}

/* ---- clocks ---- */

const int kFakeActors = 20;

struct FakeClock {
  std::array<uint32_t, kFakeActors> at{};
  void join(const FakeClock &other) {
    for (std::size_t i = 0; i < at.size(); ++i)
      at[i] = std::max(at[i], other.at[i]);
  }
};

class FakeWorld;
class FakeBackend;

struct FakeItem {
  const char *name;
  FakeClock enqueued;
  std::function<bool()> ready; /* empty: always */
  std::function<mfsdp_status(mfsdp_error *)> run;
  bool silent = false; /* touches no memory */
};

struct FakeQueue {
  FakeBackend *backend = nullptr;
  int actor = -1;
  std::deque<FakeItem> items;
  int64_t submitted = 0, done = 0, failed_at = INT64_MAX;
  mfsdp_error error = mfsdp_error_none();
  FakeClock clock;
  std::vector<FakeClock> after; /* after[n]: when n pieces of work were done */
};

struct FakeEvent {
  std::shared_ptr<FakeQueue> queue; /* empty: never recorded */
  int64_t number = 0;
};

struct FakeSend {
  mfsdp_xfer x;
  uint64_t check = 0;
  const char *label = "";
  FakeClock posted, taken;
  bool is_taken = false;
};

/* ---- the scheduler, its memory of accesses, and the wires ---- */

class FakeWorld {
public:
  FakeWorld(int32_t ranks, const FakeChooser &choose, bool check_races)
      : ranks_(ranks), choose_(choose), check_races_(check_races),
        hosts_(static_cast<std::size_t>(ranks)) {
    actor_count_ = ranks;
  }

  /* Until now the hosts run first. */
  void explore(bool on) { exploring_ = on; }
  int64_t choice_count() const { return choice_count_; }
  /* Waits to leave out: the rank, and the event that it, or a queue of its, would wait for. */
  std::function<bool(int32_t, const mfsdp_event *)> drop_wait;
  bool drops(int32_t rank, const mfsdp_event *event) {
    return !stuck_ && drop_wait && drop_wait(rank, event);
  }
  std::string problems() const { return problems_; }
  bool raced() const { return race_count_ > 0; }
  void report(const std::string &what) {
    if (problems_.size() < 2000) problems_ += what + "\n";
  }

  /* ---- hosts ---- */

  /* A host's own access, and a point of choice before it. */
  void host_touches(int32_t rank, const void *reads, std::size_t read_nbytes, const void *writes,
                    std::size_t write_nbytes) {
    host_point(rank);
    host_writes(rank, "host", reads, read_nbytes, writes, write_nbytes);
  }
  void host_point(int32_t rank) { (void)schedule(rank, nullptr); }
  void host_writes(int32_t rank, const char *name, const void *reads, std::size_t read_nbytes,
                   const void *writes, std::size_t write_nbytes) {
    begin(rank, &host(rank).clock, name);
    access(reads, read_nbytes, false);
    access(writes, write_nbytes, true);
  }
  /* False: nobody can go on. */
  bool host_wait(int32_t rank, const std::function<bool()> &ready) {
    return !stuck_ && (ready() || schedule(rank, ready));
  }
  FakeClock *host_clock(int32_t rank) { return &host(rank).clock; }

  void host_start(int32_t rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    baton_.wait(lock, [&] { return current_ == rank; });
  }
  void host_end(int32_t rank) {
    host(rank).ended = true;
    (void)schedule(rank, [] { return false; });
  }

  /* After a failure: no work runs any more, since its buffers may go, and no wait succeeds. */
  void halt() { stuck_ = true; }
  bool halted() const { return stuck_; }

  /* ---- queues ---- */

  int add_actor() {
    if (actor_count_ == kFakeActors) throw std::logic_error("too many fake queues");
    return actor_count_++;
  }
  std::vector<std::shared_ptr<FakeQueue>> queues;

  /* ---- accesses of the piece of work at hand ---- */

  void add_block(const void *data, std::size_t nbytes) {
    if (!check_races_) return;
    blocks_[static_cast<const unsigned char *>(data)].words.assign((nbytes + 3) / 4, Word());
  }
  void remove_block(int32_t rank, const void *data, std::size_t nbytes) {
    host_writes(rank, "free", nullptr, 0, data, nbytes);
    blocks_.erase(static_cast<const unsigned char *>(data));
  }
  void reads(const void *data, std::size_t nbytes) { access(data, nbytes, false); }
  void writes(const void *data, std::size_t nbytes) { access(data, nbytes, true); }
  /* No queue has written there. */
  bool only_hosts_wrote(const void *data, std::size_t nbytes) {
    Word *first = words(data, nbytes);
    for (std::size_t i = 0; first != nullptr && i < nbytes / 4; ++i)
      if (first[i].writer >= ranks_) return false;
    return first != nullptr;
  }

  struct Lane {
    std::deque<std::shared_ptr<FakeSend>> posted;
  };
  /* Of one of the worlds that the ranks share (FakeWire), by ranks of this one. */
  Lane &lane(int32_t wire, int32_t from, int32_t to) {
    return lanes_[std::array<int32_t, 3>{{wire, from, to}}];
  }
  int32_t ranks() const { return ranks_; }
  /* Labels live in objects that may be gone when a race is reported. */
  const char *keep(const char *label) { return labels_.insert(label).first->c_str(); }

  /* Messages of a wire's control plane, by generation. */
  struct Meeting {
    std::vector<std::vector<unsigned char>> messages;
    FakeClock clock;
    int32_t arrived = 0;
  };
  std::map<int32_t, std::vector<Meeting>> meetings;

private:
  struct Host {
    FakeClock clock;
    std::function<bool()> ready; /* of its wait; empty: it can go on */
    bool ended = false;
  };
  struct Word {
    int writer = -1;
    uint32_t write_epoch = 0;
    std::array<uint32_t, kFakeActors> read_epoch{};
  };
  struct Block {
    std::vector<Word> words;
  };

  Host &host(int32_t rank) { return hosts_[static_cast<std::size_t>(rank)]; }

  void begin(int actor, FakeClock *clock, const char *name) {
    actor_ = actor;
    clock_ = clock;
    ++clock->at[static_cast<std::size_t>(actor)];
    if (!check_races_) return;
    std::vector<const char *> &names = names_[static_cast<std::size_t>(actor)];
    names.resize(clock->at[static_cast<std::size_t>(actor)] + 1, "?");
    names.back() = name;
  }

  Word *words(const void *data, std::size_t nbytes) {
    const unsigned char *at = static_cast<const unsigned char *>(data);
    if (!check_races_ || nbytes == 0 || data == nullptr) return nullptr;
    auto it = blocks_.upper_bound(at);
    if (it == blocks_.begin()) return nullptr;
    --it;
    const std::size_t first = static_cast<std::size_t>(at - it->first) / 4;
    if (first >= it->second.words.size()) return nullptr;
    if (first + (nbytes + 3) / 4 > it->second.words.size()) {
      report("an access runs over the end of its block");
      return nullptr;
    }
    return &it->second.words[first];
  }

  std::string who(int actor, uint32_t epoch) const {
    const std::vector<const char *> &names = names_[static_cast<std::size_t>(actor)];
    return std::string(epoch < names.size() ? names[epoch] : "?") + " of " +
           (actor < ranks_ ? "host " : "queue ") + std::to_string(actor);
  }
  void race(int other, uint32_t epoch, bool wrote, bool writing) {
    const uint32_t now = clock_->at[static_cast<std::size_t>(actor_)];
    const std::string text = "race: " + who(actor_, now) + (writing ? " writes" : " reads") + ", " +
                             who(other, epoch) + (wrote ? " wrote" : " read") + ", in no order";
    ++race_count_;
    if (text != last_race_) report(text);
    last_race_ = text;
  }
  bool ordered(int actor, uint32_t epoch) const {
    return clock_->at[static_cast<std::size_t>(actor)] >= epoch;
  }
  void access(const void *data, std::size_t nbytes, bool writing) {
    Word *word = words(data, nbytes);
    if (word == nullptr) return;
    const std::size_t count = (nbytes + 3) / 4;
    const uint32_t now = clock_->at[static_cast<std::size_t>(actor_)];
    for (std::size_t i = 0; i < count; ++i, ++word) {
      if (word->writer >= 0 && !ordered(word->writer, word->write_epoch))
        race(word->writer, word->write_epoch, true, writing);
      if (!writing) {
        word->read_epoch[static_cast<std::size_t>(actor_)] = now;
        continue;
      }
      for (int a = 0; a < actor_count_; ++a)
        if (!ordered(a, word->read_epoch[static_cast<std::size_t>(a)]))
          race(a, word->read_epoch[static_cast<std::size_t>(a)], false, true);
      word->writer = actor_;
      word->write_epoch = now;
      word->read_epoch.fill(0);
    }
  }

  static bool can_run(const FakeQueue &queue) {
    return !queue.items.empty() && (!queue.items.front().ready || queue.items.front().ready() ||
                                    queue.failed_at != INT64_MAX);
  }
  void run_one(FakeQueue *queue) {
    FakeItem item = queue->items.front();
    mfsdp_error error = mfsdp_error_none();
    mfsdp_status status = MFSDP_OK;
    queue->items.pop_front();
    queue->clock.join(item.enqueued);
    begin(queue->actor, &queue->clock, item.name);
    if (queue->failed_at == INT64_MAX) status = item.run(&error);
    ++queue->done;
    if (status != MFSDP_OK) {
      if (error.status == MFSDP_OK)
        (void)MFSDP_ERROR_SET(&error, status, -1, "%s failed", item.name);
      queue->error = error;
      queue->failed_at = queue->done;
    }
    queue->after.push_back(queue->clock);
  }
  void run_silent() {
    for (bool moved = true; moved;) {
      moved = false;
      for (const std::shared_ptr<FakeQueue> &queue : queues)
        while (can_run(*queue) && queue->items.front().silent) {
          run_one(queue.get());
          moved = true;
        }
    }
  }
  bool host_can_go_on(int32_t rank) {
    Host &h = host(rank);
    return !h.ended && (!h.ready || stuck_ || h.ready());
  }

  std::string where_stuck() {
    std::string out = "nobody can go on:";
    for (int32_t r = 0; r < ranks_; ++r)
      out += std::string(" host ") + std::to_string(r) + (host(r).ended ? " ended;" : " waits;");
    for (const std::shared_ptr<FakeQueue> &queue : queues)
      if (!queue->items.empty())
        out += " queue " + std::to_string(queue->actor) + " at " + queue->items.front().name + ";";
    return out;
  }

  /* Runs others until this host may go on. */
  bool schedule(int32_t rank, const std::function<bool()> &ready) {
    host(rank).ready = ready;
    for (;;) {
      std::vector<FakeChoice> choices;
      if (!stuck_) run_silent();
      if (host_can_go_on(rank)) choices.push_back({rank, true});
      for (int32_t r = 0; r < ranks_; ++r)
        if (r != rank && host_can_go_on(r)) choices.push_back({r, true});
      for (const std::shared_ptr<FakeQueue> &queue : queues)
        if (!stuck_ && can_run(*queue)) choices.push_back({queue->actor, false});
      if (choices.empty()) {
        if (everybody_ended()) return true;
        report(where_stuck());
        stuck_ = true;
        continue;
      }
      std::size_t picked = 0;
      if (choices.size() > 1 && exploring_) {
        ++choice_count_;
        picked = choose_(choices);
      }
      const FakeChoice choice = choices[picked];
      if (!choice.host) {
        for (const std::shared_ptr<FakeQueue> &queue : queues)
          if (queue->actor == choice.actor) {
            run_one(queue.get());
            break;
          }
        continue;
      }
      if (choice.actor != rank) hand_over(rank, choice.actor);
      if (host(rank).ended) return true;
      host(rank).ready = nullptr;
      return !stuck_;
    }
  }
  bool everybody_ended() const {
    for (const Host &h : hosts_)
      if (!h.ended) return false;
    return true;
  }
  void hand_over(int32_t from, int32_t to) {
    std::unique_lock<std::mutex> lock(mutex_);
    current_ = to;
    baton_.notify_all();
    if (!host(from).ended) baton_.wait(lock, [&] { return current_ == from; });
  }

  int32_t ranks_;
  FakeChooser choose_;
  bool check_races_, exploring_ = false, stuck_ = false;
  std::vector<Host> hosts_;
  int actor_count_ = 0, actor_ = 0;
  FakeClock *clock_ = nullptr;
  int64_t choice_count_ = 0, race_count_ = 0;
  std::string problems_, last_race_;
  std::map<const unsigned char *, Block> blocks_;
  std::array<std::vector<const char *>, kFakeActors> names_;
  std::map<std::array<int32_t, 3>, Lane> lanes_;
  std::set<std::string> labels_;
  std::mutex mutex_;
  std::condition_variable baton_;
  int32_t current_ = 0;
};

/* ---- the backend of one rank ---- */

class FakeBackend {
public:
  FakeBackend(FakeWorld *world, int32_t rank, const mfsdp_backend *inner, mfsdp_queue *inline_queue)
      : world_(world), rank_(rank), inner_(inner), inline_(inline_queue) {
    table_.struct_nbytes = sizeof(table_);
    table_.ops = ops();
    table_.self = this;
  }
  FakeBackend(const FakeBackend &) = delete;
  FakeBackend &operator=(const FakeBackend &) = delete;

  const mfsdp_backend *table() const { return &table_; }
  FakeWorld *world() { return world_; }
  int32_t rank() const { return rank_; }

  static FakeQueue *queue_of(mfsdp_queue *queue) {
    return reinterpret_cast<std::shared_ptr<FakeQueue> *>(queue)->get();
  }
  FakeItem *put(FakeQueue *queue, const char *name,
                const std::function<mfsdp_status(mfsdp_error *)> &run) {
    FakeItem item;
    FakeClock *clock = world_->host_clock(rank_);
    ++clock->at[static_cast<std::size_t>(rank_)];
    item.name = name;
    item.enqueued = *clock;
    item.run = run;
    queue->items.push_back(item);
    ++queue->submitted;
    return &queue->items.back();
  }

private:
  using Ops = mfsdp_backend_ops;
  static FakeBackend *of(void *self) { return static_cast<FakeBackend *>(self); }
  const Ops *inner_ops() const { return inner_->ops; }

  static mfsdp_status mem_alloc(void *self, mfsdp_context *context, std::size_t nbytes,
                                std::size_t alignment, mfsdp_space space, void **out) {
    FakeBackend *b = of(self);
    MFSDP_TRY(b->inner_ops()->mem_alloc(b->inner_->self, context, nbytes, alignment, space, out));
    b->world_->add_block(*out, nbytes);
    return MFSDP_OK;
  }
  static void mem_free(void *self, mfsdp_context *context, void *ptr, std::size_t nbytes,
                       mfsdp_space space) {
    FakeBackend *b = of(self);
    b->world_->remove_block(b->rank_, ptr, nbytes);
    b->inner_ops()->mem_free(b->inner_->self, context, ptr, nbytes, space);
  }
  static mfsdp_status queue_create(void *self, mfsdp_context *, const char *, mfsdp_queue **out) {
    auto queue = std::make_shared<FakeQueue>();
    queue->backend = of(self);
    queue->actor = of(self)->world_->add_actor();
    queue->after.push_back(FakeClock());
    of(self)->world_->queues.push_back(queue);
    *out = reinterpret_cast<mfsdp_queue *>(new std::shared_ptr<FakeQueue>(queue));
    return MFSDP_OK;
  }
  static void queue_destroy(void *self, mfsdp_context *, mfsdp_queue *opaque) {
    auto *queue = reinterpret_cast<std::shared_ptr<FakeQueue> *>(opaque);
    auto &all = of(self)->world_->queues;
    if (queue == nullptr) return;
    if (!(*queue)->items.empty() && !of(self)->world_->halted())
      of(self)->world_->report("a queue with work was destroyed");
    all.erase(std::find(all.begin(), all.end(), *queue));
    (*queue)->items.clear(); /* which may hold this queue, by way of another */
    delete queue;
  }
  static FakeEvent *event_of(mfsdp_event *event) { return reinterpret_cast<FakeEvent *>(event); }
  static mfsdp_status event_create(void *, mfsdp_context *, mfsdp_event **out) {
    *out = reinterpret_cast<mfsdp_event *>(new FakeEvent());
    return MFSDP_OK;
  }
  static void event_destroy(void *, mfsdp_context *, mfsdp_event *event) { delete event_of(event); }
  static mfsdp_status event_record(void *, mfsdp_queue *queue, mfsdp_event *event) {
    event_of(event)->queue = *reinterpret_cast<std::shared_ptr<FakeQueue> *>(queue);
    event_of(event)->number = event_of(event)->queue->submitted;
    return MFSDP_OK;
  }
  static mfsdp_status error_before(const FakeQueue &queue, int64_t number, mfsdp_error *error) {
    if (queue.failed_at > number) return MFSDP_OK;
    *error = queue.error;
    return error->status;
  }
  static mfsdp_status queue_wait(void *self, mfsdp_queue *opaque, mfsdp_event *event) {
    FakeBackend *b = of(self);
    FakeQueue *queue = queue_of(opaque);
    const FakeEvent at = *event_of(event);
    if (at.queue == nullptr || at.queue.get() == queue) return MFSDP_OK;
    if (b->world_->drops(b->rank_, event)) return MFSDP_OK;
    FakeItem *item = b->put(queue, "wait", [queue, at](mfsdp_error *error) {
      queue->clock.join(at.queue->after[static_cast<std::size_t>(at.number)]);
      return error_before(*at.queue, at.number, error);
    });
    item->ready = [at] { return at.queue->done >= at.number; };
    item->silent = true;
    return MFSDP_OK;
  }
  static mfsdp_status event_query(void *, mfsdp_event *event, int32_t *done) {
    const FakeEvent *at = event_of(event);
    *done = at->queue == nullptr || at->queue->done >= at->number;
    return MFSDP_OK;
  }
  static mfsdp_status event_wait(void *self, mfsdp_context *context, mfsdp_event *event, int64_t) {
    FakeBackend *b = of(self);
    const FakeEvent at = *event_of(event);
    mfsdp_error error;
    if (at.queue == nullptr) return MFSDP_OK;
    if (b->world_->drops(b->rank_, event)) return MFSDP_OK;
    if (!b->world_->host_wait(b->rank_, [at] { return at.queue->done >= at.number; }))
      return MFSDP_FAIL(context, MFSDP_E_TIMEOUT, "fake queue: nobody can go on");
    b->world_->host_clock(b->rank_)->join(at.queue->after[static_cast<std::size_t>(at.number)]);
    if (error_before(*at.queue, at.number, &error) == MFSDP_OK) return MFSDP_OK;
    return mfsdp_context_take_error(context, &error);
  }
  static mfsdp_status queue_call(void *self, mfsdp_queue *queue, mfsdp_task task, void *argument) {
    (void)of(self)->put(queue_of(queue), "task",
                        [task, argument](mfsdp_error *error) { return task(argument, error); });
    return MFSDP_OK;
  }
  static mfsdp_status copy(void *self, mfsdp_queue *queue, void *dst, mfsdp_space dst_space,
                           const void *src, mfsdp_space src_space, std::size_t nbytes) {
    FakeBackend *b = of(self);
    std::vector<unsigned char> before;
    if (nbytes == 0) return MFSDP_OK;
    if (src_space != MFSDP_SPACE_DEVICE && b->world_->only_hosts_wrote(src, nbytes))
      before.assign(static_cast<const unsigned char *>(src),
                    static_cast<const unsigned char *>(src) + nbytes);
    (void)b->put(queue_of(queue), "copy", [=](mfsdp_error *) {
      b->world_->reads(src, nbytes);
      b->world_->writes(dst, nbytes);
      /* What a queue has written meanwhile, the clocks look after. */
      if (!before.empty() && b->world_->only_hosts_wrote(src, nbytes) &&
          std::memcmp(before.data(), src, nbytes) != 0)
        b->world_->report("host memory changed before the copy that was to read it");
      return b->inner_ops()->copy(b->inner_->self, b->inline_, dst, dst_space, src, src_space,
                                  nbytes);
    });
    return MFSDP_OK;
  }
  static mfsdp_status fill_bytes(void *self, mfsdp_queue *queue, void *dst, int32_t byte,
                                 std::size_t nbytes) {
    FakeBackend *b = of(self);
    if (nbytes == 0) return MFSDP_OK;
    (void)b->put(queue_of(queue), byte == 0 ? "clear" : "poison", [=](mfsdp_error *) {
      b->world_->writes(dst, nbytes);
      return b->inner_ops()->fill_bytes(b->inner_->self, b->inline_, dst, byte, nbytes);
    });
    return MFSDP_OK;
  }
  static std::size_t size_of(int64_t count, mfsdp_dtype dtype) {
    return static_cast<std::size_t>(count) * mfsdp_dtype_nbytes(dtype);
  }
  static mfsdp_status cast(void *self, mfsdp_queue *queue, void *dst, mfsdp_dtype dst_dtype,
                           const void *src, mfsdp_dtype src_dtype, int64_t count) {
    FakeBackend *b = of(self);
    (void)b->put(queue_of(queue), "cast", [=](mfsdp_error *) {
      b->world_->reads(src, size_of(count, src_dtype));
      b->world_->writes(dst, size_of(count, dst_dtype));
      return b->inner_ops()->cast(b->inner_->self, b->inline_, dst, dst_dtype, src, src_dtype,
                                  count);
    });
    return MFSDP_OK;
  }
  static mfsdp_status sum_terms(void *self, mfsdp_queue *queue, float *acc, int32_t first,
                                const void *const *terms, mfsdp_dtype dtype, int32_t term_count,
                                int64_t count) {
    FakeBackend *b = of(self);
    const std::vector<const void *> copied(terms, terms + term_count);
    (void)b->put(queue_of(queue), "sum", [=](mfsdp_error *) {
      for (const void *term : copied)
        b->world_->reads(term, size_of(count, dtype));
      if (!first) b->world_->reads(acc, size_of(count, MFSDP_F32));
      b->world_->writes(acc, size_of(count, MFSDP_F32));
      return b->inner_ops()->sum_terms(b->inner_->self, b->inline_, acc, first, copied.data(),
                                       dtype, term_count, count);
    });
    return MFSDP_OK;
  }
  static mfsdp_status sumsq(void *self, mfsdp_queue *queue, double *slots, const float *acc,
                            const mfsdp_block *blocks, int32_t block_count) {
    FakeBackend *b = of(self);
    (void)b->put(queue_of(queue), "sumsq", [=](mfsdp_error *) {
      b->world_->reads(blocks, static_cast<std::size_t>(block_count) * sizeof(*blocks));
      for (int32_t i = 0; i < block_count; ++i) {
        b->world_->reads(acc + blocks[i].first, size_of(blocks[i].count, MFSDP_F32));
        b->world_->writes(slots + blocks[i].slot, sizeof(*slots));
      }
      return b->inner_ops()->sumsq(b->inner_->self, b->inline_, slots, acc, blocks, block_count);
    });
    return MFSDP_OK;
  }
  void touch_verdict(const mfsdp_verdict_args &a) {
    const std::size_t ranks = static_cast<std::size_t>(a.world);
    const std::size_t groups = static_cast<std::size_t>(a.group_count);
    const std::size_t values = static_cast<std::size_t>(a.value_capacity) * (a.weighted ? 2 : 1);
    const std::size_t header = 1 + values + (static_cast<std::size_t>(a.param_count) + 63) / 64;
    world_->reads(a.rank_word, ranks * 8);
    world_->reads(a.block_word, static_cast<std::size_t>(a.block_count) * 8);
    world_->reads(a.rates, groups * sizeof(*a.rates));
    for (std::size_t r = 0; r < ranks; ++r)
      world_->reads(a.messages + a.rank_word[r], header * 8);
    for (int64_t i = 0; i < a.block_count; ++i)
      world_->reads(a.messages + a.block_word[i], 8);
    world_->writes(a.present, static_cast<std::size_t>(a.param_count) * 4);
    world_->writes(a.scalars, groups * sizeof(*a.scalars));
    world_->writes(a.record, sizeof(*a.record));
  }
  static mfsdp_status verdict_fold(void *self, mfsdp_queue *queue, const mfsdp_verdict_args *args) {
    FakeBackend *b = of(self);
    const mfsdp_verdict_args copied = *args;
    (void)b->put(queue_of(queue), "fold", [=](mfsdp_error *) {
      b->touch_verdict(copied);
      return b->inner_ops()->verdict_fold(b->inner_->self, b->inline_, &copied);
    });
    return MFSDP_OK;
  }
  void touch_mat(const mfsdp_mat &m, int64_t batch_count, mfsdp_dtype dtype, bool writing) {
    const std::size_t element = mfsdp_dtype_nbytes(dtype);
    const unsigned char *data = static_cast<const unsigned char *>(m.data);
    for (int64_t k = 0; data != nullptr && k < batch_count; ++k)
      for (int64_t row = 0; row < m.rows; ++row) {
        const std::size_t first = static_cast<std::size_t>(k * m.batch_stride + row * m.row_stride);
        const std::size_t nbytes = static_cast<std::size_t>(m.cols) * element;
        if (writing)
          world_->writes(data + first * element, nbytes);
        else
          world_->reads(data + first * element, nbytes);
      }
  }
  static mfsdp_status gemm(void *self, mfsdp_queue *queue, const mfsdp_gemm_args *args) {
    FakeBackend *b = of(self);
    const mfsdp_gemm_args a = *args;
    (void)b->put(queue_of(queue), "gemm", [=](mfsdp_error *) {
      b->touch_mat(a.a, a.batch_count, a.dtype, false);
      b->touch_mat(a.b, a.batch_count, a.dtype, false);
      if (std::fpclassify(a.beta) != FP_ZERO) b->touch_mat(a.c, a.batch_count, a.dtype, false);
      b->touch_mat(a.d, a.batch_count, a.dtype, true);
      return b->inner_ops()->gemm(b->inner_->self, b->inline_, &a);
    });
    return MFSDP_OK;
  }
  static mfsdp_status normalize(void *self, mfsdp_queue *queue, const mfsdp_normalize_args *args) {
    FakeBackend *b = of(self);
    const mfsdp_normalize_args a = *args;
    (void)b->put(queue_of(queue), "normalize", [=](mfsdp_error *) {
      const std::size_t dst = mfsdp_dtype_nbytes(a.dst_dtype);
      for (int64_t k = 0; k < a.batch_count; ++k) {
        b->world_->reads(a.src + k * a.src_stride, size_of(a.count, MFSDP_F32));
        b->world_->writes(static_cast<unsigned char *>(a.dst) +
                              static_cast<std::size_t>(k * a.dst_stride) * dst,
                          size_of(a.count, a.dst_dtype));
      }
      return b->inner_ops()->normalize(b->inner_->self, b->inline_, &a);
    });
    return MFSDP_OK;
  }
  /* As if every item were present: what a pass may touch. */
  void touch_fused(const mfsdp_fused_args &a) {
    world_->reads(a.items, static_cast<std::size_t>(a.item_count) * sizeof(*a.items));
    world_->reads(a.scalars, sizeof(*a.scalars));
    for (int32_t i = 0; i < a.item_count; ++i) {
      const mfsdp_fused_item &item = a.items[i];
      const std::size_t nbytes = size_of(item.count, MFSDP_F32);
      const bool prepare = a.op == MFSDP_FUSED_MUON_PREPARE;
      if (a.present != nullptr) world_->reads(a.present + item.present_index, 4);
      world_->reads(item.grad, nbytes);
      for (const float *state : item.state) {
        world_->reads(state, nbytes);
        if (!prepare) world_->writes(state, nbytes);
      }
      if (prepare) {
        world_->writes(item.direction, nbytes);
        continue;
      }
      world_->reads(item.direction, nbytes);
      world_->reads(item.master, nbytes);
      world_->writes(item.master, nbytes);
      if (item.param != nullptr)
        world_->writes(item.param, size_of(item.count, static_cast<mfsdp_dtype>(item.param_dtype)));
    }
  }
  static mfsdp_status fused(void *self, mfsdp_queue *queue, const mfsdp_fused_args *args) {
    FakeBackend *b = of(self);
    const mfsdp_fused_args a = *args;
    if (a.item_count == 0) return MFSDP_OK;
    (void)b->put(queue_of(queue), "fused", [=](mfsdp_error *) {
      b->touch_fused(a);
      return b->inner_ops()->fused(b->inner_->self, b->inline_, &a);
    });
    return MFSDP_OK;
  }

  static const Ops *ops() {
    static const Ops table = {
        sizeof(Ops),  "fake",        mem_alloc,    mem_free,   queue_create, queue_destroy,
        event_create, event_destroy, event_record, queue_wait, event_query,  event_wait,
        queue_call,   copy,          fill_bytes,   cast,       sum_terms,    sumsq,
        verdict_fold, gemm,          normalize,    fused,      nullptr,      nullptr,
        nullptr,       nullptr,      nullptr};
    return &table;
  }

  FakeWorld *world_;
  int32_t rank_;
  const mfsdp_backend *inner_;
  mfsdp_queue *inline_;
  mfsdp_backend table_;
};

/* ---- the transport and the control plane of one rank ---- */

/* Ranks that form a world: `members` in the order of their numbers there; `wire` tells worlds apart. */
struct FakeWire {
  int32_t wire = 0;
  std::vector<int32_t> members;
};

class FakeTransport {
public:
  explicit FakeTransport(FakeBackend *backend) : FakeTransport(backend, all_of(backend)) {}
  FakeTransport(FakeBackend *backend, const FakeWire &wire)
      : backend_(backend), world_(backend->world()), wire_(wire) {
    const auto at = std::find(wire.members.begin(), wire.members.end(), backend->rank());
    if (at == wire.members.end()) throw std::logic_error("a wire without this rank");
    static const mfsdp_transport_ops transport_ops = {sizeof(mfsdp_transport_ops),
                                                      "fake",
                                                      submit,
                                                      nullptr,
                                                      poll,
                                                      poison,
                                                      destroy,
                                                      nullptr,
                                                      nullptr,
                                                      nullptr,
                                                      nullptr,
                                                      nullptr};
    static const mfsdp_control_ops control_ops = {sizeof(mfsdp_control_ops), "fake", allgather,
                                                  probe, now_us, nullptr};
    std::memset(&transport, 0, sizeof(transport));
    transport.struct_nbytes = sizeof(transport);
    transport.ops = &transport_ops;
    transport.self = this;
    transport.backend = backend->table();
    transport.rank = static_cast<int32_t>(at - wire.members.begin());
    transport.world = members();
    transport.deadline_us = 1000000;
    std::memset(&control, 0, sizeof(control));
    control.struct_nbytes = sizeof(control);
    control.ops = &control_ops;
    control.self = this;
    control.rank = transport.rank;
    control.world = transport.world;
    control.deadline_us = 1000000;
  }
  mfsdp_transport transport;
  mfsdp_control control;

private:
  struct Batch {
    std::vector<mfsdp_xfer> receives;
    std::vector<std::shared_ptr<FakeSend>> sends;
    uint64_t check;
    const char *label;
  };
  static FakeTransport *of(void *self) { return static_cast<FakeTransport *>(self); }
  static FakeWire all_of(FakeBackend *backend) {
    FakeWire wire;
    for (int32_t r = 0; r < backend->world()->ranks(); ++r)
      wire.members.push_back(r);
    return wire;
  }
  int32_t rank() const { return backend_->rank(); }
  int32_t members() const { return static_cast<int32_t>(wire_.members.size()); }
  FakeWorld::Lane &lane_to(int32_t peer) {
    return world_->lane(wire_.wire, rank(), wire_.members.at(static_cast<std::size_t>(peer)));
  }
  FakeWorld::Lane &lane_from(int32_t peer) {
    return world_->lane(wire_.wire, wire_.members.at(static_cast<std::size_t>(peer)), rank());
  }

  static mfsdp_status submit(void *self, mfsdp_context *context, mfsdp_queue *opaque,
                             const mfsdp_batch *batch) {
    FakeTransport *t = of(self);
    FakeQueue *queue = FakeBackend::queue_of(opaque);
    auto b = std::make_shared<Batch>();
    if (t->error_.status != MFSDP_OK)
      return MFSDP_FAIL(context, MFSDP_E_POISONED, "fake transport: %.250s", t->error_.message);
    b->check = batch->check;
    b->label = t->world_->keep(batch->label);
    for (int32_t i = 0; i < batch->xfer_count; ++i) {
      const mfsdp_xfer &x = batch->xfers[i];
      if (!x.is_send) {
        b->receives.push_back(x);
        continue;
      }
      auto send = std::make_shared<FakeSend>();
      send->x = x;
      send->check = batch->check;
      send->label = b->label;
      b->sends.push_back(send);
    }
    t->put_post(queue, b);
    t->put_receive(queue, b);
    t->put_finish(queue, b);
    return MFSDP_OK;
  }
  void put_post(FakeQueue *queue, const std::shared_ptr<Batch> &b) {
    if (b->sends.empty()) return;
    backend_
        ->put(queue, "post",
              [this, queue, b](mfsdp_error *) {
                for (const std::shared_ptr<FakeSend> &send : b->sends) {
                  send->posted = queue->clock;
                  lane_to(send->x.peer).posted.push_back(send);
                }
                return MFSDP_OK;
              })
        ->silent = true;
  }
  void put_receive(FakeQueue *queue, const std::shared_ptr<Batch> &b) {
    if (b->receives.empty()) return;
    backend_
        ->put(queue, b->label,
              [this, queue, b](mfsdp_error *error) {
                for (const mfsdp_xfer &x : b->receives)
                  MFSDP_TRY(receive(queue, *b, x, error));
                return MFSDP_OK;
              })
        ->ready = [this, b] {
      std::map<int32_t, std::size_t> from;
      for (const mfsdp_xfer &x : b->receives)
        ++from[x.peer];
      for (const auto &entry : from)
        if (lane_from(entry.first).posted.size() < entry.second) return false;
      return true;
    };
  }
  mfsdp_status receive(FakeQueue *queue, const Batch &b, const mfsdp_xfer &x, mfsdp_error *error) {
    auto &posted = lane_from(x.peer).posted;
    const std::shared_ptr<FakeSend> send = posted.front();
    posted.pop_front();
    if (send->x.nbytes != x.nbytes || send->check != b.check)
      return MFSDP_ERROR_SET(error, MFSDP_E_MISMATCH, x.peer, "%s meets %s", b.label, send->label);
    queue->clock.join(send->posted);
    world_->reads(send->x.src, x.nbytes);
    world_->writes(x.dst, x.nbytes);
    if (x.nbytes > 0) std::memcpy(x.dst, send->x.src, x.nbytes);
    send->taken = queue->clock;
    send->is_taken = true;
    return MFSDP_OK;
  }
  void put_finish(FakeQueue *queue, const std::shared_ptr<Batch> &b) {
    if (b->sends.empty()) return;
    FakeItem *item = backend_->put(queue, "finish", [queue, b](mfsdp_error *) {
      for (const std::shared_ptr<FakeSend> &send : b->sends)
        queue->clock.join(send->taken);
      return MFSDP_OK;
    });
    item->silent = true;
    item->ready = [b] {
      for (const std::shared_ptr<FakeSend> &send : b->sends)
        if (!send->is_taken) return false;
      return true;
    };
  }
  static mfsdp_status poll(void *self, mfsdp_context *context) {
    return mfsdp_context_take_error(context, &of(self)->error_);
  }
  static void poison(void *self, const mfsdp_error *why) {
    if (of(self)->error_.status == MFSDP_OK) of(self)->error_ = *why;
    of(self)->world_->halt();
  }
  static mfsdp_status destroy(void *, mfsdp_context *) { return MFSDP_OK; }

  static mfsdp_status allgather(void *self, mfsdp_context *context, const void *in,
                                std::size_t nbytes, void *out, int64_t) {
    FakeTransport *t = of(self);
    FakeWorld *world = t->world_;
    const std::size_t generation = t->generation_++;
    const std::size_t ranks = t->wire_.members.size();
    std::vector<FakeWorld::Meeting> &meetings = world->meetings[t->wire_.wire];
    if (meetings.size() <= generation) meetings.resize(generation + 1);
    FakeWorld::Meeting *meeting = &meetings[generation];
    meeting->messages.resize(ranks);
    meeting->messages[static_cast<std::size_t>(t->control.rank)].assign(
        static_cast<const unsigned char *>(in), static_cast<const unsigned char *>(in) + nbytes);
    meeting->clock.join(*world->host_clock(t->rank()));
    ++meeting->arrived;
    if (!world->host_wait(t->rank(), [&meetings, generation, t] {
          return meetings[generation].arrived == t->members();
        }))
      return MFSDP_FAIL(context, MFSDP_E_TIMEOUT, "fake control: nobody can go on");
    meeting = &meetings[generation];
    world->host_clock(t->rank())->join(meeting->clock);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (meeting->messages[r].size() != nbytes)
        return MFSDP_FAIL(context, MFSDP_E_MISMATCH, "fake control: sizes differ");
      if (nbytes > 0)
        std::memcpy(static_cast<unsigned char *>(out) + r * nbytes, meeting->messages[r].data(),
                    nbytes);
    }
    return MFSDP_OK;
  }
  static mfsdp_status probe(void *self, mfsdp_context *, uint8_t *alive, int64_t) {
    std::memset(alive, 1, of(self)->wire_.members.size());
    return MFSDP_OK;
  }
  static int64_t now_us(void *) { return 0; }

  FakeBackend *backend_;
  FakeWorld *world_;
  FakeWire wire_;
  std::size_t generation_ = 0;
  mfsdp_error error_ = mfsdp_error_none();
};

/* ---- running ---- */

struct FakeOptions {
  explicit FakeOptions(int32_t rank_count)
      : ranks(rank_count), choose(hosts_first()), context(mfsdp_context_desc_default()) {}
  int32_t ranks;
  FakeChooser choose;
  bool check_races = true;
  mfsdp_context_desc context; /* rank and allocator are set for each rank */
};

using FakeFunction = std::function<mfsdp_status(Rank &, FakeWorld &)>;

namespace detail {

inline mfsdp_status fake_rank(FakeWorld *world, Rank *rank, const FakeFunction &function) {
  const mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  mfsdp_queue *inline_queue = nullptr;
  mfsdp_status status;
  MFSDP_TRY(mfsdp_host_backend_create(&rank->context, &desc, &rank->host));
  const mfsdp_backend *inner = mfsdp_host_backend_get(rank->host);
  MFSDP_TRY(inner->ops->queue_create(inner->self, &rank->context, "inline", &inline_queue));
  FakeBackend fake(world, rank->rank, inner, inline_queue);
  FakeTransport wires(&fake);
  rank->backend = fake.table();
  rank->transport = wires.transport;
  rank->control = wires.control;
  rank->timeout_us = 1000000;
  MFSDP_TRY(rank->backend->ops->queue_create(&fake, &rank->context, "test", &rank->queue));
  MFSDP_TRY(rank->backend->ops->event_create(&fake, &rank->context, &rank->event));
  try {
    status = function(*rank, *world);
  } catch (const std::exception &e) {
    status = MFSDP_FAIL(&rank->context, MFSDP_E_STATE, "the test threw: %s", e.what());
  }
  rank->backend->ops->event_destroy(&fake, &rank->context, rank->event);
  rank->backend->ops->queue_destroy(&fake, &rank->context, rank->queue);
  inner->ops->queue_destroy(inner->self, &rank->context, inline_queue);
  return status;
}

inline void fake_host(const FakeOptions &options, FakeWorld *world, int32_t number,
                      const FakeFunction &function) {
  FaultAllocator memory;
  Rank rank;
  mfsdp_context_desc desc = options.context;
  const std::string name = "rank " + std::to_string(number) + ": ";
  rank.rank = number;
  rank.world = options.ranks;
  rank.memory = &memory;
  desc.rank = number;
  desc.allocator = memory.allocator();
  world->host_start(number);
  mfsdp_status status = mfsdp_context_init(&rank.context, &desc);
  if (status == MFSDP_OK) status = fake_rank(world, &rank, function);
  if (status != MFSDP_OK)
    world->report(name + mfsdp_status_name(status) + ": " +
                  mfsdp_context_error(&rank.context)->message);
  if (mfsdp_host_backend_destroy(&rank.context, rank.host) != MFSDP_OK ||
      mfsdp_context_destroy(&rank.context) != MFSDP_OK)
    world->report(name + "after: " + mfsdp_context_error(&rank.context)->message);
  if (memory.live_count() != 0) world->report(name + "leaks");
  if (!memory.complaints().empty()) world->report(name + memory.complaints());
  world->host_end(number);
}

} // namespace detail

/* What went wrong on any rank: a status, a race, a standstill, a leak. Empty: nothing. */
inline std::string run_fake(const FakeOptions &options, const FakeFunction &function) {
  FakeWorld world(options.ranks, options.choose, options.check_races);
  if (options.ranks == 1) {
    detail::fake_host(options, &world, 0, function);
    return world.problems();
  }
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < options.ranks; ++r)
    threads.emplace_back([&, r] { detail::fake_host(options, &world, r, function); });
  for (std::thread &thread : threads)
    thread.join();
  return world.problems();
}

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_FAKE_QUEUE_H
