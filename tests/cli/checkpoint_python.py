# SPDX-License-Identifier: MIT
"""For safetensors_python.sh: checkpoint_python.py PROGRAM TEXT FOLDER

A whole checkpoint of train_gpt (PROGRAM, on the file TEXT) is read with the Python package, file by
file and by its indexes, and written again with it, with the weights in two files; train_gpt resumes
from what the package wrote and ends with the bits of a run that was never interrupted.
"""
import glob
import json
import os
import subprocess
import sys

from safetensors import deserialize

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "examples"))
sys.path.insert(0, os.path.dirname(__file__))
from read_tensor import read_tensor  # noqa: E402
from safetensors_python import read, serialize, write  # noqa: E402

NAMES = {"F32": "float32", "BF16": "bfloat16"}
LATEST = "step-2"


def ok(name):
    print("ok checkpoint python:", name)


def bad(name, why):
    print("not ok checkpoint python: %s (%s)" % (name, why))


def train(program, text, folder, *options):
    """Runs train_gpt on 4 ranks; the hash of its parameters."""
    command = [program, "--data", text, "--checkpoint", folder]
    command += "--layers 2 --dim 32 --heads 2 --context 32 --batch 2 --ranks 4".split()
    run = subprocess.run(command + list(options), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if run.returncode != 0:
        raise SystemExit(run.stderr.decode().splitlines()[-1])
    return json.loads(run.stdout.decode().splitlines()[-1])["params_hash"]


def metadata_of(path):
    data = read(path)
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__")


def read_all(folder):
    """{set: {name: (dtype, shape, bytes)}} as the package reads them; checks the indexes."""
    sets = {}
    for index in sorted(glob.glob(os.path.join(folder, "*.safetensors.index.json"))):
        stem = os.path.basename(index)[: -len(".safetensors.index.json")]
        with open(index, encoding="utf-8") as f:
            index = json.load(f)
        files = set(index["weight_map"].values())
        tensors, nbytes = {}, 0
        for file in files:
            for name, t in deserialize(read(os.path.join(folder, file))):
                assert index["weight_map"][name] == file, name
                tensors[name] = (t["dtype"], list(t["shape"]), bytes(t["data"]))
                nbytes += len(t["data"])
        assert set(tensors) == set(index["weight_map"]), stem
        assert index["metadata"]["total_size"] == nbytes, stem
        sets[stem] = tensors
    return sets


def write_all(sets, folder):
    """The same tensors as the package writes them; the model in two files with an index."""
    os.makedirs(folder)
    for stem, tensors in sets.items():
        names = sorted(tensors)
        parts = [names[::2], names[1::2]] if stem == "model" else [names]
        weight_map = {}
        for i, part in enumerate(parts):
            file = "%s-%d.safetensors" % (stem, i) if len(parts) > 1 else stem + ".safetensors"
            spec = {n: (NAMES[tensors[n][0]],) + tensors[n][1:] for n in part}
            write(os.path.join(folder, file), serialize(spec, {"format": "pt"}))
            weight_map.update({n: file for n in part})
        if len(parts) > 1:
            with open(os.path.join(folder, stem + ".safetensors.index.json"), "w") as f:
                json.dump({"metadata": {}, "weight_map": weight_map}, f, indent=2)


def numpy_reads(folder, sets):
    try:
        from safetensors.numpy import load_file
    except ImportError:
        return print("skip checkpoint python: numpy (not there)")
    got = load_file(os.path.join(folder, "model.safetensors"))
    for name, (_, shape, data) in sets["model"].items():
        if list(got[name].shape) != shape or got[name].tobytes() != data:
            return bad("numpy reads the weights", name)
    ok("numpy reads the weights of train_gpt")


def one(program, text, work, kind, *options):
    ours, theirs = os.path.join(work, kind), os.path.join(work, kind + "_again")
    whole = train(program, text, os.path.join(work, kind + "_whole"), "--steps", "4", *options)
    # The learning rate depends on --steps: a run of 4 that stops after 2.
    train(program, text, ours, "--steps", "4", "--save-every", "2", *options)
    with open(os.path.join(ours, "latest"), "w") as f:
        f.write(LATEST + "\n")
    folder = os.path.join(ours, LATEST)
    sets = read_all(folder)
    indexed = {os.path.basename(p) for p in glob.glob(os.path.join(folder, "*.safetensors"))}
    if indexed != {stem + ".safetensors" for stem in sets} | {"state.safetensors"}:
        return bad(kind + ": files", " ".join(sorted(indexed)))
    for stem, tensors in sets.items():
        for name, (dtype, shape, _) in tensors.items():
            if read_tensor(folder, name, stem)[:2] != (dtype, shape):
                return bad(kind + ": plain Python reads the same", name)
    ok("%s: the package reads %d files of train_gpt" % (kind, len(sets) + 1))
    if "F32" == next(iter(sets["model"].values()))[0]:
        numpy_reads(folder, sets)
    state = os.path.join(folder, "state.safetensors")
    if list(deserialize(read(state))):
        return bad(kind + ": state.safetensors", "has tensors")
    again = os.path.join(theirs, LATEST)
    write_all(sets, again)
    write(os.path.join(again, "state.safetensors"), serialize({}, metadata_of(state)))
    with open(os.path.join(theirs, "latest"), "w") as f:
        f.write(LATEST + "\n")
    got = train(program, text, theirs, "--steps", "4", "--resume", *options)
    if got != whole:
        return bad(kind + ": train_gpt resumes from files of the package", got + " " + whole)
    ok(kind + ": train_gpt resumes from files of the package, with the same bits")


program, text, work = sys.argv[1:]
one(program, text, work, "f32")
one(program, text, work, "bf16", "--dtype", "bf16", "--tied")
