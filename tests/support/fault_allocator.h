/* SPDX-License-Identifier: MIT */
/*
 * fault_allocator.h: an mfsdp_allocator that counts, checks and fails on demand.
 *
 *   test::FaultAllocator memory;
 *   context_desc.allocator = memory.allocator();
 *   for (int64_t n = 0;; ++n) {            // fail the Nth allocation until none fails
 *     memory.fail_at(n);
 *     mfsdp_status s = create_and_destroy();
 *     EXPECT_EQ(memory.live_count(), 0u);
 *     EXPECT_EQ(memory.complaints(), "");
 *     if (!memory.failed()) break;          // n was beyond the last allocation
 *     EXPECT_EQ(s, MFSDP_E_MEMORY);
 *   }
 *
 * Every block lies between red zones that are checked when it is given back; size and space must
 * then be those of the allocation. New blocks are filled with 0xa5 and freed ones with 0x5a, so
 * that code that trusts fresh or stale memory shows. Thread-safe.
 */
#ifndef MFSDP_TESTS_SUPPORT_FAULT_ALLOCATOR_H
#define MFSDP_TESTS_SUPPORT_FAULT_ALLOCATOR_H

#include "mfsdp/memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace test {

class FaultAllocator {
public:
  FaultAllocator() = default;
  FaultAllocator(const FaultAllocator &) = delete;
  FaultAllocator &operator=(const FaultAllocator &) = delete;
  ~FaultAllocator() {
    for (auto &entry : live_)
      std::free(entry.second.raw);
  }

  mfsdp_allocator allocator() {
    mfsdp_allocator a;
    a.alloc = &FaultAllocator::alloc;
    a.free = &FaultAllocator::free;
    a.user = this;
    return a;
  }

  /* Allocation number n from now (0: the next one) returns NULL; n < 0: none does. Starts over. */
  void fail_at(int64_t n) { set_fault(n, false); }
  /* Allocation number n and all later ones return NULL: memory has run out for good. */
  void fail_from(int64_t n) { set_fault(n, true); }

  /* True if a fault was delivered since fail_at or fail_from. */
  bool failed() const { return locked(failed_); }
  /* Calls of alloc since fail_at or fail_from (or since the beginning), refused ones included. */
  int64_t alloc_count() const { return locked(alloc_count_); }
  std::size_t live_count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_.size();
  }
  std::size_t live_nbytes() const { return locked(live_nbytes_); }
  std::size_t peak_nbytes() const { return locked(peak_nbytes_); }
  /* What was done wrong so far, one line each; empty: nothing. */
  std::string complaints() const { return locked(complaints_); }

private:
  static const std::size_t kZone = 64;

  struct Block {
    unsigned char *raw;
    std::size_t nbytes, before; /* before: bytes of the front zone */
    mfsdp_space space;
  };

  template <class T> T locked(const T &value) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return value;
  }

  void set_fault(int64_t n, bool forever) {
    std::lock_guard<std::mutex> lock(mutex_);
    alloc_count_ = 0;
    fail_at_ = n;
    forever_ = forever;
    failed_ = false;
  }

  void complain(const std::string &what) { complaints_ += what + "\n"; }

  static void *alloc(std::size_t nbytes, std::size_t alignment, mfsdp_space space, void *user) {
    return static_cast<FaultAllocator *>(user)->alloc_block(nbytes, alignment, space);
  }
  static void free(void *ptr, std::size_t nbytes, mfsdp_space space, void *user) {
    static_cast<FaultAllocator *>(user)->free_block(ptr, nbytes, space);
  }

  void *alloc_block(std::size_t nbytes, std::size_t alignment, mfsdp_space space) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t number = alloc_count_++;
    if (nbytes == 0) complain("alloc of 0 bytes");
    if (alignment == 0 || (alignment & (alignment - 1)) != 0)
      complain("alignment " + std::to_string(alignment) + " is no power of two");
    if (fail_at_ >= 0 && (number == fail_at_ || (forever_ && number > fail_at_))) {
      failed_ = true;
      return nullptr;
    }
    const std::size_t total = nbytes + alignment + 2 * kZone;
    if (total < nbytes) return nullptr;
    auto *raw = static_cast<unsigned char *>(std::malloc(total));
    if (raw == nullptr) return nullptr;
    const std::size_t misfit = (reinterpret_cast<std::uintptr_t>(raw) + kZone) % alignment;
    Block block = {raw, nbytes, kZone + (misfit == 0 ? 0 : alignment - misfit), space};
    std::memset(raw, 0xfd, total);
    std::memset(raw + block.before, 0xa5, nbytes);
    live_[raw + block.before] = block;
    live_nbytes_ += nbytes;
    if (live_nbytes_ > peak_nbytes_) peak_nbytes_ = live_nbytes_;
    return raw + block.before;
  }

  void free_block(void *ptr, std::size_t nbytes, mfsdp_space space) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<unsigned char *>(ptr));
    if (found == live_.end()) {
      complain(ptr == nullptr ? "free of NULL" : "free of a block that is not live");
      return;
    }
    const Block block = found->second;
    if (nbytes != block.nbytes)
      complain("a block of " + std::to_string(block.nbytes) + " bytes was freed as " +
               std::to_string(nbytes));
    if (space != block.space)
      complain("a block of space " + std::to_string(block.space) + " was freed as space " +
               std::to_string(space));
    if (!zone_intact(block.raw, block.before))
      complain("bytes before a block of " + std::to_string(block.nbytes) + " were written");
    if (!zone_intact(block.raw + block.before + block.nbytes, kZone))
      complain("bytes after a block of " + std::to_string(block.nbytes) + " were written");
    std::memset(block.raw + block.before, 0x5a, block.nbytes);
    std::free(block.raw);
    live_nbytes_ -= block.nbytes;
    live_.erase(found);
  }

  static bool zone_intact(const unsigned char *zone, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; ++i)
      if (zone[i] != 0xfd) return false;
    return true;
  }

  mutable std::mutex mutex_;
  std::map<unsigned char *, Block> live_;
  std::size_t live_nbytes_ = 0, peak_nbytes_ = 0;
  int64_t alloc_count_ = 0, fail_at_ = -1;
  bool forever_ = false, failed_ = false;
  std::string complaints_;
};

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_FAULT_ALLOCATOR_H
