/* SPDX-License-Identifier: MIT */
#include "fault.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void gpt_fault_at(int32_t rank, const char *label, mfsdp_context *context,
                  const mfsdp_control *control) {
  const char *fault = getenv("MFSDP_TEST_FAULT");
  char how[16] = "";
  int culprit = -1, used = 0;
  if (fault == NULL || sscanf(fault, "%d %15s %n", &culprit, how, &used) != 2) return;
  if (culprit != rank || strcmp(fault + used, label) != 0) return;
  fprintf(stderr, "fault: rank %d: %s at %s\n", (int)rank, how, label);
  if (strcmp(how, "kill") == 0) (void)raise(SIGKILL);
  if (strcmp(how, "stop") == 0) (void)raise(SIGSTOP);
  (void)control->ops->destroy(control->self, context); /* tells the peers */
  _exit(0);
}
