# SPDX-License-Identifier: Apache-2.0
"""How fast is packing into rows of tokens, how full are the rows, and how equal are the ranks?

Question
    10 million documents with long-tailed lengths, and the functions of Python's own standard
    library, in rows of 2,048 and 8,192 tokens: documents planned per second, padding, memory, how
    much the ranks of a step differ, and the time to resume at step 50,000.

Method
    Lengths: lognormal (median 403 tokens, mean 830); or the bytes of each function or class in the
    sources of the Python that runs, tests included, a byte being a token. A document longer than a
    row is cut beforehand, for all contenders alike.

    penstock            `PackingSampler`, 8 rows in a batch. Timed: making it, and all batches of an
                        epoch as arrays of indices, on one rank.
    torch, concat       What is often written by hand: documents in the order of torch.randperm are
                        joined, and cut at every row's end. No padding; documents are cut.
    torch, one a row    One document in each row: the padding without any packing.
    grain first, best   Grain's FirstFitPackIterDataset and BestFitPackIterDataset with 512 open
                        rows, on as many of the first documents as the name says; all tokens are
                        zeros. The time includes copying tokens, which is part of what they do.
    trl                 TRL's `pack_dataset(strategy="bfd")` on the same documents; the time
                        includes copying, too.

    "imbalance" is the largest load of 8 ranks divided by their mean load, less 1, averaged over
    steps of one row per rank (Penstock: 4,096 steps, of 2 million documents). A load is the tokens;
    or the sum of the documents' squared lengths, for which Penstock is given `cost=lengths**2`.
    Peers' rows go to the ranks by turns. "resume ms" is the time to load a state of step 50,000, or
    of the middle of a shorter epoch, and to get the next batch.

    Peers may be in another environment: --peers /path/to/its/python, or PENSTOCK_BENCH_PEERS. Those
    whose packages are missing are left out, and named.

Left out
    Reading tokens.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6; Grain 0.2.18, TRL 1.16.0

Command
    python benchmarks/packing.py --peers PYTHON --save

Result
    2026-11-27, 3 rounds; M documents/s; padding in percent of the places; imbalance in percent:

                                      M documents/s    padding   tokens   squares   peak MB
    11.4 million pieces, rows of 2,048
    penstock                                   4.22     0.0014   0.0001      0.18       456
    torch, concat (35 % cut)                  17.4      0        0          65
    torch, one a row                          37.5     65      162         293
    grain first, 30,000                        0.010    0.75     0.76       56
    grain best, 30,000                         0.008    0.62     0.63       56
    trl, 30,000                                0.026    0.20     0.21        5.8
    10.1 million pieces, rows of 8,192
    penstock                                   5.07     0.0004   0.00002     0.26       434
    torch, concat (10 % cut)                  22.0      0        0         115
    torch, one a row                          26.9     90      228         400
    grain first, 30,000                        0.010    0.14     0.14      142
    grain best, 30,000                         0.009    0.14     0.14      142
    trl, 30,000                                0.024    0.50     0.55       27
    standard library, 77,880 pieces, rows of 2,048
    penstock                                   1.65     0.0094   0.005       0.22        72
    grain best, 30,000                         0.010    0.30     0.30      101
    trl, 30,000                                0.034    0.27     0.27       13
    standard library, 75,023 pieces, rows of 8,192
    penstock                                   1.19     0.016    0.015       0.56        68
    grain best, 30,000                         0.007    0.13     0.13      195
    trl, 30,000                                0.033    1.03     1.1        50

    Making the sampler takes 0.5 s of the 2.7 s for 11.4 million pieces (22.6 M/s), and the batches
    of the epoch take the rest. Among few documents, most have a length of their own and are packed
    one by one: the library's 78,000 take 0.05 s in all. Resuming at step 50,000 (the library: in
    the middle) takes 1.4 to 4 ms, with a state of 253 bytes. TRL yields rows in the order of their
    longest document, so the rows of a step are alike. All targets are met.

What it does not show
    Whether a model learns as well from packed rows. How long Grain and TRL take for planning alone:
    they copy tokens as they pack. How much padding they would have with 10 million documents: with
    30,000, one or two last rows that are half empty are 0.1 % of the rows of 8,192.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _meter import Meter
from _peers import PeersBenchmark, peers_python
from _runner import Reading, Target, check

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_HERE: Final = Path(__file__).parent
_NEEDS: Final = {"grain-first": ["grain"], "grain-best": ["grain"], "trl": ["trl"]}
_NUM_RANKS: Final = 8
_MOST: Final = 2_000_000  # documents for the comparison of ranks
_STEP: Final = 50_000  # at which a run goes on
_FUNCTION: Final = re.compile(rb"\n(?=[ \t]*(?:async def|def|class) )")


@dataclass(frozen=True, slots=True)
class Size:
    """How many documents there are.

    Attributes:
        num_documents: Documents with long-tailed lengths.
        num_for_peers: Documents, of either kind, for the slower peers.
        num_files: Files of the standard library.
        num_steps: Steps in which ranks are compared.
    """

    num_documents: int
    num_for_peers: int
    num_files: int
    num_steps: int


def long_tailed(size: Size) -> npt.NDArray[np.int64]:
    """Return lengths that are distributed like those of texts of the web."""
    lengths = np.random.default_rng(0).lognormal(6, 1.2, size.num_documents)
    return lengths.astype(np.int64) + 1


@functools.cache
def standard_library(size: Size) -> npt.NDArray[np.int64]:
    """Return the bytes of the functions and classes of the standard library."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    own = [path for path in paths if "site-packages" not in path.parts]
    pieces = [_FUNCTION.split(path.read_bytes()) for path in own[: size.num_files]]
    lengths = np.array([len(piece) for parts in pieces for piece in parts if piece], np.int64)
    return np.random.default_rng(0).permutation(lengths)


def cut(lengths: npt.NDArray[np.int64], row_tokens: int) -> npt.NDArray[np.int64]:
    """Return the lengths after every document longer than a row is cut."""
    num_whole = lengths // row_tokens
    rests = lengths - num_whole * row_tokens
    pieces = np.concatenate((np.full(int(num_whole.sum()), row_tokens), rests[rests > 0]))
    return np.random.default_rng(1).permutation(pieces)


def imbalance(costs: npt.NDArray[np.float64]) -> float:
    """Return max / mean - 1 over ranks, averaged over steps; `costs` is (steps, ranks)."""
    return float((costs.max(axis=1) / costs.mean(axis=1)).mean() - 1)


def by_turns(costs: npt.NDArray[np.float64]) -> float:
    """Return the imbalance of rows that ranks take by turns."""
    num_steps = len(costs) // _NUM_RANKS
    return imbalance(costs[: num_steps * _NUM_RANKS].reshape(num_steps, _NUM_RANKS))


def figures(rows: npt.NDArray[np.float64], row_tokens: int) -> dict[str, float]:
    """Return the figures of rows, given the tokens and the squares in each."""
    return {
        "padding %": 100 * (1 - rows[0].sum() / (rows.shape[1] * row_tokens)),
        "imbalance %, tokens": 100 * by_turns(rows[0]),
        "imbalance %, squares": 100 * by_turns(rows[1]),
    }


def penstock(size: Size, lengths_of: Callable[[Size], Any], row_tokens: int) -> Reading:
    """Plan with Penstock."""
    from penstock.sampling import PackingSampler

    lengths = cut(lengths_of(size), row_tokens)
    list(PackingSampler(lengths[:1000], row_tokens).index_batches())
    with Meter() as meter:
        sampler = PackingSampler(lengths, row_tokens, _NUM_RANKS, seed=1, num_replicas=1, rank=0)
        made_s = meter.elapsed_s()
        num_batches = sum(1 for _ in sampler.index_batches())
    check(num_batches == len(sampler), f"{num_batches} batches, not {len(sampler)}")
    seen = np.zeros(len(lengths), np.uint8)
    for batch in sampler.index_batches():
        seen[batch] += 1
    check((seen == 1).all(), "a document does not come once")
    squares = lengths.astype(np.float64) ** 2
    more = {
        "packing M/s": len(lengths) / made_s / 1e6,
        "padding %": 100 * sampler.padding,
        "imbalance %, tokens": _of_ranks(size, lengths[:_MOST], row_tokens, None),
        "imbalance %, squares": _of_ranks(size, lengths[:_MOST], row_tokens, squares[:_MOST]),
        **_resumed(sampler),
    }
    return Reading.of(meter, len(lengths) / meter.wall_s / 1e6, num_batches, more)


def _of_ranks(size: Size, lengths: Any, row_tokens: int, cost: Any) -> float:  # noqa: ANN401
    from penstock.sampling import PackingSampler

    loads = []
    for rank in range(_NUM_RANKS):
        sampler = PackingSampler(
            lengths,
            row_tokens,
            drop_last=True,
            cost=cost,
            seed=1,
            num_replicas=_NUM_RANKS,
            rank=rank,
        )
        weights = lengths if cost is None else cost
        batches = zip(range(size.num_steps), sampler.index_batches(), strict=False)
        loads.append([float(weights[batch].sum()) for _, batch in batches])
    return 100 * imbalance(np.array(loads).T)


def _resumed(sampler: Any) -> dict[str, float]:  # noqa: ANN401
    step = min(_STEP, len(sampler) // 2)
    state = sampler.state_dict()
    state["position"] = step
    start_s = time.perf_counter()
    sampler.load_state_dict(state)
    batch = next(iter(sampler))
    resumed_s = time.perf_counter() - start_s
    expected = next(b for k, b in enumerate(sampler.index_batches()) if k == step)
    check(batch == expected.tolist(), f"step {step} is another one")
    return {"resume ms": 1e3 * resumed_s, "state bytes": float(len(json.dumps(state)))}


def one_a_row(size: Size, lengths_of: Callable[[Size], Any], row_tokens: int) -> Reading:
    """Give every document a row of its own."""
    import torch

    lengths = cut(lengths_of(size), row_tokens)
    with Meter() as meter:
        order = torch.randperm(len(lengths)).numpy()
    shuffled = lengths[order].astype(np.float64)
    more = figures(np.stack([shuffled, shuffled**2]), row_tokens)
    return Reading.of(meter, len(lengths) / meter.wall_s / 1e6, len(lengths), more)


def concatenated(size: Size, lengths_of: Callable[[Size], Any], row_tokens: int) -> Reading:
    """Join all documents, and cut at every row's end."""
    import torch

    lengths = cut(lengths_of(size), row_tokens)
    with Meter() as meter:
        shuffled = lengths[torch.randperm(len(lengths)).numpy()]
        ends = np.cumsum(shuffled)
    num_rows = -(-int(ends[-1]) // row_tokens)
    # Every end of a document or of a row is one of a piece.
    cuts = np.union1d(ends, np.arange(1, num_rows) * row_tokens)
    pieces = np.diff(cuts, prepend=0)
    row_of = (cuts - 1) // row_tokens
    rows = np.stack(
        [np.bincount(row_of, weights=pieces.astype(np.float64) ** power) for power in (1, 2)]
    )
    num_cut = len(pieces) - len(lengths)
    more = {**figures(rows, row_tokens), "documents cut %": 100 * num_cut / len(lengths)}
    return Reading.of(meter, len(lengths) / meter.wall_s / 1e6, num_rows, more)


def peer(size: Size, lengths_of: Callable[[Size], Any], row_tokens: int, *, way: str) -> Reading:
    """Have a peer pack in its own environment."""
    lengths = cut(lengths_of(size), row_tokens)[: size.num_for_peers]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "lengths.npy"), lengths)
        command = [peers_python(), str(_HERE / "_packing_peers.py"), way, folder, str(row_tokens)]
        with Meter() as meter:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows = np.load(Path(folder, "rows.npy"))
    check(rows[0].sum() == lengths.sum(), f"{rows[0].sum()} tokens of {lengths.sum()}")
    check(rows[0].max() <= row_tokens, f"a row has {rows[0].max()} tokens")
    wall_s = float(done.stdout.split()[-1])
    more = figures(rows, row_tokens)
    return Reading.of(meter, len(lengths) / wall_s / 1e6, rows.shape[1], more)


WAYS: Final[dict[str, Callable[..., Reading]]] = {
    "penstock": penstock,
    "torch, concat": concatenated,
    "torch, one a row": one_a_row,
    **{way: partial(peer, way=way) for way in _NEEDS},
}
CORPORA: Final = {"": long_tailed, "library, ": standard_library}

BENCHMARK = PeersBenchmark(
    file=__file__,
    needs=_NEEDS,
    unit="M documents/s",
    better="higher",
    contenders={
        f"{way}, {corpus}{row_tokens}": partial(run, lengths_of=lengths, row_tokens=row_tokens)
        for corpus, lengths in CORPORA.items()
        for row_tokens in (2048, 8192)
        for way, run in WAYS.items()
    },
    full=Size(10_000_000, 30_000, 100_000, 4096),
    smoke=Size(3_000, 300, 200, 16),
    targets=[
        target
        for corpus in CORPORA
        for row_tokens in (2048, 8192)
        for name in (f"penstock, {corpus}{row_tokens}",)
        for target in (
            *((Target(name, at_least=2),) if not corpus else ()),
            Target(name, f"grain-best, {corpus}{row_tokens}", at_most=1, figure="padding %"),
            Target(name, at_most=1, figure="imbalance %, tokens"),
            Target(name, at_most=1, figure="imbalance %, squares"),
        )
    ],
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
