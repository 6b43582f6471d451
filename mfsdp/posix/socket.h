/* SPDX-License-Identifier: MIT */
/*
 * socket.h - TCP sockets that never block: addresses, listening, connecting, sending, waiting.
 *
 *   mfsdp__socket_address at[MFSDP__SOCKET_ADDRESSES];
 *   MFSDP_TRY(mfsdp__socket_resolve("node3", 29500, at, &count, &why));
 *   if ((fd = mfsdp__socket_listen(&at[0], 64, &number)) < 0) ...
 *   mfsdp__socket_poll(fds, 1, deadline_us);
 *   count = mfsdp__socket_receive(fd, bytes, nbytes, &number);      // 0: nothing now; -1: gone
 *
 * IPv4 and IPv6. Every wait is mfsdp__socket_poll, with a deadline. One call is not ours to bound:
 * a host name (never a number like 10.0.0.3 or ::1) is looked up by the system, with the time-outs
 * of its resolver.
 * Does not: raise SIGPIPE, or leave descriptors to programs that the process starts.
 * Link flags: none. POSIX 2008: see clock.h.
 */
#ifndef MFSDP_POSIX_SOCKET_H
#define MFSDP_POSIX_SOCKET_H

#include "../status.h"
#include "clock.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

/* Addresses of one name that are tried. */
#define MFSDP__SOCKET_ADDRESSES 8
/* "[2001:db8::1%eth0]:29500" and its like, with the NUL. */
#define MFSDP__SOCKET_TEXT 80

typedef struct mfsdp__socket_address {
  struct sockaddr_storage storage;
  socklen_t nbytes;
  char text[MFSDP__SOCKET_TEXT]; /* address:port, for messages */
} mfsdp__socket_address;

/* The reasons that a user can do something about, or NULL. */
MFSDP_API const char *mfsdp__socket_reason(int number) {
  switch (number) {
  case 0: return "the other side closed it";
  case EACCES:
  case EPERM: return "not allowed";
  case EADDRINUSE: return "the port is in use";
  case EADDRNOTAVAIL: return "it is no address of this host";
  case EAFNOSUPPORT: return "this host does not speak that kind of address";
  case ECONNABORTED:
  case ECONNRESET: return "the other side reset it";
  case ECONNREFUSED: return "nobody listens there";
  case EHOSTUNREACH:
  case ENETUNREACH:
  case ENETDOWN: return "there is no way there";
  case EMFILE:
  case ENFILE: return "too many open files (ulimit -n)";
  case ENOBUFS:
  case ENOMEM: return "the system has no memory for it";
  case EPIPE: return "the other side is gone";
  case EINPROGRESS:
  case ETIMEDOUT: return "no answer";
  default: return NULL;
  }
}

/* The reason, or the system's number, as text of at least 32 bytes. */
MFSDP_API const char *mfsdp__socket_explain(int number, char *text, size_t text_nbytes) {
  const char *reason = mfsdp__socket_reason(number);
  if (reason != NULL) return reason;
  (void)snprintf(text, text_nbytes, "system error %d", number);
  return text;
}

/* Writes address:port, with brackets around an IPv6 address. */
MFSDP_API void mfsdp__socket_name(mfsdp__socket_address *address) {
  char host[64], port[8];
  const int six = address->storage.ss_family == AF_INET6;
  if (getnameinfo((const struct sockaddr *)&address->storage, address->nbytes, host, sizeof(host),
                  port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    (void)snprintf(address->text, sizeof(address->text), "an unknown address");
    return;
  }
  (void)snprintf(address->text, sizeof(address->text), "%s%s%s:%s", six ? "[" : "", host,
                 six ? "]" : "", port);
}

/* 127.*, ::1: of no use to other hosts. */
MFSDP_API int mfsdp__socket_is_loopback(const mfsdp__socket_address *address) {
  if (address->storage.ss_family == AF_INET) {
    struct sockaddr_in four;
    memcpy(&four, &address->storage, sizeof(four));
    return (ntohl(four.sin_addr.s_addr) >> 24) == 127;
  }
  if (address->storage.ss_family == AF_INET6) {
    struct sockaddr_in6 six;
    memcpy(&six, &address->storage, sizeof(six));
    return IN6_IS_ADDR_LOOPBACK(&six.sin6_addr) != 0;
  }
  return 0;
}

/* 0.0.0.0, ::, which are every address of a host to listen at, and no address to go to. */
MFSDP_API int mfsdp__socket_is_any(const mfsdp__socket_address *address) {
  if (address->storage.ss_family == AF_INET) {
    struct sockaddr_in four;
    memcpy(&four, &address->storage, sizeof(four));
    return four.sin_addr.s_addr == htonl(INADDR_ANY);
  }
  if (address->storage.ss_family == AF_INET6) {
    struct sockaddr_in6 six;
    memcpy(&six, &address->storage, sizeof(six));
    return IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr) != 0;
  }
  return 0;
}

/*
 * The addresses of `host`, a number or a name, with `port`: up to MFSDP__SOCKET_ADDRESSES of them.
 * `host` is not empty, which to the system would mean this host. E_ARGUMENT: there is none.
 * E_TIMEOUT: the resolver does not know now and may know later.
 */
MFSDP_API mfsdp_status mfsdp__socket_resolve(const char *host, int32_t port,
                                             mfsdp__socket_address *out, int32_t *count,
                                             mfsdp_error *why) {
  struct addrinfo hints, *list = NULL, *at;
  char service[16];
  int result;
  *count = 0;
  memset(&hints, 0, sizeof(hints));
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  (void)snprintf(service, sizeof(service), "%d", (int)port);
  result = getaddrinfo(host, service, &hints, &list);
  if (result != 0)
    return MFSDP_ERROR_SET(why, result == EAI_AGAIN ? MFSDP_E_TIMEOUT : MFSDP_E_ARGUMENT, -1, "%s",
                           gai_strerror(result));
  for (at = list; at != NULL && *count < MFSDP__SOCKET_ADDRESSES; at = at->ai_next) {
    mfsdp__socket_address *address = &out[*count];
    if (at->ai_addrlen > sizeof(address->storage)) continue;
    memset(address, 0, sizeof(*address));
    memcpy(&address->storage, at->ai_addr, at->ai_addrlen);
    address->nbytes = at->ai_addrlen;
    mfsdp__socket_name(address);
    ++*count;
  }
  freeaddrinfo(list);
  if (*count == 0) return MFSDP_ERROR_SET(why, MFSDP_E_ARGUMENT, -1, "it has no address");
  return MFSDP_OK;
}

/* ---- one socket ---- */

MFSDP_API void mfsdp__socket_option(int fd, int level, int option) {
  const int on = 1;
  (void)setsockopt(fd, level, option, &on, (socklen_t)sizeof(on));
}

/* What every socket of ours gets; -1 and closed if the system refuses (then *number). */
MFSDP_API int mfsdp__socket_prepare(int fd, int *number) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
      fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
    *number = errno;
    (void)close(fd);
    return -1;
  }
  mfsdp__socket_option(fd, SOL_SOCKET, SO_KEEPALIVE);
  mfsdp__socket_option(fd, IPPROTO_TCP, TCP_NODELAY);
#if defined(SO_NOSIGPIPE)
  mfsdp__socket_option(fd, SOL_SOCKET, SO_NOSIGPIPE);
#endif
  return fd;
}

/*
 * A new socket of the address's family. SO_REUSEADDR on both ends: connections of an earlier run
 * that the kernel has not forgotten yet do not keep rank 0 from its port.
 */
MFSDP_API int mfsdp__socket_make(const mfsdp__socket_address *address, int *number) {
  int fd = socket(address->storage.ss_family, SOCK_STREAM, 0);
  if (fd < 0) {
    *number = errno;
    return -1;
  }
  fd = mfsdp__socket_prepare(fd, number);
  if (fd >= 0) mfsdp__socket_option(fd, SOL_SOCKET, SO_REUSEADDR);
  return fd;
}

/* Listens at this address alone; -1: *number says why not. */
MFSDP_API int mfsdp__socket_listen(const mfsdp__socket_address *address, int backlog, int *number) {
  const int fd = mfsdp__socket_make(address, number);
  if (fd < 0) return -1;
  if (address->storage.ss_family == AF_INET6 && !mfsdp__socket_is_any(address))
    mfsdp__socket_option(fd, IPPROTO_IPV6, IPV6_V6ONLY);
  if (bind(fd, (const struct sockaddr *)&address->storage, address->nbytes) == 0 &&
      listen(fd, backlog) == 0)
    return fd;
  *number = errno;
  (void)close(fd);
  return -1;
}

/* Begins to connect; poll for POLLOUT, then mfsdp__socket_connected. -1: *number. */
MFSDP_API int mfsdp__socket_connect(const mfsdp__socket_address *address, int *number) {
  const int fd = mfsdp__socket_make(address, number);
  if (fd < 0) return -1;
  if (connect(fd, (const struct sockaddr *)&address->storage, address->nbytes) == 0 ||
      errno == EINPROGRESS || errno == EINTR)
    return fd;
  *number = errno;
  (void)close(fd);
  return -1;
}

/*
 * 1: the connection stands. 0: not yet. -1: it failed (*number). A port to which nobody listens can
 * be given to the connecting socket itself, which then talks to itself: that is a failure, too.
 */
MFSDP_API int mfsdp__socket_connected(int fd, int *number) {
  struct sockaddr_storage here, there;
  socklen_t here_nbytes = sizeof(here), there_nbytes = sizeof(there);
  int failure = 0;
  socklen_t failure_nbytes = sizeof(failure);
  memset(&here, 0, sizeof(here));
  memset(&there, 0, sizeof(there));
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &failure_nbytes) != 0) failure = errno;
  *number = failure;
  if (failure != 0) return -1;
  if (getpeername(fd, (struct sockaddr *)&there, &there_nbytes) != 0) {
    *number = errno;
    return errno == ENOTCONN ? 0 : -1;
  }
  if (getsockname(fd, (struct sockaddr *)&here, &here_nbytes) == 0 && here_nbytes == there_nbytes &&
      memcmp(&here, &there, sizeof(here)) == 0) {
    *number = ECONNREFUSED;
    return -1;
  }
  return 1;
}

/* Who has come to the listening socket: its descriptor and *from; -1: nobody now (*number 0), or an
 * error. */
MFSDP_API int mfsdp__socket_accept(int listener, mfsdp__socket_address *from, int *number) {
  int fd;
  memset(from, 0, sizeof(*from));
  from->nbytes = sizeof(from->storage);
  fd = accept(listener, (struct sockaddr *)&from->storage, &from->nbytes);
  if (fd < 0) {
    const int temporary = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ||
                          errno == ECONNABORTED || errno == EPROTO;
    *number = temporary ? 0 : errno;
    return -1;
  }
  mfsdp__socket_name(from);
  return mfsdp__socket_prepare(fd, number);
}

/* Bytes taken; 0: none now; -1: the connection is gone (*number). */
MFSDP_API int64_t mfsdp__socket_send(int fd, const void *bytes, size_t nbytes, int *number) {
#if defined(MSG_NOSIGNAL)
  const int flags = MSG_NOSIGNAL;
#else
  const int flags = 0;
#endif
  ssize_t count;
  do
    count = send(fd, bytes, nbytes, flags);
  while (count < 0 && errno == EINTR);
  if (count >= 0) return (int64_t)count;
  *number = errno;
  return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
}

/* Bytes of at most nbytes > 0; 0: none now; -1: the connection is gone (*number; 0: it was
 * closed). */
MFSDP_API int64_t mfsdp__socket_receive(int fd, void *bytes, size_t nbytes, int *number) {
  ssize_t count;
  do
    count = recv(fd, bytes, nbytes, 0);
  while (count < 0 && errno == EINTR);
  if (count > 0) return (int64_t)count;
  *number = count == 0 ? 0 : errno;
  return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : -1;
}

/* Waits for one of `fds` (negative ones are passed over) until until_us at most; never longer
 * than an hour, so call it in a loop. After an error no entry is ready. */
MFSDP_API void mfsdp__socket_poll(struct pollfd *fds, size_t count, int64_t until_us) {
  const int64_t left_us = until_us - mfsdp_clock_us();
  int64_t left_ms = left_us <= 0 ? 0 : left_us / 1000 + (left_us % 1000 != 0);
  size_t i;
  if (left_ms > 3600000) left_ms = 3600000;
  if (poll(fds, (nfds_t)count, (int)left_ms) >= 0) return;
  for (i = 0; i < count; ++i)
    fds[i].revents = 0;
}

#endif /* MFSDP_POSIX_SOCKET_H */
