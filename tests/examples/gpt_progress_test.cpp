/* SPDX-License-Identifier: MIT */
#include "examples/gpt/progress.h"

#include "tests/examples/gpt_test.h"

#include <algorithm>

namespace {

/* A clock that moves when the test says so. */
double Now(void *user) {
  return *static_cast<double *>(user);
}

class Printed {
public:
  Printed(bool terminal, int64_t steps) {
    gpt_progress_begin(&progress, out.file(), terminal, steps, 1000.0, Now, &now);
  }
  /* `count` steps of `seconds` each. */
  void Steps(int64_t count, double seconds) {
    for (int64_t i = 0; i < count; ++i) {
      now += seconds;
      gpt_progress_step(&progress, step++, 2.5);
    }
  }
  gpt_test::TextOutput out;
  double now = 100.0;
  int64_t step = 0;
  gpt_progress progress;
};

int64_t Count(const std::string &text, char c) {
  return std::count(text.begin(), text.end(), c);
}

TEST(GptProgress, PlainLinesSayWhatTheyShould) {
  Printed run(false, 300);
  run.Steps(1, 0.5);
  EXPECT_EQ(run.out.text(), "step   1/300  loss 2.5000  2000 tokens/s  2:30 left\n");
}

TEST(GptProgress, PlainOutputHasAboutTenLinesAndTheFirstAndLast) {
  Printed run(false, 1000);
  run.Steps(1000, 0.002);
  gpt_progress_end(&run.progress);
  const std::string text = run.out.text();
  EXPECT_EQ(Count(text, '\n'), 11); /* the first, and ten tenths of which one is the last */
  EXPECT_EQ(Count(text, '\r'), 0);
  EXPECT_EQ(Count(text, '\033'), 0);
  EXPECT_EQ(text.find("step    1/1000"), 0u);
  EXPECT_NE(text.find("step 1000/1000  loss 2.5000  500.0k tokens/s  0:00 left\n"),
            std::string::npos);
}

TEST(GptProgress, SlowPlainRunsSpeakEveryFiveSeconds) {
  Printed run(false, 1000);
  run.Steps(60, 1.0);
  EXPECT_EQ(Count(run.out.text(), '\n'), 1 + 59 / 5);
}

TEST(GptProgress, AnEarlyStopStillShowsItsLastStepOnce) {
  for (bool terminal : {false, true}) {
    Printed run(terminal, 1000);
    run.Steps(7, 0.001);
    gpt_progress_end(&run.progress);
    gpt_progress_end(&run.progress);
    const std::string text = run.out.text();
    EXPECT_NE(text.find("step    7/1000"), std::string::npos);
    EXPECT_EQ(text.find("step    7/1000"), text.rfind("step    7/1000"));
    EXPECT_EQ(text.back(), '\n');
  }
}

TEST(GptProgress, ATerminalIsRewrittenAtMostTenTimesASecond) {
  Printed run(true, 100000);
  run.Steps(5000, 0.001);
  EXPECT_EQ(Count(run.out.text(), '\n'), 0);
  EXPECT_GE(Count(run.out.text(), '\r'), 40);
  EXPECT_LE(Count(run.out.text(), '\r'), 51);
  gpt_progress_end(&run.progress);
  EXPECT_EQ(Count(run.out.text(), '\n'), 1);
}

TEST(GptProgress, NotesDoNotTearTheLine) {
  Printed run(true, 10);
  run.Steps(1, 1.0);
  gpt_progress_note(&run.progress, "val loss %.1f", 1.5);
  const std::string text = run.out.text();
  EXPECT_NE(text.find("left\033[K\r\033[Kval loss 1.5\n\rstep"), std::string::npos) << text;
  Printed plain(false, 10);
  plain.Steps(1, 1.0);
  gpt_progress_note(&plain.progress, "val loss %.1f", 1.5);
  EXPECT_NE(plain.out.text().find("left\nval loss 1.5\n"), std::string::npos);
}

TEST(GptProgress, TimeLeftFollowsAChangeOfSpeed) {
  Printed run(false, 1000);
  run.Steps(100, 0.1);
  EXPECT_NEAR(run.progress.step_seconds, 0.1, 1e-9);
  run.Steps(100, 1.0); /* twenty times the averaging time */
  EXPECT_NEAR(run.progress.step_seconds, 1.0, 0.01);
  EXPECT_NEAR(gpt_progress_seconds(&run.progress), 110.0, 1e-6);
  EXPECT_NEAR(gpt_progress_tokens_per_s(&run.progress), 200.0 * 1000.0 / 110.0, 1e-6);
}

TEST(GptProgress, HoursMinutesAndAStoppedClock) {
  Printed slow(false, 100);
  slow.Steps(1, 100.0);
  EXPECT_NE(slow.out.text().find("10 tokens/s  2:45:00 left"), std::string::npos);
  Printed stopped(false, 100);
  stopped.Steps(1, 0.0);
  EXPECT_NE(stopped.out.text().find("- tokens/s  - left"), std::string::npos);
  EXPECT_EQ(gpt_progress_tokens_per_s(&stopped.progress), 0.0);
}

TEST(GptProgress, NothingBeforeTheFirstStep) {
  Printed run(false, 100);
  gpt_progress_end(&run.progress);
  EXPECT_EQ(run.out.text(), "");
}

} // namespace
