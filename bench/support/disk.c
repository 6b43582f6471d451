/* SPDX-License-Identifier: MIT */
#include "disk.h"

#include "bench.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void fail(const char *what, const char *path) {
  fprintf(stderr, "bench: cannot %s %s\n", what, path);
  exit(1);
}

static void print_path(char *out, const char *folder, const char *name) {
  if (snprintf(out, BENCH_PATH_NBYTES, "%s/%s", folder, name) >= BENCH_PATH_NBYTES)
    fail("use so long a name below", folder);
}

/* Bytes that no disk can compress. */
static void write_noise(const char *path, int64_t nbytes) {
  static uint64_t block[1 << 16];
  FILE *file = fopen(path, "wb");
  uint64_t state = 88172645463325252u;
  int64_t done;
  size_t i;
  if (file == NULL) fail("write", path);
  for (done = 0; done < nbytes; done += (int64_t)sizeof(block)) {
    for (i = 0; i < sizeof(block) / sizeof(block[0]); ++i) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      block[i] = state;
    }
    if (fwrite(block, sizeof(block), 1, file) != 1) fail("write", path);
  }
  if (fclose(file) != 0) fail("write", path);
}

void bench_disk_create(bench_disk *disk, int64_t nbytes) {
  const char *above = getenv("BENCH_FOLDER");
  char memory[] = "/dev/shm/mfsdp_bench_XXXXXX";
  int number;
  if (above == NULL) above = "build";
  print_path(disk->folder, above, "bench_checkpoint_XXXXXX");
  if (mkdtemp(disk->folder) == NULL) fail("make a folder as", disk->folder);
  print_path(disk->target, disk->folder, "dd");
  number = mkstemp(memory);
  if (number >= 0) {
    (void)close(number);
    (void)snprintf(disk->source, sizeof(disk->source), "%s", memory);
  } else {
    print_path(disk->source, disk->folder, "noise");
  }
  write_noise(disk->source, nbytes);
}

void bench_disk_destroy(bench_disk *disk) {
  (void)unlink(disk->source);
  bench_remove_folder(disk->folder);
}

static double run_dd(const char *from, const char *to, const char *options) {
  char command[3 * BENCH_PATH_NBYTES];
  double start;
  (void)snprintf(command, sizeof(command), "dd if='%s' of='%s' bs=4M %s 2>/dev/null", from, to,
                 options);
  start = bench_now();
  if (system(command) != 0) fail("run", command);
  return bench_now() - start;
}

double bench_dd_write(const bench_disk *disk) {
  (void)unlink(disk->target);
  return run_dd(disk->source, disk->target, "conv=fsync");
}

static void evict(const char *path) {
  const int number = open(path, O_RDONLY);
  if (number < 0) fail("open", path);
  (void)posix_fadvise(number, 0, 0, POSIX_FADV_DONTNEED);
  (void)close(number);
}

double bench_dd_read(const bench_disk *disk) {
  evict(disk->target);
  return run_dd(disk->target, "/dev/null", "");
}

/* Calls `visit` with each file of a folder and of those below it; folders come after their files. */
static void walk(const char *path, void (*visit)(const char *path),
                 void (*leave)(const char *path)) {
  DIR *folder = opendir(path);
  const struct dirent *entry;
  if (folder == NULL) return;
  while ((entry = readdir(folder)) != NULL) {
    char name[BENCH_PATH_NBYTES];
    struct stat info;
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    print_path(name, path, entry->d_name);
    if (stat(name, &info) == 0 && S_ISDIR(info.st_mode))
      walk(name, visit, leave);
    else
      visit(name);
  }
  (void)closedir(folder);
  if (leave != NULL) leave(path);
}

void bench_evict_folder(const char *path) {
  walk(path, evict, NULL);
}

static void remove_file(const char *path) {
  (void)unlink(path);
}
static void remove_folder(const char *path) {
  (void)rmdir(path);
}

void bench_remove_folder(const char *path) {
  walk(path, remove_file, remove_folder);
}
