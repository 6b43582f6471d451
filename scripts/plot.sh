#!/bin/sh
# SPDX-License-Identifier: MIT
# Draws the rows of the strategies benchmark (one JSON object a line) as SVG, with gnuplot: for every model
# the optimizer step and the whole step of each strategy at each kind of link, on the most ranks (bars), and
# against the number of ranks (curves). Both axes of time are logarithmic. Several runs of a row: their mean.
# Of a strategy that was measured by several algorithms (matrix, matrix-ring) that one is drawn whose whole step
# is the shortest, in both plots; without whole steps the fastest.
#
#   scripts/plot.sh [ROWS] [FOLDER]          build/bench/strategies.jsonl, bench/results
#
# Without gnuplot it says SKIP, and nothing is drawn.
set -u
cd "$(dirname "$0")/.." || exit 1
rows=${1-build/bench/strategies.jsonl} folder=${2-bench/results}
[ -r "$rows" ] || { echo "$0: cannot read $rows" >&2; exit 2; }
if ! command -v "${GNUPLOT:-gnuplot}" >/dev/null 2>&1; then
  echo 'SKIP plots: there is no gnuplot (Debian: gnuplot-nox)'
  exit 0
fi
mkdir -p "$folder" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# METRIC MODEL WORLD LINKS STRATEGY MS, blanks as _; sorted; the mean of all runs, of one algorithm
awk '
  function text(name) { return match($0, "\"" name "\":\"[^\"]*\"") ? substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 5) : "" }
  function number(name) { return match($0, "\"" name "\":[-0-9.e+]*") ? substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3) : 0 }
  /"metric":"(optimizer|whole) step"/ {
    key = text("metric") "," text("model") "," number("world") "," text("links") "," text("strategy")
    gsub(/ /, "_", key); gsub(/,/, " ", key)
    sum[key] += number("value"); count[key]++
  }
  function base(name) { sub(/-(ring|hierarchical|native|auto)(-[0-9]+k)?$/, "", name); return name }
  END {
    for (key in sum) mean[key] = sum[key] / count[key]
    for (key in mean) { # the algorithm is chosen by the whole step, if there is one
      whole = key; sub(/^optimizer_step /, "whole_step ", whole)
      by = whole in mean ? mean[whole] : 1e300
      name = base(key)
      if (!(name in best) || by < best[name] || (by == best[name] && mean[key] < value[name])) {
        best[name] = by; value[name] = mean[key]
      }
    }
    for (name in value) print name, value[name]
  }' "$rows" | sort >"$work/all"
[ -s "$work/all" ] || { echo "$0: $rows has no steps" >&2; exit 2; }
strategies='matrix hybrid alltoall zero1 gather replicated torch-fsdp2'
all_links='threads mpi 1000_Mbit/s 100_Mbit/s matched'

value() { # MODEL WORLD LINKS STRATEGY: milliseconds, or ? where it was not measured
  awk -v m="$1" -v w="$2" -v l="$3" -v s="$4" '$1 == m && $2 == w && $3 == l && $4 == s { print $5; found = 1 } END { if (!found) print "?" }' "$work/table"
}
has() { awk -v m="$1" -v l="$2" '$1 == m && $3 == l { found = 1 } END { exit !found }' "$work/table"; } # MODEL LINKS
draw() { # FILE: gnuplot commands come from standard input
  {
    cat <<END
set terminal svg size 860,460 font 'Helvetica,12' background '#ffffff'
set output '$1'
set logscale y
set format y '%g'
set ylabel '$(echo "$metric" | tr _ ' '), ms'
set grid y lc '#dddddd'
set key outside right top
set datafile missing '?'
END
    cat
  } | "${GNUPLOT:-gnuplot}" && echo "$1"
}
colors='#0072b2 #56b4e9 #009e73 #e69f00 #d55e00 #cc79a7 #000000' # Okabe and Ito
styles() { # KIND: one line style for each strategy
  i=1
  for color in $colors; do echo "set linetype $i lc rgb '$color' lw 2 pt 7"; i=$((i + 1)); done
}

columns() { # MODEL [LINKS]: of the strategies that were measured, in a file with all of them behind the first column
  i=2
  for strategy in $strategies; do
    awk -v m="$1" -v l="${2-}" -v s="$strategy" '$1 == m && (l == "" || $3 == l) && $4 == s { found = 1 } END { exit !found }' "$work/table" && printf '%s ' $i
    i=$((i + 1))
  done
}

bars() { # MODEL
  world=$(awk -v m="$1" '$1 == m && $2 > w { w = $2 } END { print w }' "$work/table")
  {
    echo "links $strategies"
    for links in $all_links; do
      has "$1" "$links" || continue
      printf '%s' "$(echo "$links" | tr _ ' ' | sed 's/.*/"&"/')"
      for strategy in $strategies; do printf ' %s' "$(value "$1" "$world" "$links" "$strategy")"; done
      echo
    done
  } >"$work/bars"
  draw "$folder/strategies-$kind-bars-$1.svg" <<END
$(styles)
set title '$1 on $world ranks'
set style data histogram
set style histogram clustered gap 1
set style fill solid border -1
plot for [i in '$(columns "$1")'] '$work/bars' using int(i):xtic(1) lt (int(i)-1) title columnheader(int(i))
END
}

curves() { # MODEL LINKS
  worlds=$(awk -v m="$1" -v l="$2" '$1 == m && $3 == l { print $2 }' "$work/table" | sort -nu)
  [ "$(echo "$worlds" | wc -l)" -gt 1 ] || return 0
  {
    echo "world $strategies"
    for world in $worlds; do
      printf '%s' "$world"
      for strategy in $strategies; do printf ' %s' "$(value "$1" "$world" "$2" "$strategy")"; done
      echo
    done
  } >"$work/curves"
  draw "$folder/strategies-$kind-scaling-$1-$(echo "$2" | sed 's/_.*//').svg" <<END
$(styles)
set title '$1, $(echo "$2" | tr _ ' ')'
set logscale x 2
set xlabel 'ranks'
plot for [i in '$(columns "$1" "$2")'] '$work/curves' using 1:int(i) with linespoints lt (int(i)-1) title columnheader(int(i))
END
}

failed=0
for metric in optimizer_step whole_step; do
  kind=${metric%_step}
  sed -n "s/^$metric //p" "$work/all" >"$work/table"
  # shellcheck disable=SC2013 # names are words
  for model in $(cut -d ' ' -f 1 "$work/table" | sort -u); do
    bars "$model" || failed=1
    for links in $all_links; do
      ! has "$model" "$links" || curves "$model" "$links" || failed=1
    done
  done
done
exit $failed
