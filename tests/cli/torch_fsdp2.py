# SPDX-License-Identifier: MIT
"""Of bench/peers/torch_fsdp2.py: torch_fsdp2.py REFERENCE FOLDER prints one line per check. Where
it matters how torch fails, torch is a stand-in."""

import importlib
import json
import os
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join("bench", "peers"))
import join  # noqa: E402
import torch_fsdp2  # noqa: E402

reference, folder = sys.argv[1:]
TABLE = """
# name  dtype shape    unit role        view
emb     bf16  37x16    0    elementwise -
gain    bf16  16       0    elementwise -
qkv     bf16  48x16    1    matrix      heads=6
split   bf16  20x24    1    matrix      rows=5,15
experts bf16  3x8x12   2    matrix      batch
conv    bf16  6x2x3x3  2    matrix      conv
row     bf16  1x9      3    matrix      -
"""


def check(name, passed, got=""):
    print(f"ok torch fsdp2: {name}" if passed else f"not ok torch fsdp2: {name} (got {got!r})")


def path(name):
    return os.path.join(folder, name)


def write(name, text):
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    with open(path(name), "w", encoding="utf-8") as file:
        file.write(text)
    return path(name)


def read(name):
    with open(path(name), encoding="utf-8") as file:
        return json.load(file)


def run(*words, modules=""):
    """Status and output; `modules`: a folder that comes before packages. Bounded in time."""
    launchers = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in launchers}
    return subprocess.run(
        [sys.executable, "-B", os.path.join("bench", "peers", "torch_fsdp2.py"), *words],
        text=True,
        capture_output=True,
        env={**environment, "PYTHONPATH": modules},
        timeout=300,
        check=False,
    )


def run_reference(*words):
    return subprocess.run(
        [reference, *words], text=True, capture_output=True, timeout=120, check=False
    )


# ---- bad input ----

table = write("table", TABLE)
for what, words, message in (
    ("a model of another kind", ("--model", "bert:d=4"), "model 'bert:d=4' is unknown"),
    ("a model's size", ("--model", "gpt:d=x"), "has 'd=x'"),
    ("a size that there is not", ("--model", "gpt:heads=2"), "has 'heads=2'"),
    ("no table", ("--table", path("none")), "none"),
    (
        "a table's short line",
        ("--table", write("short", "\na f32 4x4 0 matrix\n")),
        "short:2: has 5",
    ),
    ("an alias", ("--table", write("alias", "a f32 4 0 elementwise - alias=b")), "alias:1: has 7"),
    ("a frozen tensor", ("--table", write("frozen", "a f32 4x4 0 frozen -")), "frozen:1: role"),
    ("a matrix of one side", ("--table", write("side", "a f32 4 0 matrix -")), "side:1: role"),
    ("heads", ("--table", write("heads", "a f32 4x4 0 matrix heads=3")), "heads:1: view"),
    ("rows", ("--table", write("rows", "a f32 4x4 0 matrix rows=1,2")), "rows:1: view"),
    ("no rank", ("--world", "0"), "'0', needs a whole number from 1"),
):
    got = run(*words)
    last = got.stderr.strip().splitlines()[-1:] or [""]
    check(f"{what}: status 2, said", got.returncode == 2 and message in last[0], got)
for what, words in (
    ("the same model", ("--model", "bert:d=4", "--out", path("x"))),
    ("the same size", ("--model", "gpt:d=x", "--out", path("x"))),
    ("the same alias", ("--table", path("alias"), "--out", path("x"))),
    ("the same frozen tensor", ("--table", path("frozen"), "--out", path("x"))),
    ("no file to write", ("--model", "gpt:d=4")),
):
    got = run_reference(*words)
    check(
        f"reference, {what}: status 2, one line",
        got.returncode == 2 and got.stderr.count("\n") == 1 and not os.path.exists(path("x")),
        got,
    )

# ---- without torch ----

got = run("--list", "--model", "gpt:d=8,layers=2")
check(
    "--list: the tensors of examples/gpt", got.returncode == 0 and got.stdout.count("\n") == 29, got
)
check(
    "--list: q, k and v are matrices",
    "blocks.1.attn.qkv.weight f32 24x8 2 matrix rows=8,8,8\n" in got.stdout,
)
listed = write("listed", got.stdout)
got = run_reference("--table", listed, "--steps", "0", "--out", path("size"))
# Embeddings, blocks and head: 256 d + 128 d, 2 (12 d d + 13 d), 2 d + 256 d.
size = 4 * (642 * 8 + 2 * (12 * 64 + 13 * 8))
check("--list: is a table", got.returncode == 0 and os.path.getsize(path("size")) == size, got)
small = ("--model", "gpt:d=8,layers=1,context=4,vocab=8")
write("absent/torch.py", "raise ImportError('there is none')")
got = run(*small, "--world", "2", "--json", path("rows"), modules=path("absent"))
check(
    "no torch: said once, status 0",
    (got.returncode, got.stdout) == (0, "skip torch: there is none\n"),
    got,
)
check("no torch: no rows", read("rows") == [])
write("broken/torch.py", "raise RuntimeError('broken')")
got = run(*small, "--world", "2", modules=path("broken"))
check(
    "a rank that breaks: status 1, one line",
    got.returncode == 1
    and got.stderr.endswith("ended with status 1: RuntimeError: broken\n")
    and got.stderr.count("\n") == 1,
    got,
)
write(
    "slow/torch.py",
    f"import os, time\nopen({path('pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)",
)
start = time.monotonic()
got = run(*small, "--world", "1", "--deadline", "2", modules=path("slow"))
check(
    "a rank that hangs: status 1, said",
    (got.returncode, got.stderr) == (1, "torch_fsdp2: not done after 2 s (--deadline)\n"),
    got,
)
check("a rank that hangs: in time", time.monotonic() - start < 30)
with open(path("pid"), encoding="ascii") as file:
    pid = file.read()
check("a rank that hangs: it is gone", pid and not os.path.exists(f"/proc/{pid}"), pid)
check(
    "order statistics", torch_fsdp2.summary([k / 1e3 for k in range(100, 0, -1)]) == (1, 50.5, 99)
)
check("one figure", torch_fsdp2.summary([2e-3]) == (2, 2, 2))

# ---- rows of the strategies benchmark ----

beside = {"case": "gpt-64, mpi, 2 ranks, matrix, run 3", "model": "gpt-64"}
write(
    "strategies",
    "".join(
        json.dumps({**beside, "metric": metric, "value": value}) + "\n"
        for metric, value in (("optimizer step", 5.0), ("materialize", 2.0), ("reduce", 1.0))
    )
    + "cut o",
)
mine = torch_fsdp2.parse(
    ["--model", "gpt:layers=1,d=64", "--append", path("strategies"), "--run", "3"]
)
figures = (("optimizer step", 50.0), ("step without optimizer", 10.0), ("whole step", 60.0))
rows = [torch_fsdp2.row(mine, 2, metric, value, "ms", "torch 0", 0) for metric, value in figures]
rows.append(torch_fsdp2.row(mine, 2, "resident, fullest rank", 1.5, "MB", "torch 0", 0))
torch_fsdp2.append(mine, rows, 2)
with open(path("strategies"), encoding="utf-8") as file:
    lines = [json.loads(line) for line in file if line.startswith("{") and "torch" in line]
check(
    "--append: the metrics that both have",
    [(r["metric"], r["value"], r["unit"], r["ratio_to_peer"]) for r in lines]
    == [
        ("optimizer step", 50.0, "ms", 0.1),
        ("step without optimizer", 10.0, "ms", 0.5),
        ("resident", 1.5e6, "B", None),
    ],
    lines,
)
check(
    "--append: their case",
    {r["case"] for r in lines} == {"gpt-64, mpi, 2 ranks, torch-fsdp2, run 3"},
    lines,
)
got = run("--append", path("strategies"), "--table", table)
check("--append: not with a table", (got.returncode, got.stderr.count("\n")) == (2, 1), got)

# ---- with it ----


def agree(name, tensors, world, warmup, steps, reference_steps, *more):
    """Runs both; rows, and what was printed."""
    count = ("--steps", str(reference_steps), "--world", str(world), "--out", path("ours"))
    got = run_reference(*tensors, *count, *more)
    check(f"{name}: reference", got.returncode == 0, got)
    words = ("--warmup", str(warmup), "--steps", str(steps), "--against", path("ours"))
    got = run(
        *tensors,
        *words,
        *more,
        "--world",
        str(world),
        "--json",
        path("rows"),
        "--params",
        path("params.npz"),
        "--case",
        name,
    )
    check(f"{name}: status 0", got.returncode == 0 and got.stderr == "", got)
    return read("rows"), got.stdout


got = subprocess.run(
    [sys.executable, "-c", "import torch, numpy; from torch.distributed.fsdp import fully_shard"],
    text=True,
    capture_output=True,
    timeout=120,
    check=False,
)
if got.returncode != 0:
    print(f"skip torch fsdp2: agreement ({got.stderr.strip().splitlines()[-1]})")
    sys.exit(0)

gpt = ("--model", "gpt:d=24,layers=2,context=10,vocab=20")
rows, text = agree("gpt", gpt, 3, 1, 3, 4)
check("gpt: three ranks end with our parameters", rows and all(r["wrong"] == 0 for r in rows), text)
metrics = [r["metric"] for r in rows if r["unit"] == "ms"]
check("gpt: times", metrics == ["step without optimizer", "optimizer step", "whole step"], metrics)
check(
    "gpt: min, median and p99 are in order",
    all(0 < r["min"] <= r["value"] <= r["p99"] for r in rows[:3]),
    rows,
)
# Of a rank: two peers' shards of qkv, proj, up and down, in two blocks; sides are multiples of 3.
received = [r["value"] for r in rows if r["metric"] == "optimizer matrix bytes received"]
check("gpt: bytes", received == [2 * 2 * 12 * 24 * 24 // 3 * 4 / 1e6], received)
ours = [dict(r, bench="strategies", value=r["value"] / 2) for r in rows]
joined = [r for r in join.join(ours, rows) if "peer_value" in r]
check("gpt: rows can be joined", len(joined) == len(rows) and joined[0]["ratio_to_peer"] == 2.0)
check(
    "gpt: rows have the house's keys",
    join.check(rows, "rows") is None
    and all(
        key in r
        for r in rows
        for key in ("peer", "ratio_to_peer", "limit", "ratio_to_limit", "wrong")
    ),
)

rows, text = agree("table", ("--table", table), 4, 0, 3, 3, "--seed", "5", "--sets", "3")
check("table: views, uneven and empty shards", rows and all(r["wrong"] == 0 for r in rows), text)
numpy = importlib.import_module("numpy")
with numpy.load(path("params.npz")) as params:
    check(
        "table: --params has the tensors",
        {k: params[k].shape for k in params.files}
        == {
            "emb": (37, 16),
            "gain": (16,),
            "qkv": (48, 16),
            "split": (20, 24),
            "experts": (3, 8, 12),
            "conv": (6, 2, 3, 3),
            "row": (1, 9),
        },
    )

rows, text = agree("other steps", ("--table", table), 1, 0, 2, 3)
check("other steps: are seen", rows and rows[0]["wrong"] > 1000, text)
