# SPDX-License-Identifier: MIT
"""For safetensors_python.sh: safetensors_python.py COPY FOLDER

COPY is the program safetensors_copy. Files that the Python package writes are copied by it, byte for
byte; files with what the package cannot write, and damaged ones, are judged by both.
"""
import json
import os
import random
import subprocess
import sys

import safetensors
from safetensors import SafetensorError, deserialize

# The package's names of dtypes, with the bits of an element. For F4 it takes pairs of elements.
DTYPES = {
    "bool": 8, "uint8": 8, "int8": 8, "float8_e5m2": 8, "float8_e4m3fn": 8, "float8_e8m0fnu": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float4_e2m1fn_x2": 8, "int16": 16, "uint16": 16,
    "float16": 16, "bfloat16": 16, "int32": 32, "uint32": 32, "float32": 32, "complex64": 64,
    "float64": 64, "int64": 64, "uint64": 64,
}  # fmt: skip
draw = random.Random(7)


def ok(name):
    print("ok safetensors python:", name)


def bad(name, why):
    print("not ok safetensors python: %s (%s)" % (name, why))


def serialize(tensors, metadata):
    """{name: (dtype, shape, bytes)} as the package writes it; None if it does not know a dtype."""
    keep = []
    spec = {}
    try:
        for name, (dtype, shape, data) in tensors.items():
            if hasattr(safetensors, "TensorSpec"):
                import ctypes

                buffer = ctypes.create_string_buffer(data, len(data) + 1)
                keep.append(buffer)
                spec[name] = safetensors.TensorSpec(
                    dtype=dtype, shape=shape, data_ptr=ctypes.addressof(buffer), data_len=len(data)
                )
            else:
                spec[name] = {"dtype": dtype, "shape": shape, "data": data}
        return bytes(safetensors.serialize(spec, metadata=metadata))
    except SafetensorError as error:
        if "dtype" in str(error):
            return None
        raise


def tensor(dtype):
    shape = [draw.randrange(1, 4) for _ in range(draw.randrange(0 if "x2" not in dtype else 1, 4))]
    if shape and draw.random() < 0.15:
        shape[0] = 0
    count = 1
    for size in shape:
        count *= size
    return dtype, shape, draw.randbytes(count * DTYPES[dtype] // 8)


def name(i):
    return draw.choice(["layers.0.w", "é", "\U0001f600", '"\\/', "Z", "z" * 40, " "]) + str(i)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)
    return path


def copies(copy, folder):
    known = [d for d in DTYPES if serialize({"t": tensor(d)}, None) is not None]
    copied = 0
    for i in range(60):
        tensors = {name(j): tensor(draw.choice(known)) for j in range(draw.randrange(0, 12))}
        if i == 0:
            tensors = {"t" + d: tensor(d) for d in known}
        written = serialize(tensors, draw.choice([None, {"format": "pt"}, {"k\n": "v\x01é"}]))
        source = write(os.path.join(folder, "in"), written)
        subprocess.run([copy, source, os.path.join(folder, "out")], check=True)
        if read(os.path.join(folder, "out")) != written:
            return bad("files that the package wrote are copied", "file %d of other bytes" % i)
        copied += 1
    ok("%d files that the package wrote are copied, byte for byte (%d dtypes)" % (copied, len(known)))


def by_hand(copy, folder):
    """Every dtype of the format, also those that the package reads but does not write."""
    order = "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16"
    order = (order + " BF16 I32 U32 F32 C64 F64 I64 U64").split()
    bits = lambda d: int("".join(c for c in d.split("_")[0] if c.isdigit()) or 8)
    header, data = {"__metadata__": {"b": "2", "a": "1"}}, b""
    for dtype in order:
        begin = len(data)
        data += draw.randbytes(8 * bits(dtype) // 8)
        header["t_" + dtype] = {"dtype": dtype, "shape": [2, 4], "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    source = write(os.path.join(folder, "in"), len(text).to_bytes(8, "little") + text + data)
    subprocess.run([copy, source, os.path.join(folder, "out")], check=True)
    try:
        there = dict(deserialize(read(os.path.join(folder, "out"))))
    except SafetensorError as error:
        if "unknown variant" in str(error):
            return print("skip safetensors python: all dtypes: this version lacks some:", error)
        return bad("all dtypes", error)
    for dtype in order:
        begin, end = header["t_" + dtype]["data_offsets"]
        t = there["t_" + dtype]
        if (t["dtype"], list(t["shape"]), bytes(t["data"])) != (dtype, [2, 4], data[begin:end]):
            return bad("all dtypes", dtype)
    written = read(os.path.join(folder, "out"))
    written = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
    if list(written) != ["__metadata__"] + ["t_" + d for d in reversed(order)]:
        return bad("all dtypes", "order " + " ".join(written))
    ok("%d dtypes written here are read by the package" % len(order))


def damage(copy, folder):
    """What is taken here, the package takes, too."""
    good = serialize(
        {"a": ("float32", [2], bytes(8)), "é": ("int64", [], bytes(8)), "e": ("bool", [0], b"")},
        {"format": "pt"},
    )
    files, verdicts = [], []
    for i in range(1500):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(0 if draw.random() < 0.05 else 8, len(data))
            kind = draw.randrange(3)
            letter = draw.choice(b'{}[]:,"\\ u0123456789-.eE\x01\x7f\xc3\xa9\xff')
            if kind == 0:
                data[at] = letter
            elif kind == 1:
                data.insert(at, letter)
            elif len(data) > 9:
                del data[at]
        if draw.random() < 0.9:  # the length and the data as they should be
            end = data.rfind(b"}") + 1
            data[end:] = bytes(16)
            data[:8] = (end - 8).to_bytes(8, "little")
        files.append(write(os.path.join(folder, "d%d" % i), bytes(data)))
        try:
            deserialize(bytes(data))
            verdicts.append("ok")
        except (SafetensorError, ValueError):
            verdicts.append("refused")
    ours = subprocess.run([copy, "--check"] + files, check=True, stdout=subprocess.PIPE)
    ours = ours.stdout.decode().split()
    pairs = list(zip(ours, verdicts, files))
    lax = [(o, f) for o, v, f in pairs if o == "ok" and v != "ok"]
    both = sum(o == "ok" and v == "ok" for o, v, _ in pairs)
    strict = sorted({o for o, v, _ in pairs if o != "ok" and v == "ok"})
    allowed = {"NAME_EMPTY", "NAME_CONTROL", "ZERO", "START", "MEMBER_UNKNOWN", "KEY_TWICE"}
    allowed |= {"NAME_TWICE", "METADATA_TWICE", "SHAPE_LARGE"}
    if lax or len(ours) != len(files) or both == 0:
        return bad("damaged files", "taken here only: %s, taken by both: %d" % (lax[:3], both))
    if not set(strict) <= allowed:
        return bad("damaged files", "refused here only, for %s" % strict)
    ok("%d damaged files: %d taken by both, none by us alone" % (len(files), both))


if __name__ == "__main__":
    print("# package", safetensors.__version__)
    copies(sys.argv[1], sys.argv[2])
    by_hand(sys.argv[1], sys.argv[2])
    damage(sys.argv[1], sys.argv[2])
