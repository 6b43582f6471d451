/* SPDX-License-Identifier: MIT */
/*
 * rendezvous_tcp.h - how the ranks of control_tcp.h find each other. Part of control_tcp.h.
 *
 * Rank 0 listens at its address, the others connect again and again until the deadline. Both sides
 * say hello at once (128 bytes: who they are and which job they belong to), so that each sees for
 * itself whether it talks to the right one. Then rank 0 waits for the others, and welcomes all.
 *
 * Rank 0 turns away, and goes on waiting: other programs, other protocols, ranks of other jobs, and
 * whoever does not say hello in time. A rank of this job that does not fit (another world, version
 * or limit, a rank that is taken) ends the rendezvous on all ranks: waiting would not help.
 * Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see clock.h.
 */
#ifndef MFSDP_POSIX_RENDEZVOUS_TCP_H
#define MFSDP_POSIX_RENDEZVOUS_TCP_H

#include "tcp_link.h"

/* Raised when the bytes below or those of tcp_link.h change. */
#define MFSDP__TCP_PROTOCOL 1
#define MFSDP__HELLO_NBYTES 128
#define MFSDP__HELLO_JOB_NBYTES 80
/* Connections that have not said hello; more wait in the kernel. */
#define MFSDP__LOBBY_GUESTS 32
#define MFSDP__LOBBY_EXTRA (MFSDP__LOBBY_GUESTS + 1)
/* A guest's time for its hello, unless the deadline is near. */
#define MFSDP__LOBBY_HELLO_US 5000000
/* How long rank 0 waits for a port that is in use: an earlier run may be on its way out. */
#define MFSDP__LOBBY_BIND_US 1000000
/* After an error rank 0 stays this long, or an eighth of the deadline, for ranks that are on
 * their way: they hear why, and do not wait for nobody. */
#define MFSDP__LOBBY_LINGER_US 500000
/* At the deadline rank 0 speaks first, by so much or a sixteenth of it: it knows most. */
#define MFSDP__LOBBY_EARLY_US 100000
/* An attempt to connect may take this long: not every address of a name answers. */
#define MFSDP__LOBBY_TRY_US 3000000

typedef struct mfsdp__hello {
  int32_t version, world, rank;
  uint64_t limit;
  char job[MFSDP__HELLO_JOB_NBYTES]; /* with its NUL */
} mfsdp__hello;

/* A connection to rank 0 whose hello is not complete. */
typedef struct mfsdp__guest {
  int fd; /* -1: free */
  mfsdp__socket_address from;
  int64_t until_us;
  size_t have;
  unsigned char bytes[MFSDP__HELLO_NBYTES];
} mfsdp__guest;

typedef struct mfsdp__lobby {
  mfsdp__tcp *tcp;
  mfsdp__hello hello; /* this rank's */
  unsigned char hello_bytes[MFSDP__HELLO_NBYTES];
  const char *host; /* as the user wrote it */
  int32_t port;
  int64_t start_us, deadline_us, ask_us;
  mfsdp__socket_address at[MFSDP__SOCKET_ADDRESSES];
  int32_t at_count;
  /* Rank 0. */
  int listener;
  mfsdp__socket_address here;
  int32_t came_count, told_count, turned_away;
  char last_away[192]; /* who was turned away last, and why */
  mfsdp__guest guests[MFSDP__LOBBY_GUESTS];
} mfsdp__lobby;

MFSDP_API int32_t mfsdp__lobby_ms(const mfsdp__lobby *m) {
  return (int32_t)((mfsdp_clock_us() - m->start_us) / 1000);
}

/* Messages that name a peer first get the name of what failed. */
MFSDP_API void mfsdp__lobby_prefix(mfsdp_error *why) {
  char text[sizeof(why->message)];
  if (why->status == MFSDP_OK || strncmp(why->message, "tcp", 3) == 0) return;
  memcpy(text, why->message, sizeof(text));
  (void)snprintf(why->message, sizeof(why->message), "tcp control: %.370s", text);
}

/* ---- hello ---- */

MFSDP_API const char *mfsdp__hello_magic(void) {
  return "MFSDPTCP";
}

MFSDP_API void mfsdp__hello_write(const mfsdp__hello *hello, unsigned char *to) {
  const uint32_t order = UINT32_C(0x01020304);
  memset(to, 0, MFSDP__HELLO_NBYTES);
  memcpy(to, mfsdp__hello_magic(), 8);
  mfsdp__tcp_put(to + 8, MFSDP__TCP_PROTOCOL, 4);
  memcpy(to + 12, &order, sizeof(order)); /* as this machine stores it */
  mfsdp__tcp_put(to + 16, (uint32_t)hello->version, 4);
  mfsdp__tcp_put(to + 20, (uint32_t)hello->world, 4);
  mfsdp__tcp_put(to + 24, (uint32_t)hello->rank, 4);
  mfsdp__tcp_put(to + 32, hello->limit, 8);
  memcpy(to + 40, hello->job, strlen(hello->job));
}

MFSDP_API void mfsdp__hello_read(mfsdp__hello *hello, const unsigned char *from) {
  hello->version = mfsdp__tcp_get_i32(from + 16);
  hello->world = mfsdp__tcp_get_i32(from + 20);
  hello->rank = mfsdp__tcp_get_i32(from + 24);
  hello->limit = mfsdp__tcp_get(from + 32, 8);
  mfsdp__tcp_text(hello->job, sizeof(hello->job), from + 40, MFSDP__HELLO_JOB_NBYTES);
}

/* What is wrong with the bytes of `have` > 0 that `from` has sent so far, as one of no job that
 * this rank could know; OK if nothing is. */
MFSDP_API mfsdp_status mfsdp__hello_foreign(const unsigned char *bytes, size_t have,
                                            const char *from, mfsdp_error *why) {
  const uint32_t order = UINT32_C(0x01020304);
  char text[24];
  uint64_t protocol;
  if (memcmp(bytes, mfsdp__hello_magic(), have < 8 ? have : 8) != 0) {
    mfsdp__tcp_text(text, sizeof(text), bytes, have);
    return MFSDP_ERROR_SET(why, MFSDP_E_FORMAT, -1,
                           "the program at %s is no rank of MatrixFSDP (it says \"%s\"); choose "
                           "another MASTER_PORT, which no other program uses",
                           from, text);
  }
  if (have < MFSDP__HELLO_NBYTES) return MFSDP_OK;
  protocol = mfsdp__tcp_get(bytes + 8, 4);
  if (protocol != MFSDP__TCP_PROTOCOL)
    return MFSDP_ERROR_SET(why, MFSDP_E_UNSUPPORTED, -1,
                           "the rank at %s speaks protocol %llu, this one %d; build all ranks with "
                           "one version of MatrixFSDP",
                           from, (unsigned long long)protocol, MFSDP__TCP_PROTOCOL);
  if (memcmp(bytes + 12, &order, sizeof(order)) != 0)
    return MFSDP_ERROR_SET(why, MFSDP_E_UNSUPPORTED, -1,
                           "the rank at %s stores its bytes in another order; use machines of one "
                           "kind",
                           from);
  return MFSDP_OK;
}

/* Whether `theirs` belongs to another job than `mine`. */
MFSDP_API mfsdp_status mfsdp__hello_stale(const mfsdp__hello *mine, const mfsdp__hello *theirs,
                                          const char *from, mfsdp_error *why) {
  if (strcmp(mine->job, theirs->job) == 0) return MFSDP_OK;
  return MFSDP_ERROR_SET(why, MFSDP_E_PEER, -1,
                         "rank %d at %s is of another job (\"%s\"), this is rank %d of \"%s\": a "
                         "stale process of an earlier run, or a port that two jobs share; end it, "
                         "or choose another MASTER_PORT",
                         (int)theirs->rank, from, theirs->job, (int)mine->rank, mine->job);
}

/* Whether `theirs`, a rank of the same job, was started like `mine`. */
MFSDP_API mfsdp_status mfsdp__hello_compare(const mfsdp__hello *mine, const mfsdp__hello *theirs,
                                            const char *from, mfsdp_error *why) {
  const int32_t culprit = theirs->rank >= 0 && theirs->rank < mine->world ? theirs->rank : -1;
  if (mine->version != theirs->version)
    return MFSDP_ERROR_SET(why, MFSDP_E_UNSUPPORTED, culprit,
                           "rank %d at %s has MatrixFSDP %d.%d.%d, rank %d has %d.%d.%d; build all "
                           "ranks with one version",
                           (int)theirs->rank, from, (int)(theirs->version / 1000000),
                           (int)(theirs->version / 1000 % 1000), (int)(theirs->version % 1000),
                           (int)mine->rank, (int)(mine->version / 1000000),
                           (int)(mine->version / 1000 % 1000), (int)(mine->version % 1000));
  if (mine->world != theirs->world)
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, culprit,
                           "rank %d at %s was started for %d ranks, rank %d for %d; start all with "
                           "one world size (WORLD_SIZE, srun -n)",
                           (int)theirs->rank, from, (int)theirs->world, (int)mine->rank,
                           (int)mine->world);
  if (mine->limit != theirs->limit)
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, culprit,
                           "rank %d at %s has control_nbytes %llu, rank %d has %llu; they must be "
                           "equal",
                           (int)theirs->rank, from, (unsigned long long)theirs->limit,
                           (int)mine->rank, (unsigned long long)mine->limit);
  return MFSDP_OK;
}

/* ---- rank 0 ---- */

MFSDP_API mfsdp_status mfsdp__lobby_cannot_listen(const mfsdp__lobby *m, const char *at, int number,
                                                  mfsdp_error *why) {
  char reason[32];
  if (number == EADDRINUSE)
    return MFSDP_ERROR_SET(why, MFSDP_E_IO, -1,
                           "tcp control: rank 0 cannot listen at %s: the port is in use; end the "
                           "program that has it (an earlier run, a second rank 0), or choose "
                           "another MASTER_PORT",
                           at);
  if (number == EADDRNOTAVAIL || number == EAFNOSUPPORT)
    return MFSDP_ERROR_SET(
        why, MFSDP_E_ARGUMENT, -1,
        "tcp control: rank 0 cannot listen at %s: it is no address of this host; "
        "MASTER_ADDR (%s) must name the host of rank 0",
        at, m->host);
  return MFSDP_ERROR_SET(why, MFSDP_E_IO, -1, "tcp control: rank 0 cannot listen at %s: %s%s", at,
                         mfsdp__socket_explain(number, reason, sizeof(reason)),
                         number == EACCES ? "; ports below 1024 are the system's" : "");
}

/* At the first address of the name that is this host's. The port's last user may be on its way
 * out. */
MFSDP_API mfsdp_status mfsdp__lobby_listen(mfsdp__lobby *m, mfsdp_error *why) {
  const int64_t quarter_us = (m->deadline_us - m->start_us) / 4;
  const int64_t until_us =
      m->start_us + (quarter_us < MFSDP__LOBBY_BIND_US ? quarter_us : MFSDP__LOBBY_BIND_US);
  int32_t i, worst = 0;
  int number, worst_number = EADDRNOTAVAIL;
  for (;;) {
    for (i = 0; i < m->at_count; ++i) {
      number = 0;
      m->listener = mfsdp__socket_listen(&m->at[i], 256, &number);
      if (m->listener >= 0) {
        m->here = m->at[i];
        return MFSDP_OK;
      }
      if (i == 0 || (number != EADDRNOTAVAIL && number != EAFNOSUPPORT)) {
        worst = i;
        worst_number = number;
      }
    }
    if (worst_number != EADDRINUSE || mfsdp_clock_us() >= until_us)
      return mfsdp__lobby_cannot_listen(m, m->at[worst].text, worst_number, why);
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 20000);
  }
}

/* Takes the caller's listening socket. */
MFSDP_API mfsdp_status mfsdp__lobby_adopt(mfsdp__lobby *m, int fd, mfsdp_error *why) {
  int number = 0;
  m->here.nbytes = sizeof(m->here.storage);
  if (getsockname(fd, (struct sockaddr *)&m->here.storage, &m->here.nbytes) != 0)
    return MFSDP_ERROR_SET(why, MFSDP_E_ARGUMENT, -1,
                           "tcp control: listener is %d, needs a listening socket or -1", fd);
  mfsdp__socket_name(&m->here);
  m->listener = mfsdp__socket_prepare(fd, &number);
  if (m->listener < 0)
    return MFSDP_ERROR_SET(why, MFSDP_E_IO, -1, "tcp control: listener: system error %d", number);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__guest_end(mfsdp__guest *guest) {
  if (guest->fd >= 0) (void)close(guest->fd);
  guest->fd = -1;
}

MFSDP_API void mfsdp__guest_turn_away(mfsdp__lobby *m, mfsdp__guest *guest, const char *reason) {
  ++m->turned_away;
  (void)snprintf(m->last_away, sizeof(m->last_away), "%.191s", reason);
  mfsdp__guest_end(guest);
}

/* Takes all who have come, as long as there is room: our hello goes to them at once. */
MFSDP_API mfsdp_status mfsdp__lobby_accept(mfsdp__lobby *m, mfsdp_error *why) {
  const int64_t quarter_us = (m->deadline_us - m->start_us) / 4;
  const int64_t hello_us = quarter_us < MFSDP__LOBBY_HELLO_US ? quarter_us : MFSDP__LOBBY_HELLO_US;
  int32_t i;
  for (i = 0; i < MFSDP__LOBBY_GUESTS; ++i) {
    mfsdp__guest *guest = &m->guests[i];
    int number = 0;
    char reason[32];
    if (guest->fd >= 0) continue;
    guest->fd = mfsdp__socket_accept(m->listener, &guest->from, &number);
    if (guest->fd < 0 && number == 0) return MFSDP_OK;
    if (guest->fd < 0)
      return MFSDP_ERROR_SET(why, MFSDP_E_IO, -1, "tcp control: rank 0 cannot accept at %s: %s",
                             m->here.text, mfsdp__socket_explain(number, reason, sizeof(reason)));
    guest->have = 0;
    guest->until_us = mfsdp_clock_us() + hello_us;
    if (mfsdp__socket_send(guest->fd, m->hello_bytes, MFSDP__HELLO_NBYTES, &number) !=
        MFSDP__HELLO_NBYTES)
      mfsdp__guest_end(guest);
  }
  return MFSDP_OK;
}

/* A guest's hello is complete: it becomes a link, is turned away, or ends the rendezvous. */
MFSDP_API mfsdp_status mfsdp__lobby_admit(mfsdp__lobby *m, mfsdp__guest *guest, mfsdp_error *why) {
  mfsdp__tcp *tcp = m->tcp;
  const char *from = guest->from.text;
  mfsdp__tcp_link *link;
  mfsdp__hello theirs;
  mfsdp__hello_read(&theirs, guest->bytes);
  if (mfsdp__hello_stale(&m->hello, &theirs, from, why) != MFSDP_OK) {
    mfsdp__guest_turn_away(m, guest, why->message);
    *why = mfsdp_error_none();
    return MFSDP_OK;
  }
  MFSDP_TRY(mfsdp__hello_compare(&m->hello, &theirs, from, why));
  if (theirs.rank < 1 || theirs.rank >= tcp->world)
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                           "the process at %s says that it is rank %d, needs 1 to %d", from,
                           (int)theirs.rank, (int)tcp->world - 1);
  link = &tcp->links[theirs.rank];
  if (link->fd >= 0)
    return MFSDP_ERROR_SET(
        why, MFSDP_E_STATE, theirs.rank,
        "rank %d has joined already, from %s, and comes again from %s; give every "
        "process a rank of its own (RANK, SLURM_PROCID)",
        (int)theirs.rank, link->name, from);
  link->fd = guest->fd;
  memcpy(link->name, guest->from.text, sizeof(link->name));
  guest->fd = -1;
  ++m->came_count;
  tcp->table_changed = 1;
  return MFSDP_OK;
}

/* Reads from a guest. A wrong start is seen before the rest has come. */
MFSDP_API mfsdp_status mfsdp__lobby_hear(mfsdp__lobby *m, mfsdp__guest *guest, mfsdp_error *why) {
  char text[160];
  int number = 0;
  const int64_t count = mfsdp__socket_receive(guest->fd, guest->bytes + guest->have,
                                              MFSDP__HELLO_NBYTES - guest->have, &number);
  if (count < 0) {
    (void)snprintf(text, sizeof(text), "the process at %s left before it had said who it is",
                   guest->from.text);
    mfsdp__guest_turn_away(m, guest, text);
    return MFSDP_OK;
  }
  guest->have += (size_t)count;
  if (count == 0) return MFSDP_OK;
  if (mfsdp__hello_foreign(guest->bytes, guest->have, guest->from.text, why) != MFSDP_OK) {
    mfsdp__guest_turn_away(m, guest, why->message);
    *why = mfsdp_error_none();
    return MFSDP_OK;
  }
  if (guest->have < MFSDP__HELLO_NBYTES) return MFSDP_OK;
  return mfsdp__lobby_admit(m, guest, why);
}

/* One wait of rank 0: for its peers, its guests and new ones. */
MFSDP_API mfsdp_status mfsdp__lobby_turn(mfsdp__lobby *m, int64_t until_us, mfsdp_error *why) {
  mfsdp__tcp *tcp = m->tcp;
  struct pollfd *fds = tcp->fds + tcp->link_count;
  int32_t i, room = 0;
  for (i = 0; i < MFSDP__LOBBY_GUESTS; ++i) {
    fds[i].fd = m->guests[i].fd;
    fds[i].events = POLLIN;
    fds[i].revents = 0;
    if (m->guests[i].fd < 0) room = 1;
    if (m->guests[i].fd >= 0 && m->guests[i].until_us < until_us) until_us = m->guests[i].until_us;
  }
  fds[i].fd = room ? m->listener : -1;
  fds[i].events = POLLIN;
  fds[i].revents = 0;
  mfsdp__tcp_serve(tcp, tcp->fds, until_us);
  for (i = 0; i < MFSDP__LOBBY_GUESTS; ++i) {
    mfsdp__guest *guest = &m->guests[i];
    if (guest->fd >= 0 && fds[i].revents != 0) MFSDP_TRY(mfsdp__lobby_hear(m, guest, why));
    if (guest->fd >= 0 && mfsdp_clock_us() >= guest->until_us) {
      char text[160];
      (void)snprintf(text, sizeof(text), "the process at %s did not say who it is in time",
                     guest->from.text);
      mfsdp__guest_turn_away(m, guest, text);
    }
  }
  if (fds[MFSDP__LOBBY_GUESTS].revents != 0) return mfsdp__lobby_accept(m, why);
  return MFSDP_OK;
}

/* The first rank that had joined and is gone, or -1. */
MFSDP_API int32_t mfsdp__lobby_gone(const mfsdp__tcp *tcp) {
  int32_t r;
  for (r = 1; r < tcp->world; ++r)
    if (tcp->links[r].gone != MFSDP__TCP_HERE) return r;
  return -1;
}

/* Adds ", 3" and so on for ranks that have not come by `states` (with -1 for none of its own);
 * after eight of them "and N more". Returns the first. */
MFSDP_API int32_t mfsdp__lobby_list_missing(const mfsdp__tcp *tcp, const uint8_t *states,
                                            char *text, size_t nbytes) {
  int32_t r, first = -1, count = 0;
  size_t used = strlen(text);
  for (r = 0; r < tcp->world; ++r) {
    const int state = states != NULL ? states[r] : mfsdp__tcp_state(tcp, r);
    if (state & MFSDP__TCP_STATE_CAME) continue;
    if (first < 0) first = r;
    if (++count > 8) continue;
    (void)snprintf(text + used, nbytes - used, "%s%d", count > 1 ? ", " : "", (int)r);
    used = strlen(text);
  }
  if (count > 8) (void)snprintf(text + used, nbytes - used, " and %d more", (int)count - 8);
  return first;
}

MFSDP_API mfsdp_status mfsdp__lobby_incomplete(const mfsdp__lobby *m, mfsdp_error *why) {
  const mfsdp__tcp *tcp = m->tcp;
  char missing[96] = "";
  const int32_t first = mfsdp__lobby_list_missing(tcp, NULL, missing, sizeof(missing));
  const mfsdp_status status = MFSDP_ERROR_SET(
      why, MFSDP_E_TIMEOUT, first,
      "tcp control: rank 0 waited %d ms at %s for %d of %d ranks, which did not come: %s; do "
      "they run, with the same MASTER_ADDR and MASTER_PORT?%s",
      (int)mfsdp__lobby_ms(m), m->here.text, (int)(tcp->world - 1 - m->came_count), (int)tcp->world,
      missing,
      mfsdp__socket_is_loopback(&m->here) ? " (this address is of use on this host alone)" : "");
  const size_t used = strlen(why->message);
  if (m->turned_away > 0)
    (void)snprintf(why->message + used, sizeof(why->message) - used,
                   "; %d connections were turned away, the last: %s", (int)m->turned_away,
                   m->last_away);
  return status;
}

/* Waits for all ranks. On an error all that have joined, and a guest that caused it, are told. */
MFSDP_API mfsdp_status mfsdp__lobby_gather(mfsdp__lobby *m, mfsdp_error *why) {
  mfsdp__tcp *tcp = m->tcp;
  int32_t r;
  while (m->came_count < tcp->world - 1) {
    const int32_t gone = mfsdp__lobby_gone(tcp);
    if (tcp->poisoned) {
      *why = tcp->error;
      return why->status;
    }
    if (gone >= 0) {
      char text[128];
      mfsdp__tcp_whereabouts(&tcp->links[gone], text, sizeof(text));
      return MFSDP_ERROR_SET(why, MFSDP_E_PEER, gone,
                             "tcp control: rank %d (%s) had joined and %s while rank 0 waited for "
                             "others",
                             (int)gone, tcp->links[gone].name, text);
    }
    if (mfsdp_clock_us() >= m->deadline_us) return mfsdp__lobby_incomplete(m, why);
    MFSDP_TRY(mfsdp__lobby_turn(m, m->deadline_us, why));
  }
  /* Who has come as a second rank of some number meanwhile hears so now, not at its deadline. */
  for (r = 0; r < 2; ++r)
    MFSDP_TRY(mfsdp__lobby_turn(m, mfsdp_clock_us(), why));
  for (r = 1; r < tcp->world; ++r) {
    (void)mfsdp__tcp_say(tcp, &tcp->links[r], MFSDP__TCP_WELCOME, 0, NULL, 0);
    mfsdp__tcp_flush(&tcp->links[r]);
  }
  return MFSDP_OK;
}

/* Tells a guest of this job why the rendezvous has ended. */
MFSDP_API void mfsdp__lobby_tell(const mfsdp__guest *guest, const mfsdp_error *why) {
  unsigned char message[MFSDP__TCP_HEAD_NBYTES + MFSDP__TCP_NOTICE_NBYTES];
  int number = 0;
  mfsdp__tcp_head(message, MFSDP__TCP_NOTICE, 0, MFSDP__TCP_NOTICE_NBYTES);
  mfsdp__tcp_notice(why, message + MFSDP__TCP_HEAD_NBYTES);
  (void)mfsdp__socket_send(guest->fd, message, sizeof(message), &number);
}

/* The rendezvous has failed: all that are here are told, and all that come for a little while. */
MFSDP_API void mfsdp__lobby_close(mfsdp__lobby *m, const mfsdp_error *why) {
  const int64_t eighth_us = (m->deadline_us - m->start_us) / 8;
  const int64_t linger_us =
      mfsdp_clock_us() + (eighth_us < MFSDP__LOBBY_LINGER_US ? eighth_us : MFSDP__LOBBY_LINGER_US);
  const int64_t until_us = linger_us < m->deadline_us ? linger_us : m->deadline_us;
  int32_t i;
  do {
    mfsdp_error other = mfsdp_error_none();
    mfsdp__tcp_poison(m->tcp, why, NULL);
    mfsdp__tcp_tell(m->tcp);
    for (i = 0; i < MFSDP__LOBBY_GUESTS; ++i) {
      mfsdp__guest *guest = &m->guests[i];
      if (guest->fd < 0 || guest->have < MFSDP__HELLO_NBYTES) continue;
      mfsdp__lobby_tell(guest, why);
      mfsdp__guest_end(guest);
      ++m->told_count;
    }
    if (m->came_count + m->told_count >= m->tcp->world - 1) return;
    (void)mfsdp__lobby_turn(m, until_us, &other);
  } while (mfsdp_clock_us() < until_us);
}

MFSDP_API mfsdp_status mfsdp__lobby_host(mfsdp__lobby *m, int listener, mfsdp_error *why) {
  mfsdp_status status;
  int32_t i;
  m->listener = -1;
  for (i = 0; i < MFSDP__LOBBY_GUESTS; ++i)
    m->guests[i].fd = -1;
  status = listener >= 0 ? mfsdp__lobby_adopt(m, listener, why) : mfsdp__lobby_listen(m, why);
  if (status == MFSDP_OK) {
    status = mfsdp__lobby_gather(m, why);
    mfsdp__lobby_prefix(why);
    if (status != MFSDP_OK) mfsdp__lobby_close(m, why);
  }
  for (i = 0; i < MFSDP__LOBBY_GUESTS; ++i)
    mfsdp__guest_end(&m->guests[i]);
  if (m->listener >= 0) (void)close(m->listener);
  return status;
}

/* ---- the others ---- */

/* Waits for one socket. 1: something happened to it. */
MFSDP_API int mfsdp__lobby_wait(int fd, short events, int64_t until_us) {
  struct pollfd one;
  one.fd = fd;
  one.events = events;
  one.revents = 0;
  mfsdp__socket_poll(&one, 1, until_us);
  return one.revents != 0;
}

/* Connects to one address; -1: *number says why not. */
MFSDP_API int mfsdp__lobby_connect(const mfsdp__lobby *m, const mfsdp__socket_address *to,
                                   int *number) {
  const int64_t try_us = mfsdp_clock_us() + MFSDP__LOBBY_TRY_US;
  const int64_t until_us = try_us < m->deadline_us ? try_us : m->deadline_us;
  const int fd = mfsdp__socket_connect(to, number);
  int state = 0;
  if (fd < 0) return -1;
  do {
    if (mfsdp__lobby_wait(fd, POLLOUT, until_us)) state = mfsdp__socket_connected(fd, number);
  } while (state == 0 && mfsdp_clock_us() < until_us);
  if (state > 0) return fd;
  if (state == 0) *number = ETIMEDOUT;
  (void)close(fd);
  return -1;
}

/*
 * Says hello and hears rank 0's. *again: rank 0 went before it had said its own, which may be a
 * listener on its way out: another attempt may find the right one.
 */
MFSDP_API mfsdp_status mfsdp__lobby_greet(const mfsdp__lobby *m, int fd, const char *from,
                                          int *again, int *number, mfsdp_error *why) {
  unsigned char bytes[MFSDP__HELLO_NBYTES];
  mfsdp__hello theirs;
  size_t have = 0;
  *again = 0;
  if (mfsdp__socket_send(fd, m->hello_bytes, MFSDP__HELLO_NBYTES, number) != MFSDP__HELLO_NBYTES) {
    *again = 1;
    return MFSDP_OK;
  }
  while (have < MFSDP__HELLO_NBYTES) {
    int64_t count;
    if (mfsdp_clock_us() >= m->deadline_us)
      return MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, 0,
                             "rank %d reached %s and waited %d ms, and nobody there said hello: "
                             "another program has the port, or rank 0 is stopped",
                             (int)m->hello.rank, from, (int)mfsdp__lobby_ms(m));
    if (!mfsdp__lobby_wait(fd, POLLIN, m->deadline_us)) continue;
    count = mfsdp__socket_receive(fd, bytes + have, MFSDP__HELLO_NBYTES - have, number);
    if (count < 0) {
      *again = 1;
      return MFSDP_OK;
    }
    if (count == 0) continue;
    have += (size_t)count;
    MFSDP_TRY(mfsdp__hello_foreign(bytes, have, from, why));
  }
  mfsdp__hello_read(&theirs, bytes);
  MFSDP_TRY(mfsdp__hello_stale(&m->hello, &theirs, from, why));
  MFSDP_TRY(mfsdp__hello_compare(&m->hello, &theirs, from, why));
  if (theirs.rank != 0)
    return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1, "rank %d listens at %s, needs rank 0",
                           (int)theirs.rank, from);
  return MFSDP_OK;
}

/* Until rank 0 is found, or an answer that no later attempt can change. */
MFSDP_API mfsdp_status mfsdp__lobby_seek(mfsdp__lobby *m, mfsdp_error *why) {
  mfsdp__tcp_link *link = &m->tcp->links[0];
  int64_t pause_us = 10000;
  int number = ECONNREFUSED;
  int32_t i, last = 0;
  char reason[32];
  do {
    for (i = 0; i < m->at_count; ++i) {
      const int fd = mfsdp__lobby_connect(m, &m->at[i], &number);
      mfsdp_status status;
      int again = 0;
      last = i;
      if (fd < 0) continue;
      status = mfsdp__lobby_greet(m, fd, m->at[i].text, &again, &number, why);
      if (status == MFSDP_OK && !again) {
        link->fd = fd;
        memcpy(link->name, m->at[i].text, sizeof(link->name));
        return MFSDP_OK;
      }
      (void)close(fd);
      if (status != MFSDP_OK) return status;
    }
    mfsdp_clock_sleep_until(mfsdp_clock_us() + pause_us < m->deadline_us
                                ? mfsdp_clock_us() + pause_us
                                : m->deadline_us);
    if (pause_us < 200000) pause_us *= 2;
  } while (mfsdp_clock_us() < m->deadline_us);
  return MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, 0,
                         "tcp control: rank %d tried for %d ms to reach rank 0 at %.100s (%s%s): "
                         "%s; does rank 0 run on "
                         "that host, has it all its ranks already, is there a firewall?",
                         (int)m->hello.rank, (int)mfsdp__lobby_ms(m), m->host, m->at[last].text,
                         mfsdp__socket_is_loopback(&m->at[last]) ? ", which is this very host" : "",
                         mfsdp__socket_explain(number, reason, sizeof(reason)));
}

/* At the deadline: rank 0 has said who is missing, or it does not answer. */
MFSDP_API mfsdp_status mfsdp__lobby_uninvited(const mfsdp__lobby *m, mfsdp_error *why) {
  const mfsdp__tcp *tcp = m->tcp;
  char missing[96] = "";
  int32_t first;
  if (!tcp->table_seen)
    return MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, 0,
                           "tcp control: rank %d waited %d ms, and rank 0 (%s) does not answer any "
                           "more",
                           (int)m->hello.rank, (int)mfsdp__lobby_ms(m), tcp->links[0].name);
  first = mfsdp__lobby_list_missing(tcp, tcp->table, missing, sizeof(missing));
  return MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, first,
                         "tcp control: rank %d waited %d ms at rank 0 (%s) for ranks that did not "
                         "come: %s; do they run, with the same MASTER_ADDR and MASTER_PORT?",
                         (int)m->hello.rank, (int)mfsdp__lobby_ms(m), tcp->links[0].name, missing);
}

MFSDP_API mfsdp_status mfsdp__lobby_join(mfsdp__lobby *m, mfsdp_error *why) {
  mfsdp__tcp *tcp = m->tcp;
  mfsdp__tcp_link *link = &tcp->links[0];
  int asked = 0;
  MFSDP_TRY(mfsdp__lobby_seek(m, why));
  while (!tcp->welcomed) {
    const int64_t now_us = mfsdp_clock_us();
    if (tcp->poisoned) {
      *why = tcp->error;
      return why->status;
    }
    if (link->gone != MFSDP__TCP_HERE) {
      char text[128];
      mfsdp__tcp_whereabouts(link, text, sizeof(text));
      return MFSDP_ERROR_SET(
          why, MFSDP_E_PEER, 0,
          "tcp control: rank %d had joined rank 0 (%s), which %s before all ranks "
          "had come",
          (int)m->hello.rank, link->name, text);
    }
    if (now_us >= m->deadline_us) return mfsdp__lobby_uninvited(m, why);
    if (now_us >= m->ask_us && !asked) asked = mfsdp__tcp_ask(tcp);
    mfsdp__tcp_serve(tcp, tcp->fds, asked ? m->deadline_us : m->ask_us);
  }
  return MFSDP_OK;
}

#endif /* MFSDP_POSIX_RENDEZVOUS_TCP_H */
