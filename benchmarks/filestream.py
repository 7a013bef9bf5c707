# SPDX-License-Identifier: Apache-2.0
"""How fast do compressed files of JSON lines come, shuffled, and how long does a resume take?

Question
    200,000 records in 16 or 7 files, compressed by gzip or Zstandard, can only be read from front
    to back. How many come per second in batches of 32, how much more is decompressed than is
    needed, and how long does it take to go on near the end of an epoch?

Method
    About 200 MB of JSON lines, in files of unequal size (1 to 3). Batches are lists of 32 dicts.
    All shuffle among 8,192 records (of 7 files, Penstock among 4,096).

    penstock       `penstock.torch.DataLoader` over `FileStream` and `LaneBatchSampler`, with its
                   default options. The records were counted before ("count s").
    torch          torch's `DataLoader` over what one writes by hand: an iterable dataset that
                   shuffles the files, deals them out to workers, and has a buffer in each.
    hf             Hugging Face's `load_dataset("json", streaming=True)`, `.shuffle(buffer_size=)`,
                   in torchdata's `StatefulDataLoader`.

    No workers, or 2. One epoch is timed, after one in which is checked that every record comes
    once. "read / needed" is the bytes that were decompressed in that one, per byte of the files.
    "resume s" is the time to begin anew at 9/10 of an epoch, up to the first batch: from a state;
    in torch's case by reading up to there. "same batch" is 1 if it is the batch that came there.

    hf runs in another environment: --peers /path/to/its/python, or PENSTOCK_BENCH_PEERS. It is left
    out where its packages are missing.

Left out
    Tokenizing, and reading from a disk: the files are in the page cache.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6; datasets 5.2.0, torchdata 0.11.0

Command
    python benchmarks/filestream.py --peers PYTHON --save

Result
    2026-11-27, 1 round, each contender run by itself (--contender), beside another program that
    used up to a core; records/s:

                                records/s    CPU s   read / needed   resume s   same batch
    gzip, 16 files, no workers
    torch                          71,300      2.8            1.00       3.08          yes
    penstock                       63,100      3.2            1.22       0.17          yes
    gzip, 16 files, 2 workers
    torch                          30,000      5.0            1.00       6.95          yes
    penstock                       36,800      5.4            1.36       0.51          yes
    gzip, 7 files, no workers
    torch                          76,900      2.5            1.00       2.64          yes
    penstock                       97,700      2.0            1.17       0.16          yes
    gzip, 7 files, 2 workers
    torch                          45,300      4.4            1.00       4.78          yes
    penstock                       41,900      4.8            1.26       0.39          yes
    Zstandard, 16 files, no workers
    torch                          92,500      2.2            1.00       1.43          yes
    penstock                      141,100      1.4            1.22       0.07          yes
    Zstandard, 16 files, 2 workers
    torch                          92,500      3.3            1.00       3.10          yes
    penstock                       67,300      3.0            1.36       0.18          yes
    Zstandard, 7 files, no workers
    torch                         153,600      1.3            1.00       1.23          yes
    penstock                      148,900      1.3            1.17       0.07          yes
    Zstandard, 7 files, 2 workers
    torch                          44,000      4.5            1.00       3.85          yes
    penstock                       65,100      3.0            1.26       0.22          yes

    Over the eight, Penstock has 0.73 to 1.53 of the records/s of what is written by hand, and takes
    0.64 to 1.14 of its CPU seconds: both decompress and parse in the same libraries. Penstock
    decompresses some files up to where a lane begins, and finds records by their numbers. A resume
    takes 1/12 to 1/20 of the time near the end of an epoch of 6,250 steps. By hand, it takes
    longer the longer the epoch, and needs the same number of workers. Counting took 0.4 to 1.4 s.
    States: 478 bytes.

    In an earlier run, hf had 30,300 records/s of gzip without workers and 17,600 with 2, 7.3 and
    11.9 KB of state, and took 1.1 s to resume. After a resume it fills its buffer anew, so other
    records come; with 2 workers its state does not load (IndexError in datasets 5.2.0).

What it does not show
    Several machines: there, what each rank reads in vain counts more than CPU.
"""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _meter import Meter
from _peers import PeersBenchmark, peers_python
from _runner import Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BATCH: Final = 32
_BUFFER: Final = 8192
_NEEDS: Final = ("datasets", "torchdata", "zstandard", "psutil")
_MARK: Final = "READING "  # as the runner's
_WORDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """How much is loaded."""

    num_records: int


def files_for(size: Size, suffix: str, num_files: int) -> list[str]:
    """Return the paths of the files; they are made once, and stay in the temporary folder."""
    folder = Path(tempfile.gettempdir(), f"penstock-filestream-{size.num_records}-{num_files}")
    paths = [folder / f"{number:02}.jsonl{suffix}" for number in range(num_files)]
    if not paths[-1].exists():
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(num_files)
        words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(3000)]
        text = " ".join(words[k] for k in np.minimum(rng.zipf(1.2, _WORDS), 3000) - 1)
        weights = rng.uniform(1, 3, num_files)
        stops = (np.cumsum(weights / weights.sum()) * size.num_records).round().astype(int)
        starts = [0, *stops[:-1].tolist()]
        for path, start, stop in zip(paths, starts, stops.tolist(), strict=True):
            places = rng.integers(0, len(text) - 2000, stop - start).tolist()
            lengths = rng.integers(300, 1600, stop - start).tolist()
            lines = [
                json.dumps({"id": number, "text": text[place : place + length]})
                for number, place, length in zip(range(start, stop), places, lengths, strict=True)
            ]
            partial_path = path.with_suffix(".partial")
            partial_path.write_bytes(_compressed(suffix, "\n".join([*lines, ""]).encode()))
            partial_path.rename(path)
    return list(map(str, paths))


def _compressed(suffix: str, data: bytes) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data, 6)
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def _open(path: str) -> Any:  # noqa: ANN401
    if path.endswith(".gz"):
        return gzip.open(path)
    import zstandard

    return io.BufferedReader(zstandard.open(path))


class ByHand:
    """An iterable dataset with a shuffle buffer, whose files are dealt out to workers."""

    def __init__(self, paths: list[str], num_bytes: Any) -> None:  # noqa: ANN401
        """Keep the paths, and where to count what is decompressed."""
        self._paths, self._num_bytes = paths, num_bytes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield records in random order."""
        import random

        from torch.utils.data import get_worker_info

        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        rng = random.Random(3)
        paths = self._paths.copy()
        rng.shuffle(paths)
        buffer: list[dict[str, Any]] = []
        for path in paths[worker::num_workers]:
            with _open(path) as file:
                num_bytes = 0
                for line in file:
                    num_bytes += len(line)
                    record = json.loads(line)
                    if len(buffer) < _BUFFER:
                        buffer.append(record)
                        continue
                    place = rng.randrange(_BUFFER)
                    yield buffer[place]
                    buffer[place] = record
            with self._num_bytes.get_lock():
                self._num_bytes.value += num_bytes
        rng.shuffle(buffer)
        yield from buffer


def torch(size: Size, suffix: str, num_files: int, num_workers: int) -> Reading:
    """Load what is written by hand."""
    from torch.utils.data import IterableDataset

    paths = files_for(size, suffix, num_files)
    num_bytes = multiprocessing.Value("q", 0)
    dataset = type("Stream", (ByHand, IterableDataset), {})(paths, num_bytes)

    def make() -> Any:  # noqa: ANN401
        return data_loader("torch")(
            dataset,
            _BATCH,
            num_workers=num_workers,
            collate_fn=list,
            persistent_workers=num_workers > 0,
        )

    def resumed(step: int, _: Any) -> Any:  # noqa: ANN401
        batches = iter(make())
        for _ in range(step):
            next(batches)
        return next(batches)

    return measured(size, make(), num_bytes, paths, resumed)


def penstock(size: Size, suffix: str, num_files: int, num_workers: int) -> Reading:
    """Load a `FileStream`."""
    import penstock.data.file_formats as formats
    from penstock.data import FileStream
    from penstock.sampling import LaneBatchSampler

    paths = files_for(size, suffix, num_files)
    num_bytes = multiprocessing.Value("q", 0)
    unpacked = formats.unpacked

    def counting(*arguments: Any) -> Iterator[bytes]:  # noqa: ANN401
        for block in unpacked(*arguments):
            with num_bytes.get_lock():
                num_bytes.value += len(block)
            yield block

    start_s = time.perf_counter()
    stream = FileStream(paths, "jsonl")
    counted_s = time.perf_counter() - start_s
    formats.unpacked = counting  # type: ignore[assignment]

    def make() -> Any:  # noqa: ANN401
        return data_loader("penstock")(
            stream,
            batch_sampler=LaneBatchSampler(stream, _BATCH, seed=3),
            num_workers=num_workers,
            collate_fn=list,
            persistent_workers=num_workers > 0,
        )

    def resumed(_: int, state: Any) -> Any:  # noqa: ANN401
        loader = make()
        loader.load_state_dict(state)
        return next(iter(loader))

    reading = measured(size, make(), num_bytes, paths, resumed)
    return replace(reading, more={**reading.more, "count s": counted_s})


def hf(size: Size, suffix: str, num_files: int, num_workers: int) -> Reading:
    """Load Hugging Face's stream, in its own environment."""
    paths = files_for(size, suffix, num_files)
    if os.environ.get("PENSTOCK_BENCH_INSIDE") is None:
        name = f"hf, {suffix[1:]}, {num_files} files, {num_workers} workers"
        command = [peers_python(), __file__, "--contender", name]
        if size == BENCHMARK.smoke:
            command.append("--smoke")
        inside = {**os.environ, "PENSTOCK_BENCH_INSIDE": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=inside)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(_MARK))
        fields = json.loads(line.removeprefix(_MARK))
        del fields["round"]
        return Reading(**fields)

    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader

    stream = datasets.load_dataset("json", data_files=paths, split="train", streaming=True)
    stream = stream.shuffle(seed=3, buffer_size=_BUFFER)

    def make() -> Any:  # noqa: ANN401
        return StatefulDataLoader(
            stream,
            _BATCH,
            num_workers=num_workers,
            collate_fn=list,
            persistent_workers=num_workers > 0,
        )

    def resumed(_: int, state: Any) -> Any:  # noqa: ANN401
        loader = make()
        loader.load_state_dict(state)
        try:
            return next(iter(loader))
        except IndexError:  # datasets 5.2.0 with workers does not take its own state
            return None

    return measured(size, make(), None, paths, resumed)


def measured(
    size: Size,
    loader: Any,  # noqa: ANN401
    num_bytes: Any,  # noqa: ANN401
    paths: list[str],
    resumed: Callable[[int, Any], Any],
) -> Reading:
    """Load an epoch that is checked, one that is timed, and go on in one."""
    step = size.num_records // _BATCH * 9 // 10
    seen = np.zeros(size.num_records, np.int64)
    state = expected = None
    for number, batch in enumerate(loader):
        ids = [record["id"] for record in batch]
        seen[ids] += 1
        if number == step - 1 and hasattr(loader, "state_dict"):
            state = loader.state_dict()
        if number == step:
            expected = ids
    check((seen == 1).all(), f"{np.count_nonzero(seen != 1)} records did not come once")
    more = {}
    if num_bytes is not None:
        needed = sum(len(line) for path in paths for line in _open(path))
        more["read / needed"] = num_bytes.value / needed
    num_records = num_batches = 0
    with Meter() as meter:
        for batch in loader:
            num_records += len(batch)
            num_batches += 1
    check(num_records == size.num_records, "records are missing")
    del loader
    if state is not None:
        more["state bytes"] = float(len(json.dumps(state, default=repr)))
    start_s = time.perf_counter()
    batch = resumed(step, state)
    more["resume s"] = float("nan") if batch is None else time.perf_counter() - start_s
    more["same batch"] = float(bool(batch) and [record["id"] for record in batch] == expected)
    return Reading.of(meter, num_records / meter.wall_s, num_batches, more)


BENCHMARK = PeersBenchmark(
    file=__file__,
    needs={"hf": _NEEDS},
    unit="records/s",
    better="higher",
    contenders={
        f"{run.__name__}, {suffix[1:]}, {num_files} files, {num_workers} workers": partial(
            run, suffix=suffix, num_files=num_files, num_workers=num_workers
        )
        for suffix in (".gz", ".zst")
        for num_files in (16, 7)
        for num_workers in (0, 2)
        for run in (torch, penstock, hf)
    },
    full=Size(num_records=200_000),
    smoke=Size(num_records=2_000),
    targets=[
        target
        for suffix in ("gz", "zst")
        for num_files in (16, 7)
        for num_workers in (0, 2)
        for what in (f", {suffix}, {num_files} files, {num_workers} workers",)
        for target in (
            Target(f"penstock{what}", f"torch{what}", at_least=1.0),
            Target(f"penstock{what}", f"torch{what}", at_most=0.2, figure="resume s"),
        )
    ],
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
