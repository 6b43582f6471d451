#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reads one tensor of a checkpoint with plain Python, without any package.

    python3 examples/read_tensor.py run1/step-300 wte.weight
    python3 examples/read_tensor.py run1/step-300 wte.weight.exp_avg --set optimizer.exp_avg

Prints dtype, shape and the first values. With the package: safetensors.numpy.load_file(path).
"""
import argparse
import json
import os
import struct

FORMATS = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}


def read_tensor(folder, name, tensors="model"):
    """dtype, shape, list of numbers."""
    with open(os.path.join(folder, tensors + ".safetensors.index.json"), encoding="utf-8") as f:
        files = json.load(f)["weight_map"]
    if name not in files:
        raise SystemExit("%s has no %s" % (tensors, name))
    path = os.path.join(folder, files[name])
    with open(path, "rb") as f:
        header_nbytes = struct.unpack("<Q", f.read(8))[0]
        entry = json.loads(f.read(header_nbytes))[name]
        first, last = entry["data_offsets"]
        f.seek(8 + header_nbytes + first)
        data = f.read(last - first)
    if entry["dtype"] not in FORMATS:
        raise SystemExit("%s is %s, which this example does not convert" % (name, entry["dtype"]))
    if entry["dtype"] == "BF16":  # the upper half of an F32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    code = FORMATS[entry["dtype"]]
    count = len(data) // struct.calcsize(code)
    return entry["dtype"], entry["shape"], list(struct.unpack("<%d%s" % (count, code), data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--set", default="model", help="model, optimizer.exp_avg, ...")
    options = parser.parse_args()
    dtype, shape, values = read_tensor(options.folder, options.name, options.set)
    print(dtype, shape, " ".join("%.6g" % value for value in values[:4]))
