# SPDX-License-Identifier: Apache-2.0
"""What verdicts promise, held against what the advised settings bring, with real loaders.

Each load runs under each setting; where the verdict advises another one, both run in turn, and the
line says by what factor throughput should have grown and did. Everything else that the machine does
shows in the table, so run it alone: `pytest -m slow -s tests/insight/test_gains_for_real.py`.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.torch import DataLoader  # noqa: E402

SECONDS = 1.0  # of a turn
ROUNDS = 3
WARM_UP = 12  # batches


class Load:
    """Samples that cost what `make` does."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 10**7

    def __getitem__(self, index):
        return self.make(index)


class AtOnce(Load):
    """The same, read by the batch."""

    def __getitems__(self, indices):
        return [self.make(index) for index in indices]


class Setting(NamedTuple):
    num_workers: int | str
    prefetch_factor: int | None = None
    backend: str = "process"
    at_once: bool = False


ROWS = np.zeros((64, 16), np.float32)
TOKENS = np.zeros((64, 2944), np.int64)
LARGE = np.zeros((64, 80_000), np.float32)
IMAGES = np.zeros((8, 3, 224, 224), np.float32)


def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def computing(index):
    burn(0.002)
    return index


def reading(index):
    time.sleep(0.005)
    return index


def decoding(index):
    burn(0.001)
    return IMAGES[index % 8]


class Case(NamedTuple):
    make: object
    seed: int | None = None
    step_s: float = 0.0


LOADS = {
    "ints": Case(int),
    "ints, seed=": Case(int, 0),
    "rows, seed=": Case(lambda index: ROWS[index % 64], 0),
    "CPU, 2 ms": Case(computing),
    "waiting, 5 ms": Case(reading),
    "10 MB, trivial reads": Case(lambda index: LARGE[index % 64]),
    "slow consumer": Case(lambda index: ROWS[index % 64], step_s=0.02),
    "tokens, 23 kB": Case(lambda index: TOKENS[index % 64]),
    "float32 images": Case(decoding),
}
SETTINGS = [*map(Setting, (0, 1, 2, 3)), Setting(1, backend="thread"), Setting("auto")]


def run(case, setting):
    """Return batches per second of a turn, and the verdict."""
    loader = DataLoader(
        (AtOnce if setting.at_once else Load)(case.make),
        batch_size=32,
        seed=case.seed,
        num_workers=setting.num_workers,
        prefetch_factor=setting.prefetch_factor,
        backend=setting.backend,
    )
    batches = iter(loader)
    for _ in range(60 if setting.num_workers == "auto" else WARM_UP):
        next(batches)
    count, begun = 0, time.monotonic()
    while (took_s := time.monotonic() - begun) < SECONDS:
        next(batches)
        count += 1
        time.sleep(case.step_s)
    return count / took_s, loader.stats().verdict


def advised(setting, verdict):
    """Return the setting that a verdict names; the present one if it names none."""
    found = dict(re.findall(r"(num_workers|prefetch_factor)=(\d+)", verdict.remedy))
    changed = {name: int(value) for name, value in found.items()}
    if 'backend="process"' in verdict.remedy:
        changed["backend"] = "process"
    return setting._replace(**changed, at_once=verdict.bottleneck == "seeding")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.num_workers} {s.backend}")
def test_an_advised_setting_is_not_slower_than_the_one_it_replaces(name, setting):
    case = LOADS[name]
    _, verdict = run(case, setting)
    other = advised(setting, verdict)
    line = f"{name:22} {setting.num_workers!s:>4} {setting.backend:7} {verdict.bottleneck:12}"
    if other == setting:
        sys.stdout.write(f"\n{line} keeps")
        return
    turns = [(run(case, setting)[0], run(case, other)[0]) for _ in range(ROUNDS)]
    gain = statistics.median(after / before for before, after in turns)
    promised = f"{verdict.expected_gain or 0:.2f}"
    sys.stdout.write(f"\n{line} promised {promised}, came {gain:.2f}: {tuple(other)}")
    assert gain >= 0.9  # what a quiet machine may do to the median of three
