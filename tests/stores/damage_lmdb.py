# SPDX-License-Identifier: Apache-2.0
"""Damages LMDB files and reads each in a process of its own: `python -m tests.stores.damage_lmdb`.

For each part of a file it is known what has to come of damage there; LMDB's format is read here by
other code than Penstock's. The last line of the output is JSON: how often each outcome came, and
what was wrong.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import re
import signal
import struct
import sys
import warnings
from pathlib import Path

import numpy as np

from penstock.errors import StoreError
from penstock.stores.lmdb.store import LMDBStore
from penstock.stores.lmdb.writer import LMDBWriter
from penstock.stores.records import encode_record

PAGE = 4096
LONGEST_S = 60
# Bytes of the records, by the kind of file: in leaves, in overflow pages, or some of each.
SIZES = {"small": (1, 90), "large": (4000, 20_000), "mixed": (10, 6000)}
COUNTS = {"small": 1500, "large": 60, "mixed": 600}
OUTCOMES = {"refused", "another number of records", "all records", "one record bad", "records bad"}


def samples_of(kind):
    rng = np.random.default_rng(3)
    sizes = rng.integers(*SIZES[kind], COUNTS[kind]).tolist()
    return [rng.bytes(size) for size in sizes]


def write(path, kind):
    """Pack in many transactions, so that there are free pages, with old trees in them."""
    samples = samples_of(kind)
    writer = LMDBWriter(path)
    writer._transaction_bytes = 20_000
    for start in range(0, len(samples), 50):
        part = samples[start : start + 50]
        writer.put_many([encode_record(f"{start + i}", data) for i, data in enumerate(part)])
    writer.finish()
    writer.close()
    return samples


class Layout:
    """Where what lies in a whole file: page numbers by kind, and the values within the leaves."""

    def __init__(self, data):
        metas = [struct.unpack_from("<48xQQQ", data, n * PAGE + 40 + 40) for n in (0, 1)]
        root, last, _ = max(metas, key=lambda meta: meta[2])
        self.data = data
        self.end = (last + 1) * PAGE
        self.pages = {"meta": [0, 1], "branch": [], "leaf": [], "overflow": []}
        self.values = []  # start, stop, key
        self._walk(root)
        used = {page for pages in self.pages.values() for page in pages}
        self.pages["free"] = [page for page in range(last + 1) if page not in used]

    def _walk(self, page):
        base = page * PAGE
        _, _, flags, lower, _ = struct.unpack_from("<QHHHH", self.data, base)
        self.pages["branch" if flags == 1 else "leaf"].append(page)
        for (at,) in struct.iter_unpack("<H", self.data[base + 16 : base + lower]):
            low, high, kind, key_bytes = struct.unpack_from("<HHHH", self.data, base + at)
            value = base + at + 8 + key_bytes
            if flags == 1:
                self._walk(low | high << 16 | kind << 32)
            elif kind & 1:
                (first,) = struct.unpack_from("<Q", self.data, value)
                stop = first + (16 + (low | high << 16) + PAGE - 1) // PAGE
                self.pages["overflow"] += range(first, stop)
            else:
                stop = value + (low | high << 16)
                self.values.append((value, stop, self.data[value - key_bytes : value]))

    def value_at(self, place):
        """The key whose value, in a leaf, a byte belongs to, and which byte of it; or None, 0."""
        found = ((key, place - start) for start, stop, key in self.values if start <= place < stop)
        return next(found, (None, 0))


def damaged(rng, layout):
    """Return what was damaged, the place of a single byte if it was one, and the new file."""
    data = bytearray(layout.data)
    parts = [part for part in layout.pages if layout.pages[part]]
    if len(data) > layout.end:
        parts.append("sums")
    part = str(rng.choice([*parts, "size"]))
    if part == "size":
        return *_truncated(rng, layout), None
    if part == "sums":
        place = int(rng.integers(layout.end, len(data)))
        data[place] ^= 1 << rng.integers(8)
        return part, bytes(data), place
    page = int(rng.choice(layout.pages[part]))
    start = page * PAGE
    way = rng.integers(6)
    if way < 3:
        # Half of them in the header of the page and the numbers that follow it.
        place = start + int(rng.integers(PAGE if rng.integers(2) else 160))
        data[place] ^= 1 << rng.integers(8)
        return part, bytes(data), place
    if way == 3:
        data[start : start + PAGE] = bytes(PAGE)
    elif way == 4:
        sector = start + 512 * int(rng.integers(8))
        data[sector : sector + 512] = rng.bytes(512)
    else:
        other = PAGE * int(rng.integers(layout.end // PAGE))
        data[start : start + PAGE] = layout.data[other : other + PAGE]
    return f"{part}, a whole piece", bytes(data), None


def _truncated(rng, layout):
    pages = layout.end // PAGE
    stops = [
        int(rng.integers(pages)) * PAGE,
        int(rng.integers(pages)) * PAGE + int(rng.integers(PAGE)),
        layout.end + int(rng.integers(-20, 21)),
        len(layout.data) - int(rng.integers(1, 40)),
    ]
    stop = stops[rng.integers(4)]
    return ("cut behind its pages" if stop >= layout.end else "cut"), layout.data[:stop]


def read(path, samples):
    """Return what comes of reading a file: a dict that JSON can hold."""
    try:
        store = LMDBStore(path)
        if len(store) != len(samples):
            return {"outcome": "another number of records"}
    except StoreError as error:
        return {"outcome": "refused", "error": str(error)}
    bad = wrong = 0
    try:
        wrong = sum(r.sample != s for r, s in zip(store.scan(), samples, strict=True))
    except StoreError:
        for position, sample in enumerate(samples):
            try:
                wrong += store.get_many([position])[0].sample != sample
            except StoreError as error:
                bad += f"{position}" in str(error)
    outcome = "all records" if not bad else "one record bad" if bad == 1 else "records bad"
    return {"outcome": outcome, "wrong": wrong}


def read_apart(path, samples):
    """The same in a process of its own; the outcome may be the signal that ended it."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # else it would tell of the signals that are looked for here
        signal.alarm(LONGEST_S)
        try:
            said = read(path, samples)
        except BaseException as error:
            said = {"outcome": f"{type(error).__name__}: {error}"}
        os.write(sink, json.dumps(said).encode())
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return {"outcome": signal.Signals(-code).name}
    return json.loads(said)


def complaint(layout, part, place, path, said):
    """Return what is wrong with an outcome; None if it is what has to be."""
    outcome, error = said["outcome"], said.get("error", "")
    if len(layout.data) == layout.end:  # a file without checksums: it must not end the process
        return None if outcome in OUTCOMES else f"{outcome} {error}"
    if outcome == "refused" and str(path) not in error:
        return "the file is not named"
    if said.get("wrong"):
        return "other samples than were packed, without an error"
    allowed = {
        "overflow": {"all records", "one record bad", "refused"},
        "overflow, a whole piece": {"all records", "one record bad", "refused"},
        "free": {"all records"},
        "free, a whole piece": {"all records"},
        "sums": {"all records", "refused"},
        "cut behind its pages": {"all records", "refused"},
        "leaf, a whole piece": {"refused", "one record bad", "records bad"},
    }.get(part, {"refused"})
    if part == "meta" and place % PAGE in range(136, 144):
        # The last page: where a smaller one is still behind the tree, the checksums are not found,
        # as if other code had written over them, and the tree is whole.
        allowed = {"refused", "all records"}
    key, byte = layout.value_at(place) if part == "leaf" else (None, 0)
    if key is not None:  # within a record
        allowed = {"one record bad"} if len(key) == 8 else {"refused"}
        if byte in (5, 6, 7, 12, 13, 14, 15):  # zeros that mean nothing, docs/records.md
            allowed = {"all records"}
    if outcome not in allowed:
        return f"{outcome} {error}"
    if part == "meta" and "is unfinished" in error:  # its number is smaller: the other one counts
        return None
    is_of_tree = part in ("branch", "meta") or (part == "leaf" and key is None)
    if is_of_tree and place // PAGE != 0 and f"page {place // PAGE}, " not in error:
        return f"the page is not named: {error}"
    if (
        part.startswith("overflow")
        and error
        and not re.search("the (index|summary) of|MDB_CORRUPTED", error)
    ):
        return error
    return None


def main(folder, kind, seed, count, form):
    warnings.simplefilter("ignore")
    whole, path = Path(folder, "whole.lmdb"), Path(folder, "damaged.lmdb")
    samples = write(whole, kind)
    layout = Layout(whole.read_bytes())
    if form == "0.1":  # as it was written without checksums
        layout.data = layout.data[: layout.end]
    outcomes, wrong = collections.Counter(), []
    for number in range(int(count)):
        rng = np.random.default_rng((int(seed), number))
        part, data, place = damaged(rng, layout)
        if data == layout.data:
            continue
        path.write_bytes(data)
        said = read_apart(path, samples)
        outcomes[f"{part}: {said['outcome']}"] += 1
        if why := complaint(layout, part, place, path, said):
            wrong.append(f"{number}: {part} at {place}: {why}")
    said = {"outcomes": dict(sorted(outcomes.items())), "wrong": wrong}
    os.write(1, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
