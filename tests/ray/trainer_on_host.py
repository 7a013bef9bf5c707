# SPDX-License-Identifier: Apache-2.0
"""A program that trains on one host with workers on another.

`python trainer_on_host.py ADDRESS KIND LOG PIPE` writes `step K DIGEST` for each batch as it comes,
and `done` at the end of the epoch. PIPE is the descriptor that it writes to, as Ray prints whatever
it likes. Each sample that is read, wherever that is, adds a line to the file LOG, which all hosts
of a test share.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import FaultPolicy, Loader, Ray, sample_rng
from penstock.data import IterableDataset, shard

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_STEPS = 160
BATCH_SIZE = 16
SAMPLE_BYTES = 2**16  # a batch of 1 MiB lies in Ray's object store and crosses the link from there
SAMPLE_S = 0.0015  # so that the epoch is far from its end when the link is cut


KINDS = ("map", "iterable")


class Reader:
    """Reads sample `index`: itself, then noise that is its own."""

    def __init__(self, log: str | None) -> None:
        self.log = log

    def read(self, index: int) -> np.ndarray:
        if self.log is not None:
            time.sleep(SAMPLE_S)  # a disk's time
            file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, b"%d\n" % index)  # one write, so that lines of two workers stay whole
            os.close(file)
        noise = sample_rng().integers(0, 256, SAMPLE_BYTES, np.uint8)
        noise[:8] = np.frombuffer(np.int64(index).tobytes(), np.uint8)
        return noise


class Noise(Reader):
    """Samples by number."""

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> np.ndarray:
        return self.read(index)


class NoiseStream(Reader, IterableDataset):
    """The same in turn, each worker its share; without a state, so a lost place is read again."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.read(index) for index in shard(range(NUM_STEPS * BATCH_SIZE)))


def open_loader(kind: str, log: str | None = None, **arguments: Any) -> Loader:
    dataset = NoiseStream(log) if kind == "iterable" else Noise(log)
    is_shuffled = kind == "map"
    # No death is forgiven: that of a machine is not the work's fault, so it must not be counted.
    policy = FaultPolicy(max_respawns=0)
    return Loader(dataset, BATCH_SIZE, shuffle=is_shuffled, seed=11, on_error=policy, **arguments)


def digest_of(batch: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(batch).data, digest_size=12).hexdigest()


def main() -> None:
    address, kind, log, pipe = sys.argv[1:]
    far = Ray(address, resources={"far": 1})
    loader = open_loader(kind, log, backend=far, num_workers=2)
    with os.fdopen(int(pipe), "w", buffering=1) as out:  # a line is written when it ends
        for step, batch in enumerate(loader):
            out.write(f"step {step} {digest_of(batch)}\n")
        out.write("done\n")


if __name__ == "__main__":
    main()
