# SPDX-License-Identifier: Apache-2.0
"""How many tokens per second come to the loop as packed rows, ready for a model?

Question
    Documents lie in a file of tokens, and it is known which of them share a row. What does it take
    to make batches of 8 rows of 8,192 tokens of them: input_ids, labels, position_ids,
    document_ids and cu_seqlens?

Method
    20 million tokens of 16 bits, in documents of lognormal length (median 300, mean 600). Penstock
    and torch get the same packs, of `PackingSampler`; Grain and TRL get such documents, too, of 5
    million tokens, and pack them.

    penstock       `penstock.torch.DataLoader` over `TokenFile`, with `PackedCollate`.
    torch          torch's `DataLoader` over the same file, mapped by numpy, a tensor for each
                   document, and a collate function as one writes it by hand: tensors for the batch,
                   filled document by document.
    grain          Grain packs as it loads: `FirstFitPackIterDataset` with 64 open rows over the
                   same documents, shuffled and read in the thread that packs, then `batch(8)`; with
                   workers, `mp_prefetch`. A batch has the tokens, positions and numbers of
                   documents, int32; no labels and no cu_seqlens.
    trl            TRL's `pack_dataset(strategy="bfd")` beforehand, not timed; then torch's
                   `DataLoader` over the rows, shuffled, with the collate function of its
                   `SFTTrainer` for `padding_free=True`. A batch is one long row without padding:
                   tokens, labels, positions, numbers of documents and cu_seqlens.
    trl-numpy      The same with the columns as arrays, `with_format("numpy")`, not as lists.
    ..., blocks    Blocks of 8,192 consecutive tokens without regard to documents, 8 in a batch,
                   input_ids alone: `TokenFile.blocks`; a slice of the mapped file in `__getitem__`.

    No workers, or 2. An epoch is timed, after one in which is checked that every token comes once,
    and where documents begin. Of Grain and TRL, the epoch is timed from its ninth batch on, as
    Grain's workers start with each epoch, and only the number and the sum of the tokens are
    checked. The consumer reads one number of each tensor.

    Peers may be in another environment: --peers /path/to/its/python, or PENSTOCK_BENCH_PEERS. Those
    whose packages are missing are left out, and named.

Left out
    Packing, but Grain's; tokenizing; reading from a disk: the file is in the page cache.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6; Grain 0.2.18, TRL 1.16.0

Command
    python benchmarks/token_batches.py --peers PYTHON --save

Result
    2026-11-27, 3 rounds, medians (least - greatest), M tokens/s:

                            torch                   penstock
    rows, no workers         11.2 (10.4 - 15.8)      72.3 (57.9 - 88.1)    6.45 x
    rows, 2 workers          10.3 ( 8.9 - 10.6)      58.3 (54.6 - 61.1)    5.64 x
    blocks, no workers      425   (406  - 444 )     949   (738  - 971 )    2.23 x
    blocks, 2 workers        57.2 (50.0 - 60.0)     225   (174  - 227 )    3.94 x

                            no workers                         2 workers
    grain                     6.03 ( 4.86 -  6.08)  12.0 x      3.46 ( 3.12 -  3.51)  16.9 x
    trl                       2.34 ( 1.97 -  2.55)  31.0 x      3.14 ( 3.07 -  3.26)  18.6 x
    trl-numpy                20.6  (19.9  - 21.0 )   3.51 x    13.3  (10.9  - 14.3 )   4.38 x

    The factors are Penstock's, of rows. CPU per batch of rows without workers, in ms: penstock 0.9,
    trl-numpy 6.3, grain 10.8, torch 10.9, trl 34.7. Most of torch's time goes into tensors for each
    document, and Grain's has packing in it. Workers bring no gain but to TRL's lists: the batch is
    cheap, and has to be carried.

What it does not show
    Copying to a GPU. How long packing takes: see packing.py.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from _meter import Meter
from _peers import PeersBenchmark, peers_python
from _runner import Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_HERE = Path(__file__).parent
_NEEDS = {  # modules of each peer
    "grain": ["grain"],
    "trl": ["trl", "accelerate"],
    "trl-numpy": ["trl", "accelerate"],
}
_ROWS = 8
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Size:
    """How much is loaded."""

    num_tokens: int
    max_tokens: int
    num_for_peers: int  # tokens; some peers are slow


class Mapped:
    """Documents of a mapped file, a tensor each; or blocks of one length."""

    def __init__(self, tokens: NDArray[np.uint16], bounds: NDArray[np.int64]) -> None:
        """Keep where they begin and end."""
        self._tokens, self._bounds = tokens, bounds.tolist()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        """Return a document as int64."""
        import torch

        start, stop = self._bounds[index], self._bounds[index + 1]
        return torch.from_numpy(self._tokens[start:stop].astype(np.int64))


def packed_by_hand(max_tokens: int, documents: Sequence[Any]) -> dict[str, Any]:
    """Return a batch of tensors, document by document."""
    import torch

    rows: list[list[Any]] = [[]]
    room = max_tokens
    for document in documents:
        if len(document) > room:
            rows.append([])
            room = max_tokens
        rows[-1].append(document)
        room -= len(document)
    shape = len(rows), max_tokens
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, _IGNORED)
    numbers = torch.full(shape, -1, dtype=torch.int32)
    bounds = [0]
    for row, members in enumerate(rows):
        start = 0
        for number, document in enumerate(members):
            stop = start + len(document)
            ids[row, start:stop] = document
            labels[row, start + 1 : stop] = document[1:]
            positions[row, start:stop] = torch.arange(len(document))
            numbers[row, start:stop] = number
            bounds.append(row * max_tokens + stop)
            start = stop
        if start < max_tokens:
            positions[row, start:] = torch.arange(max_tokens - start)
            bounds.append((row + 1) * max_tokens)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "document_ids": numbers,
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
    }


def lengths_for(size: Size) -> NDArray[np.int64]:
    """Return the lengths of the documents."""
    drawn = np.random.default_rng(0).lognormal(np.log(300), 1.18, size.num_tokens // 300)
    lengths = np.clip(drawn.astype(np.int64), 1, size.max_tokens)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), size.num_tokens))]


def load(size: Size, library: Literal["torch", "penstock"], kind: str, num_workers: int) -> Reading:
    """Load an epoch after one that is checked."""
    from penstock.sampling import PackingSampler
    from penstock.text import PackedCollate, TokenFile

    lengths = lengths_for(size)
    bounds = np.append(0, np.cumsum(lengths))
    tokens = np.random.default_rng(1).integers(1, 50_000, bounds[-1], np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/tokens"
        TokenFile.write(file, np.split(tokens, bounds[1:-1]), np.uint16)
        plain = Path(folder) / "plain"
        tokens.tofile(plain)
        mapped = np.memmap(plain, np.uint16, "r")
        ours = TokenFile(file)
        options: dict[str, Any]
        if kind == "blocks":
            edges = np.arange(0, bounds[-1] + 1, size.max_tokens)
            dataset = (
                ours.blocks(size.max_tokens) if library == "penstock" else Mapped(mapped, edges)
            )
            options = {"batch_size": _ROWS, "shuffle": True}
        else:
            sampler = PackingSampler(lengths, size.max_tokens, _ROWS, seed=3)
            dataset = ours if library == "penstock" else Mapped(mapped, bounds)
            by_hand = partial(packed_by_hand, size.max_tokens)
            collate = PackedCollate(size.max_tokens) if library == "penstock" else by_hand
            options = {"batch_sampler": sampler, "collate_fn": collate}
        loader = data_loader(library)(
            dataset, num_workers=num_workers, persistent_workers=num_workers > 0, **options
        )
        seen = _checked(loader, kind, Mapped(tokens, bounds), size)
        num_batches = 0
        with Meter() as meter:
            for batch in loader:
                for tensor in batch.values() if kind == "rows" else [batch]:
                    _ = tensor.reshape(-1)[-1].item() if hasattr(tensor, "reshape") else tensor
                num_batches += 1
        return Reading.of(meter, seen / meter.wall_s / 1e6, num_batches)


def _checked(loader: Any, kind: str, documents: Mapped, size: Size) -> int:  # noqa: ANN401
    """Load an epoch; return its tokens."""
    import torch

    num_tokens = 0
    sums = 0
    for batch in loader:
        ids = batch["input_ids"] if kind == "rows" else batch
        if kind == "rows":
            num_tokens += int((batch["document_ids"] >= 0).sum())
            starts = (batch["position_ids"] == 0).flatten().nonzero().flatten()
            check(torch.equal(starts, batch["cu_seqlens"][:-1].long()), "sequences begin elsewhere")
            rest = batch["labels"] != _IGNORED
            check(torch.equal(batch["labels"][rest], ids[rest]), "labels are other tokens")
            check(int(rest.sum()) > 0.9 * int((ids > 0).sum()), "labels are missing")
        else:
            num_tokens += ids.numel()
        sums += int(ids.sum())
    whole = documents._tokens.astype(np.int64)
    if kind == "rows":
        check(num_tokens == len(whole), "not every token came once")
        check(sums == int(whole.sum()), "other tokens came")
    else:
        rest = len(whole) % size.max_tokens
        check(sums == int(whole[: len(whole) - rest].sum()), "other tokens came")
    return num_tokens


def peer(size: Size, way: str, num_workers: int) -> Reading:
    """Have a peer load in its own environment."""
    bounds = np.append(0, np.cumsum(lengths_for(replace(size, num_tokens=size.num_for_peers))))
    tokens = np.random.default_rng(1).integers(1, 50_000, bounds[-1], np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "tokens.npy"), tokens)
        np.save(Path(folder, "bounds.npy"), bounds)
        command = [peers_python(), str(_HERE / "_token_peers.py"), way, folder]
        command += map(str, (size.max_tokens, _ROWS, num_workers))
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Reading(**json.loads(done.stdout.splitlines()[-1]))


CONTENDERS: dict[str, Callable[[Size], Reading]] = {
    f"{library}{', blocks' if kind == 'blocks' else ''}, {num_workers} workers": partial(
        load, library=library, kind=kind, num_workers=num_workers
    )
    for kind in ("rows", "blocks")
    for num_workers in (0, 2)
    for library in ("torch", "penstock")
} | {
    f"{way}, {num_workers} workers": partial(peer, way=way, num_workers=num_workers)
    for num_workers in (0, 2)
    for way in _NEEDS
}

BENCHMARK = PeersBenchmark(
    file=__file__,
    needs=_NEEDS,
    unit="M tokens/s",
    better="higher",
    contenders=CONTENDERS,
    full=Size(num_tokens=20_000_000, max_tokens=8192, num_for_peers=5_000_000),
    smoke=Size(num_tokens=200_000, max_tokens=1024, num_for_peers=200_000),
    targets=[
        Target(name, name.replace("penstock", other), at_least=1.0)
        for name in CONTENDERS
        if name.startswith("penstock")
        for other in ("torch", *_NEEDS)
        if name.replace("penstock", other) in CONTENDERS
    ],
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
