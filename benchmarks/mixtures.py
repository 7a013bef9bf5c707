# SPDX-License-Identifier: Apache-2.0
"""What does a mixture of datasets cost whose shares change over the run?

Question
    Nanoseconds per index of a mixture of eight sources, the deviation of the shares of 10,240 draws
    from those requested, the time to resume at draw 12.8 million, and the size of a state.

Method
    Sources of 1,000 to 10 million samples, with shares of 0.5 to 40 %. 10 million indices, in one
    epoch, taken as a loader takes them: 16,384 at a time. Shares that change jump at draw 2
    million, and go back in a straight line from draw 3 million to draw 6 million.

    penstock             `MixtureSampler` with constant weights: the whole epoch is shuffled.
    penstock, schedule   The same with the changing weights.
    penstock, 1 of 64    The same on one of 64 ranks: time per index of that rank, which has 10
                         million / 64.
    numpy                By hand: `choice` of a source for each draw, and a permutation of each
                         source, made anew when it is used up.
    torch                `WeightedRandomSampler`, a weight for each sample, with replacement.
    grain                `MapDataset.mix` of shuffled ranges, read in the same thread.
    huggingface          `interleave_datasets` of streams, with probabilities.

    The draws are cut into pieces of 10,240, ten blocks of a schedule; with a schedule, only the
    draws after its last change. "worst share" is the largest difference, in draws, between a
    source's count in a piece and its share of it. Grain and Hugging Face draw 200,000 indices,
    because they yield Python objects, one by one.

    These two may be in another environment: --peers /path/to/its/python, or PENSTOCK_BENCH_PEERS. A
    library that is missing there is left out.

Left out
    Reading samples.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6; grain 0.2.18, datasets 5.2.0

Command
    python benchmarks/mixtures.py --peers PYTHON --save

Result
    2026-11-27, 3 rounds, medians (least - greatest). Other programs used the cores at times; on
    the idle machine, a schedule took some 190 ns.

                            ns/index                       worst share   CPU ns/index
    penstock                   287 (227    - 330   )        160 draws            225
    penstock, schedule         423 (332    - 465   )          1.2                331
    penstock, 1 of 64        4,650 (4,550  - 5,710 )                           3,900
    numpy                      131 (104    - 157   )        178                  130
    torch                      766 (734    - 844   )        178                  759
    grain                   32,200 (27,400 - 35,000)          1               34,900
    huggingface             50,700 (40,700 - 55,000)        130               67,900

    What is drawn by hand costs a third, and is off by up to 178 of 10,240 draws; a schedule by 1.2,
    as Grain, which interleaves, by 1. A resume took 4.5 ms, the state has 261 bytes. A rank
    computes the blocks of all ranks: with 64 of them, its indices take 14 times as long. The peak
    memory that is saved with these figures includes all indices, which are kept to be checked.

What it does not show
    That no sample is drawn again before all others of its source: tests/sampling show it. Grain
    gives that, too, and so do Hugging Face's streams, which are not shuffled.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _meter import Meter
from _peers import PeersBenchmark, peers_python
from _runner import Reading, Target, check

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HERE = Path(__file__).parent
_LENGTHS = (10_000_000, 3_000_000, 1_000_000, 500_000, 200_000, 50_000, 10_000, 1_000)
_WEIGHTS = (80, 40, 30, 20, 16, 8, 5, 1)
_LATER = (10, 20, 30, 40, 50, 30, 19, 1)
_BLOCK = 1 << 14
_PIECE = 10_240
_STEP = 12_800_000
_NEEDS = {"grain": ["grain"], "huggingface": ["datasets"]}


@dataclass(frozen=True, slots=True)
class Size:
    """How many indices are drawn, by us and by peers."""

    num_draws: int
    num_for_peers: int


def schedule(size: Size) -> list[Any]:
    jump, back = size.num_draws // 5, size.num_draws * 3 // 5
    return [(0, _WEIGHTS), (jump, _LATER), (jump + jump // 2, back, _WEIGHTS)]


def worst_share(sources: NDArray[np.integer[Any]], weights: tuple[int, ...]) -> float:
    """Return the largest deviation of a source, in draws, over the pieces of `_PIECE` draws."""
    pieces = sources[: len(sources) // _PIECE * _PIECE].reshape(-1, _PIECE)
    wanted = np.array(weights) / sum(weights) * _PIECE
    counts = [np.bincount(piece, minlength=len(weights)) for piece in pieces]
    return float(np.abs(counts - wanted).max()) if len(pieces) else 0.0


def sources_of(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(np.cumsum(_LENGTHS), indices, side="right")


def penstock(size: Size, *, changes: bool, num_ranks: int = 1) -> Reading:
    """Take an epoch of a mixture, or one rank's share of it."""
    from penstock.sampling import DistributedSampler, MixtureSampler

    def make() -> Any:  # noqa: ANN401
        weights: Any = schedule(size) if changes else _WEIGHTS
        mixture = MixtureSampler(_LENGTHS, weights, size.num_draws, seed=1)
        return mixture if num_ranks == 1 else DistributedSampler(mixture, num_ranks, 7)

    make().indices()[:10]
    with Meter() as meter:
        order = make().indices()
        taken = [order[start : start + _BLOCK] for start in range(0, len(order), _BLOCK)]
    drawn = np.concatenate(taken)
    check(0 <= drawn.min() <= drawn.max() < sum(_LENGTHS), "an index is outside")
    more = {}
    if num_ranks == 1:
        # With constant weights, shares are exact in the whole epoch only, which is shuffled.
        last = size.num_draws * 3 // 5 if changes else 0
        more["worst share"] = worst_share(sources_of(drawn[last:]), _WEIGHTS)
    if changes and num_ranks == 1:
        more |= resumed(make())
    return Reading.of(meter, meter.wall_s / len(drawn) * 1e9, len(taken), more)


def resumed(sampler: Any) -> dict[str, float]:  # noqa: ANN401
    """Return how long the first index takes after a resume, and the size of the state."""
    state = sampler.state_dict()
    state["epoch"], state["position"] = divmod(_STEP, sampler.num_samples)
    start_s = time.perf_counter()
    sampler.load_state_dict(state)
    first = next(iter(sampler))
    resumed_s = time.perf_counter() - start_s
    check(first == sampler.indices()[state["position"] :][0], "another index")
    return {"resume ms": 1e3 * resumed_s, "state bytes": float(len(json.dumps(state)))}


def numpy_by_hand(size: Size) -> Reading:
    rng = np.random.default_rng(1)
    starts = np.cumsum(_LENGTHS) - _LENGTHS
    taken = []
    with Meter() as meter:
        orders = [rng.permutation(length) for length in _LENGTHS]
        given = [0] * len(_LENGTHS)
        shares = np.array(_WEIGHTS) / sum(_WEIGHTS)
        for start in range(0, size.num_draws, _BLOCK):
            count = min(_BLOCK, size.num_draws - start)
            sources = rng.choice(len(_LENGTHS), count, p=shares)
            block = np.empty(count, np.int64)
            for source, length in enumerate(_LENGTHS):
                here = np.flatnonzero(sources == source)
                block[here] = starts[source] + np.take(
                    orders[source], given[source] + np.arange(len(here)), mode="wrap"
                )
                given[source] += len(here)
                if given[source] >= length:
                    orders[source] = rng.permutation(length)
                    given[source] -= length
            taken.append(block)
    more = {"worst share": worst_share(sources_of(np.concatenate(taken)), _WEIGHTS)}
    return Reading.of(meter, meter.wall_s / size.num_draws * 1e9, len(taken), more)


def torch_sampler(size: Size) -> Reading:
    import torch

    weights = np.repeat(np.array(_WEIGHTS) / _LENGTHS, _LENGTHS)
    with Meter() as meter:
        sampler = torch.utils.data.WeightedRandomSampler(
            torch.from_numpy(weights), size.num_draws, generator=torch.Generator().manual_seed(1)
        )
        drawn = np.fromiter(sampler, np.int64, size.num_draws)
    more = {"worst share": worst_share(sources_of(drawn), _WEIGHTS)}
    return Reading.of(meter, meter.wall_s / size.num_draws * 1e9, 1, more)


def peer(size: Size, *, way: str) -> Reading:
    """Have a peer draw in its own environment."""
    shares = np.array(_WEIGHTS) / sum(_WEIGHTS)
    words = [",".join(map(str, numbers)) for numbers in (_LENGTHS, shares.tolist())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sources.npy")
        command = [peers_python(), str(_HERE / "_mixture_peers.py"), way, str(path)]
        with Meter() as meter:
            done = subprocess.run(
                [*command, str(size.num_for_peers), *words],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        sources = np.load(path)
    check(len(sources) == size.num_for_peers, f"{len(sources)} draws")
    wall_s = float(done.stdout.split()[-1])
    more = {"worst share": worst_share(sources, _WEIGHTS)}
    return Reading.of(meter, wall_s / len(sources) * 1e9, 1, more)


BENCHMARK = PeersBenchmark(
    file=__file__,
    needs=_NEEDS,
    unit="ns/index",
    better="lower",
    contenders={
        "penstock": partial(penstock, changes=False),
        "penstock, schedule": partial(penstock, changes=True),
        "penstock, 1 of 64": partial(penstock, changes=True, num_ranks=64),
        "numpy": numpy_by_hand,
        "torch": torch_sampler,
        **{way: partial(peer, way=way) for way in _NEEDS},
    },
    full=Size(10_000_000, 200_000),
    smoke=Size(100_000, 11_000),
    targets=(
        Target("penstock, schedule", "numpy"),
        Target("penstock, schedule", "torch"),
        Target("penstock, schedule", at_most=10, figure="worst share"),
        Target("penstock, schedule", at_most=20, figure="resume ms"),
        Target("penstock, schedule", at_most=1000, figure="state bytes"),
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
