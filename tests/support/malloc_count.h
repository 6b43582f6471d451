/* SPDX-License-Identifier: MIT */
/*
 * malloc_count.h: counts calls of malloc, calloc, realloc, aligned_alloc and posix_memalign made by
 * the code linked into the test (the linker's --wrap), by any thread, while counting is on.
 *
 *   if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
 *   test::malloc_count_begin();
 *   step();
 *   EXPECT_EQ(test::malloc_count_end(), 0u);
 *
 * A test file that uses it carries the comment MFSDP_TEST_WRAP_MALLOC, on which the Makefile adds
 * the link flags. Calls inside shared libraries (operator new, BLAS, libc itself) are not seen.
 * Under sanitizers, which bring their own allocator, nothing is wrapped and the counter says so.
 */
#ifndef MFSDP_TESTS_SUPPORT_MALLOC_COUNT_H
#define MFSDP_TESTS_SUPPORT_MALLOC_COUNT_H

#include <cstdint>

namespace test {

bool malloc_count_supported();
const char *malloc_count_why_not();
/* Sets the count to 0 and turns counting on, for all threads. */
void malloc_count_begin();
/* Turns counting off and returns how many allocations were counted. */
uint64_t malloc_count_end();

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_MALLOC_COUNT_H
