/* SPDX-License-Identifier: MIT */
/*
 * groups_rig.h: thread ranks that belong to several worlds at once (groups, instances of a group,
 * replicas), a trainer of ref::Model on them, and its comparison with ref::Oracle bit for bit.
 *
 *   test::GroupsJob job;
 *   job.add_group({{{0, 1, 2, 3}}}, dense);                 // group 0: one instance, one copy
 *   job.add_instance(true, {{{0, 2}}}, experts_a);          // group 1: two instances
 *   job.add_instance(false, {{{1, 3}}}, experts_b);
 *   EXPECT_EQ(test::run_groups_job(job, 2, 3), "");         // 2 micro-batches, 3 steps
 *
 * Instances are added in the order in which the norm is folded, so the job's model is the oracle's.
 */
#ifndef MFSDP_TESTS_RUNTIME_GROUPS_RIG_H
#define MFSDP_TESTS_RUNTIME_GROUPS_RIG_H

#include "runtime_rig.h"

#include <map>
#include <memory>

namespace test {

/* ---- who belongs where ---- */

/* copies[p][r] is the thread that is rank r of copy p; copies are each other's replicas. */
using Copies = std::vector<std::vector<int32_t>>;

struct Instance {
  Copies copies;
  bool replicated = false;      /* has a replica transport (also of world 1) */
  std::vector<int32_t> tensors; /* of the job's model */
};

struct Place {
  std::size_t group = 0, instance = 0;
  int32_t copy = 0, rank = 0;
};

struct GroupsJob : Job {
  std::vector<std::vector<Instance>> groups;
  bool base_load = false; /* each plan starts from the loads of the plans before */
  int32_t prefetch_depth = 0, reduce_depth = 0;
  int64_t deadline_us = 20 * 1000000;
  std::vector<mfsdp_residency> residencies; /* of each group; too short: SHARDED */
  std::vector<mfsdp_placement> placements;  /* of all its tensors; too short: OWNED */
  /* May send a rank among the replicas of another place. */
  std::function<void(int32_t thread, std::size_t group, Place *)> spoil_replica;
  /* May change what a rank plans, to make ranks differ. */
  std::function<void(int32_t thread, std::size_t group, std::vector<mfsdp_param> *)> spoil_params;

  void add_instance(bool new_group, const Copies &copies, const std::vector<ref::Tensor> &tensors) {
    Instance instance;
    instance.copies = copies;
    instance.replicated = copies.size() > 1;
    for (const ref::Tensor &t : tensors) {
      instance.tensors.push_back(model.count());
      model.tensors.push_back(t);
    }
    if (new_group) groups.emplace_back();
    groups.back().push_back(instance);
  }
  void add_group(const Copies &copies, const std::vector<ref::Tensor> &tensors) {
    add_instance(true, copies, tensors);
  }

  mfsdp_residency residency_of(std::size_t group) const {
    return group < residencies.size() ? residencies[group] : MFSDP_RESIDENCY_SHARDED;
  }
  mfsdp_placement placement_of(std::size_t group) const {
    return group < placements.size() ? placements[group] : MFSDP_PLACEMENT_OWNED;
  }
  int32_t ranks() const {
    return static_cast<int32_t>(groups[0][0].copies.size() * groups[0][0].copies[0].size());
  }
  Place place(int32_t thread, std::size_t group) const {
    for (std::size_t i = 0; i < groups[group].size(); ++i)
      for (std::size_t p = 0; p < groups[group][i].copies.size(); ++p)
        for (std::size_t r = 0; r < groups[group][i].copies[p].size(); ++r)
          if (groups[group][i].copies[p][r] == thread) {
            Place out;
            out.group = group;
            out.instance = i;
            out.copy = static_cast<int32_t>(p);
            out.rank = static_cast<int32_t>(r);
            return out;
          }
    throw std::logic_error("a thread without a place in a group");
  }
  /* The documented number of a rank: replica rank * group world + group rank, in group 0. */
  int32_t number(int32_t thread) const {
    const Place p = place(thread, 0);
    return p.copy * static_cast<int32_t>(groups[0][0].copies[0].size()) + p.rank;
  }
  const Instance &instance_of(int32_t tensor) const {
    for (const std::vector<Instance> &group : groups)
      for (const Instance &instance : group)
        if (std::find(instance.tensors.begin(), instance.tensors.end(), tensor) !=
            instance.tensors.end())
          return instance;
    throw std::logic_error("a tensor without an instance");
  }
  /* The chain per shard group, then replica order. */
  std::vector<std::vector<int64_t>> chains(int32_t tensor, int64_t blocks) const {
    std::vector<std::vector<int64_t>> out;
    for (const std::vector<int32_t> &copy : instance_of(tensor).copies) {
      out.emplace_back();
      for (int64_t i = 0; i < blocks / ranks(); ++i)
        for (int32_t thread : copy)
          out.back().push_back(i * ranks() + number(thread));
    }
    return out;
  }
  Expected expected(int32_t micro_batches, int64_t steps) const {
    Job copy = *this;
    copy.options.chains = [this](int32_t tensor, int64_t blocks) { return chains(tensor, blocks); };
    return Expected(copy, static_cast<int64_t>(micro_batches) * ranks(), steps);
  }
};

/* ---- the worlds ---- */

/* One world for each copy of each instance, and one for each set of replicas. */
class Worlds {
public:
  explicit Worlds(const GroupsJob &job) : nccl_(job.nccl) {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory_.allocator();
    must(mfsdp_context_init(&context_, &desc));
    for (const std::vector<Instance> &group : job.groups) {
      copies_.emplace_back();
      replicas_.emplace_back();
      for (const Instance &instance : group) {
        const int32_t copies = static_cast<int32_t>(instance.copies.size());
        const int32_t world = static_cast<int32_t>(instance.copies[0].size());
        copies_.back().emplace_back();
        replicas_.back().emplace_back();
        for (int32_t p = 0; p < copies; ++p)
          copies_.back().back().push_back(make(job, world));
        for (int32_t r = 0; r < world && instance.replicated; ++r)
          replicas_.back().back().push_back(make(job, copies));
      }
    }
  }
  Worlds(const Worlds &) = delete;
  Worlds &operator=(const Worlds &) = delete;

  mfsdp_threads_world *copy(const Place &p) const {
    return copies_[p.group][p.instance][static_cast<std::size_t>(p.copy)];
  }
  mfsdp_threads_world *replicas(const Place &p) const { /* NULL: not replicated */
    const std::vector<mfsdp_threads_world *> &all = replicas_[p.group][p.instance];
    return all.empty() ? nullptr : all[static_cast<std::size_t>(p.rank)];
  }
  /* With job.cuda beside each world, for its transports. */
  void *device_of(mfsdp_threads_world *world) const {
    const auto found = devices_.find(world);
    return found == devices_.end() ? nullptr : found->second;
  }
  /* Empty, or what is wrong: somebody has not left, or memory. */
  std::string end() {
    std::string out;
    for (const auto &device : devices_)
      if ((nccl_.on ? nccl_rig_world_destroy(&context_, device.second)
                    : cuda_rig_world_destroy(&context_, device.second)) != MFSDP_OK)
        out += std::string(mfsdp_context_error(&context_)->message) + "\n";
    for (mfsdp_threads_world *world : all_)
      if (mfsdp_threads_world_destroy(&context_, world) != MFSDP_OK)
        out += std::string(mfsdp_context_error(&context_)->message) + "\n";
    if (mfsdp_context_destroy(&context_) != MFSDP_OK)
      out += std::string(mfsdp_context_error(&context_)->message) + "\n";
    return out + memory_.complaints();
  }

private:
  void must(mfsdp_status status) {
    if (status != MFSDP_OK) throw std::runtime_error(mfsdp_context_error(&context_)->message);
  }
  mfsdp_threads_world *make(const GroupsJob &job, int32_t world) {
    mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
    mfsdp_threads_world *out = nullptr;
    desc.world = world;
    desc.deadline_us = job.deadline_us;
    must(mfsdp_threads_world_create(&context_, &desc, &out));
    all_.push_back(out);
    if (nccl_.on)
      must(nccl_rig_world_create(&context_, world, job.deadline_us, nccl_, &devices_[out]));
    else if (job.cuda)
      must(cuda_rig_world_create(&context_, world, job.deadline_us, &devices_[out]));
    return out;
  }

  NcclOptions nccl_;
  FaultAllocator memory_;
  mfsdp_context context_;
  std::vector<std::vector<std::vector<mfsdp_threads_world *>>> copies_, replicas_;
  std::vector<mfsdp_threads_world *> all_;
  std::map<mfsdp_threads_world *, void *> devices_;
};

/* A rank's place in one world. */
class Link {
public:
  mfsdp_transport transport;
  mfsdp_control control;

  Link() {
    std::memset(&transport, 0, sizeof(transport));
    std::memset(&control, 0, sizeof(control));
  }
  Link(const Link &) = delete;
  Link &operator=(const Link &) = delete;
  ~Link() { /* what cannot leave shows as a leak and as a world that does not end */
    if (context_ == nullptr) return;
    if (nccl_ != nullptr)
      (void)nccl_rig_transport_destroy(context_, nccl_, number_, &transport);
    else if (transport.self != nullptr)
      (void)transport.ops->destroy(transport.self, context_);
    mfsdp_threads_control_destroy(&control);
  }
  /* Another kind of world; its owner takes it down. */
  void adopt(const mfsdp_transport &its_transport, const mfsdp_control &its_control) {
    transport = its_transport;
    control = its_control;
  }
  /* `device`: of the ranks that share one, or have one each; else NULL. */
  mfsdp_status join(Rank *rank, mfsdp_threads_world *world, void *device, int32_t number) {
    context_ = &rank->context;
    MFSDP_TRY(mfsdp_threads_control_create(context_, world, number, &control));
    if (device != nullptr && rank->nccl) {
      nccl_ = device;
      number_ = number;
      return nccl_rig_transport_create(context_, device, number, rank->cuda, &control, &transport);
    }
    if (device != nullptr)
      return cuda_rig_transport_create(context_, device, number, rank->cuda, &transport);
    return mfsdp_threads_transport_create(context_, world, number, rank->backend, &transport);
  }
  bool joined() const { return transport.self != nullptr; }
  void poison(const mfsdp_error *why) {
    if (joined()) transport.ops->poison(transport.self, why);
  }

private:
  mfsdp_context *context_ = nullptr;
  void *nccl_ = nullptr; /* its world */
  int32_t number_ = -1;
};

/* All of a rank's places. */
struct Links {
  struct Pair {
    Link group, replica;
  };
  std::vector<std::unique_ptr<Pair>> pairs;

  mfsdp_status join(Rank *rank, const GroupsJob &job, const Worlds &worlds) {
    for (std::size_t g = 0; g < job.groups.size(); ++g) {
      Place place = job.place(rank->rank, g);
      pairs.emplace_back(new Pair());
      MFSDP_TRY(join(rank, worlds, worlds.copy(place), place.rank, &pairs.back()->group));
      if (job.spoil_replica) job.spoil_replica(rank->rank, g, &place);
      if (worlds.replicas(place) != nullptr)
        MFSDP_TRY(join(rank, worlds, worlds.replicas(place), place.copy, &pairs.back()->replica));
    }
    return MFSDP_OK;
  }
  static mfsdp_status join(Rank *rank, const Worlds &worlds, mfsdp_threads_world *world,
                           int32_t number, Link *link) {
    return link->join(rank, world, worlds.device_of(world), number);
  }
  void poison(const mfsdp_error *why) {
    for (std::unique_ptr<Pair> &pair : pairs) {
      pair->group.poison(why);
      pair->replica.poison(why);
    }
  }
};

/* ---- one rank ---- */

class GroupsTrainer {
public:
  using Change = std::function<void(mfsdp_runtime_desc *, std::vector<mfsdp_group> *,
                                    std::vector<mfsdp_hyper_group> *)>;

  GroupsTrainer(Rank *rank, Links *links, const GroupsJob *job, int32_t micro_batches)
      : rank_(rank), links_(links), job_(job), micro_batches_(micro_batches) {
    for (std::size_t g = 0; g < job->groups.size(); ++g) {
      places.push_back(job->place(rank->rank, g));
      for (int32_t i : job->groups[g][places[g].instance].tensors)
        tensors.push_back(i);
    }
    tasks_.resize(static_cast<std::size_t>(micro_batches * job->model.count()));
    plans.resize(job->groups.size(), nullptr);
  }
  GroupsTrainer(const GroupsTrainer &) = delete;
  GroupsTrainer &operator=(const GroupsTrainer &) = delete;
  ~GroupsTrainer() { /* only after a failure is there something left: peers must not wait for us */
    if (runtime != nullptr) {
      links_->poison(mfsdp_context_error(&rank_->context));
      (void)mfsdp_runtime_destroy(runtime);
    }
    destroy_plans();
  }

  std::vector<Place> places;
  std::vector<int32_t> tensors; /* of the model, by the runtime's number */
  std::vector<mfsdp_plan *> plans;
  mfsdp_runtime *runtime = nullptr;
  mfsdp_verdict verdict; /* of the last step */

  Rank &rank() { return *rank_; }
  int32_t number() const { return job_->number(rank_->rank); }
  /* The runtime's number of a tensor; -1: of another instance. */
  int32_t param(const std::string &name) const {
    for (std::size_t p = 0; p < tensors.size(); ++p)
      if (job_->model.at(tensors[p]).name == name) return static_cast<int32_t>(p);
    return -1;
  }

  mfsdp_status create() {
    MFSDP_TRY(make_plans());
    MFSDP_TRY(make_runtime());
    return init();
  }
  mfsdp_status init() { return mfsdp_runtime_init(runtime, fill, this); }
  mfsdp_status make_plans() {
    std::vector<int64_t> load(static_cast<std::size_t>(job_->ranks()), 0); /* by thread */
    for (std::size_t g = 0; g < plans.size(); ++g) {
      const Instance &instance = job_->groups[g][places[g].instance];
      const std::vector<int32_t> &copy = instance.copies[static_cast<std::size_t>(places[g].copy)];
      std::vector<mfsdp_param> params;
      std::vector<int64_t> base, after(copy.size());
      mfsdp_plan_desc desc = mfsdp_plan_desc_default();
      for (int32_t i : instance.tensors) {
        params.push_back(param_of(job_->model.at(i)));
        params.back().placement = job_->placement_of(g);
      }
      desc.residency = job_->residency_of(g);
      if (job_->spoil_params) job_->spoil_params(rank_->rank, g, &params);
      for (int32_t thread : copy)
        base.push_back(load[static_cast<std::size_t>(thread)]);
      desc.params = params.data();
      desc.param_count = static_cast<int32_t>(params.size());
      desc.world = static_cast<int32_t>(copy.size());
      desc.planner = job_->planner;
      desc.base_load = job_->base_load ? base.data() : nullptr;
      MFSDP_TRY(mfsdp_plan_create(&rank_->context, &desc, &plans[g]));
      MFSDP_TRY(mfsdp_plan_loads(&rank_->context, plans[g], after.data(), desc.world));
      for (std::size_t r = 0; r < copy.size(); ++r)
        load[static_cast<std::size_t>(copy[r])] = after[r];
    }
    return MFSDP_OK;
  }
  void destroy_plans() {
    for (mfsdp_plan *&plan : plans) {
      mfsdp_plan_destroy(&rank_->context, plan);
      plan = nullptr;
    }
  }
  /* Builds the description, hands it to `use`. `change` may spoil it. */
  mfsdp_status with_desc(const Change &change,
                         const std::function<mfsdp_status(const mfsdp_runtime_desc *)> &use) {
    std::vector<mfsdp_hyper_group> hyper_groups;
    std::vector<mfsdp_group> groups;
    mfsdp_optimizer_desc optimizer = mfsdp_optimizer_desc_default();
    mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
    for (const ref::OracleGroup &g : job_->options.groups)
      hyper_groups.push_back(hyper_group_of(g));
    for (std::size_t g = 0; g < plans.size(); ++g) {
      mfsdp_group group = mfsdp_group_default();
      Links::Pair *pair = links_->pairs[g].get();
      group.plan = plans[g];
      group.transport = &pair->group.transport;
      group.control = &pair->group.control;
      group.replica = pair->replica.joined() ? &pair->replica.transport : nullptr;
      group.replica_control = pair->replica.joined() ? &pair->replica.control : nullptr;
      groups.push_back(group);
    }
    desc.backend = rank_->backend;
    desc.prefetch_depth = job_->prefetch_depth;
    desc.reduce_depth = job_->reduce_depth;
    set_options(*job_, *rank_, &desc);
    if (change) change(&desc, &groups, &hyper_groups);
    optimizer.groups = hyper_groups.data();
    optimizer.group_count = static_cast<int32_t>(hyper_groups.size());
    desc.groups = groups.data();
    desc.group_count = static_cast<int32_t>(groups.size());
    desc.optimizer = &optimizer;
    return use(&desc);
  }
  mfsdp_status make_runtime(const Change &change = nullptr) {
    return with_desc(change, [this](const mfsdp_runtime_desc *desc) {
      return mfsdp_runtime_create(&rank_->context, desc, &runtime);
    });
  }

  mfsdp_status begin(int64_t step) {
    const mfsdp_step_desc desc = step_desc_of(micro_batches_, job_->ranks(), step);
    return mfsdp_step_begin(runtime, &desc);
  }
  mfsdp_status micro_batch(int64_t step, int32_t micro) {
    const int64_t block = static_cast<int64_t>(micro) * job_->ranks() + number();
    const int32_t units = job_->model.unit_count();
    for (int32_t u = 0; u < units; ++u) {
      if (!has_unit(u) || !job_->script.used(step, u)) continue;
      MFSDP_TRY(mfsdp_unit_acquire(runtime, u, MFSDP_USE_FORWARD));
      MFSDP_TRY(mfsdp_unit_release(runtime, u));
    }
    MFSDP_TRY(mfsdp_step_value(runtime, ref::synthetic_value(job_->model.seed, step, block)));
    if (job_->script.weight)
      MFSDP_TRY(mfsdp_step_weight(runtime, job_->script.weight(step, block)));
    for (int32_t u = units; u-- > 0;) {
      if (!has_unit(u) || !job_->script.used(step, u)) continue;
      MFSDP_TRY(mfsdp_unit_acquire(runtime, u, MFSDP_USE_BACKWARD));
      MFSDP_TRY(mfsdp_unit_grads(runtime, u));
      for (std::size_t p = 0; p < tensors.size(); ++p)
        if (job_->model.at(tensors[p]).unit == u)
          MFSDP_TRY(compute(step, micro, block, static_cast<int32_t>(p)));
      MFSDP_TRY(mfsdp_unit_reduce(runtime, u));
      MFSDP_TRY(mfsdp_unit_release(runtime, u));
    }
    return MFSDP_OK;
  }
  mfsdp_status end(bool stop = false) {
    verdict = mfsdp_verdict_default();
    MFSDP_TRY(mfsdp_step_end(runtime, stop));
    return mfsdp_step_verdict(runtime, &verdict);
  }
  mfsdp_status step(int64_t step, bool stop = false) {
    MFSDP_TRY(begin(step));
    for (int32_t m = 0; m < micro_batches_; ++m)
      MFSDP_TRY(micro_batch(step, m));
    return end(stop);
  }
  mfsdp_status destroy() {
    const mfsdp_status status = mfsdp_runtime_destroy(runtime);
    runtime = nullptr;
    return status;
  }

  /* Collective: exports everything this rank's groups hold. Throws what is not the oracle's. */
  void compare(const Expected &expected, int64_t step) {
    const Expected::After &after = expected.after(step);
    std::vector<OwnPiece> own;
    std::size_t first = 0;
    compare_verdict(verdict, after.verdict);
    for (std::size_t p = 0; p < tensors.size(); ++p)
      compare_weight(runtime, *rank_, *job_, static_cast<int32_t>(p), tensors[p], after, step);
    for (std::size_t g = 0; g < plans.size(); ++g) {
      int32_t count = 0;
      const mfsdp_piece *pieces = mfsdp_plan_pieces(plans[g], -1, &count);
      for (int32_t i = 0; i < count; ++i) {
        const int32_t tensor = tensors[first + static_cast<std::size_t>(pieces[i].param)];
        if ((pieces[i].owner == places[g].rank ||
             job_->placement_of(g) == MFSDP_PLACEMENT_REPLICATED) &&
            job_->model.at(tensor).role != ref::Role::kFrozen)
          own.push_back({&pieces[i], tensor});
      }
      first += job_->groups[g][places[g].instance].tensors.size();
    }
    compare_states(runtime, rank_, *job_, own, after);
  }
  /* Of this rank's own pieces, masters and state: equal on ranks that own the same pieces. */
  uint64_t own_hash() {
    uint64_t hash = MFSDP_HASH_SEED;
    int32_t count = 0;
    const mfsdp_optimizer_state *states =
        mfsdp_optimizer_states(mfsdp_runtime_optimizer(runtime), &count);
    hash = mfsdp_hash_bytes(hash, runtime->master.data, runtime->master.nbytes);
    for (int32_t i = 0; i < count; ++i)
      hash = mfsdp_hash_bytes(hash, states[i].data,
                              static_cast<std::size_t>(states[i].count) * sizeof(float));
    return hash;
  }

private:
  static void fill(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
    const GroupsTrainer *self = static_cast<const GroupsTrainer *>(user);
    ref::synthetic_init(self->job_->model.seed, self->tensors.at(static_cast<std::size_t>(param)),
                        first, count, dst);
  }
  bool has_unit(int32_t unit) const {
    for (int32_t i : tensors)
      if (job_->model.at(i).unit == unit) return true;
    return false;
  }
  mfsdp_status compute(int64_t step, int32_t micro, int64_t block, int32_t param) {
    const int32_t use = tensors[static_cast<std::size_t>(param)];
    const ref::Sample sample = job_->script.sample_of(step, block, use);
    Backward *task = &tasks_[static_cast<std::size_t>(micro * job_->model.count() + use)];
    if (job_->model.at(use).role == ref::Role::kFrozen) return MFSDP_OK;
    if (sample == ref::Sample::kAbsent) return mfsdp_grad_absent(runtime, param);
    task->job = job_;
    task->rank = rank_->rank;
    task->step = step;
    task->block = block;
    task->use = use;
    task->sample = sample;
    return task->compute(runtime, param, rank_->backend, rank_);
  }

  Rank *rank_;
  Links *links_;
  const GroupsJob *job_;
  int32_t micro_batches_;
  std::vector<Backward> tasks_;
};

/* ---- running ---- */

using GroupsFunction = std::function<mfsdp_status(Rank &, Links &)>;

/* Each thread joins its worlds, then runs the function. A rank that fails poisons all its worlds.
 */
inline RanksResult run_groups(const GroupsJob &job, const GroupsFunction &function) {
  Worlds worlds(job);
  RanksOptions options = ranks_of(job, job.ranks());
  options.world.deadline_us = job.deadline_us + 20 * 1000000; /* for barriers of tests */
  RanksResult result = run_ranks(options, [&](Rank &rank) {
    Links links;
    mfsdp_status status = links.join(&rank, job, worlds);
    try {
      if (status == MFSDP_OK) status = rank.barrier(); /* a poisoned world takes no more ranks in */
      if (status == MFSDP_OK) status = function(rank, links);
    } catch (const std::exception &) {
      mfsdp_error why = mfsdp_error_none();
      (void)MFSDP_ERROR_SET(&why, MFSDP_E_STATE, rank.rank, "the test threw on rank %d", rank.rank);
      links.poison(&why);
      throw;
    }
    if (status != MFSDP_OK) links.poison(mfsdp_context_error(&rank.context));
    return status;
  });
  result.world += worlds.end();
  return result;
}

/* Trains and compares after each step. Empty, or what went wrong. */
inline std::string run_groups_job(const GroupsJob &job, int32_t micro_batches, int64_t steps) {
  const Expected expected = job.expected(micro_batches, steps);
  const RanksResult result = run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer trainer(&rank, &links, &job, micro_batches);
    MFSDP_TRY(trainer.create());
    for (int64_t s = 0; s < steps; ++s) {
      MFSDP_TRY(trainer.step(s));
      trainer.compare(expected, s);
    }
    return trainer.destroy();
  });
  return result.ok() ? "" : std::to_string(micro_batches) + " micro-batches:\n" + result.text();
}

/* A create that fails with E_MISMATCH and the text on all ranks, at once and leaving nothing; then
 * a correct one on the same worlds, and a step. */
inline void must_mismatch(const GroupsJob &bad, const GroupsTrainer::Change &change,
                          const std::string &text) {
  GroupsJob good = bad;
  good.spoil_params = nullptr;
  good.tune = nullptr;
  const Expected expected = good.expected(1, 1);
  const int64_t start_us = mfsdp_clock_us();
  const RanksResult result = run_groups(bad, [&](Rank &rank, Links &links) {
    {
      GroupsTrainer t(&rank, &links, &bad, 1);
      MFSDP_TRY(t.make_plans());
      const std::size_t before = rank.memory->live_nbytes();
      const mfsdp_status status = t.make_runtime(change);
      require(t.runtime == nullptr && rank.memory->live_nbytes() == before, "something is held");
      must_fail(rank, status, MFSDP_E_MISMATCH, text);
    }
    GroupsTrainer t(&rank, &links, &good, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    t.compare(expected, 0);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << text << "\n" << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, bad.deadline_us / 2) << "some rank waited";
}

} // namespace test

#endif // MFSDP_TESTS_RUNTIME_GROUPS_RIG_H
