#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Muon under PyTorch FSDP2 on processors: the stock way, as a peer of our strategies.

  torch_fsdp2.py --model gpt:d=256,layers=4 --world 4 --case CASE --json FILE

Parameters are sharded by rows with torch.distributed.fsdp.fully_shard, a call for each unit, over
gloo. A step gathers each unit for forward and again for backward, sets a synthetic gradient,
reduces it to the mean over ranks, and updates. Muon keeps its momentum in shards, gathers each
direction with full_tensor(), runs Newton-Schulz on every rank, and each rank takes its rows back.
The formulas are torch.optim.Muon's, in fp32 (that class rounds to bf16, and fails on sharded
parameters in torch 2.15), lr 0.02, decay 0.1. What is no matrix: torch.optim.AdamW, lr 0.003, decay
0.01 for two dimensions or more, else 0.

Tensors: the GPT of examples/gpt (gpt:d=N,layers=N[,context=N,vocab=N]), or a table as mfsdp-plan
reads: lines `name dtype shape unit role view`. The dtype is not read: everything is fp32. Initial
values are those of examples/gpt, for a table 0.02 normal; a gradient is 16 random bits of (seed,
name, set, rank, element), made before anything is timed. --list prints such a table.

Rows, for join.py: bench is "torch FSDP2", case is --case; metrics "step without optimizer",
"optimizer step" and "whole step" in ms, which are medians with min and p99 beside them, then
"resident, fullest rank" (shards, their gradients, optimizer state), "peak over the start, fullest
rank" and "optimizer matrix bytes received" (of each rank, by shapes) in MB, and "sgemm" in GFLOP/s:
512 x 512 products of rank 0 while all ranks make them, since torch brings its own BLAS. Barriers
stand between the parts of a step, so times are the slowest rank's. wrong: what --against found. It
compares the parameters at the end with those of our runtime (here after 2 steps to warm up and 10
more):

  make build/release/bench/peers/reference
  build/release/bench/peers/reference --model gpt:d=256,layers=4 --world 4 --steps 12 --out FILE

Ranks are processes of this machine with one thread each. Or torchrun or mpirun starts them, also on
hosts with limited links; then --rendezvous says how they meet: tcp://HOST:PORT of rank 0, or
file://PATH of a file that does not exist yet. After `scripts/test_hosts.sh -n 4 -r 1000 --`:

  env GLOO_SOCKET_IFNAME=eth0 python3 bench/peers/torch_fsdp2.py --rendezvous file:///tmp/meet

--append FILE adds the optimizer step, the step without it and the resident bytes to the rows of the
strategies benchmark (bench/support/strat_rows.h), as strategy torch-fsdp2 of --links and --run; the
peer is `matrix` of the same case, if it is there.

Without torch or numpy: a line that begins with "skip", no row, status 0. Run with torch 2.15.0.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

BENCH = "torch FSDP2"
SKIPPED = 77  # the status of a rank that cannot import torch
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW_LR, ADAMW_DECAY = 0.003, 0.01
# Results of two implementations may lie apart by this part of what the tensor's fastest element
# moved. fp32 Newton-Schulz in another form, and other orders of sums, make 1e-6 to 4e-6 of random
# matrices in five steps (measured; ill-conditioned ones, which these are not, up to 1e-4). One
# rounding of the parameter a step comes on top.
TOLERANCE = 3e-5
ROUNDING = 2.0**-24
WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class BadInput(ValueError):
    pass


# ---- tensors ----


class Tensor:
    """What FSDP2 shards. `view`: how it is made of matrices, as in a table; None: it is not, and
    has no `parts`, the rows of each. Initial values are all `constant`, or normal: with deviation
    0.02, over sqrt(2 layers) where `layers` is given."""

    def __init__(self, name, shape, unit, view=None, constant=None, layers=None):
        self.name, self.shape, self.unit, self.view = name, shape, unit, view
        self.parts = None if view is None else parts_of(shape, view)
        self.constant, self.layers = constant, layers

    def line(self):
        """Of a table."""
        role = "elementwise -" if self.view is None else f"matrix {self.view}"
        return f"{self.name} f32 {'x'.join(map(str, self.shape))} {self.unit} {role}"

    def count(self):
        count = 1
        for side in self.shape:
            count *= side
        return count

    def cols(self):
        return self.count() // sum(self.parts)


def gpt_tensors(text):
    """Those of examples/gpt/params.c, with its names and order."""
    size = {"d": 256, "layers": 4, "context": 128, "vocab": 256}
    for word in text.split(",") if text else []:
        key, _, value = word.partition("=")
        if key not in size or not value.isdecimal() or int(value) < 1:
            raise BadInput(f"model gpt: has '{word}', needs d=N,layers=N,context=N,vocab=N")
        size[key] = int(value)
    d, layers = size["d"], size["layers"]
    out = [
        Tensor("wte.weight", (size["vocab"], d), 0),
        Tensor("wpe.weight", (size["context"], d), 0),
    ]
    for b in range(layers):
        for name, shape, view, constant, divided in (
            ("ln1.weight", (d,), None, 1, None),
            ("ln1.bias", (d,), None, 0, None),
            ("attn.qkv.weight", (3 * d, d), f"rows={d},{d},{d}", None, None),
            ("attn.qkv.bias", (3 * d,), None, 0, None),
            ("attn.proj.weight", (d, d), "-", None, layers),
            ("attn.proj.bias", (d,), None, 0, None),
            ("ln2.weight", (d,), None, 1, None),
            ("ln2.bias", (d,), None, 0, None),
            ("mlp.up.weight", (4 * d, d), "-", None, None),
            ("mlp.up.bias", (4 * d,), None, 0, None),
            ("mlp.down.weight", (d, 4 * d), "-", None, layers),
            ("mlp.down.bias", (d,), None, 0, None),
        ):
            out.append(Tensor(f"blocks.{b}.{name}", shape, b + 1, view, constant, divided))
    out.append(Tensor("ln_f.weight", (d,), layers + 1, constant=1))
    out.append(Tensor("ln_f.bias", (d,), layers + 1, constant=0))
    return out + [Tensor("head.weight", (size["vocab"], d), layers + 1)]


def parts_of(shape, view):
    """Rows of the matrices of a tensor, as mfsdp/plan.h has them."""
    kind, _, text = view.partition("=")
    numbers = [int(n) for n in text.split(",")] if text.replace(",", "").isdecimal() else []
    if view in ("-", "whole", "conv"):
        return (shape[0],)
    if view == "batch":
        return (shape[1],) * shape[0]
    if kind == "heads" and len(numbers) == 1 and numbers[0] > 0 and shape[0] % numbers[0] == 0:
        return (shape[0] // numbers[0],) * numbers[0]
    if kind == "rows" and sum(numbers) == shape[0]:
        return tuple(numbers)
    raise BadInput(f"view '{view}' of {'x'.join(map(str, shape))} is not supported here")


def table_line(words):
    if len(words) != 6:
        raise BadInput(f"has {len(words)} words, needs name dtype shape unit role view")
    name, _, sides, unit, role, view = words
    if not all(side.isdecimal() for side in sides.split("x") + [unit]):
        raise BadInput(f"'{sides}' and '{unit}' need to be a shape like 64x32 and a number")
    shape = tuple(int(side) for side in sides.split("x"))
    if role == "elementwise":
        return Tensor(name, shape, int(unit))
    if role != "matrix" or len(shape) < 2 or 0 in shape:
        raise BadInput(f"role {role} of {sides} is not supported here")
    return Tensor(name, shape, int(unit), view)


def table_tensors(path):
    out = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            words = line.split("#")[0].split()
            try:
                out += [table_line(words)] if words else []
            except BadInput as error:
                raise BadInput(f"{path}:{number}: {error}") from None
    if not out:
        raise BadInput(f"{path} has no tensors")
    return out


def tensors_of(options):
    if options.table is not None:
        return table_tensors(options.table)
    kind, _, text = options.model.partition(":")
    if kind != "gpt":
        raise BadInput(f"model '{options.model}' is unknown, needs gpt:d=N,layers=N")
    return gpt_tensors(text)


# ---- mfsdp/random.h ----


def hash_bytes(data, value=14695981039346656037):
    for byte in data:
        value = (value ^ byte) * 1099511628211 & WORD
    return value


def mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def random_u64(np, seed, stream, first, count):
    """mfsdp_random_u64 of elements first .. first + count - 1."""
    start = mixed(mixed(seed + GOLDEN & WORD) + GOLDEN * (stream + 1) & WORD)
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    z = z * np.uint64(GOLDEN) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def generated(np, tensor, seed, stream, value):
    """fp32 array of value(64 random bits), made in pieces."""
    out = np.empty(tensor.count(), np.float32)
    for first in range(0, out.size, 1 << 20):
        count = min(1 << 20, out.size - first)
        out[first : first + count] = value(random_u64(np, seed, stream, first, count))
    return out.reshape(tensor.shape)


def initial(np, tensor, seed):
    if tensor.constant is not None:
        return np.full(tensor.shape, tensor.constant, np.float32)
    deviation = np.float32(0.02)  # in 32-bit steps, as in C
    if tensor.layers is not None:
        deviation *= np.float32(1) / np.sqrt(np.float32(2) * np.float32(tensor.layers))

    def normal(bits):
        u = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
        v = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2.0**32
        value = np.sqrt(-2.0 * np.log(u)) * np.cos(6.283185307179586 * v)
        return deviation * value.astype(np.float32)

    return generated(np, tensor, seed, hash_bytes(tensor.name.encode()), normal)


def gradient(np, tensor, seed, block):
    """Of sample block `block`: multiples of 2^-15 in [-1, 1), so sums over ranks are exact."""
    stream = hash_bytes(block.to_bytes(8, "little"), hash_bytes(tensor.name.encode()))

    def value(bits):
        return ((bits >> np.uint64(48)).astype(np.float32) - 32768) / 32768

    return generated(np, tensor, seed, stream, value)


# ---- FSDP2 ----


def unit_class(torch):
    class Gradients(torch.autograd.Function):
        """A unit whose gradients are given: forward needs its parameters and computes nothing."""

        @staticmethod
        def forward(ctx, x, gradients, *parameters):
            ctx.gradients = gradients
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return (grad, None, *ctx.gradients)

    class Unit(torch.nn.Module):
        def __init__(self, values):
            super().__init__()
            self.values = torch.nn.ParameterList(torch.nn.Parameter(v) for v in values)
            self.gradients = []

        def forward(self, x):
            return Gradients.apply(x, self.gradients, *self.values)

    return Unit


class Sharded:
    """The model of one rank. `tensors` are in declared order, `parameters` the DTensors of them."""

    def __init__(self, torch, np, tensors, options, mesh):
        from torch.distributed.fsdp import fully_shard

        self.torch, self.tensors = torch, tensors
        self.numbers = {}  # of each unit's tensors
        for i, tensor in enumerate(tensors):
            self.numbers.setdefault(tensor.unit, []).append(i)
        unit = unit_class(torch)
        self.units = torch.nn.Sequential()
        for key in sorted(self.numbers):
            values = [initial(np, tensors[i], options.seed) for i in self.numbers[key]]
            self.units.append(unit([torch.from_numpy(v) for v in values]))
            fully_shard(self.units[-1], mesh=mesh)
        fully_shard(self.units, mesh=mesh)
        self.parameters = [None] * len(tensors)
        for key, module in zip(sorted(self.numbers), self.units):
            for i, parameter in zip(self.numbers[key], module.values):
                self.parameters[i] = parameter

    def set_gradients(self, gradients):
        for key, module in zip(sorted(self.numbers), self.units):
            module.gradients = [gradients[i] for i in self.numbers[key]]

    def forward(self):
        return self.units(self.torch.ones((), requires_grad=True))


def newton_schulz(torch, x):
    """The orthogonalized matrix, in fp32."""
    a, b, c = COEFFICIENTS
    tall = x.size(0) > x.size(1)
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon:
    """On row-sharded DTensors: every rank assembles and orthogonalizes every matrix."""

    def __init__(self, torch, tensors, parameters):
        self.torch = torch
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        self.entries = [
            (tensor, p, torch.zeros_like(p.to_local()))
            for tensor, p in zip(tensors, parameters)
            if tensor.parts is not None
        ]

    def direction(self, parameter, momentum):
        from torch.distributed.tensor import DTensor

        grad = parameter.grad.to_local()
        momentum.lerp_(grad, 1 - MUON["momentum"])
        nesterov = grad.lerp(momentum, MUON["momentum"])
        return DTensor.from_local(
            nesterov,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()

    def step(self):
        with self.torch.no_grad():
            for tensor, parameter, momentum in self.entries:
                full = self.direction(parameter, momentum)
                first, stacked = 0, full.view(-1, tensor.cols())
                for rows in tensor.parts:
                    matrix = stacked[first : first + rows]
                    scale = max(1.0, rows / tensor.cols()) ** 0.5
                    matrix.copy_(newton_schulz(self.torch, matrix).mul_(scale))
                    first += rows
                self.commit(parameter.to_local(), full)

    def commit(self, shard, full):
        """FSDP2 gives each rank as many rows as torch.chunk does; the last ones may have none."""
        chunk = -(-full.size(0) // self.world)
        own = full[self.rank * chunk : self.rank * chunk + shard.size(0)]
        shard.mul_(1 - MUON["lr"] * MUON["weight_decay"]).add_(own, alpha=-MUON["lr"])


def adamw(torch, tensors, parameters):
    groups = []
    for decays in (True, False):
        members = [
            p
            for tensor, p in zip(tensors, parameters)
            if tensor.parts is None and (len(tensor.shape) > 1) == decays
        ]
        if members:
            groups.append({"params": members, "weight_decay": ADAMW_DECAY if decays else 0.0})
    if not groups:
        return None
    return torch.optim.AdamW(groups, lr=ADAMW_LR, betas=(0.9, 0.999), eps=1e-8)


# ---- a rank ----


def resident_nbytes():
    """Of this process: now, and the most since the last call; None where the system is silent."""
    found = {}
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what building the model has freed goes back
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key in ("VmRSS", "VmHWM"):
                    found[key] = int(value.split()[0]) * 1024
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except (OSError, AttributeError):
        return None
    return found["VmRSS"], found["VmHWM"]


class Job:
    """One rank's training: the model, its optimizers, and gradients made before it is timed."""

    def __init__(self, torch, np, tensors, options, mesh):
        self.torch, self.tensors, self.options = torch, tensors, options
        world = torch.distributed.get_world_size()
        rank = torch.distributed.get_rank()
        self.sets = [
            [
                torch.from_numpy(gradient(np, tensor, options.seed, number * world + rank))
                for tensor in tensors
            ]
            for number in range(min(options.sets, options.warmup + options.steps))
        ]
        self.before = resident_nbytes()
        self.model = Sharded(torch, np, tensors, options, mesh)
        self.muon = Muon(torch, tensors, self.model.parameters)
        self.adamw = adamw(torch, tensors, self.model.parameters)

    def timed(self, run):
        """Seconds until all ranks have done it."""
        start = time.perf_counter()
        result = run()
        self.torch.distributed.barrier()
        return time.perf_counter() - start, result

    def update(self):
        self.muon.step()
        if self.adamw is not None:
            self.adamw.step()

    def step(self, number):
        """Seconds of forward and backward, of the update, of both."""
        for p in self.model.parameters:
            p.grad = None
        self.model.set_gradients(self.sets[number % len(self.sets)])
        self.torch.distributed.barrier()
        forward, loss = self.timed(self.model.forward)
        backward, _ = self.timed(loss.backward)
        update, _ = self.timed(self.update)
        return forward + backward, update, forward + backward + update

    def run(self):
        """Lists of seconds, one entry a timed step."""
        steps = []
        for number in range(self.options.warmup + self.options.steps):
            if number == self.options.warmup:
                resident_nbytes()
            steps.append(self.step(number))
        return list(zip(*steps[self.options.warmup :]))

    def held_nbytes(self):
        """Shards, their gradients, and the state of both optimizers."""
        local = [p.to_local() for p in self.model.parameters]
        local += [p.grad.to_local() for p in self.model.parameters if p.grad is not None]
        local += [momentum for _, _, momentum in self.muon.entries]
        for state in self.adamw.state.values() if self.adamw is not None else []:
            local += [state[key].to_local() for key in ("exp_avg", "exp_avg_sq") if key in state]
        return sum(t.numel() * t.element_size() for t in local)

    def sgemm(self):
        """GFLOP/s of this rank while all are at it, the best of a few."""
        x, best = self.torch.ones((512, 512)), 0.0
        self.torch.distributed.barrier()
        for _ in range(20):
            start = time.perf_counter()
            self.torch.mm(x, x)
            best = max(best, 2 * 512**3 / (time.perf_counter() - start))
        self.torch.distributed.barrier()
        return best / 1e9

    def figures(self):
        """(metric, value, unit): memory of the fullest rank, bytes of each, speed of this one."""
        after = resident_nbytes()
        peak = after[1] - self.before[0] if after and self.before else 0
        most = self.torch.tensor([self.held_nbytes(), peak], dtype=self.torch.int64)
        self.torch.distributed.all_reduce(most, op=self.torch.distributed.ReduceOp.MAX)
        world = self.torch.distributed.get_world_size()
        received = sum(
            (world - 1) * -(-t.shape[0] // world) * (t.count() // t.shape[0]) * 4
            for t in self.tensors
            if t.parts is not None
        )
        yield "resident, fullest rank", most[0].item() / 1e6, "MB"
        if most[1].item() > 0:
            yield "peak over the start, fullest rank", most[1].item() / 1e6, "MB"
        yield "optimizer matrix bytes received", received / 1e6, "MB"
        yield "sgemm", self.sgemm(), "GFLOP/s"

    def whole_parameters(self):
        """numpy arrays on rank 0, in declared order."""
        out = []
        with self.torch.no_grad():
            for p in self.model.parameters:
                whole = p.full_tensor()
                if self.torch.distributed.get_rank() == 0:
                    out.append(whole.numpy())
        return out


def count_wrong(np, tensors, arrays, path, options):
    """Elements that lie further from those in the file than the tolerance; says the worst."""
    theirs = np.fromfile(path, np.float32)
    if theirs.size != sum(t.count() for t in tensors):
        raise BadInput(f"{path} has {theirs.size} numbers, needs {sum(t.count() for t in tensors)}")
    steps, first, wrong, worst = options.warmup + options.steps, 0, 0, (0.0, "none")
    for tensor, array in zip(tensors, arrays):
        other = theirs[first : first + array.size].reshape(array.shape)
        first += array.size
        if array.size == 0:
            continue
        moved = np.abs(array - initial(np, tensor, options.seed)).max()
        allowed = TOLERANCE * moved + steps * ROUNDING * np.abs(array).max()
        far = np.abs(array.astype(np.float64) - other)
        wrong += int(np.count_nonzero(~(far <= allowed)))
        worst = max(worst, (float(far.max() / allowed) if allowed > 0 else 0.0, tensor.name))
    print(
        f"against {path}: {wrong} wrong; the furthest is at {worst[0]:.3f} of the tolerance, "
        f"in {worst[1]}",
        flush=True,
    )
    return wrong


# ---- rows ----


def row(options, world, metric, value, unit, version, wrong, **more):
    case = (
        options.case
        or f"{options.model if options.table is None else options.table}, {world} ranks"
    )
    return {
        "bench": BENCH,
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "peer": None,
        "ratio_to_peer": None,
        "limit": None,
        "ratio_to_limit": None,
        "wrong": wrong,
        "version": version,
        **more,
    }


def summary(seconds):
    """Minimum, median and 99th percentile, in ms."""
    ordered = sorted(s * 1e3 for s in seconds)
    n = len(ordered)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return ordered[0], median, ordered[-(-99 * n // 100) - 1]


def rows_of(job, times, figures, wrong, world):
    names = ("step without optimizer", "optimizer step", "whole step")
    version = f"torch {job.torch.__version__}"
    print(f"{version}, {world} ranks, {job.options.steps} steps", flush=True)
    for metric, seconds in zip(names, times):
        low, median, p99 = summary(seconds)
        print(f"{metric}: min {low:.3f} median {median:.3f} p99 {p99:.3f} ms", flush=True)
        yield row(job.options, world, metric, median, "ms", version, wrong, min=low, p99=p99)
    for metric, value, unit in figures:
        print(f"{metric}: {value:.6g} {unit}", flush=True)
        yield row(job.options, world, metric, value, unit, version, wrong)


def write(path, rows):
    if path is None:
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
        file.write("\n")


def matrix_value(path, model, world, options, metric):
    """What strategy `matrix` has in the rows of the strategies benchmark; None without."""
    case = f"{model}, {options.links}, {world} ranks, matrix, run {options.run}"
    value = None
    if metric == "step without optimizer":  # two gathers of everything and one reduction
        parts = [
            matrix_value(path, model, world, options, m)
            for m in ("materialize", "materialize", "reduce")
        ]
        return None if None in parts else sum(parts)
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and found.get("case") == case:
                value = found.get("value") if found.get("metric") == metric else value
    return value if isinstance(value, (int, float)) else None


STRATEGY_METRICS = {
    "optimizer step": ("optimizer step", 1.0),
    "step without optimizer": ("step without optimizer", 1.0),
    "resident, fullest rank": ("resident", 1e6),
}


def append(options, rows, world):
    """The rows that the strategies benchmark has too, with its names and units; a line each."""
    size = dict(word.split("=") for word in options.model[len("gpt:") :].split(","))
    model = f"gpt-{size['d']}"
    lines = []
    for found in rows:
        if found["metric"] not in STRATEGY_METRICS:
            continue
        metric, factor = STRATEGY_METRICS[found["metric"]]
        value = found["value"] * factor
        theirs = matrix_value(options.append, model, world, options, metric)
        line = {
            **found,
            "bench": "strategies",
            "case": f"{model}, {options.links}, {world} ranks, torch-fsdp2, run {options.run}",
            "metric": metric,
            "value": value,
            "unit": "B" if metric == "resident" else "ms",
            "peer": None if theirs is None else "matrix",
            "ratio_to_peer": theirs / value if theirs and value else None,
            "model": model,
            "links": options.links,
            "world": world,
            "strategy": "torch-fsdp2",
            "run": options.run,
            "repeats": options.steps,
        }
        lines.append(json.dumps(line, separators=(",", ":")))
        if theirs:
            print(f"{metric}: that of matrix is {theirs / value:.4g} of it", flush=True)
    with open(options.append, "a", encoding="utf-8") as file:
        file.write("\n" + "\n".join(lines) + "\n")


def work(torch, np, tensors, options, rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    # What torch loads with its first step is no part of a job's memory.
    Job(torch, np, gpt_tensors("d=8,layers=1,context=8,vocab=8"), options, mesh).step(0)
    job = Job(torch, np, tensors, options, mesh)
    times = job.run()
    figures = list(job.figures())
    arrays = job.whole_parameters() if options.params or options.against else []
    if rank != 0:
        return
    if options.params:
        np.savez(options.params, **{t.name: a for t, a in zip(tensors, arrays)})
    wrong = count_wrong(np, tensors, arrays, options.against, options) if options.against else None
    rows = list(rows_of(job, times, figures, wrong, world))
    write(options.json, rows)
    if options.append:
        append(options, rows, world)


def run_rank(options, tensors, rank, world):
    """Status of the process. A signal ends it a little after the deadline."""
    signal.alarm(options.deadline + 5)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    try:
        import datetime

        import torch
        import numpy as np
        from torch import distributed
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError as error:
        if rank == 0:
            print(f"skip torch: {error}", flush=True)
        return SKIPPED
    torch.set_num_threads(options.threads)
    distributed.init_process_group(
        "gloo",
        init_method=options.rendezvous,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=options.deadline),
    )
    work(torch, np, tensors, options, rank, world)
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


# ---- ranks of this machine ----


def watch(children, logs, deadline):
    """Status of the whole: waits until all ranks are done, one failed, or the time is over."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        found = [child.poll() for child in children]
        if found[0] == SKIPPED:  # the one that says so
            return 0
        failed = [rank for rank, status in enumerate(found) if status not in (None, 0, SKIPPED)]
        if failed:
            with open(logs[failed[0]], encoding="utf-8", errors="replace") as file:
                last = file.read().strip().splitlines()[-1:] or ["said nothing"]
            print(
                f"torch_fsdp2: rank {failed[0]} ended with status {found[failed[0]]}: {last[0]}",
                file=sys.stderr,
            )
            return 1
        if None not in found:
            return 0
        time.sleep(0.02)
    print(f"torch_fsdp2: not done after {deadline} s (--deadline)", file=sys.stderr)
    return 1


def launch(options, words):
    """Starts a process for each rank; none is left when it returns."""
    environment = dict(os.environ)
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    children = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [os.path.join(folder, f"rank{rank}") for rank in range(options.world)]
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-B", os.path.abspath(__file__), *words]
                command += ["--rank", str(rank), "--rendezvous", f"file://{folder}/meet"]
                with open(log, "w", encoding="utf-8") as file:
                    children.append(subprocess.Popen(command, stderr=file, env=environment))
            return watch(children, logs, options.deadline)
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.wait()


def launched(options):
    """Rank and world that a launcher gave this process, or None."""
    if options.rank is not None:
        return options.rank, options.world
    for rank, world in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return None


# ---- the command line ----


def number(least):
    def read(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}', needs a whole number from {least}")
        return int(text)

    return read


def parse(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="gpt:d=256,layers=4", help="gpt:d=N,layers=N[,context=N,vocab=N]")
    add("--table", metavar="FILE", help="tensors, in place of --model")
    add("--world", type=number(1), default=4, help="ranks to start (4)")
    add("--steps", type=number(1), default=10, help="timed steps (10)")
    add("--warmup", type=number(0), default=2, help="steps before them (2)")
    add("--sets", type=number(1), default=2, help="gradients that steps use in turn (2)")
    add("--seed", type=number(0), default=1, help="of values and gradients (1)")
    add("--threads", type=number(1), default=1, help="of a rank (1)")
    add("--case", help="name of the rows' case; default: the tensors and the ranks")
    add("--json", metavar="FILE", help="file for the rows")
    add("--append", metavar="FILE", help="rows of the strategies benchmark, to add to; --model only")
    add("--links", default="mpi", help="what these rows call the links (mpi)")
    add("--run", type=number(1), default=1, help="which run these rows are of (1)")
    add("--params", metavar="FILE", help="file for the parameters at the end (.npz)")
    add("--against", metavar="FILE", help="what reference.c wrote; its distance is the rows' wrong")
    add("--deadline", type=number(1), default=600, help="seconds for everything (600)")
    add("--rendezvous", metavar="URL", help="under a launcher: how ranks meet; default: env://")
    add("--rank", type=number(0), help=argparse.SUPPRESS)
    add("--list", action="store_true", help="prints the tensors as a table; needs no torch")
    return parser.parse_args(words)


def main(words):
    options = parse(words)
    try:
        tensors = tensors_of(options)
        if options.append and (options.table or "d=" not in options.model):
            raise BadInput("--append needs --model gpt:d=N,...")
        place = launched(options)
        if options.list:
            print("\n".join(tensor.line() for tensor in tensors))
            return 0
        if place is None or place[0] == 0:
            write(options.json, [])
        if place is None:
            return launch(options, words)
        options.rendezvous = options.rendezvous or "env://"
        return run_rank(options, tensors, *place)
    except (BadInput, OSError) as error:
        print(f"torch_fsdp2: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
