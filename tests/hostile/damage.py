# SPDX-License-Identifier: Apache-2.0
"""Cuts and flips files of every kind of store, and reads each: `python -m tests.hostile.damage`.

    python -m tests.hostile.damage KIND SEED START STOP

Each damaged store is read in a process of its own. It may be refused, by an error of ours that
names one of its files, or give what was packed. Where there are checksums, it gives nothing else.
LMDB files and image files have attacks of their own: tests/stores/damage_lmdb.py,
tests/images/mutate.py.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.images.making import picture, saved
from tests.stores.test_tar import write as write_tar

from penstock.errors import PenstockError
from penstock.stores import EncodedImage, open_store, pack

LONGEST_S = 30
LIMIT_BYTES = 6 << 30  # of addresses
COUNT = 12
SAMPLES = [
    (EncodedImage(saved(picture(8, 12, seed), "PNG")), label)
    for label in range(3)
    for seed in range(4 * label, 4 * label + 4)
]
TREES = [{"x": np.arange(100 + k), "name": f"{k}"} for k in range(COUNT)]
COLUMNS = {
    "image": [image.data for image, _ in SAMPLES],
    "label": [label for _, label in SAMPLES],
}


def packed(suffix, samples=SAMPLES, **options):
    """Return what packs into a place with that suffix."""

    def make(folder):
        address = f"{suffix.partition(':')[0]}:{folder}/store{suffix.partition(':')[2]}"
        pack(samples, address, **options)
        return address

    return make


def tar(folder):
    files = {}
    for number, (image, label) in enumerate(SAMPLES):
        files[f"{number:03}.png"], files[f"{number:03}.cls"] = image.data, b"%d" % label
    for shard in range(2):
        names = list(files)[shard * COUNT : (shard + 1) * COUNT]
        write_tar(folder / f"{shard}.tar", {name: files[name] for name in names})
    return f"tar:{folder}"


def parquet(folder):
    pq.write_table(pa.table(COLUMNS), folder / "a.parquet", row_group_size=5)
    return f"arrow:{folder}/a.parquet"


def arrow(make):
    def write(folder):
        name = "a.arrow" if make is pa.ipc.new_file else "data-00000-of-00001.arrow"
        table = pa.table(COLUMNS)
        with pa.OSFile(str(folder / name), "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
        return f"arrow:{folder}/{name}"

    return write


# What makes it, and whether every byte of a sample is under a checksum.
KINDS = {
    "lmdb": (packed("lmdb:.lmdb"), True),
    "lmdb of trees": (packed("lmdb:.lmdb", TREES), True),
    "lmdb shards": (packed("lmdb:", num_shards=3), True),
    "tar": (tar, False),
    "parquet": (parquet, False),
    "arrow file": (arrow(pa.ipc.new_file), False),
    "arrow stream": (arrow(pa.ipc.new_stream), False),
}


def plain(sample):
    """Return a sample as something that compares."""
    if isinstance(sample, (tuple, list)):
        return [plain(part) for part in sample]
    if isinstance(sample, dict):
        return {key: plain(part) for key, part in sample.items()}
    if isinstance(sample, EncodedImage):
        return bytes(sample.data)
    return sample.tolist() if isinstance(sample, (np.ndarray, np.generic)) else sample


def read(address):
    """Return all samples of a store."""
    with open_store(address) as store:
        samples = [plain(record.sample) for record in store.scan()]
        labels = None if store.labels is None else [plain(label) for label in store.labels]
        return sorted(samples, key=repr), labels


def damage(rng, folder):
    """Damage one of the files below a folder; return what was done, in words."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    path = files[rng.integers(len(files))]
    data = bytearray(path.read_bytes())
    way = ("flip", "flip", "flip", "cut", "zeros", "swap", "empty", "gone")[rng.integers(8)]
    # Half of them at the file's beginning or end, where headers and footers are.
    place = int(rng.integers(len(data)))
    if rng.integers(2):
        place = (place % 200 if rng.integers(2) else len(data) - 1 - place % 200) % len(data)
    if way == "flip":
        data[place] ^= 1 << rng.integers(8)
    elif way == "cut":
        del data[place:]
    elif way == "zeros":
        stop = place + int(rng.integers(1, 600))
        data[place:stop] = bytes(len(data[place:stop]))
    elif way == "swap":
        other = files[rng.integers(len(files))].read_bytes()
        data[place:] = other[place:]
    elif way == "empty":
        data.clear()
    if way == "gone":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{way} at {place} of {path.relative_to(folder)}"


def outcome_of(kind, address, folder, expected, done):
    """Return what comes of reading a store, and whether that may be."""
    has_checksums = KINDS[kind][1]
    try:
        found = read(address)
    except PenstockError as error:
        return "refused", None if str(folder) in str(error) else f"names no file: {error}"
    except Exception as error:
        return type(error).__name__, f"{type(error).__name__}: {error}"
    if found == expected:
        return "right", None
    is_other_file = done.startswith(("gone", "swap"))  # of shards, a format without an index
    if has_checksums or (len(found[0]) != len(expected[0]) and not is_other_file):
        return "other samples", f"not what was packed: {len(found[0])} of {len(expected[0])}"
    return "other samples", None


def apart(work, longest_s=LONGEST_S):
    """Return what a function says in a process of its own, or the signal that ended it."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            signal.alarm(longest_s)
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say as they abort
            os.write(sink, json.dumps(work()).encode())
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        name = signal.Signals(-code).name
        return name, f"ended by {name}"
    return json.loads(said) if said else ("nothing said", "the child said nothing")


def attacked(kind, seed, start, stop):
    """Damage a store so many times; return how often each outcome came, and what was wrong."""
    warnings.simplefilter("ignore")
    outcomes, wrong = collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        whole, damaged = Path(folder, "whole"), Path(folder, "damaged")
        whole.mkdir()
        address = KINDS[kind][0](whole)
        shutil.copytree(whole, damaged, symlinks=True)
        expected = read(address.replace(str(whole), str(damaged)))
        for number in range(start, stop):
            shutil.rmtree(damaged)
            shutil.copytree(whole, damaged, symlinks=True)
            done = damage(np.random.default_rng((seed, number)), damaged)
            where = address.replace(str(whole), str(damaged))
            outcome, complaint = apart(partial(outcome_of, kind, where, damaged, expected, done))
            outcomes[outcome] += 1
            if complaint:
                one = f"python -m tests.hostile.damage {kind!r} {seed} {number} {number + 1}"
                wrong.append(f"{done}: {complaint}\n    alone: {one}")
    return {"outcomes": dict(outcomes), "wrong": wrong}


if __name__ == "__main__":
    said = attacked(sys.argv[1], *map(int, sys.argv[2:5]))
    sys.exit(f"{said['outcomes']}\n" + "\n".join(said["wrong"]))
