#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the golden vectors in tests/golden/ (text, hex floats; the format is in tests/ref/golden.h).

    python3 scripts/golden/generate.py [--out tests/golden] [--only muon_rows.txt]

The formulas of Newton-Schulz and Muon run in float64 on torch tensors where torch is installed, on
numpy arrays otherwise; the header of each file says which. With torch they are also checked, before
anything is written, against torch's own code:
  * torch.optim.Muon with its cast to bfloat16 replaced by float64 (momentum, scale, decay and the
    iteration are torch's), relative difference below 1e-13;
  * the AdamW vectors *are* torch.optim.AdamW in float64, and the formula must agree to 1e-14.
muon_torch_stock.txt is torch.optim.Muon unchanged on float32 parameters: its iteration runs in
bfloat16, so it can be compared at a bfloat16 tolerance only. It and adamw.txt from torch itself
need torch; without it the first is left as it is and the second comes from the formula.
muon_rows.txt (NorMuon) has no counterpart in torch: it is the formula of the paper and of its authors'
code, with the row's moment lerped from zero and no correction for the start.

Inputs are exact in float32, so that float32 code under test reads the same numbers.
"""

import argparse
import inspect
import math
import platform
import random
import struct
import sys
from pathlib import Path

try:
    import torch

    ENGINE = f"torch {torch.__version__} (CPU, float64)"
except ImportError:
    torch = None
    import numpy

    ENGINE = f"numpy {numpy.__version__} (float64), torch was not installed"


# ---- arrays: torch or numpy, whichever is there; the formulas below use only @, .T, +, -, *, / ----


def array(rows):
    if torch:
        return torch.tensor(rows, dtype=torch.float64)
    return numpy.array(rows, dtype=numpy.float64)


def norm(x):
    return float(torch.linalg.norm(x) if torch else numpy.linalg.norm(x))


def relative(got, want):
    difference, size = norm(got - want), norm(want)
    return difference if size == 0 else difference / size


def to_f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def gauss(rng, rows, cols, scale=1.0):
    """Entries exact in float32."""
    return array([[to_f32(scale * rng.gauss(0, 1)) for _ in range(cols)] for _ in range(rows)])


def zeros(rows, cols):
    return array([[0.0] * cols for _ in range(rows)])


# ---- the formulas ----

JORDAN = [(3.4445, -4.7750, 2.0315)] * 5

POLAR_EXPRESS_RAW = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]


def polar_express(steps, f=1.01):
    divided = [(a / f, b / f**3, c / f**5) for a, b, c in POLAR_EXPRESS_RAW[:-1]]
    return (divided + [POLAR_EXPRESS_RAW[-1]])[:steps]


COEFFICIENTS = {
    "jordan5": JORDAN,
    "you5": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    "polar_express5": polar_express(5),
    "polar_express6": polar_express(6),
    "polar_express8": polar_express(8),
    "cans5": [
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ],
    "cubic5": [
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ],
    "deepseek_v4": [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2,
}


def newton_schulz(x, coefficients, rule, eps, factor=1.0):
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    n = factor * norm(x)
    divisor = {"scale_safe": n, "reference_max": max(n, eps), "reference_add": n + eps}[rule]
    if divisor > 0:
        x = x / divisor
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


def muon_scale(name, rows, cols):
    return {
        "original": math.sqrt(max(1.0, rows / cols)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
        "spectral_unclamped": math.sqrt(rows / cols),
    }[name]


def muon_direction(o, momentum, grad):
    mu = o["momentum"]
    keep = 1 - mu if o["ema"] else 1.0
    momentum = mu * momentum + keep * grad
    update = keep * grad + mu * momentum if o["nesterov"] else momentum
    x = newton_schulz(update, o["coefficients"], o["eps_rule"], o["eps"], o["norm_factor"])
    return x, momentum


def muon_step(o, weight, momentum, grad):
    x, momentum = muon_direction(o, momentum, grad)
    weight = (1 - o["lr"] * o["weight_decay"]) * weight
    weight = weight - o["lr"] * muon_scale(o["scale"], *weight.shape) * x
    return weight, momentum


def muon_rows(x, moments, beta2, eps):
    """NorMuon: every row over the root of its second moment, all together at the norm of before.
    Row by row in Python floats, which are float64; moments is a list, a number per row."""
    rows = x.tolist()
    moments = [beta2 * m + (1 - beta2) * math.fsum(v * v for v in row) / len(row)
               for m, row in zip(moments, rows)]
    scaled = array([[v / (math.sqrt(m) + eps) for v in row] for m, row in zip(moments, rows)])
    return scaled * (norm(x) / norm(scaled)), moments


def adamw_step(o, t, weight, m, v, grad):
    b1, b2 = o["beta1"], o["beta2"]
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad * grad
    denominator = v**0.5 / math.sqrt(1 - b2**t) + o["eps"]
    weight = (1 - o["lr"] * o["weight_decay"]) * weight
    return weight - o["lr"] / (1 - b1**t) * m / denominator, m, v


# ---- torch's own code, as a check on the formulas ----


def torch_muon_in_float64():
    """torch.optim._muon with the iteration's cast to bfloat16 replaced; nothing else is touched."""
    module = torch.optim._muon
    name = "_zeropower_via_newtonschulz"
    source = inspect.getsource(getattr(module, name))
    if source.count("torch.bfloat16") != 1:
        sys.exit("torch.optim.Muon has changed: its cast to bfloat16 was not found exactly once")
    scope = dict(vars(module))
    exec(source.replace("torch.bfloat16", "torch.float64"), scope)  # noqa: S102
    return module, name, scope[name]


def run_torch_muon(o, weight, grads, dtype):
    parameter = torch.nn.Parameter(weight.to(dtype, copy=True))
    optimizer = torch.optim.Muon(
        [parameter],
        lr=o["lr"],
        weight_decay=o["weight_decay"],
        momentum=o["momentum"],
        nesterov=o["nesterov"],
        eps=o["eps"],
        adjust_lr_fn=o["scale"],
    )
    weights = []
    for grad in grads:
        parameter.grad = grad.to(dtype, copy=True)
        optimizer.step()
        weights.append(parameter.detach().clone())
    return weights, optimizer.state[parameter]["momentum_buffer"].clone()


def check(what, got, want, limit):
    error = relative(got, want)
    if not error <= limit:
        sys.exit(f"{what}: the formula differs from torch by {error:.3e} (limit {limit:.0e})")


# ---- output ----


class Writer:
    def __init__(self, path, title, note=None):
        self.path, self.cases = path, 0
        self.lines = [
            "# SPDX-License-Identifier: MIT",
            f"# {title}",
            f"# engine: {note or ENGINE}",
            f"# python: {platform.python_version()}",
            "# command: python3 scripts/golden/generate.py",
            "golden 1",
        ]

    def case(self, name):
        self.lines.append(f"case {name}")
        self.cases += 1

    def text(self, key, value):
        self.lines.append(f"text {key} {value}")

    def integer(self, key, value):
        self.lines.append(f"integer {key} {int(value)}")

    def number(self, key, value):
        self.lines.append(f"number {key} {float(value).hex()}")

    def array(self, key, x, dtype="f64"):
        rows = x.tolist()
        self.lines.append(f"array {key} {dtype} {len(rows)} {len(rows[0])}")
        for row in rows:
            if not all(math.isfinite(value) for value in row):
                sys.exit(f"{self.path}: {key} has a value that is not finite")
            self.lines.append(" ".join(float(value).hex() for value in row))

    def endcase(self):
        self.lines.append("endcase")

    def close(self):
        self.lines.append(f"endfile {self.cases}")
        self.path.write_text("\n".join(self.lines) + "\n", encoding="ascii")
        print(f"{self.path}: {self.cases} cases, {self.path.stat().st_size} bytes")


# ---- topics ----


def write_newton_schulz(out):
    rng = random.Random(1)
    w = Writer(out / "newton_schulz.txt", "Newton-Schulz: y = NS(x), float64 formula")

    def case(name, x, rule="scale_safe", coefficients="jordan5", eps=1e-7):
        table = COEFFICIENTS[coefficients]
        y = newton_schulz(x, table, rule, eps)
        w.case(name)
        w.text("coefficients", coefficients)
        w.text("eps_rule", rule)
        w.number("eps", eps)
        w.array("table", array([list(row) for row in table]))
        w.array("x", x, "f32")
        w.array("y", y)
        w.endcase()
        return y

    def direct_check(x, y):
        if torch:
            _, _, function = torch_muon_in_float64()
            check("newton_schulz", y, function(x, JORDAN[0], 5, 1e-7), 1e-13)

    shapes = {"square": (8, 8), "wide": (6, 16), "tall": (16, 6), "row": (1, 8)}
    shapes.update({"column": (8, 1), "4x9": (4, 9), "one": (1, 1)})
    for name, (rows, cols) in shapes.items():
        x = gauss(rng, rows, cols)
        direct_check(x, case(name, x))
    # Small integers, so that the product is exact in float32 and the rank is really one.
    column = [[rng.choice([-3, -2, -1, 1, 2, 3])] for _ in range(6)]
    row = [[rng.choice([-3, -2, -1, 1, 2, 3]) for _ in range(9)]]
    x = array(column) @ array(row)
    direct_check(x, case("rank_one", x))
    case("zero", zeros(4, 6))
    case("zero_reference_max", zeros(4, 6), "reference_max")
    case("zero_reference_add", zeros(4, 6), "reference_add")
    base = gauss(rng, 5, 7)
    for name, size in (("norm_1e-30", 1e-30), ("norm_1e30", 1e30)):
        factor = size / norm(base)
        x = array([[to_f32(value * factor) for value in line] for line in base.tolist()])
        case(name, x)
    # Norms of 1e-8 and 1e-6 stand below and above eps: where the three rules differ.
    for label, size in (("1e-8", 1e-8), ("1e-6", 1e-6)):
        factor = size / norm(base)
        x = array([[to_f32(value * factor) for value in line] for line in base.tolist()])
        for rule in ("scale_safe", "reference_max", "reference_add"):
            y = case(f"norm_{label}_{rule}", x, rule)
            if rule == "reference_max":
                direct_check(x, y)
    for name in COEFFICIENTS:
        if name != "jordan5":
            case(f"set_{name}", gauss(rng, 4, 7), coefficients=name)
    w.close()


MUON_DEFAULTS = {
    "torch": dict(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ema=True,
                  scale="original", eps_rule="reference_max", eps=1e-7, norm_factor=1.0,
                  coefficients_name="jordan5"),
    "jordan": dict(lr=0.02, weight_decay=0.0, momentum=0.95, nesterov=True, ema=True,
                   scale="original", eps_rule="reference_add", eps=1e-7, norm_factor=1.0,
                   coefficients_name="jordan5"),
    "moonlight": dict(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ema=False,
                      scale="match_rms_adamw", eps_rule="reference_add", eps=1e-7,
                      norm_factor=1.0, coefficients_name="jordan5"),
    "dion": dict(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=False, ema=False,
                 scale="spectral_unclamped", eps_rule="reference_add", eps=1e-7,
                 norm_factor=1.01, coefficients_name="polar_express5"),
}


def write_options(w, o):
    w.text("coefficients", o["coefficients_name"])
    w.text("eps_rule", o["eps_rule"])
    w.text("scale", o["scale"])
    for key in ("lr", "weight_decay", "momentum", "eps", "norm_factor"):
        w.number(key, o[key])
    w.integer("nesterov", o["nesterov"])
    w.integer("ema", o["ema"])


def muon_case(w, rng, preset, name, rows, cols, steps=3, grad_size=1.0, zero_step=0, **changes):
    o = dict(MUON_DEFAULTS[preset], **changes)
    o["coefficients"] = COEFFICIENTS[o["coefficients_name"]]
    weight = gauss(rng, rows, cols, 0.1)
    grads = [gauss(rng, rows, cols, grad_size) for _ in range(steps)]
    if zero_step:  # a missing gradient that the preset takes as zeros
        grads[zero_step - 1] = zeros(rows, cols)
    w.case(name)
    write_options(w, o)
    w.integer("steps", steps)
    w.array("weight0", weight, "f32")
    start, momentum, history = weight, zeros(rows, cols), []
    for t, grad in enumerate(grads, 1):
        weight, momentum = muon_step(o, weight, momentum, grad)
        w.array(f"grad{t}", grad, "f32")
        w.array(f"weight{t}", weight)
        history.append(weight)
    w.array(f"momentum{steps}", momentum)
    w.endcase()
    # torch floors with max(norm, eps); other rules meet it only up to their own eps.
    comparable = o["ema"] and o["coefficients_name"] == "jordan5" and (
        o["eps_rule"] == "reference_max" or (o["eps_rule"] == "scale_safe" and grad_size >= 1))
    if torch and comparable:
        module, function, patched = torch_muon_in_float64()
        original = getattr(module, function)
        setattr(module, function, patched)
        try:
            want, want_momentum = run_torch_muon(o, start, grads, torch.float64)
        finally:
            setattr(module, function, original)
        for t in range(steps):
            # The updates and not only the weights, which a wrong update of 1e-3 barely moves.
            check(f"muon {name}", history[t] - start, want[t] - start, 1e-12)
        check(f"muon momentum {name}", momentum, want_momentum, 1e-13)


def write_muon(out):
    rng = random.Random(2)
    w = Writer(out / "muon_torch.txt", "Muon, preset torch, float64 formula with torch's eps floor")
    muon_case(w, rng, "torch", "square", 6, 6)
    muon_case(w, rng, "torch", "wide", 4, 10)
    muon_case(w, rng, "torch", "tall", 10, 4)
    muon_case(w, rng, "torch", "row", 1, 7)
    muon_case(w, rng, "torch", "column", 7, 1)
    muon_case(w, rng, "torch", "plain_momentum", 6, 5, nesterov=False)
    muon_case(w, rng, "torch", "no_decay", 5, 6, weight_decay=0.0, lr=0.02)
    muon_case(w, rng, "torch", "strong_decay", 9, 4, weight_decay=0.5, lr=0.1, momentum=0.9)
    muon_case(w, rng, "torch", "match_rms_adamw", 8, 5, scale="match_rms_adamw")
    muon_case(w, rng, "torch", "tiny_gradient_floor", 4, 5, grad_size=1e-10)
    muon_case(w, rng, "torch", "scale_safe", 8, 3, eps_rule="scale_safe")
    muon_case(w, rng, "torch", "scale_safe_tiny", 4, 5, grad_size=1e-12, eps_rule="scale_safe")
    w.close()

    rng = random.Random(3)
    w = Writer(out / "muon_jordan.txt", "Muon, preset jordan, float64 formula with its eps added")
    muon_case(w, rng, "jordan", "square", 6, 6)
    muon_case(w, rng, "jordan", "wide", 4, 10)
    muon_case(w, rng, "jordan", "tall", 10, 4)
    muon_case(w, rng, "jordan", "row", 1, 7)
    muon_case(w, rng, "jordan", "column", 7, 1)
    muon_case(w, rng, "jordan", "plain_momentum", 6, 5, nesterov=False)
    muon_case(w, rng, "jordan", "decay", 9, 4, weight_decay=0.1)
    muon_case(w, rng, "jordan", "conv_flattened", 4, 18)  # (4, 2, 3, 3)
    muon_case(w, rng, "jordan", "missing_gradient_is_zero", 5, 6, zero_step=2, weight_decay=0.1)
    muon_case(w, rng, "jordan", "tiny_gradient_eps", 4, 5, grad_size=1e-7)
    muon_case(w, rng, "jordan", "scale_safe", 8, 3, eps_rule="scale_safe")
    w.close()

    rng = random.Random(4)
    w = Writer(out / "muon_other.txt", "Muon, presets moonlight and dion, float64 formula")
    for preset in ("moonlight", "dion"):
        muon_case(w, rng, preset, f"{preset}_wide", 4, 9)
        muon_case(w, rng, preset, f"{preset}_tall", 9, 4)
        muon_case(w, rng, preset, f"{preset}_scale_safe", 5, 5, eps_rule="scale_safe")
    w.close()


def muon_rows_case(w, rng, preset, name, rows, cols, steps=3, beta2=0.95, dominant=1.0):
    o = dict(MUON_DEFAULTS[preset], eps_rule="scale_safe")
    o["coefficients"] = COEFFICIENTS[o["coefficients_name"]]
    weight, momentum, moments = gauss(rng, rows, cols, 0.1), zeros(rows, cols), [0.0] * rows
    w.case(name)
    write_options(w, o)
    w.number("row_beta2", beta2)
    w.number("row_eps", 1e-10)
    w.integer("steps", steps)
    w.array("weight0", weight, "f32")
    for t in range(1, steps + 1):
        grad = gauss(rng, rows, cols).tolist()
        grad[0] = [to_f32(dominant * value) for value in grad[0]]
        grad = array(grad)
        x, momentum = muon_direction(o, momentum, grad)
        x, moments = muon_rows(x, moments, beta2, 1e-10)
        weight = (1 - o["lr"] * o["weight_decay"]) * weight
        weight = weight - o["lr"] * muon_scale(o["scale"], rows, cols) * x
        w.array(f"grad{t}", grad, "f32")
        w.array(f"weight{t}", weight)
    w.array(f"momentum{steps}", momentum)
    w.array("row_moment", array([[m] for m in moments]))
    w.endcase()


def write_muon_rows(out):
    rng = random.Random(6)
    w = Writer(out / "muon_rows.txt", "Muon with normalized rows (NorMuon), float64 formula")
    muon_rows_case(w, rng, "jordan", "square", 6, 6)
    muon_rows_case(w, rng, "jordan", "wide", 4, 10)
    muon_rows_case(w, rng, "torch", "tall", 10, 4)
    muon_rows_case(w, rng, "jordan", "row", 1, 7)
    muon_rows_case(w, rng, "jordan", "column", 7, 1)
    muon_rows_case(w, rng, "moonlight", "dominant_row", 5, 6, dominant=50.0)
    muon_rows_case(w, rng, "dion", "other_beta2", 5, 8, beta2=0.5)
    w.close()


def write_muon_stock(out):
    if not torch:
        print("muon_torch_stock.txt: needs torch, left as it is")
        return
    rng = random.Random(5)
    w = Writer(out / "muon_torch_stock.txt",
               "torch.optim.Muon unchanged, float32 parameters: iteration in bfloat16",
               f"torch {torch.__version__} (CPU, float32 with bfloat16 inside)")
    for name, rows, cols in (("square", 8, 8), ("wide", 6, 16), ("tall", 16, 6)):
        o = dict(MUON_DEFAULTS["torch"], lr=0.02)
        weight = gauss(rng, rows, cols, 0.1)
        grads = [gauss(rng, rows, cols) for _ in range(3)]
        weights, momentum = run_torch_muon(o, weight, grads, torch.float32)
        w.case(name)
        write_options(w, o)
        w.integer("steps", 3)
        w.array("weight0", weight, "f32")
        for t in range(3):
            w.array(f"grad{t + 1}", grads[t], "f32")
            w.array(f"weight{t + 1}", weights[t], "f32")
        w.array("momentum3", momentum, "f32")
        w.endcase()
    w.close()


def write_adamw(out):
    rng = random.Random(6)
    engine = f"torch.optim.AdamW, torch {torch.__version__} (CPU, float64)" if torch else None
    w = Writer(out / "adamw.txt", "AdamW, five steps, float64", engine)
    defaults = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2)
    cases = (
        ("defaults", 3, 7, 1.0, {}),
        ("no_decay", 1, 13, 1.0, dict(weight_decay=0.0)),
        ("strong", 4, 4, 1.0, dict(lr=0.05, beta1=0.8, beta2=0.95, weight_decay=0.2)),
        ("tiny_gradients_meet_eps", 2, 5, 1e-8, {}),
        ("zero_gradients", 1, 5, 0.0, {}),
    )
    for name, rows, cols, size, changes in cases:
        o = dict(defaults, **changes)
        weight = gauss(rng, rows, cols, 0.1)
        grads = [gauss(rng, rows, cols, size) for _ in range(5)]
        m, v, parameter, optimizer = zeros(rows, cols), zeros(rows, cols), None, None
        if torch:
            parameter = torch.nn.Parameter(weight.clone())
            optimizer = torch.optim.AdamW([parameter], lr=o["lr"], betas=(o["beta1"], o["beta2"]),
                                          eps=o["eps"], weight_decay=o["weight_decay"],
                                          foreach=False)
        w.case(name)
        for key in ("lr", "beta1", "beta2", "eps", "weight_decay"):
            w.number(key, o[key])
        w.integer("steps", 5)
        w.array("weight0", weight, "f32")
        for t, grad in enumerate(grads, 1):
            weight, m, v = adamw_step(o, t, weight, m, v, grad)
            w.array(f"grad{t}", grad, "f32")
            if torch:
                parameter.grad = grad.clone()
                optimizer.step()
                state = optimizer.state[parameter]
                check(f"adamw {name}", weight, parameter.detach(), 1e-14)
                check(f"adamw m {name}", m, state["exp_avg"], 1e-14)
                check(f"adamw v {name}", v, state["exp_avg_sq"], 1e-14)
                w.array(f"weight{t}", parameter.detach())
            else:
                w.array(f"weight{t}", weight)
        state = optimizer.state[parameter] if torch else {"exp_avg": m, "exp_avg_sq": v}
        w.array("m5", state["exp_avg"])
        w.array("v5", state["exp_avg_sq"])
        w.endcase()
    w.close()


def main():
    parser = argparse.ArgumentParser(description="Write the golden vectors.")
    default = Path(__file__).resolve().parents[2] / "tests" / "golden"
    parser.add_argument("--out", type=Path, default=default, help="folder (default tests/golden)")
    parser.add_argument("--only", help="this file alone")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if torch:
        torch.manual_seed(0)
        torch.set_num_threads(1)
    print(f"engine: {ENGINE}")
    topics = {
        ("newton_schulz.txt",): write_newton_schulz,
        ("muon_torch.txt", "muon_jordan.txt", "muon_other.txt"): write_muon,
        ("muon_torch_stock.txt",): write_muon_stock,
        ("muon_rows.txt",): write_muon_rows,
        ("adamw.txt",): write_adamw,
    }
    if arguments.only and not any(arguments.only in names for names in topics):
        sys.exit(f"--only {arguments.only}: no such file is written here")
    for names, write in topics.items():
        if not arguments.only or arguments.only in names:
            write(out)


if __name__ == "__main__":
    main()
