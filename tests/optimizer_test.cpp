/* SPDX-License-Identifier: MIT */
/*
 * optimizer.h: routing, the state table, the order of the list, and that a step is the single
 * matrix functions bit for bit. The formulas themselves are judged in muon_test and adamw_test.
 *
 * Counts allocations: MFSDP_TEST_WRAP_MALLOC. One queue at a time, whose races host_queue_test looks
 * for: not run under the thread sanitizer (MFSDP_TEST_ONE_QUEUE).
 */
#include "mfsdp/optimizer.h"

#include "mfsdp/dtype.h"
#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"
#include "tests/support/malloc_count.h"

#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <string>
#include <vector>

namespace {

using test::Buffer;
using test::Rig;
using test::same_bits;

std::vector<float> values(int64_t count, uint64_t seed) {
  return ref::narrow(ref::random_matrix(1, count, seed));
}

/* A list of tensors with their arrays. */
class Tensors {
public:
  explicit Tensors(Rig *rig) : rig_(rig) {}

  mfsdp_optimizer_tensor &matrix(const char *name, int32_t group, int64_t rows, int64_t cols) {
    mfsdp_optimizer_tensor &t = add(name, MFSDP_ROLE_MATRIX, group, rows * cols);
    t.rows = rows;
    t.cols = cols;
    return t;
  }
  mfsdp_optimizer_tensor &run(const char *name, int32_t group, int64_t count) {
    return add(name, MFSDP_ROLE_ELEMENTWISE, group, count);
  }
  /* Fresh gradients for everyone. */
  void fill_grads(uint64_t seed) {
    for (std::size_t i = 0; i < list.size(); ++i)
      grads[i].write(values(list[i].count, 1000 * seed + i));
  }
  void zero_grads() {
    for (std::size_t i = 0; i < list.size(); ++i)
      grads[i].write(std::vector<float>(static_cast<std::size_t>(list[i].count), 0.0f));
  }

  std::vector<mfsdp_optimizer_tensor> list;
  std::deque<Buffer<float>> masters, grads;

private:
  mfsdp_optimizer_tensor &add(const char *name, mfsdp_role role, int32_t group, int64_t count) {
    mfsdp_optimizer_tensor t;
    std::memset(&t, 0, sizeof(t));
    masters.emplace_back(rig_, values(count, list.size() + 1));
    grads.emplace_back(rig_, std::vector<float>(static_cast<std::size_t>(count), 0.0f));
    t.name = name;
    t.role = role;
    t.hyper_group = group;
    t.param = static_cast<int32_t>(list.size());
    t.count = count;
    t.master = masters.back().data();
    t.grad = grads.back().data();
    list.push_back(t);
    return list.back();
  }
  Rig *rig_;
};

/* groups[0] Muon, groups[1] AdamW; tests change them. */
struct Groups {
  Groups() {
    list.push_back(mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN));
    list.push_back(mfsdp_hyper_group_adamw(0.01, 0.1));
  }
  mfsdp_optimizer_desc desc() const {
    mfsdp_optimizer_desc d = mfsdp_optimizer_desc_default();
    d.groups = list.data();
    d.group_count = static_cast<int32_t>(list.size());
    return d;
  }
  std::vector<mfsdp_step_scalars> scalars() const {
    std::vector<mfsdp_step_scalars> out;
    for (const mfsdp_hyper_group &g : list)
      out.push_back(mfsdp_step_scalars_default(g.lr, g.weight_decay));
    return out;
  }
  std::vector<mfsdp_hyper_group> list;
};

class OptimizerBase {
protected:
  explicit OptimizerBase(const test::RigKind &kind) : rig_(kind), tensors_(&rig_) {}
  ~OptimizerBase() { mfsdp_optimizer_destroy(&rig_.context, optimizer_); }

  mfsdp_status create() {
    const mfsdp_optimizer_desc desc = groups_.desc();
    return mfsdp_optimizer_create(&rig_.context, rig_.backend, &desc, tensors_.list.data(),
                                  static_cast<int32_t>(tensors_.list.size()), &optimizer_);
  }
  void must_create() { ASSERT_EQ(create(), MFSDP_OK) << rig_.message(); }
  void step(const std::vector<mfsdp_step_scalars> &scalars,
            const std::vector<uint32_t> *present = nullptr) {
    Buffer<mfsdp_step_scalars> on_device(&rig_, scalars);
    Buffer<uint32_t> words(&rig_, present ? *present : std::vector<uint32_t>(1, 1));
    EXPECT_EQ(mfsdp_optimizer_step(&rig_.context, optimizer_, rig_.queue, on_device.data(),
                                   present ? words.data() : nullptr),
              MFSDP_OK)
        << rig_.message();
    EXPECT_EQ(rig_.sync(), MFSDP_OK) << rig_.message();
  }
  void expect_message(const std::string &part) {
    EXPECT_NE(std::string(rig_.message()).find(part), std::string::npos) << rig_.message();
  }
  std::vector<float> state(int32_t index) {
    int32_t count = 0;
    const mfsdp_optimizer_state *states = mfsdp_optimizer_states(optimizer_, &count);
    EXPECT_LT(index, count);
    const auto *data = static_cast<const float *>(states[index].data);
    return rig_.read(data, static_cast<std::size_t>(states[index].count), states[index].space);
  }

  Rig rig_;
  Groups groups_;
  Tensors tensors_;
  mfsdp_optimizer *optimizer_ = nullptr;
};

class Optimizer : public OptimizerBase, public ::testing::TestWithParam<test::RigKind> {
protected:
  Optimizer() : OptimizerBase(GetParam()) {}
  /* Tensors in mixed order, empty ones among them, sizes that need padding. */
  void add_mixed() {
    tensors_.run("bias", 1, 130);
    tensors_.matrix("tall", 0, 40, 12);
    tensors_.run("empty run", 1, 0);
    tensors_.matrix("square", 0, 16, 16);
    tensors_.matrix("empty matrix", 0, 0, 8);
    tensors_.matrix("by adamw", 1, 9, 7);
    tensors_.run("norm", 1, 64);
    tensors_.matrix("wide", 0, 5, 70);
  }
};

/* ---- set-up ---- */

TEST_P(Optimizer, StateTable) {
  add_mixed();
  must_create();
  const struct {
    const char *name;
    int32_t tensor;
  } want[] = {{"momentum", 1},   {"momentum", 3},   {"momentum", 7},
              {"exp_avg", 0},    {"exp_avg_sq", 0}, {"exp_avg", 5},
              {"exp_avg_sq", 5}, {"exp_avg", 6},    {"exp_avg_sq", 6}};
  int32_t count = 0;
  const mfsdp_optimizer_state *states = mfsdp_optimizer_states(optimizer_, &count);
  ASSERT_EQ(static_cast<std::size_t>(count), sizeof(want) / sizeof(want[0]));
  const auto *begin = static_cast<const unsigned char *>(optimizer_->state.data);
  for (int32_t i = 0; i < count; ++i) {
    const int64_t elements = tensors_.list[static_cast<std::size_t>(want[i].tensor)].count;
    EXPECT_STREQ(states[i].name, want[i].name);
    EXPECT_EQ(states[i].tensor, want[i].tensor);
    EXPECT_EQ(states[i].dtype, MFSDP_F32);
    EXPECT_EQ(states[i].space, MFSDP_SPACE_DEVICE);
    EXPECT_EQ(states[i].count, elements);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(states[i].data) % MFSDP_ALIGN_NBYTES, 0u);
    EXPECT_EQ(state(i), std::vector<float>(static_cast<std::size_t>(elements), 0.0f));
    /* Behind the last one, and inside the buffer: disjoint, in table order. */
    const auto *at = static_cast<const unsigned char *>(states[i].data);
    EXPECT_GE(at, begin);
    begin = at + static_cast<std::size_t>(elements) * sizeof(float);
  }
  EXPECT_LE(begin,
            static_cast<const unsigned char *>(optimizer_->state.data) + optimizer_->state.nbytes);
}

/* Groups in order, tensors in order; a job per matrix, one job for all element runs of a group. */
TEST_P(Optimizer, OrderOfJobs) {
  add_mixed();
  must_create();
  ASSERT_EQ(optimizer_->job_count, 4);
  ASSERT_EQ(optimizer_->item_count, 6);
  const struct {
    int32_t group, first, count;
    int64_t rows, cols, largest, total;
  } want[] = {{0, 0, 1, 40, 12, 480, 480},
              {0, 1, 1, 16, 16, 256, 256},
              {0, 2, 1, 5, 70, 350, 350},
              {1, 3, 3, 0, 0, 130, 130 + 63 + 64}};
  for (int j = 0; j < 4; ++j) {
    EXPECT_EQ(optimizer_->jobs[j].hyper_group, want[j].group);
    EXPECT_EQ(optimizer_->jobs[j].first_item, want[j].first);
    EXPECT_EQ(optimizer_->jobs[j].item_count, want[j].count);
    EXPECT_EQ(optimizer_->jobs[j].max_count, want[j].largest);
    EXPECT_EQ(optimizer_->jobs[j].total_count, want[j].total);
    if (want[j].group != 0) continue;
    EXPECT_EQ(optimizer_->jobs[j].rows, want[j].rows);
    EXPECT_EQ(optimizer_->jobs[j].cols, want[j].cols);
  }
  const int32_t order[] = {1, 3, 7, 0, 5, 6};
  const std::vector<mfsdp_fused_item> items =
      rig_.read(static_cast<const mfsdp_fused_item *>(optimizer_->items.data),
                static_cast<std::size_t>(optimizer_->item_count));
  for (int i = 0; i < 6; ++i)
    EXPECT_EQ(items[static_cast<std::size_t>(i)].master,
              tensors_.list[static_cast<std::size_t>(order[i])].master);
}

/* What measure predicts is what create books, byte for byte. */
TEST_P(Optimizer, MeasureIsWhatCreateTakes) {
  add_mixed();
  const mfsdp_optimizer_desc desc = groups_.desc();
  mfsdp_optimizer_sizes sizes;
  const mfsdp_context before = rig_.context;
  const int64_t allocations = rig_.memory.alloc_count();
  ASSERT_EQ(
      mfsdp_optimizer_measure(&rig_.context, rig_.backend, &desc, tensors_.list.data(), 8, &sizes),
      MFSDP_OK)
      << rig_.message();
  EXPECT_EQ(rig_.memory.alloc_count(), allocations) << "measure allocates nothing";
  must_create();
  const auto taken = [&](mfsdp_memory_class c) {
    return rig_.context.current_nbytes[c] - before.current_nbytes[c];
  };
  EXPECT_EQ(taken(MFSDP_MEMORY_STATE), sizes.state_nbytes);
  EXPECT_EQ(taken(MFSDP_MEMORY_WORKSPACE), sizes.workspace_nbytes);
  EXPECT_EQ(taken(MFSDP_MEMORY_TABLE),
            sizeof(mfsdp_optimizer) + 2 * sizeof(mfsdp_hyper_group) +
                static_cast<std::size_t>(sizes.job_count) * sizeof(mfsdp__optimizer_job) +
                static_cast<std::size_t>(sizes.state_count) * sizeof(mfsdp_optimizer_state) +
                static_cast<std::size_t>(sizes.item_count) * sizeof(mfsdp_fused_item));
  EXPECT_EQ(sizes.job_count, 4);
  EXPECT_EQ(sizes.item_count, 6);
  EXPECT_EQ(sizes.state_count, 9);
  /* By hand: each array on a multiple of 128 elements: momenta 512 + 256 + 384, then twice
   * 256 + 128 + 128. */
  EXPECT_EQ(sizes.state_nbytes, 4u * (512 + 256 + 384 + 2 * (256 + 128 + 128)));
  EXPECT_EQ(sizes.direction_nbytes, 4u * 512);
  EXPECT_EQ(taken(MFSDP_MEMORY_SHARD) + taken(MFSDP_MEMORY_GRAD) + taken(MFSDP_MEMORY_SLOT), 0u);
}

/* The description and the list need not outlive create. */
TEST_P(Optimizer, CopiesGroupsAndList) {
  tensors_.matrix("w", 0, 8, 8);
  tensors_.fill_grads(1);
  must_create();
  const std::vector<mfsdp_step_scalars> scalars = groups_.scalars();
  std::memset(groups_.list.data(), 0xff, groups_.list.size() * sizeof(groups_.list[0]));
  std::memset(tensors_.list.data(), 0xff, tensors_.list.size() * sizeof(tensors_.list[0]));
  const std::vector<float> before = tensors_.masters[0].read();
  step(scalars);
  EXPECT_FALSE(same_bits(tensors_.masters[0].read(), before));
}

TEST_P(Optimizer, NoTensorsAtAll) {
  must_create();
  int32_t count = 7;
  (void)mfsdp_optimizer_states(optimizer_, &count);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(mfsdp_optimizer_step(&rig_.context, optimizer_, rig_.queue, nullptr, nullptr),
            MFSDP_OK);
}

TEST_P(Optimizer, OnlyEmptyTensors) {
  tensors_.matrix("a", 0, 8, 0);
  tensors_.run("b", 1, 0);
  tensors_.list[0].master = tensors_.list[1].master = nullptr;
  tensors_.list[0].grad = tensors_.list[1].grad = nullptr;
  must_create();
  EXPECT_EQ(optimizer_->job_count, 0);
  step(groups_.scalars());
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 0u);
}

/* ---- the step ---- */

/* The same tensors by mfsdp_muon_step and mfsdp_adamw_commit, one at a time: the same bits, in
 * parameters and state, over several steps. The one direction buffer is shared by all matrices. */
TEST_P(Optimizer, StepEqualsTheSingleFunctions) {
  add_mixed();
  Buffer<uint16_t> param(&rig_, 350);
  tensors_.list[7].param_data = param.data();
  tensors_.list[7].param_dtype = MFSDP_BF16;
  must_create();

  Tensors alone(&rig_);
  alone.run("", 1, 130), alone.matrix("", 0, 40, 12), alone.run("", 1, 0);
  alone.matrix("", 0, 16, 16), alone.matrix("", 0, 0, 8), alone.matrix("", 1, 9, 7);
  alone.run("", 1, 64), alone.matrix("", 0, 5, 70);
  std::deque<Buffer<float>> state0, state1;
  for (const mfsdp_optimizer_tensor &t : alone.list) {
    state0.emplace_back(&rig_, std::vector<float>(static_cast<std::size_t>(t.count), 0.0f));
    state1.emplace_back(&rig_, std::vector<float>(static_cast<std::size_t>(t.count), 0.0f));
  }
  Buffer<float> direction(&rig_, 512);
  Buffer<unsigned char> workspace(&rig_, 1 << 16);
  Buffer<mfsdp_fused_item> item(&rig_, 1);
  Buffer<mfsdp_step_scalars> own_scalars(&rig_, 2);

  std::vector<mfsdp_step_scalars> scalars = groups_.scalars();
  for (uint64_t t = 1; t <= 3; ++t) {
    for (mfsdp_step_scalars &s : scalars) {
      s.applied_steps = static_cast<int64_t>(t);
      s.grad_scale = 0.5;
      s.clip_scale = 0.25;
    }
    tensors_.fill_grads(t);
    alone.fill_grads(t);
    step(scalars);
    own_scalars.write(scalars);
    for (std::size_t i = 0; i < alone.list.size(); ++i) {
      const mfsdp_optimizer_tensor &x = alone.list[i];
      if (x.count == 0) continue;
      const mfsdp_hyper_group &group = groups_.list[static_cast<std::size_t>(x.hyper_group)];
      if (x.hyper_group == 0) {
        item.write({mfsdp_muon_item(&group.muon, x.rows, x.cols, x.master, x.grad, state0[i].data(),
                                    direction.data())});
        ASSERT_EQ(mfsdp_muon_step(&rig_.context, rig_.backend, rig_.queue, &group.muon, x.rows,
                                  x.cols, direction.data(), item.data(), 0, own_scalars.data(),
                                  nullptr, workspace.data(), workspace.count()),
                  MFSDP_OK);
        ASSERT_EQ(rig_.sync(), MFSDP_OK);
      } else {
        item.write(
            {mfsdp_adamw_item(x.master, x.grad, state0[i].data(), state1[i].data(), x.count)});
        ASSERT_EQ(mfsdp_adamw_commit(&rig_.context, rig_.backend, rig_.queue, &group.adamw,
                                     item.data(), 1, x.count, x.count, 1, own_scalars.data() + 1,
                                     nullptr),
                  MFSDP_OK);
        ASSERT_EQ(rig_.sync(), MFSDP_OK);
      }
    }
    for (std::size_t i = 0; i < alone.list.size(); ++i)
      EXPECT_TRUE(same_bits(tensors_.masters[i].read(), alone.masters[i].read()))
          << tensors_.list[i].name << ", step " << t;
  }
  const std::size_t muon[] = {1, 3, 7}, adamw[] = {0, 5, 6};
  for (int32_t k = 0; k < 3; ++k) {
    EXPECT_TRUE(same_bits(state(k), state0[muon[k]].read()));
    EXPECT_TRUE(same_bits(state(3 + 2 * k), state0[adamw[k]].read()));
    EXPECT_TRUE(same_bits(state(4 + 2 * k), state1[adamw[k]].read()));
  }
  std::vector<uint16_t> want;
  for (float w : tensors_.masters[7].read())
    want.push_back(mfsdp_bf16_from_f32(w));
  EXPECT_EQ(param.read(), want);
}

/* Matrices of one shape share a job as far as the workspace of the largest goes, in list order,
 * whatever lies between them; no byte more is taken, and every bit is that of a step alone. */
TEST_P(Optimizer, BatchesOfOneShape) {
  groups_.list[0].muon.normalize_rows = 1;
  tensors_.matrix("large", 0, 48, 64); /* room for four directions of 24 x 32, one of 30 x 64 */
  for (int i = 0; i < 3; ++i) {
    tensors_.matrix("small", 0, 24, 32);
    tensors_.matrix("other", 0, 30, 64);
    tensors_.run("between", 1, 7);
  }
  tensors_.matrix("small", 0, 24, 32);
  tensors_.matrix("transposed", 0, 32, 24);
  tensors_.matrix("small", 0, 24, 32);
  const auto count = static_cast<int32_t>(tensors_.list.size());
  const mfsdp_optimizer_desc desc = groups_.desc();
  mfsdp_optimizer_sizes all, largest;
  ASSERT_EQ(mfsdp_optimizer_measure(&rig_.context, rig_.backend, &desc, tensors_.list.data(), count,
                                    &all),
            MFSDP_OK);
  ASSERT_EQ(mfsdp_optimizer_measure(&rig_.context, rig_.backend, &desc, tensors_.list.data(), 1,
                                    &largest),
            MFSDP_OK);
  EXPECT_EQ(all.workspace_nbytes, largest.workspace_nbytes);
  must_create();
  std::size_t one = 0;
  ASSERT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &groups_.list[0].muon.newton_schulz,
                                                 24, 32, &one),
            MFSDP_OK);
  const auto batch = static_cast<int32_t>(std::min<std::size_t>(4, largest.scratch_nbytes / one));
  ASSERT_GE(batch, 2) << "nothing is batched: the test shows nothing";
  std::vector<std::vector<const char *>> jobs;
  const std::vector<mfsdp_fused_item> items =
      rig_.read(static_cast<const mfsdp_fused_item *>(optimizer_->items.data),
                static_cast<std::size_t>(optimizer_->item_count));
  int32_t smalls = 0;
  for (int32_t j = 0; j < optimizer_->job_count; ++j) {
    const mfsdp__optimizer_job &job = optimizer_->jobs[j];
    for (int32_t i = 1; job.hyper_group == 0 && i < job.item_count; ++i)
      EXPECT_EQ(items[static_cast<std::size_t>(job.first_item + i)].direction -
                    items[static_cast<std::size_t>(job.first_item + i) - 1].direction,
                job.direction_stride);
    if (job.hyper_group != 0 || job.rows != 24) continue;
    EXPECT_EQ(job.item_count, std::min(batch, 5 - smalls));
    smalls += job.item_count;
  }
  EXPECT_EQ(smalls, 5);

  Tensors alone(&rig_);
  std::deque<Buffer<float>> momenta, moments;
  for (const mfsdp_optimizer_tensor &t : tensors_.list) {
    if (t.role == MFSDP_ROLE_MATRIX)
      alone.matrix("", 0, t.rows, t.cols);
    else
      alone.run("", 1, t.count);
    momenta.emplace_back(&rig_, std::vector<float>(static_cast<std::size_t>(t.count), 0.0f));
    moments.emplace_back(&rig_, std::vector<float>(static_cast<std::size_t>(t.count), 0.0f));
  }
  Buffer<float> direction(&rig_, 48 * 64);
  Buffer<unsigned char> workspace(&rig_, 1 << 17);
  const std::vector<mfsdp_step_scalars> scalars = groups_.scalars();
  Buffer<mfsdp_fused_item> on_device(&rig_, 1);
  Buffer<mfsdp_step_scalars> own_scalars(&rig_, scalars);
  const mfsdp_muon_desc &muon = groups_.list[0].muon;
  for (uint64_t t = 1; t <= 2; ++t) {
    tensors_.fill_grads(t);
    alone.fill_grads(t);
    step(scalars);
    for (std::size_t i = 0; i < alone.list.size(); ++i) {
      const mfsdp_optimizer_tensor &x = alone.list[i];
      if (x.role != MFSDP_ROLE_MATRIX) continue;
      mfsdp_fused_item item = mfsdp_muon_item(&muon, x.rows, x.cols, x.master, x.grad,
                                              momenta[i].data(), direction.data());
      item.state[1] = moments[i].data();
      on_device.write({item});
      ASSERT_EQ(mfsdp_muon_step(&rig_.context, rig_.backend, rig_.queue, &muon, x.rows, x.cols,
                                direction.data(), on_device.data(), 0, own_scalars.data(), nullptr,
                                workspace.data(), workspace.count()),
                MFSDP_OK);
      ASSERT_EQ(rig_.sync(), MFSDP_OK);
      EXPECT_TRUE(same_bits(tensors_.masters[i].read(), alone.masters[i].read())) << i;
    }
  }
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 2u * 2u * 10u) << "ten matrices, both ways";
  int32_t states = 0;
  const mfsdp_optimizer_state *table = mfsdp_optimizer_states(optimizer_, &states);
  for (int32_t k = 0; k < states; ++k) {
    const auto i = static_cast<std::size_t>(table[k].tensor);
    const std::string name = table[k].name;
    if (name == "momentum") {
      EXPECT_TRUE(same_bits(state(k), momenta[i].read()));
      EXPECT_EQ(table[k].cols, tensors_.list[i].cols);
    }
    if (name != "row_moment") continue;
    EXPECT_EQ(table[k].rows, tensors_.list[i].rows);
    EXPECT_EQ(table[k].cols, 1);
    EXPECT_EQ(table[k].count, tensors_.list[i].rows);
    std::vector<float> want = moments[i].read();
    want.resize(static_cast<std::size_t>(tensors_.list[i].rows));
    EXPECT_TRUE(same_bits(state(k), want));
  }
}

/* Offload with state arrays of unlike sizes: the bits of a step on the device. */
TEST_P(Optimizer, OffloadOfUnlikeStates) {
  groups_.list[0].muon.normalize_rows = 1;
  for (int i = 0; i < 2; ++i)
    tensors_.matrix("w", 0, 30, 20);
  tensors_.matrix("by adamw", 1, 9, 7);
  std::deque<Buffer<float>> params;
  std::vector<std::vector<float>> want;
  for (int offload = 0; offload < 2; ++offload) {
    mfsdp_optimizer_desc desc = groups_.desc();
    desc.state_space = offload ? MFSDP_SPACE_HOST : MFSDP_SPACE_DEVICE;
    std::vector<std::vector<float>> on_host;
    for (std::size_t i = 0; i < 3; ++i) {
      on_host.push_back(values(tensors_.list[i].count, 70 + i));
      tensors_.masters[i].write(on_host[i]);
      tensors_.list[i].master = offload ? on_host[i].data() : tensors_.masters[i].data();
      params.emplace_back(&rig_, tensors_.masters[i].count());
      tensors_.list[i].param_data = params.back().data();
      tensors_.list[i].param_dtype = MFSDP_F32;
    }
    ASSERT_EQ(mfsdp_optimizer_create(&rig_.context, rig_.backend, &desc, tensors_.list.data(), 3,
                                     &optimizer_),
              MFSDP_OK)
        << rig_.message();
    for (uint64_t t = 1; t <= 2; ++t) {
      tensors_.fill_grads(t);
      step(groups_.scalars());
    }
    for (std::size_t i = 0; i < 3; ++i) {
      if (offload)
        EXPECT_TRUE(same_bits(on_host[i], want[i])) << i;
      else
        want.push_back(tensors_.masters[i].read());
    }
    int32_t states = 0;
    (void)mfsdp_optimizer_states(optimizer_, &states);
    EXPECT_EQ(states, 6);
    for (int32_t k = 0; k < states; ++k) {
      if (offload)
        EXPECT_TRUE(same_bits(state(k), want[3 + static_cast<std::size_t>(k)])) << k;
      else
        want.push_back(state(k));
    }
    mfsdp_optimizer_destroy(&rig_.context, optimizer_);
    optimizer_ = nullptr;
  }
}

/* d1: exactly one orthogonalization per non-empty Muon matrix and step, none for AdamW. */
TEST_P(Optimizer, CountsNewtonSchulz) {
  add_mixed();
  must_create();
  for (uint64_t t = 1; t <= 4; ++t) {
    tensors_.fill_grads(t);
    step(groups_.scalars());
    EXPECT_EQ(rig_.context.counters.newton_schulz_count, 3 * t);
  }
}

/* d5: the user's lr and decay belong to the group. With zero gradients only the decay is left. */
TEST_P(Optimizer, EachGroupHasItsOwnLrAndDecay) {
  groups_.list.push_back(mfsdp_hyper_group_muon(MFSDP_MUON_TORCH));
  groups_.list.push_back(mfsdp_hyper_group_adamw(0.5, 0.0));
  groups_.list[0].lr = 0.25, groups_.list[0].weight_decay = 0.1;
  groups_.list[1].lr = 0.5, groups_.list[1].weight_decay = 0.1;
  groups_.list[2].lr = 0.25, groups_.list[2].weight_decay = 0.0;
  for (int32_t g = 0; g < 4; ++g)
    tensors_.matrix("w", g, 6, 9);
  tensors_.zero_grads();
  must_create();
  std::vector<std::vector<float>> want;
  const float decay[] = {static_cast<float>(1.0 - 0.25 * 0.1), static_cast<float>(1.0 - 0.5 * 0.1),
                         1.0f, 1.0f};
  for (std::size_t g = 0; g < 4; ++g) {
    want.push_back(tensors_.masters[g].read());
    for (float &w : want.back())
      w *= decay[g];
  }
  step(groups_.scalars());
  for (std::size_t g = 0; g < 4; ++g)
    EXPECT_TRUE(same_bits(tensors_.masters[g].read(), want[g])) << g;
  /* And with equal gradients a larger lr moves further: linear from a fresh state. */
  mfsdp_optimizer_destroy(&rig_.context, optimizer_);
  groups_.list[0] = groups_.list[2];
  groups_.list[0].lr = 0.125;
  must_create();
  const std::vector<float> g = values(54, 99);
  tensors_.grads[0].write(g);
  tensors_.grads[2].write(g);
  tensors_.masters[0].write(std::vector<float>(54, 0.0f));
  tensors_.masters[2].write(std::vector<float>(54, 0.0f));
  step(groups_.scalars());
  std::vector<float> twice = tensors_.masters[0].read();
  for (float &w : twice)
    w *= 2.0f;
  EXPECT_TRUE(same_bits(tensors_.masters[2].read(), twice)) << "0.25 against 0.125, exactly";
}

/* Muon's input is scale-free, so its groups are not clipped by default; AdamW's are. */
TEST_P(Optimizer, ClippingIsAnOptionOfTheGroup) {
  EXPECT_EQ(groups_.list[0].clipped, 0);
  EXPECT_EQ(groups_.list[1].clipped, 1);
  tensors_.matrix("not clipped", 0, 4, 4);
  tensors_.run("clipped", 1, 16);
  groups_.list.push_back(groups_.list[0]);
  groups_.list[2].clipped = 1;
  tensors_.matrix("muon, clipped", 2, 4, 4);
  tensors_.fill_grads(1);
  const std::vector<float> g = values(16, 5);
  for (std::size_t i = 0; i < 3; ++i)
    tensors_.grads[i].write(g);
  must_create();
  std::vector<mfsdp_step_scalars> scalars = groups_.scalars();
  for (mfsdp_step_scalars &s : scalars)
    s.clip_scale = 0.5;
  step(scalars);
  const std::vector<float> plain = state(0), clipped = state(3);
  const std::vector<float> average = state(1);
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(plain[i], static_cast<float>(1.0 - 0.95) * g[i]);
    EXPECT_EQ(clipped[i], plain[i] * 0.5f) << "a power of two: exact";
    EXPECT_EQ(average[i], static_cast<float>(1.0 - 0.9) * (g[i] * 0.5f));
  }
}

/* Heads or experts of one tensor are pieces with one param index: one word decides for all. */
TEST_P(Optimizer, PiecesOfOneParameterShareItsPresence) {
  tensors_.matrix("head 0", 0, 6, 6).param = 2;
  tensors_.matrix("head 1", 0, 6, 6).param = 2;
  tensors_.run("bias", 1, 12).param = 0;
  tensors_.run("other", 1, 12).param = 1;
  tensors_.fill_grads(1);
  must_create();
  std::vector<std::vector<float>> before;
  for (std::size_t i = 0; i < 4; ++i)
    before.push_back(tensors_.masters[i].read());
  std::vector<uint32_t> present = {1, 0, 0};
  step(groups_.scalars(), &present);
  EXPECT_TRUE(same_bits(tensors_.masters[0].read(), before[0]));
  EXPECT_TRUE(same_bits(tensors_.masters[1].read(), before[1]));
  EXPECT_FALSE(same_bits(tensors_.masters[2].read(), before[2]));
  EXPECT_TRUE(same_bits(tensors_.masters[3].read(), before[3]));
  present = {0, 0, 1};
  before[2] = tensors_.masters[2].read();
  step(groups_.scalars(), &present);
  EXPECT_FALSE(same_bits(tensors_.masters[0].read(), before[0]));
  EXPECT_FALSE(same_bits(tensors_.masters[1].read(), before[1]));
  EXPECT_TRUE(same_bits(tensors_.masters[2].read(), before[2]));
}

TEST_P(Optimizer, SkippedGroupsTouchNothing) {
  add_mixed();
  tensors_.fill_grads(1);
  must_create();
  step(groups_.scalars());
  std::vector<std::vector<float>> masters, states;
  for (auto &m : tensors_.masters)
    masters.push_back(m.read());
  for (int32_t i = 0; i < 9; ++i)
    states.push_back(state(i));
  for (auto &g : tensors_.grads)
    g.write(std::vector<float>(g.count(), std::numeric_limits<float>::quiet_NaN()));
  std::vector<mfsdp_step_scalars> scalars = groups_.scalars();
  scalars[0].skip = scalars[1].skip = 1;
  step(scalars);
  for (std::size_t i = 0; i < masters.size(); ++i)
    EXPECT_TRUE(same_bits(tensors_.masters[i].read(), masters[i]));
  for (int32_t i = 0; i < 9; ++i)
    EXPECT_TRUE(same_bits(state(i), states[static_cast<std::size_t>(i)]));
  /* What the skipped step left in the scratch must not reach the next one. */
  tensors_.fill_grads(2);
  step(groups_.scalars());
  for (auto &m : tensors_.masters)
    for (float w : m.read())
      ASSERT_TRUE(mfsdp_f32_is_finite(w));
}

TEST_P(Optimizer, StepsAllocateNothing) {
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  add_mixed();
  tensors_.fill_grads(1);
  must_create();
  Buffer<mfsdp_step_scalars> scalars(&rig_, groups_.scalars());
  for (int t = 0; t < 3; ++t) {
    if (t == 1) test::malloc_count_begin();
    ASSERT_EQ(mfsdp_optimizer_step(&rig_.context, optimizer_, rig_.queue, scalars.data(), nullptr),
              MFSDP_OK);
    ASSERT_EQ(rig_.sync(), MFSDP_OK);
  }
  EXPECT_EQ(test::malloc_count_end(), 0u);
}

/* Fail the Nth allocation until none fails: an error, *out NULL, nothing left, and it works after.
 */
TEST_P(Optimizer, AllocationFaultsLeaveNothing) {
  add_mixed();
  const std::size_t live = rig_.memory.live_count(), nbytes = rig_.context.total_nbytes;
  int64_t n = 0;
  for (;; ++n) {
    ASSERT_LT(n, 100);
    rig_.memory.fail_at(n);
    const mfsdp_status status = create();
    const bool failed = rig_.memory.failed();
    rig_.memory.fail_at(-1);
    if (!failed) {
      ASSERT_EQ(status, MFSDP_OK) << rig_.message();
      break;
    }
    EXPECT_EQ(status, MFSDP_E_MEMORY) << n;
    EXPECT_EQ(optimizer_, nullptr);
    EXPECT_EQ(rig_.memory.live_count(), live) << n;
    EXPECT_EQ(rig_.context.total_nbytes, nbytes) << n;
  }
  EXPECT_GE(n, 8) << "optimizer, groups, jobs, states, items twice, state, workspace";
  tensors_.fill_grads(1);
  step(groups_.scalars());
}

INSTANTIATE_TEST_SUITE_P(Kinds, Optimizer, ::testing::ValuesIn(test::backend_kinds()),
                         test::rig_name);

/* ---- the rules, one negative test each ---- */

/* A number that C++ would not let an enum hold, as a C caller could. */
template <class Enum> void put(Enum *where, unsigned value) {
  static_assert(sizeof(*where) == sizeof(value), "enums are ints here");
  std::memcpy(where, &value, sizeof(value));
}

class OptimizerRules : public OptimizerBase, public ::testing::Test {
protected:
  OptimizerRules() : OptimizerBase(test::rig_kinds()[0]) {
    tensors_.matrix("w", 0, 4, 6);
    tensors_.run("b", 1, 6);
  }
  void refused(const std::string &part, mfsdp_status want = MFSDP_E_ARGUMENT) {
    const int64_t allocations = rig_.memory.alloc_count();
    optimizer_ = reinterpret_cast<mfsdp_optimizer *>(this); /* anything but NULL */
    EXPECT_EQ(create(), want);
    EXPECT_EQ(optimizer_, nullptr);
    EXPECT_EQ(rig_.memory.alloc_count(), allocations) << "checked before any allocation";
    expect_message(part);
  }
  mfsdp_status create_with(const mfsdp_optimizer_desc *desc) {
    return mfsdp_optimizer_create(&rig_.context, rig_.backend, desc, tensors_.list.data(), 2,
                                  &optimizer_);
  }
};

TEST_F(OptimizerRules, TheListIsLegal) {
  EXPECT_EQ(create(), MFSDP_OK) << rig_.message();
}
TEST_F(OptimizerRules, NoBackend) {
  const mfsdp_optimizer_desc desc = groups_.desc();
  EXPECT_EQ(
      mfsdp_optimizer_create(&rig_.context, nullptr, &desc, tensors_.list.data(), 2, &optimizer_),
      MFSDP_E_ARGUMENT);
  expect_message("backend");
}
TEST_F(OptimizerRules, NullDesc) {
  EXPECT_EQ(create_with(nullptr), MFSDP_E_ARGUMENT);
  expect_message("desc is NULL");
}
TEST_F(OptimizerRules, OtherSize) {
  mfsdp_optimizer_desc desc = groups_.desc();
  desc.struct_nbytes = 1;
  EXPECT_EQ(create_with(&desc), MFSDP_E_ARGUMENT);
  expect_message("struct_nbytes is not");
}
TEST_F(OptimizerRules, NoGroups) {
  mfsdp_optimizer_desc desc = groups_.desc();
  desc.group_count = 0;
  EXPECT_EQ(create_with(&desc), MFSDP_E_ARGUMENT);
  expect_message("at least one hyperparameter group, has 0");
  desc.group_count = 2;
  desc.groups = nullptr;
  EXPECT_EQ(create_with(&desc), MFSDP_E_ARGUMENT);
  expect_message("at least one hyperparameter group");
}
TEST_F(OptimizerRules, GroupOfAnotherSize) {
  groups_.list[1].struct_nbytes = 3;
  refused("groups[1].struct_nbytes is 3");
}
TEST_F(OptimizerRules, NegativeLr) {
  groups_.list[1].lr = -1e-3;
  refused("groups[1].lr is -0.001");
}
TEST_F(OptimizerRules, LrNan) {
  groups_.list[0].lr = std::numeric_limits<double>::quiet_NaN();
  refused("groups[0].lr is");
}
TEST_F(OptimizerRules, LrInfinite) {
  groups_.list[0].lr = std::numeric_limits<double>::infinity();
  refused("groups[0].lr is inf");
}
TEST_F(OptimizerRules, LrZeroIsLegal) {
  groups_.list[0].lr = groups_.list[1].lr = 0.0;
  EXPECT_EQ(create(), MFSDP_OK) << rig_.message();
}
TEST_F(OptimizerRules, NegativeDecay) {
  groups_.list[0].weight_decay = -0.1;
  refused("groups[0].weight_decay is -0.1");
}
TEST_F(OptimizerRules, DecayNan) {
  groups_.list[1].weight_decay = std::numeric_limits<double>::quiet_NaN();
  refused("groups[1].weight_decay is");
}
TEST_F(OptimizerRules, ClippedIsZeroOrOne) {
  for (const int32_t value : {2, -1})
    for (const std::size_t g : {0u, 1u}) {
      const int32_t good = groups_.list[g].clipped;
      groups_.list[g].clipped = value;
      refused("optimizer: groups[" + std::to_string(g) + "].clipped is " + std::to_string(value) +
              ", needs 0 or 1");
      groups_.list[g].clipped = good;
    }
}
TEST_F(OptimizerRules, UnknownAlgorithm) {
  put(&groups_.list[0].algorithm, 0);
  refused("groups[0].algorithm 0 is unknown, needs 1 (muon), 2 (adamw), 3 (shampoo) or 4 (soap)");
}
TEST_F(OptimizerRules, MuonRulesCount) {
  groups_.list[0].muon.momentum = 2.0;
  refused("muon: momentum is 2");
}
TEST_F(OptimizerRules, AdamwRulesCount) {
  groups_.list[1].adamw.eps = 0.0;
  refused("adamw: eps is 0");
}
/* A group reads its own algorithm's description only. */
TEST_F(OptimizerRules, TheOtherAlgorithmsDescriptionIsNotRead) {
  groups_.list[0].adamw.eps = 0.0;
  groups_.list[1].muon.momentum = 2.0;
  groups_.list[1].muon.nesterov = 2;
  EXPECT_EQ(create(), MFSDP_OK) << rig_.message();
}

TEST_F(OptimizerRules, NullList) {
  const mfsdp_optimizer_desc desc = groups_.desc();
  mfsdp_optimizer_sizes sizes;
  EXPECT_EQ(mfsdp_optimizer_create(&rig_.context, rig_.backend, &desc, nullptr, 2, &optimizer_),
            MFSDP_E_ARGUMENT);
  expect_message("2 tensors at NULL");
  EXPECT_EQ(mfsdp_optimizer_measure(&rig_.context, rig_.backend, &desc, nullptr, 2, &sizes),
            MFSDP_E_ARGUMENT);
}
TEST_F(OptimizerRules, NegativeTensorCount) {
  const mfsdp_optimizer_desc desc = groups_.desc();
  EXPECT_EQ(mfsdp_optimizer_create(&rig_.context, rig_.backend, &desc, tensors_.list.data(), -1,
                                   &optimizer_),
            MFSDP_E_ARGUMENT);
  expect_message("-1 tensors");
}
TEST_F(OptimizerRules, NoName) {
  tensors_.list[1].name = nullptr;
  refused("a tensor has no name");
}
/* d1: never silently something else. */
TEST_F(OptimizerRules, MuonNeedsMatrices) {
  tensors_.list[1].hyper_group = 0;
  refused("b: group 0 is muon, which needs role matrix, but the role is elementwise");
}
TEST_F(OptimizerRules, AdamwTakesMatrices) {
  tensors_.list[0].hyper_group = 1;
  EXPECT_EQ(create(), MFSDP_OK) << rig_.message();
}
TEST_F(OptimizerRules, FrozenIsNotUpdated) {
  tensors_.list[1].role = MFSDP_ROLE_FROZEN;
  refused("b: role frozen is not updated");
}
TEST_F(OptimizerRules, RoleNotStated) {
  put(&tensors_.list[0].role, 0);
  refused("w: role invalid");
}
TEST_F(OptimizerRules, GroupOutOfRange) {
  tensors_.list[1].hyper_group = 2;
  refused("b: hyper_group is 2, needs 0 to 1");
  tensors_.list[1].hyper_group = -1;
  refused("b: hyper_group is -1");
}
TEST_F(OptimizerRules, NegativeCount) {
  tensors_.list[1].count = -6;
  refused("b: count is -6");
}
TEST_F(OptimizerRules, ShapeIsNotTheCount) {
  tensors_.list[0].cols = 5;
  refused("w: 4 x 5 does not make 24 elements");
}
TEST_F(OptimizerRules, NegativeRows) {
  tensors_.list[0].rows = -4;
  tensors_.list[0].cols = -6;
  refused("w: -4 x -6");
}
TEST_F(OptimizerRules, ShapeOverflows) {
  tensors_.list[0].rows = tensors_.list[0].cols = INT64_C(1) << 40;
  refused("w: 1099511627776 x 1099511627776");
}
TEST_F(OptimizerRules, NoMaster) {
  tensors_.list[0].master = nullptr;
  refused("w: master is NULL");
}
TEST_F(OptimizerRules, NoGrad) {
  tensors_.list[1].grad = nullptr;
  refused("b: grad is NULL");
}
TEST_F(OptimizerRules, NegativeParam) {
  tensors_.list[1].param = -1;
  refused("b: param is -1, needs 0 or more");
}
TEST_F(OptimizerRules, ParamWithoutDtype) {
  uint16_t copy[24];
  tensors_.list[0].param_data = copy;
  put(&tensors_.list[0].param_dtype, 0);
  refused("w: param_dtype is 0");
}
TEST_F(OptimizerRules, ArraysOverlap) {
  for (const mfsdp_algorithm_kind kind : {MFSDP_ALGORITHM_MUON, MFSDP_ALGORITHM_ADAMW}) {
    groups_.list[0].algorithm = kind;
    const mfsdp_optimizer_tensor good = tensors_.list[0];
    tensors_.list[0].grad = good.master + 23;
    refused("w: master and grad overlap");
    tensors_.list[0] = good;
    tensors_.list[0].param_data = good.master;
    tensors_.list[0].param_dtype = MFSDP_BF16;
    refused("w: master and param_data overlap");
    tensors_.list[0] = good;
  }
}
TEST_F(OptimizerRules, TwoTensorsShareAMaster) {
  tensors_.list[1].master = tensors_.list[0].master + 23;
  refused("b: its master overlaps that of w");
}
TEST_F(OptimizerRules, ArrayOutOfAlignment) {
  tensors_.list[0].master = reinterpret_cast<float *>(
      reinterpret_cast<unsigned char *>(tensors_.list[0].master) + 2); /* never read */
  refused("w: master is not aligned to its elements");
}
TEST_F(OptimizerRules, SizesOverflow) {
  tensors_.list[0].rows = tensors_.list[0].count = INT64_MAX - 10; /* no multiple of 128 above it */
  tensors_.list[0].cols = 1;
  refused("w: too large", MFSDP_E_OVERFLOW);
  tensors_.list[0].rows = tensors_.list[0].count = INT64_C(1) << 61;
  tensors_.list[0].hyper_group = tensors_.list[1].hyper_group = 1; /* exp_avg and exp_avg_sq */
  refused("the state overflows size_t", MFSDP_E_OVERFLOW);
}
TEST_F(OptimizerRules, StepWithoutScalars) {
  must_create();
  const std::vector<float> before = tensors_.masters[0].read();
  EXPECT_EQ(mfsdp_optimizer_step(&rig_.context, optimizer_, rig_.queue, nullptr, nullptr),
            MFSDP_E_ARGUMENT);
  expect_message("scalars is NULL, needs 2");
  EXPECT_TRUE(same_bits(tensors_.masters[0].read(), before));
}
TEST_F(OptimizerRules, StepOfNone) {
  EXPECT_EQ(mfsdp_optimizer_step(&rig_.context, nullptr, rig_.queue, nullptr, nullptr),
            MFSDP_E_ARGUMENT);
  expect_message("optimizer: it is NULL");
}
TEST_F(OptimizerRules, NullOut) {
  const mfsdp_optimizer_desc desc = groups_.desc();
  EXPECT_EQ(
      mfsdp_optimizer_create(&rig_.context, rig_.backend, &desc, tensors_.list.data(), 2, nullptr),
      MFSDP_E_ARGUMENT);
  expect_message("out is NULL");
}
TEST_F(OptimizerRules, DestroyNull) {
  mfsdp_optimizer_destroy(&rig_.context, nullptr);
}

TEST(AlgorithmKind, Names) {
  EXPECT_STREQ(mfsdp_algorithm_kind_name(MFSDP_ALGORITHM_MUON), "muon");
  EXPECT_STREQ(mfsdp_algorithm_kind_name(MFSDP_ALGORITHM_ADAMW), "adamw");
  EXPECT_STREQ(mfsdp_algorithm_kind_name(static_cast<mfsdp_algorithm_kind>(0)), "invalid");
}

TEST(FusedItem, ShapesThatOverflow) {
  const mfsdp_muon_desc muon = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  const int64_t big = INT64_C(1) << 40;
  EXPECT_EQ(mfsdp_muon_item(&muon, big, big, nullptr, nullptr, nullptr, nullptr).count, -1);
  EXPECT_EQ(mfsdp_precondition_item(big, big, nullptr, nullptr).count, -1);
}

TEST(HyperGroup, StartsFromThePreset) {
  const mfsdp_hyper_group torch = mfsdp_hyper_group_muon(MFSDP_MUON_TORCH);
  EXPECT_EQ(torch.lr, 1e-3);
  EXPECT_EQ(torch.weight_decay, 0.1);
  const mfsdp_hyper_group jordan = mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN);
  EXPECT_EQ(jordan.lr, 0.02);
  EXPECT_EQ(jordan.weight_decay, 0.0);
}

} // namespace
