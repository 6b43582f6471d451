/* SPDX-License-Identifier: MIT */
#include "malloc_count.h"

#include <atomic>
#include <cstddef>

#if MFSDP_TEST_SANITIZER

namespace test {
bool malloc_count_supported() {
  return false;
}
const char *malloc_count_why_not() {
  return "allocations are not wrapped under a sanitizer";
}
void malloc_count_begin() {}
uint64_t malloc_count_end() {
  return 0;
}
} // namespace test

#else

namespace {
std::atomic<bool> counting{false};
std::atomic<uint64_t> allocation_count{0};

void note() {
  if (counting.load(std::memory_order_relaxed))
    allocation_count.fetch_add(1, std::memory_order_relaxed);
}
} // namespace

/* The linker sends calls of malloc to __wrap_malloc, and __real_malloc to malloc. */
extern "C" {
void *__real_malloc(std::size_t nbytes);
void *__real_calloc(std::size_t count, std::size_t nbytes);
void *__real_realloc(void *old, std::size_t nbytes);
void *__real_aligned_alloc(std::size_t alignment, std::size_t nbytes);
int __real_posix_memalign(void **out, std::size_t alignment, std::size_t nbytes);

void *__wrap_malloc(std::size_t nbytes) {
  note();
  return __real_malloc(nbytes);
}
void *__wrap_calloc(std::size_t count, std::size_t nbytes) {
  note();
  return __real_calloc(count, nbytes);
}
void *__wrap_realloc(void *old, std::size_t nbytes) {
  note();
  return __real_realloc(old, nbytes);
}
void *__wrap_aligned_alloc(std::size_t alignment, std::size_t nbytes) {
  note();
  return __real_aligned_alloc(alignment, nbytes);
}
int __wrap_posix_memalign(void **out, std::size_t alignment, std::size_t nbytes) {
  note();
  return __real_posix_memalign(out, alignment, nbytes);
}
}

namespace test {
bool malloc_count_supported() {
  return true;
}
const char *malloc_count_why_not() {
  return "";
}
void malloc_count_begin() {
  allocation_count.store(0);
  counting.store(true);
}
uint64_t malloc_count_end() {
  counting.store(false);
  return allocation_count.load();
}
} // namespace test

#endif
