# SPDX-License-Identifier: Apache-2.0
"""What does it cost to be able to stop at any batch, and to go on from there?

Question
    10 million samples, shuffled, batches of 16. In the middle of the epoch, after 50,000 batches:
    microseconds per `state_dict()`, and bytes of the state. Then, in a loader that has just been
    made: seconds from `load_state_dict` and `iter` to the first batch, less the seconds from `iter`
    to the first batch where nothing was loaded.

Method
    torchdata  `torchdata.stateful_dataloader.StatefulDataLoader(shuffle=True, generator=...)`, with
               its own sampler, which is the one that it can restore by state.
    penstock   `penstock.torch.DataLoader(shuffle=True, seed=7)`.

    The dataset is `range`, so that nothing but the loader is timed. First each loader gives 50,000
    batches ("us/batch"). Then `state_dict()` is called 1000 times, and batch 50,000 is kept. Starts
    and resumes take turns, three of each, every one in a new loader; medians are taken. Workers
    start within both, and end outside. The state passes through JSON, or through pickle if JSON
    does not take it, and "state B" is its size there. Every resumed loader must give the batch that
    was kept, and every fresh one the first batch of the run. The targets are < 20 us and < 0.05 s
    for penstock.

Left out
    Making the loader. Writing the state to a disk. What the samples of one batch cost.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6, torchdata 0.11.0

Command
    python benchmarks/resume.py --save

Result
    2026-11-21, 2 rounds, medians:

                          fresh s   resume s   difference s   state_dict us   state
    torchdata, 0 workers    0.554      2.592          2.04            32.5    5731 B, pickle
    penstock, 0 workers     0.0012     0.0013         0.0001           5.6     266 B, JSON
    torchdata, 2 workers    1.503      3.820          2.32             0.3    5942 B, pickle
    penstock, 2 workers     0.0194     0.0188        -0.0006           7.1     266 B, JSON

    The differences of the two rounds are within 0.4 s and 0.007 s. Below 0 means that none can be
    told; each resume follows a fresh start in the same process. torchdata draws the permutation
    anew, as a list of 10 million Python integers, and takes 800,000 of them one by one. With
    workers its `state_dict` hands over a snapshot that it has made with each batch.

    The 50,000 batches before took, in us per batch: torchdata 17 and 1153 (0 and 2 workers),
    penstock 330 and 269. Without workers penstock is 20 times slower here, since `seed=` seeds
    three global generators before each of 16 samples; see randomness.py.

What it does not show
    Iterable datasets: both loaders call the dataset's own `load_state_dict`, or replay. Samplers of
    the user: both replay them, unless they offer more. Datasets that take long to read.
"""

from __future__ import annotations

import json
import pickle
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable

_BATCH_SIZE = 16
_SEED = 7


@dataclass(frozen=True, slots=True)
class Size:
    """How far a run goes before it is resumed, and how often it is.

    Attributes:
        num_samples: Of the dataset.
        num_batches: Given before the state is taken.
        num_states: Calls of `state_dict`.
        num_resumes: As many fresh starts are made.
    """

    num_samples: int
    num_batches: int
    num_states: int
    num_resumes: int


def loader_of(library: Literal["torchdata", "penstock"], size: Size, num_workers: int) -> Any:  # noqa: ANN401
    """Return a new loader, as its documentation has it."""
    options = {"batch_size": _BATCH_SIZE, "shuffle": True, "num_workers": num_workers}
    if library == "penstock":
        return data_loader("penstock")(range(size.num_samples), seed=_SEED, **options)
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(_SEED)
    return StatefulDataLoader(range(size.num_samples), generator=generator, **options)


def stored(state: Any) -> tuple[int, Callable[[], Any]]:  # noqa: ANN401
    """Return the bytes of a state when written, and what reads it again."""
    try:
        text = json.dumps(state)
    except TypeError:
        data = pickle.dumps(state)
        return len(data), partial(pickle.loads, data)
    return len(text), partial(json.loads, text)


def first_of(loader: Any, saved: Any = None) -> tuple[list[int], float]:  # noqa: ANN401
    """Begin an epoch, or go on in one; return its next batch, and the seconds it took."""
    start_s = time.perf_counter()
    if saved is not None:
        loader.load_state_dict(saved)
    batches = iter(loader)  # kept: the end of its workers is not timed
    batch = next(batches)
    return batch.tolist(), time.perf_counter() - start_s


def measure(size: Size, library: Literal["torchdata", "penstock"], num_workers: int) -> Reading:
    """Stop after `num_batches`, and go on."""
    make = partial(loader_of, library, size, num_workers)
    loader = make()
    batches = iter(loader)
    first = next(batches).tolist()
    start_s = time.perf_counter()
    for _ in islice(batches, size.num_batches - 1):
        pass
    run_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for _ in range(size.num_states):
        state = loader.state_dict()
    state_s = (time.perf_counter() - start_s) / size.num_states
    right = next(batches).tolist()
    del batches, loader
    num_bytes, read = stored(state)
    del state
    fresh_s: list[float] = []
    resume_s: list[float] = []
    with Meter() as meter:
        for _ in range(size.num_resumes):
            batch, seconds = first_of(make())
            fresh_s.append(seconds)
            check(batch == first, f"a fresh run began with {batch}, not {first}")
            batch, seconds = first_of(make(), read())
            resume_s.append(seconds)
            check(batch == right, f"the resumed run went on with {batch}, not {right}")
    more = {
        "us/batch": run_s / (size.num_batches - 1) * 1e6,
        "state us": state_s * 1e6,
        "state B": float(num_bytes),
        "fresh s": statistics.median(fresh_s),
        "resume s": statistics.median(resume_s),
    }
    return Reading.of(meter, more["resume s"] - more["fresh s"], 2 * size.num_resumes, more)


_LIBRARIES: tuple[Literal["torchdata", "penstock"], ...] = ("torchdata", "penstock")
_WORKERS = (0, 2)

BENCHMARK = Benchmark(
    file=__file__,
    unit="s more than a start",
    better="lower",
    contenders={
        f"{library}, {num_workers} workers": partial(
            measure, library=library, num_workers=num_workers
        )
        for num_workers in _WORKERS
        for library in _LIBRARIES
    },
    full=Size(num_samples=10_000_000, num_batches=50_000, num_states=1000, num_resumes=3),
    smoke=Size(num_samples=2_000, num_batches=50, num_states=3, num_resumes=2),
    targets=tuple(
        target
        for name in (f"penstock, {num_workers} workers" for num_workers in _WORKERS)
        for target in (Target(name, at_most=0.05), Target(name, at_most=20.0, figure="state us"))
    ),
    rounds=2,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
