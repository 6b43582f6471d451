/* SPDX-License-Identifier: MIT */
/* One kernel: blocks one after another, the threads of a block as fibers where they wait. */
#include "cuda_runtime.h"
#include "cudasim.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#if CUDASIM_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cudasim {
namespace {

std::atomic<bool> thread_races_wanted{false};

const std::size_t kStackNbytes = CUDASIM_ASAN || CUDASIM_TSAN ? 256 << 10 : 64 << 10;
const unsigned kWarp = 32;

/* Switching by hand: ucontext makes a system call each time, and its interceptor in the address
 * sanitizer clears a stack's shadow. */
#if defined(__x86_64__)
#define CUDASIM_OWN_SWITCH 1
#else
#define CUDASIM_OWN_SWITCH 0
#endif

/* A stack with what the sanitizers need to know when it is left and entered. */
struct Context {
#if CUDASIM_OWN_SWITCH
  void *stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  void *fake_stack = nullptr;
  const void *bottom = nullptr;
  std::size_t nbytes = 0;
  void *tsan = nullptr;
};

enum class State { kNew, kReady, kAtBlock, kAtWarp, kDone };

struct Fiber;

struct Thread {
  Coordinates at;
  unsigned index = 0;
  State state = State::kNew;
  Fiber *fiber = nullptr; /* that runs it */
  uint64_t value[2] = {0, 0};
  unsigned exchanges = 0;
  unsigned waits[2] = {0, 0}; /* for its block, for its warp */
};

struct Fiber {
  Context context;
  void *stack = nullptr;
  Thread *thread = nullptr;
  volatile bool alive = true;
  ~Fiber() {
    if (stack == nullptr) return;
#if CUDASIM_ASAN
    ASAN_UNPOISON_MEMORY_REGION(stack, kStackNbytes); /* frames that never return lie there */
#endif
    munmap(stack, kStackNbytes);
  }
};

/* What one stream's thread runs kernels with. */
struct Executor {
  Context scheduler;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber *> idle;
  std::vector<Thread> threads;
  const std::function<void()> *body = nullptr;
  unsigned next = 0; /* thread that was not started yet */
  bool races = false;
  char launch_edge = 0, end_edge = 0;
  /* Of a block's barriers and a warp's, by turns: a thread that is at the next one already must not
   * hand what it wrote in between to those that have not left this one. */
  char barrier_edges[2][2] = {{0, 0}, {0, 0}};
};

thread_local Thread *running = nullptr;
thread_local Executor *executor = nullptr;

/* Fibers, which may be threads to the sanitizer, share what is this thread's. */
#if defined(__SANITIZE_THREAD__) || defined(__clang__)
#define CUDASIM_UNSEEN __attribute__((noinline, no_sanitize("thread")))
#else
#define CUDASIM_UNSEEN
#endif
CUDASIM_UNSEEN Executor *mine() {
  return executor;
}

#if CUDASIM_OWN_SWITCH
extern "C" void cudasim_switch(void **from, void *to);
extern "C" void cudasim_start(void);
/* What a called function must keep is pushed; the return address is on top of the new stack. A new
 * fiber starts with its argument in r12 and its function in r13. */
asm(".text\n"
    ".globl cudasim_switch\n"
    "cudasim_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".globl cudasim_start\n"
    "cudasim_start:\n"
    "  movq %r12, %rdi\n"
    "  call *%r13\n"
    "  ud2\n");
#endif

/* noinline: the compiler may not keep what it knows of this thread across the switch. */
__attribute__((noinline)) void switch_context(Context *from, Context *to) {
#if CUDASIM_ASAN
  __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->nbytes);
#endif
#if CUDASIM_TSAN
  if (to->tsan != nullptr) __tsan_switch_to_fiber(to->tsan, 1); /* 1: no edge */
#endif
#if CUDASIM_OWN_SWITCH
  cudasim_switch(&from->stack_pointer, to->stack_pointer);
#else
  if (swapcontext(&from->registers, &to->registers) != 0) std::abort();
#endif
#if CUDASIM_ASAN
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

/* Runs threads that were not started, until one waits: then this fiber is its own. It never ends, which
 * the compiler must not know: the address sanitizer would clean a stack before such a call. */
void fiber_loop(Executor *e, Fiber *fiber) {
  Unseen unseen(e->races); /* what fibers share here is no kernel's */
  while (fiber->alive) {
    while (e->next < e->threads.size()) {
      Thread *thread = &e->threads[e->next++];
      fiber->thread = thread;
      thread->fiber = fiber;
      running = thread;
      thread->state = State::kReady;
      if (e->races) acquire(&e->launch_edge);
      unseen.end();
      (*e->body)();
      unseen.begin();
      if (e->races) release(&e->end_edge);
      thread->state = State::kDone;
      running = nullptr;
      if (e->races) break; /* the next thread is a fiber of its own for the sanitizer */
    }
    fiber->thread = nullptr;
    if (!e->races) e->idle.push_back(fiber);
    switch_context(&fiber->context, &e->scheduler);
  }
}

void fiber_main(Fiber *fiber) {
  Executor *e = mine();
#if CUDASIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &e->scheduler.bottom, &e->scheduler.nbytes);
#endif
  fiber_loop(e, fiber);
}

#if CUDASIM_OWN_SWITCH
void prepare(Fiber *fiber) {
  const uintptr_t top = reinterpret_cast<uintptr_t>(fiber->stack) + kStackNbytes - 256;
  void **at = reinterpret_cast<void **>(top) - 9; /* aligned to 16 when it calls */
  std::memset(static_cast<void *>(at), 0, 9 * sizeof(*at));
  at[2] = reinterpret_cast<void *>(fiber_main); /* r13 */
  at[3] = fiber;                                /* r12 */
  at[6] = reinterpret_cast<void *>(cudasim_start);
  fiber->context.stack_pointer = at;
}
#else
void fiber_main_in_halves(unsigned high, unsigned low) {
  fiber_main(reinterpret_cast<Fiber *>((static_cast<uintptr_t>(high) << 32) |
                                       static_cast<uintptr_t>(low)));
}
void prepare(Fiber *fiber) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(fiber);
  ucontext_t *registers = &fiber->context.registers;
  if (getcontext(registers) != 0) std::abort();
  registers->uc_stack.ss_sp = fiber->stack;
  registers->uc_stack.ss_size = kStackNbytes;
  registers->uc_link = nullptr;
  makecontext(registers, reinterpret_cast<void (*)()>(fiber_main_in_halves), 2,
              static_cast<unsigned>(address >> 32), static_cast<unsigned>(address & 0xffffffffu));
}
#endif

Fiber *make_fiber(Executor *e) {
  std::unique_ptr<Fiber> fiber(new Fiber);
  fiber->stack =
      mmap(nullptr, kStackNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fiber->stack == MAP_FAILED) std::abort();
  fiber->context.bottom = fiber->stack;
  fiber->context.nbytes = kStackNbytes;
#if CUDASIM_TSAN
  if (e->races) fiber->context.tsan = __tsan_create_fiber(0);
#endif
  prepare(fiber.get());
  e->fibers.push_back(std::move(fiber));
  return e->fibers.back().get();
}

void drop_fibers(Executor *e) {
#if CUDASIM_TSAN
  void *const here = __tsan_get_current_fiber();
  for (auto &fiber : e->fibers) {
    if (fiber->context.tsan == nullptr) continue;
    /* It waits unseen (fiber_loop), and the sanitizer wants that to end before the fiber does. */
    __tsan_switch_to_fiber(fiber->context.tsan, 1);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    __tsan_switch_to_fiber(here, 1);
    __tsan_destroy_fiber(fiber->context.tsan);
  }
#endif
  e->fibers.clear();
  e->idle.clear();
}

void resume(Executor *e, Fiber *fiber) {
  running = fiber->thread;
  switch_context(&e->scheduler, &fiber->context);
  running = nullptr;
}

/* The thread that runs goes to sleep; the scheduler wakes it. */
void wait_in(State state) {
  Executor *e = mine();
  Unseen unseen(e->races);
  Thread *thread = running;
  Fiber *fiber = thread->fiber;
  const int kind = state == State::kAtWarp;
  char *edge = &e->barrier_edges[kind][thread->waits[kind]++ % 2];
  if (e->races) release(edge);
  thread->state = state;
  switch_context(&fiber->context, &e->scheduler);
  if (e->races) acquire(edge);
}

/* Threads that have ended count as having come. */
bool all_in(const std::vector<Thread> &threads, std::size_t first, std::size_t end, State state) {
  bool any = false;
  for (std::size_t i = first; i < end; ++i) {
    if (threads[i].state != state && threads[i].state != State::kDone) return false;
    any = any || threads[i].state == state;
  }
  return any;
}

void wake(std::vector<Thread> *threads, std::size_t first, std::size_t end) {
  for (std::size_t i = first; i < end; ++i)
    if ((*threads)[i].state != State::kDone) (*threads)[i].state = State::kReady;
}

bool wake_complete_groups(Executor *e) {
  const std::size_t count = e->threads.size();
  bool woken = false;
  for (std::size_t first = 0; first < count; first += kWarp) {
    const std::size_t end = first + kWarp < count ? first + kWarp : count;
    if (!all_in(e->threads, first, end, State::kAtWarp)) continue;
    wake(&e->threads, first, end);
    woken = true;
  }
  if (!woken && all_in(e->threads, 0, count, State::kAtBlock)) {
    wake(&e->threads, 0, count);
    woken = true;
  }
  return woken;
}

void run_block(Executor *e) {
  e->next = 0;
  if (e->races) release(&e->launch_edge);
  while (e->next < e->threads.size()) {
    if (e->idle.empty()) e->idle.push_back(make_fiber(e));
    Fiber *fiber = e->idle.back();
    e->idle.pop_back();
    resume(e, fiber);
  }
  while (wake_complete_groups(e))
    for (Thread &thread : e->threads)
      if (thread.state == State::kReady) resume(e, thread.fiber);
  for (Thread &thread : e->threads)
    if (thread.state != State::kDone) {
      complain("a kernel's threads wait at different barriers");
      std::abort(); /* the fibers cannot be unwound */
    }
  if (!e->races) return;
  /* One block after another, each thread of a block a fiber of its own. */
  acquire(&e->end_edge);
  e->idle.clear();
  for (auto &fiber : e->fibers)
    e->idle.push_back(fiber.get());
}

} // namespace

CUDASIM_UNSEEN const Coordinates &self() {
  return running->at;
}

void sync_threads() {
  wait_in(State::kAtBlock);
}

uint64_t exchange(uint64_t value, unsigned from) {
  Executor *e = mine();
  Unseen unseen(e->races);
  Thread *thread = running;
  /* A warp is never two exchanges apart: two places are enough. */
  const unsigned place = thread->exchanges++ % 2;
  const std::size_t first = thread->index - thread->index % kWarp;
  thread->value[place] = value;
  wait_in(State::kAtWarp);
  if (first + from >= e->threads.size()) {
    complain("a shuffle reads a lane that the block does not have");
    return value;
  }
  return e->threads[first + from].value[place];
}

void thread_races(bool on) {
  thread_races_wanted = on;
}

cudaError_t check_launch(const cudaLaunchConfig_t *config) {
  const dim3 g = config->gridDim, b = config->blockDim;
  if (delivers_fault()) return cudaErrorLaunchOutOfResources;
  if (!kernel_image()) return cudaErrorNoKernelImageForDevice;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 ||
      b.x == 0 || b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 ||
      b.x * b.y * b.z > 1024 || config->dynamicSmemBytes != 0)
    return cudaErrorInvalidConfiguration;
  return cudaSuccess;
}

void run_grid(dim3 grid, dim3 block, const std::function<void()> &thread) {
  thread_local Executor own;
  const bool races = CUDASIM_TSAN && thread_races_wanted;
  const unsigned count = block.x * block.y * block.z;
  if (races || own.races) drop_fibers(&own);
  own.races = races;
  const Unseen unseen(races);
  executor = &own;
#if CUDASIM_TSAN
  own.scheduler.tsan = races ? __tsan_get_current_fiber() : nullptr;
#endif
  own.body = &thread;
  own.threads.resize(count);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        for (unsigned i = 0; i < count; ++i) {
          Thread *t = &own.threads[i];
          *t = Thread();
          t->index = i;
          t->at.thread.x = i % block.x;
          t->at.thread.y = i / block.x % block.y;
          t->at.thread.z = i / block.x / block.y;
          t->at.block.x = x;
          t->at.block.y = y;
          t->at.block.z = z;
          t->at.block_dim = block;
          t->at.grid_dim = grid;
        }
        run_block(&own);
      }
  own.body = nullptr;
}

} // namespace cudasim
