/* SPDX-License-Identifier: MIT */
/*
 * failing_posix.h: posix/io_posix.h with its system calls replaced by ones that fail, are interrupted,
 * move half, or kill the process, where a test wants it. Include it after everything else.
 *
 *   test::SystemCalls &calls = test::system_calls();
 *   calls.reset();  calls.fail(test::kWrite, 3, EDQUOT);       // the third write from now on
 *   calls.reset();  calls.kill_at = 17;                        // the 17th call of any kind, half done
 *
 * fsync does nothing: what is lost without it is the business of model_disk.h.
 */
#ifndef MFSDP_TESTS_SUPPORT_FAILING_POSIX_H
#define MFSDP_TESTS_SUPPORT_FAILING_POSIX_H

#include "mfsdp/io.h"
#include "mfsdp/posix/clock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

namespace test {

enum SystemCall { kOpen, kWrite, kRead, kSync, kRename, kMakeFolder, kRemove, kLock, kCallKinds };

struct SystemCalls {
  /* Of all kinds: every other call is interrupted; transfers move half. Set before ranks start. */
  bool interrupted = false, halves = false;
  int64_t kill_at = 0; /* counts all calls from 1; 0: none */
  std::atomic<int64_t> total{0};
  std::atomic<bool> failed{false}; /* the planned failure has happened */

  void reset() {
    interrupted = halves = false;
    kill_at = fail_at_ = 0;
    total = 0;
    failed = false;
    for (std::atomic<int64_t> &count : counts_)
      count = 0;
  }
  void fail(SystemCall kind, int64_t nth, int number) {
    fail_kind_ = kind;
    fail_at_ = nth;
    number_ = number;
  }
  /* True: the call fails, and errno says why. */
  bool strikes(SystemCall kind) {
    const int64_t n = ++counts_[kind];
    if (interrupted && n % 2 == 1) {
      errno = EINTR;
      return true;
    }
    if (fail_at_ == 0 || kind != fail_kind_ || n != fail_at_) return false;
    failed = true;
    errno = number_;
    return true;
  }
  /* Call number kill_at ends the process, as kill -9 does. */
  bool is_last() { return ++total == kill_at; }
  static void die() { (void)::kill(::getpid(), SIGKILL); }
  std::size_t part(std::size_t nbytes) const { return halves && nbytes > 1 ? nbytes / 2 : nbytes; }

private:
  std::atomic<int64_t> counts_[kCallKinds];
  SystemCall fail_kind_ = kOpen;
  int64_t fail_at_ = 0;
  int number_ = 0;
};

inline SystemCalls &system_calls() {
  static SystemCalls calls;
  return calls;
}

/* What most calls do first. */
inline bool call_strikes(SystemCall kind) {
  if (system_calls().is_last()) SystemCalls::die();
  return system_calls().strikes(kind);
}
inline int call_open(const char *path, int flags, mode_t mode) {
  return call_strikes(kOpen) ? -1 : ::open(path, flags, mode);
}
inline ssize_t call_pread(int fd, void *dst, std::size_t nbytes, off_t at) {
  return call_strikes(kRead) ? -1 : ::pread(fd, dst, system_calls().part(nbytes), at);
}
inline ssize_t call_pwrite(int fd, const void *src, std::size_t nbytes, off_t at) {
  SystemCalls &calls = system_calls();
  if (calls.is_last()) {
    if (::pwrite(fd, src, nbytes / 2, at) >= 0) SystemCalls::die();
    SystemCalls::die();
  }
  return calls.strikes(kWrite) ? -1 : ::pwrite(fd, src, calls.part(nbytes), at);
}
inline int call_fsync(int) {
  return call_strikes(kSync) ? -1 : 0;
}
inline int call_rename(const char *from, const char *to) {
  return call_strikes(kRename) ? -1 : ::rename(from, to);
}
inline int call_mkdir(const char *path, mode_t mode) {
  return call_strikes(kMakeFolder) ? -1 : ::mkdir(path, mode);
}
inline int call_remove(const char *path) {
  return call_strikes(kRemove) ? -1 : ::remove(path);
}
inline int call_flock(int fd, int operation) {
  return call_strikes(kLock) ? -1 : ::flock(fd, operation);
}

/* ---- folders of the system ---- */

/* Path below the folder -> bytes. */
inline void read_files(const std::string &folder, const std::string &below,
                       std::map<std::string, std::string> *out) {
  DIR *dir = ::opendir((folder + below).c_str());
  if (dir == nullptr) return;
  while (const dirent *entry = ::readdir(dir)) {
    const std::string name = entry->d_name, path = below + "/" + name;
    struct stat info;
    if (name == "." || name == ".." || ::stat((folder + path).c_str(), &info) != 0) continue;
    if (S_ISDIR(info.st_mode)) {
      read_files(folder, path, out);
    } else {
      std::ifstream file(folder + path, std::ios::binary);
      (*out)[path] = std::string(std::istreambuf_iterator<char>(file), {});
    }
  }
  ::closedir(dir);
}
inline std::map<std::string, std::string> read_files(const std::string &folder) {
  std::map<std::string, std::string> out;
  read_files(folder, "", &out);
  return out;
}
inline void remove_folder(const std::string &folder) {
  if (DIR *dir = ::opendir(folder.c_str())) {
    while (const dirent *entry = ::readdir(dir)) {
      const std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      if (::unlink((folder + "/" + name).c_str()) != 0) remove_folder(folder + "/" + name);
    }
    ::closedir(dir);
  }
  (void)::rmdir(folder.c_str());
}
/* The folder holds exactly these afterwards; folders one deep. */
inline void write_files(const std::string &folder,
                        const std::map<std::string, std::string> &files) {
  remove_folder(folder);
  (void)::mkdir(folder.c_str(), 0777);
  for (const auto &file : files) {
    const std::size_t slash = file.first.rfind('/');
    if (slash > 0) (void)::mkdir((folder + file.first.substr(0, slash)).c_str(), 0777);
    std::ofstream(folder + file.first, std::ios::binary) << file.second;
  }
}

} // namespace test

#define open(path, flags, mode) test::call_open(path, flags, mode)
#define pread test::call_pread
#define pwrite test::call_pwrite
#define fsync test::call_fsync
#define rename(from, to) test::call_rename(from, to)
#define mkdir test::call_mkdir
#define remove(path) test::call_remove(path)
#define flock(fd, operation) test::call_flock(fd, operation)
#include "mfsdp/posix/io_posix.h"
#undef open
#undef pread
#undef pwrite
#undef fsync
#undef rename
#undef mkdir
#undef remove
#undef flock

#endif // MFSDP_TESTS_SUPPORT_FAILING_POSIX_H
