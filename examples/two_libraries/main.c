/* SPDX-License-Identifier: MIT */
/* main.c - one process with two libraries that vendor two versions of MatrixFSDP (library.c). */
#include <stdio.h>

int first_version(void);
int first_pieces(int world);
int second_version(void);
int second_pieces(int world);

int main(void) {
  printf("first: version %d, %d pieces\n", first_version(), first_pieces(2));
  printf("second: version %d, %d pieces\n", second_version(), second_pieces(2));
  return 0;
}
