/* SPDX-License-Identifier: MIT */
/* raii.cpp - the library from C++: statuses become exceptions, objects are freed where they go out of scope.
 * Plans for several worlds.
 * Build: c++ -std=c++11 -O3 -march=native -fno-math-errno -ffp-contract=off -I. examples/raii.cpp -lpthread -lm */
#include "mfsdp/host/backend_host.h"
#include "mfsdp/muon.h"
#include "mfsdp/plan.h"
#include "mfsdp/random.h"

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

class Context {
public:
  Context() {
    const mfsdp_context_desc desc = mfsdp_context_desc_default();
    check(mfsdp_context_init(&context_, &desc));
  }
  ~Context() { (void)mfsdp_context_destroy(&context_); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  operator mfsdp_context *() { return &context_; }
  void check(mfsdp_status status) const {
    if (status != MFSDP_OK) throw std::runtime_error(mfsdp_context_error(&context_)->message);
  }

private:
  mfsdp_context context_;
};

/* make(&pointer) fills a pointer that `free` takes back; both are called with the context. */
template <class T, class Free> class Owned {
public:
  template <class Make>
  Owned(Context &context, Make make, Free free) : value_(nullptr, Deleter{&context, free}) {
    T *value = nullptr;
    context.check(make(&value));
    value_.reset(value);
  }
  T *get() const { return value_.get(); }

private:
  struct Deleter {
    Context *context;
    Free free;
    void operator()(T *value) const { free(*context, value); }
  };
  std::unique_ptr<T, Deleter> value_;
};

template <class T, class Free, class Make>
Owned<T, Free> own(Context &context, Make make, Free free) {
  return Owned<T, Free>(context, make, free);
}

void plan(Context &context, int32_t world) {
  std::vector<std::string> names;
  std::vector<mfsdp_param> params;
  for (int i = 0; i < 12; ++i)
    names.push_back("layer." + std::to_string(i));
  for (std::size_t i = 0; i < names.size(); ++i)
    params.push_back(
        mfsdp_param_2d(names[i].c_str(), static_cast<int32_t>(i / 4), MFSDP_ROLE_MATRIX, 256, 64));
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  desc.params = params.data();
  desc.param_count = static_cast<int32_t>(params.size());
  desc.world = world;
  const auto plan = own<mfsdp_plan>(
      context, [&](mfsdp_plan **out) { return mfsdp_plan_create(context, &desc, out); },
      [](mfsdp_context *c, mfsdp_plan *p) { mfsdp_plan_destroy(c, p); });
  mfsdp_plan_summary summary = mfsdp_plan_summary_default();
  context.check(mfsdp_plan_report(context, plan.get(), &summary, nullptr, 0));
  std::printf("world %d: the fullest rank has %.2f of the mean cost\n", static_cast<int>(world),
              mfsdp_plan_spread_ratio(summary.cost, world));
}

} // namespace

int main() {
  try {
    Context context;
    for (int32_t world : {1, 2, 4, 5})
      plan(context, world);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "raii: %s\n", error.what());
    return 1;
  }
  return 0;
}
