# SPDX-License-Identifier: Apache-2.0
"""How fast do data come from far object storage, at what cost, and what does a local cache bring?

Question
    2,000 samples of 60 to 140 kB (200 MB), shuffled, batches of 32, 2 workers, 3 epochs, from a
    server of objects that is 5, 20 or 80 ms away and has 50 or 500 MB/s: samples per second,
    seconds to the first batch, requests, bytes fetched over bytes needed, CPU and memory; and the
    same with a cache on this machine for 30, 60 or 100 % of the data.

Method
    The server (_far_server.py) is a process of its own on loopback. 2 % of the requests take five
    times as long; all connections share one bandwidth. It counts requests and bytes. A contender
    (_remote_loaders.py) has a process, a server and an empty cache of its own.

    penstock            `Loader` over `StoreDataset("s3://...")`, a store of shards.
    penstock, 60 %      With `local_cache=` of that size: the record needed last is evicted.
    penstock, LRU, 60 % With `eviction="lru"`: the record read longest ago is evicted.
    torch, boto3        torch's `DataLoader`, one object per sample, read in `__getitem__`; also
                        with 16 workers, which hide latency.
    torch, obstore      The same, with the library that Penstock uses.
    streaming, litdata  MosaicML's and Lightning's, in 50 shards (their defaults would make 3 of
                        these data), with `cache_limit` or `max_cache_size` of that size.
    webdataset          50 tar files, over plain HTTP; a shuffle buffer of a fourth of the samples.
    huggingface         `datasets` streaming 50 Parquet files, the same buffer.

    Samples are packed in mixed order. Each sample's bytes are checked, and that it comes once per
    epoch. The first epoch includes opening the data and starting the workers. Memory is the sum of
    the proportional sizes (PSS) of the contender's processes, measured twice a second.

    "of optimum" is the bytes fetched in epochs 2 and 3, divided by the least possible with a cache
    of that size and the order in which the samples came. The least is by Belady's rule: the sample
    needed last is evicted, or not kept at all. (If sizes differ, that is close to the least.) "LRU
    / optimum" is the same for a simulated LRU cache. Both fetch single samples. What workers have
    read ahead is outside the cache. If that is much of the data, a contender can fetch less than
    the optimum.

    A peer whose run ends with an error is tried three times; "failed runs" says how many failed.
    Peers may be in another environment: --peers /path/to/its/python, or PENSTOCK_BENCH_PEERS. A
    contender whose packages are missing is left out, and named.

Left out
    Packing. The time of the server, which uses the same cores.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/remote.py --latency-ms 20 --mbs 50 --peers PYTHON --save

Result
    2026-11-27, 2,000 samples, 1 round, with --only these; samples/s in epoch 1 / in 2 and 3:

                               20 ms, 50 MB/s    80 ms, 500 MB/s   5 ms, 500 MB/s    PSS MB
    penstock                      363 / 423         226 / 250      1,590 / 2,360        144
    penstock, 10 %                418 / 577         368 / 395        958 / 1,390        189
    penstock, 30 %                416 / 773                                             183
    penstock, 60 %                414 / 1,482       602 / 1,382    1,220 / 3,540        186
    penstock, 100 %               424 / 6,370                                           182
    penstock, LRU, 30 %           417 / 520                                             193
    penstock, LRU, 60 %           421 / 613                                             184
    torch, boto3, 16 workers      307 / 428                                             864
    litdata, 30 %                 354 / 441                                             872
    litdata, 60 %                 374 / 453         627 / 1,160    1,250 / 2,490        976
    litdata, 100 %                388 / 4,040                                           932
    webdataset                    388 / 408         547 / 710      1,590 / 1,940        429

    Bytes fetched in epochs 2 and 3 over the least (Belady) with a cache of that size, in every
    place alike: 0.91 (10 %), 0.88 (30 %), 0.80 (60 %); by LRU 1.32 (30 %), 1.78 (60 %), where a
    plain LRU cache without room for reading ahead takes 1.35 and 1.92; LitData 1.43 (30 %), 2.50
    (60 %). Below 1: 16 MiB come on top for what is read ahead, 8 % of these data. With them in the
    cache's size, the least at 60 % is 0.316 of the data an epoch, and 0.319 was fetched.

    50 MB/s are 500 samples/s. Without a cache nothing is read ahead: two workers wait for single
    requests, which at 80 ms is what counts. A cache of 10 % reads ahead, but its records need the
    room. In the first epoch, WebDataset and Penstock without a cache are ahead at 5 ms: the cache
    costs 0.6 ms of CPU time a sample, and the server takes its part of the two cores.

    Earlier, of 500 samples on a machine that ran other programs, samples/s at 20 ms and 50 MB/s:
    torch with boto3 70 / 67, with obstore 73 / 75; huggingface 46 / 75 (it sleeps 5 s at the end of
    each epoch). Streaming at 30 % came to no end within two minutes; at 60 and 100 % it was not
    run. Penstock's memory has no torch in it; the others need that. What is read ahead over the end
    of an epoch counts in the epoch in which it is fetched.

What it does not show
    A real store: its limits per prefix, TLS, and the round trips that a new connection takes.
    Several machines. Decoding. Data many times larger than memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from _meter import tree_memory_bytes
from _peers import add_peers, missing_modules, peers_python, use_peers
from _remote_loaders import MARK, WAYS, Job, sizes_of
from _runner import Benchmark, Reading, Target, write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

_HERE: Final = Path(__file__).parent
_SIZE: Final = "PENSTOCK_BENCH_REMOTE"  # the size of the run, for the contenders' processes
_LOOK_EVERY_S: Final = 0.5
_MOST_TIMES: Final = 3  # a peer whose run fails is tried
_FAR: Final = 1 << 62  # a next use that never comes


@dataclass(frozen=True, slots=True)
class Size:
    """How much is loaded, and from how far.

    Attributes:
        num_samples: Of 100 kB each.
        latency_ms: From a request to the first byte of the answer.
        mbs: MB/s of all connections together.
        data: Where formats are packed and kept; "" is a folder of this run.
    """

    num_samples: int = 2000
    latency_ms: float = 20.0
    mbs: float = 50.0
    data: str = ""
    num_epochs: int = 3
    batch_size: int = 32


# ---------------------------------------------------------------- what a cache could do


def optimal_bytes(orders: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> int:
    """Return the least bytes fetched after the first epoch, with a cache of `capacity` bytes.

    When it is full, the sample needed last is evicted; that may be the one just fetched.

    Args:
        orders: The samples of each epoch, in the order in which they are needed.
        sizes: Bytes of each sample.
        capacity: Bytes.
    """
    needed = [sample for order in orders for sample in order]
    next_use = [_FAR] * len(needed)
    seen: dict[int, int] = {}
    for time in range(len(needed) - 1, -1, -1):
        next_use[time] = seen.get(needed[time], _FAR)
        seen[needed[time]] = time
    kept: dict[int, int] = {}  # sample -> its next use
    farthest: list[tuple[int, int]] = []  # (-next use, sample), also of uses that are over
    used = fetched = 0
    for time, (sample, later) in enumerate(zip(needed, next_use, strict=True)):
        if kept.pop(sample, None) is None:
            fetched += sizes[sample] if time >= len(orders[0]) else 0
        else:
            used -= sizes[sample]
        if later == _FAR:
            continue
        kept[sample] = later
        used += sizes[sample]
        heapq.heappush(farthest, (-later, sample))
        while used > capacity:
            use, last = heapq.heappop(farthest)
            if kept.get(last) == -use:
                del kept[last]
                used -= sizes[last]
    return fetched


def lru_bytes(orders: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> int:
    """Return the same as `optimal_bytes`, if the sample used longest ago is evicted."""
    kept: OrderedDict[int, None] = OrderedDict()
    used = fetched = 0
    for number, order in enumerate(orders):
        for sample in order:
            if sample in kept:
                kept.move_to_end(sample)
                continue
            fetched += sizes[sample] if number else 0
            kept[sample] = None
            used += sizes[sample]
            while used > capacity:
                used -= sizes[kept.popitem(last=False)[0]]
    return fetched


# ---------------------------------------------------------------- one contender


def load(
    size: Size, way: str, percent: int = 0, num_workers: int = 2, eviction: str = "foresight"
) -> Reading:
    """Pack if necessary, start a server, and load in a process of its own."""
    sizes = sizes_of(size.num_samples).tolist()
    # A cache "of all" has room for what a format adds.
    capacity = sum(sizes) * (105 if percent == 100 else percent) // 100
    with _data(size) as data:
        job = Job(
            way=way,
            data=data,
            endpoint="",
            num_samples=size.num_samples,
            num_epochs=size.num_epochs,
            batch_size=size.batch_size,
            num_workers=num_workers,
            cache="",
            cache_bytes=capacity,
            eviction=eviction,
        )
        with tempfile.TemporaryDirectory() as scratch:
            _run(job, scratch)
        epochs, peak_bytes, num_failed = _measured(size, job)
    if not epochs:
        return Reading(0.0, 0.0, 0.0, 1, {"failed runs": float(num_failed)}, {})
    needed = sum(sizes)
    num = size.num_samples
    series = {
        "samples/s": [num / epoch["wall_s"] for epoch in epochs],
        "first batch s": [epoch["first_s"] for epoch in epochs],
        "GETs/sample": [epoch["gets"] / num for epoch in epochs],
        "other requests": [float(epoch["others"]) for epoch in epochs],
        "fetched/needed": [epoch["bytes"] / needed for epoch in epochs],
        "CPU s": [epoch["cpu_s"] for epoch in epochs],
    }
    more = {
        "peak PSS MB": peak_bytes / 1e6,
        "later samples/s": _rate(epochs[1:], num),
        "failed runs": float(num_failed),
    }
    orders = [epoch["order"] for epoch in epochs]
    if percent:
        optimum = optimal_bytes(orders, sizes, capacity)
        # With room for all there is nothing to fetch: then the share of the data is told.
        fetched = sum(epoch["bytes"] for epoch in epochs[1:])
        least = optimum or needed
        more["of optimum"] = fetched / least
        more["LRU / optimum"] = lru_bytes(orders, sizes, capacity) / least
    wall_s, cpu_s = (sum(epoch[name] for epoch in epochs) for name in ("wall_s", "cpu_s"))
    num_batches = sum(epoch["num_batches"] for epoch in epochs)
    return Reading(_rate(epochs, num), wall_s, cpu_s, num_batches, more, series)


def _measured(size: Size, job: Job) -> tuple[list[dict[str, Any]], int, int]:
    """Return epochs, most memory, and how many runs failed before: some peers sometimes fail.

    There are no epochs if all runs of a peer failed; the other contenders go on.
    """
    for num_failed in range(_MOST_TIMES):
        with tempfile.TemporaryDirectory() as scratch, _server(size, job.data) as endpoint:
            cache = Path(scratch) / "cache"
            cache.mkdir()
            try:
                done = _run(dataclasses.replace(job, endpoint=endpoint, cache=str(cache)), scratch)
            except RuntimeError as error:
                if job.way == "penstock":
                    raise
                write(str(error), to=sys.stderr)
            else:
                return *done, num_failed
    return [], 0, _MOST_TIMES


def _rate(epochs: Sequence[Mapping[str, Any]], num_samples: int) -> float:
    wall_s: float = sum(epoch["wall_s"] for epoch in epochs)
    return num_samples * len(epochs) / wall_s


def _python(way: str) -> str:
    return sys.executable if way == "penstock" else peers_python()


@contextlib.contextmanager
def _data(size: Size) -> Iterator[str]:
    if size.data:
        yield f"{size.data}/{size.num_samples}"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@contextlib.contextmanager
def _server(size: Size, data: str) -> Iterator[str]:
    """Start a server; it ends with the block."""
    command = [sys.executable, str(_HERE / "_far_server.py"), data]
    command += ["--latency-ms", str(size.latency_ms), "--mbs", str(size.mbs)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


def _run(job: Job, scratch: str) -> tuple[list[dict[str, Any]], int]:
    """Run a contender; return its epochs, and the most memory that its processes took."""
    env = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": job.endpoint,
        "S3_ENDPOINT_URL": job.endpoint,  # MosaicML's
        "AWS_CONFIG_FILE": os.devnull,
        "TMPDIR": scratch,  # Streaming leaves files of its locks there
        "HF_HUB_OFFLINE": "1",
    }
    command = [_python(job.way), str(_HERE / "_remote_loaders.py")]
    command.append(json.dumps(dataclasses.asdict(job)))
    peak_bytes, is_over = 0, threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:

        def look() -> None:
            nonlocal peak_bytes
            while not is_over.wait(_LOOK_EVERY_S):
                peak_bytes = max(peak_bytes, tree_memory_bytes(process.pid))

        looker = threading.Thread(target=look)
        looker.start()
        assert process.stdout is not None
        lines = list(process.stdout)
        is_over.set()
        looker.join()
    if process.returncode:
        raise RuntimeError(f"{job.way} ended with exit code {process.returncode}")
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)], (
        peak_bytes
    )


# ---------------------------------------------------------------- all of them


def _has_cache() -> bool:
    """Return whether this release of Penstock has `local_cache=`."""
    from penstock.errors import ConfigError
    from penstock.stores import open_store

    with tempfile.TemporaryDirectory() as folder:
        try:
            open_store("s3://bucket/shards", local_cache=f"{folder}:1MB").close()
        except ConfigError as error:
            if "no option" not in str(error):
                raise
            return False
    return True


class Remote(Benchmark[Size]):
    """Takes a distance, leaves out contenders that are not installed, and shows each epoch."""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run from the command line, with the options of a size."""
        options = self._parser().parse_args(arguments)
        if options.contender or options.list:
            return super().main(arguments)
        use_peers(options)
        contenders = self._contenders_here()
        with tempfile.TemporaryDirectory() as folder:
            base = self.smoke if options.smoke else self.full
            size = dataclasses.replace(
                base,
                data=options.data or folder,
                latency_ms=options.latency_ms or base.latency_ms,
                mbs=options.mbs or base.mbs,
                num_samples=options.samples or base.num_samples,
            )
            os.environ[_SIZE] = json.dumps(dataclasses.asdict(size))
            shown = dataclasses.replace(size, data="")
            here = dataclasses.replace(self, contenders=contenders, full=shown)
            return super(Remote, here).main(arguments)

    def _contenders_here(self) -> dict[str, Callable[[Size], Reading]]:
        missing = {
            way: ", ".join(missing_modules(_python(way), given.needs))
            for way, given in WAYS.items()
        }
        has_cache = not missing["penstock"] and _has_cache()
        found = {}
        for name, contender in self.contenders.items():
            lacks = missing[_ways[name]]
            if not lacks and _ways[name] == "penstock" and "%" in name and not has_cache:
                lacks = "local_cache="
            if lacks:
                write(f"left out: {name}, for want of {lacks}", to=sys.stderr)
            else:
                found[name] = contender
        return found

    def _parser(self) -> argparse.ArgumentParser:
        parser = super()._parser()
        parser.add_argument("--latency-ms", type=float, help="to the first byte of an answer")
        parser.add_argument("--mbs", type=float, help="bandwidth in MB/s")
        parser.add_argument("--samples", type=int, help="of 100 kB each")
        add_peers(parser)
        parser.add_argument("--data", metavar="FOLDER", help="keeps what was packed, for a rerun")
        return parser

    def _run(
        self, name: str, number: int, *, smoke: bool, watch_memory: bool = False
    ) -> tuple[Reading, int]:
        # Its own processes are watched in each run: from outside the server would be counted too.
        if watch_memory:
            peak_mb = self._last[name].more.get("peak PSS MB", 0.0)
            return self._last[name], round(peak_mb * 1e6)
        reading, _ = super()._run(name, number, smoke=smoke)
        self._last[name] = reading
        return reading, 0

    _last: Final[dict[str, Reading]] = {}

    def _remarks(self, readings: Mapping[str, Sequence[Reading]]) -> list[str]:
        titles = max((list(runs[-1].series) for runs in readings.values()), key=len)
        lines = [
            f"\n{self.full.latency_ms:g} ms, {self.full.mbs:g} MB/s; the last round, by epoch:\n",
            f"| contender | epoch | {' | '.join(titles)} |",
            f"|{'---|' * (len(titles) + 2)}",
        ]
        for name, runs in readings.items():
            for number, values in enumerate(zip(*runs[-1].series.values(), strict=True)):
                cells = " | ".join(f"{value:.3g}" for value in values)
                lines.append(f"| {name if number == 0 else ''} | {number + 1} | {cells} |")
            if not runs[-1].series:
                lines.append(f"| {name} | failed {'| ' * len(titles)}|")
        return lines

    def _save(
        self, readings: Mapping[str, Sequence[Reading]], peaks_bytes: Mapping[str, int]
    ) -> None:
        super()._save(readings, peaks_bytes)
        path = _HERE / "results" / "remote.json"
        name = f"remote-{self.full.latency_ms:g}ms-{self.full.mbs:g}MBs.json"
        write(f"renamed results/{path.replace(path.with_name(name)).name}", to=sys.stderr)


_PERCENTS: Final = (30, 60, 100)
_ways: dict[str, str] = {}  # contender -> its way


def _contenders() -> dict[str, Callable[[Size], Reading]]:
    found: dict[str, Callable[[Size], Reading]] = {}

    def add(name: str, way: str, **more: Any) -> None:  # noqa: ANN401
        found[name] = partial(load, way=way, **more)
        _ways[name] = way

    add("penstock", "penstock")
    for percent in (10, *_PERCENTS):
        add(f"penstock, {percent} %", "penstock", percent=percent)
    for percent in _PERCENTS[:2]:
        add(f"penstock, LRU, {percent} %", "penstock", percent=percent, eviction="lru")
    add("torch, boto3", "boto3")
    add("torch, boto3, 16 workers", "boto3", num_workers=16)
    add("torch, obstore", "obstore")
    for library, way in (("streaming", "mosaic"), ("litdata", "litdata")):
        for percent in _PERCENTS:
            add(f"{library}, {percent} %", way, percent=percent)
    add("webdataset", "webdataset")
    add("huggingface", "huggingface")
    return found


def _given(base: Size) -> Size:
    """Return the size that the parent process gives, or `base`."""
    told = os.environ.get(_SIZE)
    return Size(**json.loads(told)) if told else base


BENCHMARK = Remote(
    file=__file__,
    unit="samples/s",
    better="higher",
    contenders=_contenders(),
    full=_given(Size()),
    smoke=_given(Size(num_samples=200, latency_ms=2.0, mbs=500.0, batch_size=8)),
    targets=[
        Target("penstock", "torch, boto3"),
        Target("penstock", "torch, boto3, 16 workers"),
        Target("penstock", "torch, obstore"),
        *(
            Target(f"penstock, {percent} %", f"{library}, {percent} %", figure="later samples/s")
            for percent in _PERCENTS
            for library in ("streaming", "litdata")
        ),
        Target("penstock, 60 %", "penstock", figure="later samples/s"),
        Target("penstock, 60 %", at_most=1.1, figure="of optimum"),
        Target("penstock, LRU, 60 %", at_least=1.0, figure="of optimum"),
    ],
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
