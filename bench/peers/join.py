#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Puts a peer's figures beside ours, for benchmarks whose peer is a program of its own.

  join.py OURS PEERS OUT     files of rows (docs: the keys of bench/support/bench.h)

OUT is OURS and, for each of its rows that PEERS has too (the same case, metric and unit), one more:
the same figure with that peer's name and the ratio of the rates, ours over theirs, so that more is
better. A PEERS that is missing or empty is said, and OUT is OURS; exit status 0. Input that is
not what it should be: one line on standard error, status 2, and no OUT.
"""

import json
import math
import sys

TIMES = ("s", "ms", "us", "ns")


def ratio(ours, theirs, unit):
    """Ours over theirs, as rates."""
    return theirs / ours if unit in TIMES else ours / theirs


def figure(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value > 0


def check(rows, name):
    """ValueError unless `rows` is a list of rows."""
    if not isinstance(rows, list):
        raise ValueError(f"{name}: needs a list of rows")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{name}: row {index} is not an object")
        for key in ("bench", "case", "metric", "unit"):
            if not isinstance(row.get(key), str):
                raise ValueError(f"{name}: row {index} has no {key}")
        if "value" not in row:
            raise ValueError(f"{name}: row {index} has no value")


def join(ours, peers):
    """Our rows, each followed by one for each peer that has it."""
    out = []
    for row in ours:
        out.append(row)
        for peer in peers:
            if any(row[key] != peer[key] for key in ("case", "metric", "unit")):
                continue
            if not figure(row["value"]) or not figure(peer["value"]):
                continue
            joined = dict(row)
            joined["peer"] = peer["bench"]
            joined["ratio_to_peer"] = ratio(row["value"], peer["value"], row["unit"])
            joined["peer_value"] = peer["value"]
            out.append(joined)
    return out


def read(path, missing_is_empty):
    try:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
    except FileNotFoundError:
        if missing_is_empty:
            return []
        raise
    check(rows, path)
    return rows


def main(words):
    if len(words) == 1 and words[0] == "--help":
        print(__doc__)
        return 0
    if len(words) != 3:
        print("join: needs three files: join.py OURS PEERS OUT (see --help)", file=sys.stderr)
        return 2
    try:
        ours, peers = read(words[0], False), read(words[1], True)
        rows = join(ours, peers)
        with open(words[2], "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")
    except (OSError, ValueError) as error:
        print(f"join: {error}", file=sys.stderr)
        return 2
    if not peers:
        print("join: there is no peer's figure")
    for row in rows:
        if "peer_value" in row:
            print(
                f"{row['case']}, {row['metric']}: {row['value']:.5g} {row['unit']}, "
                f"{row['peer']} {row['peer_value']:.5g}, {row['ratio_to_peer']:.3f}x"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
