/* SPDX-License-Identifier: MIT */
/*
 * tcp_link.h - what the ranks of control_tcp.h say to each other: messages on the connections of a
 * star whose middle is rank 0, and the loop that moves their bytes. Part of control_tcp.h.
 *
 * A message is a head of 24 bytes (mark, kind, number, length) and what follows it, whose largest
 * length is known for each kind before anything of it is read:
 *
 *   GATHER   to rank 0      a rank's bytes of an all-gather; number: which one
 *   RESULT   from rank 0    the bytes of all
 *   WELCOME  from rank 0    everybody has come
 *   NOTICE   both           an mfsdp_error, the last word; rank 0 passes it on
 *   PROBE    to rank 0      who is there? PING from rank 0 to all, PONG back, TABLE to who asked
 *   LEFT     both           the sender leaves and owes nothing
 *
 * Numbers are little-endian, a rank's bytes are passed as they are. One mutex for all of it, which
 * nobody holds while it waits: a thread that probes takes what comes for one that gathers, and the
 * other way round.
 * Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see clock.h.
 */
#ifndef MFSDP_POSIX_TCP_LINK_H
#define MFSDP_POSIX_TCP_LINK_H

#include "../context.h"
#include "socket.h"
#include "thread.h"

#define MFSDP__TCP_MARK UINT32_C(0x4353464d)
#define MFSDP__TCP_HEAD_NBYTES 24
#define MFSDP__TCP_NOTICE_NBYTES (16 + sizeof(((mfsdp_error *)0)->message))
/* Messages that are read from one peer before the others have their turn. */
#define MFSDP__TCP_TURN 32
/* What another thread has taken is seen this much later. */
#define MFSDP__TCP_SLICE_US 50000
/* A round of pings serves everybody who asks this much later. */
#define MFSDP__TCP_ROUND_US 50000

enum {
  MFSDP__TCP_GATHER = 1,
  MFSDP__TCP_RESULT,
  MFSDP__TCP_WELCOME,
  MFSDP__TCP_NOTICE,
  MFSDP__TCP_PROBE,
  MFSDP__TCP_PING,
  MFSDP__TCP_PONG,
  MFSDP__TCP_TABLE,
  MFSDP__TCP_LEFT
};

/* What a TABLE says of a rank. */
enum { MFSDP__TCP_STATE_CAME = 1, MFSDP__TCP_STATE_ANSWERS = 2, MFSDP__TCP_STATE_GONE = 4 };

/* Why a link is no more. */
enum { MFSDP__TCP_HERE = 0, MFSDP__TCP_SAID_LEFT, MFSDP__TCP_CLOSED };

/* A connection to a peer that has shown who it is. */
typedef struct mfsdp__tcp_link {
  int fd;       /* -1: none yet, or no more */
  int old_fd;   /* of a peer that is gone: another thread may still wait for it */
  int32_t rank; /* the peer's */
  int32_t gone; /* MFSDP__TCP_HERE... */
  int number;   /* CLOSED: the system's reason */
  int32_t cut;  /* CLOSED: in the middle of a message */
  int32_t mute; /* nothing can be sent any more */
  int32_t told; /* of the error */
  char name[MFSDP__SOCKET_TEXT];
  /* Coming in. */
  unsigned char head[MFSDP__TCP_HEAD_NBYTES];
  unsigned char notice[MFSDP__TCP_NOTICE_NBYTES];
  size_t have; /* of the head and the payload */
  uint32_t kind;
  uint64_t in_number;
  unsigned char *payload;
  size_t payload_nbytes;
  /* Going out: whole small messages, and one large one that is not copied. */
  unsigned char *queue;
  size_t queue_count, queue_done;
  unsigned char big_head[MFSDP__TCP_HEAD_NBYTES];
  const unsigned char *big;
  size_t big_count, big_done; /* with the head; count 0: there is none */
  /* Rank 0's notes. */
  int32_t arrived, answered, watching;
  uint64_t watch_number;
  uint64_t gather_number;
  size_t gather_nbytes;
} mfsdp__tcp_link;

typedef struct mfsdp__tcp {
  int32_t rank, world;
  int32_t link_count; /* rank 0: world, by rank, its own unused; others: 1, to rank 0 */
  int32_t extra_count, extra_capacity; /* entries of fds that the caller of serve sets */
  size_t limit;                        /* largest message of a rank */
  mfsdp__tcp_link *links;
  struct pollfd *fds;       /* link_count + extra_capacity */
  struct pollfd *probe_fds; /* link_count: of the thread that probes */
  unsigned char *incoming;  /* world x limit */
  unsigned char *queues;    /* link_count x queue_nbytes */
  size_t queue_nbytes;
  uint8_t *table;             /* world: the last TABLE */
  uint8_t *table_out;         /* world */
  uint64_t generation;        /* all-gathers so far */
  uint64_t ping_number;       /* rounds of pings so far */
  int64_t ping_us;            /* when the last one began */
  uint64_t probe_number;      /* others than 0: of the last PROBE; tables of earlier ones are old */
  int32_t meeting;            /* 1 until everybody has come */
  int32_t welcomed;           /* others than 0: WELCOME is here */
  int32_t table_seen, done;   /* others than 0: a TABLE, the RESULT of this call is here */
  int32_t table_changed;      /* rank 0: those who watch want a new one */
  size_t result_nbytes;       /* of this call; done is 1 when they are in `incoming` */
  int32_t calling;            /* an all-gather waits */
  int32_t probing;            /* a probe waits */
  int32_t poisoned, reported; /* there is an error; a call has returned it */
  int32_t mutex_ready;
  mfsdp_mutex mutex; /* of everything here that changes, once the ranks have met */
  mfsdp_error error;
} mfsdp__tcp;

/* ---- bytes ---- */

MFSDP_API void mfsdp__tcp_put(unsigned char *to, uint64_t value, int nbytes) {
  int i;
  for (i = 0; i < nbytes; ++i)
    to[i] = (unsigned char)((value >> (8 * i)) & 0xffu);
}

MFSDP_API uint64_t mfsdp__tcp_get(const unsigned char *from, int nbytes) {
  uint64_t value = 0;
  int i;
  for (i = 0; i < nbytes; ++i)
    value |= (uint64_t)from[i] << (8 * i);
  return value;
}

MFSDP_API int32_t mfsdp__tcp_get_i32(const unsigned char *from) {
  const uint32_t bits = (uint32_t)mfsdp__tcp_get(from, 4);
  int32_t value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* Text from outside, as a message may show it: ends, and holds nothing that moves a terminal. */
MFSDP_API void mfsdp__tcp_text(char *to, size_t to_nbytes, const unsigned char *from,
                               size_t from_nbytes) {
  size_t i;
  for (i = 0; i + 1 < to_nbytes && i < from_nbytes && from[i] != 0; ++i) {
    to[i] = '?';
    if (from[i] >= 32 && from[i] < 127) to[i] = (char)from[i];
  }
  to[i] = '\0';
}

MFSDP_API void mfsdp__tcp_head(unsigned char *head, int kind, uint64_t number, uint64_t nbytes) {
  mfsdp__tcp_put(head, MFSDP__TCP_MARK, 4);
  mfsdp__tcp_put(head + 4, (uint64_t)kind, 4);
  mfsdp__tcp_put(head + 8, number, 8);
  mfsdp__tcp_put(head + 16, nbytes, 8);
}

/* ---- sending ---- */

/* Queues a small message; 0: there is no room, or nobody to send it to. */
MFSDP_API int mfsdp__tcp_say(mfsdp__tcp *tcp, mfsdp__tcp_link *link, int kind, uint64_t number,
                             const void *payload, size_t nbytes) {
  const size_t need = MFSDP__TCP_HEAD_NBYTES + nbytes;
  unsigned char *to;
  if (link->fd < 0 || link->mute) return 0;
  if (link->queue_done > 0) {
    memmove(link->queue, link->queue + link->queue_done, link->queue_count - link->queue_done);
    link->queue_count -= link->queue_done;
    link->queue_done = 0;
  }
  if (need > tcp->queue_nbytes - link->queue_count) return 0;
  to = link->queue + link->queue_count;
  mfsdp__tcp_head(to, kind, number, nbytes);
  if (nbytes > 0) memcpy(to + MFSDP__TCP_HEAD_NBYTES, payload, nbytes);
  link->queue_count += need;
  return 1;
}

/* Begins to send a large message, which stays where it is. */
MFSDP_API void mfsdp__tcp_say_big(mfsdp__tcp_link *link, int kind, uint64_t number,
                                  const void *payload, size_t nbytes) {
  if (link->fd < 0 || link->mute) return;
  mfsdp__tcp_head(link->big_head, kind, number, nbytes);
  link->big = (const unsigned char *)payload;
  link->big_count = MFSDP__TCP_HEAD_NBYTES + nbytes;
  link->big_done = 0;
}

MFSDP_API int mfsdp__tcp_unsent(const mfsdp__tcp_link *link) {
  return link->fd >= 0 && !link->mute &&
         (link->queue_done < link->queue_count || link->big_done < link->big_count);
}

/* What goes next: the rest of a large message that has begun, small ones, a large one. */
MFSDP_API const unsigned char *mfsdp__tcp_next_out(mfsdp__tcp_link *link, size_t *nbytes,
                                                   size_t **done) {
  const int begun = link->big_done > 0 && link->big_done < link->big_count;
  if (!begun && link->queue_done < link->queue_count) {
    *nbytes = link->queue_count - link->queue_done;
    *done = &link->queue_done;
    return link->queue + link->queue_done;
  }
  *done = &link->big_done;
  if (link->big_done < MFSDP__TCP_HEAD_NBYTES) {
    *nbytes = MFSDP__TCP_HEAD_NBYTES - link->big_done;
    return link->big_head + link->big_done;
  }
  *nbytes = link->big_count - link->big_done;
  return link->big + (link->big_done - MFSDP__TCP_HEAD_NBYTES);
}

/* Sends what the kernel takes. A failure to send says nothing: what the peer has said before it
 * went is still to be read. */
MFSDP_API void mfsdp__tcp_flush(mfsdp__tcp_link *link) {
  while (mfsdp__tcp_unsent(link)) {
    size_t nbytes = 0, *done = NULL;
    const unsigned char *bytes = mfsdp__tcp_next_out(link, &nbytes, &done);
    int number = 0;
    const int64_t count = mfsdp__socket_send(link->fd, bytes, nbytes, &number);
    if (count < 0) link->mute = 1;
    if (count <= 0) return;
    *done += (size_t)count;
  }
  link->queue_count = link->queue_done = 0;
  link->big_count = link->big_done = 0;
  link->big = NULL;
}

/* ---- the first error ---- */

MFSDP_API void mfsdp__tcp_notice(const mfsdp_error *why, unsigned char *notice) {
  memset(notice, 0, MFSDP__TCP_NOTICE_NBYTES);
  mfsdp__tcp_put(notice, (uint32_t)why->status, 4);
  mfsdp__tcp_put(notice + 4, (uint32_t)why->rank, 4);
  mfsdp__tcp_put(notice + 8, (uint32_t)why->culprit, 4);
  mfsdp__tcp_put(notice + 12, (uint32_t)why->line, 4);
  memcpy(notice + 16, why->message, strlen(why->message));
}

/* Tells the error to all peers who have not been told. */
MFSDP_API void mfsdp__tcp_tell(mfsdp__tcp *tcp) {
  unsigned char notice[MFSDP__TCP_NOTICE_NBYTES];
  int32_t i;
  mfsdp__tcp_notice(&tcp->error, notice);
  for (i = 0; i < tcp->link_count; ++i) {
    mfsdp__tcp_link *link = &tcp->links[i];
    if (link->fd < 0 || link->told) continue;
    link->told = 1;
    (void)mfsdp__tcp_say(tcp, link, MFSDP__TCP_NOTICE, 0, notice, sizeof(notice));
    mfsdp__tcp_flush(link);
  }
}

/*
 * Ends the star: `why` is its error unless there is one, and all peers but `from`, who said so, are
 * told. A large message is not sent to its end, since the buffer is the caller's: behind a part of
 * one a peer would not understand the notice, and learns of the end when the connection closes.
 */
MFSDP_API void mfsdp__tcp_poison(mfsdp__tcp *tcp, const mfsdp_error *why, mfsdp__tcp_link *from) {
  int32_t i;
  if (tcp->poisoned) return;
  tcp->poisoned = 1;
  tcp->error = *why;
  if (tcp->error.rank < 0) tcp->error.rank = tcp->rank;
  for (i = 0; i < tcp->link_count; ++i) {
    mfsdp__tcp_link *link = &tcp->links[i];
    if (link->big_done > 0) link->mute = 1;
    link->big_count = link->big_done = 0;
    link->big = NULL;
  }
  if (from != NULL) from->told = 1;
  mfsdp__tcp_tell(tcp);
}

MFSDP_API void mfsdp__tcp_take_notice(mfsdp__tcp *tcp, mfsdp__tcp_link *link) {
  const unsigned char *notice = link->notice;
  mfsdp_error why = mfsdp_error_none();
  const int32_t status = mfsdp__tcp_get_i32(notice);
  why.status = status > (int32_t)MFSDP_OK && status < (int32_t)MFSDP_STATUS_COUNT
                   ? (mfsdp_status)status
                   : MFSDP_E_POISONED;
  why.rank = mfsdp__tcp_get_i32(notice + 4);
  why.culprit = mfsdp__tcp_get_i32(notice + 8);
  why.line = mfsdp__tcp_get_i32(notice + 12);
  if (why.rank < 0 || why.rank >= tcp->world) why.rank = link->rank;
  if (why.culprit < -1 || why.culprit >= tcp->world) why.culprit = -1;
  mfsdp__tcp_text(why.message, sizeof(why.message), notice + 16, sizeof(why.message));
  mfsdp__tcp_poison(tcp, &why, link);
}

/* The connection is no more. Its number is kept from other use as long as a thread may wait for
 * it. */
MFSDP_API void mfsdp__tcp_lose(mfsdp__tcp *tcp, mfsdp__tcp_link *link, int number) {
  (void)shutdown(link->fd, SHUT_RDWR);
  link->old_fd = link->fd;
  link->fd = -1;
  link->cut = link->have > 0;
  link->number = number;
  if (link->gone == MFSDP__TCP_HERE) link->gone = MFSDP__TCP_CLOSED;
  tcp->table_changed = 1;
}

/* Bytes that no rank of ours sends. */
MFSDP_API void mfsdp__tcp_distrust(mfsdp__tcp *tcp, mfsdp__tcp_link *link, const char *what) {
  mfsdp_error why = mfsdp_error_none();
  (void)MFSDP_ERROR_SET(&why, MFSDP_E_FORMAT, link->rank,
                        "tcp control: rank %d (%s) sent %s (kind %u, number %llu, %llu bytes): "
                        "another program has its connection, or another version of this library",
                        (int)link->rank, link->name, what, (unsigned)link->kind,
                        (unsigned long long)link->in_number,
                        (unsigned long long)mfsdp__tcp_get(link->head + 16, 8));
  mfsdp__tcp_poison(tcp, &why, NULL);
  mfsdp__tcp_lose(tcp, link, EPROTO);
}

/* ---- who is there ---- */

/* What is known of rank r: at rank 0 only. */
MFSDP_API uint8_t mfsdp__tcp_state(const mfsdp__tcp *tcp, int32_t r) {
  const mfsdp__tcp_link *link = &tcp->links[r];
  int state = 0;
  if (r == tcp->rank)
    return (uint8_t)(MFSDP__TCP_STATE_ANSWERS |
                     (tcp->meeting || tcp->calling ? MFSDP__TCP_STATE_CAME : 0));
  if (tcp->meeting ? link->fd >= 0 : link->arrived) state |= MFSDP__TCP_STATE_CAME;
  if (link->answered) state |= MFSDP__TCP_STATE_ANSWERS;
  if (link->gone != MFSDP__TCP_HERE) state |= MFSDP__TCP_STATE_GONE;
  return (uint8_t)state;
}

/* Rank 0 asks all who are there, unless it has just done so. */
MFSDP_API void mfsdp__tcp_ping(mfsdp__tcp *tcp) {
  const int64_t now_us = mfsdp_clock_us();
  int32_t r;
  if (tcp->ping_number > 0 && now_us - tcp->ping_us < MFSDP__TCP_ROUND_US) return;
  tcp->ping_us = now_us;
  ++tcp->ping_number;
  for (r = 1; r < tcp->link_count; ++r) {
    tcp->links[r].answered = 0;
    (void)mfsdp__tcp_say(tcp, &tcp->links[r], MFSDP__TCP_PING, tcp->ping_number, NULL, 0);
  }
}

/* The others ask rank 0. 0: they cannot. */
MFSDP_API int mfsdp__tcp_ask(mfsdp__tcp *tcp) {
  tcp->table_seen = 0;
  return mfsdp__tcp_say(tcp, &tcp->links[0], MFSDP__TCP_PROBE, ++tcp->probe_number, NULL, 0);
}

/* Rank 0 tells those who asked, whenever it knows more; who reads nothing gets no second table. */
MFSDP_API void mfsdp__tcp_show_tables(mfsdp__tcp *tcp) {
  int32_t r, made = 0;
  if (!tcp->table_changed) return;
  tcp->table_changed = 0;
  for (r = 1; r < tcp->link_count; ++r) {
    mfsdp__tcp_link *link = &tcp->links[r];
    int32_t i;
    if (!link->watching || link->fd < 0) continue;
    for (i = 0; i < tcp->world && !made; ++i)
      tcp->table_out[i] = mfsdp__tcp_state(tcp, i);
    made = 1;
    (void)mfsdp__tcp_say(tcp, link, MFSDP__TCP_TABLE, link->watch_number, tcp->table_out,
                         (size_t)tcp->world);
    mfsdp__tcp_flush(link);
  }
}

/* ---- receiving ---- */

/* A head is complete: where its payload goes. 0: no message of ours. */
MFSDP_API int mfsdp__tcp_expect(mfsdp__tcp *tcp, mfsdp__tcp_link *link) {
  const int middle = tcp->rank == 0;
  const uint64_t nbytes = mfsdp__tcp_get(link->head + 16, 8);
  link->kind = (uint32_t)mfsdp__tcp_get(link->head + 4, 4);
  link->in_number = mfsdp__tcp_get(link->head + 8, 8);
  link->payload = NULL;
  link->payload_nbytes = (size_t)nbytes;
  if (mfsdp__tcp_get(link->head, 4) != MFSDP__TCP_MARK) return 0;
  switch (link->kind) {
  case MFSDP__TCP_GATHER:
    link->payload = tcp->incoming + (size_t)link->rank * tcp->limit;
    return middle && !tcp->meeting && nbytes <= tcp->limit && !link->arrived;
  case MFSDP__TCP_RESULT:
    link->payload = tcp->incoming;
    return !middle && (tcp->poisoned ? nbytes <= (uint64_t)tcp->world * tcp->limit
                                     : tcp->calling && !tcp->done && nbytes == tcp->result_nbytes);
  case MFSDP__TCP_NOTICE: link->payload = link->notice; return nbytes == MFSDP__TCP_NOTICE_NBYTES;
  case MFSDP__TCP_TABLE:
    link->payload = tcp->table;
    return !middle && nbytes == (uint64_t)tcp->world;
  case MFSDP__TCP_WELCOME:
  case MFSDP__TCP_PING: return !middle && nbytes == 0;
  case MFSDP__TCP_PROBE:
  case MFSDP__TCP_PONG: return middle && nbytes == 0;
  case MFSDP__TCP_LEFT: return nbytes == 0;
  default: return 0;
  }
}

MFSDP_API void mfsdp__tcp_take(mfsdp__tcp *tcp, mfsdp__tcp_link *link) {
  switch (link->kind) {
  case MFSDP__TCP_GATHER:
    link->arrived = 1;
    link->gather_number = link->in_number;
    link->gather_nbytes = link->payload_nbytes;
    tcp->table_changed = 1;
    break;
  case MFSDP__TCP_RESULT:
    if (tcp->poisoned) break;
    if (link->in_number == tcp->generation)
      tcp->done = 1;
    else
      mfsdp__tcp_distrust(tcp, link, "the result of another call");
    break;
  case MFSDP__TCP_NOTICE: mfsdp__tcp_take_notice(tcp, link); break;
  case MFSDP__TCP_TABLE:
    if (link->in_number == tcp->probe_number) tcp->table_seen = 1;
    break;
  case MFSDP__TCP_WELCOME: tcp->welcomed = 1; break;
  case MFSDP__TCP_PING:
    (void)mfsdp__tcp_say(tcp, link, MFSDP__TCP_PONG, link->in_number, NULL, 0);
    mfsdp__tcp_flush(link);
    break;
  case MFSDP__TCP_PONG:
    if (link->in_number == tcp->ping_number) link->answered = 1;
    tcp->table_changed = 1;
    break;
  case MFSDP__TCP_PROBE:
    link->watching = 1;
    link->watch_number = link->in_number;
    tcp->table_changed = 1;
    mfsdp__tcp_ping(tcp);
    break;
  default: link->gone = MFSDP__TCP_SAID_LEFT; break;
  }
}

/* Reads what is there, a few messages at most. */
MFSDP_API void mfsdp__tcp_read(mfsdp__tcp *tcp, mfsdp__tcp_link *link) {
  int turn = 0;
  while (turn < MFSDP__TCP_TURN && link->fd >= 0) {
    const int in_head = link->have < MFSDP__TCP_HEAD_NBYTES;
    unsigned char *to =
        in_head ? link->head + link->have : link->payload + (link->have - MFSDP__TCP_HEAD_NBYTES);
    const size_t want = MFSDP__TCP_HEAD_NBYTES + (in_head ? 0 : link->payload_nbytes) - link->have;
    int number = 0;
    const int64_t count = mfsdp__socket_receive(link->fd, to, want, &number);
    if (count < 0) mfsdp__tcp_lose(tcp, link, number);
    if (count <= 0) return;
    link->have += (size_t)count;
    if (in_head && (size_t)count == want && !mfsdp__tcp_expect(tcp, link)) {
      mfsdp__tcp_distrust(tcp, link, "what is no message of ours");
      return;
    }
    if (link->have < MFSDP__TCP_HEAD_NBYTES ||
        link->have < MFSDP__TCP_HEAD_NBYTES + link->payload_nbytes)
      continue;
    link->have = 0;
    ++turn;
    mfsdp__tcp_take(tcp, link);
  }
}

/*
 * With the mutex, which is free meanwhile: sends, waits until something comes or until_us, or a
 * little while (call it in a loop), and takes it. The caller has set the extra_count entries behind
 * those of the links in `fds`; their revents are fresh on return.
 */
MFSDP_API void mfsdp__tcp_serve(mfsdp__tcp *tcp, struct pollfd *fds, int64_t until_us) {
  const int64_t slice_us = mfsdp_clock_us() + MFSDP__TCP_SLICE_US;
  const size_t count = (size_t)tcp->link_count + (size_t)tcp->extra_count;
  int32_t i;
  for (i = 0; i < tcp->link_count; ++i) {
    mfsdp__tcp_link *link = &tcp->links[i];
    mfsdp__tcp_flush(link);
    fds[i].fd = link->fd;
    fds[i].events = (short)(POLLIN | (mfsdp__tcp_unsent(link) ? POLLOUT : 0));
    fds[i].revents = 0;
  }
  mfsdp_mutex_unlock(&tcp->mutex);
  mfsdp__socket_poll(fds, count, until_us < slice_us ? until_us : slice_us);
  mfsdp_mutex_lock(&tcp->mutex);
  for (i = 0; i < tcp->link_count; ++i) {
    mfsdp__tcp_link *link = &tcp->links[i];
    if (fds[i].revents == 0 || link->fd < 0) continue;
    mfsdp__tcp_flush(link);
    mfsdp__tcp_read(tcp, link);
  }
  if (tcp->rank == 0) mfsdp__tcp_show_tables(tcp);
}

/* Says in `text` why the peer of a link is gone: "has left", ... */
MFSDP_API void mfsdp__tcp_whereabouts(const mfsdp__tcp_link *link, char *text, size_t nbytes) {
  char reason[32];
  if (link->gone == MFSDP__TCP_SAID_LEFT)
    (void)snprintf(text, nbytes, "has left");
  else
    (void)snprintf(text, nbytes, "is gone: its connection broke%s (%s)",
                   link->cut ? " in the middle of a message" : "",
                   mfsdp__socket_explain(link->number, reason, sizeof(reason)));
}

/* ---- memory ---- */

MFSDP_API void mfsdp__tcp_close(mfsdp__tcp_link *link) {
  if (link->fd >= 0) (void)close(link->fd);
  if (link->old_fd >= 0) (void)close(link->old_fd);
  link->fd = link->old_fd = -1;
}

MFSDP_API void mfsdp__tcp_free(mfsdp_context *context, mfsdp__tcp *tcp) {
  const size_t links = (size_t)tcp->link_count, world = (size_t)tcp->world;
  const size_t fds = links + (size_t)tcp->extra_capacity;
  int32_t i;
  for (i = 0; i < tcp->link_count && tcp->links != NULL; ++i)
    mfsdp__tcp_close(&tcp->links[i]);
  if (tcp->mutex_ready) mfsdp_mutex_destroy(&tcp->mutex);
  mfsdp_table_free(context, tcp->table_out, world, 1);
  mfsdp_table_free(context, tcp->table, world, 1);
  mfsdp_table_free(context, tcp->queues, links, tcp->queue_nbytes);
  mfsdp_table_free(context, tcp->incoming, world, tcp->limit);
  mfsdp_table_free(context, tcp->probe_fds, links, sizeof(*tcp->fds));
  mfsdp_table_free(context, tcp->fds, fds, sizeof(*tcp->fds));
  mfsdp_table_free(context, tcp->links, links, sizeof(*tcp->links));
  mfsdp_table_free(context, tcp, 1, sizeof(*tcp));
}

MFSDP_API mfsdp_status mfsdp__tcp_tables(mfsdp_context *context, mfsdp__tcp *tcp) {
  const size_t links = (size_t)tcp->link_count, world = (size_t)tcp->world;
  const size_t fds = links + (size_t)tcp->extra_capacity;
  void *table;
  int32_t i;
  MFSDP_TRY(mfsdp_table_alloc(context, links, sizeof(*tcp->links), "tcp control: links", &table));
  tcp->links = (mfsdp__tcp_link *)table;
  for (i = 0; i < tcp->link_count; ++i) {
    tcp->links[i].fd = tcp->links[i].old_fd = -1;
    tcp->links[i].rank = i;
  }
  MFSDP_TRY(mfsdp_table_alloc(context, fds, sizeof(*tcp->fds), "tcp control: polls", &table));
  tcp->fds = (struct pollfd *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, links, sizeof(*tcp->fds), "tcp control: polls", &table));
  tcp->probe_fds = (struct pollfd *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, world, tcp->limit, "tcp control: messages", &table));
  tcp->incoming = (unsigned char *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, links, tcp->queue_nbytes, "tcp control: queues", &table));
  tcp->queues = (unsigned char *)table;
  for (i = 0; i < tcp->link_count; ++i)
    tcp->links[i].queue = tcp->queues + (size_t)i * tcp->queue_nbytes;
  MFSDP_TRY(mfsdp_table_alloc(context, world, 1, "tcp control: table", &table));
  tcp->table = (uint8_t *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, world, 1, "tcp control: table", &table));
  tcp->table_out = (uint8_t *)table;
  return MFSDP_OK;
}

/* A star of `world` ranks without connections; links of rank 0 are by rank. `extra`: more
 * entries of fds. E_MEMORY, E_OVERFLOW. */
MFSDP_API mfsdp_status mfsdp__tcp_make(mfsdp_context *context, int32_t rank, int32_t world,
                                       size_t limit, int32_t extra, mfsdp__tcp **out) {
  void *table;
  mfsdp__tcp *tcp;
  mfsdp_status status;
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*tcp), "tcp control", &table));
  tcp = (mfsdp__tcp *)table;
  tcp->rank = rank;
  tcp->world = world;
  tcp->link_count = rank == 0 ? world : 1;
  tcp->extra_count = tcp->extra_capacity = extra;
  tcp->limit = limit;
  tcp->meeting = 1;
  tcp->error = mfsdp_error_none();
  /* A notice, a table and some pings, twice. */
  tcp->queue_nbytes =
      2 * (MFSDP__TCP_NOTICE_NBYTES + (size_t)world + (size_t)8 * MFSDP__TCP_HEAD_NBYTES);
  status = mfsdp__tcp_tables(context, tcp);
  if (status == MFSDP_OK) {
    status = mfsdp_mutex_init(&tcp->mutex);
    tcp->mutex_ready = status == MFSDP_OK;
    if (status != MFSDP_OK) (void)MFSDP_FAIL(context, status, "tcp control: no mutex");
  }
  if (status != MFSDP_OK) {
    mfsdp__tcp_free(context, tcp);
    return status;
  }
  *out = tcp;
  return MFSDP_OK;
}

#endif /* MFSDP_POSIX_TCP_LINK_H */
