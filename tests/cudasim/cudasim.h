/* SPDX-License-Identifier: MIT */
/*
 * cudasim.h: the switches of the host double of the CUDA runtime, cuBLAS, cuSOLVER and NCCL, for
 * tests.
 *
 *   cudasim::fail_at(3);                       // the third fallible call from now on fails
 *   ...
 *   EXPECT_EQ(cudasim::complaints(), "");      // misuse that hardware would punish or not notice
 *
 * The double is a test double and no emulator: it has the calls that mfsdp/cuda/ makes and no
 * other, so that a new call is a link error until somebody has thought about it.
 *
 * - A stream is a thread that runs its work in order. The double's own locks are hidden from the
 *   thread sanitizer; it sees an edge only where CUDA promises one (submission, event, stream
 *   order, synchronization), so that a missing event is a data race.
 * - Device memory is mapped apart, with a pattern around and inside it: what is written outside of
 *   an allocation is found when it is freed. Where the processor has protection keys, host threads
 *   cannot touch it at all: a host access is a SIGSEGV.
 * - Memory comes and goes in stream order: its stream fills it with a pattern, before and after.
 * - Kernels run block by block. Their threads are fibers as soon as they wait for each other; with
 *   thread_races(true) the thread sanitizer sees each as a thread, so that a missing __syncthreads
 *   is a data race.
 * - Host functions run one at a time in the whole process, without access to device memory, and may
 *   call nothing of CUDA.
 * - cuBLAS is column-major, and strict: leading dimensions, and every matrix inside its allocation.
 * - cuSOLVER too, and about workspaces, which it overwrites. It reads one triangle, complains of
 *   numbers that are not finite, very large or very small and of streams that are captured, and
 *   computes in double.
 * - NCCL moves data between streams when both sides have come: it buffers nothing. Lengths, types,
 *   roots and the order of operations are compared; ranks that wait for each other in a circle are
 *   named. Data goes one way and so do the edges that the thread sanitizer sees. The first message
 *   between two ranks makes a connection, for which the calling thread waits (or polls, if the
 *   communicator does not block). A rank has a device of its own, on which two communicators must
 *   not run at once.
 */
#ifndef MFSDP_TESTS_CUDASIM_CUDASIM_H
#define MFSDP_TESTS_CUDASIM_CUDASIM_H

#include <cstddef>
#include <cstdint>
#include <string>

namespace cudasim {

/* Everything that was wrong since the last call, a line each; "" if nothing. Waits until all
 * streams that were destroyed have ended. */
std::string complaints();

/* Fallible call number n from now (0: the next one) fails with an error that fits it; n < 0: none.
 * */
void fail_at(int64_t n);
/* Whether it did. */
bool failed();

/* Routine number n of cuSOLVER from now (0: the next one) fails on the device, as its info says; n
 * < 0: none. */
void fail_solver_at(int64_t n);
/* Handles of cuSOLVER that exist. */
int64_t solver_handles();

/* From a device's operation number `after` on (0: the next communicator's first): kDelay: each
 * comes delay_us later; kFail: the network fails, its kernels hang; kKill: nothing of it arrives
 * any more; kKillSeen: the same, and its peers are told (ncclRemoteError). */
enum class NcclFault { kNone, kDelay, kFail, kKill, kKillSeen };
void nccl_fault(int device, NcclFault kind, int64_t after = 0, int64_t delay_us = 0);
/* How long nothing may move before that is a complaint, and the end. */
void nccl_set_stall_us(int64_t stall_us);
/* How often a call of a communicator that does not block is found in progress, at least. */
void nccl_set_polls(int polls);
/* No faults, a minute, two polls. */
void nccl_reset();
/* What exists. */
int64_t nccl_communicators();
std::size_t nccl_registrations();

/* What machine there is. Back to one device, a driver and 1 GiB with reset_machine(). */
void set_driver(bool present);
void set_device_count(int count);
void set_one_bus(bool on);           /* all devices have one PCI address; else each its own */
void set_kernel_image(bool present); /* false: the program was built for other devices */
void set_memory_limit(std::size_t nbytes);
void reset_machine();

/* Bytes of device memory that are allocated; allocations of any kind. */
std::size_t device_nbytes();
std::size_t allocation_count();
/* Whether a host access to device memory is a fault on this machine. */
bool device_memory_protected();

/* See above. On: slow. */
void thread_races(bool on);

} // namespace cudasim

#endif // MFSDP_TESTS_CUDASIM_CUDASIM_H
