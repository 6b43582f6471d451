/* SPDX-License-Identifier: MIT */
/*
 * forwarding.h: a transport before another one, for tests that watch or disturb what is submitted.
 *
 *   class Watched : public test::ForwardingTransport {
 *     mfsdp_status submit(mfsdp_context *context, mfsdp_queue *queue, const mfsdp_batch *batch) override {
 *       seen.push_back(batch->label);
 *       return forward(context, queue, batch);
 *     } ...
 *   };                                                     // use watched.table
 *
 * Its table has no native collectives, registration or split, which would pass it by.
 */
#ifndef MFSDP_TESTS_RUNTIME_FORWARDING_H
#define MFSDP_TESTS_RUNTIME_FORWARDING_H

#include "mfsdp/transport.h"

namespace test {

class ForwardingTransport {
public:
  explicit ForwardingTransport(const mfsdp_transport &inner)
      : table(inner), inner_(inner), ops_(*inner.ops) {
    ops_.submit = on_submit;
    ops_.reserve = on_reserve;
    ops_.poll = on_poll;
    ops_.poison = on_poison;
    ops_.destroy = on_destroy;
    ops_.native = nullptr;
    ops_.native_prepare = nullptr;
    ops_.buffer_register = nullptr;
    ops_.buffer_deregister = nullptr;
    ops_.split = nullptr;
    table.ops = &ops_;
    table.self = this;
  }
  ForwardingTransport(const ForwardingTransport &) = delete;
  ForwardingTransport &operator=(const ForwardingTransport &) = delete;
  virtual ~ForwardingTransport() = default;
  mfsdp_transport table;

protected:
  virtual mfsdp_status submit(mfsdp_context *context, mfsdp_queue *queue,
                              const mfsdp_batch *batch) = 0;
  mfsdp_status forward(mfsdp_context *context, mfsdp_queue *queue, const mfsdp_batch *batch) {
    return inner_.ops->submit(inner_.self, context, queue, batch);
  }
  const mfsdp_backend *backend() const { return inner_.backend; }

private:
  static ForwardingTransport *of(void *self) { return static_cast<ForwardingTransport *>(self); }
  static mfsdp_status on_submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                                const mfsdp_batch *batch) {
    return of(self)->submit(context, queue, batch);
  }
  static mfsdp_status on_reserve(void *self, mfsdp_context *context, int32_t count) {
    return of(self)->inner_.ops->reserve(of(self)->inner_.self, context, count);
  }
  static mfsdp_status on_poll(void *self, mfsdp_context *context) {
    return of(self)->inner_.ops->poll(of(self)->inner_.self, context);
  }
  static void on_poison(void *self, const mfsdp_error *why) {
    of(self)->inner_.ops->poison(of(self)->inner_.self, why);
  }
  static mfsdp_status on_destroy(void *self, mfsdp_context *context) {
    return of(self)->inner_.ops->destroy(of(self)->inner_.self, context);
  }
  mfsdp_transport inner_;
  mfsdp_transport_ops ops_;
};

} // namespace test

#endif // MFSDP_TESTS_RUNTIME_FORWARDING_H
