#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What bench/cuda/device.c is compared with on the same GPU: PyTorch.

  torch_gpu.py --json FILE [--quick]    measures; FILE gets a list of rows for join.py
  torch_gpu.py --list                   the cases, one a line; needs neither torch nor a GPU

newton-schulz   the plain form of five steps in bf16, three general products a step, through
                torch.compile, from fp32 to fp32. It is written in two ways, by operators and by
                addmm; the faster one counts.
optimizer step  torch.optim.Muon for the hidden matrices of a model and fused AdamW for the rest,
                all fp32, as they are: neither is compiled.

Cases, metrics and units are those of device.c. Times are wall clock, of work that is enqueued at
once and waited for once; a row has the smallest. What cannot be measured (no torch, no GPU, a torch
without Muon, too little memory) is a line that begins with "skip", and no row; the exit status
stays 0. NOT YET RUN ON A GPU.
"""

import argparse
import json
import sys
import time

# (rows, cols, matrices): the five steps' cases.
NEWTON_SCHULZ = [
    (2048, 2048, 1),
    (4096, 4096, 1),
    (8192, 8192, 1),
    (4096, 16384, 1),
    (1024, 8192, 6),
]
TINY_NEWTON_SCHULZ = [(64, 64, 1), (16, 64, 2)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# name: layers, width, vocabulary, positions
MODEL = ("gpt2-1.5b", 48, 1600, 50257, 1024)
TINY_MODEL = ("gpt2-tiny", 2, 16, 64, 32)
# bench: the peer's name.
PLAIN = "torch.compile"
OPTIMIZERS = "torch Muon + AdamW"


def case_name(rows, cols, matrices):
    """As device.c names it."""
    return f"{rows} x {cols}" if matrices == 1 else f"{matrices} of {rows} x {cols}"


def model_shapes(layers, width, vocab, positions):
    """The hidden matrices, query, key and value apart, and all other tensors, of a GPT-2 with tied
    embeddings."""
    matrices = []
    others = [(vocab, width), (positions, width)]
    for _ in range(layers):
        matrices += [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
        # Two norms with weight and bias; the biases of the four projections.
        others += [(width,)] * 4 + [(3 * width,), (width,), (4 * width,), (width,)]
    return matrices, others + [(width,)] * 2


def elements(shapes):
    total = 0
    for shape in shapes:
        count = 1
        for side in shape:
            count *= side
        total += count
    return total


def row(bench, case, metric, seconds, version):
    return {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": seconds * 1e3,
        "unit": "ms",
        "version": version,
    }


def skip(what, why):
    print(f"skip {what}: {why}", flush=True)


def load_torch(tiny):
    """torch and the name of the device to work on, or None and why not."""
    try:
        import torch
    except ImportError as error:
        return None, str(error)
    if torch.cuda.is_available():
        return torch, "cuda"
    return (torch, "cpu") if tiny else (None, "torch sees no GPU")


class Clock:
    """Seconds of one run, over samples of at least `floor` seconds each; the smallest."""

    def __init__(self, wait, samples, floor):
        self.wait, self.samples, self.floor = wait, samples, floor

    def sample(self, run, inner):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        self.wait()
        return time.perf_counter() - start

    def measure(self, run):
        self.sample(run, 1)
        inner = 1
        while self.sample(run, inner) < self.floor and inner < 1 << 14:
            inner *= 2
        return min(self.sample(run, inner) for _ in range(self.samples)) / inner


def normalized(torch, grad):
    x = grad.to(torch.bfloat16)
    if x.size(-2) > x.size(-1):
        x = x.mT
    return x / (torch.linalg.matrix_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)


def plain_by_operators(torch, grad):
    a, b, c = COEFFICIENTS
    x = normalized(torch, grad)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if grad.size(-2) > grad.size(-1) else x).to(torch.float32)


def plain_by_addmm(torch, grad):
    a, b, c = COEFFICIENTS
    add = torch.addmm if grad.dim() == 2 else torch.baddbmm
    x = normalized(torch, grad)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if grad.size(-2) > grad.size(-1) else x).to(torch.float32)


def newton_schulz_rows(torch, device, clock, cases):
    for rows, cols, matrices in cases:
        case = case_name(rows, cols, matrices)
        shape = (rows, cols) if matrices == 1 else (matrices, rows, cols)
        grad = torch.rand(shape, device=device) - 0.5
        seconds = {}
        for plain in (plain_by_operators, plain_by_addmm):
            torch._dynamo.reset()
            compiled = torch.compile(lambda g, plain=plain: plain(torch, g), dynamic=False)
            with torch.no_grad():
                seconds[plain.__name__] = clock.measure(lambda: compiled(grad))
        best = min(seconds, key=seconds.get)
        print(f"{PLAIN}, {case}: {seconds[best] * 1e3:.5g} ms ({best})", flush=True)
        yield row(PLAIN, case, "newton-schulz", seconds[best], torch.__version__)


def parameters(torch, device, shapes):
    out = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.rand(shape, device=device) - 0.5)
        p.grad = torch.rand(shape, device=device) - 0.5
        out.append(p)
    return out


def optimizer_rows(torch, device, clock, model):
    name = model[0]
    if not hasattr(torch.optim, "Muon"):
        skip(f"{OPTIMIZERS}, {name}", f"torch {torch.__version__} has no torch.optim.Muon")
        return
    matrices, others = model_shapes(*model[1:])
    try:
        muon = torch.optim.Muon(parameters(torch, device, matrices), lr=1e-6, weight_decay=0.1)
        adamw = torch.optim.AdamW(
            parameters(torch, device, others), lr=1e-6, weight_decay=0.1, fused=True
        )

        def step():
            muon.step()
            adamw.step()

        seconds = clock.measure(step)
    except torch.cuda.OutOfMemoryError as error:
        skip(f"{OPTIMIZERS}, {name}", str(error).splitlines()[0])
        return
    print(f"{OPTIMIZERS}, {name}: {seconds * 1e3:.5g} ms", flush=True)
    yield row(OPTIMIZERS, name, "optimizer step", seconds, torch.__version__)


def list_cases(newton_schulz, model):
    for shape in newton_schulz:
        print(f"newton-schulz: {case_name(*shape)}")
    matrices, others = model_shapes(*model[1:])
    print(
        f"optimizer step: {model[0]}, {len(matrices)} matrices of {elements(matrices)} elements, "
        f"{len(others)} other tensors of {elements(others)}"
    )


def measured(torch, device, clock, newton_schulz, model):
    yield from newton_schulz_rows(torch, device, clock, newton_schulz)
    if device == "cuda":
        torch.cuda.empty_cache()
    yield from optimizer_rows(torch, device, clock, model)


def write(path, rows):
    if path is None:
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
        file.write("\n")


def main(words):
    parser = argparse.ArgumentParser(description="PyTorch on this GPU, for bench/cuda/device.c.")
    parser.add_argument("--json", metavar="FILE", help="file for the rows")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--tiny", action="store_true", help="a trial: small, without a GPU too")
    parser.add_argument("--list", action="store_true", help="the cases; measures nothing")
    options = parser.parse_args(words)
    newton_schulz = TINY_NEWTON_SCHULZ if options.tiny else NEWTON_SCHULZ
    model = TINY_MODEL if options.tiny else MODEL
    if options.list:
        list_cases(newton_schulz, model)
        return 0
    rows = []
    write(options.json, rows)
    torch, device = load_torch(options.tiny)
    if torch is None:
        skip("torch", device)
        return 0
    samples = 2 if options.tiny else 5 if options.quick else 20
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = Clock(wait, samples, 0.0 if options.tiny else 5e-3)
    where = torch.cuda.get_device_name() if device == "cuda" else "the processor"
    print(f"torch {torch.__version__} on {where}", flush=True)
    for line in measured(torch, device, clock, newton_schulz, model):
        rows.append(line)
        write(options.json, rows)  # what there is stays, if time runs out
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
