/* SPDX-License-Identifier: MIT */
#include "mfsdp/plan/heap.h"

#include "mfsdp/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace {

std::vector<mfsdp__keyed> draw(uint64_t seed, int32_t count) {
  std::vector<mfsdp__keyed> out;
  for (int32_t i = 0; i < count; ++i) {
    mfsdp__keyed entry;
    entry.key =
        static_cast<int64_t>(mfsdp_random_below(seed, 0, static_cast<uint64_t>(i), 20)) - 10;
    entry.id = i;
    out.push_back(entry);
  }
  return out;
}

bool less(const mfsdp__keyed &a, const mfsdp__keyed &b) {
  return std::make_pair(a.key, a.id) < std::make_pair(b.key, b.id);
}

bool same(const mfsdp__keyed &a, const mfsdp__keyed &b) {
  return a.key == b.key && a.id == b.id;
}

TEST(PlanHeap, SortsByKeyThenId) {
  for (int32_t count = 0; count < 70; ++count) {
    std::vector<mfsdp__keyed> ours = draw(static_cast<uint64_t>(count), count), theirs = ours;
    mfsdp__keyed_sort(ours.data(), count);
    std::sort(theirs.begin(), theirs.end(), less);
    EXPECT_TRUE(std::equal(ours.begin(), ours.end(), theirs.begin(), same)) << count;
  }
}

TEST(PlanHeap, PopsTheSmallestOfWhatWasPushed) {
  std::vector<mfsdp__keyed> heap(64), held;
  int64_t count = 0;
  const std::vector<mfsdp__keyed> entries = draw(5, 64);
  for (std::size_t k = 0; k < entries.size(); ++k) {
    mfsdp__heap_push(heap.data(), count++, entries[k]);
    held.push_back(entries[k]);
    if (k % 3 != 2) continue;
    const auto smallest = std::min_element(held.begin(), held.end(), less);
    EXPECT_TRUE(same(mfsdp__heap_pop(heap.data(), count--), *smallest));
    held.erase(smallest);
  }
}

/* The smallest level that holds the volume, found by counting up. */
TEST(PlanHeap, WaterLevel) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto count = static_cast<int32_t>(1 + seed % 6);
    std::vector<mfsdp__keyed> bottoms = draw(seed, count);
    for (mfsdp__keyed &b : bottoms)
      b.key += 10;
    std::sort(bottoms.begin(), bottoms.end(), less);
    const auto volume = static_cast<int64_t>(mfsdp_random_below(seed, 1, 0, 90));
    int64_t level = bottoms[0].key;
    for (;; ++level) {
      int64_t holds = 0;
      for (const mfsdp__keyed &b : bottoms)
        holds += std::max<int64_t>(0, level - b.key);
      if (holds >= volume) break;
    }
    EXPECT_EQ(mfsdp__water_level(bottoms.data(), count, volume), level) << seed;
  }
}

} // namespace
