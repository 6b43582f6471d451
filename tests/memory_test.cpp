/* SPDX-License-Identifier: MIT */
/* memory.h: the default allocator and the names of the memory classes. */
#include "mfsdp/memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace {

TEST(DefaultAllocator, EveryAlignmentAndSize) {
  const mfsdp_allocator a = mfsdp_allocator_default();
  for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
    std::vector<std::pair<unsigned char *, std::size_t>> blocks;
    for (std::size_t nbytes : {1u, 2u, 7u, 8u, 63u, 64u, 100u, 4096u, 5000u}) {
      auto *block =
          static_cast<unsigned char *>(a.alloc(nbytes, alignment, MFSDP_SPACE_HOST, a.user));
      ASSERT_NE(block, nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % alignment, 0u) << nbytes;
      std::memset(block, static_cast<int>(blocks.size() + 1), nbytes);
      blocks.emplace_back(block, nbytes);
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) { /* none overlaps another */
      EXPECT_EQ(blocks[i].first[0], i + 1);
      EXPECT_EQ(blocks[i].first[blocks[i].second - 1], i + 1);
      a.free(blocks[i].first, blocks[i].second, MFSDP_SPACE_HOST, a.user);
    }
  }
}

TEST(DefaultAllocator, ServesEverySpace) {
  const mfsdp_allocator a = mfsdp_allocator_default();
  for (mfsdp_space space : {MFSDP_SPACE_DEVICE, MFSDP_SPACE_PINNED, MFSDP_SPACE_HOST}) {
    void *block = a.alloc(16, MFSDP_ALIGN_NBYTES, space, a.user);
    ASSERT_NE(block, nullptr);
    a.free(block, 16, space, a.user);
  }
}

/* Sizes whose sum with the alignment or the hidden pointer wraps around. */
TEST(DefaultAllocator, RefusesSizesThatOverflow) {
  const mfsdp_allocator a = mfsdp_allocator_default();
  EXPECT_EQ(a.alloc(SIZE_MAX, 256, MFSDP_SPACE_HOST, a.user), nullptr);
  EXPECT_EQ(a.alloc(SIZE_MAX - 256, 256, MFSDP_SPACE_HOST, a.user), nullptr);
}

TEST(MemoryClass, Names) {
  std::set<std::string> names;
  for (int i = 1; i < MFSDP_MEMORY_CLASS_COUNT; ++i)
    names.insert(mfsdp_memory_class_name(static_cast<mfsdp_memory_class>(i)));
  EXPECT_EQ(names, (std::set<std::string>{"shard", "state", "grad", "slot", "staging", "workspace",
                                          "table"}));
  EXPECT_STREQ(mfsdp_memory_class_name(static_cast<mfsdp_memory_class>(0)), "invalid");
}

} // namespace
