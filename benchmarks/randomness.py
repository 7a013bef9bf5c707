# SPDX-License-Identifier: Apache-2.0
"""What do random numbers cost that every sample has to itself?

Question
    Microseconds per sample, for: seeding the global generators of `random`, `numpy.random` and
    torch before it; its first `sample_rng()`; a whole epoch of a dataset that does nothing, in
    batches of 64, with 0 and 2 workers. And microseconds per batch, without workers, for keeping
    the user's global generators and putting them back.

Method
    by hand    What people write into `__getitem__` today: `random.seed`, `np.random.seed` and
               `torch.manual_seed`, with a number that is made of a seed and the index.
    penstock   The calls that a loader with `seed=` makes: `SampleStreams.begin_sample`; the first
               `sample_rng()` after it, between two looks at the clock; `GlobalStates.now()` and
               `restore()`.

    Calls: the mean of 5,000, torch loaded; the least of five such means. What the generators give
    is looked at: positions must draw different numbers, and the same position the same.
    Epochs: 32,000 samples of 8 bytes. A checked epoch that is not timed, then as many as it takes
    to fill a second, with the same workers (`persistent_workers`): torch's loader and Penstock's as
    they are; torch's over a dataset that seeds by hand; Penstock's with `seed=`. The targets for
    penstock are < 15 us for `begin_sample` and < 2 us for `sample_rng()`.

Left out
    Drawing. Shuffling. Start of the workers.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/randomness.py --save

Result
    2026-11-21, 2 rounds, medians, us:

    a call                              an epoch, per sample          0 workers   2 workers
    seeding by hand        115          torch                              0.50        23.5
    begin_sample            13.5        torch, seeding by hand           163         164
    sample_rng(), first      1.80       penstock                           0.54         2.4
    sample_rng(), again      0.13       penstock, seed=                   16.7         10.8
    now() and restore()     79

    The two rounds of each call differ by less than 1 %; an earlier run had begin_sample at 13.9 and
    sample_rng() at 1.90: both targets are met with little to spare. Of the 115 us by hand, 111 are
    `torch.manual_seed`, which formats the stack for every kind of device that is not initialised.
    Only `torch.default_generator` takes 1.1, `random` 4.7 and numpy 1.6: seeding these with 32 bits
    each would cost 7, half of what Penstock takes for whole states.

    So a sample that does nothing becomes 5 to 31 times as dear by `seed=`. The 79 us come once per
    batch, and only without workers: of the 16.7, 1.2.

What it does not show
    That the numbers are good, or the same for any number of workers: tests/torch/test_seeded.py
    does. By hand, numpy and torch get the same state and run in step; what that can do to data is
    not shown either. `torch.manual_seed` where an accelerator is in use.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from _meter import Meter
from _plain_dataset import EightByteSamples
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable

_BATCH_SIZE = 64
_SEED = 7
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Size:
    """How many calls, how many batches to an epoch, and for how long epochs follow each other."""

    num_calls: int
    num_batches: int
    least_s: float


def seed_by_hand(index: int) -> None:
    """Seed the three global generators; torch is loaded by then."""
    seed = _SEED * 1_000_003 + index
    random.seed(seed)
    np.random.seed(seed)
    sys.modules["torch"].manual_seed(seed)


class SeededByHand(EightByteSamples):
    """Seeds before each sample, as if it were to be augmented."""

    def __getitem__(self, index: int) -> np.int64:
        """Return a scalar of 8 bytes."""
        seed_by_hand(index)
        return super().__getitem__(index)


def microseconds(call: Callable[[int], object], num_calls: int) -> float:
    """Return what a call costs, with a loop around it: the least of some means."""
    means = []
    for repeat in range(_REPEATS):
        numbers = range(repeat * num_calls, (repeat + 1) * num_calls)
        start_s = time.perf_counter()
        for number in numbers:
            call(number)
        means.append((time.perf_counter() - start_s) / num_calls * 1e6)
    return min(means)


def draw() -> tuple[float, ...]:
    """Return a number of each global generator; torch is loaded by then."""
    return random.random(), np.random.random(), sys.modules["torch"].rand(()).item()


def check_draws(
    seed: Callable[[int], object], draw: Callable[[], tuple[float, ...]] = draw
) -> None:
    """Look at what is drawn after seeding: each position has numbers of its own, and keeps them."""

    def drawn(position: int) -> tuple[float, ...]:
        seed(position)
        return draw()

    numbers = [drawn(position) for position in range(64)]
    check(all(len(set(column)) == 64 for column in zip(*numbers, strict=True)), "draws are equal")
    check([drawn(position) for position in range(64)] == numbers, "draws differ from themselves")


def call_by_hand(size: Size) -> Reading:
    """Seed by hand."""
    import torch  # noqa: F401 - `seed_by_hand` needs it loaded

    check_draws(seed_by_hand)
    with Meter() as meter:
        value = microseconds(seed_by_hand, size.num_calls)
    return Reading.of(meter, value, _REPEATS * size.num_calls)


def call_begin_sample(size: Size) -> Reading:
    """Seed for a sample; "begin_sample" is the whole of it."""
    import torch  # noqa: F401 - a third generator to seed

    from penstock.randomness.samples import SampleStreams

    streams = SampleStreams(_SEED, 0)
    with streams.active(isolated=True):
        check_draws(streams.begin_sample)
        with Meter() as meter:
            value = microseconds(streams.begin_sample, size.num_calls)
    return Reading.of(meter, value, _REPEATS * size.num_calls)


def call_sample_rng(size: Size) -> Reading:
    """Ask for a sample's own generator: the first time in the sample, and again."""
    import torch  # noqa: F401 - a third generator to seed

    from penstock import sample_rng
    from penstock.randomness.samples import SampleStreams

    streams = SampleStreams(_SEED, 0)

    def first_us() -> float:
        spent_s = 0.0
        for position in range(size.num_calls):
            streams.begin_sample(position)
            start_s = time.perf_counter()
            sample_rng()
            spent_s += time.perf_counter() - start_s
        return spent_s / size.num_calls * 1e6

    with streams.active(isolated=True):
        check_draws(streams.begin_sample, lambda: (sample_rng().random(), sample_rng().random()))
        with Meter() as meter:
            value = min(first_us() for _ in range(_REPEATS))
            again_us = microseconds(lambda _: sample_rng(), size.num_calls)
    return Reading.of(meter, value, 2 * _REPEATS * size.num_calls, {"again us": again_us})


def call_global_states(size: Size) -> Reading:
    """Keep the user's generators, and put them back."""
    import torch  # noqa: F401 - a third generator

    from penstock.randomness.generators import GlobalStates

    states = GlobalStates.now()
    numbers = draw()
    states.restore()
    check(draw() == numbers, "the states were not restored")
    num_calls = size.num_calls // 10
    with Meter() as meter:
        now_us = microseconds(lambda _: GlobalStates.now(), num_calls)
        restore_us = microseconds(lambda _: states.restore(), num_calls)
    more = {"now us": now_us, "restore us": restore_us}
    return Reading.of(meter, now_us + restore_us, 2 * _REPEATS * num_calls, more)


def read(
    size: Size,
    library: Literal["torch", "penstock"],
    num_workers: int,
    kind: type[EightByteSamples] = EightByteSamples,
    **options: Any,  # noqa: ANN401
) -> Reading:
    """Read some epochs after a checked one."""
    import torch  # noqa: F401 - a third generator to seed, in workers too

    loader = data_loader(library)(
        kind(size.num_batches * _BATCH_SIZE),
        batch_size=_BATCH_SIZE,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        **options,
    )
    for step, batch in enumerate(loader):
        right = list(range(step * _BATCH_SIZE, (step + 1) * _BATCH_SIZE))
        check(batch.tolist() == right, f"batch {step} is {batch.tolist()}, not {right}")
    num_epochs = num_samples = 0
    with Meter() as meter:
        while num_epochs == 0 or meter.elapsed_s() < size.least_s:
            num_samples += sum(len(batch) for batch in loader)
            num_epochs += 1
    check(num_samples == num_epochs * len(loader.dataset), f"{num_samples} samples came")
    value = meter.wall_s / num_samples * 1e6
    return Reading.of(meter, value, num_epochs * size.num_batches)


_EPOCHS: dict[str, dict[str, Any]] = {
    "torch": {"library": "torch"},
    "torch, seeding by hand": {"library": "torch", "kind": SeededByHand},
    "penstock": {"library": "penstock"},
    "penstock, seed=": {"library": "penstock", "seed": _SEED},
}

BENCHMARK = Benchmark(
    file=__file__,
    unit="us",
    better="lower",
    contenders={
        "by hand, seed": call_by_hand,
        "penstock, begin_sample": call_begin_sample,
        "penstock, sample_rng": call_sample_rng,
        "penstock, now and restore": call_global_states,
        **{
            f"{name}, {num_workers} workers": partial(read, num_workers=num_workers, **options)
            for num_workers in (0, 2)
            for name, options in _EPOCHS.items()
        },
    },
    full=Size(num_calls=5_000, num_batches=500, least_s=1.0),
    smoke=Size(num_calls=100, num_batches=10, least_s=0.0),
    targets=(
        Target("penstock, begin_sample", at_most=15.0),
        Target("penstock, sample_rng", at_most=2.0),
        Target("penstock, begin_sample", "by hand, seed"),
        *(
            Target(f"penstock, seed=, {num_workers} workers", f"{name}, {num_workers} workers")
            for num_workers in (0, 2)
            for name in ("torch, seeding by hand", "penstock")
        ),
    ),
    rounds=2,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
