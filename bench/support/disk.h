/* SPDX-License-Identifier: MIT */
/*
 * disk.h - the disk beside which checkpoints are measured: dd in the same folder, files thrown out of
 * the page cache, folders removed.
 *
 * A benchmark of a failed run has nothing to say: functions here print and exit.
 */
#ifndef MFSDP_BENCH_DISK_H
#define MFSDP_BENCH_DISK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BENCH_PATH_NBYTES 512

typedef struct bench_disk {
  char folder[BENCH_PATH_NBYTES]; /* made; on the disk that is measured */
  char source[BENCH_PATH_NBYTES]; /* in memory (/dev/shm), else in the page cache: what dd copies */
  char target[BENCH_PATH_NBYTES]; /* dd's copy of it */
} bench_disk;

/* A folder of its own below $BENCH_FOLDER (build/ where it is not set), and nbytes of noise. */
void bench_disk_create(bench_disk *disk, int64_t nbytes);
void bench_disk_destroy(bench_disk *disk);

/* Seconds of dd to a new file, with its fsync; and of dd from it, after it has left the cache. */
double bench_dd_write(const bench_disk *disk);
double bench_dd_read(const bench_disk *disk);

/* Throws the files of a folder out of the page cache; those that are synced leave it. */
void bench_evict_folder(const char *path);
void bench_remove_folder(const char *path);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_DISK_H */
