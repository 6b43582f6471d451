/* SPDX-License-Identifier: MIT */
/*
 * control_tcp.h - a control plane over TCP for ranks that are processes without MPI (NCCL has
 * none): rendezvous at rank 0, all-gather of small messages, probe.
 *
 *   mfsdp_tcp_control_desc desc;
 *   mfsdp_control control;
 *   MFSDP_TRY(mfsdp_launch_read(&context, NULL, NULL, &launch));               // torchrun, ...
 *   MFSDP_TRY(mfsdp_tcp_control_desc_launch(&context, &launch, NULL, NULL, &desc));
 *   MFSDP_TRY(mfsdp_tcp_control_create(&context, &desc, &control));            // each rank, once
 *   MFSDP_TRY(control.ops->allgather(control.self, &context, &hash, sizeof(hash), hashes,
 *                                    control.deadline_us));                    // COMPLETE
 *   MFSDP_TRY(control.ops->destroy(control.self, &context));
 *
 * A star: every rank has one connection, to rank 0, which listens at the address that it is told
 * and at no other one, until all have come. What goes wrong on the way is found within the
 * deadline; the message names the peer, its address, and what to do:
 *
 *   E_TIMEOUT      ranks that never come; nobody at the address; a program that says nothing
 *   E_IO           the port is in use
 *   E_ARGUMENT     an address that is no address, or rank 0's that is not its host's; several ranks
 *                  and no address (this host is never assumed)
 *   E_FORMAT       another program has the port; bytes that are no message of ours
 *   E_UNSUPPORTED  another version of the library or of what is spoken here
 *   E_MISMATCH     another world size or control_nbytes; different sizes of one all-gather
 *   E_STATE        a rank that has joined already
 *   E_PEER         a process of another job (`job`); a rank that has left or whose connection broke
 *
 * Rank 0 turns strangers away and goes on waiting for its own. `job` is not a secret and nothing is
 * encrypted: this is for the network of a cluster, not for the internet.
 *
 * The first error poisons the control plane: all ranks are told, and return it from their next
 * call; calls after that are refused. A rank that dies is noticed by rank 0, and through it by all,
 * at once; a rank that stalls, by the deadline of the call. A rank answers probes only while it is
 * in a call here, and what others know of each other comes from rank 0: while that one computes,
 * only silence is known.
 *
 * One thread at a time gathers, and one probes, maybe another: more get E_STATE. Allocates in
 * create alone: world x control_nbytes, and at rank 0 world x (2 KiB + 2 x world). Children of a
 * fork keep the connections of their parent open: let them exec.
 * Does not: carry tensors, go on after an error, or look up names within the deadline (socket.h).
 * Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see clock.h.
 */
#ifndef MFSDP_POSIX_CONTROL_TCP_H
#define MFSDP_POSIX_CONTROL_TCP_H

#include "../transport.h"
#include "control_check.h"
#include "launch.h"
#include "rendezvous_tcp.h"

/* This much before the end of a wait, or a quarter of it, ranks ask who is there. */
#define MFSDP__TCP_ASK_US 1000000

typedef struct mfsdp_tcp_control_desc {
  size_t struct_nbytes;
  int32_t rank, world;
  const char
      *address;     /* of rank 0, the same on all ranks: a number (IPv4, IPv6) or a name; NULL only
                        * with world 1. 0.0.0.0 and :: are for rank 0 alone: every address */
  int32_t port;     /* 1 to 65535 */
  int32_t listener; /* -1, or rank 0's own listening socket, which the rendezvous closes; then its
                        * address and port are not looked at */
  char job[MFSDP__HELLO_JOB_NBYTES]; /* ranks with another one are strangers; "" is one, too */
  int64_t deadline_us;               /* of the rendezvous, and the control plane's; positive */
  size_t control_nbytes;             /* largest message of a rank; at least 1; equal on all ranks */
} mfsdp_tcp_control_desc;

/* Rank 0 of 1, no address, no job, 60 s, messages up to 16 KiB. */
MFSDP_API mfsdp_tcp_control_desc mfsdp_tcp_control_desc_default(void) {
  mfsdp_tcp_control_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.world = 1;
  desc.listener = -1;
  desc.deadline_us = 60000000;
  desc.control_nbytes = 16384;
  return desc;
}

/*
 * The default with rank, world, address, port and job from the launcher's variables (launch.h).
 * `get` and `user` as of mfsdp_launch_read; desc->address lies in the environment. COMPLETE.
 * E_ARGUMENT.
 */
MFSDP_API mfsdp_status mfsdp_tcp_control_desc_launch(mfsdp_context *context,
                                                     const mfsdp_launch *launch,
                                                     mfsdp_launch_getter get, void *user,
                                                     mfsdp_tcp_control_desc *out) {
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "tcp control: out is NULL");
  *out = mfsdp_tcp_control_desc_default();
  MFSDP_TRY(mfsdp_launch_meeting_point(context, launch, get, user, &out->address, &out->port));
  MFSDP_TRY(mfsdp_launch_job(context, launch, get, user, out->job, sizeof(out->job)));
  out->rank = launch->rank;
  out->world = launch->world;
  return MFSDP_OK;
}

/* ---- allgather ---- */

/* All that have not come and what is known of them; the culprit is the first that does not
 * answer. */
MFSDP_API void mfsdp__tcp_explain(const mfsdp__tcp *tcp, int64_t waited_us, mfsdp_error *why) {
  int32_t r, missing = -1, silent = -1;
  (void)MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, -1, "control allgather: rank %d waited %lld ms",
                        (int)tcp->rank, (long long)(waited_us / 1000));
  if (tcp->rank != 0 && !tcp->table_seen) {
    why->culprit = 0;
    mfsdp__control_append(why->message, sizeof(why->message),
                          "; rank 0 (%s) has not come and does not answer", tcp->links[0].name);
    return;
  }
  for (r = 0; r < tcp->world; ++r) {
    const int state = tcp->rank == 0 ? mfsdp__tcp_state(tcp, r) : tcp->table[r];
    if (r == tcp->rank || (state & MFSDP__TCP_STATE_CAME)) continue;
    mfsdp__control_append(
        why->message, sizeof(why->message), "; rank %d has not come and %s", (int)r,
        state & MFSDP__TCP_STATE_ANSWERS ? "is in another call" : "does not answer");
    if (missing < 0) missing = r;
    if (silent < 0 && !(state & MFSDP__TCP_STATE_ANSWERS)) silent = r;
  }
  if (missing < 0)
    mfsdp__control_append(why->message, sizeof(why->message), "; all have come, too late");
  why->culprit = silent >= 0 ? silent : missing;
}

MFSDP_API mfsdp_status mfsdp__tcp_lost(const mfsdp__tcp *tcp, int32_t r, mfsdp_error *why) {
  const mfsdp__tcp_link *link = &tcp->links[r];
  char text[128];
  mfsdp__tcp_whereabouts(link, text, sizeof(text));
  return MFSDP_ERROR_SET(why, MFSDP_E_PEER, link->rank,
                         "control allgather: rank %d waits for rank %d (%s), which %s",
                         (int)tcp->rank, (int)link->rank, link->name, text);
}

/* Rank 0: 1 if all have come; *lost: the first that is missing and gone, or -1. */
MFSDP_API int mfsdp__tcp_all_here(const mfsdp__tcp *tcp, int32_t *lost) {
  int32_t r, here = 1;
  *lost = -1;
  for (r = 1; r < tcp->world; ++r) {
    if (tcp->links[r].arrived) continue;
    here = 0;
    if (*lost < 0 && tcp->links[r].gone != MFSDP__TCP_HERE) *lost = r;
  }
  return here;
}

/* What both sides do while they wait: asks once who is there, and moves bytes until something
 * came. */
MFSDP_API void mfsdp__tcp_wait_once(mfsdp__tcp *tcp, struct pollfd *fds, int64_t ask_us,
                                    int64_t deadline_us, int *asked) {
  if (!*asked && mfsdp_clock_us() >= ask_us) {
    *asked = 1;
    if (tcp->rank == 0)
      mfsdp__tcp_ping(tcp);
    else
      (void)mfsdp__tcp_ask(tcp);
  }
  mfsdp__tcp_serve(tcp, fds, *asked ? deadline_us : ask_us);
}

/* Rank 0: until all have come. */
MFSDP_API mfsdp_status mfsdp__tcp_collect(mfsdp__tcp *tcp, int64_t start_us, int64_t ask_us,
                                          int64_t deadline_us, mfsdp_error *why) {
  int asked = 0;
  for (;;) {
    int32_t lost;
    if (tcp->poisoned) return MFSDP_E_POISONED;
    if (mfsdp__tcp_all_here(tcp, &lost)) return MFSDP_OK;
    if (lost >= 0) return mfsdp__tcp_lost(tcp, lost, why);
    if (mfsdp_clock_us() >= deadline_us) {
      mfsdp__tcp_explain(tcp, mfsdp_clock_us() - start_us, why);
      return MFSDP_E_TIMEOUT;
    }
    mfsdp__tcp_wait_once(tcp, tcp->fds, ask_us, deadline_us, &asked);
  }
}

MFSDP_API mfsdp_status mfsdp__tcp_compare(const mfsdp__tcp *tcp, size_t nbytes, mfsdp_error *why) {
  int32_t r;
  for (r = 1; r < tcp->world; ++r) {
    const mfsdp__tcp_link *link = &tcp->links[r];
    if (link->gather_nbytes != nbytes || link->gather_number != tcp->generation)
      return mfsdp__control_differ(r, nbytes, tcp->generation, link->gather_nbytes,
                                   link->gather_number, why);
  }
  return MFSDP_OK;
}

/* Rank 0: until the kernel has taken all results. Who is gone needs none. */
MFSDP_API mfsdp_status mfsdp__tcp_distribute(mfsdp__tcp *tcp, int64_t start_us, int64_t deadline_us,
                                             mfsdp_error *why) {
  for (;;) {
    int32_t r, slow = -1;
    for (r = tcp->world - 1; r > 0; --r) {
      mfsdp__tcp_flush(&tcp->links[r]);
      if (mfsdp__tcp_unsent(&tcp->links[r])) slow = r;
    }
    if (slow < 0) return MFSDP_OK;
    if (tcp->poisoned) return MFSDP_E_POISONED;
    if (mfsdp_clock_us() >= deadline_us)
      return MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, slow,
                             "control allgather: rank 0 waited %lld ms; rank %d (%s) has come and "
                             "does not take the result",
                             (long long)((mfsdp_clock_us() - start_us) / 1000), (int)slow,
                             tcp->links[slow].name);
    mfsdp__tcp_serve(tcp, tcp->fds, deadline_us);
  }
}

MFSDP_API mfsdp_status mfsdp__tcp_gather_at_0(mfsdp__tcp *tcp, const void *in, size_t nbytes,
                                              void *out, int64_t start_us, int64_t ask_us,
                                              int64_t deadline_us, mfsdp_error *why) {
  unsigned char *to = (unsigned char *)out;
  int32_t r;
  tcp->table_changed = 1; /* rank 0 has come */
  if (nbytes > 0) memcpy(tcp->incoming, in, nbytes);
  MFSDP_TRY(mfsdp__tcp_collect(tcp, start_us, ask_us, deadline_us, why));
  MFSDP_TRY(mfsdp__tcp_compare(tcp, nbytes, why));
  for (r = 0; r < tcp->world; ++r) {
    if (nbytes > 0) memcpy(to + (size_t)r * nbytes, tcp->incoming + (size_t)r * tcp->limit, nbytes);
    tcp->links[r].arrived = tcp->links[r].watching = 0;
  }
  for (r = 1; r < tcp->world; ++r)
    mfsdp__tcp_say_big(&tcp->links[r], MFSDP__TCP_RESULT, tcp->generation, out,
                       (size_t)tcp->world * nbytes);
  return mfsdp__tcp_distribute(tcp, start_us, deadline_us, why);
}

MFSDP_API mfsdp_status mfsdp__tcp_gather_elsewhere(mfsdp__tcp *tcp, const void *in, size_t nbytes,
                                                   void *out, int64_t start_us, int64_t ask_us,
                                                   int64_t deadline_us, mfsdp_error *why) {
  int asked = 0;
  tcp->done = 0;
  tcp->result_nbytes = (size_t)tcp->world * nbytes;
  mfsdp__tcp_say_big(&tcp->links[0], MFSDP__TCP_GATHER, tcp->generation, in, nbytes);
  for (;;) {
    if (tcp->done) break; /* an error behind the result is the next call's */
    if (tcp->poisoned) return MFSDP_E_POISONED;
    if (tcp->links[0].gone != MFSDP__TCP_HERE) return mfsdp__tcp_lost(tcp, 0, why);
    if (mfsdp_clock_us() >= deadline_us) {
      mfsdp__tcp_explain(tcp, mfsdp_clock_us() - start_us, why);
      return MFSDP_E_TIMEOUT;
    }
    mfsdp__tcp_wait_once(tcp, tcp->fds, ask_us, deadline_us, &asked);
  }
  if (nbytes > 0) memcpy(out, tcp->incoming, tcp->result_nbytes);
  return MFSDP_OK;
}

/* When to ask in a wait of timeout_us. */
MFSDP_API int64_t mfsdp__tcp_ask_us(int64_t timeout_us) {
  return timeout_us / 4 < MFSDP__TCP_ASK_US ? timeout_us / 4 : MFSDP__TCP_ASK_US;
}

MFSDP_API mfsdp_status mfsdp__tcp_gather(mfsdp__tcp *tcp, mfsdp_context *context, const void *in,
                                         size_t nbytes, void *out, int64_t timeout_us) {
  const int64_t start_us = mfsdp_clock_us();
  const int64_t deadline_us = mfsdp_clock_deadline_us(timeout_us);
  const int64_t ask_us = deadline_us - mfsdp__tcp_ask_us(timeout_us);
  mfsdp_error why = mfsdp_error_none();
  mfsdp_status status;
  if (tcp->poisoned && tcp->reported)
    return mfsdp__control_refuse(context, &tcp->error, "control allgather");
  ++tcp->generation;
  tcp->table_seen = 0;
  tcp->calling = 1;
  if (tcp->poisoned)
    status = MFSDP_E_POISONED;
  else if (tcp->rank == 0)
    status = mfsdp__tcp_gather_at_0(tcp, in, nbytes, out, start_us, ask_us, deadline_us, &why);
  else
    status = mfsdp__tcp_gather_elsewhere(tcp, in, nbytes, out, start_us, ask_us, deadline_us, &why);
  tcp->calling = 0;
  if (status == MFSDP_OK) return MFSDP_OK;
  if (status != MFSDP_E_POISONED) mfsdp__tcp_poison(tcp, &why, NULL);
  tcp->reported = 1;
  return mfsdp_context_take_error(context, &tcp->error);
}

/* The table's allgather. An error other than E_ARGUMENT and E_STATE poisons the control plane;
 * `out` is undefined then. */
MFSDP_API mfsdp_status mfsdp__tcp_allgather(void *self, mfsdp_context *context, const void *in,
                                            size_t nbytes, void *out, int64_t timeout_us) {
  mfsdp__tcp *tcp = (mfsdp__tcp *)self;
  mfsdp_status status;
  MFSDP_TRY(mfsdp__control_check_gather(context, in, nbytes, out, timeout_us, tcp->limit,
                                        "mfsdp_tcp_control_desc.control_nbytes"));
  mfsdp_mutex_lock(&tcp->mutex);
  if (tcp->calling)
    status =
        MFSDP_FAIL(context, MFSDP_E_STATE,
                   "control allgather: another thread of rank %d is in a call", (int)tcp->rank);
  else
    status = mfsdp__tcp_gather(tcp, context, in, nbytes, out, timeout_us);
  mfsdp_mutex_unlock(&tcp->mutex);
  return status;
}

/* ---- probe ---- */

/* What is known so far; 1 if everybody answers. */
MFSDP_API int mfsdp__tcp_alive(const mfsdp__tcp *tcp, uint8_t *alive) {
  int32_t r;
  int all = 1;
  for (r = 0; r < tcp->world; ++r) {
    int answers;
    if (r == tcp->rank)
      answers = 1;
    else if (tcp->rank == 0)
      answers = (mfsdp__tcp_state(tcp, r) & MFSDP__TCP_STATE_ANSWERS) != 0;
    else
      answers = tcp->table_seen && (tcp->table[r] & MFSDP__TCP_STATE_ANSWERS) != 0;
    alive[r] = (uint8_t)answers;
    all = all && answers;
  }
  return all;
}

/*
 * The table's probe: works after an error and beside an all-gather, too. Rank 0 stays to the end of
 * the time-out when a rank does not answer, since the others then learn from it.
 */
MFSDP_API mfsdp_status mfsdp__tcp_control_probe(void *self, mfsdp_context *context, uint8_t *alive,
                                                int64_t timeout_us) {
  mfsdp__tcp *tcp = (mfsdp__tcp *)self;
  const int64_t deadline_us = mfsdp_clock_deadline_us(timeout_us);
  int asked = 0;
  if (alive == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "control probe: alive is NULL");
  mfsdp_mutex_lock(&tcp->mutex);
  if (tcp->probing) {
    mfsdp_mutex_unlock(&tcp->mutex);
    return MFSDP_FAIL(context, MFSDP_E_STATE, "control probe: another thread of rank %d probes",
                      (int)tcp->rank);
  }
  tcp->probing = 1;
  tcp->table_seen = 0;
  tcp->ping_us = mfsdp_clock_us() - MFSDP__TCP_ROUND_US; /* a round of its own */
  do {
    mfsdp__tcp_wait_once(tcp, tcp->probe_fds, INT64_MIN, deadline_us, &asked);
    if (mfsdp__tcp_alive(tcp, alive)) break;
    if (tcp->rank != 0 && tcp->links[0].fd < 0) break;
  } while (mfsdp_clock_us() < deadline_us);
  tcp->probing = 0;
  mfsdp_mutex_unlock(&tcp->mutex);
  return MFSDP_OK;
}

MFSDP_API int64_t mfsdp__tcp_now_us(void *self) {
  (void)self;
  return mfsdp_clock_us();
}

/* ---- life cycle ---- */

/* Leaves: ranks that wait for this one get E_PEER. What peers have sent is read before the end,
 * since unread bytes would make the kernel drop what is on its way to them. */
MFSDP_API mfsdp_status mfsdp__tcp_control_destroy(void *self, mfsdp_context *context) {
  mfsdp__tcp *tcp = (mfsdp__tcp *)self;
  int32_t i;
  if (tcp == NULL) return MFSDP_OK;
  for (i = 0; i < tcp->link_count; ++i) {
    mfsdp__tcp_link *link = &tcp->links[i];
    unsigned char rest[4096];
    int turn, number;
    if (link->fd < 0) continue;
    if (!tcp->poisoned) (void)mfsdp__tcp_say(tcp, link, MFSDP__TCP_LEFT, 0, NULL, 0);
    mfsdp__tcp_flush(link);
    (void)shutdown(link->fd, SHUT_WR);
    for (turn = 0; turn < 1024; ++turn)
      if (mfsdp__socket_receive(link->fd, rest, sizeof(rest), &number) <= 0) break;
  }
  mfsdp__tcp_free(context, tcp);
  return MFSDP_OK;
}

MFSDP_API const mfsdp_control_ops *mfsdp__tcp_control_ops(void) {
  static const mfsdp_control_ops ops = {sizeof(mfsdp_control_ops), "tcp",
                                        mfsdp__tcp_allgather,      mfsdp__tcp_control_probe,
                                        mfsdp__tcp_now_us,         mfsdp__tcp_control_destroy};
  return &ops;
}

MFSDP_API mfsdp_status mfsdp__tcp_address_check(mfsdp_context *context,
                                                const mfsdp_tcp_control_desc *desc) {
  if (desc->world == 1 || (desc->rank == 0 && desc->listener >= 0)) return MFSDP_OK;
  if (desc->address == NULL || desc->address[0] == '\0')
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "tcp control: address is %s and there are %d ranks; it must be the address of "
        "rank 0 (MASTER_ADDR)",
        desc->address == NULL ? "NULL" : "empty", (int)desc->world);
  if (desc->port < 1 || desc->port > 65535)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "tcp control: port is %d, needs 1 to 65535",
                      (int)desc->port);
  if (desc->listener >= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "tcp control: listener is %d and rank is %d; rank 0 alone listens",
                      (int)desc->listener, (int)desc->rank);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__tcp_desc_check(mfsdp_context *context,
                                             const mfsdp_tcp_control_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "tcp control: desc is NULL, or its struct_nbytes is not %zu (use "
                      "mfsdp_tcp_control_desc_default)",
                      sizeof(*desc));
  if (desc->world < 1 || desc->rank < 0 || desc->rank >= desc->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "tcp control: rank is %d of world %d, needs 0 to world - 1", (int)desc->rank,
                      (int)desc->world);
  if (desc->deadline_us <= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "tcp control: deadline_us is %lld, needs to be positive",
                      (long long)desc->deadline_us);
  if (desc->control_nbytes < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "tcp control: control_nbytes is 0, needs at least 1");
  if (memchr(desc->job, 0, sizeof(desc->job)) == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "tcp control: job has no end, needs at most %zu characters",
                      sizeof(desc->job) - 1);
  return mfsdp__tcp_address_check(context, desc);
}

/* The addresses of rank 0. A resolver that does not know now is asked again until the deadline. */
MFSDP_API mfsdp_status mfsdp__tcp_resolve(mfsdp__lobby *m, mfsdp_error *why) {
  char reason[128];
  int32_t i;
  for (;;) {
    const mfsdp_status status = mfsdp__socket_resolve(m->host, m->port, m->at, &m->at_count, why);
    if (status == MFSDP_OK) break;
    (void)snprintf(reason, sizeof(reason), "%.127s", why->message);
    if (status == MFSDP_E_ARGUMENT || mfsdp_clock_us() + 100000 >= m->deadline_us)
      return MFSDP_ERROR_SET(
          why, MFSDP_E_ARGUMENT, -1,
          "tcp control: rank %d finds no host \"%.100s\": %s; set MASTER_ADDR to a "
          "name or number that all ranks know",
          (int)m->hello.rank, m->host, reason);
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 100000);
  }
  for (i = 0; i < m->at_count && m->hello.rank != 0; ++i)
    if (mfsdp__socket_is_any(&m->at[i]))
      return MFSDP_ERROR_SET(
          why, MFSDP_E_ARGUMENT, -1,
          "tcp control: rank %d cannot go to \"%.100s\": rank 0 may listen there; "
          "the others need an address of its host",
          (int)m->hello.rank, m->host);
  return MFSDP_OK;
}

/* Meets the others. */
MFSDP_API mfsdp_status mfsdp__tcp_meet(mfsdp__lobby *m, const mfsdp_tcp_control_desc *desc,
                                       mfsdp_error *why) {
  mfsdp_status status = MFSDP_OK;
  m->start_us = mfsdp_clock_us();
  m->deadline_us = mfsdp_clock_deadline_us(desc->deadline_us);
  m->ask_us = m->deadline_us - mfsdp__tcp_ask_us(desc->deadline_us);
  if (desc->rank == 0)
    m->deadline_us -= desc->deadline_us / 16 < MFSDP__LOBBY_EARLY_US ? desc->deadline_us / 16
                                                                     : MFSDP__LOBBY_EARLY_US;
  m->host = desc->address;
  m->port = desc->port;
  m->hello.version = MFSDP_VERSION;
  m->hello.world = desc->world;
  m->hello.rank = desc->rank;
  m->hello.limit = desc->control_nbytes;
  mfsdp__tcp_text(m->hello.job, sizeof(m->hello.job), (const unsigned char *)desc->job,
                  sizeof(desc->job));
  mfsdp__hello_write(&m->hello, m->hello_bytes);
  if (desc->listener < 0) status = mfsdp__tcp_resolve(m, why);
  if (status == MFSDP_OK)
    status =
        desc->rank == 0 ? mfsdp__lobby_host(m, desc->listener, why) : mfsdp__lobby_join(m, why);
  mfsdp__lobby_prefix(why);
  return status;
}

/*
 * Meets the other ranks; one call for each, with one deadline. *out holds the table. COMPLETE.
 * E_MEMORY, E_OVERFLOW, and the list above. World 1 needs no socket.
 */
MFSDP_API mfsdp_status mfsdp_tcp_control_create(mfsdp_context *context,
                                                const mfsdp_tcp_control_desc *desc,
                                                mfsdp_control *out) {
  mfsdp_error why = mfsdp_error_none();
  mfsdp__lobby *lobby = NULL;
  mfsdp__tcp *tcp = NULL;
  mfsdp_status status;
  void *table;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "tcp control: out is NULL");
  memset(out, 0, sizeof(*out));
  MFSDP_TRY(mfsdp__tcp_desc_check(context, desc));
  MFSDP_TRY(mfsdp__tcp_make(context, desc->rank, desc->world, desc->control_nbytes,
                            desc->rank == 0 ? MFSDP__LOBBY_EXTRA : 0, &tcp));
  if (desc->world > 1) {
    status = mfsdp_table_alloc(context, 1, sizeof(*lobby), "tcp control: rendezvous", &table);
    lobby = (mfsdp__lobby *)table;
    if (status == MFSDP_OK) {
      lobby->tcp = tcp;
      mfsdp_mutex_lock(&tcp->mutex);
      status = mfsdp__tcp_meet(lobby, desc, &why);
      if (status != MFSDP_OK) mfsdp__tcp_poison(tcp, &why, NULL);
      mfsdp_mutex_unlock(&tcp->mutex);
      mfsdp_table_free(context, lobby, 1, sizeof(*lobby));
      if (status != MFSDP_OK) status = mfsdp_context_take_error(context, &tcp->error);
    }
    if (status != MFSDP_OK) {
      (void)mfsdp__tcp_control_destroy(tcp, context);
      return status;
    }
  }
  tcp->meeting = 0;
  tcp->extra_count = 0;
  out->struct_nbytes = sizeof(*out);
  out->ops = mfsdp__tcp_control_ops();
  out->self = tcp;
  out->rank = desc->rank;
  out->world = desc->world;
  out->deadline_us = desc->deadline_us;
  return MFSDP_OK;
}

#endif /* MFSDP_POSIX_CONTROL_TCP_H */
