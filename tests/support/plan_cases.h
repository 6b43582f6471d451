/* SPDX-License-Identifier: MIT */
/*
 * plan_cases.h: parameter lists and plans for tests.
 *
 *   test::Params list;
 *   list.add("w", MFSDP_ROLE_MATRIX, 0, {8, 8});
 *   test::PlanRig rig;
 *   mfsdp_plan_desc desc = list.desc(4);
 *   ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
 *   rig.plan ...
 *
 * The rig's memory is a FaultAllocator; the rig fails its test if anything leaks or is misused.
 */
#ifndef MFSDP_TESTS_SUPPORT_PLAN_CASES_H
#define MFSDP_TESTS_SUPPORT_PLAN_CASES_H

#include "fault_allocator.h"
#include "mfsdp/random.h"
#include "mfsdp/shard.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

namespace test {

/* Keeps names and row parts alive at fixed addresses. The reference that add returns is good until
 * the next add. */
class Params {
public:
  std::vector<mfsdp_param> list;

  Params() = default;
  Params(const Params &) = delete;
  Params &operator=(const Params &) = delete;

  mfsdp_param &add(const std::string &name, mfsdp_role role, int32_t unit,
                   const std::vector<int64_t> &shape) {
    names_.push_back(name);
    mfsdp_param p = mfsdp_param_default();
    p.name = names_.back().c_str();
    p.role = role;
    p.unit = unit;
    p.ndim = static_cast<int32_t>(shape.size());
    for (std::size_t d = 0; d < shape.size(); ++d)
      p.shape[d] = shape[d];
    list.push_back(p);
    return list.back();
  }
  mfsdp_param &add_rows(const std::string &name, int32_t unit, const std::vector<int64_t> &rows,
                        int64_t cols) {
    int64_t sum = 0;
    for (int64_t r : rows)
      sum += r;
    parts_.push_back(rows);
    mfsdp_param &p = add(name, MFSDP_ROLE_MATRIX, unit, {sum, cols});
    p.view = MFSDP_VIEW_ROWS;
    p.part_rows = parts_.back().data();
    p.part_count = static_cast<int32_t>(rows.size());
    return p;
  }
  /* (count, sum of rows, cols): every matrix of the batch cut again. */
  mfsdp_param &add_batch_rows(const std::string &name, int32_t unit, int64_t count,
                              const std::vector<int64_t> &rows, int64_t cols) {
    mfsdp_param &p = add_rows(name, unit, rows, cols);
    p.view = MFSDP_VIEW_BATCH;
    p.ndim = 3;
    p.shape[2] = cols;
    p.shape[1] = p.shape[0];
    p.shape[0] = count;
    return p;
  }
  mfsdp_param &add_heads(const std::string &name, int32_t unit, int32_t heads, int64_t rows,
                         int64_t cols) {
    mfsdp_param &p = add(name, MFSDP_ROLE_MATRIX, unit, {rows, cols});
    p.view = MFSDP_VIEW_HEADS;
    p.head_count = heads;
    return p;
  }
  /* Repeats parameter `owner` under another name in a later unit. */
  mfsdp_param &add_alias(const std::string &name, std::size_t owner, int32_t unit) {
    names_.push_back(name);
    mfsdp_param p = list[owner];
    p.name = names_.back().c_str();
    p.alias_of = list[owner].name;
    p.unit = unit;
    list.push_back(p);
    return list.back();
  }

  mfsdp_plan_desc desc(int32_t world, mfsdp_planner planner = MFSDP_PLANNER_SCOPE_GREEDY) const {
    mfsdp_plan_desc d = mfsdp_plan_desc_default();
    d.params = list.empty() ? nullptr : list.data();
    d.param_count = static_cast<int32_t>(list.size());
    d.world = world;
    d.planner = planner;
    return d;
  }

private:
  std::deque<std::string> names_;
  std::deque<std::vector<int64_t>> parts_;
};

class PlanRig {
public:
  FaultAllocator memory;
  mfsdp_context context;
  mfsdp_plan *plan = nullptr;

  PlanRig() {
    mfsdp_context_desc d = mfsdp_context_desc_default();
    d.allocator = memory.allocator();
    EXPECT_EQ(mfsdp_context_init(&context, &d), MFSDP_OK);
  }
  PlanRig(const PlanRig &) = delete;
  PlanRig &operator=(const PlanRig &) = delete;
  ~PlanRig() {
    drop();
    EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK) << message();
    EXPECT_EQ(memory.live_count(), 0u);
    EXPECT_EQ(memory.complaints(), "");
  }

  mfsdp_status create(const mfsdp_plan_desc &desc) {
    drop();
    return mfsdp_plan_create(&context, &desc, &plan);
  }
  void drop() {
    mfsdp_plan_destroy(&context, plan);
    plan = nullptr;
  }
  std::string message() const { return mfsdp_context_error(&context)->message; }

  const mfsdp_piece *first_piece() const {
    int32_t count = 0;
    return mfsdp_plan_pieces(plan, -1, &count);
  }
  std::vector<mfsdp_piece> pieces(int32_t unit = -1) const {
    int32_t count = 0;
    const mfsdp_piece *first = mfsdp_plan_pieces(plan, unit, &count);
    return std::vector<mfsdp_piece>(first, first + count);
  }
  std::vector<mfsdp_norm_block> blocks() {
    int32_t count = 0;
    std::vector<mfsdp_norm_block> out(static_cast<std::size_t>(mfsdp_plan_block_count(plan)));
    EXPECT_EQ(
        mfsdp_plan_blocks(&context, plan, out.data(), static_cast<int32_t>(out.size()), &count),
        MFSDP_OK);
    EXPECT_EQ(static_cast<std::size_t>(count), out.size());
    return out;
  }
  std::vector<mfsdp_extent> extents(int32_t unit, mfsdp_layout_kind kind) {
    int32_t count = 0;
    EXPECT_EQ(mfsdp_plan_extents(&context, plan, unit, kind, nullptr, 0, &count), MFSDP_OK);
    std::vector<mfsdp_extent> out(static_cast<std::size_t>(count));
    EXPECT_EQ(mfsdp_plan_extents(&context, plan, unit, kind, out.data(), count, &count), MFSDP_OK);
    return out;
  }
  std::vector<unsigned char> bytes() {
    std::size_t needed = 0;
    EXPECT_EQ(mfsdp_plan_serialize(&context, plan, nullptr, 0, &needed), MFSDP_OK);
    std::vector<unsigned char> out(needed);
    EXPECT_EQ(mfsdp_plan_serialize(&context, plan, out.data(), out.size(), &needed), MFSDP_OK);
    return out;
  }
};

/* Draws from a counter-based generator: the same list on every machine. */
class Draw {
public:
  explicit Draw(uint64_t seed) : seed_(seed) {}
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(
        mfsdp_random_below(seed_, 1, next_++, static_cast<uint64_t>(bound)));
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

private:
  uint64_t seed_, next_ = 0;
};

/* A list with every role and view, empty tensors, gaps between units, aliases and odd sizes. */
inline void fill_random(Params *list, uint64_t seed) {
  Draw draw(seed);
  const int64_t count = draw.below(24);
  const int64_t units = draw.between(1, 6);
  for (int64_t i = 0; i < count; ++i) {
    const std::string name = "t" + std::to_string(i);
    const auto unit = static_cast<int32_t>(draw.below(units) * 2); /* odd numbers are gaps */
    const int64_t rows = draw.below(8) == 0 ? draw.below(2) : draw.between(1, 90);
    const int64_t cols = draw.below(8) == 0 ? draw.below(2) : draw.between(1, 90);
    switch (draw.below(9)) {
    case 0: list->add(name, MFSDP_ROLE_MATRIX, unit, {rows, cols}); break;
    case 1:
      list->add(name, MFSDP_ROLE_MATRIX, unit, {rows, cols, draw.between(1, 3)}).view =
          MFSDP_VIEW_CONV;
      break;
    case 2:
      if (i % 2 == 0)
        list->add_batch_rows(name, unit, draw.below(9), {rows / 3, 0, rows - rows / 3}, cols);
      else
        list->add(name, MFSDP_ROLE_MATRIX, unit, {draw.below(9), rows, cols}).view =
            MFSDP_VIEW_BATCH;
      break;
    case 3: list->add_rows(name, unit, {rows, draw.below(3), draw.between(1, 40)}, cols); break;
    case 4: {
      const auto heads = static_cast<int32_t>(draw.between(1, 6));
      list->add_heads(name, unit, heads, heads * rows, cols);
      break;
    }
    case 5: list->add(name, MFSDP_ROLE_FROZEN, unit, {rows, cols * draw.between(1, 40)}); break;
    case 6: list->add(name, MFSDP_ROLE_ELEMENTWISE, unit, {rows}); break;
    case 7:
      list->add(name, MFSDP_ROLE_ELEMENTWISE, unit, {rows * draw.between(1, 60), cols});
      break;
    default:
      if (i > 0) {
        const auto owner = static_cast<std::size_t>(draw.below(i));
        if (list->list[owner].alias_of == nullptr)
          list->add_alias(name, owner,
                          list->list[owner].unit + static_cast<int32_t>(draw.below(3)));
        else
          list->add(name, MFSDP_ROLE_MATRIX, unit, {rows, cols});
      } else {
        list->add(name, MFSDP_ROLE_ELEMENTWISE, unit, {0, 8});
      }
    }
  }
}

/* A decoder-only transformer: embeddings in unit 0, one unit per block, the head in the last. */
inline void fill_gpt(Params *list, int32_t layers, int64_t dim, int64_t vocabulary) {
  list->add("wte", MFSDP_ROLE_ELEMENTWISE, 0, {vocabulary, dim});
  for (int32_t l = 1; l <= layers; ++l) {
    const std::string block = "h" + std::to_string(l) + ".";
    list->add(block + "ln1", MFSDP_ROLE_ELEMENTWISE, l, {dim});
    list->add_rows(block + "qkv", l, {dim, dim, dim}, dim);
    list->add(block + "out", MFSDP_ROLE_MATRIX, l, {dim, dim});
    list->add(block + "ln2", MFSDP_ROLE_ELEMENTWISE, l, {dim});
    list->add(block + "up", MFSDP_ROLE_MATRIX, l, {4 * dim, dim});
    list->add(block + "down", MFSDP_ROLE_MATRIX, l, {dim, 4 * dim});
  }
  list->add("head", MFSDP_ROLE_ELEMENTWISE, layers + 1, {vocabulary, dim});
}

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_PLAN_CASES_H
