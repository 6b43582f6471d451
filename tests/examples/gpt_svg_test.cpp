/* SPDX-License-Identifier: MIT */
#include "examples/gpt/svg.h"

#include "tests/examples/gpt_test.h"

#include <cmath>

using gpt_test::TempFile;

namespace {

size_t Count(const std::string &text, const std::string &part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

gpt_svg_chart Chart(const std::vector<gpt_svg_series> &series) {
  gpt_svg_chart chart = gpt_svg_chart();
  chart.title = "title";
  chart.x_label = "step";
  chart.y_label = "loss";
  chart.series = series.data();
  chart.series_count = int(series.size());
  return chart;
}

gpt_svg_series Series(const char *name, const std::vector<double> &x,
                      const std::vector<double> &y) {
  gpt_svg_series s = gpt_svg_series();
  s.name = name;
  s.x = x.data();
  s.y = y.data();
  s.count = int64_t(x.size());
  return s;
}

std::string Write(const std::vector<gpt_svg_series> &series) {
  const gpt_svg_chart chart = Chart(series);
  const TempFile file;
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_svg_write(file.path(), &chart, &error), GPT_OK) << error.text;
  const std::string svg = file.text();
  EXPECT_EQ(svg.find("<svg xmlns="), 0u);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  EXPECT_EQ(Count(svg, "nan"), 0u);
  EXPECT_EQ(Count(svg, "inf"), 0u);
  EXPECT_EQ(Count(svg, "<text"), Count(svg, "</text>"));
  return svg;
}

TEST(GptSvg, RoundTicksAndExactPlaces) {
  const std::vector<double> x = {1, 50, 100}, y = {5, 3, 1};
  const std::string svg = Write({Series("a", x, y)});
  for (const char *tick : {">0</text>", ">20</text>", ">100</text>", ">1</text>", ">5</text>"})
    EXPECT_EQ(Count(svg, tick), 1u) << tick;
  /* x 0..100 on 72..836 pixels, y 1..5 on 460..56. */
  EXPECT_NE(svg.find("points=\"79.6,56.0 454.0,258.0 836.0,460.0 \""), std::string::npos);
}

TEST(GptSvg, SmallStepsHaveDecimalsAndNoMinusZero) {
  const std::vector<double> x = {0, 1}, y = {-0.03, 0.04};
  const std::string svg = Write({Series("a", x, y)});
  EXPECT_EQ(Count(svg, ">-0.03<"), 1u);
  EXPECT_EQ(Count(svg, ">0.00<"), 1u);
  EXPECT_EQ(Count(svg, ">-0.00<"), 0u);
}

TEST(GptSvg, NamesAreEscapedAndInTheLegend) {
  const std::vector<double> x = {0, 1}, y = {1, 2};
  const std::string svg = Write({Series("a < b & c", x, y), Series("second", x, y)});
  EXPECT_EQ(Count(svg, ">a &lt; b &amp; c</text>"), 1u);
  EXPECT_EQ(Count(svg, ">second</text>"), 1u);
}

TEST(GptSvg, SmoothSeriesHaveAFaintAndAStrongLine) {
  std::vector<double> x, y;
  for (int i = 0; i < 400; ++i) {
    x.push_back(i);
    y.push_back(i % 2 ? 1.0 : 3.0);
  }
  gpt_svg_series s = Series("noisy", x, y);
  s.smooth = 1;
  const std::string svg = Write({s});
  EXPECT_EQ(Count(svg, "<polyline"), 2u);
  EXPECT_EQ(Count(svg, "stroke-opacity"), 1u);
  EXPECT_EQ(Count(svg, "<circle"), 0u);
}

TEST(GptSvg, PointsAreMarkedAndUnknownOnesLeftOut) {
  const std::vector<double> x = {1, 2, 3, 4}, y = {NAN, 2, INFINITY, 1};
  gpt_svg_series s = Series("validation", x, y);
  s.points = 1;
  const std::string svg = Write({s});
  EXPECT_EQ(Count(svg, "<circle"), 2u);
  EXPECT_EQ(Count(svg, "stroke-dasharray"), 2u); /* the line, and the legend */
}

TEST(GptSvg, AMillionPointsStaySmall) {
  std::vector<double> x, y;
  for (int i = 0; i < 1000000; ++i) {
    x.push_back(i);
    y.push_back(std::exp(-i / 1e5));
  }
  EXPECT_LT(Write({Series("long", x, y)}).size(), 40000u);
}

TEST(GptSvg, OnePointAndEqualValues) {
  const std::vector<double> one = {1}, two = {2}, x = {1, 2}, y = {3, 3};
  Write({Series("one", one, two)});
  Write({Series("flat", x, y)});
}

TEST(GptSvg, NothingToDraw) {
  const std::vector<double> x = {1, 2}, y = {NAN, INFINITY};
  const std::vector<gpt_svg_series> none, unknown = {Series("unknown", x, y)};
  for (const auto *series : {&none, &unknown}) {
    const gpt_svg_chart chart = Chart(*series);
    gpt_error error = gpt_error();
    EXPECT_EQ(gpt_svg_write("/nonexistent/x.svg", &chart, &error), GPT_USAGE_ERROR);
    EXPECT_NE(std::string(error.text).find("no finite value"), std::string::npos);
  }
}

TEST(GptSvg, WritingWhereItCannot) {
  const std::vector<double> x = {1, 2}, y = {3, 4};
  const std::vector<gpt_svg_series> series = {Series("a", x, y)};
  const gpt_svg_chart chart = Chart(series);
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_svg_write("/nonexistent/x.svg", &chart, &error), GPT_USAGE_ERROR);
  EXPECT_NE(std::string(error.text).find("cannot write /nonexistent/x.svg"), std::string::npos);
}

} // namespace
