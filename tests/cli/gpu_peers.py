# SPDX-License-Identifier: MIT
"""Of bench/peers/: joining, and what torch_gpu.py does where torch, a GPU, Muon or memory is
missing; torch itself is a stand-in. gpu_peers.py FOLDER; prints one line per check."""

import contextlib
import io
import json
import os
import subprocess
import sys
import types

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join("bench", "peers"))
import join  # noqa: E402
import torch_gpu  # noqa: E402

folder = sys.argv[1]


def check(name, passed, got=""):
    print(f"ok gpu peers: {name}" if passed else f"not ok gpu peers: {name} (got {got!r})")


def path(name):
    return os.path.join(folder, name)


def write(name, value):
    with open(path(name), "w", encoding="utf-8") as file:
        file.write(value if isinstance(value, str) else json.dumps(value))
    return path(name)


def row(case, value, unit="ms", bench="device", metric="newton-schulz"):
    return {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "peer": None,
        "ratio_to_peer": None,
    }


def run(script, *words, modules=""):
    """Status, standard output, standard error; `modules`: a folder that comes before packages."""
    return subprocess.run(
        [sys.executable, "-B", os.path.join("bench", "peers", script), *words],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": modules},
        check=False,
    )


# ---- join ----

ours = [row("a", 2.0), row("b", 2.0, "TFLOP/s"), row("c", 5.0), row("d", 1.0), row("e", 0.0)]
theirs = [
    row("a", 3.0, bench="fast"),
    row("b", 4.0, "TFLOP/s", "fast"),
    row("a", 1.0, bench="slow"),
    row("c", 5.0, "s", "fast"),
    row("d", 1.0, bench="fast", metric="step"),
    row("e", 1.0, bench="fast"),
]
out = join.join(ours, theirs)
check("each row stays, in order", [r for r in out if "peer_value" not in r] == ours, out)
found = [(r["case"], r["peer"], r["ratio_to_peer"], r["value"]) for r in out if "peer_value" in r]
check(
    "ratios are ours over theirs, as rates",
    found == [("a", "fast", 1.5, 2.0), ("a", "slow", 0.5, 2.0), ("b", "fast", 0.5, 2.0)],
    found,
)
check("a joined row follows its own", [r["case"] for r in out] == list("aaabbcde"), out)
for value in (None, float("nan"), float("inf"), 0, -1.0, True, "3"):
    check(
        f"no ratio to {value!r}", join.join([row("a", 1.0)], [row("a", value)]) == [row("a", 1.0)]
    )

got = run("join.py", write("ours", ours), write("theirs", theirs), path("out"))
check("files: status 0", got.returncode == 0 and got.stderr == "", got)
with open(path("out"), encoding="utf-8") as file:
    check("files: the same rows", json.load(file) == out)
check("files: says the ratios", "a, newton-schulz: 2 ms, fast 3, 1.500x" in got.stdout, got.stdout)

for what, peers in (("no file", path("none")), ("no rows", write("empty", []))):
    got = run("join.py", path("ours"), peers, path("alone"))
    check(
        f"{what} of a peer: said, status 0",
        got.returncode == 0 and got.stdout == "join: there is no peer's figure\n",
        got,
    )
    with open(path("alone"), encoding="utf-8") as file:
        check(f"{what} of a peer: ours alone", json.load(file) == ours)

broken = {
    "no JSON": "[",
    "an object": {},
    "a row that is none": [1],
    "a row without a case": [{"bench": "x"}],
    "a row without a value": [{k: "x" for k in ("bench", "case", "metric", "unit")}],
}
for what, text in broken.items():
    for words in ((write("bad", text), path("theirs")), (path("ours"), write("bad", text))):
        got = run("join.py", *words, path("never"))
        check(
            f"{what}: status 2, one line, no file",
            got.returncode == 2
            and got.stderr.count("\n") == 1
            and not os.path.exists(path("never")),
            got,
        )
check(
    "ours is missing: status 2",
    run("join.py", path("none"), path("theirs"), path("never")).returncode == 2,
)
check("two files: status 2", run("join.py", "a", "b").returncode == 2)
check("join --help: status 0", run("join.py", "--help").returncode == 0)

# ---- what torch measures ----

got = run("torch_gpu.py", "--list")
check("--list: status 0, six cases", got.returncode == 0 and got.stdout.count("\n") == 6, got)
shapes = torch_gpu.model_shapes(*torch_gpu.MODEL[1:])
check("gpt2-1.5b has its published size", sum(map(torch_gpu.elements, shapes)) == 1557611200)
check("an unknown option: status 2", run("torch_gpu.py", "--slow").returncode == 2)
check("--help: status 0", run("torch_gpu.py", "--help").returncode == 0)

for what, text, why in (
    ("no torch", "raise ImportError('there is none')", "skip torch: there is none\n"),
    (
        "no GPU",
        "class cuda:\n  is_available = staticmethod(lambda: False)\n",
        "skip torch: torch sees no GPU\n",
    ),
):
    os.makedirs(path(what), exist_ok=True)
    write(os.path.join(what, "torch.py"), text)
    got = run("torch_gpu.py", "--json", path("rows"), modules=path(what))
    check(f"{what}: said, status 0", got.returncode == 0 and got.stdout == why, got)
    with open(path("rows"), encoding="utf-8") as file:
        check(f"{what}: no rows", json.load(file) == [])


class Ticks:
    """A clock that a run moves by a millisecond."""

    now = 0.0

    @classmethod
    def run(cls):
        cls.now += 1e-3


torch_gpu.time = types.SimpleNamespace(perf_counter=lambda: Ticks.now)
clock = torch_gpu.Clock(lambda: None, 3, 5e-3)
check("the clock: a run's time", abs(clock.measure(Ticks.run) - 1e-3) < 1e-9)
check(
    "the clock: samples are long enough",
    round(Ticks.now * 1e3) == 1 + (1 + 2 + 4 + 8) + 3 * 8,
    Ticks.now,
)


def optimizer_rows(torch):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        rows = list(torch_gpu.optimizer_rows(torch, "cpu", clock, torch_gpu.TINY_MODEL))
    return rows, text.getvalue()


class OutOfMemory(Exception):
    pass


def optimizer(step):
    return lambda parameters, **options: types.SimpleNamespace(step=step)


def no_room(parameters, **options):
    raise OutOfMemory("4 GiB wanted\nand a long story")


class Tensor:
    def __sub__(self, other):
        return self


def torch_with(**optimizers):
    return types.SimpleNamespace(
        __version__="9",
        optim=types.SimpleNamespace(**optimizers),
        rand=lambda shape, device: Tensor(),
        nn=types.SimpleNamespace(Parameter=lambda x: x),
        cuda=types.SimpleNamespace(OutOfMemoryError=OutOfMemory),
    )


rows, text = optimizer_rows(torch_with())
check(
    "a torch without Muon: said, no row",
    rows == [] and text == "skip torch Muon + AdamW, gpt2-tiny: torch 9 has no torch.optim.Muon\n",
    text,
)
rows, text = optimizer_rows(torch_with(Muon=no_room, AdamW=optimizer(Ticks.run)))
check(
    "too little memory: said, no row",
    rows == [] and text == "skip torch Muon + AdamW, gpt2-tiny: 4 GiB wanted\n",
    text,
)
rows, text = optimizer_rows(torch_with(Muon=optimizer(Ticks.run), AdamW=optimizer(Ticks.run)))
check("a step is both optimizers'", len(rows) == 1 and abs(rows[0]["value"] - 2.0) < 1e-6, rows)
check("a row of it can be joined", join.check(rows, "rows") is None and rows[0]["unit"] == "ms")
