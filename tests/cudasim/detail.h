/* SPDX-License-Identifier: MIT */
/* detail.h: what the parts of the double share. See cudasim.h. */
#ifndef MFSDP_TESTS_CUDASIM_DETAIL_H
#define MFSDP_TESTS_CUDASIM_DETAIL_H

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#if defined(__SANITIZE_THREAD__)
#define CUDASIM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CUDASIM_TSAN 1
#endif
#endif
#ifndef CUDASIM_TSAN
#define CUDASIM_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__)
#define CUDASIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDASIM_ASAN 1
#endif
#endif
#ifndef CUDASIM_ASAN
#define CUDASIM_ASAN 0
#endif

#if CUDASIM_TSAN
extern "C" {
void AnnotateIgnoreSyncBegin(const char *file, int line);
void AnnotateIgnoreSyncEnd(const char *file, int line);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
void AnnotateBenignRaceSized(const char *file, int line, const volatile void *at, size_t nbytes,
                             const char *what);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
}
#endif

namespace cudasim {

/* While one lives, the thread sanitizer sees neither accesses nor synchronization of this thread. */
class Quiet {
public:
#if CUDASIM_TSAN
  Quiet() {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Quiet() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
#else
  Quiet() {}
  ~Quiet() {}
#endif
  Quiet(const Quiet &) = delete;
  Quiet &operator=(const Quiet &) = delete;
};

/* Hides this thread's accesses alone, while edges count; only when asked to. */
class Unseen {
public:
#if CUDASIM_TSAN
  explicit Unseen(bool on) : on_(on) {
    begin();
  }
  ~Unseen() {
    end();
  }
  void begin() {
    if (!on_) return;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  void end() {
    if (!on_) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }

private:
  bool on_;
#else
  explicit Unseen(bool on) {
    (void)on;
  }
  ~Unseen() {}
  void begin() {}
  void end() {}
#endif
  Unseen(const Unseen &) = delete;
  Unseen &operator=(const Unseen &) = delete;
};

/* Edges that CUDA promises. */
inline void release(void *address) {
#if CUDASIM_TSAN
  __tsan_release(address);
#else
  (void)address;
#endif
}
inline void acquire(void *address) {
#if CUDASIM_TSAN
  __tsan_acquire(address);
#else
  (void)address;
#endif
}

/* ---- runtime.cpp ---- */

void complain(const std::string &what);
/* Counts a fallible call; true: this one is to fail. */
bool delivers_fault();
/* Puts work into a stream (or into the graph that it is captured into). */
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);
/* Whether a stream's work is captured into a graph now. */
bool captures(cudaStream_t stream);
/* False: there is no such stream. */
bool device_of(cudaStream_t stream, int *device);
/* Of the calling thread. */
int current_device_now();
bool host_function_runs();
/* Remembers the error for cudaGetLastError and returns it. */
cudaError_t note(cudaError_t error);
bool kernel_image();

enum class Where { kUnknown, kDevice, kPinned };
/* Where an address lies. left: bytes from it to the end of its allocation. */
Where where(const void *address, std::size_t *left);
/* Complains unless nbytes from `address` lie in one allocation of device memory. */
bool in_device(const char *what, const void *address, std::size_t nbytes);

/* ---- nccl.cpp ---- */

/* Whether memory there is registered with a communicator. */
bool nccl_holds(const void *first, std::size_t nbytes);

/* ---- fiber.cpp: one kernel ---- */

bool thread_races_on();
cudaError_t check_launch(const cudaLaunchConfig_t *config);
void run_grid(dim3 grid, dim3 block, const std::function<void()> &thread);

} // namespace cudasim

#endif // MFSDP_TESTS_CUDASIM_DETAIL_H
