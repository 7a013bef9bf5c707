# SPDX-License-Identifier: Apache-2.0
"""A long run under bad luck: a killed worker every second, and 3 % of the samples corrupt.

    python tests/process/soak.py 600

Half of the time workers are kept from epoch to epoch, half of the time not. Every epoch is held
against one that is made without workers: each good sample comes exactly once, in order, bit for bit
the same, and the failures are the corrupt samples, no other. What the main process holds (memory,
descriptors, threads, mapped slots) may not grow. Exits with code 1 at the first difference.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings

import numpy as np
import psutil

from penstock import Loader, sample_rng
from penstock.faults import FaultPolicy

LENGTH = 2000
CORRUPT = frozenset(range(7, LENGTH, 33))  # 3 %
NUM_WORKERS = 4
SAMPLE_S = 0.001
KILL_EVERY_S = 1.0
# What may be held more at the end than before. Memory: the allocator's whims, and the records of
# failures, of which a loader keeps 10,000: that many there are before the second quarter of ten
# minutes ends. Descriptors: a worker that died just now still has some. Slots: a worker may have
# two batches under way. What leaks with each batch, kill or epoch is far above it in ten minutes.
SLACK = {
    "rss_bytes": 8 << 20,
    "num_fds": NUM_WORKERS,
    "num_threads": 0,
    "num_slots": 2 * NUM_WORKERS,
}


class CorruptSample(Exception):
    """What reading a corrupt sample raises."""


class Samples:
    """A few KB each, in part drawn; with `pause_s` as slow as decoding is."""

    def __init__(self, pause_s):
        self.pause_s = pause_s

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index in CORRUPT:
            raise CorruptSample(f"checksum of sample {index}")
        time.sleep(self.pause_s)
        return {
            "index": index,
            "stored": np.arange(index, index + 300, dtype=np.float32),
            "drawn": sample_rng().random(300),
        }


def make_loader(pause_s, num_workers, *, persistent):
    return Loader(
        Samples(pause_s),
        batch_size=16,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=persistent,
        # A number, not a share: of a hundred shuffled samples now and then more than 5 % are bad.
        on_error=FaultPolicy("skip", max_failures=LENGTH // 20, max_respawns=10**6),
        seed=1,
    )


class Killer:
    """Kills one of the workers of the stream under way every second.

    Concurrency:
        `stream` is set by the main process's main thread; killing is done by a thread of its own.
    """

    def __init__(self):
        self.stream = None
        self.num_kills = 0
        self._over = threading.Event()
        self._draw = random.Random(0)
        self._thread = threading.Thread(target=self._run, name="killer")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _run(self):
        while not self._over.wait(KILL_EVERY_S):
            self._kill_one(self.stream)

    def _kill_one(self, stream):
        if stream is not None and (pids := _living(stream)):
            os.kill(self._draw.choice(pids), signal.SIGKILL)
            self.num_kills += 1


def _living(stream):
    """Return the workers that live, by /proc: asking the process objects would reap the dead."""
    pids = [process.pid for process in list(stream.backend.processes)]
    return [pid for pid in pids if _is_living_descendant(pid)]


def _is_living_descendant(pid):
    try:
        process = psutil.Process(pid)
        is_ours = os.getpid() in (parent.pid for parent in process.parents())
        return is_ours and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclasses.dataclass
class Holdings:
    """What the main process holds between two epochs."""

    rss_bytes: int
    num_fds: int
    num_threads: int
    num_slots: int

    @classmethod
    def now(cls):
        gc.collect()
        with open("/proc/self/maps") as maps:
            num_slots = sum("memfd:penstock" in line for line in maps)
        process = psutil.Process()
        rss_bytes = process.memory_info().rss
        return cls(rss_bytes, process.num_fds(), process.num_threads(), num_slots)


@dataclasses.dataclass
class Course:
    """What happened in one half of the soak."""

    num_epochs: int = 0
    num_samples: int = 0
    num_failures: int = 0
    num_respawns: int = 0
    loading_s: float = 0.0
    holdings: list[Holdings] = dataclasses.field(default_factory=list)


def check_epoch(loader, reference, course, killer=None):
    """Load an epoch and hold it against the same one made without workers."""
    begun = time.monotonic()
    iterator = iter(loader)
    stream = loader._stream or iterator  # with persistent workers, the one that lives on
    pids_seen = set()
    if killer is not None:
        killer.stream = stream
    good = 0
    batches = iter(reference)
    for batch in iterator:
        expected = next(batches)
        assert batch.keys() == expected.keys()
        for key in batch:
            assert batch[key].dtype == expected[key].dtype
            assert batch[key].tobytes() == expected[key].tobytes(), (key, batch["index"])
        good += len(batch["index"])
        pids_seen.update(process.pid for process in stream.backend.processes)
    if killer is not None:
        killer.stream = None
    course.loading_s += time.monotonic() - begun
    assert next(batches, None) is None
    assert good == LENGTH - len(CORRUPT)
    failures = [failure for failure in loader.failures if failure.epoch == stream.epoch.number]
    assert sorted(failure.index for failure in failures) == sorted(CORRUPT), failures
    assert {type(failure.error) for failure in failures} == {CorruptSample}, failures
    course.num_epochs += 1
    course.num_samples += good
    course.num_failures += len(failures)
    course.num_respawns += len(pids_seen) - NUM_WORKERS


def run_half(seconds, killer, *, persistent):
    """Load epochs for so long; the first one is not counted among the figures."""
    loader = make_loader(SAMPLE_S, NUM_WORKERS, persistent=persistent)
    reference = make_loader(0.0, 0, persistent=False)
    check_epoch(loader, reference, Course(), killer)
    course = Course()
    end = time.monotonic() + seconds
    while time.monotonic() < end or course.num_epochs < 4:
        check_epoch(loader, reference, course, killer)
        course.holdings.append(Holdings.now())
    return course


def assert_flat(holdings):
    """Check that the last quarter holds no more than the second did."""
    quarter = max(len(holdings) // 4, 1)
    early, late = holdings[quarter : 2 * quarter], holdings[-quarter:]
    for field in dataclasses.fields(Holdings):
        before, after = (max(getattr(each, field.name) for each in part) for part in (early, late))
        assert after <= before + SLACK[field.name], (field.name, before, after)


def samples_per_s_undisturbed():
    """Return the rate without the killer, over three epochs."""
    course = Course()
    loader = make_loader(SAMPLE_S, NUM_WORKERS, persistent=True)
    reference = make_loader(0.0, 0, persistent=False)
    for _ in range(3):
        check_epoch(loader, reference, course)
    return course.num_samples / course.loading_s


def main(seconds):
    faulthandler.dump_traceback_later(2 * seconds + 120, exit=True)
    warnings.simplefilter("ignore", UserWarning)  # each epoch's count of failures
    figures = {}
    with Killer() as killer:
        for persistent in (True, False):
            course = run_half(seconds / 2, killer, persistent=persistent)
            figures[f"persistent_workers={persistent}"] = summary(course)
            assert_flat(course.holdings)
    figures["kills"] = killer.num_kills
    figures["samples/s without killer"] = round(samples_per_s_undisturbed())
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    faulthandler.cancel_dump_traceback_later()


def summary(course):
    """Return the figures of one half, for people."""
    first, last = course.holdings[0], course.holdings[-1]
    return {
        "epochs": course.num_epochs,
        "samples": course.num_samples,
        "failures": course.num_failures,
        "respawns": course.num_respawns,
        "samples/s with killer": round(course.num_samples / course.loading_s),
        "at first": dataclasses.asdict(first),
        "at last": dataclasses.asdict(last),
    }


if __name__ == "__main__":
    logging.getLogger("penstock").setLevel(logging.ERROR)  # it tells every respawn
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0)
